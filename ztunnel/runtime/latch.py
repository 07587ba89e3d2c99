"""A condition that becomes true once."""

import asyncio
from collections.abc import Callable


class Latch:
    """Set once, for ever.

    A mesh has two of these per cluster, which mostly nobody waits for: unlike :class:`asyncio.Event` (700 bytes,
    most of them a queue of waiters) it holds nothing but who waits now.
    """

    __slots__ = ("_set", "_then")

    def __init__(self) -> None:
        self._set = False
        self._then: tuple[Callable[[], None], ...] = ()

    def is_set(self) -> bool:
        """Whether it is true."""
        return self._set

    def set(self) -> None:
        """Make it true."""
        waiting, self._then = self._then, ()
        self._set = True
        for call in waiting:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Call once it is true; at once if it is."""
        if self._set:
            call()
        else:
            self._then = (*self._then, call)

    async def wait(self) -> None:
        """Wait until it is true."""
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
