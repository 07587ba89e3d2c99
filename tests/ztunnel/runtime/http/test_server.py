"""The page server over real sockets: framing, limits, manners."""

import asyncio
import contextlib
import http.client
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tproxy.errors import PortTaken
from xds.model.address import SocketAddress
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.http import server as admin_http
from ztunnel.runtime.http.page import Deferred, Page, PageRequest, text
from ztunnel.runtime.http.server import LocalServer, PageServer, Stage

LOCAL = SocketAddress("127.0.0.1", 0)
REQUEST = b"GET /a?x=1&y HTTP/1.1\r\nhost: h\r\n\r\n"


def echo(request: PageRequest) -> Page:
    if request.path == "/fails":
        raise RuntimeError("boom")
    if request.path == "/pieces":
        here = threading.current_thread()

        def elsewhere() -> str:
            return "elsewhere" if threading.current_thread() is not here else "here"

        return Page(body=("one ", Deferred(elsewhere), " three"))
    return text(f"{request.method} {request.path} {request.query.pairs}")


def with_server(use: Callable[[int], Any], pages: Callable[[PageRequest], Page] = echo, *, most: int = 64) -> Any:
    """Call ``use`` with the port of a server, in a thread."""

    async def main() -> Any:
        async with PageServer("test", LOCAL, pages, SystemClock(), max_connections=most) as server:
            return await asyncio.to_thread(use, server.address.port)

    return asyncio.run(main())


def raw(port: int, *chunks: bytes, eof: bool = True) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        for chunk in chunks:
            sock.sendall(chunk)
        if eof:
            sock.shutdown(socket.SHUT_WR)
        received = b""
        while data := sock.recv(65536):
            received += data
        return received


def body_of(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" in head.lower()
    size, _, rest = body.partition(b"\r\n")
    return rest[: int(size, 16)]


def test_request_may_be_cut_anywhere() -> None:
    def use(port: int) -> set[bytes]:
        return {body_of(raw(port, REQUEST[:cut], REQUEST[cut:])) for cut in range(len(REQUEST) + 1)}

    assert with_server(use) == {b"GET /a (('x', '1'), ('y', ''))"}


def test_connection_is_kept_and_pipelined_requests_are_answered_in_order() -> None:
    def use(port: int) -> bytes:
        return raw(port, REQUEST + REQUEST.replace(b"/a", b"/b"))

    answer = with_server(use)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.index(b"GET /a") < answer.index(b"GET /b")


def test_old_clients_and_head_get_no_chunks() -> None:
    def use(port: int) -> tuple[bytes, bytes]:
        old = raw(port, b"GET /a HTTP/1.0\r\n\r\n")
        head = raw(port, b"HEAD /a HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        return old, head

    old, head = with_server(use)
    assert b"chunked" not in old.lower()
    assert old.endswith(b"\r\n\r\nGET /a ()")
    assert head.endswith(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")


def test_form_of_a_post_carries_parameters() -> None:
    def use(port: int) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/f?a=1", "b=2&c=%20", {"content-type": "application/x-www-form-urlencoded"})
        body = connection.getresponse().read()
        connection.close()
        return body

    assert with_server(use) == b"POST /f (('a', '1'), ('b', '2'), ('c', ' '))"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),  # no host
        (b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 20_000, b"431"),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 70000\r\n\r\n" + b"z" * 70_000, b"413"),
        (b"GET / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip\r\n\r\n", b"501"),
    ],
)
def test_what_is_not_http_is_refused(sent: bytes, status: bytes) -> None:
    assert with_server(lambda port: raw(port, sent, eof=False)).split(b" ")[1] == status


def test_failing_page_is_logged_and_the_next_one_is_served(caplog: pytest.LogCaptureFixture) -> None:
    def use(port: int) -> bytes:
        return raw(port, REQUEST.replace(b"/a", b"/fails") + REQUEST)

    answer = with_server(use)
    assert b"HTTP/1.1 500" in answer
    assert b"boom" not in answer
    assert b"HTTP/1.1 200" in answer
    assert "boom" in caplog.text


def test_deferred_pieces_are_made_in_a_thread() -> None:
    def use(port: int) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/pieces")
        body = connection.getresponse().read()
        connection.close()
        return body

    assert with_server(use) == b"one elsewhere three"


def test_long_page_lets_others_run_between_pieces() -> None:
    """While a page of many pieces is made, the event loop goes on."""
    ran: list[str] = []

    def pages(_: PageRequest) -> Page:
        def pieces() -> Any:
            loop = asyncio.get_running_loop()
            loop.call_soon(ran.append, "loop")
            for _ in range(100):
                ran.append("piece")
                yield "x" * admin_http._WRITE_BYTES

        return Page(body=pieces())

    with_server(lambda port: raw(port, REQUEST), pages)
    assert ran.count("piece") == 100
    assert ran.index("loop") < 5


def test_unfinished_head_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_http, "_HEAD_TIMEOUT_S", 0.05)

    def use(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(REQUEST[:10])
            try:
                return sock.recv(100)
            except ConnectionResetError:
                return b""

    assert with_server(use) == b""


def test_a_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_http, "_WRITE_TIMEOUT_S", 0.05)
    closed = threading.Event()

    def pages(_: PageRequest) -> Page:
        def pieces() -> Any:
            try:
                for _ in range(10_000):
                    yield "x" * 65536
            finally:
                closed.set()

        return Page(body=pieces())

    def use(port: int) -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(REQUEST)
            return closed.wait(10)

    assert with_server(use, pages)


