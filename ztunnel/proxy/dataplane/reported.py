"""Reports the result of an awaitable to a callback. This module is never compiled, like :mod:`hbone.aio.waits`."""

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

    After a cancellation, or an error that is not ``expected``, both arguments of ``done`` are ``None``, and the
    error is raised.
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
