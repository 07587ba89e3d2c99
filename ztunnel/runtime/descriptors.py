"""Shares the process's file descriptors: a pod that uses most descriptors stops accepting before the process runs
out.

A part of the descriptors is reserved. As long as other descriptors are free, every pod accepts. While the first
half of the reserve is being used, only pods with less than an equal share accept; clients of other pods wait in
the accept queue. The second half is for dials of established connections, readiness, metrics and the control
plane.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

_UNLIMITED: Final = 1 << 20
#: If more than this fraction of the descriptors is in use, they are counted before each accept.
_WATCHED: Final = 0.5
#: The size that the kernel's descriptor table is enlarged to, 8 bytes per entry. Beyond it, the table grows by
#: itself.
_TABLE: Final = 16_384


def limit_of_process() -> int:
    """Return the process's limit on descriptors, which is the hard limit after :func:`raise_limit`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return _UNLIMITED if hard == resource.RLIM_INFINITY else min(hard, _UNLIMITED)


def raise_limit() -> None:
    """Raise the process's limit to the hard limit, and enlarge the kernel's descriptor table.

    Called before the process starts its first thread. The table doubles with the first descriptor that does not
    fit: the 65th, the 257th, the 513th and so on. In a process with threads, the system call would then wait for 5
    to 15 ms until no processor uses the old table, and all pods would wait, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(OSError), open(os.devnull, "rb") as any_file:
        os.close(fcntl.fcntl(any_file, fcntl.F_DUPFD_CLOEXEC, min(limit_of_process(), _TABLE) - 1))


def reserve_of(limit: int) -> int:
    """Return how many of a process's descriptors are reserved."""
    return max(16, min(1024, limit // 8))


def lowest_free() -> int:
    """Return the lowest free descriptor number (dup(2)), below which all are in use. Return the limit if none is
    free.
    """
    with contextlib.suppress(OSError):
        number = os.dup(0)
        os.close(number)
        return number
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Descriptors:
    """The descriptors of one process.

    Args:
        limit: see :func:`limit_of_process`.
        shed: closes an unauthenticated connection, to free its descriptor. Returns False if there is none.
        in_use: see :func:`lowest_free`; tests pass their own function.

    Attributes:
        reserve: the number of reserved descriptors.
        paused: how often a pod was not allowed to accept since the process started.
        crowded: whether the reserve is in use.
        plentiful: whether enough descriptors are free for every pod to accept.
    """

    def __init__(
        self, limit: int, shed: Callable[[], bool] = lambda: False, in_use: Callable[[], int] = lowest_free
    ) -> None:
        self.limit = limit
        self.reserve = reserve_of(limit)
        self.paused = 0
        self._shed = shed
        self._in_use = in_use
        self._users: dict[DescriptorShare, None] = {}
        self._seen = 0
        self.crowded = False
        self.plentiful = True

    def share(self, name: str, used: Callable[[], int]) -> DescriptorShare:
        """Return a new share for one pod; the caller closes it.

        Args:
            name: the pod's name, for logs.
            used: returns the number of descriptors that it uses.
        """
        share = DescriptorShare(self, name, used)
        self._users[share] = None
        return share

    def has_most(self, used: int, users: int) -> bool:
        """Return whether the user of a share has at least an equal part of the descriptors."""
        return used * users >= self.limit - self.reserve

    @property
    def short(self) -> bool:
        """Whether any pod is currently not allowed to accept connections."""
        return any(share.waiting for share in self._users)

    def note(self, number: int) -> None:
        """Record a newly opened descriptor: its number shows how many are in use."""
        self._seen = number
        self.plentiful = number < self.limit * _WATCHED
        self.crowded = number >= self.limit - self.reserve

    def admits(self, share: DescriptorShare) -> bool:
        """Return whether a pod may accept a connection now. If the reserve is in use, this first tries to close an
        unauthenticated connection.
        """
        if self.plentiful:
            return True
        self.note(self._in_use())
        if not self.crowded:
            return True
        if self._shed():
            return self._seen < self.limit - self.reserve // 4
        if self._seen >= self.limit - self.reserve // 2:
            return False
        return not self.has_most(share.used(), len(self._users))

    def forget(self, share: DescriptorShare) -> None:
        """Remove a share; idempotent."""
        self._users.pop(share, None)


class DescriptorShare:
    """One pod's share, checked before each accept (:class:`ztunnel.runtime.accepting.Gate`).

    Attributes:
        used: number of descriptors that the pod has.
        waiting: whether the pod was refused, and has not been admitted since.
    """

    def __init__(self, descriptors: Descriptors, name: str, used: Callable[[], int]) -> None:
        self.used = used
        self.waiting = False
        self._descriptors = descriptors
        self._name = name

    def admits(self) -> bool:
        """Return whether the pod may accept a connection now."""
        if self._descriptors.plentiful and not self.waiting:
            return True
        admitted = self._descriptors.admits(self)
        if admitted is self.waiting:
            self.waiting = not admitted
            if admitted:
                log.info("%s accepts again", self._name)
            else:
                used = self.used()
                log.error(
                    "%s accepts no connections: %d of %d descriptors are in use%s (raise the limit of open files)",
                    self._name,
                    self._descriptors._seen,
                    self._descriptors.limit,
                    f", {used} by it" if used else "",
                )
        self._descriptors.paused += not admitted
        return admitted

    def accepted(self, number: int) -> None:
        """Record the descriptor of a connection that the pod has accepted."""
        self._descriptors.note(number)

    def close(self) -> None:
        """Give the share up; idempotent."""
        self.waiting = False
        self._descriptors.forget(self)