def test_a_client_that_does_not_read_the_end_of_its_last_answer_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin_http, "_WRITE_TIMEOUT_S", 0.05)
    transports = []

    class Server(PageServer):
        def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            transports.append(writer.transport)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            super().accepted(reader, writer)

    async def main() -> int:
        # The answer is longer than the kernel's buffers, but short enough for asyncio's buffer.
        async with Server("test", LOCAL, lambda _: text("x" * 60_000), SystemClock()) as server:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", server.address.port))
                client.sendall(REQUEST.replace(b"host: h", b"host: h\r\nconnection: close"))
                while not transports or server.connections:
                    await asyncio.sleep(0.001)
                # Otherwise the socket would stay open, and no longer count as a connection.
                return int(transports[0].get_write_buffer_size())

    assert asyncio.run(main()) == 0


def test_idle_connections_make_room_and_busy_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(port: int) -> tuple[bytes, bytes, bytes]:
        first = socket.create_connection(("127.0.0.1", port), timeout=10)
        second = socket.create_connection(("127.0.0.1", port), timeout=10)
        with first, second:
            for sock in (first, second):
                sock.sendall(REQUEST)
                assert sock.recv(65536).endswith(b"0\r\n\r\n")
            answer = raw(port, REQUEST)  # both are idle: the first, idle for longer, makes room
            gone = first.recv(100)
            second.sendall(REQUEST)
            return answer, gone, second.recv(65536)

    answer, gone, kept = with_server(use, most=2)
    assert answer.startswith(b"HTTP/1.1 200")
    assert gone == b""
    assert kept.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent", [REQUEST[:10], REQUEST.replace(b"/a", b"/long")], ids=["half a request", "unread"]
)
def test_probes_are_served_beside_slow_clients(sent: bytes) -> None:
    def pages(request: PageRequest) -> Page:
        return Page(body=("x" * 65536 for _ in range(1000))) if request.path == "/long" else echo(request)

    async def main() -> None:
        async with PageServer("test", LOCAL, pages, SystemClock(), max_connections=8) as server:
            slow = [socket.create_connection(("127.0.0.1", server.address.port)) for _ in range(8)]
            for sock in slow:
                sock.sendall(sent)
            while server.connections < 8 or any(each.stage is Stage.IDLE for each in server._connections):
                await asyncio.sleep(0.001)
            for _ in range(12):
                answer = await asyncio.to_thread(raw, server.address.port, REQUEST)
                assert answer.startswith(b"HTTP/1.1 200")
            for sock in slow:
                sock.close()

    asyncio.run(main())


def test_the_source_that_has_most_connections_makes_room() -> None:
    def use(port: int) -> tuple[bytes, bytes]:
        with contextlib.ExitStack() as stack:
            modest, *greedy = (
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(host, 0))
                )
                for host in ("127.0.0.2", *["127.0.0.3"] * 4)
            )
            modest.sendall(REQUEST)
            first = modest.recv(65536)
            for sock in greedy:
                sock.sendall(REQUEST[:10])
            raw(port, REQUEST)
            modest.sendall(REQUEST)
            return first, modest.recv(65536)

    for answer in with_server(use, most=4):
        assert answer.startswith(b"HTTP/1.1 200")


def test_answer_under_way_is_finished_when_the_server_closes() -> None:
    async def main() -> bytes:
        server = PageServer("test", LOCAL, lambda _: Page(body=("a", Deferred(lambda: asked.set() or "b"))), clock)
        async with server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.address.port)
            writer.write(REQUEST)
            await asyncio.to_thread(asked.wait, 10)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    asked, clock = threading.Event(), SystemClock()
    answer = asyncio.run(main())
    assert answer.endswith(b"2\r\nab\r\n0\r\n\r\n")


def test_port_taken_is_named() -> None:
    async def main() -> None:
        async with PageServer("one", LOCAL, echo, SystemClock()) as first:
            with pytest.raises(PortTaken) as caught:
                await PageServer("two", first.address, echo, SystemClock()).__aenter__()
        assert str(first.address) in str(caught.value)

    asyncio.run(main())


def test_two_generations_may_share_an_address_and_nobody_else_may() -> None:
    clock = SystemClock()

    async def main() -> None:
        async with PageServer("old", LOCAL, echo, clock, reuse_port=True) as old:
            async with PageServer("new", old.address, echo, clock, reuse_port=True) as new:
                assert new.address == old.address
                answers = [
                    await asyncio.to_thread(raw, old.address.port, b"GET / HTTP/1.0\r\n\r\n") for _ in range(20)
                ]
                assert new.connections_total == 20 == len(answers)  # the newest process is asked
            with pytest.raises(PortTaken):
                await PageServer("other", old.address, echo, clock).__aenter__()
            with pytest.raises(PortTaken):  # of the same make, but it did not mean to
                await PageServer("alone", old.address, echo, clock, reuse_port=True, alone=True).__aenter__()
            assert b"GET /still" in await asyncio.to_thread(raw, old.address.port, b"GET /still HTTP/1.0\r\n\r\n")

    asyncio.run(main())


def test_a_unix_connection_has_one_request_which_must_be_complete_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalServer, "request_s", 0.2)

    async def main() -> None:
        path = tmp_path / "run" / "page.sock"
        async with LocalServer("test", path, echo, SystemClock()) as server:
            for sent, answer in ((REQUEST + REQUEST, b"HTTP/1.1 200 OK"), (REQUEST[:-1], b"HTTP/1.1 408 ")):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(sent)
                received = await reader.read()  # to the end: the server closes without the client's EOF
                assert received.startswith(answer)
                assert received.count(b"HTTP/1.1 ") == 1
                writer.close()
            assert server.answers == {200: 1, 408: 1}
        assert not path.exists()

    asyncio.run(main())
