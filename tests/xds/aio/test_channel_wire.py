"""Faults on the wire that a gRPC library cannot be made to cause: a table, frame by frame.

Each row runs on both loops. The server uses h2 or raw bytes. Its writes arrive at the client as single reads,
unless the kernel splits them. The same faults with every split are in tests/xds/grpc/test_connection.py.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import pytest
import uvloop

from xds.aio import channel as channel_module
from xds.aio.channel import Channel, Keepalive
from xds.aio.tls import READ_BYTES, Plain, Transport
from xds.grpc.messages import prefix
from xds.grpc.status import RpcFailed, Status

LIMIT_S = 120.0  # for a hang: two of these take 7 s of CPU each, and minutes beside eight busy loops
GRPC = ("content-type", "application/grpc")
HEAD = [(":status", "200"), GRPC]
OK = [("grpc-status", "0")]
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: str = "uvloop") -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    (uvloop.run if loop == "uvloop" else asyncio.run)(limited())


def framed(message: bytes) -> bytes:
    return prefix(message) + message


def goaway(last_stream_id: int, words: bytes = b"", code: int = 0) -> bytes:
    return struct.pack(">HBBBLLL", 0, 8 + len(words), 7, 0, 0, last_stream_id, code) + words


class Peer:
    """One connection, spoken by h2 as the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        config = h2.config.H2Configuration(client_side=False, validate_outbound_headers=False)
        self.h2 = h2.connection.H2Connection(config)
        self.reader, self.writer = reader, writer
        self.events: list[h2.events.Event] = []
        self.begun = False

    def begin(self, **settings: int) -> None:
        """Queue our SETTINGS. Idempotent."""
        if not self.begun:
            self.begun = True
            values = {getattr(h2.settings.SettingCodes, name.upper()): value for name, value in settings.items()}
            self.h2.local_settings = h2.settings.Settings(client=False, initial_values=values)
            self.h2.initiate_connection()

    async def flush(self, more: bytes = b"") -> None:
        """Send what h2 queued, and ``more``, in one write."""
        self.writer.write(self.h2.data_to_send() + more)
        await self.writer.drain()

    async def until(self, kind: type[h2.events.Event], *, stream_id: int | None = None) -> Any:
        """Return the next event of a kind. Others are kept in ``events``."""
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

    async def request(self) -> Any:
        """The next request, after our SETTINGS if they have not gone out."""
        self.begin()
        return await self.until(h2.events.RequestReceived)

    async def head(self, fields: list[tuple[str, str]], *, ended: bool = False) -> None:
        self.h2.send_headers(1, fields, end_stream=ended)
        await self.flush()

    async def data(self, data: bytes, *, ended: bool = False) -> None:
        self.h2.send_data(1, data, end_stream=ended)
        await self.flush()

    async def eof(self) -> None:
        """Read until the client has closed, answering what h2 answers."""
        await self.flush()
        while data := await self.reader.read(65536):
            self.h2.receive_data(data)
            await self.flush()


Script = Callable[[Peer], Coroutine[Any, Any, None]]


async def against(
    script: Script,
    main: Callable[[Channel], Coroutine[Any, Any, None]],
    *,
    unix: Path | None = None,
    **options: Any,
) -> None:
    """Run ``main`` with a channel to a server that runs ``script`` on the accepted connection.

    Args:
        unix: the socket to serve on; None: a port of loopback.
    """
    failures: list[Exception] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        try:
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

    if unix is None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    else:
        server = await asyncio.start_unix_server(serve, unix)
        target = f"unix:{unix}"
    async with server, Channel(target, **options) as channel:
        await main(channel)
    assert failures == []


