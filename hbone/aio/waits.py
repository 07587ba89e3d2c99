"""Coroutines of classes that may be compiled (``make compiled``).

mypyc keeps the exception that is being handled with the thread, not with the coroutine: one that waits inside
``try`` may wake up with another's. Whatever has to wait there does it here, in a module that is never compiled;
``tests/test_compiled.py`` sees to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from hbone.errors import PeerSilent, TunnelClosed

if TYPE_CHECKING:
    from hbone.aio.relay import Relay, RelayEnd
    from hbone.aio.tunnel import Tunnel


async def handshake(
    begin: Callable[[], None],
    established: asyncio.Future[None],
    timeout_s: float,
    end: Callable[[Exception], None],
) -> None:
    """Begin, and wait until it is established; ``end`` whatever else happens.

    Raises:
        PeerSilent: not within ``timeout_s``.
        Exception: what ``established`` raises.
    """
    try:
        async with asyncio.timeout(timeout_s):
            begin()
            await established
    except TimeoutError:
        error = PeerSilent("TLS handshake timed out")
        end(error)
        raise error from None
    except BaseException:
        end(TunnelClosed("not established"))
        raise


async def answer(tunnel: Tunnel, answered: asyncio.Future[Tunnel]) -> Tunnel:
    """Wait for the answer to a CONNECT; without one the stream is given up."""
    try:
        return await answered
    except BaseException:
        tunnel.close()
        raise


async def relay_end(relay: Relay, done: asyncio.Future[RelayEnd]) -> RelayEnd:
    """Wait until a relay is over; cancelling that aborts it."""
    try:
        return await done
    except asyncio.CancelledError:
        relay.abort("cancelled")
        raise
