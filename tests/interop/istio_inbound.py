"""Envoy opens tunnels, and our node proxy terminates them.

The listeners of the dialling Envoy set the tunnels' targets, some of them wrong on purpose.
"""

import signal
from functools import partial

from tests.interop.apps import dial
from tests.interop.case import Case
from tests.interop.checklist import gone
from tests.interop.istio_load import Bytes, Load
from tests.interop.istio_outbound import MIB64, only_ipv4, same
from tests.interop.istio_site import DIALS, DOMAIN, IstioSite
from tests.interop.proxies import eventually
from tests.netns.istio import NodeProxy

_DENIED = "connection closed due to policy rejection: allow policies exist, but none allowed"
_BYTES = Bytes(lambda site: dial(site.pod("dialler"), site.ip("dialler"), DIALS["command"]))


def tunnelled(site: IstioSite, name: str) -> str:
    """A request through a tunnel that is admitted."""
    mark = site.mark("server")
    reply = site.through(name)
    line = site.line("server", "inbound", mark)
    return (
        f"{site.seen(reply)}, from {line['src.identity'].rpartition('/')[2]}, {site.named(line['dst.hbone_addr'])}"
    )


def refused(site: IstioSite, name: str, pod: str = "server") -> str:
    """Expect a refused tunnel: the answer that Envoy gets, and our log line."""
    envoy, mark = site.envoys["dialler"], site.mark(pod)
    since = envoy.log_size
    reply = site.through(name)
    there = envoy.line(since, listener=name)
    answer = there["failure"] or there["flags"]
    return f"{gone(reply.status)} {answer}: {site.error(pod, 'inbound', mark)}"


def another_request(site: IstioSite, name: str, head: bytes) -> str:
    """Send a request other than a tunnel's CONNECT."""
    mark = site.mark("server")
    with dial(site.pod("dialler"), site.ip("dialler"), DIALS[name]) as sock:
        sock.sendall(head)
        status = sock.recv(1000).split(b" ")[1].decode()
    return f"{status}: {site.error('server', 'inbound', mark)}"


def many_requests(site: IstioSite) -> str:
    """Envoy's encoder uses its dynamic table and Huffman codes. Our proxy must decode every request."""
    statuses = {site.through("server").status for _ in range(300)}
    envoy = site.envoys["dialler"]
    made, failed = (envoy.stat(f"cluster.server.upstream_cx_{what}") for what in ("total", "connect_fail"))
    over = "one connection" if made == 1 else f"{made} connections"
    return f"{' '.join(sorted(statuses))}, {over}, {failed} failed"


def many_tunnels(site: IstioSite) -> str:
    def connections() -> str:
        active = site.envoys["dialler"].stat("cluster.server.upstream_cx_active")
        return f"over {active} connections"

    return _BYTES.at_once(site, 100, connections)


def envoy_drains(site: IstioSite) -> str:
    """An Envoy that opens ten streams per connection, then closes it when they have ended."""
    with Load(partial(site.through, "ten-requests")) as load:
        load.goes_on(200)
    made = site.envoys["dialler"].stat("cluster.ten-requests.upstream_cx_total")
    return f"{load}, {'a new connection every ten' if made >= load.done // 10 else f'{made} for {load.done}'}"


def we_drain(site: IstioSite) -> str:
    """SIGTERM while the next generation is running: Envoy switches to it, and open connections continue to their
    end.
    """
    before = site.proxy("server")
    process = site.mesh.start_proxy(site.lab.worker("w2"), site.lab.worker("w2").ztunnel)
    after = NodeProxy(site.lab.worker("w2").ztunnel, site.folder, process, before.agent, before.pods)
    if not eventually(after.ready):
        return "the next generation is not ready"
    with dial(site.pod("dialler"), site.ip("dialler"), DIALS["command"]) as held:
        held.sendall(b"echo\nx")
        first = held.recv(1)
        with Load(partial(site.through, "server")) as load:
            load.goes_on()
            before.process.send_signal(signal.SIGTERM)
            load.goes_on(200)
        held.sendall(b"y")
        first += held.recv(1)
        alive = before.process.poll() is None
    ended = eventually(lambda: before.process.poll() == 0)
    went_on = first == b"xy" and alive
    site.mesh.proxies["w2"] = after
    return f"{load}, {'what is open goes on' if went_on else 'cut'}, {'then we end' if ended else 'and we stay'}"


