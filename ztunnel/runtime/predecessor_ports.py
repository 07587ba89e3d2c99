"""Leaves new connections to a predecessor that has the same ports, as long as this process cannot serve them."""

import socket
from weakref import WeakSet

from tproxy.aio import sockets


class PredecessorPorts:
    """The listening sockets of a process that still lacks certificates, policies or revocation lists.

    Both processes listen during an upgrade, and the kernel would distribute new connections over both. Until
    :meth:`take` is called, all new connections go to the predecessor, and afterwards to this process. Without a
    predecessor, this process gets all connections from the start.
    """

    def __init__(self) -> None:
        self._left: WeakSet[socket.socket] | None = None

    def begin(self) -> None:
        """From now on, sockets that start to listen leave their connections to the predecessor, until
        :meth:`take`.
        """
        self._left = WeakSet()

    def listening(self, sock: socket.socket) -> None:
        """Leave new connections to the predecessor's sockets on the same port, if this process does not take
        connections yet, and direct them to this socket otherwise. Call this directly after the socket has started
        to listen.
        """
        if self._left is None:
            # An earlier successor that crashed can have left them to the predecessor, and the kernel keeps that.
            sockets.leave_to_newer(sock)
        elif sockets.leave_to_older(sock):
            self._left.add(sock)

    def take(self) -> None:
        """From now on, take new connections in this process; idempotent."""
        left, self._left = self._left, None
        for sock in left or ():
            if sock.fileno() >= 0:
                sockets.leave_to_newer(sock)  # the newer socket is this one
