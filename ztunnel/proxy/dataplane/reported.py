"""Waits for objects that carry connections without a coroutine. Never compiled, like :mod:`hbone.aio.waits`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def reported(
    opening: Awaitable[T],
    expected: tuple[type[Exception], ...],
    done: Callable[[T | None, Exception | None], None],
) -> None:
    """Wait for ``opening``, and call ``done`` once, with its result or its error.

    Both are ``None`` after a cancellation or an error that is not one of ``expected``, which is raised as well.
    """
    try:
        opened = await opening
    except expected as error:
        done(None, error)
    except BaseException:
        done(None, None)
        raise
    else:
        done(opened, None)
