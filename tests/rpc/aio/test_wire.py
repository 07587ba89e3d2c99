"""What peers do on the wire that no gRPC library would: written with h2 and by hand, frame by frame."""

import asyncio
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import pytest
import uvloop

from rpc.aio import client as client_module
from rpc.aio.client import Channel
from rpc.aio.connection import Keepalive
from rpc.aio.server import Handler, Server, ServerCall, unary
from rpc.messages import prefix
from rpc.status import RpcFailed, Status

LIMIT_S = 20.0
GRPC = ("content-type", "application/grpc")
HEAD = [(":status", "200"), GRPC]
OK = [("grpc-status", "0")]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    uvloop.run(limited())


def framed(message: bytes) -> bytes:
    return prefix(message) + message


class Peer:
    """One connection, spoken by h2."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_client: bool) -> None:
        config = h2.config.H2Configuration(client_side=is_client, validate_outbound_headers=False)
        self.h2 = h2.connection.H2Connection(config)
        self.reader, self.writer = reader, writer
        self.events: list[h2.events.Event] = []
        self.h2.initiate_connection()

    async def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def until(self, kind: type[h2.events.Event], *, stream_id: int | None = None) -> Any:
        """The next event of a kind; others are kept in ``events``."""
        while True:
            for index, event in enumerate(self.events):
                if isinstance(event, kind) and stream_id in (None, getattr(event, "stream_id", None)):
                    del self.events[: index + 1]
                    return event
            await self.flush()
            data = await self.reader.read(65536)
            if not data:
                raise EOFError
            self.events += self.h2.receive_data(data)

    async def head(self, fields: list[tuple[str, str]], *, ended: bool = False) -> None:
        self.h2.send_headers(1, fields, end_stream=ended)
        await self.flush()

    async def data(self, data: bytes, *, ended: bool = False) -> None:
        self.h2.send_data(1, data, end_stream=ended)
        await self.flush()


Script = Callable[[Peer], Coroutine[Any, Any, None]]


async def against(script: Script, main: Callable[[Channel], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run ``main`` with a channel to a server that does what ``script`` says once the request is there."""
    failures: list[Exception] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer, is_client=False)
        try:
            await peer.until(h2.events.RequestReceived)
            await script(peer)
            await peer.flush()
            while await reader.read(65536):
                pass
        except (EOFError, ConnectionError):
            pass
        except (AssertionError, h2.exceptions.ProtocolError) as error:
            failures.append(error)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", **options) as channel:
        await main(channel)
    assert failures == []


async def outcome(channel: Channel) -> tuple[list[bytes], RpcFailed | None]:
    """What a call brings: its messages and how it failed."""
    messages = []
    call = await channel.call("/t.S/M")
    try:
        while (message := await call.read()) is not None:
            messages.append(message)
    except RpcFailed as failure:
        return messages, failure
    return messages, None


ANSWERS: list[tuple[str, list[tuple[str, Any]], list[bytes], Status | None, str]] = [
    ("well", [("head", HEAD), ("data", framed(b"a")), ("end", OK)], [b"a"], None, ""),
    ("trailers only", [("end", [*HEAD, ("grpc-status", "5"), ("grpc-message", "x")])], [], Status.NOT_FOUND, "x"),
    ("trailers only, well", [("end", [*HEAD, *OK])], [], None, ""),
    ("a proxy's page", [("end", [(":status", "503")])], [], Status.UNAVAILABLE, "HTTP status 503"),
    ("a page with text", [("head", [(":status", "404")]), ("data", b"no")], [], Status.UNIMPLEMENTED, "404"),
    ("not gRPC", [("head", [(":status", "200"), ("content-type", "text/html")])], [], Status.UNKNOWN, "text/html"),
    (
        "no status",
        [("head", HEAD), ("data", framed(b"a")), ("close", b"")],
        [b"a"],
        Status.INTERNAL,
        "grpc-status",
    ),
    ("cut", [("head", HEAD), ("data", framed(b"abc")[:6]), ("end", OK)], [], Status.INTERNAL, "inside a message"),
    ("compressed", [("head", HEAD), ("data", b"\x01\0\0\0\x01x")], [], Status.UNIMPLEMENTED, "compressed"),
    ("too long", [("head", HEAD), ("data", b"\0\0\x10\0\0")], [], Status.RESOURCE_EXHAUSTED, "1048576"),
    ("reset", [("head", HEAD), ("data", framed(b"a")), ("reset", 8)], [b"a"], Status.CANCELLED, "CANCEL"),
    ("calm", [("reset", 11)], [], Status.RESOURCE_EXHAUSTED, "ENHANCE_YOUR_CALM"),
    ("informed", [("head", [(":status", "103")]), ("head", HEAD), ("end", OK)], [], None, ""),
    ("data first", [("raw", b"\0\0\1\0\0\0\0\0\1x")], [], Status.INTERNAL, "PROTOCOL_ERROR"),
    ("nonsense", [("raw", b"\0\0\1\4\0\0\0\0\0x")], [], Status.UNAVAILABLE, "broke HTTP/2: FRAME_SIZE_ERROR"),
    ("gone", [("head", HEAD), ("eof", b"")], [], Status.UNAVAILABLE, "socket closed"),
    ("goodbye", [("goaway", b"max_age"), ("eof", b"")], [], Status.UNAVAILABLE, "after GOAWAY NO_ERROR max_age"),
]


