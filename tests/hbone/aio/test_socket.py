"""What a plain socket does besides relaying."""

import asyncio
import socket

from hbone.aio.poller import Poller
from hbone.aio.socket import LASTING_S, PlainSocket
from tests.hbone import virtual_time


def test_the_lasting_callback_runs_once_and_only_for_long_connections() -> None:
    async def main() -> None:
        poller = Poller()
        seen: list[socket.socket] = []
        pairs = [socket.socketpair() for _ in range(2)]
        short, lasting = (PlainSocket(near, poller) for near, _ in pairs)
        short.when_lasting(seen.append)
        lasting.when_lasting(seen.append)
        await asyncio.sleep(LASTING_S / 2)
        short.close()
        assert seen == []
        await asyncio.sleep(LASTING_S)
        assert seen == [lasting.sock]
        assert not len(poller.interval_timer(LASTING_S))
        await asyncio.sleep(2 * LASTING_S)
        assert seen == [lasting.sock]  # once
        lasting.close()
        for _, far in pairs:
            far.close()
        poller.close()

    virtual_time.run(main)
