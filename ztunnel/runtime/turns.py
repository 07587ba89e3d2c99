"""Waits for a turn of the poller: the proof that the data path, which has an epoll of its own, still moves."""

from __future__ import annotations

import asyncio

from hbone.aio.poller import Poller


async def turned(poller: Poller) -> None:
    """Return in the next turn of ``poller``; never, if it has none."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    poller.call_soon(_Step(future))
    await future


class _Step:
    """Settles a future in a turn; see :class:`hbone.aio.poller.Steppable`."""

    def __init__(self, turned: asyncio.Future[None]) -> None:
        self._turned = turned

    def step(self) -> None:
        """Settle the future, unless its waiter has given up."""
        if not self._turned.done():
            self._turned.set_result(None)
