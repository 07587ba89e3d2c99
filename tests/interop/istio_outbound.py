"""Our node proxy opens tunnels, and Envoy ends them.

A captured pod dials services whose endpoints are an Envoy's applications. Columns are the versions of IP, and
node proxies of several processes.
"""

import re
from functools import partial

from tests.interop.apps import COMMAND, dial
from tests.interop.case import Case
from tests.interop.istio_load import Bytes, Load
from tests.interop.istio_site import DOMAIN, FEW_STREAMS, IstioSite, Setting
from tests.interop.proxies import eventually

COLUMNS = (Setting(version=4), Setting(version=6), Setting(version=4, workers=2))
HEADINGS = tuple(map(str, COLUMNS))
MIB64 = 64 << 20


def same(text: str) -> dict[Setting, str]:
    """Expect the same text in every column."""
    return dict.fromkeys(COLUMNS, text)


def only_ipv4(text: str) -> dict[Setting, str]:
    """What an address cannot change is shown with one version."""
    return {setting: text for setting in COLUMNS if setting.version == 4}


_BYTES = Bytes(lambda site: dial(site.pod("client"), site.vip("terminator"), COMMAND))
_FEW = Bytes(lambda site: dial(site.pod("client"), site.vip("spare"), COMMAND))


def small_request(site: IstioSite) -> str:
    envoy, mark = site.envoys["terminator"], site.mark("client")
    since = envoy.log_size
    reply = site.get("terminator")
    line = site.line("client", "outbound", mark)
    there = envoy.line(since, code="200")
    who = f"{there['peer'].rpartition('/')[2]} to {line['dst.identity'].rpartition('/')[2]}"
    return f"{site.seen(reply)}, {who}, authority {site.named(there['authority'])}"


def headers(site: IstioSite) -> str:
    """Return all headers that Envoy received, in order. Random ones are replaced by their shape."""
    envoy = site.envoys["terminator"]
    envoy.admin("/logging?http=debug", "POST")
    try:
        since = len(envoy.own_log)
        reply = site.get("terminator")
        pattern = re.compile(r"request headers complete \(end_stream=(\w+)\):\n((?:':?[\w-]+', '.*'\n)+)")
        found: list[re.Match[str]] = []
        # Asking the administrator is a request too.
        eventually(
            lambda: bool(
                found.extend(m for m in pattern.finditer(envoy.own_log, since) if "CONNECT" in m[2]) or found
            )
        )
    finally:
        envoy.admin("/logging?http=info", "POST")
    (ended, text) = found[0].groups()
    fields = re.findall(r"'(:?[\w-]+)', '(.*)'", text)
    shown = " ".join(f"{name}={_shape(site.named(value))}" for name, value in fields)
    return f"{reply.status} {'ended' if ended == 'true' else 'open'}: {shown}"


def _shape(value: str) -> str:
    value = re.sub(r"^00-[0-9a-f]{32}-[0-9a-f]{16}-00$", "00-<32>-<16>-00", value)
    return re.sub(r'^for="client:\d+"', 'for="client:<port>"', value)


def refused_by_the_application(site: IstioSite) -> str:
    envoy, mark = site.envoys["terminator"], site.mark("client")
    since = envoy.log_size
    reply = site.get("half-down")
    answered = envoy.line(since, code="503")["code"]
    return f"{site.seen(reply)}, after {answered}, error {site.error('client', 'outbound', mark)}"


def denied_by_policy(site: IstioSite) -> str:
    """403 is a verdict: nobody else is asked."""
    mark = site.mark("client")
    since = {name: site.envoys[name].log_size for name in ("terminator", "spare")}
    reply = site.get("barred")
    error = site.error("client", "outbound", mark)
    asked = sum(len(site.envoys[name].log(offset, code="403")) for name, offset in since.items())
    return f"{site.seen(reply)}, asked {asked}, {error}"


def denied_in_the_handshake(site: IstioSite) -> str:
    """Envoy refuses the certificate, which a client of TLS 1.3 learns only after its handshake.

    Its alert arrives after we have sent the request, or a reset overtakes the alert: then other endpoints are
    tried, too.
    """
    envoy, mark = site.envoys["terminator"], site.mark("stranger")
    stat = "listener.[__]_15008.ssl.fail_verify_san"
    before = envoy.stat(stat)
    reply = site.get("terminator", "stranger")
    error = site.error("stranger", "outbound", mark)
    told = "told why, or reset" if "certificate unknown" in error or error.startswith("h2 failed: ") else error
    return f"{site.seen(reply)}, {'refused' if envoy.stat(stat) > before else 'accepted'}, {told}"