CASES: tuple[Case[IstioSite], ...] = (
    Case(
        number="70a",
        stimulus="authority an address",
        run=partial(tunnelled, name="server"),
        expected=same("200 server sees dialler, from dialler, server:9080"),
    ),
    Case(
        number="70b",
        stimulus="authority a service's name",
        run=partial(tunnelled, name="hostname"),
        expected=same(f"200 server sees dialler, from dialler, server.{DOMAIN}:80"),
    ),
    Case(
        number="71a",
        stimulus="authority another pod",
        run=partial(refused, name="other-pod"),
        expected=same("closed tunnel_response:400: ip mismatch: server != guarded"),
    ),
    Case(
        number="71b",
        stimulus="authority nobody's name",
        run=partial(refused, name="unknown-hostname"),
        expected=only_ipv4(
            "closed tunnel_response:503: no service or workload for hostname: nobody.example.com",
        ),
    ),
    Case(
        number="71c",
        stimulus="authority without a port",
        run=partial(refused, name="nonsense"),
        expected=only_ipv4("closed tunnel_response:400: no valid authority pseudo header: server"),
    ),
    Case(
        number="72a",
        stimulus="GET instead of CONNECT",
        run=partial(another_request, name="request", head=b"GET / HTTP/1.1\r\nhost: app\r\n\r\n"),
        expected=only_ipv4("400: expected method CONNECT, got GET"),
    ),
    Case(
        number="72b",
        stimulus="extended CONNECT",
        run=partial(
            another_request,
            name="websocket",
            head=b"GET / HTTP/1.1\r\nhost: app\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        ),
        expected=only_ipv4("400: expected method CONNECT, got CONNECT"),
    ),
    Case(
        number="73a",
        stimulus="certificate of a foreign trust domain",
        run=partial(refused, name="foreign"),
        expected=only_ipv4(
            "closed UF,URX: tls handshake error: TLS failed (san): identity verification error: "
            "peer did not present the expected trustdomain (cluster.local), "
            "got spiffe://elsewhere.example/ns/default/sa/dialler"
        ),
    ),
    Case(
        number="73b",
        stimulus="no certificate",
        run=partial(refused, name="anonymous"),
        expected=only_ipv4(
            "closed UF,URX: tls handshake error: TLS failed (no_cert): peer did not return a certificate"
        ),
    ),
    Case(
        number="74a",
        stimulus="identity not allowed",
        run=partial(refused, name="denied"),
        expected=same(f"closed tunnel_response:401: {_DENIED}"),
    ),
    Case(
        number="74b",
        stimulus="past the waypoint",
        run=partial(refused, name="guarded", pod="guarded"),
        expected=same(f"closed tunnel_response:401: {_DENIED}"),
    ),
    Case(
        number="75",
        stimulus="application is down",
        run=partial(refused, name="closed"),
        expected=same("closed tunnel_response:503: connection failed: Connection refused (os error 111)"),
    ),
    Case(number="76a", stimulus="client ends first", run=_BYTES.client_ends_first, expected=same("byte-exact")),
    Case(
        number="76b",
        stimulus="server ends first",
        run=_BYTES.server_ends_first,
        expected=same("byte-exact both ways"),
    ),
    Case(number="76c", stimulus="nothing is said", run=_BYTES.nothing_said, expected=same("closed")),
    Case(
        number="76d",
        stimulus="client resets",
        run=_BYTES.client_resets,
        expected=same("application sees reset"),
    ),
    Case(
        number="76e",
        stimulus="server resets",
        run=_BYTES.server_resets,
        # Envoy is told by RST_STREAM, and closes in order.
        expected=same("client sees closed"),
    ),
    Case(
        number="77",
        stimulus="300 requests",
        run=many_requests,
        expected=only_ipv4("200, one connection, 0 failed"),
    ),
    Case(
        number="78a",
        stimulus="100 tunnels at once",
        run=many_tunnels,
        expected=only_ipv4("100 byte-exact over 1 connections"),
    ),
    Case(number="78b", stimulus="64 MiB up", run=partial(_BYTES.up, length=MIB64), expected=same("byte-exact")),
    Case(
        number="78c", stimulus="64 MiB down", run=partial(_BYTES.down, length=MIB64), expected=same("byte-exact")
    ),
    Case(
        number="79a",
        stimulus="Envoy drains its connections",
        run=envoy_drains,
        expected=only_ipv4("0 failed, a new connection every ten"),
    ),
    Case(
        number="79b",
        stimulus="we are replaced under load",
        run=we_drain,
        expected=only_ipv4("0 failed, what is open goes on, then we end"),
    ),
)
