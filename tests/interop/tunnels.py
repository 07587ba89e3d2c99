"""Tunnels between two kinds of proxy, in both directions: productpage's node opens them, reviews-v1's terminates
them.

The heading names the opening and the terminating kind. Rows 40 and on have a hand-made server at the far end:
which of its answers a client must accept, and which ones it must refuse.
"""

import contextlib
import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.generated import at_night
from tests.interop.apps import (
    BANNER,
    COMMAND,
    GREETING,
    HTTP,
    dial,
    digest,
    get,
    pattern,
    pattern_digest,
    reset,
    rest,
)
from tests.interop.case import Case
from tests.interop.checklist import gone
from tests.interop.proxies import Kind, eventually
from tests.interop.site import VIP_STANDIN, VIP_V1, Pairing, Site
from tests.interop.wire import ODH, Script, TunnelServer

COLUMNS = (
    Pairing(worker1=Kind.ENVOY, worker2=Kind.ENVOY),
    Pairing(worker1=Kind.NATIVE, worker2=Kind.ENVOY),
    Pairing(worker1=Kind.ENVOY, worker2=Kind.NATIVE),
    Pairing(worker1=Kind.NATIVE, worker2=Kind.NATIVE),
)
HEADINGS = ("envoy to envoy", "envoy to ours", "ours to envoy", "ours to ours")
_ENVOYS, _FROM_ENVOY, _FROM_OURS, _OURS = COLUMNS
#: How much the rows of bulk move: sixteen times the largest window, and at night a gibibyte.
BULK = at_night(1 << 30, 1 << 26)
_KIB64 = 1 << 16


def same(text: str) -> dict[Pairing, str]:
    """Expect the same text in every column."""
    return dict.fromkeys(COLUMNS, text)


@contextlib.contextmanager
def tunnel(site: Site, command: str, port: int = COMMAND) -> Iterator[socket.socket]:
    """Open a connection from productpage to reviews-v1's service, through both proxies."""
    with dial(site.pod("productpage"), VIP_V1, port) as sock:
        if command:
            sock.sendall(command.encode() + b"\n")
        yield sock


def small_request(site: Site) -> str:
    proxy = site.proxies["worker1"]
    since = proxy.log_size
    reply = get(site.pod("productpage"), VIP_V1)
    line = proxy.line(since, request="CONNECT")
    return f"{reply.status} {reply.pod} {line['code']} authority {line['authority']}".replace(
        site.ip("reviews-v1"), "reviews-v1"
    )


def client_ends_first(site: Site) -> str:
    with tunnel(site, "sum") as sock:
        for block in pattern(300_000):
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)
        answer = rest(sock)
    return "byte-exact, then closed" if answer == f"300000 {pattern_digest(300_000)}\n closed" else answer


def server_ends_first(site: Site) -> str:
    """The server's end arrives, and the other direction still carries everything."""
    key = f"after-{time.monotonic_ns()}"
    with tunnel(site, f"send 300000 {key}") as sock:
        received = digest(sock)
        for block in pattern(300_000):
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)
    if received != (300_000, pattern_digest(300_000)):
        return str(received)
    whole = site.apps.ending(key) == str((300_000, pattern_digest(300_000)))
    return f"byte-exact, {'and the other way too' if whole else 'but nothing goes the other way'}"


def both_end_at_once(site: Site) -> str:
    with tunnel(site, "echo") as sock:
        sock.shutdown(socket.SHUT_WR)
        return rest(sock)


def client_resets(site: Site) -> str:
    key = f"reset-{time.monotonic_ns()}"
    with tunnel(site, f"ended {key}") as sock:
        sock.sendall(b"x")
        sock.recv(1)
        reset(sock)
    return f"application sees {site.apps.ending(key)}"


def client_closes(site: Site) -> str:
    key = f"fin-{time.monotonic_ns()}"
    with tunnel(site, f"ended {key}") as sock:
        sock.sendall(b"x")
        sock.recv(1)
    return f"application sees {site.apps.ending(key)}"


