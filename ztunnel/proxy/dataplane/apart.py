"""Runs work for a connection in a separate fiber while the calling fiber awaits the result.

Used for the inbound half of a node-local tunnel. This half belongs to the destination pod, whose policy or removal
can end it separately. The waiting outbound half is not cancelled then, but gets an error, as over the network.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hbone.aio.fiber import OneShotFuture
from hbone.aio.poller import Poller
from hbone.errors import TunnelBroken
from ztunnel.runtime.tasks import Tasks

T = TypeVar("T")


async def run_apart(
    tasks: Tasks, poller: Poller, work: Coroutine[Any, Any, T], name: str, discard: Callable[[T], object]
) -> T:
    """Run ``work`` in its own fiber and return its result. Cancelling the caller cancels the fiber.

    Args:
        tasks: the owner of the fiber.
        poller: the poller that runs the fiber.
        work: raises its own errors, and releases all its resources when it is cancelled.
        name: the fiber's name.
        discard: releases a result if the caller was cancelled before receiving it.

    Raises:
        TunnelBroken: the fiber was cancelled, but not through the caller, and ``work`` raised no error of its own.
        Exception: the error raised by ``work``.
    """
    answer: OneShotFuture[T] = OneShotFuture(poller)
    fiber = tasks.run(poller, _answered(answer, work, discard), name)
    try:
        return await answer
    except asyncio.CancelledError:
        fiber.cancel()
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            discard(answer.result())  # the result arrived in the same loop iteration
        raise


async def _answered(
    answer: OneShotFuture[T], work: Coroutine[Any, Any, T], discard: Callable[[T], object]
) -> None:
    try:
        result = await work
    except asyncio.CancelledError:
        _fail(answer, TunnelBroken("the far end was closed before it answered", unprocessed=True))
        raise
    except Exception as error:  # noqa: BLE001  passed to the caller
        _fail(answer, error)
    else:
        if answer.done():
            discard(result)
        else:
            answer.set_result(result)


def _fail(answer: OneShotFuture[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
