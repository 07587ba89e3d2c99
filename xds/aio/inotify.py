"""Reports renames onto files, by inotify(7) through ctypes, with one descriptor per watcher.

It watches directories instead of files, because a rename replaces a file by another inode.
"""

import asyncio
import ctypes
import errno
import os
import struct
from collections.abc import Callable
from functools import cache
from typing import Self

IN_CLOSE_WRITE = 0x0000_0008
IN_MOVED_FROM = 0x0000_0040
IN_MOVED_TO = 0x0000_0080
IN_DELETE = 0x0000_0200
IN_Q_OVERFLOW = 0x0000_4000
IN_ONLYDIR = 0x0100_0000

_EVENT = struct.Struct("iIII")  # watch descriptor, mask, cookie, length of the name that follows

#: Called with the name of the new directory entry, or with None if events were lost and any entry can have
#: changed.
OnMoved = Callable[[str | None], None]


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.inotify_add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
    return libc


class RenameWatcher:
    """Calls a function when a file is renamed into a watched directory; ``async with`` owns the descriptor."""

    def __init__(self) -> None:
        self._fd = -1
        self._callbacks: dict[int, list[OnMoved]] = {}

    async def __aenter__(self) -> Self:
        self._fd = _checked(_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify")
        asyncio.get_running_loop().add_reader(self._fd, self._readable)
        return self

    async def __aexit__(self, *exception: object) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1

    def watch(self, directory: str, on_moved: OnMoved, events: int = IN_MOVED_TO) -> Callable[[], None]:
        """Start to watch. Return a function that stops watching.

        Args:
            directory: the directory to watch.
            on_moved: see :data:`OnMoved`.
            events: the event mask; IN_CLOSE_WRITE and IN_DELETE add changes without renames, IN_MOVED_FROM
                renames to another name or directory.

        Raises:
            OSError: the directory is missing or unreadable, or ``fs.inotify.max_user_watches`` is reached.
        """
        descriptor = _checked(
            _libc().inotify_add_watch(self._fd, os.fsencode(directory), events | IN_ONLYDIR), directory
        )
        # The kernel returns the same watch descriptor for a directory each time, even if its path is spelled
        # differently.
        self._callbacks.setdefault(descriptor, []).append(on_moved)

        def stop() -> None:
            callbacks = self._callbacks.get(descriptor, [])
            if on_moved in callbacks:
                callbacks.remove(on_moved)
                if not callbacks and self._fd >= 0:
                    del self._callbacks[descriptor]
                    _libc().inotify_rm_watch(self._fd, descriptor)  # EINVAL: the directory itself was removed

        return stop

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        for descriptor, mask, name in parse_events(data):
            if mask & IN_Q_OVERFLOW:
                for callbacks in list(self._callbacks.values()):
                    for callback in list(callbacks):
                        callback(None)
            elif mask & (IN_MOVED_TO | IN_MOVED_FROM | IN_CLOSE_WRITE | IN_DELETE):
                for callback in list(self._callbacks.get(descriptor, ())):
                    callback(name)


def parse_events(data: bytes) -> list[tuple[int, int, str]]:
    """Return (watch descriptor, mask, name) of each event in one read. The kernel never splits an event."""
    events: list[tuple[int, int, str]] = []
    offset = 0
    while offset < len(data):
        descriptor, mask, _, length = _EVENT.unpack_from(data, offset)
        offset += _EVENT.size
        events.append((descriptor, mask, os.fsdecode(data[offset : offset + length].rstrip(b"\0"))))
        offset += length
    return events


def _checked(result: int, subject: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        reason = os.strerror(number)
        if number == errno.ENOSPC:
            reason = "no inotify watch left; raise fs.inotify.max_user_watches"
        elif number == errno.EMFILE:
            reason = "no inotify instance left; raise fs.inotify.max_user_instances"
        raise OSError(number, reason, subject)
    return result
