"""Lets only one controller per network namespace write a table. Others wait until the owner of the lock ends.

Two controllers that follow the API server at different speeds would undo each other's changes, and the slower
would reopen connections just closed by the faster. The lock is an abstract Unix socket. Its name belongs to the
network namespace, like the table, so it works between containers that share only the network namespace, and the
kernel frees it when its owner dies. Any local user can bind such a name, so a socket of another user id is
ignored, and so is a socket that does not listen.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from typing import Self

from tproxy.aio.netns import Netns

log = logging.getLogger(__name__)

#: If a process cannot connect to the owner, it tries again after this time.
_AGAIN_S = 1.0
#: A name that refuses this many connections in succession is ignored. It is bound by a program that does not
#: listen, whereas an owner listens as soon as it has bound the name.
_REFUSALS = 5
_WAITERS = 16


class Held(OSError):
    """Another process has the lock, and the caller has chosen not to wait."""


class NodeLock:
    """The right to change a table. ``async with`` acquires and releases it.

    Args:
        name: the table's name.
        netns: the namespace of the lock. None means the caller's own.
        wait: whether to wait if another process has the lock. If not, :class:`Held` is raised.

    Raises:
        Held: another process has the lock, and ``wait`` is False.
    """

    def __init__(self, name: str, netns: Netns | None = None, *, wait: bool = True) -> None:
        self._address = b"\0" + name.encode()
        self._name = name
        self._netns = netns
        self._wait = wait
        self._held: socket.socket | None = None

    async def __aenter__(self) -> Self:
        said = False
        refused = 0
        while True:
            mine = self._socket()
            try:
                mine.bind(self._address)
                mine.listen(_WAITERS)
            except OSError as error:
                mine.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                self._held = mine
                return self
            with self._socket() as other:
                try:
                    other.connect(self._address)
                except ConnectionRefusedError:  # the owner has ended, or the name has never been listened on
                    refused += 1
                    if refused == _REFUSALS:
                        log.warning(
                            "lock of table %s is held by a program that does not listen on it: ignored", self._name
                        )
                        return self
                    await asyncio.sleep(_AGAIN_S if refused > 1 else 0)
                    continue
                except BlockingIOError as error:  # its queue is full
                    if not self._wait:
                        raise Held(errno.EBUSY, f"other processes keep table {self._name}") from error
                    if not said:
                        log.info("more than %d processes wait for table %s", _WAITERS, self._name)
                    said = True
                    refused = 0
                    await asyncio.sleep(_AGAIN_S)
                    continue
                refused = 0
                pid, uid = _peer_of(other)
                if uid != os.geteuid():
                    log.warning("lock of table %s is held by pid %d of user %d: ignored", self._name, pid, uid)
                    return self
                if not self._wait:
                    raise Held(errno.EBUSY, f"another process (pid {pid}) keeps table {self._name}")
                if not said:
                    log.info(
                        "another process (pid %d) keeps table %s; this process takes over when that process ends",
                        pid,
                        self._name,
                    )
                said = True
                with contextlib.suppress(ConnectionError):
                    await asyncio.get_running_loop().sock_recv(other, 1)

    async def __aexit__(self, *exception: object) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _socket(self) -> socket.socket:
        with self._netns.entered() if self._netns is not None else contextlib.nullcontext():
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.setblocking(False)
        return found


def _peer_of(other: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process that listens at the other end."""
    pid, uid, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