async def outcome(channel: Channel) -> tuple[list[bytes], RpcFailed | None]:
    """Return the result of a call: its messages, and how it failed."""
    messages = []
    try:
        call = await channel.call("/t.S/M")
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
    ("head and reset in one write", [("queue", HEAD), ("reset", 8)], [], Status.CANCELLED, "CANCEL"),
    ("refused", [("reset", 7)], [], Status.UNAVAILABLE, "REFUSED_STREAM"),
    ("calm", [("reset", 11)], [], Status.RESOURCE_EXHAUSTED, "ENHANCE_YOUR_CALM"),
    ("informed", [("head", [(":status", "103")]), ("head", HEAD), ("end", OK)], [], None, ""),
    ("data first", [("raw", b"\0\0\1\0\0\0\0\0\1x")], [], Status.UNAVAILABLE, "PROTOCOL_ERROR"),
    ("nonsense", [("raw", b"\0\0\1\4\0\0\0\0\0x")], [], Status.UNAVAILABLE, "broke HTTP/2: FRAME_SIZE_ERROR"),
    ("gone", [("head", HEAD), ("eof", b"")], [], Status.UNAVAILABLE, "socket closed"),
    (
        "half a frame head",
        [("head", HEAD), ("data", framed(b"a")), ("raw", b"\0\0"), ("eof", b"")],
        [b"a"],
        Status.UNAVAILABLE,
        "socket closed",
    ),
    (
        "half a frame",
        [("head", HEAD), ("data", framed(b"a")), ("raw", b"\0\0\x64\0\0\0\0\0\1\0\0\0\0\x5fabc"), ("eof", b"")],
        [b"a"],
        Status.UNAVAILABLE,
        "socket closed",
    ),
    (
        "goodbye",
        [("raw", goaway(1, b"max_age")), ("eof", b"")],
        [],
        Status.UNAVAILABLE,
        "after GOAWAY NO_ERROR max",
    ),
    (
        "half a goodbye",
        [("raw", goaway(1, b"max_age")[:12]), ("eof", b"")],
        [],
        Status.UNAVAILABLE,
        "socket closed",
    ),
    ("left out", [("raw", goaway(0))], [], Status.UNAVAILABLE, "REFUSED_STREAM"),
]


@LOOPS
@pytest.mark.parametrize(
    ("steps", "messages", "status", "words"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS]
)
def test_responses_over_the_wire(
    steps: list[tuple[str, Any]], messages: list[bytes], status: Status | None, words: str, loop: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        for step, value in steps:
            match step:
                case "head" | "end":
                    await peer.head(value, ended=step == "end")
                case "queue":
                    peer.h2.send_headers(1, value)
                case "data" | "close":
                    await peer.data(value, ended=step == "close")
                case "reset":
                    peer.h2.reset_stream(1, value)
                case "raw":
                    await peer.flush(value)
                case "eof":
                    peer.writer.close()

    async def main(channel: Channel) -> None:
        got, failure = await outcome(channel)
        assert got == messages
        assert (None if failure is None else failure.status) is status
        assert failure is None or words in failure.details

    run(lambda: against(script, main, message_limit_bytes=1000), loop)


@LOOPS
def test_goaway_in_the_bytes_that_finish_the_handshake(loop: str) -> None:
    """The server ends every connection that it accepts; the call fails, and is not dialled again and again."""
    accepted = 0

    async def script(peer: Peer) -> None:
        nonlocal accepted
        accepted += 1
        peer.begin()
        await peer.flush(goaway(0, b"going down"))

    async def main(channel: Channel) -> None:
        for count in range(1, 51):
            _, failure = await outcome(channel)
            assert failure is not None
            assert failure.status is Status.UNAVAILABLE
            assert "GOAWAY NO_ERROR going down" in failure.details
            assert accepted == count

    run(lambda: against(script, main), loop)


@LOOPS
@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", goaway(0), b"\0\0"])
def test_servers_that_end_before_their_settings(first: bytes, loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.flush(first)
        peer.writer.close()

    async def main(channel: Channel) -> None:
        _, failure = await outcome(channel)
        assert failure is not None
        assert failure.status is Status.UNAVAILABLE

    run(lambda: against(script, main), loop)


@LOOPS
def test_no_calls_allowed_and_then_one_after_the_other(loop: str) -> None:
    async def script(peer: Peer) -> None:
        peer.begin(max_concurrent_streams=0)
        await peer.until(h2.events.SettingsAcknowledged)
        assert not [event for event in peer.events if isinstance(event, h2.events.RequestReceived)]
        peer.h2.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 1})
        for count in range(3):
            request = await peer.request()
            # Were a second request on its way, h2 would refuse the connection: its limit is 1.
            peer.h2.send_headers(request.stream_id, [*HEAD, *OK], end_stream=True)
            await peer.flush()
            assert request.stream_id == 2 * count + 1

    async def main(channel: Channel) -> None:
        results = await asyncio.gather(*(outcome(channel) for _ in range(3)))
        assert results == [([], None)] * 3

    run(lambda: against(script, main), loop)


@LOOPS
def test_no_calls_are_ever_allowed(loop: str) -> None:
    async def script(peer: Peer) -> None:
        peer.begin(max_concurrent_streams=0)
        await peer.eof()

    async def main(channel: Channel) -> None:
        _, failure = await outcome(channel)
        assert str(failure) == "UNAVAILABLE: the server allows no more than 0 calls at once"
        with pytest.raises(RpcFailed, match="DEADLINE_EXCEEDED"):
            await channel.unary("/t.S/M", b"", timeout_s=0.05)

    run(lambda: against(script, main, connect_timeout_s=1.0), loop)


