"""Network namespaces: open, make, and be in one for the moment of making a socket.

A socket stays in the namespace it was made in, so a process needs to be elsewhere only for the few
microseconds of ``socket()``. ``setns`` moves the calling thread and no other; :meth:`Netns.entered` is
synchronous, and there must be no ``await`` inside it.
"""

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tproxy.errors import KernelRefused, NeedCapability, UnknownNamespace

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
RUN = Path("/run/netns")
_OWN = "/proc/thread-self/ns/net"
_MS_BIND, _MS_REC, _MS_SHARED, _MNT_DETACH = 0x1000, 0x4000, 1 << 20, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _call(doing: str, result: int) -> None:
    if result == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EPERM, errno.EACCES):
        raise NeedCapability("CAP_SYS_ADMIN", doing)
    raise KernelRefused(doing, code)


def _setns(fd: int) -> None:
    _call("enter a network namespace", _libc.setns(fd, CLONE_NEWNET))


class _Thread(threading.local):
    """Where the calling thread is: a descriptor for the way back, asked once and not for each socket.

    ``depth`` is how many namespaces it is in, one inside the other; on the way back from an inner one it is in a
    namespace that ``home`` does not name.
    """

    home = -1
    depth = 0

    def forget(self) -> None:
        """The thread moved by other means."""
        if self.home >= 0:
            os.close(self.home)
            self.home = -1


_thread = _Thread()


def unshare(flags: int) -> None:
    """Leave shared namespaces (CLONE_NEW*) behind, in this thread."""
    _thread.forget()
    _call("make a namespace", _libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    encoded = [None if item is None else item.encode() for item in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _call(f"mount {target}", result)


class Netns:
    """A network namespace held by a descriptor; it exists at least as long as this object is open."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name

    @classmethod
    def open(cls, where: "str | int | Path | None") -> "Netns":
        """Find a namespace.

        Args:
            where: a name below /run/netns, a path, a process id (int, or a str of digits when no
                such name exists), or None for the caller's own.

        Raises:
            UnknownNamespace: it is not there.
            NeedCapability: another user's process.
        """
        path = _path(where)
        try:
            return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "this" if where is None else str(where))
        except PermissionError as error:
            raise NeedCapability("CAP_SYS_PTRACE", f"open {path}") from error
        except OSError as error:
            raise UnknownNamespace(str(where)) from error

    @classmethod
    def from_fd(cls, fd: int, name: str = "") -> "Netns":
        """Take a namespace received as a descriptor; the object owns the descriptor from now on."""
        return cls(fd, name or f"fd {fd}")

    @classmethod
    def create(cls, name: str | None = None) -> "Netns":
        """Make a namespace, with ``lo`` down; with a name it also appears below /run/netns for ``ip netns``.

        Raises:
            NeedCapability: no CAP_SYS_ADMIN.
            KernelRefused: among others EEXIST, the name is taken.
        """
        fds: list[int] = []
        failures: list[BaseException] = []

        def make() -> None:
            try:
                unshare(CLONE_NEWNET)
                fds.append(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC))
                if name is not None:
                    _publish(name)
            except BaseException as error:  # noqa: BLE001 - carried to the calling thread, raised there
                failures.append(error)

        # A thread of its own, so that nothing has to find the way back.
        thread = threading.Thread(target=make, name="make netns")
        thread.start()
        thread.join()
        if failures:
            for fd in fds:
                os.close(fd)
            raise failures[0]
        return cls(fds[0], name or "unnamed")

    def remove_name(self) -> None:
        """Take the name below /run/netns away; the namespace lives on while anything uses it."""
        unpublish(self.name)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    @property
    def inode(self) -> int:
        """The number in ``net:[4026531840]``: equal exactly for the same namespace."""
        return os.fstat(self._fd).st_ino

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be in this namespace, in this thread, for a synchronous stretch; about 3 µs there and back."""
        inner = _thread.depth > 0
        if inner:
            home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        else:
            if _thread.home < 0:
                _thread.home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
            home = _thread.home
        try:
            _setns(self._fd)
            _thread.depth += 1
            try:
                yield
            finally:
                _thread.depth -= 1
                # Carrying on in a foreign namespace would be worse than any error: nothing catches this.
                _setns(home)
        finally:
            if inner:
                os.close(home)

    def close(self) -> None:
        """Give the descriptor back; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def entered(netns: Netns | None) -> contextlib.AbstractContextManager[None]:
    """:meth:`Netns.entered`, or stay here for None."""
    return contextlib.nullcontext() if netns is None else netns.entered()


def _path(where: str | int | Path | None) -> str:
    if where is None:
        return _OWN
    if isinstance(where, int):
        return f"/proc/{where}/ns/net"
    if isinstance(where, Path) or "/" in where:
        return str(where)
    if where.isdigit() and not (RUN / where).exists():
        return f"/proc/{where}/ns/net"
    return str(RUN / where)


def _publish(name: str) -> None:
    """As ``ip netns add``: bind the calling thread's namespace to a file."""
    target = RUN / name
    if not RUN.is_dir():
        RUN.mkdir(parents=True)
    try:
        mount("", str(RUN), None, _MS_SHARED | _MS_REC)
    except KernelRefused as error:
        # EINVAL says that it is no mount point, which os.path.ismount cannot see of a bind mount.
        if error.code != errno.EINVAL:
            raise
        mount(str(RUN), str(RUN), None, _MS_BIND | _MS_REC)
        mount("", str(RUN), None, _MS_SHARED | _MS_REC)
    try:
        os.close(os.open(target, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0))
    except FileExistsError as error:
        raise KernelRefused(f"the name {target}", errno.EEXIST) from error
    try:
        mount(_OWN, str(target), None, _MS_BIND)
    except Exception:
        target.unlink()
        raise


def unpublish(name: str) -> None:
    """As ``ip netns del``; a name that is not there is fine."""
    target = RUN / name
    _libc.umount2(str(target).encode(), _MNT_DETACH)
    target.unlink(missing_ok=True)


def names() -> list[str]:
    """What ``ip netns list`` shows."""
    return sorted(path.name for path in RUN.iterdir()) if RUN.is_dir() else []