@pytest.mark.parametrize(
    ("steps", "messages", "status", "words"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS]
)
def test_answers(steps: list[tuple[str, Any]], messages: list[bytes], status: Status | None, words: str) -> None:
    async def script(peer: Peer) -> None:
        for step, value in steps:
            match step:
                case "head" | "end":
                    await peer.head(value, ended=step == "end")
                case "data" | "close":
                    await peer.data(value, ended=step == "close")
                case "reset":
                    peer.h2.reset_stream(1, value)
                case "raw":
                    await peer.flush()
                    peer.writer.write(value)
                case "goaway":
                    peer.writer.write(struct.pack(">HBBBLLL", 0, 8 + len(value), 7, 0, 0, 1, 0) + value)
                case "eof":
                    peer.writer.close()

    async def main(channel: Channel) -> None:
        got, failure = await outcome(channel)
        assert got == messages
        assert (None if failure is None else failure.status) is status
        assert failure is None or words in failure.details

    run(lambda: against(script, main, message_limit_bytes=1000))


def test_a_call_outlives_goaway_and_the_next_one_takes_a_new_connection() -> None:
    connections, ended = 0, asyncio.Event()

    async def script(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        goaway = struct.pack(">HBBBLLL", 0, 8, 7, 0, 0, 1, 0)
        await peer.head(HEAD)
        peer.writer.write(goaway)
        await peer.data(framed(b"%d" % connections))
        await asyncio.sleep(0.1)
        await peer.data(framed(b"late"))
        await peer.head(OK, ended=True)
        with suppress(EOFError):
            await peer.until(h2.events.PingReceived)  # which does not come
        ended.set()

    async def main(channel: Channel) -> None:
        first = await channel.call("/t.S/M")
        assert await first.read() == b"1"
        second = await channel.call("/t.S/M")
        assert await second.read() == b"2"
        for call in (first, second):
            assert await call.read() == b"late"
            assert await call.read() is None
        await ended.wait()  # the first connection, with its only call

    run(lambda: against(script, main))


def test_calls_that_goaway_leaves_out_failed_without_effect() -> None:
    async def script(peer: Peer) -> None:
        peer.writer.write(struct.pack(">HBBBLLL", 0, 8, 7, 0, 0, 0, 0))

    async def main(channel: Channel) -> None:
        _, failure = await outcome(channel)
        assert failure is not None
        assert str(failure) == "UNAVAILABLE: stream reset with REFUSED_STREAM"

    run(lambda: against(script, main))


def test_a_server_that_is_silent_is_left() -> None:
    async def script(peer: Peer) -> None:
        await peer.flush()
        await peer.reader.read(-1)  # h2 would answer

    async def main(channel: Channel) -> None:
        _, failure = await outcome(channel)
        assert failure is not None
        assert str(failure) == "UNAVAILABLE: no answer to a PING within 0.1 s"

    run(lambda: against(script, main, keepalive=Keepalive(interval_s=0.05, timeout_s=0.1)))


def test_a_server_that_answers_pings_is_kept() -> None:
    async def script(peer: Peer) -> None:
        for _ in range(3):
            await peer.until(h2.events.PingReceived)
        await peer.head([*HEAD, *OK], ended=True)

    async def main(channel: Channel) -> None:
        assert await outcome(channel) == ([], None)

    run(lambda: against(script, main, keepalive=Keepalive(interval_s=0.05, timeout_s=0.5)))


def test_the_window_bounds_what_is_sent() -> None:
    async def script(peer: Peer) -> None:
        received = 0
        while received < 65_535:
            received += len((await peer.until(h2.events.DataReceived)).data)
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.2):
                await peer.until(h2.events.DataReceived)
        peer.h2.increment_flow_control_window(2**20, 1)
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.2):
                await peer.until(h2.events.DataReceived)
        peer.h2.increment_flow_control_window(2**20)
        while received < 100_005:
            received += len((await peer.until(h2.events.DataReceived)).data)
        await peer.head([*HEAD, *OK], ended=True)

    async def main(channel: Channel) -> None:
        call = await channel.call("/t.S/M")
        await call.write(bytes(100_000))
        assert await call.read() is None

    run(lambda: against(script, main))


def test_an_address_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CONNECT_S", 0.2)

    async def main() -> None:
        import socket

        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            address = full.getsockname()
            waiting = [socket.socket() for _ in range(3)]
            for sock in waiting:
                sock.setblocking(False)
                sock.connect_ex(address)
            async with Channel(f"127.0.0.1:{address[1]}") as channel:
                with pytest.raises(RpcFailed, match="no answer in time"):
                    await channel.call("/t.S/M")
            for sock in waiting:
                sock.close()

    run(main)


# The server's side


