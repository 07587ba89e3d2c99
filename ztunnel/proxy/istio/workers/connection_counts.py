"""Distributes connections evenly over workers, using shared memory that holds each worker's number of connections.

All workers accept from the same listening socket, and a new connection wakes every worker. Without these counts
the first worker to wake would take nearly all connections under light load, and a few bulk connections would share
one core. A worker does not accept at once if another worker has fewer connections. If the connection is still
queued shortly afterwards, any worker accepts it, so no connection depends on a single worker.
"""

import mmap
import os
from typing import Final, Self

_ENTRY_BYTES: Final = 8
#: The connection count stored for a worker that is not running. It is higher than any real count.
_ABSENT: Final = 2**62


class ConnectionCounts:
    """A process's view of the shared memory that holds each worker's number of connections.

    Args:
        descriptor: the shared memory's descriptor. The caller keeps ownership.
        workers: the number of workers. Each has one entry.
    """

    def __init__(self, descriptor: int, workers: int) -> None:
        self._memory = mmap.mmap(descriptor, workers * _ENTRY_BYTES)
        self._counts = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls, workers: int) -> tuple[Self, int]:
        """Create the shared memory, with all workers marked as not running. Return the mapped memory and its
        descriptor, which the caller owns.
        """
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
        """Publish a worker's number of connections. Call this whenever the number changes.

        If workers published only when they accept, a worker whose connections have all ended would count as busy
        for ever.
        """
        self._counts[index] = count

    def is_turn_of(self, index: int) -> bool:
        """Return whether a worker should accept the next connection: no other worker has fewer connections."""
        return self._counts[index] <= min(self._counts)

    def close(self) -> None:
        """Unmap the memory."""
        self._counts.release()
        self._memory.close()
