"""Active health checks: the same bootstrap and applications for Envoy and for ours."""

import contextlib
import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest

from tests.interop.loopback import application, listening, serving, until
from tests.interop.proxies import ENVOY
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, cluster, endpoint, listener
from tests.ztunnel.proxy.envoy.test_health_checks import HTTP, NO_PANIC, TCP

pytestmark = pytest.mark.interop


class Answering:
    """An application that answers HTTP requests with a status, and other texts with its name."""

    def __init__(self, name: bytes, status: int) -> None:
        self.name, self.status = name, status

    def __call__(self, sock: socket.socket) -> None:
        # The checker may keep its connection, and takes its end for a failure then.
        while data := sock.recv(65536):
            answer = b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % self.status
            sock.sendall(answer if data.startswith(b"GET") else self.name)


def ask(port: int) -> bytes:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(b"hello")
        return sock.recv(100)
    return b""


def flags(admin: int, ports: dict[str, int]) -> dict[str, str]:
    """The health flags of /clusters, by the application's name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/clusters", timeout=10) as page:
        text = page.read().decode()
    found = dict(re.findall(r"^app::127\.0\.0\.1:(\d+)::health_flags::(.*)$", text, re.MULTILINE))
    return {name: found[str(port)] for name, port in ports.items()}


def bootstrap(folder: Path, admin: int, port: int, check: Json, ports: list[int]) -> Path:
    _, served = listener()
    served["address"]["socket_address"]["port_value"] = port
    _, backends = cluster(*ports, health_checks=[check], **NO_PANIC)
    # Each application is checked on its own port. One without a check counts as healthy.
    unchecked = endpoint(ports[-1])
    unchecked["endpoint"]["health_check_config"] = {"disable_active_health_check": True}
    backends["load_assignment"]["endpoints"][0]["lb_endpoints"][-1] = unchecked
    document = {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}},
        "static_resources": {"listeners": [served], "clusters": [backends]},
    }
    path = folder / "bootstrap.json"
    path.write_text(json.dumps(document))
    return path


BY_TCP = {**TCP, "tcp_health_check": {"send": {"text": "68656c6c6f"}, "receive": [{"text": "61"}]}}


#: The requests of checks by method, without the headers that both proxies add of their own.
REQUESTS = {
    "GET": "GET /h HTTP/1.1, x-a: b, x-c: d e",
    "HEAD": "HEAD /h HTTP/1.1, x-a: b, x-c: d e",
    "POST": "POST /h HTTP/1.1, content-length: 0, x-a: b, x-c: d e",
    "PUT": "PUT /h HTTP/1.1, content-length: 0, x-a: b, x-c: d e",
    "DELETE": "DELETE /h HTTP/1.1, x-a: b, x-c: d e",
    "OPTIONS": "OPTIONS /h HTTP/1.1, content-length: 0, x-a: b, x-c: d e",
    "TRACE": "TRACE /h HTTP/1.1, x-a: b, x-c: d e",
    "PATCH": "PATCH /h HTTP/1.1, content-length: 0, x-a: b, x-c: d e",
}
OF_EACH_PROXY = ("host", "user-agent", "connection", "x-envoy-", "transfer-encoding")


@pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")
@pytest.mark.parametrize("kind", ["envoy", "ours"])
def test_method_and_headers_of_a_check_are_obeyed(kind: str, tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    def serve(sock: socket.socket) -> None:
        while data := sock.recv(65536):
            first, *headers = data.decode().partition("\r\n\r\n")[0].split("\r\n")
            own = sorted(each for each in map(str.lower, headers) if not each.startswith(OF_EACH_PROXY))
            seen[first.split()[0]] = ", ".join([first, *own])
            sock.sendall(b"HTTP/1.1 200 X\r\ncontent-length: 0\r\n\r\n")

    headers = [{"header": {"key": "X-A", "value": "b"}}, {"header": {"key": "x-c", "value": "d e"}}]
    with contextlib.ExitStack() as stack:
        app, admin, port = application(serve, stack), free_port(), free_port()
        checks = {}
        for method in REQUESTS:
            request = {
                "path": "/h",
                "method": method,
                "request_headers_to_add": headers,
                "codec_client_type": "HTTP1",
            }
            checks[method] = {**HTTP, "http_health_check": request}
        clusters = [cluster(app, name=method, health_checks=[check])[1] for method, check in checks.items()]
        _, served = listener()
        served["address"]["socket_address"]["port_value"] = port
        clusters.append(cluster(app)[1])
        document = {
            "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}},
            "static_resources": {"listeners": [served], "clusters": clusters},
        }
        path = tmp_path / "bootstrap.json"
        path.write_text(json.dumps(document))
        stack.enter_context(serving(kind, path, admin=True))
        until(lambda: seen.keys() == REQUESTS.keys())
    assert seen == REQUESTS


@pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")
@pytest.mark.parametrize("kind", ["envoy", "ours"])
@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (HTTP, {"a": "healthy", "b": "/failed_active_hc", "unchecked": "healthy"}),
        (BY_TCP, {"a": "healthy", "b": "/failed_active_hc", "unchecked": "healthy"}),
    ],
    ids=["http", "tcp"],
)
def test_hosts_that_fail_their_checks_get_no_connection(
    kind: str, check: Json, expected: dict[str, str], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        made = {"a": Answering(b"a", 200), "b": Answering(b"b", 503), "unchecked": Answering(b"unchecked", 503)}
        ports = {name: application(each, stack) for name, each in made.items()}
        admin, port = free_port(), free_port()
        path = bootstrap(tmp_path, admin, port, check, list(ports.values()))
        stack.enter_context(serving(kind, path, admin=True))
        until(lambda: listening(port) and listening(admin))
        until(lambda: flags(admin, ports) == expected)
        assert {ask(port) for _ in range(12)} == {b"a", b"unchecked"}
        made["b"].status, made["b"].name = 200, b"a, too"
        until(lambda: flags(admin, ports)["b"] == "healthy")
        until(lambda: b"a, too" in {ask(port) for _ in range(12)})
