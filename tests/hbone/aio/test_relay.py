"""Relays between every two kinds of ends, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import random
import socket
from collections.abc import AsyncIterator

import pytest

from hbone.aio import relay as relay_module
from hbone.aio.end import End
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, Relay, RelayEnd, relay
from hbone.aio.socket import CROWD_SOCKETS, CROWDED_UNSENT_BYTES, PlainSocket, abort_on_close
from hbone.aio.tls_socket import TlsSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ErrorCode, TunnelBroken, TunnelClosed
from tests.hbone.aio.harness import LOOPS, WAIT_S, App, Pair, connected, ends, polling, run, tcp_pair, until

KINDS = ("plain", "tls", "tunnel", "cleartext")


@contextlib.asynccontextmanager
async def chain(poller: Poller, *kinds: str) -> AsyncIterator[tuple[App, App, list[Relay], list[ByteCounts]]]:
    """App - plain end - relay - kinds... - relay - plain end - app."""
    async with contextlib.AsyncExitStack() as stack:
        near, inner_near = tcp_pair()
        inner_far, far = tcp_pair()
        before = stack.enter_context(PlainSocket(inner_near, poller))
        last = stack.enter_context(PlainSocket(inner_far, poller))
        relays = []
        counts = []
        for kind in kinds:
            entry, leave = await stack.enter_async_context(ends(kind, poller))
            counts.append(ByteCounts())
            relays.append(relay(before, entry, counts[-1]))
            before = leave
        counts.append(ByteCounts())
        relays.append(relay(before, last, counts[-1]))
        a, b = App(near), App(far)
        try:
            yield a, b, relays, counts
        finally:
            a.close()
            b.close()
            for one in relays:
                one.abort("test over")


def blob(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


async def exchange(a: App, b: App, up: bytes, down: bytes) -> None:
    async def send(app: App, data: bytes) -> None:
        await app.send(data)
        app.eof()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send(a, up))
        tasks.create_task(send(b, down))
        got_up = tasks.create_task(b.read_all())
        got_down = tasks.create_task(a.read_all())
    assert got_up.result() == up
    assert got_down.result() == down


@pytest.mark.parametrize("loop", LOOPS)
def test_64_mib_both_ways_at_once(loop: str) -> None:
    up, down = blob(64 << 20, 1), blob(64 << 20, 2)

    async def main() -> None:
        with polling() as poller:
            async with chain(poller, "tunnel") as (a, b, relays, counts):
                await exchange(a, b, up, down)
                for one in relays:
                    end = await one
                    assert end.error is None
                for count in counts:
                    assert (count.sent, count.received) == (len(up), len(down))

    run(main, loop)


@pytest.mark.parametrize("kinds", [*itertools.product(KINDS), *itertools.product(KINDS, KINDS)], ids="-".join)
@pytest.mark.parametrize("loop", LOOPS)
def test_every_pair_of_ends_moves_bytes_both_ways(kinds: tuple[str, ...], loop: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with chain(poller, *kinds) as (a, b, relays, _):
                await exchange(a, b, blob(3_000_000, 3), blob(2_000_001, 4))
                for one in relays:
                    assert (await one).error is None

    run(main, loop)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["a", "b"])
def test_half_close_passes_and_the_other_direction_goes_on(kind: str, first: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as (a, b, relays, _):
                early, late = (a, b) if first == "a" else (b, a)
                await early.send(b"question")
                early.eof()
                assert await late.read_all() == b"question"
                for number in range(5):
                    await late.send(b"%d" % number)
                    assert await early.read(1) == b"%d" % number
                late.eof()
                assert await early.read_all() == b""
                for one in relays:
                    assert isinstance(await one, RelayEnd)

    run(main)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resetter", ["a", "b"])
def test_reset_of_an_application_is_a_reset_on_the_other_side(kind: str, resetter: str) -> None:
    """An end instead would make truncated data look complete (RFC 9113, 8.5)."""

    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as (a, b, relays, _):
                one, other = (a, b) if resetter == "a" else (b, a)
                await one.send(b"x")
                assert await other.read(1) == b"x"
                one.reset()
                await _all_ended(relays)
                with pytest.raises(ConnectionResetError):
                    await other.read_all()

    run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_comes_after_what_was_received(kind: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as (a, b, relays, _):
                await b.send(blob(100_000, 5))
                received = await a.read(1)
                await asyncio.sleep(0.05)  # a reset may overtake what the application's own kernel holds
                b.reset()
                await _all_ended(relays)
                assert received + await a.read(99_999) == blob(100_000, 5)
                with pytest.raises(ConnectionResetError):
                    await a.read(1)

    run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_before_a_reset_counts(kind: str) -> None:
    """An application that sent everything and its end, and only then a reset, has answered completely."""

    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as (a, b, _, _):
                await b.send(b"all of it")
                b.eof()
                assert await a.read_all() == b"all of it"

    run(main)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_application_that_ends_and_then_resets_is_gone(kind: str, at_once: bool) -> None:
    """Otherwise its relay would wait for the other side, which might not send anything until it is notified.

    A stream reports the reset. A socket that was shut down and then closed reports nothing before the other side
    sends, because a RST could overtake data that the application has sent completely.
    """

    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as (a, b, relays, _):
                a.eof()
                if not at_once:
                    assert await b.read_all() == b""
                a.reset()
                await _all_ended(relays if kind in ("tunnel", "cleartext") else relays[:1])
                with contextlib.suppress(ConnectionResetError):
                    assert await b.read_all() == b""

    run(main)


@pytest.mark.parametrize("at_once", [True, False])
def test_an_application_that_ends_tls_and_then_resets_is_gone(at_once: bool) -> None:
    async def main() -> None:
        with polling() as poller:
            inner, outer = tcp_pair()
            async with ends("tls", poller) as (near, far):
                assert isinstance(near, TlsSocket)
                with PlainSocket(inner, poller) as other, contextlib.closing(App(outer)) as b:
                    over = relay(far, other, ByteCounts())
                    near.write_eof()
                    if not at_once:
                        assert await b.read_all() == b""
                    abort_on_close(near.link.sock)
                    near.close()
                    await _all_ended([over])

    run(main)


async def _all_ended(relays: list[Relay]) -> None:
    """Close each entry when its relay is over, like its owner. This notifies the network."""
    entries = [(one._a, one._b) for one in relays]

    async def follow(one: Relay, ends: tuple[End | None, End | None]) -> None:
        await _ended(one)
        for end in ends:
            if end is not None:
                end.close()

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        for one, ends in zip(relays, entries, strict=True):
            tasks.create_task(follow(one, ends))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_is_gone_stops_an_endless_writer(kind: str) -> None:
    """The writer stops at once, not only after the linger time: a download without a reader would continue at full
    speed until then.
    """

    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as (a, b, relays, _):
                entries = [one._b for one in relays]
                sending = asyncio.get_running_loop().create_task(b.send(bytes(1 << 30)))
                await a.read(1 << 20)
                a.reset()
                for one, entry in zip(relays, entries, strict=True):
                    await asyncio.wait_for(_ended(one), WAIT_S)
                    assert entry is not None
                    entry.close()  # like its owner at the end of the relay
                with contextlib.suppress(OSError):
                    await asyncio.wait_for(sending, WAIT_S)

    run(main)


def test_tunnels_cut_off_leave_their_connection_its_window() -> None:
    """Each is aborted with bytes that its reader has not taken; together more than the connection's window."""

    async def cut_off(poller: Poller, pair: Pair) -> None:
        opened, accepted = await pair.tunnel()
        near, inner_near = tcp_pair()
        inner_far, far = tcp_pair()
        reader, writer = App(near), App(far)
        with opened, accepted, PlainSocket(inner_near, poller) as one, PlainSocket(inner_far, poller) as two:
            relays = [relay(one, opened, ByteCounts()), relay(accepted, two, ByteCounts())]
            sending = asyncio.get_running_loop().create_task(writer.send(bytes(8 << 20)))
            while not one._pending:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)  # more arrives, as much as the stream's window lets
            for running in relays:
                running.abort("cut off")
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
        reader.close()
        writer.close()

    async def main() -> None:
        with polling() as poller:
            async with connected(poller) as pair:
                for _ in range(4):
                    await cut_off(poller, pair)
                await asyncio.sleep(0.05)  # what was on its way
                window = pair.client.engine._window
                assert window.credit + window.unacknowledged == window.size

    run(main)


