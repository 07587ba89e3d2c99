"""Lets only one controller per network namespace write a table. Others wait until the owner of the lock ends.

Two controllers that follow the API server at different speeds would undo each other's changes, and the slower
would reopen connections just closed by the faster. The lock is an abstract Unix socket. Its name belongs to the
network namespace, like the table, so it works between containers that share only the network namespace, and the
kernel frees it when its owner dies. Any local user can bind such a name, so a socket of another user id is
ignored.
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

#: If the owner's accept queue is full, a process cannot wait in it, and tries again after this time.
_AGAIN_S = 1.0
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
                owner = await self._owner(other)
                if owner is None:
                    continue
                pid, uid = owner
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

    async def _owner(self, other: socket.socket) -> tuple[int, int] | None:
        """Connect to the owner of the lock, and return its pid and user. None if the caller should try again."""
        try:
            other.connect(self._address)
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # its queue is full
            await asyncio.sleep(_AGAIN_S)
            return None
        pid, uid, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid
