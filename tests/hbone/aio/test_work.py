"""A peer whose bytes are dear to read, and the bystander on another connection of the same poller."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest

from hbone import frames
from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.end import End
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.socket import PlainSocket
from hbone.aio.tls_socket import TlsSocket
from hbone.errors import ErrorCode
from hbone.limits import Limits
from hbone.settings import Http2Settings, Role
from tests.hbone.aio.harness import (
    LOOPS,
    App,
    connected,
    ends,
    polling,
    raw_client,
    request_frame,
    run,
    tcp_pair,
    until,
)

SMALL = frames.frame(frames.DATA, 0, 1, b"x")


def settings(**changes: float) -> ConnectionSettings:
    return ConnectionSettings(http2=Http2Settings(limits=Limits(**changes)), ping_interval_s=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_read_full_of_small_frames_is_worked_off_between_others(loop: str) -> None:
    async def main() -> None:
        over = asyncio.Event()

        async def hold(request: Request) -> None:
            with request.accept():
                await over.wait()

        few = settings(slice_units=50)
        with polling() as poller:
            async with raw_client(poller, hold, few) as dear, raw_client(poller, hold, few) as bystander:
                await dear.settle(request_frame(1))
                await bystander.settle(request_frame(1))
                # One read has some 6,000 frames, which take 120 slices. Its PING comes last.
                served = 0
                async with asyncio.TaskGroup() as tasks:
                    flood = tasks.create_task(dear.settle(SMALL * 6000))
                    while not flood.done():
                        await bystander.barrier()
                        served += 1
                assert flood.result()
                assert served >= 5
                over.set()

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_peer_that_overdraws_is_slowed_down_and_loses_nothing(loop: str) -> None:
    async def main() -> None:
        near, far = tcp_pair()
        app = App(far)
        slow = settings(work_burst=500, work_rate=5000.0, slice_units=100)

        async def carry(request: Request) -> None:
            with PlainSocket(near, poller) as target, request.accept() as tunnel:
                await relay(tunnel, target, ByteCounts())

        with polling() as poller, far:
            async with raw_client(poller, carry, slow) as peer:
                await peer.settle(request_frame(1))
                begun = asyncio.get_running_loop().time()
                assert await peer.settle(SMALL * 2000)
                assert asyncio.get_running_loop().time() - begun >= 0.2  # 1,500 units over, at 5,000 a second
                assert await app.read(2000) == b"x" * 2000

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_all_connections_of_a_poller_pay_its_price(loop: str) -> None:
    """At a price of 1 the pauses of this peer take a fiftieth of a second."""

    async def main() -> None:
        over = asyncio.Event()

        async def hold(request: Request) -> None:
            with request.accept():
                await over.wait()

        slow = settings(work_burst=500, work_rate=5000.0, slice_units=100)
        with polling() as poller:
            poller.unit_price.value = 4.0
            async with raw_client(poller, hold, slow) as peer:
                await peer.settle(request_frame(1))
                begun = asyncio.get_running_loop().time()
                assert await peer.settle(SMALL * 600)
                assert asyncio.get_running_loop().time() - begun >= 0.3  # 1,900 units over, at 5,000 a second
                over.set()

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_peer_that_keeps_overdrawing_gets_goaway(loop: str) -> None:
    async def main() -> None:
        over = asyncio.Event()

        async def hold(request: Request) -> None:
            with request.accept():
                await over.wait()

        with polling() as poller:
            strict = settings(work_burst=500, work_rate=5000.0, stall_burst_s=0.1, stall_rate=0.0, slice_units=100)
            async with raw_client(poller, hold, strict) as peer:
                await peer.settle(request_frame(1))
                assert not await peer.settle(SMALL * 6000)
                goaways = [payload for kind, _, _, payload in peer.received if kind == frames.GOAWAY]
                assert [int.from_bytes(payload[4:8]) for payload in goaways] == [ErrorCode.ENHANCE_YOUR_CALM]
                over.set()

    run(main, loop)


@pytest.mark.pure
@pytest.mark.parametrize("loop", LOOPS)
def test_bulk_connections_share_a_turn_whose_events_come_together(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has an event in every turn. A full slice of a millisecond for each would add up to a long wait for
    other connections.
    """
    monkeypatch.setattr("hbone.aio.poller.REQUEUED_S", 0.0)
    served = turns_of(monkeypatch, Connection, "_take_turn")

    async def main() -> None:
        over = asyncio.Event()

        async def hold(request: Request) -> None:
            with request.accept():
                await over.wait()

        with polling() as poller:
            async with contextlib.AsyncExitStack() as stack:
                peers = [await stack.enter_async_context(raw_client(poller, hold)) for _ in range(8)]
                stream_ids = range(1, 21, 2)
                for peer in peers:
                    await peer.settle(b"".join(map(request_frame, stream_ids)))
                for some in (stream_ids[:5], stream_ids[5:]):  # the first time shows who has much to read
                    served.clear()
                    data = b"".join(frames.frame(frames.DATA, 0, each, bytes(16_000)) for each in some)
                    for peer in peers:
                        peer.sock.send(data)
                    for peer in peers:
                        await peer.barrier()
                assert max(served.values()) <= 2
                over.set()

    run(main, loop)


