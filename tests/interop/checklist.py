"""The behaviour of an Envoy of the ambient generation, row by row, and the intentional differences of our native
mode.

Both nodes run the same kind. Expectations of the column ``envoy`` were measured on Envoy 1.40. ``compat`` must
equal them, except for differences that clients cannot act on. ``native`` differs where Envoy's behaviour loses
connections or lets a tunnel reach a pod it was not opened to.
"""

import socket
import ssl
import time
from functools import partial
from typing import Any

from tests.interop.apps import COMMAND, HTTP, Reply, dial, get
from tests.interop.case import Case
from tests.interop.proxies import Fields, Kind, Proxy, eventually
from tests.interop.site import VIP, VIP_NOBODY, Pairing, Site
from tests.interop.wire import TunnelClient, connect_headers
from xds.model.secret import Certificate

ENVOYS = Pairing(Kind.ENVOY, Kind.ENVOY)
COMPATS = Pairing(Kind.COMPAT, Kind.COMPAT)
NATIVES = Pairing(Kind.NATIVE, Kind.NATIVE)
COLUMNS = (ENVOYS, COMPATS, NATIVES)
_UNREACHABLE = "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure"


def same(text: str) -> dict[Pairing, str]:
    """Expect the same of Envoy and of both modes of ours."""
    return dict.fromkeys(COLUMNS, text)


def differs(text: str, native: str) -> dict[Pairing, str]:
    """Expect the same of Envoy and our compatible mode, and something else of the native mode."""
    return {ENVOYS: text, COMPATS: text, NATIVES: native}


def seen(site: Site, reply: Reply) -> str:
    """Return a reply in words: the status, and the peer that the application saw."""
    return f"{reply.status} peer {site.who(reply.peer)}" if reply.peer else reply.status


def of_client(proxy: Proxy, port: int, label: str = "") -> Fields:
    """The line about the connection from a client's port; ports are not used twice in a run."""
    return proxy.line(src=f":{port}", label=label)


def cluster_of(line: Fields) -> str:
    """The cluster without the identities in its name."""
    return line["cluster"].partition("_spiffe")[0]


def requests_to_a_service(site: Site) -> str:
    replies = [get(site.pod("productpage"), VIP) for _ in range(6)]
    order = [reply.pod for reply in replies]
    rotates = order[:3] == order[3:] and len(set(order)) == 3
    statuses = "".join(sorted({reply.status for reply in replies}))
    peers = " ".join(sorted({site.who(reply.peer) for reply in replies}))
    return f"{statuses} {'in rotation' if rotates else order} peer {peers}"


def pod_address_on_another_node(site: Site) -> str:
    reply = get(site.pod("productpage"), site.ip("reviews-v1"))
    line = of_client(site.proxies["worker2"], reply.port)
    return f"{seen(site, reply)} by {cluster_of(line)}"


def pod_address_on_the_same_node(site: Site) -> str:
    begun = time.monotonic()
    reply = get(site.pod("productpage"), site.ip("reviews-v2"))
    line = of_client(site.proxies["worker2"], reply.port)
    took = "after 2 s" if 1.8 <= time.monotonic() - begun < 3.5 else "at once"
    return f"{seen(site, reply)} {took} {line['flags']}"


def unknown_address(site: Site) -> str:
    reply = get(site.pod("productpage"), site.ip("outsider-1"))
    return f"{seen(site, reply)} by {of_client(site.proxies['worker2'], reply.port)['cluster']}"


def service_with_unknown_port(site: Site) -> str:
    reply = get(site.pod("productpage"), VIP, 4444, timeout_s=15.0)
    line = of_client(site.proxies["worker2"], reply.port)
    return f"{gone(reply.status)} {line['flags']} {line['cluster']} {line['up']}"


