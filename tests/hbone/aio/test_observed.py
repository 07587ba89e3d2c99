"""Observed ends: what the observer is shown is what applications sent and got, and nothing else changes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from hbone.aio import relay as relay_module
from hbone.aio.observed import ObservedEnd
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, Relay, relay
from hbone.aio.socket import PlainSocket
from tests.hbone.aio.harness import WAIT_S, App, ends, polling, run, tcp_pair, until
from tests.hbone.aio.test_relay import KINDS, blob, exchange


@dataclass
class Seen:
    """An observer that keeps everything."""

    received_bytes: bytearray = field(default_factory=bytearray)
    sent_bytes: bytearray = field(default_factory=bytearray)
    events: list[str] = field(default_factory=list)

    def received(self, chunk: memoryview) -> None:
        self.received_bytes += chunk

    def sent(self, chunk: memoryview) -> None:
        self.sent_bytes += chunk

    def receive_ended(self, *, reset: bool) -> None:
        self.events.append("cut" if reset else "ended")

    def send_ended(self, *, reset: bool) -> None:
        self.events.append("reset" if reset else "eof")

    def left(self) -> None:
        self.events.append("left")


@dataclass
class Chain:
    """App a - observed - relay - kind - relay - observed - app b, with what each observer saw."""

    a: App
    b: App
    at_a: Seen
    at_b: Seen
    relays: list[Relay]
    counts: list[ByteCounts]
    sockets: list[PlainSocket]


@contextlib.asynccontextmanager
async def chain(poller: Poller, kind: str) -> AsyncIterator[Chain]:
    async with contextlib.AsyncExitStack() as stack:
        near, inner_near = tcp_pair()
        inner_far, far = tcp_pair()
        sockets = [stack.enter_context(PlainSocket(sock, poller)) for sock in (inner_near, inner_far)]
        at_a, at_b = Seen(), Seen()
        first, last = ObservedEnd(sockets[0], at_a), ObservedEnd(sockets[1], at_b)
        entry, leave = await stack.enter_async_context(ends(kind, poller))
        counts = [ByteCounts(), ByteCounts()]
        relays = [relay(first, entry, counts[0]), relay(leave, last, counts[1])]
        # Each owner closes its ends when its relay is over, which informs their networks.
        owners = [
            asyncio.get_running_loop().create_task(_own(one, *both))
            for one, both in zip(relays, ((first, entry), (leave, last)), strict=True)
        ]
        a, b = App(near), App(far)
        try:
            yield Chain(a, b, at_a, at_b, relays, counts, sockets)
        finally:
            a.close()
            b.close()
            for one in relays:
                one.abort("test over")
            await asyncio.gather(*owners)


async def _own(running: Relay, *both: object) -> None:
    await running
    for end in both:
        end.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_the_observer_sees_every_byte_of_both_directions(kind: str) -> None:
    up, down = blob(3_000_000, 1), blob(2_000_001, 2)

    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as found:
                await exchange(found.a, found.b, up, down)
                await until(lambda: "left" in found.at_a.events and "left" in found.at_b.events)
        assert (found.at_a.received_bytes, found.at_a.sent_bytes) == (up, down)
        assert (found.at_b.received_bytes, found.at_b.sent_bytes) == (down, up)
        for seen in (found.at_a, found.at_b):
            assert sorted(seen.events[:-1]) == ["ended", "eof"]
            assert seen.events[-1] == "left"
        assert [(count.sent, count.received) for count in found.counts] == [(len(up), len(down))] * 2

    run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_a_half_close_is_seen_before_the_answer(kind: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as found:
                await found.a.send(b"question")
                found.a.eof()
                assert await found.b.read_all() == b"question"
                assert (found.at_a.events, found.at_b.events) == (["ended"], ["eof"])
                await found.b.send(b"answer")
                assert await found.a.read(6) == b"answer"
                found.b.eof()
                assert await found.a.read_all() == b""
                assert found.at_a.sent_bytes == b"answer"

    run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_is_passed_on_and_seen_as_one(kind: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as found:
                await found.a.send(b"x")
                assert await found.b.read(1) == b"x"
                found.a.reset()
                await until(lambda: "left" in found.at_b.events)
                with pytest.raises(ConnectionResetError):
                    await found.b.read_all()
        assert found.at_a.events == ["cut", "left"]
        assert found.at_b.events == ["reset", "left"]

    run(main)


def test_nothing_is_spliced_past_the_observer() -> None:
    """Between plain sockets a large flow would stay in the kernel."""

    async def main() -> None:
        with polling() as poller:
            near, inner_near = tcp_pair()
            inner_far, far = tcp_pair()
            seen = Seen()
            one, two = PlainSocket(inner_near, poller), PlainSocket(inner_far, poller)
            with one, two:
                running = relay(ObservedEnd(one, seen), two, ByteCounts())
                a, b = App(near), App(far)
                await exchange(a, b, blob(2_000_000, 3), blob(2_000_000, 4))
                assert one._pipe is None
                assert two._pipe is None
                assert (await running).error is None
                a.close()
                b.close()
            assert (seen.received_bytes, seen.sent_bytes) == (blob(2_000_000, 3), blob(2_000_000, 4))

    run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_back_pressure_passes_through(kind: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with chain(poller, kind) as found:
                sent = quiet = 0
                found.a.sock.setblocking(False)
                while quiet < 20:
                    try:
                        sent += found.a.sock.send(bytes(1 << 20))
                        quiet = 0
                    except BlockingIOError:
                        quiet += 1
                        await asyncio.sleep(0.01)
                    assert sent < 40 << 20, "never stops"
                found.a.eof()
                assert len(await found.b.read_all()) == sent
                assert len(found.at_b.sent_bytes) == sent

    run(main)


def test_what_a_broken_network_does_not_take_was_not_sent() -> None:
    async def main() -> None:
        with polling() as poller:
            async with chain(poller, "tunnel") as found:
                found.b.eof()
                assert await found.a.read_all() == b""
                found.b.close()  # reads no more: later bytes are answered by a reset
                while "left" not in found.at_b.events:
                    with contextlib.suppress(OSError):
                        await asyncio.wait_for(found.a.send(bytes(1 << 16)), WAIT_S)
                    await asyncio.sleep(0)
                assert len(found.at_b.sent_bytes) <= len(found.at_a.received_bytes)

    run(main)


def test_an_end_by_its_owner_is_seen_as_such() -> None:
    async def main() -> None:
        with polling() as poller:
            async with chain(poller, "tunnel") as found:
                await found.a.send(b"x")
                assert await found.b.read(1) == b"x"
                found.relays[0].abort("policy")
                assert (await asyncio.wait_for(_end_of(found.relays[0]), WAIT_S)) == "policy"
                assert found.at_a.events == ["left"]
                assert await found.a.read_all() == b""

    run(main)


async def _end_of(running: Relay) -> str:
    return str((await running).error)


def test_a_reset_is_noticed_while_the_other_application_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "LINGER_S", 0.1)

    async def main() -> None:
        with polling() as poller:
            near, inner = tcp_pair()
            outer, far = tcp_pair()
            seen = Seen()
            with far, PlainSocket(inner, poller) as client, PlainSocket(outer, poller) as server:
                running = relay(ObservedEnd(client, seen), server, ByteCounts())
                sending = asyncio.get_running_loop().create_task(App(near).send(bytes(64 << 20)))
                await until(lambda: client._paused)
                sending.cancel()
                await asyncio.wait([sending])
                App(near).reset()
                await running
                server.close()
                assert seen.events[0] == "cut"
                assert far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET

    run(main)