def server_resets(site: Site) -> str:
    with tunnel(site, "reset") as sock:
        return f"client sees {rest(sock)}"


def gib_up(site: Site) -> str:
    with tunnel(site, "sum") as sock:
        sock.settimeout(110.0)
        for block in pattern(BULK):
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)
        answer = rest(sock)
    return "byte-exact" if answer == f"{BULK} {pattern_digest(BULK)}\n closed" else answer


def gib_down(site: Site) -> str:
    # The client ends first: Envoy's server drops what it has not sent when only the application ends (33c).
    with tunnel(site, f"send {BULK}") as sock:
        sock.settimeout(110.0)
        sock.shutdown(socket.SHUT_WR)
        received = digest(sock)
    return "byte-exact" if received == (BULK, pattern_digest(BULK)) else str(received)


def server_ends_with_data_in_flight(site: Site) -> str:
    """Envoy's server resets the stream, with whatever it has not sent yet."""
    length, total = 64 << 20, 0
    for _ in range(6):
        with tunnel(site, f"send {length}") as sock:
            sock.settimeout(60.0)
            try:
                total, found = digest(sock)
            except ConnectionError:
                return "cut, and the client sees a reset"
            sock.shutdown(socket.SHUT_WR)
        if (total, found) != (length, pattern_digest(length)):
            return "cut, and the client sees an end"
    return "byte-exact"


def refused_identity(site: Site) -> str:
    """``sleep`` is not on the list of whom reviews serves."""
    proxy = site.proxies["worker1"]
    since = proxy.log_size
    reply = get(site.pod("sleep"), VIP_V1)
    line = proxy.line(since, term="rbac")
    return f"{gone(reply.status)} {line['term']}"


def many_tunnels(site: Site) -> str:
    """200 at once, each with its own bytes; they share connections."""
    together = threading.Barrier(200, timeout=30)

    def one(number: int) -> bool:
        payload = f"{number:04}".encode() * 4096
        with tunnel(site, "echo") as sock:
            sock.settimeout(30.0)
            together.wait()
            sock.sendall(payload)
            sock.shutdown(socket.SHUT_WR)
            size, found = digest(sock)
        return (size, found) == (len(payload), hashlib.sha256(payload).hexdigest())

    with ThreadPoolExecutor(200) as pool:
        exact = sum(pool.map(one, range(200)))
    return f"{exact} byte-exact"


def server_speaks_first(site: Site) -> str:
    with tunnel(site, "", BANNER) as sock:
        banner = sock.recv(1000)
        sock.shutdown(socket.SHUT_WR)
        return f"{'greeted' if banner == GREETING else banner.decode()} {rest(sock)}"


def idle_then_data(site: Site) -> str:
    with tunnel(site, "echo") as sock:
        sock.sendall(b"a")
        first = sock.recv(1)
        time.sleep(12)  # longer than the times after which idle connections are probed or closed, 10 s each
        sock.sendall(b"b")
        second = sock.recv(1)
        sock.shutdown(socket.SHUT_WR)
        return f"{(first + second).decode()} {rest(sock)}"


def ping_pong(site: Site) -> str:
    with tunnel(site, "echo") as sock:
        for number in range(500):
            message = f"{number:08}".encode()
            sock.sendall(message)
            answer = b""
            while len(answer) < 8:
                answer += sock.recv(8)
            if answer != message:
                return f"{answer!r} for {message!r}"
    return "500 round trips"


# A hand-made server at the far end


@contextlib.contextmanager
def stand_in(site: Site, script: Script, trust_domain: str = "cluster.local") -> Iterator[TunnelServer]:
    """Run a server on port 15008 of the pod that has no proxy."""
    certificate = site.certificate("bookinfo-standin", trust_domain)
    with TunnelServer(site.pod("standin"), site.authority.root_pem, certificate, script) as server:
        yield server


def refusal(script: Script, trust_domain: str = "cluster.local") -> "Refusal":
    """Return a stimulus: the far end runs ``script``; the result is what the client sees and its node logs."""
    return Refusal(script, trust_domain)