def capture_port_itself(site: Site) -> str:
    proxy = site.proxies["worker2"]
    stat = "listener.0.0.0.0_15001.no_filter_chain_match"
    before = proxy.stat(stat)
    reply = get(site.pod("productpage"), str(proxy.place.ipv4), 15001)
    counted = eventually(lambda: proxy.stat(stat) == before + 1)
    return f"{gone(reply.status)} no_filter_chain_match {'+1' if counted else '+0'}"


def another_listeners_port(site: Site, port: int) -> str:
    reply = get(site.pod("productpage"), site.ip("ratings"), port)
    line = of_client(site.proxies["worker2"], reply.port, label="blackhole")
    return f"{gone(reply.status)} {line['flags']} {line['label']}"


def unmeshed_client(site: Site, name: str) -> str:
    reply = get(site.pod(name), site.ip("productpage"))
    line = of_client(site.proxies["worker2"], reply.port, label="inbound passthrough")
    return f"{seen(site, reply)} {line['label']}"


def unmeshed_client_of_a_guarded_pod(site: Site) -> str:
    reply = get(site.pod("outsider-1"), site.ip("reviews-v2"))
    return f"{gone(reply.status)} {of_client(site.proxies['worker2'], reply.port)['term']}"


def probe(site: Site) -> str:
    reply = get(site.lab.worker("worker2").place, site.ip("reviews-v2"))
    return seen(site, reply)


def client(
    site: Site, server: str = "reviews-v2", account: str = "bookinfo-productpage", **more: Any
) -> TunnelClient:
    """Return a tunnel client of our own, on the other node, outside of all interception."""
    certificate, root = site.certificate(account), site.authority.root_pem
    return TunnelClient(site.pod("outsider-1"), site.ip(server), root, certificate, **more)


def without_destination_header(site: Site) -> str:
    with client(site) as tunnels:
        return str(tunnels.ask(connect_headers(f"{site.ip('reviews-v2')}:{HTTP}", None)))


def closed_port(site: Site) -> str:
    proxy = site.proxies["worker2"]
    since = proxy.log_size
    with client(site) as tunnels:
        answer = tunnels.ask(connect_headers(f"{site.ip('reviews-v2')}:7777"))
    line = proxy.line(since, code="503")
    return f"{answer} {line['flags']} {line['details']}"


def closed_port_through_both(site: Site) -> str:
    reply = get(site.pod("productpage"), site.ip("reviews-v1"), 7777)
    line = of_client(site.proxies["worker2"], reply.port)
    return f"{gone(reply.status)} {line['failure']} {line['flags']}"


def authority_is_a_name(site: Site) -> str:
    with client(site) as tunnels:
        return str(tunnels.ask(connect_headers("reviews.default:80", f"{site.ip('reviews-v2')}:{HTTP}")))


def header_names_another_pod(site: Site) -> str:
    with client(site) as tunnels:
        headers = connect_headers(f"{site.ip('reviews-v2')}:{HTTP}", f"{site.ip('reviews-v3')}:{HTTP}")
        stream = tunnels.request(headers)
        answer = tunnels.answer(stream)
        if answer.status != "200":
            return str(answer)
        tunnels.send(stream, b"GET / HTTP/1.1\r\nhost: app\r\n\r\n")
        tunnels.answer(stream, lambda a: a.body.endswith(b"}"))
        return f"200 reaches {'reviews-v3' if b'reviews-v3' in answer.body else answer.body.decode()}"


def identity_not_allowed(site: Site) -> str:
    proxy = site.proxies["worker2"]
    since = proxy.log_size
    with client(site, account="sleep") as tunnels:
        version, _ = tunnels.tls
        answer = tunnels.ask(connect_headers(f"{site.ip('reviews-v2')}:{HTTP}"))
        line = proxy.line(since, src=f":{tunnels.own_port}")
    return f"{version} {gone(str(answer))} {line['term']}"


def no_certificate(site: Site) -> str:
    return _refused(site, None, "fail_verify_no_cert")


