"""The transport of ZDS, for both sides: sends packets and file descriptors over a Unix socket of type SEQPACKET.

One recvmsg(2) call returns a packet with its descriptors, all close-on-exec. The caller closes the
:class:`Packet`, which closes every descriptor not taken over. asyncio's streams do not preserve packet boundaries,
so this module waits with ``add_reader`` and calls recvmsg itself. This way a cancelled reader loses no packet.
"""

import array
import contextlib
import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tproxy.aio.netns import CLONE_NEWNET, Netns
from ztunnel.proxy.istio.zds.messages import PACKET_BYTES, Unreadable
from ztunnel.runtime.sockets import UnixListener, ready

_SEQPACKET = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_NS_GET_NSTYPE = 0xB703
# The buffer has room for several descriptors, so that the error about a packet with more than one can state their
# number.
_MOST_DESCRIPTORS = 16
_DESCRIPTOR_BYTES = array.array("i").itemsize
_BACKLOG = 16


class Packet:
    """One packet. Leaving its ``with`` block closes the descriptors that were not taken over."""

    def __init__(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        self.data = data
        self._descriptors = list(descriptors)

    @property
    def descriptors(self) -> int:
        """The number of descriptors that were not taken over."""
        return len(self._descriptors)

    def pop_namespace(self, name: str) -> Netns:
        """Return the first descriptor as a network namespace, which the caller closes from now on.

        Raises:
            Unreadable: the packet has no descriptor, or the descriptor is not a network namespace.
        """
        # The type is checked here, because setns(2) would fail much later, and with a misleading error for a file
        # or a socket.
        if not self._descriptors:
            raise Unreadable("No control message")
        if not _is_network_namespace(self._descriptors[0]):
            raise Unreadable("the descriptor is not a network namespace")
        return Netns.from_fd(self._descriptors.pop(0), name)

    def close(self) -> None:
        """Close the descriptors that were not taken over; idempotent."""
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
    """One ZDS connection; owns and closes its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def receive(self) -> Packet | None:
        """Return the next packet, or None at the end of the connection.

        Raises:
            Unreadable: the packet or its list of descriptors was truncated. The descriptors are closed.
            OSError: the connection broke.
        """
        while True:
            try:
                return _receive(self._socket)
            except BlockingIOError:
                await ready(self._socket, writing=False)

    async def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one packet, waiting for room in the peer's receive queue. The descriptors are duplicated.

        Raises:
            OSError: the connection broke.
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
        """End the connection for both sides. A pending :meth:`receive` returns None. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; idempotent. :meth:`receive` and :meth:`send` must not be waiting."""
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
        received = packet.descriptors
        packet.close()
        if flags & socket.MSG_TRUNC:
            raise Unreadable("message truncated")
        # The kernel also truncates the list if this process has reached its limit (unix(7)).
        is_full = received < _MOST_DESCRIPTORS
        why = ": this process has no free file descriptors" if is_full else ""
        raise Unreadable(f"control message truncated{why}")
    if not data:
        # The connection has ended. (An empty packet looks the same to recvmsg, but ZDS has no empty message.)
        packet.close()
        return None
    return packet


def connect(path: Path) -> Channel:
    """Connect to an agent. A Unix socket connects or fails at once, so this does not wait.

    Raises:
        OSError: no process listens there, or the listener's backlog is full (EAGAIN).
    """
    sock = socket.socket(socket.AF_UNIX, _SEQPACKET)
    try:
        sock.connect(str(path))
    except BaseException:
        sock.close()
        raise
    return Channel(sock)


class Listener(UnixListener):
    """The agent's listening socket, at a path of the file system.

    A client gets the pods' network namespaces, so only the socket's owner is allowed to connect.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, socket.SOCK_SEQPACKET, _BACKLOG)

    async def accept(self) -> Channel:
        """Return the next connection. The caller closes it.

        Raises:
            OSError: usually, the process has no free descriptors. The caller pauses and calls again.
        """
        while True:
            try:
                sock, _ = self.socket.accept()
            except BlockingIOError:
                await ready(self.socket, writing=False)
            else:
                sock.setblocking(False)
                return Channel(sock)
