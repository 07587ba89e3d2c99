"""Waits for an iteration of the poller, which proves that the data path, with its own epoll, still runs."""

from __future__ import annotations

import asyncio

from hbone.aio.poller import Poller


async def turned(poller: Poller) -> None:
    """Return in the next iteration of ``poller``. If the poller is stuck, this never returns."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    poller.call_soon(_Step(future))
    await future


class _Step:
    """Resolves a future in an iteration of the poller; see :class:`hbone.aio.poller.Steppable`."""

    def __init__(self, turned: asyncio.Future[None]) -> None:
        self._turned = turned

    def step(self) -> None:
        """Resolve the future, unless its waiter was cancelled."""
        if not self._turned.done():
            self._turned.set_result(None)