def foreign_trust_domain(site: Site) -> str:
    return _refused(site, site.certificate("bookinfo-productpage", "elsewhere.example"), "fail_verify_san")


def _refused(site: Site, certificate: Certificate | None, counter: str) -> str:
    proxy, name = site.proxies["worker2"], f"listener.0.0.0.0_15008.ssl.{counter}"
    before = proxy.stat(name)
    root = site.authority.root_pem
    with TunnelClient(site.pod("outsider-1"), site.ip("reviews-v2"), root, certificate, silent=True) as tunnels:
        how = tunnels.wait_closed()
    counted = eventually(lambda: proxy.stat(name) == before + 1)
    return f"{how} {counter} {'+1' if counted else '+0'}"


def old_tls(site: Site) -> str:
    with client(site, version=ssl.TLSVersion.TLSv1_2) as tunnels:
        return tunnels.failure


def pod_without_inbound_chain(site: Site) -> str:
    with client(site, "ghost") as tunnels:
        line = of_client(site.proxies["worker2"], tunnels.own_port, label="blackhole")
        return f"{gone(tunnels.failure)} in the handshake {line['flags']} {line['label']}"


def no_endpoints(site: Site) -> str:
    reply = get(site.pod("productpage"), VIP_NOBODY)
    line = of_client(site.proxies["worker2"], reply.port)
    return f"{gone(reply.status)} {line['flags']}"


def client_ends_and_server_goes_on(site: Site) -> str:
    """Envoy's default route timeout, 15 s, runs from the end of the request; nobody configures it away."""
    with dial(site.pod("productpage"), site.ip("reviews-v1"), COMMAND, timeout_s=20.0) as sock:
        sock.sendall(b"keep\n")
        sock.shutdown(socket.SHUT_WR)
        begun = time.monotonic()
        while time.monotonic() - begun < 16.5:
            try:
                if not sock.recv(1000):
                    break
            except ConnectionError:
                break
        lasted = time.monotonic() - begun
    return (
        "cut after 15 s" if 14.5 < lasted < 16.4 else "goes on" if lasted >= 16.4 else f"cut after {lasted:.1f} s"
    )


def failing_health_check(site: Site) -> str:
    proxy = site.proxies["worker2"]
    answers = [proxy.admin("/healthcheck/fail", "POST"), proxy.admin("/ready")]
    answers += [proxy.admin("/healthcheck/ok", "POST"), proxy.admin("/ready")]
    reply = get(site.pod("productpage"), VIP)
    return " ".join(f"{status} {body.strip()}" for status, body in answers) + f" meanwhile {reply.status}"


def gone(status: str) -> str:
    """Return one word for FIN and RST. Which of them comes is a race: it depends on whether our data was read."""
    return "closed" if status == "reset" else status