@LOOPS
def test_a_call_that_waits_for_room_moves_to_the_next_connection(loop: str) -> None:
    connections = 0

    async def script(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        peer.begin(max_concurrent_streams=1 if connections == 1 else 10)
        await peer.request()
        if connections == 1:
            await waiting.wait()
            await peer.flush(goaway(1))
            await second.wait()
        await peer.head([*HEAD, *OK], ended=True)
        second.set()

    async def main(channel: Channel) -> None:
        first = await channel.call("/t.S/M")
        other = asyncio.get_running_loop().create_task(outcome(channel))
        await asyncio.sleep(0)
        waiting.set()
        assert await other == ([], None)
        assert connections == 2
        assert await first.read() is None

    waiting, second = asyncio.Event(), asyncio.Event()
    run(lambda: against(script, main), loop)


@LOOPS
def test_a_call_outlives_goaway_and_the_next_one_takes_a_new_connection(loop: str) -> None:
    connections, both = 0, asyncio.Event()
    ended = asyncio.Semaphore(0)

    async def script(peer: Peer) -> None:
        nonlocal connections
        await peer.request()
        connections += 1
        await peer.head(HEAD)
        await peer.flush(goaway(1))
        await peer.data(framed(b"%d" % connections))
        if connections == 2:
            both.set()
        await both.wait()
        await peer.data(framed(b"late"))
        await peer.head(OK, ended=True)
        await peer.eof()
        ended.release()

    async def main(channel: Channel) -> None:
        first = await channel.call("/t.S/M")
        assert await first.read() == b"1"
        second = await channel.call("/t.S/M")
        assert await second.read() == b"2"
        for call in (first, second):
            assert await call.read() == b"late"
            assert await call.read() is None
        await ended.acquire()  # the first connection closes with its only call

    run(lambda: against(script, main), loop)


@LOOPS
def test_a_server_that_dies_inside_a_long_message(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.head(HEAD)
        # A DATA frame of 16,384 bytes, of which 379 are missing.
        peer.writer.write(b"\0\x40\0\0\0\0\0\0\1" + b"\0\0\x10\0\0" + bytes(16_000))
        await peer.writer.drain()
        peer.writer.transport.abort()

    async def main(channel: Channel) -> None:
        messages, failure = await outcome(channel)
        assert messages == []
        assert failure is not None
        assert failure.status is Status.UNAVAILABLE
        # The channel connects anew, and learns the same.
        _, failure = await outcome(channel)
        assert failure is not None

    run(lambda: against(script, main), loop)


@LOOPS
def test_a_silent_server_is_given_up(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.flush()
        await peer.reader.read(-1)  # h2 would answer

    async def main(channel: Channel) -> None:
        _, failure = await outcome(channel)
        assert str(failure) == "UNAVAILABLE: no answer to a PING within 0.1 s"

    run(lambda: against(script, main, keepalive=Keepalive(interval_s=0.05, timeout_s=0.1)), loop)


@LOOPS
def test_no_ping_goes_out_without_a_call(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.head([*HEAD, *OK], ended=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(peer.until(h2.events.PingReceived), 0.3)

    async def main(channel: Channel) -> None:
        assert await outcome(channel) == ([], None)
        await asyncio.sleep(0.4)

    run(lambda: against(script, main, keepalive=Keepalive(interval_s=0.05, timeout_s=0.1)), loop)


@LOOPS
@pytest.mark.parametrize(("debug", "doubled"), [(b"too_many_pings", True), (b"too many calls", False)])
def test_server_that_complains_of_pings_gets_half_as_many(loop: str, debug: bytes, doubled: bool) -> None:
    keepalive = Keepalive(interval_s=0.05, timeout_s=5)

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.until(h2.events.PingReceived)
        code = h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
        peer.h2.close_connection(code, additional_data=debug, last_stream_id=0)
        await peer.flush()

    async def main(channel: Channel) -> None:
        _, failure = await outcome(channel)
        assert failure is not None
        assert keepalive.interval_s == (0.1 if doubled else 0.05)

    run(lambda: against(script, main, keepalive=keepalive), loop)


def test_pings_are_rarer_than_grpc_servers_allow_without_settings() -> None:
    assert Keepalive().interval_s > 300


@LOOPS
def test_a_server_that_answers_pings_is_kept(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        for _ in range(3):
            await peer.until(h2.events.PingReceived)
        await peer.head([*HEAD, *OK], ended=True)

    async def main(channel: Channel) -> None:
        assert await outcome(channel) == ([], None)

    run(lambda: against(script, main, keepalive=Keepalive(interval_s=0.05, timeout_s=0.5)), loop)


@LOOPS
def test_control_frames_have_no_budget(loop: str) -> None:
    """gRPC's C core estimates bandwidth with PINGs; a server that sends many of them is not hung up on."""

    async def script(peer: Peer) -> None:
        await peer.request()
        ping = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
        settings = b"\0\0\0\4\0\0\0\0\0"
        for _ in range(100):
            await peer.flush((ping + settings) * 100)
            await peer.reader.read(65536)
        await peer.head([*HEAD, *OK], ended=True)

    async def main(channel: Channel) -> None:
        assert await outcome(channel) == ([], None)

    run(lambda: against(script, main), loop)


@LOOPS
def test_a_server_that_asks_and_does_not_read_is_cut(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel's buffers come on top: of a Unix socket 200 KiB, of TCP megabytes of 17 bytes each.
    monkeypatch.setattr(channel_module, "_UNSENT_BYTES", 128 * 1024)

    async def script(peer: Peer) -> None:
        await peer.request()
        ping = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
        while True:
            await peer.flush(ping * 1000)

    async def main(channel: Channel) -> None:
        _, failure = await outcome(channel)
        assert str(failure) == "UNAVAILABLE: the server does not read our requests"

    run(lambda: against(script, main, unix=tmp_path / "s"), loop)


@LOOPS
def test_the_window_bounds_what_is_sent(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        received = 0
        while received < 65_535:
            received += len((await peer.until(h2.events.DataReceived)).data)
        assert received == 65_535
        # The stream gets room, the connection has none: the answer to a PING comes before any DATA.
        peer.h2.increment_flow_control_window(2**20, 1)
        peer.h2.ping(b"8 bytes.")
        await peer.until(h2.events.PingAckReceived)
        assert not [event for event in peer.events if isinstance(event, h2.events.DataReceived)]
        peer.h2.increment_flow_control_window(2**20)
        while received < 100_005:
            received += len((await peer.until(h2.events.DataReceived)).data)
        await peer.head([*HEAD, *OK], ended=True)

    async def main(channel: Channel) -> None:
        call = await channel.call("/t.S/M")
        await call.write(bytes(100_000))
        assert await call.read() is None

    run(lambda: against(script, main), loop)


@LOOPS
def test_an_address_that_never_answers_is_given_up(loop: str) -> None:
    async def main() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            address = full.getsockname()
            waiting = [socket.socket() for _ in range(3)]
            for sock in waiting:
                sock.setblocking(False)
                sock.connect_ex(address)
            async with Channel(f"127.0.0.1:{address[1]}", connect_timeout_s=0.2) as channel:
                with pytest.raises(RpcFailed, match="no answer in time"):
                    await channel.call("/t.S/M")
            for sock in waiting:
                sock.close()

    run(main, loop)


@LOOPS
def test_a_server_that_accepts_and_says_nothing_is_given_up(loop: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.read(-1)

    async def main(channel: Channel) -> None:
        with pytest.raises(RpcFailed, match="no answer in time"):
            await channel.call("/t.S/M")

    run(lambda: against(script, main, connect_timeout_s=0.1), loop)


class Slices:
    """The inner connection of :class:`Plain`. Counts the bytes of each turn of the loop."""

    def __init__(self) -> None:
        self.turn = 0
        self.slices: list[tuple[int, int]] = []
        self.total = 0
        self.lost = asyncio.get_running_loop().create_future()

    def opened(self, transport: Transport) -> None:
        pass

    def received(self, data: memoryview) -> None:
        self.slices.append((self.turn, len(data)))
        self.total += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass


@LOOPS
def test_one_turn_of_the_loop_handles_one_slice(loop: str) -> None:
    """The bound behind "a long answer does not stall the loop": no time is measured, work per turn is."""
    size = 20 * 2**20

    async def main() -> None:
        near, far = socket.socketpair()
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * 2**20)
        running = asyncio.get_running_loop()
        inner = Slices()

        async def tick() -> None:
            while not inner.lost.done():
                inner.turn += 1
                await asyncio.sleep(0)

        transport, _ = await running.create_connection(lambda: Plain(inner), sock=near)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(tick())
            await running.sock_sendall(far, bytes(size))
            far.close()
        transport.close()
        assert inner.total == size
        assert max(length for _, length in inner.slices) == READ_BYTES
        # A full slice pauses reading. Only after a smaller one can the same turn have another read.
        full = [turn for turn, length in inner.slices if length == READ_BYTES]
        assert len(full) == len(set(full))

    run(main, loop)
