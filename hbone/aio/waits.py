"""Contains the coroutines of compiled classes that wait inside ``try``. This module itself is never compiled.

mypyc stores the handled exception per thread, not per coroutine, so a compiled coroutine that waits inside ``try``
can resume with the exception of another coroutine. ``tests/test_compiled.py`` checks that compiled modules have no
such waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from hbone.errors import PeerSilent, TunnelClosed

T = TypeVar("T")


class Closable(Protocol):
    """A stream whose request has no response yet."""

    def close(self) -> None:
        """Release the stream."""


class Abortable(Protocol):
    """A running relay."""

    def abort(self, reason: str) -> None:
        """End the relay in both directions."""


async def handshake(
    begin: Callable[[], None],
    established: asyncio.Future[None],
    timeout_s: float,
    end: Callable[[Exception], None],
) -> None:
    """Start a handshake by ``begin`` and wait until ``established`` resolves. If this fails, call ``end`` and
    raise the error.

    Raises:
        PeerSilent: the peer has not finished within ``timeout_s``.
        Exception: raised by ``established``.
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


async def answer(tunnel: Closable, answered: asyncio.Future[T]) -> T:
    """Wait for the answer to a CONNECT and return it. Close the stream if there is no answer."""
    try:
        return await answered
    except BaseException:
        tunnel.close()
        raise


async def relay_end(relay: Abortable, done: asyncio.Future[T]) -> T:
    """Wait for the end of a relay and return it. A cancellation aborts the relay."""
    try:
        return await done
    except asyncio.CancelledError:
        relay.abort("cancelled")
        raise


async def handled(
    handler: Callable[[], Awaitable[None]], failed: Callable[[Exception], None], over: Callable[[], None]
) -> None:
    """Run ``handler`` to its end, pass its error to ``failed``, and call ``over`` in any case.

    A CancelledError is not raised again, because only the owner of the request cancels it, and the owner does not
    wait for the error.
    """
    try:
        await handler()
    except asyncio.CancelledError:
        pass
    except Exception as error:  # noqa: BLE001  the owner logs it
        failed(error)
    finally:
        over()
