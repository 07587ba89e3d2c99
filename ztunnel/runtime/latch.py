"""A condition that becomes true once."""

import asyncio
from collections.abc import Callable, Collection


class Latch:
    """A flag that is set once and never cleared.

    A mesh has two latches per cluster, mostly without waiters. This class stores only current waiters, whereas
    :class:`asyncio.Event` takes 700 bytes, mainly for its queue.
    """

    __slots__ = ("_set", "_then")

    def __init__(self) -> None:
        self._set = False
        self._then: tuple[Callable[[], None], ...] = ()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Set the latch and call the waiting callbacks; idempotent."""
        waiting, self._then = self._then, ()
        self._set = True
        for call in waiting:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the latch is set, or at once if it is set already."""
        if self._set:
            call()
        else:
            self._then = (*self._then, call)

    async def wait(self) -> None:
        """Wait until the latch is set."""
        if self._set:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self.then(wake)
        try:
            await future
        finally:
            self._then = tuple(call for call in self._then if call is not wake)


def all_of(latches: Collection[Latch]) -> Latch:
    """Return a latch that is set when all of ``latches`` are set. It is set at once if there are none."""
    result = Latch()
    left = len(latches)

    def one_is_set() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            result.set()

    if not latches:
        result.set()
    for latch in latches:
        latch.then(one_is_set)
    return result