class Refusal:
    """See :func:`refusal`."""

    def __init__(self, script: Script, trust_domain: str) -> None:
        self._script = script
        self._trust_domain = trust_domain

    def __call__(self, site: Site) -> str:
        with stand_in(site, self._script, self._trust_domain):
            # By pod address there is one hop and one log line, found by the client's port.
            proxy = site.proxies["worker2"]
            since = proxy.log_size  # an earlier client may have had the same port
            reply = get(site.pod("productpage"), site.ip("standin"))
            line = proxy.line(since, src=f":{reply.port}")
        failure = line["failure"].partition("|")[0]
        status = reply.status
        if status == "closed":
            status = "reset"  # without unread data there is nothing to reset for: the request arrived later
        return f"{status} {line['flags']} {failure.partition(':_')[0].removesuffix(':')}"


def request_on_the_wire(site: Site) -> str:
    """Whoever the client is: the identity of the pod, and the two headers Envoy's server needs."""
    with stand_in(site, Script()) as server:
        with dial(site.pod("productpage"), VIP_STANDIN, HTTP) as sock:
            sock.sendall(b"x")
            sock.recv(1)
        headers = server.requests[0]
        names = " ".join(headers).replace(":", "")
        destination = headers[ODH].replace(site.ip("standin"), "standin")
        return f"{server.peers[0].rpartition('/')[2]} {names} {destination}"


def settings_of_envoy(site: Site) -> str:
    """Use a server that sends the SETTINGS of Envoy: large windows, extended CONNECT, 1024 streams."""
    settings = ((1, 4096), (8, 1), (3, 1024), (4, 16777216))
    return _echo_through(site, Script(settings=settings, window=25100289))


def settings_of_2022(site: Site) -> str:
    settings = ((3, 2147483647), (4, 268435456))
    return _echo_through(site, Script(settings=settings, window=268435456 - 65535))


def small_windows(site: Site) -> str:
    return _echo_through(site, Script(settings=((4, 1024),)))


def _echo_through(site: Site, script: Script) -> str:
    payload = b"".join(bytes(part) for part in pattern(_KIB64))
    with stand_in(site, script):
        # The first tunnel brings the SETTINGS. Before them the client must keep to the defaults.
        with dial(site.pod("productpage"), VIP_STANDIN, HTTP) as sock:
            sock.sendall(b"x")
            sock.recv(1)
        with dial(site.pod("productpage"), VIP_STANDIN, HTTP) as sock:
            sock.sendall(payload)
            sock.shutdown(socket.SHUT_WR)
            return "echoed" if digest(sock) == (_KIB64, hashlib.sha256(payload).hexdigest()) else "not echoed"


def goodbye_while_a_tunnel_runs(site: Site) -> str:
    """GOAWAY lets the open tunnel finish; the next one uses a new connection."""
    with stand_in(site, Script(goaway_after=1)) as server:
        with dial(site.pod("productpage"), VIP_STANDIN, HTTP) as sock:
            sock.sendall(b"x")
            first = sock.recv(1)
            sock.sendall(b"y")
            second = sock.recv(1)
            with dial(site.pod("productpage"), VIP_STANDIN, HTTP) as other:
                other.sendall(b"z")
                third = other.recv(1)
        eventually(lambda: server.connections == 2, 2.0)
        return f"{(first + second + third).decode()} over {server.connections} connections"


