"""The preStop hook drains the proxy, waits as configured, and fails without a proxy."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ztunnel.sidecar.inject.drain import drain


@contextlib.contextmanager
def proxy(*answers: tuple[int, str]) -> Iterator[tuple[int, list[str]]]:
    """Run a server with scripted answers, repeating the last one. Yield its port, and the received requests."""
    asked: list[str] = []
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            status, text = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, time_s: float) -> None:
        self.now_s += time_s


def ran(port: int, wait_s: float, least_s: float) -> tuple[int, float, list[str]]:
    clock = Clock()
    said: list[str] = []
    options = {"say": said.append, "monotonic": lambda: clock.now_s, "sleep": clock.sleep}
    return drain(wait_s, least_s, port=port, **options), clock.now_s, said  # type: ignore[arg-type]


def test_a_native_sidecar_is_only_sent_the_drain_request() -> None:
    with proxy((200, "7 connections are open\n")) as (port, asked):
        assert ran(port, 0, 5) == (0, 0, [])
        assert asked == ["/drain"]


def test_the_drain_waits_until_no_connection_is_left() -> None:
    with proxy((200, "2 connections"), (200, "1 connections"), (200, "0 connections")) as (port, asked):
        assert ran(port, 20, 0) == (0, 1.0, [])
        assert len(asked) == 3


def test_the_drain_waits_for_connections_opened_while_the_application_ends() -> None:
    with proxy((200, "0 connections")) as (port, _):
        assert ran(port, 20, 5) == (0, 5.0, [])


def test_the_drain_ends_at_its_limit() -> None:
    with proxy((200, "4 connections")) as (port, _):
        assert ran(port, 3.2, 1) == (0, pytest.approx(3.2), ["drain: 4 connections are left after 3.2 s"])


@pytest.mark.parametrize("answer", [(403, "no"), (200, "what"), (200, "")])
def test_another_answer_is_a_failure(answer: tuple[int, str]) -> None:
    with proxy(answer) as (port, _):
        status, _, said = ran(port, 20, 0)
    assert status == 1
    if answer[0] == 403:
        assert said == [f"drain: the proxy of this pod does not answer on port {port}: status 403: no"]


def test_no_proxy_is_a_failure() -> None:
    with proxy((200, "0")) as (port, _):
        pass
    status, _, said = ran(port, 20, 0)
    assert status == 1
    assert "does not answer" in said[0]