def drained_under_load(site: IstioSite) -> str:
    """An Envoy that has failed its health check sends GOAWAY on every connection, while it accepts new ones."""
    envoy = site.envoys["terminator"]
    stat = "http.hbone.downstream_cx_drain_close"
    before = envoy.stat(stat)
    with Load(partial(site.get, "terminator")) as load:
        load.goes_on()
        envoy.admin("/healthcheck/fail", "POST")
        load.goes_on(200)
        envoy.admin("/healthcheck/ok", "POST")
        load.goes_on()
    drained = envoy.stat(stat) - before
    return f"{load}, {'connections' if drained else 'nothing'} drained"


def rotated_under_load(site: IstioSite) -> str:
    envoy = site.envoys["terminator"]
    stat = "listener.[__]_15008.server_ssl_socket_factory.ssl_context_update_by_sds"
    before = envoy.stat(stat)
    with Load(partial(site.get, "terminator")) as load:
        for _ in range(3):
            rotated = envoy.stat(stat)
            site.credentials.issue("terminator")
            if not eventually(lambda rotated=rotated: envoy.stat(stat) > rotated):
                return "Envoy did not take the certificate up"
            load.goes_on()
    return f"{load}, {'rotated' if envoy.stat(stat) > before else 'not rotated'}"


def few_streams(site: IstioSite) -> str:
    """Envoy allows five streams per connection: the sixth tunnel takes another one."""

    def connections() -> str:
        active = site.envoys["spare"].stat("http.hbone.downstream_cx_active")
        # Each worker has its own, and they share out tunnels as the kernel likes.
        fits = 4 <= active < 4 + site.setting.workers
        return "over as many connections as it takes" if fits else f"over {active} connections"

    return _FEW.at_once(site, 4 * FEW_STREAMS, connections)


def many_tunnels(site: IstioSite) -> str:
    def connections() -> str:
        active = site.envoys["terminator"].stat("http.hbone.downstream_cx_active")
        return "over one or two connections" if active <= 2 else f"over {active} connections"

    return _BYTES.at_once(site, 100, connections)


CASES: tuple[Case[IstioSite], ...] = (
    Case(
        number="50",
        stimulus="small request",
        run=small_request,
        expected=same(
            "200 terminator sees terminator, client to terminator, authority terminator:9080",
        ),
    ),
    Case(
        number="51",
        stimulus="all that Envoy is sent, in order",
        run=headers,
        expected=same(
            "200 open: :method=CONNECT :authority=terminator:9080"
            " baggage=k8s.cluster.name=Kubernetes,k8s.namespace.name=default,k8s.deployment.name=client,"
            f'service.name=client forwarded=for="client:<port>";host=terminator.{DOMAIN}'
            " traceparent=00-<32>-<16>-00"
        ),
    ),
    Case(number="52a", stimulus="client ends first", run=_BYTES.client_ends_first, expected=same("byte-exact")),
    Case(
        number="52b",
        stimulus="server ends first",
        run=_BYTES.server_ends_first,
        expected=same("the other direction is lost"),
    ),
    Case(number="52c", stimulus="nothing is said", run=_BYTES.nothing_said, expected=same("closed")),
    Case(
        number="52d",
        stimulus="client resets",
        run=_BYTES.client_resets,
        expected=same("application sees fin"),
    ),
    Case(
        number="52e",
        stimulus="server resets",
        run=_BYTES.server_resets,
        expected=same("client sees reset"),
    ),
    Case(
        number="53",
        stimulus="application refuses, Envoy answers 503",
        run=refused_by_the_application,
        expected=only_ipv4("200 spare sees spare, after 503, error none"),
    ),
    Case(
        number="54a",
        stimulus="policy denies, Envoy answers 403",
        run=denied_by_policy,
        expected=only_ipv4("closed, asked 1, http status: 403 Forbidden"),
    ),
    Case(
        number="54b",
        stimulus="Envoy refuses our certificate",
        run=denied_in_the_handshake,
        expected=only_ipv4("closed, refused, told why, or reset"),
    ),
    Case(
        number="55",
        stimulus="GOAWAY under load",
        run=drained_under_load,
        expected=only_ipv4("0 failed, connections drained"),
    ),
    Case(
        number="56",
        stimulus="Envoy's certificate rotated under load",
        run=rotated_under_load,
        expected=only_ipv4("0 failed, rotated"),
    ),
    Case(
        number="57a",
        stimulus="5 streams per connection",
        run=few_streams,
        expected=only_ipv4("20 byte-exact over as many connections as it takes"),
    ),
    Case(
        number="57b",
        stimulus="100 tunnels at once",
        run=many_tunnels,
        expected=only_ipv4("100 byte-exact over one or two connections"),
    ),
    Case(number="58a", stimulus="64 MiB up", run=partial(_BYTES.up, length=MIB64), expected=same("byte-exact")),
    Case(
        number="58b", stimulus="64 MiB down", run=partial(_BYTES.down, length=MIB64), expected=same("byte-exact")
    ),
)
