"""ZDS packets over a Unix socket of type SEQPACKET: both halves of the transport.

A packet is read with its descriptors in one call, all of them close-on-exec; whoever got a :class:`Packet` closes
it, and with it every descriptor that was not taken. Asyncio's streams know no packets, so this waits with
``add_reader`` and reads itself: a packet that arrives is never lost to a cancelled reader.
"""

import array
import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tproxy.aio.netns import CLONE_NEWNET, Netns
from ztunnel.istio.zds.messages import PACKET_BYTES, Unreadable
from ztunnel.runtime.sockets import ready

_SEQPACKET = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_NS_GET_NSTYPE = 0xB703
# More than one is an error, but one that has to be seen, and counted, to be told.
_MOST_DESCRIPTORS = 16
_DESCRIPTOR_BYTES = array.array("i").itemsize
_BACKLOG = 16


class Packet:
    """What one read brought; leaving its ``with`` closes the descriptors that nobody took."""

    def __init__(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        self.data = data
        self._descriptors = list(descriptors)

    @property
    def descriptors(self) -> int:
        """How many are left."""
        return len(self._descriptors)

    def take_namespace(self, name: str) -> Netns:
        """The first descriptor as a network namespace, the caller's to close from now on.

        Raises:
            Unreadable: there is none, or it is something else.
        """
        if not self._descriptors:
            raise Unreadable("No control message")
        if not _is_network_namespace(self._descriptors[0]):
            raise Unreadable("the descriptor is not a network namespace")
        return Netns.from_fd(self._descriptors.pop(0), name)

    def close(self) -> None:
        """Close what was not taken; may be called twice."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _is_network_namespace(descriptor: int) -> bool:
    try:
        return fcntl.ioctl(descriptor, _NS_GET_NSTYPE) == CLONE_NEWNET
    except OSError:
        return False  # ENOTTY: a file, a socket


class Channel:
    """One connection; owns its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def receive(self) -> Packet | None:
        """The next packet, None at the end.

        Raises:
            Unreadable: it was too long, or came with more descriptors than anybody could mean; those are closed.
            OSError: the connection is gone.
        """
        while True:
            try:
                return _receive(self._socket)
            except BlockingIOError:
                await ready(self._socket, writing=False)

    async def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one packet, as soon as the peer has room for it.

        Raises:
            OSError: the connection is gone.
        """
        while True:
            try:
                if descriptors:
                    socket.send_fds(self._socket, [data], list(descriptors), socket.MSG_NOSIGNAL)
                else:
                    self._socket.send(data, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                await ready(self._socket, writing=True)

    def shut_down(self) -> None:
        """End the connection for both sides; who receives sees the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close; may be called twice, but not while somebody receives."""
        self._socket.close()


def _receive(sock: socket.socket) -> Packet | None:
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * _DESCRIPTOR_BYTES)
    data, ancillary, flags, _ = sock.recvmsg(PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % _DESCRIPTOR_BYTES])
    packet = Packet(data, descriptors)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        packet.close()
        what = "message" if flags & socket.MSG_TRUNC else "control message"
        raise Unreadable(f"{what} truncated")
    if not data:
        # The end, or an empty packet, which is no message of ZDS either.
        packet.close()
        return None
    return packet


def connect(path: Path) -> Channel:
    """Connect to an agent; a Unix socket does so at once or not at all.

    Raises:
        OSError: nobody is there, or too many wait to be accepted (EAGAIN).
    """
    sock = socket.socket(socket.AF_UNIX, _SEQPACKET)
    try:
        sock.connect(str(path))
    except BaseException:
        sock.close()
        raise
    return Channel(sock)


class Listener:
    """The agent's end: a listening socket under a path.

    Whoever can connect is handed the pods' namespaces, so the socket is its owner's alone (mode 0600).

    Raises:
        OSError: the path cannot be had.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, _SEQPACKET)
        # Renamed over the old path when it is complete: no proxy ever dials a half-made socket.
        making = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            making.unlink(missing_ok=True)
            self._socket.bind(str(making))
            making.chmod(0o600)
            self._socket.listen(_BACKLOG)
            self._inode = making.stat().st_ino
            making.rename(path)
        except OSError as error:
            self._socket.close()
            with contextlib.suppress(OSError):
                making.unlink()
            raise OSError(error.errno or errno.EINVAL, error.strerror or str(error), str(path)) from error

    async def accept(self) -> Channel:
        """The next connection."""
        while True:
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                await ready(self._socket, writing=False)
            else:
                sock.setblocking(False)
                return Channel(sock)

    def close(self) -> None:
        """Stop listening; the path goes, unless a successor has taken it."""
        # Looked at before closing: until then the number cannot be anybody else's.
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        self._socket.close()