CASES = (
    Case(
        number="30",
        stimulus="small request",
        run=small_request,
        expected=same("200 reviews-v1 200 authority reviews-v1:9080"),
    ),
    Case(
        number="31a", stimulus="client ends first", run=client_ends_first, expected=same("byte-exact, then closed")
    ),
    Case(
        number="31b",
        stimulus="server ends first",
        run=server_ends_first,
        # Envoy's server resets a stream whose application ended first: see 33c.
        expected=dict.fromkeys((_FROM_ENVOY, _OURS), "byte-exact, and the other way too"),
    ),
    Case(number="31c", stimulus="nothing is said", run=both_end_at_once, expected=same("closed")),
    Case(
        number="32a",
        stimulus="client resets",
        run=client_resets,
        # RFC 9113, 8.5 requires a reset. Envoy's server ends the stream in order.
        expected={
            _ENVOYS: "application sees fin",
            _FROM_ENVOY: "application sees reset",
            _FROM_OURS: "application sees fin",
            _OURS: "application sees reset",
        },
    ),
    Case(number="32b", stimulus="client closes", run=client_closes, expected=same("application sees fin")),
    Case(
        number="32c",
        stimulus="server resets",
        run=server_resets,
        expected=same("client sees reset"),
    ),
    Case(number="33a", stimulus=f"{BULK >> 20} MiB up", run=gib_up, expected=same("byte-exact")),
    Case(number="33b", stimulus=f"{BULK >> 20} MiB down", run=gib_down, expected=same("byte-exact")),
    Case(
        number="33c",
        stimulus="server ends first, 64 MiB in flight",
        run=server_ends_with_data_in_flight,
        expected={
            _ENVOYS: "cut, and the client sees a reset",
            _FROM_ENVOY: "byte-exact",
            _FROM_OURS: "cut, and the client sees a reset",
            _OURS: "byte-exact",
        },
    ),
    Case(
        number="34",
        stimulus="identity not allowed",
        run=refused_identity,
        expected=same("closed rbac_access_denied_matched_policy[none]"),
    ),
    Case(number="35", stimulus="200 tunnels at once", run=many_tunnels, expected=same("200 byte-exact")),
    Case(number="36", stimulus="server speaks first", run=server_speaks_first, expected=same("greeted closed")),
    Case(number="37", stimulus="12 s idle, then data", run=idle_then_data, expected=same("ab closed"), early=True),
    Case(number="38", stimulus="500 small round trips", run=ping_pong, expected=same("500 round trips")),
    Case(
        number="40",
        stimulus="what a client sends",
        run=request_on_the_wire,
        expected=same("bookinfo-productpage method authority x-envoy-original-dst-host standin:9080"),
    ),
    Case(number="41a", stimulus="SETTINGS of Envoy 1.40", run=settings_of_envoy, expected=same("echoed")),
    Case(number="41b", stimulus="SETTINGS of 2022", run=settings_of_2022, expected=same("echoed")),
    Case(number="41c", stimulus="stream window of 1 KiB", run=small_windows, expected=same("echoed")),
    Case(
        number="42",
        stimulus="GOAWAY while a tunnel runs",
        run=goodbye_while_a_tunnel_runs,
        expected=same("xyz over 2 connections"),
    ),
    Case(
        number="43a",
        stimulus="answer 404",
        run=refusal(Script(status=404)),
        expected=same("reset UF,URX tunnel_response:404"),
    ),
    Case(
        number="43b",
        stimulus="answer 503 with body",
        run=refusal(Script(status=503, body=b"no")),
        expected=same("reset UF,URX tunnel_response:503"),
    ),
    Case(
        number="43c",
        stimulus="answer 204",
        run=refusal(Script(status=204)),
        expected=same("reset UF,URX tunnel_response:204"),
    ),
    Case(
        number="43d",
        stimulus="RST_STREAM instead of an answer",
        run=refusal(Script(status=None, reset=7)),
        expected={
            _ENVOYS: "reset UF,URX -",
            _FROM_ENVOY: "reset UF,URX -",
            _FROM_OURS: "reset UF,URX tunnel_failed",
            _OURS: "reset UF,URX tunnel_failed",
        },
    ),
    Case(
        number="44a",
        stimulus="server of a foreign trust domain",
        run=refusal(Script(), "elsewhere.example"),
        expected=same("reset UF,URX TLS_error"),
    ),
    Case(
        number="44b",
        stimulus="server speaks TLS 1.2 only",
        run=refusal(Script(version=ssl.TLSVersion.TLSv1_2)),
        expected=same("reset UF,URX TLS_error"),
    ),
)
