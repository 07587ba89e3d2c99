"""Spreads connections over workers, by shared memory with each worker's number of connections.

All workers accept from the same listening socket, whose queue wakes every worker. Without these counts the first
worker to wake would take nearly all connections under light load, and a few bulk connections would share one core.
A worker with more connections than another leaves a new one to that other, and takes it if it is still queued
shortly afterwards, so no worker depends on another being alive.
"""

import mmap
import os
from typing import Final, Self

_ENTRY_BYTES: Final = 8
#: The count of a worker that does not run: never the smallest.
_ABSENT: Final = 2**62


class ConnectionCounts:
    """The shared memory, as one process maps it.

    Args:
        descriptor: the shared memory's descriptor. The caller keeps ownership.
        workers: number of entries.
    """

    def __init__(self, descriptor: int, workers: int) -> None:
        self._memory = mmap.mmap(descriptor, workers * _ENTRY_BYTES)
        self._counts = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls, workers: int) -> tuple[Self, int]:
        """Return new memory without running workers, and its descriptor, which the caller owns."""
        descriptor = os.memfd_create("ztunnel-workers", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, workers * _ENTRY_BYTES)
        counts = cls(descriptor, workers)
        for index in range(workers):
            counts.remove(index)
        return counts, descriptor

    def remove(self, index: int) -> None:
        """Mark a worker as not running; idempotent."""
        self._counts[index] = _ABSENT

    def set(self, index: int, count: int) -> None:
        """Publish the number of a worker's connections. Call it at every change.

        Publishing only when accepting is not enough: an idle worker is not woken to publish 0, and would count as
        busy for ever.
        """
        self._counts[index] = count

    def is_turn_of(self, index: int) -> bool:
        """Return whether the next connection is for this worker: none has fewer."""
        return self._counts[index] <= min(self._counts)

    def close(self) -> None:
        """Unmap the memory."""
        self._counts.release()
        self._memory.close()
