"""Envoy between two of our node proxies: a waypoint, a sandwiched waypoint, a gateway to another network."""

from collections.abc import Callable
from functools import partial

from tests.interop.apps import COMMAND, HTTP, Reply, dial, get
from tests.interop.case import Case
from tests.interop.istio_load import Bytes, Load
from tests.interop.istio_outbound import MIB64, only_ipv4, same
from tests.interop.istio_site import IstioSite, vip
from tests.interop.proxies import eventually

_THROUGH_WAYPOINT = Bytes(lambda site: dial(site.pod("client"), site.vip("by-address"), COMMAND))
_THROUGH_GATEWAY = Bytes(lambda site: dial(site.pod("client"), site.vip("shop"), COMMAND))


def service_waypoint(site: IstioSite, service: str) -> str:
    return _through_waypoint(site, lambda: site.get(service))


def workload_waypoint(site: IstioSite) -> str:
    return _through_waypoint(site, lambda: get(site.pod("client"), site.ip("guarded"), HTTP))


def _through_waypoint(site: IstioSite, ask: Callable[[], Reply]) -> str:
    """Return what the waypoint receives, and which clients the policy of the destination pod admits."""
    envoy, mark = site.envoys["waypoint"], site.mark("guarded")
    since = envoy.log_size
    reply = ask()
    told = site.named(envoy.line(since, listener="hbone")["authority"])
    inbound = site.line("guarded", "inbound", mark, dst_workload="guarded")
    admitted = inbound["src.identity"].rpartition("/")[2]
    return f"{site.seen(reply)}, told {told}, admitted {admitted} to {site.named(inbound['dst.hbone_addr'])}"


def sandwiched(site: IstioSite, *, crossed: bool = False) -> str:
    """Return what this Envoy learns about the client, which is only the header of the PROXY protocol.

    Args:
        crossed: the service is dialled with another IP version than the one used to reach its waypoint.
    """
    envoy, mark = site.envoys["sandwich"], site.mark("server")
    since = envoy.log_size
    version = 10 - site.version if crossed else site.version
    reply = get(site.pod("client"), vip("sandwiched", version), 80)
    line = envoy.line(since)
    came = site.named(line["source"]).rpartition(":")[0]
    to, sender = site.named(line["destination"]), line["sender"].rpartition("/")[2]
    onward = site.line("server", "inbound", mark, dst_workload="server")["src.identity"].rpartition("/")[2]
    return f"{site.seen(reply)}, told {came} as {sender} to {to}, onward as {onward}"


def two_networks(site: IstioSite) -> str:
    """The outer tunnel ends at Envoy, the inner one at our proxy in the other network."""
    envoy, here, there = site.envoys["gateway"], site.mark("client"), site.mark("remote")
    since = envoy.log_size
    reply = site.get("shop")
    line = site.line("client", "outbound", here)
    inbound = site.line("remote", "inbound", there)
    told = envoy.line(since, code="200")["authority"].partition(".")[0]
    shown = (
        f"{line['dst.workload']} as {line['dst.identity'].rpartition('/')[2]} at {site.named(line['dst.addr'])}"
    )
    source = f"{inbound['src.workload']} as {inbound['src.identity'].rpartition('/')[2]}"
    return f"{site.seen(reply)}, told {told}, logged here {shown}, there {source}"


def renewed_under_load(site: IstioSite) -> str:
    """The certificate of the far proxy lives for eight seconds."""
    proxy = site.proxy("remote")

    def serial() -> str:
        (entry,) = (each for each in proxy.dump()["certificates"] if each["identity"].endswith("/remote"))
        return str(entry["certChain"][0]["serialNumber"]) if entry["certChain"] else ""

    with Load(partial(site.get, "shop")) as load:
        for _ in range(2):
            before = serial()
            if not eventually(lambda before=before: serial() not in ("", before)):
                return "not renewed"
            load.goes_on()
    return f"{load}, renewed twice"


CASES: tuple[Case[IstioSite], ...] = (
    Case(
        number="60a",
        stimulus="service with a waypoint, by address",
        run=partial(service_waypoint, service="by-address"),
        expected=same(
            "200 guarded sees waypoint, told by-address's VIP:80, admitted waypoint to guarded:9080",
        ),
    ),
    Case(
        number="60b",
        stimulus="service with a waypoint, by host name",
        run=partial(service_waypoint, service="by-hostname"),
        expected=same(
            "200 guarded sees waypoint, told by-hostname's VIP:80, admitted waypoint to guarded:9080",
        ),
    ),
    Case(
        number="60c",
        stimulus="workload with a waypoint",
        run=workload_waypoint,
        expected=same("200 guarded sees waypoint, told guarded:9080, admitted waypoint to guarded:9080"),
    ),
    Case(
        number="61a",
        stimulus="through a waypoint, client ends first",
        run=_THROUGH_WAYPOINT.client_ends_first,
        expected=same("byte-exact"),
    ),
    Case(
        number="61b",
        stimulus="through a waypoint, 64 MiB down",
        run=partial(_THROUGH_WAYPOINT.down, length=MIB64),
        expected=only_ipv4("byte-exact"),
    ),
    Case(
        number="62a",
        stimulus="sandwiched waypoint, PROXY protocol",
        run=sandwiched,
        expected=same(
            "200 server sees sandwich, told client as client to sandwiched's VIP:80, onward as sandwich",
        ),
    ),
    Case(
        number="62b",
        stimulus="... whose service is dialled by the other IP",
        run=partial(sandwiched, crossed=True),
        expected=same(
            "200 server sees sandwich, told client as client to sandwiched's VIP:80, onward as sandwich",
        ),
    ),
    Case(
        number="63a",
        stimulus="service in another network",
        run=two_networks,
        expected=same(
            "200 remote sees gateway, told shop, logged here remote as remote at gateway:15008,"
            " there client as client",
        ),
    ),
    Case(
        number="63b",
        stimulus="other network, client ends first",
        run=_THROUGH_GATEWAY.client_ends_first,
        expected=same("byte-exact"),
    ),
    Case(
        number="63c",
        stimulus="other network, server ends first",
        run=_THROUGH_GATEWAY.server_ends_first,
        expected=same("byte-exact both ways"),
    ),
    Case(
        number="63d",
        stimulus="other network, client resets",
        run=_THROUGH_GATEWAY.client_resets,
        expected=same("application sees reset"),
    ),
    Case(
        number="63e",
        stimulus="other network, 64 MiB down",
        run=partial(_THROUGH_GATEWAY.down, length=MIB64),
        expected=only_ipv4("byte-exact"),
    ),
    Case(
        number="64",
        stimulus="our certificate renewed under load",
        run=renewed_under_load,
        expected=only_ipv4("0 failed, renewed twice"),
    ),
)
