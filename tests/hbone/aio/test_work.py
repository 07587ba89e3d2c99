"""A peer whose bytes are dear to read, and the bystander on another connection of the same poller."""

from __future__ import annotations

import asyncio

import pytest

from hbone import frames
from hbone.aio.connection import ConnectionSettings
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.server import Request
from hbone.aio.socket import PlainSocket
from hbone.errors import ErrorCode
from hbone.limits import Limits
from hbone.settings import Http2Settings
from tests.hbone.aio.harness import LOOPS, App, polling, raw_client, request_frame, run, tcp_pair

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
                # One read of some 6,000 frames, which are 120 slices; its own PING comes last.
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
def test_a_peer_that_goes_on_gets_goaway(loop: str) -> None:
    async def main() -> None:
        over = asyncio.Event()

        async def hold(request: Request) -> None:
            with request.accept():
                await over.wait()

        with polling() as poller:
            strict = settings(work_burst=500, work_rate=5000.0, stall_burst_s=0.1, stall_rate=0.0, slice_units=100)
            async with raw_client(poller, hold, strict) as peer:
                await peer.settle(request_frame(1))
                assert not await peer.settle(SMALL * 2000)
                goaways = [payload for kind, _, _, payload in peer.received if kind == frames.GOAWAY]
                assert [int.from_bytes(payload[4:8]) for payload in goaways] == [ErrorCode.ENHANCE_YOUR_CALM]
                over.set()

    run(main, loop)
