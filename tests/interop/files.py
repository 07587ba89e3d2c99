"""The reference configuration from files, unchanged, loaded by each kind of proxy; and the effects of editing it.

The node of reviews-v1 has a route timeout of 2 s and a stream idle timeout of 3 s instead of Envoy's defaults.
"""

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator

from tests.interop.apps import COMMAND, dial, get
from tests.interop.case import Case
from tests.interop.checklist import gone, of_client
from tests.interop.proxies import Kind, Proxy, eventually
from tests.interop.site import VIP, Pairing, Site

COLUMNS = (
    Pairing(Kind.ENVOY, Kind.ENVOY, "files"),
    Pairing(Kind.COMPAT, Kind.COMPAT, "files"),
    Pairing(Kind.NATIVE, Kind.NATIVE, "files"),
    Pairing(Kind.ENVOY, Kind.NATIVE, "files"),
)
HEADINGS = ("envoy", "ours (compat)", "ours (native)", "ours to envoy")
_EDS = "w2/eds.yaml"
_LDS = "w2/lds.yaml"
# "://" is "_" in the names of counters.
_SERVICE = (
    "cluster.spiffe_cluster.local/ns/default/sa/bookinfo-productpage_to_http_reviews.default.svc.cluster.local"
    "_outbound_internal"
)
Change = Callable[[str], str]


def same(text: str) -> dict[Pairing, str]:
    """Expect the same text in every column."""
    return dict.fromkeys(COLUMNS, text)


def bumped(text: str) -> str:
    """The file with another version."""
    return re.sub(r'version_info: "(\d+)"', lambda found: f'version_info: "{int(found[1]) + 1}"', text)


@contextlib.contextmanager
def changed(site: Site, name: str, change: Change, applied: Callable[[], bool]) -> Iterator[None]:
    """Replace a file during the block. Enters and leaves once the proxy has read the file."""
    original = (site.directory / name).read_text()
    site.edit_file(name, lambda text: bumped(change(text)))
    try:
        if not eventually(applied):
            raise TimeoutError(f"{name} was not taken up")
        yield
    finally:
        site.edit_file(name, lambda text: bumped(bumped(original)))


def counts(proxy: Proxy, stat: str) -> Callable[[], bool]:
    """A condition: the counter is higher than now."""
    before = proxy.stat(stat)
    return lambda: proxy.stat(stat) > before


def rotation(site: Site) -> str:
    order = [get(site.pod("productpage"), VIP) for _ in range(6)]
    pods = [reply.pod for reply in order]
    rotates = pods[:3] == pods[3:] and len(set(pods)) == 3
    return f"{' '.join(sorted({reply.status for reply in order}))} {'in rotation' if rotates else pods}"


def who_asks(site: Site) -> str:
    proxy = site.proxies["worker1"]
    since = proxy.log_size
    get(site.pod("productpage"), site.ip("reviews-v1"))
    line = proxy.line(since, request="CONNECT")
    return f"{line['code']} peer {line['peer'].rpartition('/')[2]}"


def all_unhealthy(site: Site) -> str:
    proxy = site.proxies["worker2"]

    def unhealthy(text: str) -> str:
        return text.replace("    - endpoint:", "    - health_status: UNHEALTHY\n      endpoint:")

    with changed(site, _EDS, unhealthy, lambda: "eds_unhealthy" in _endpoints(proxy)):
        replies = [get(site.pod("productpage"), VIP) for _ in range(6)]
    _restored(site)
    return f"{' '.join(sorted({reply.status for reply in replies}))} from {len({reply.pod for reply in replies})}"


def _endpoints(proxy: Proxy) -> str:
    status = proxy.admin("/clusters")[1]
    return "eds_unhealthy" if status.count("/failed_eds_health") == 3 else "healthy"


def _hosts(proxy: Proxy) -> int:
    return len(re.findall(r"_outbound_internal::envoy://\S+::weight::", proxy.admin("/clusters")[1]))


def _restored(site: Site) -> None:
    proxy = site.proxies["worker2"]
    if not eventually(lambda: _endpoints(proxy) == "healthy" and _hosts(proxy) == 3):
        raise TimeoutError("the endpoints did not come back")


#: Envoy's connection to its inner hop is made, then fails: whether it counted as made by then is a race, and so is
#: whether the client or the hop was the first to end it.
_DIED_IN_PROCESS = ("UR -", "- -", "UF,URX delayed_connect_error:_Invalid_argument")


def without_metadata(name: str) -> Callable[[Site], str]:
    """A case: no endpoint has the metadata of that name."""

    def run(site: Site) -> str:
        proxy = site.proxies["worker2"]

        def drop(text: str) -> str:
            return re.sub(rf"\n {{10}}{re.escape(name)}: .*", "", text)

        with changed(site, _EDS, drop, counts(proxy, f"{_SERVICE}.update_success")):
            reply = get(site.pod("productpage"), VIP)
            line = of_client(proxy, reply.port)
        eventually(lambda: get(site.pod("productpage"), VIP).status == "200")
        failure = line["failure"].partition("|")[0].removeprefix("immediate_connect_error:_")
        words = f"{line['flags']} {failure}"
        return f"{gone(reply.status)} {'in the process' if words in _DIED_IN_PROCESS else words}"

    return run


def client_half_closes(site: Site) -> str:
    with dial(site.pod("productpage"), site.ip("reviews-v1"), COMMAND) as sock:
        sock.sendall(b"keep\n")
        sock.shutdown(socket.SHUT_WR)
        return _cut(sock, 2.0)