async def _ended(one: object) -> object:
    return await one  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stalled_reader_stops_the_writer_and_bounds_what_is_held(kind: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as (a, b, _, _):
                sent = 0
                a.sock.setblocking(False)
                quiet = 0
                while quiet < 20:
                    try:
                        sent += a.sock.send(bytes(1 << 20))
                        quiet = 0
                    except BlockingIOError:
                        quiet += 1
                        await asyncio.sleep(0.01)
                    assert sent < 40 << 20, "never stops"
                # Three pairs of socket buffers (half a MiB each), a stream window, our own buffers.
                assert sent < 9 << 20
                a.eof()
                assert len(await b.read_all()) == sent

    run(main)


def test_bytes_before_the_relay_stay_in_the_kernel_and_can_be_looked_at() -> None:
    async def main() -> None:
        with polling() as poller:
            near, inner = tcp_pair()
            app = App(near)
            with PlainSocket(inner, poller) as end:
                waiting = asyncio.get_running_loop().create_task(end.peek(1))
                await asyncio.sleep(0)
                assert not waiting.done()
                await app.send(b"PROXY hello")
                await waiting
                assert await end.peek(6) == b"PROXY "
                assert await end.read(6) == b"PROXY "
                end.push_back(b"Y ")
                async with ends("plain", poller) as (one, two):
                    counts = ByteCounts()
                    first = relay(end, one, counts)
                    out_near, out_inner = tcp_pair()
                    with PlainSocket(out_inner, poller) as out:
                        out.send_first(b"HEADER")
                        second = relay(two, out, ByteCounts())
                        far = App(out_near)
                        assert await far.read(13) == b"HEADERY hello"
                        assert counts.sent == 7
                        app.close()
                        assert await far.read_all() == b""
                        far.close()
                        await first
                        await second

    run(main)


def test_peek_waits_for_more_and_stops_at_the_end() -> None:
    async def main() -> None:
        with polling() as poller:
            near, inner = tcp_pair()
            app = App(near)
            with PlainSocket(inner, poller) as end:
                await app.send(b"ab")
                assert await end.peek(10) == b"ab"
                more = asyncio.get_running_loop().create_task(end.peek(10, seen=2))
                await asyncio.sleep(0)
                assert not more.done()
                await app.send(b"c")
                assert await more == b"abc"
                app.close()
                assert await end.peek(10, seen=3) == b"abc"

    run(main)


def test_idle_relays_time_out_and_busy_ones_do_not() -> None:
    async def main() -> None:
        with polling() as poller:
            near, inner_near = tcp_pair()
            inner_far, far = tcp_pair()
            with near, far, PlainSocket(inner_near, poller) as one, PlainSocket(inner_far, poller) as two:
                running = relay(one, two, ByteCounts(), idle_timeout_s=0.05)
                for _ in range(8):
                    near.send(b"x")
                    await asyncio.sleep(0.02)
                end = await running
                assert end.timed_out
                assert end.first is None
                assert far.recv(100) == b"x" * 8

    run(main)


def test_the_idle_time_counts_from_the_last_byte() -> None:
    async def main() -> None:
        with polling() as poller:
            async with ends("plain", poller) as (one, far), ends("plain", poller) as (two, _):
                loop = asyncio.get_running_loop()
                running = relay(one, two, ByteCounts(), idle_timeout_s=1.0)
                await asyncio.sleep(0.1)
                far.write([memoryview(b"x")], 1)
                far.flush()
                last = loop.time()
                assert (await running).timed_out
                assert loop.time() - last >= 1.0

    run(main)


def test_abort_says_why_and_cancelling_aborts() -> None:
    async def main() -> None:
        with polling() as poller:
            async with ends("plain", poller) as (one, _), ends("plain", poller) as (two, _):
                running = relay(one, two, ByteCounts())
                running.abort("policy changed")
                end = await running
                assert isinstance(end.error, TunnelClosed)
                assert "policy changed" in str(end.error)
                assert one.peer is None
                again = relay(one, two, ByteCounts())
                task = asyncio.get_running_loop().create_task(_ended(again))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert one.peer is None

    run(main)


def test_counts_are_live_and_stay() -> None:
    async def main() -> None:
        with polling() as poller:
            async with chain(poller, "tunnel") as (a, b, relays, counts):
                await a.send(b"12345")
                assert await b.read(5) == b"12345"
                assert [count.sent for count in counts] == [5, 5]
                await b.send(b"123")
                assert await a.read(3) == b"123"
                assert [count.received for count in counts] == [3, 3]
                a.eof()
                b.eof()
                await relays[0]
                await relays[1]
                assert [(count.sent, count.received) for count in counts] == [(5, 3), (5, 3)]

    run(main)


def test_a_finished_relay_leaves_no_cycle() -> None:
    async def main() -> None:
        with polling() as poller:
            gc.collect()
            gc.disable()
            try:
                async with chain(poller, "tunnel") as (a, b, relays, _):
                    await exchange(a, b, b"up", b"down")
                    for one in relays:
                        await one
                    del one
                    relays.clear()
                    kinds = [type(thing).__name__ for thing in gc.get_objects()]
                    assert kinds.count("Relay") == 0
                kinds = [type(thing).__name__ for thing in gc.get_objects()]
                assert kinds.count("Tunnel") == 0
                assert kinds.count("PlainSocket") == 0
            finally:
                gc.enable()

    run(main)


@pytest.mark.parametrize("crowd", [0, CROWD_SOCKETS])
def test_in_a_crowd_the_kernel_keeps_little_for_a_reader_that_is_stalled(crowd: int) -> None:
    async def main() -> None:
        with polling() as poller, contextlib.ExitStack() as opened:
            for _ in range(crowd // 2):
                for sock in socket.socketpair():
                    opened.enter_context(sock)
                    poller.register(sock.fileno(), Handler())
                    opened.callback(poller.unregister, sock.fileno())
            writer, near = tcp_pair()
            far, reader = tcp_pair()
            with writer, reader, PlainSocket(near, poller) as source, PlainSocket(far, poller) as sink:
                async with asyncio.TaskGroup() as tasks:
                    relaying = tasks.create_task(_ended(relay(source, sink, ByteCounts())))
                    expected = CROWDED_UNSENT_BYTES if crowd else 0  # 0: the socket has no limit of its own
                    # From the beginning: until it first blocks the kernel may have taken megabytes.
                    await until(lambda: poller.registered >= crowd + 2)
                    assert far.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == expected
                    writer.setblocking(False)
                    await until(lambda: _stalled(writer) and sink.blocked)
                    assert far.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == expected
                    relaying.cancel()

    run(main)


class Handler:
    def on_event(self, mask: int) -> None: ...

    def on_bug(self, error: Exception) -> None: ...


def _stalled(writer: socket.socket) -> bool:
    """Send until the relay takes no more for a while."""
    try:
        writer.send(bytes(1 << 20))
    except BlockingIOError:
        return True
    return False


@pytest.mark.parametrize("source", ["plain", "tls"])
@pytest.mark.parametrize("sink", ["plain", "tls", "tunnel"])
def test_a_reset_is_noticed_while_the_other_application_does_not_read(
    source: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client gives up on a server that hangs. This proxy does not read then, so no read can report the reset."""
    monkeypatch.setattr(relay_module, "LINGER_S", 0.1)

    async def main() -> None:
        with polling() as poller:
            async with contextlib.AsyncExitStack() as stack:
                near, inner = tcp_pair()
                app, inner_end = App(near), stack.enter_context(PlainSocket(inner, poller))
                client: PlainSocket | TlsSocket = inner_end
                if source == "tls":
                    outer, entry = await stack.enter_async_context(ends("tls", poller))
                    assert isinstance(entry, TlsSocket)
                    client = entry
                    feeding = relay(inner_end, outer, ByteCounts())
                server, far = await stack.enter_async_context(ends(sink, poller))
                assert isinstance(far, PlainSocket | TlsSocket | Tunnel)
                running = relay(client, server, ByteCounts())
                sending = asyncio.get_running_loop().create_task(app.send(bytes(64 << 20)))
                await until(lambda: client._paused)
                sending.cancel()
                await asyncio.wait([sending])
                if source == "tls":
                    feeding.abort("given up")
                    assert isinstance(outer, TlsSocket)
                    abort_on_close(outer.link.sock)
                    outer.close()
                else:
                    app.reset()
                await running
                app.close()
                server.close()
                if isinstance(far, Tunnel):
                    await until(lambda: far.error is not None)
                    assert isinstance(far.error, TunnelBroken)
                    assert far.error.code == ErrorCode.CONNECT_ERROR
                else:
                    sock = far.sock if isinstance(far, PlainSocket) else far.link.sock
                    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET

    run(main)