@pytest.mark.pure
@pytest.mark.parametrize("loop", LOOPS)
def test_a_peer_gets_no_larger_share_of_a_turn_by_more_connections(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hbone.aio.poller.REQUEUED_S", 0.0)
    served = turns_of(monkeypatch, Connection, "_take_turn")

    async def main() -> None:
        with polling() as poller:
            async with contextlib.AsyncExitStack() as stack:
                pairs = [await stack.enter_async_context(connected(poller)) for _ in range(12)]
                tunnels = [await pair.tunnel() for pair in pairs]
                served.clear()
                for near, _ in tunnels:
                    near.write([memoryview(bytes(16_000))], 16_000)  # below what makes a connection a bulk one
                    near.flush()
                await until(lambda: sum(served.values()) >= 12)
                assert max(served.values()) <= 6
                for near, far in tunnels:
                    near.close()
                    far.close()

    run(main, loop)


@pytest.mark.pure
@pytest.mark.parametrize("kind", [PlainSocket, TlsSocket])
@pytest.mark.parametrize("loop", LOOPS)
def test_bulk_sockets_share_a_turn_whose_events_come_together(
    loop: str, kind: type[PlainSocket | TlsSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hbone.aio.poller.REQUEUED_S", 0.0)
    served = turns_of(monkeypatch, kind, "_pump")

    async def main() -> None:
        with polling() as poller:
            async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as relays:
                sources, sinks = [], []
                for _ in range(6):
                    name = "plain" if kind is PlainSocket else "tls"
                    source, into = await stack.enter_async_context(ends(name, poller))
                    near, far = tcp_pair()
                    target = stack.enter_context(PlainSocket(near, poller))
                    sinks.append(App(stack.enter_context(far)))
                    sources.append(source)
                    relays.create_task(carry(into, target))
                for _ in range(2):  # the first time shows who has much to read
                    served.clear()
                    for source in sources:
                        source.write([memoryview(bytes(50_000))], 50_000)
                        source.flush()
                    for sink in sinks:
                        assert len(await sink.read(50_000)) == 50_000
                assert sum(served.values()) >= 6
                assert max(served.values()) <= 2
                for source, sink in zip(sources, sinks, strict=True):
                    source.close()
                    sink.close()

    async def carry(into: End, target: PlainSocket) -> None:
        await relay(into, target, ByteCounts())

    run(main, loop)


def turns_of(monkeypatch: pytest.MonkeyPatch, kind: type[Any], method: str) -> Counter[int]:
    """Return how many sockets of a kind have read much, by turns."""
    served: Counter[int] = Counter()
    turn = 0
    act, serve = getattr(kind, method), Poller._serve

    def counted(self: Any) -> None:
        before = self.poller.read_bytes
        act(self)
        if getattr(self, "role", Role.SERVER) is Role.SERVER and self.poller.read_bytes - before >= 10_000:
            served[turn] += 1

    def serve_next(self: Poller) -> bool:
        nonlocal turn
        turn += 1
        return serve(self)

    monkeypatch.setattr(kind, method, counted)
    monkeypatch.setattr(Poller, "_serve", serve_next)
    return served