def idle(site: Site) -> str:
    with dial(site.pod("productpage"), site.ip("reviews-v1"), COMMAND) as sock:
        sock.sendall(b"echo\nx")
        sock.recv(1)
        return _cut(sock, 3.0)


def _cut(sock: socket.socket, expected_s: float) -> str:
    begun = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while sock.recv(1000):
            if time.monotonic() - begun > 9:
                return "goes on"
    lasted = time.monotonic() - begun
    return "cut in time" if expected_s - 0.3 < lasted < 1.125 * expected_s + 0.5 else f"cut after {lasted:.1f} s"


def new_endpoints(site: Site) -> str:
    """The next connection uses the new endpoints; an open one continues."""
    proxy = site.proxies["worker2"]

    def only_v1(text: str) -> str:
        return text[: text.index("    - endpoint", text.index("10.244.1."))]

    with dial(site.pod("productpage"), VIP, 9080) as running:
        pod = get_on(running)
        with changed(site, _EDS, only_v1, lambda: _hosts(proxy) == 1):
            pods = {get(site.pod("productpage"), VIP).pod for _ in range(4)}
            still = get_on(running)
    _restored(site)
    return f"new ones to {' '.join(sorted(pods))}, running one {'goes on' if still == pod else 'is lost'}"


def get_on(sock: socket.socket) -> str:
    """Send a request on an open connection; return the pod that answers."""
    sock.sendall(b"GET / HTTP/1.1\r\nhost: app\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        more = sock.recv(4096)
        if not more:
            return "closed"
        answer += more
    found = re.search(rb'"pod": "([^"]+)"', answer)
    return found[1].decode() if found else "?"


def matcher_change(site: Site) -> str:
    proxy = site.proxies["worker2"]
    applied = counts(proxy, "listener_manager.listener_in_place_updated")
    with dial(site.pod("productpage"), VIP, 9080) as running:
        pod = get_on(running)
        with changed(site, _LDS, lambda text: text.replace('"9080":', '"9081":'), applied):
            still = get_on(running)
            reply = get(site.pod("productpage"), site.ip("reviews-v1"))
    return f"in place, running one {'goes on' if still == pod else 'is lost'}, another chain {reply.status}"


def other_change(site: Site) -> str:
    proxy = site.proxies["worker2"]

    def limited(text: str) -> str:
        return text.replace(
            "port_value: 15001}}\n", "port_value: 15001}}\n  per_connection_buffer_limit_bytes: 65536\n"
        )

    before = proxy.stat("listener_manager.listener_modified")
    with dial(site.pod("productpage"), VIP, 9080) as running:
        pod = get_on(running)
        with changed(site, _LDS, limited, lambda: proxy.stat("listener_manager.listener_modified") == before + 1):
            eventually(lambda: proxy.stat("listener_manager.total_listeners_draining") == 1)
            draining = proxy.stat("listener_manager.total_listeners_draining")
            still = get_on(running)
            reply = get(site.pod("productpage"), VIP)
    return f"{draining} draining, running one {'goes on' if still == pod else 'is lost'}, new one {reply.status}"


def broken_file(site: Site) -> str:
    proxy = site.proxies["worker2"]
    applied = counts(proxy, f"{_SERVICE}.update_rejected")

    def broken(text: str) -> str:
        return text.replace("load_balancing_weight: 1", "load_balancing_weight: 0", 1)

    with changed(site, _EDS, broken, applied):
        order = {get(site.pod("productpage"), VIP).status for _ in range(3)}
    return f"rejected, meanwhile {' '.join(order)}"


CASES = (
    Case(number="1", stimulus="pod to service, six times", run=rotation, expected=same("200 in rotation")),
    Case(
        number="14",
        stimulus="identity of the client",
        run=who_asks,
        expected=same("200 peer bookinfo-productpage"),
    ),
    Case(number="18", stimulus="all endpoints unhealthy", run=all_unhealthy, expected=same("200 from 3")),
    Case(
        number="19a",
        stimulus="endpoints without transport metadata",
        run=without_metadata("envoy.transport_socket_match"),
        expected=same("closed UF,URX Invalid_argument"),
    ),
    Case(
        number="19b",
        stimulus="endpoints without tunnel metadata",
        run=without_metadata("tunnel"),
        # Without an address Envoy's inner hop tries TLS with the application itself; we look before that.
        expected={**same("closed UF,URX Invalid_argument"), COLUMNS[0]: "closed in the process"},
    ),
    Case(
        number="20",
        stimulus="client half-closes, route timeout 2 s",
        run=client_half_closes,
        expected=same("cut in time"),
    ),
    Case(number="21", stimulus="idle, stream idle timeout 3 s", run=idle, expected=same("cut in time")),
    Case(
        number="22",
        stimulus="EDS file changes",
        run=new_endpoints,
        expected=same("new ones to reviews-v1, running one goes on"),
    ),
    Case(
        number="23",
        stimulus="only the matcher changes",
        run=matcher_change,
        expected=same("in place, running one goes on, another chain 200"),
    ),
    Case(
        number="24",
        stimulus="another listener property changes",
        run=other_change,
        expected=same("1 draining, running one goes on, new one 200"),
    ),
    Case(number="26", stimulus="EDS file breaks", run=broken_file, expected=same("rejected, meanwhile 200")),
)
