"""How connections are spread: a line of shared memory that says how many each worker has.

All workers accept from the same listening socket, whose queue wakes everybody. Without this the one that is woken
first would take nearly everything while there is little to do, and a few connections that move much would share
one core. A worker that has more than another lets that one go first, and takes the connection after all if it is
still there a moment later: nobody has to be alive for others to be served.
"""

import mmap
import os
from typing import Final, Self

_ENTRY_BYTES: Final = 8
#: Of a worker that does not run: nobody waits for it.
_ABSENT: Final = 2**62


class Shares:
    """The line, in one process.

    Args:
        descriptor: of the memory; the caller's.
        workers: how many there are.
    """

    def __init__(self, descriptor: int, workers: int) -> None:
        self._memory = mmap.mmap(descriptor, workers * _ENTRY_BYTES)
        self._counts = memoryview(self._memory).cast("q")

    @classmethod
    def make(cls, workers: int) -> tuple[Self, int]:
        """New memory in which nobody is there; with its descriptor, the caller's."""
        descriptor = os.memfd_create("ztunnel-workers", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, workers * _ENTRY_BYTES)
        shares = cls(descriptor, workers)
        for index in range(workers):
            shares.leave(index)
        return shares, descriptor

    def leave(self, index: int) -> None:
        """A worker does not run."""
        self._counts[index] = _ABSENT

    def tell(self, index: int, count: int) -> None:
        """A worker has so many connections; to be told with every change.

        Not only when it is its turn to accept: whoever finds the queue empty again is not woken to say that it has
        none, and would count as busy for ever.
        """
        self._counts[index] = count

    def is_turn_of(self, index: int) -> bool:
        """Whether the next connection is for this worker."""
        return self._counts[index] <= min(self._counts)

    def close(self) -> None:
        """Let go of the memory."""
        self._counts.release()
        self._memory.close()