async def echo(call: ServerCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)


async def served(
    methods: dict[str, Handler], main: Callable[[Peer], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async with Server(methods.get, **options) as server:
        host, _, port = (await server.listen("127.0.0.1:0")).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            await main(Peer(reader, writer, is_client=True))
        finally:
            writer.close()


def request(path: str, **more: str) -> list[tuple[str, str]]:
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a", "te": "trailers"}
    return list({**fields, "content-type": "application/grpc", **more}.items())


@pytest.mark.parametrize(
    ("fields", "status", "grpc"),
    [
        ({":method": "GET"}, "405", None),
        ({"content-type": "text/plain"}, "415", None),
        ({"grpc-encoding": "gzip"}, "200", "12"),
        ({"grpc-timeout": "soon"}, "200", "13"),
        ({":path": "/other"}, "200", "12"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_requests_that_are_refused(fields: dict[str, str], status: str, grpc: str | None, ended: bool) -> None:
    async def main(peer: Peer) -> None:
        peer.h2.send_headers(1, request("/echo", **fields), end_stream=ended)
        answer = await peer.until(h2.events.ResponseReceived)
        found = {name.decode(): value.decode() for name, value in answer.headers}
        assert (found[":status"], found.get("grpc-status")) == (status, grpc)
        await peer.until(h2.events.StreamEnded)
        # The connection goes on.
        peer.h2.send_headers(3, request("/echo"))
        peer.h2.send_data(3, framed(b"x"), end_stream=True)
        assert (await peer.until(h2.events.DataReceived, stream_id=3)).data == framed(b"x")

    run(lambda: served({"/echo": echo}, main))


def test_deadlines_of_callers() -> None:
    async def never(call: ServerCall) -> None:
        await asyncio.Event().wait()

    async def main(peer: Peer) -> None:
        peer.h2.send_headers(1, request("/never", **{"grpc-timeout": "50m"}))
        answer = await peer.until(h2.events.ResponseReceived)
        assert (b"grpc-status", b"4") in [(bytes(name), bytes(value)) for name, value in answer.headers]

    run(lambda: served({"/never": never}, main))


@pytest.mark.parametrize("data", [b"", framed(b"a") + framed(b"b")])
def test_unary_methods_take_one_message(data: bytes) -> None:
    async def main(peer: Peer) -> None:
        peer.h2.send_headers(1, request("/unary"))
        peer.h2.send_data(1, data, end_stream=True)
        answer = await peer.until(h2.events.ResponseReceived)
        assert (b"grpc-status", b"12") in [(bytes(name), bytes(value)) for name, value in answer.headers]

    run(lambda: served({"/unary": unary(lambda message, call: message)}, main))


def test_a_call_cut_inside_a_message_is_told() -> None:
    async def main(peer: Peer) -> None:
        peer.h2.send_headers(1, request("/echo"))
        peer.h2.send_data(1, framed(b"abc")[:7], end_stream=True)
        answer = await peer.until(h2.events.ResponseReceived)
        assert (b"grpc-status", b"13") in [(bytes(name), bytes(value)) for name, value in answer.headers]

    run(lambda: served({"/echo": echo}, main))


def test_many_calls_may_be_given_up_before_an_answer() -> None:
    async def never(call: ServerCall) -> None:
        await asyncio.Event().wait()

    async def main(peer: Peer) -> None:
        for stream_id in range(1, 1601, 2):
            peer.h2.send_headers(stream_id, request("/never"))
            peer.h2.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
        peer.h2.send_headers(1601, request("/echo"))
        peer.h2.send_data(1601, framed(b"x"))
        assert (await peer.until(h2.events.DataReceived)).data == framed(b"x")

    run(lambda: served({"/never": never, "/echo": echo}, main))


def test_who_pings_and_does_not_read_is_cut() -> None:
    async def flood(peer: Peer) -> None:
        ping = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
        while not peer.reader.at_eof():
            peer.writer.write(ping * 1000)
            await peer.writer.drain()
            await asyncio.sleep(0)
        raise EOFError

    async def main(peer: Peer) -> None:
        await peer.flush()
        with pytest.raises((ConnectionError, EOFError)):
            await flood(peer)

    run(lambda: served({}, main))


def test_credit_of_calls_that_ended_unread_comes_back() -> None:
    """What a handler left unread must not use up the connection for the others."""

    async def reads_one(call: ServerCall) -> None:
        assert await call.read() == b"x"

    async def main(peer: Peer) -> None:
        piece = framed(bytes(15_000))
        for stream_id in range(1, 401, 2):  # 12 MB in all, of which the window is a third
            peer.h2.send_headers(stream_id, request("/one"))
            peer.h2.send_data(stream_id, framed(b"x"))
            while peer.h2.local_flow_control_window(stream_id) < 60_100:
                await peer.until(h2.events.WindowUpdated)
            for _ in range(4):
                peer.h2.send_data(stream_id, piece)
            await peer.until(h2.events.StreamEnded, stream_id=stream_id)

    run(lambda: served({"/one": reads_one}, main))