CASES = (
    Case(
        number="1",
        stimulus="pod to service, six times",
        run=requests_to_a_service,
        expected=differs("200 in rotation peer ztunnel of worker2", "200 in rotation peer productpage"),
    ),
    Case(
        number="2",
        stimulus="pod to pod IP on another node",
        run=pod_address_on_another_node,
        expected=same("200 peer productpage by outbound_pod_tunnel_clus"),
    ),
    Case(
        number="3",
        stimulus="pod to pod IP on the same node",
        run=pod_address_on_the_same_node,
        expected=differs("reset after 2 s UF,URX", "200 peer productpage at once -"),
        early=True,
    ),
    Case(
        number="4",
        stimulus="pod to unknown address",
        run=unknown_address,
        expected=same("200 peer productpage by PassthroughCluster"),
    ),
    Case(
        number="5",
        stimulus="pod to service, unknown port",
        run=service_with_unknown_port,
        expected=same(f"closed UF,URX PassthroughCluster {VIP}:4444"),
        early=True,
    ),
    Case(
        number="6",
        stimulus="pod to the capture port",
        run=capture_port_itself,
        expected=same("closed no_filter_chain_match +1"),
    ),
    Case(
        number="7a",
        stimulus="pod to X:15006",
        run=partial(another_listeners_port, port=15006),
        expected=same("closed NC blackhole inbound plaintext"),
    ),
    Case(
        number="7b",
        stimulus="pod to X:15008",
        run=partial(another_listeners_port, port=15008),
        expected=same("closed NC blackhole inbound"),
    ),
    Case(
        number="8a",
        stimulus="unmeshed pod, other node, to member",
        run=partial(unmeshed_client, name="outsider-1"),
        expected=same("200 peer outsider-1 inbound passthrough"),
    ),
    Case(
        number="8b",
        stimulus="unmeshed pod, same node, to member",
        run=partial(unmeshed_client, name="outsider-2"),
        expected=same("200 peer outsider-2 inbound passthrough"),
    ),
    Case(
        number="8c",
        stimulus="unmeshed pod to guarded member",
        run=unmeshed_client_of_a_guarded_pod,
        expected=same("closed rbac_access_denied_matched_policy[none]"),
    ),
    Case(number="9", stimulus="probe of the node to member", run=probe, expected=same("200 peer worker2")),
    Case(
        number="10",
        stimulus="tunnel without original-dst header",
        run=without_destination_header,
        expected=differs(f"503 '{_UNREACHABLE}' end reset 10", "200"),
    ),
    Case(
        number="11a",
        stimulus="tunnel to a closed port, server's side",
        run=closed_port,
        expected=same(
            f"503 '{_UNREACHABLE}' end reset 10 UF upstream_reset_before_response_started"
            "{remote_connection_failure|delayed_connect_error:_Connection_refused}"
        ),
    ),
    Case(
        number="11b",
        stimulus="tunnel to a closed port, client's side",
        run=closed_port_through_both,
        expected=same("closed tunnel_response:503 UF,URX"),
    ),
    Case(
        number="12",
        stimulus="authority a name, header correct",
        run=authority_is_a_name,
        expected=same("200"),
    ),
    Case(
        number="13",
        stimulus="tunnel to pod A, header names pod B",
        run=header_names_another_pod,
        expected=differs("200 reaches reviews-v3", "400 end reset 0"),
    ),
    Case(
        number="14",
        stimulus="identity not allowed",
        run=identity_not_allowed,
        expected=same("TLSv1.3 closed rbac_access_denied_matched_policy[none]"),
    ),
    Case(
        number="15a",
        stimulus="no client certificate",
        run=no_certificate,
        expected=same("alert certificate_required fail_verify_no_cert +1"),
    ),
    Case(
        number="15b",
        stimulus="certificate of a foreign trust domain",
        run=foreign_trust_domain,
        # OpenSSL has one alert for everything a verify callback refuses, BoringSSL another.
        expected={
            ENVOYS: "alert certificate_unknown fail_verify_san +1",
            COMPATS: "alert bad_certificate fail_verify_san +1",
            NATIVES: "alert bad_certificate fail_verify_san +1",
        },
    ),
    Case(number="15c", stimulus="TLS 1.2", run=old_tls, expected=same("alert protocol_version")),
    Case(
        number="16",
        stimulus="tunnel to a local pod without chain",
        run=pod_without_inbound_chain,
        expected=same("closed in the handshake NC blackhole inbound"),
    ),
    Case(number="17", stimulus="no endpoints", run=no_endpoints, expected=same("closed UH")),
    Case(
        number="20",
        stimulus="client half-closes, server goes on",
        run=client_ends_and_server_goes_on,
        expected=differs("cut after 15 s", "goes on"),
        early=True,
    ),
    Case(
        number="25",
        stimulus="POST /healthcheck/fail and ok",
        run=failing_health_check,
        expected=same("200 OK 503 DRAINING 200 OK 200 LIVE meanwhile 200"),
    ),
)
