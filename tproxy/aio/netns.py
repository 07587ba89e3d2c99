"""Opens, creates and enters network namespaces, so that sockets can be created in them.

A socket stays in the namespace that its thread had at the call of ``socket()``, so a process enters a namespace
only for the few microseconds of ``socket()``. setns(2) affects only the calling thread. :meth:`Netns.entered` is
therefore synchronous: with an ``await`` inside, other tasks of this thread would run in the wrong namespace.
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
#: The errors of open(2) if this process or the node runs out of descriptors or memory. They do not mean that the
#: namespace is missing.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
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
    """Per-thread state: the thread's own namespace, and the depth of its nested :meth:`Netns.entered` blocks.

    Attributes:
        home: the descriptor of the thread's own namespace, opened once per thread. -1 before that.
        depth: the number of nested :meth:`Netns.entered` blocks. An inner block returns to the namespace of the
            outer block, not to ``home``.
    """

    home = -1
    depth = 0

    def forget(self) -> None:
        """Close ``home``, because the thread has changed its namespace by other means. Idempotent."""
        if self.home >= 0:
            os.close(self.home)
            self.home = -1


_thread = _Thread()


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces of the kinds in ``flags`` (CLONE_NEW*).

    Raises:
        NeedCapability: no CAP_SYS_ADMIN.
    """
    _thread.forget()
    _call("make a namespace", _libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call mount(2).

    Raises:
        NeedCapability: no CAP_SYS_ADMIN.
        KernelRefused: any other errno.
    """
    encoded = [None if item is None else item.encode() for item in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _call(f"mount {target}", result)


class Netns:
    """A network namespace, referenced by a descriptor. The kernel keeps the namespace while this object is
    open.
    """

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name

    @classmethod
    def open(cls, where: "str | int | Path | None") -> "Netns":
        """Open a namespace that exists; the caller closes it.

        Args:
            where: a name below /run/netns, a path, a process id (an int, or a str of digits if no such name
                exists), or None for the caller's own namespace.

        Raises:
            UnknownNamespace: the namespace does not exist.
            NeedCapability: the process belongs to another user, and CAP_SYS_PTRACE is missing.
            KernelRefused: this process or the node has no descriptor or memory left.
        """
        path = _path(where)
        try:
            return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "this" if where is None else str(where))
        except PermissionError as error:
            raise NeedCapability("CAP_SYS_PTRACE", f"open {path}") from error
        except OSError as error:
            if error.errno in _SHORTAGES:
                raise KernelRefused(f"open {path}", error.errno) from error
            raise UnknownNamespace(str(where)) from error

    @classmethod
    def from_fd(cls, fd: int, name: str = "") -> "Netns":
        """Wrap a descriptor of a namespace, for example one received over ZDS. The returned object closes it."""
        return cls(fd, name or f"fd {fd}")

    @classmethod
    def create(cls, name: str | None = None) -> "Netns":
        """Create a namespace with ``lo`` down. A named namespace also gets a file below /run/netns for ``ip
        netns``.

        Raises:
            NeedCapability: no CAP_SYS_ADMIN.
            KernelRefused: for example EEXIST if the name is taken.
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

        # unshare(2) moves the calling thread, so a separate thread calls it and then ends. The caller's thread
        # would have to return, and if that failed, it would stay in the new namespace.
        thread = threading.Thread(target=make, name="make netns")
        thread.start()
        thread.join()
        if failures:
            for fd in fds:
                os.close(fd)
            raise failures[0]
        return cls(fds[0], name or "unnamed")

    def duplicate(self) -> "Netns":
        """Return a second object for this namespace, with its own descriptor. The caller closes it."""
        return type(self)(os.dup(self._fd), self.name)

    def remove_name(self) -> None:
        """Remove the name below /run/netns. The namespace itself exists as long as it is in use."""
        unpublish(self.name)

    def fileno(self) -> int:
        """Return the descriptor, for ``select`` and IFLA_NET_NS_FD. This object keeps ownership."""
        return self._fd

    @property
    def inode(self) -> int:
        """The inode number, as in ``net:[4026531840]``. It is equal for two objects if and only if they refer to
        the same namespace.
        """
        return os.fstat(self._fd).st_ino

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run the ``with`` block in this namespace, in this thread. Entering and leaving take about 3 µs.

        The block must be synchronous. Blocks can be nested.

        Raises:
            NeedCapability: no CAP_SYS_ADMIN.
        """
        # The thread's own namespace is opened once, and its descriptor kept. This saves an open and a close per
        # socket, and a busy node creates thousands of sockets a second. A nested block must return to the outer
        # block's namespace, which is opened through /proc.
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
                # If this fails, the thread would create its next sockets in a pod's namespace. That is worse than
                # any error of the block, so the failure replaces the block's error and must not be caught.
                _setns(home)
        finally:
            if inner:
                os.close(home)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
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
    """Return a context manager that enters ``netns``, or one without effect if ``netns`` is None."""
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
    """Give the calling thread's namespace a name, as ``ip netns add`` does: bind-mount it on a file."""
    target = RUN / name
    if not RUN.is_dir():
        RUN.mkdir(parents=True)
    try:
        mount("", str(RUN), None, _MS_SHARED | _MS_REC)
    except KernelRefused as error:
        # EINVAL means that the path is not a mount point yet. (os.path.ismount cannot be used, because it does not
        # recognise bind mounts.)
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
    """Remove a name as ``ip netns del`` does; idempotent."""
    target = RUN / name
    _libc.umount2(str(target).encode(), _MNT_DETACH)
    target.unlink(missing_ok=True)


def names() -> list[str]:
    """Return the names that ``ip netns list`` shows, sorted."""
    return sorted(path.name for path in RUN.iterdir()) if RUN.is_dir() else []
