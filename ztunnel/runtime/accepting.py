"""Accepts connections in the poller's epoll, pauses when descriptors run out, and hands a port to a successor."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from hbone.aio.poller import READABLE, Poller
from tproxy.aio import socket_calls, sockets
from xds.model.address import SocketAddress

log = logging.getLogger(__name__)

#: The most connections accepted per event and listener, so that a burst at one listener does not starve other
#: sockets.
_ACCEPTS_PER_TURN = 32
_PAUSE_S = 0.5
#: A process with more connections than another process waits this long, so that the other process accepts first. A
#: guess, between the time that an idle process needs (a tenth of this) and a noticeable delay for clients.
_COURTESY_S = 0.001
#: The time between directing new connections to a successor and closing the socket, for handshakes in progress. A
#: guess.
_HANDOVER_S = 0.2
#: The longest time to keep a closing socket whose queue cannot be accepted because descriptors ran out. A guess.
_QUEUED_S = 2.0
#: Errors of accept(2) that report a fault of the accepted connection: "already-pending network errors" in its
#: manual, and a refusal by a firewall or security module. The next connection can be accepted. The epoll is
#: edge-triggered, so if the loop ended here, that connection would wait until the next one arrives.
_PENDING_ERRORS = (
    errno.EPERM,
    errno.EACCES,
    errno.ENETDOWN,
    errno.EPROTO,
    errno.ENOPROTOOPT,
    errno.EHOSTDOWN,
    errno.ENONET,
    errno.EHOSTUNREACH,
    errno.EOPNOTSUPP,
    errno.ENETUNREACH,
    errno.ECONNABORTED,
)
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


#: Called with each accepted connection: a non-blocking socket, and the peer's address.
Accepted = Callable[[socket.SocketType, tuple[str, int]], None]


class Gate(Protocol):
    """Decides whether a listener may accept connections now."""

    def admits(self) -> bool:
        """Return whether to accept a connection now. After False, the listener asks again in ``_PAUSE_S``."""

    def accepted(self, number: int) -> None:
        """Receive the descriptor of each accepted connection."""


class Gates:
    """Several gates as one. Each is called only if the previous ones admit a connection, and all must admit it."""

    def __init__(self, *gates: Gate) -> None:
        self._gates = gates

    def admits(self) -> bool:
        """Return whether to accept a connection now."""
        return all(gate.admits() for gate in self._gates)

    def accepted(self, number: int) -> None:
        """Receive the descriptor of each accepted connection, and pass it to every gate."""
        for gate in self._gates:
            gate.accepted(number)


class ListeningSocket:
    """A listening socket that passes accepted connections to a callback; owns the socket.

    Args:
        sock: a bound socket, not listening yet.
        address: its address, for logs.
        backlog: the length of its accept queue.
        poller: waits for connections.
        is_ours: called before each connection of a socket that several processes share. If it returns False, other
            processes have ``_COURTESY_S`` to take the connection.
        gate: called before each connection; ``None``: all are accepted.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: SocketAddress,
        backlog: int,
        poller: Poller,
        *,
        is_ours: Callable[[], bool] | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.sock = sock
        self._family = int(sock.family)
        self.address = address
        self._backlog = backlog
        self._accepted: Accepted | None = None
        self._poller = poller
        self._registered = False
        self._is_ours = is_ours
        self._gate = gate
        self._waiting = self._waited = self._paused = False

    def start(self, accepted: Accepted) -> None:
        """Start to listen, and pass each connection to ``accepted``. A further call only replaces the callback."""
        self._accepted = accepted
        if not self._registered:
            self._registered = True
            self.sock.listen(self._backlog)
            self._poller.register(self.sock.fileno(), self)

    def on_event(self, mask: int) -> None:
        """Accept connections; see :class:`hbone.aio.poller.Handler`."""
        # A shared socket wakes every waiting process. A process that should let others accept first waits briefly.
        # Then it accepts the connections that are still queued, because a busy or stopped process must not delay
        # them for longer.
        if not (mask & READABLE or not mask):
            return
        if self._paused:
            return
        if self._is_ours is None:
            most = _ACCEPTS_PER_TURN
        elif self._waited or self._is_ours():
            most, self._waited = 1, False
        else:
            if not self._waiting:
                self._waiting = True
                self._poller.loop.call_later(_COURTESY_S, self._have_waited)
            return
        if self._accept(most, self._gate):
            self._poller.requeue(self)

    def leave_to_successor(self) -> bool:
        """If another socket listens on this port later than this one, direct new connections to that socket;
        idempotent.

        Returns:
            False if the port is not shared, so that no other socket can take them.
        """
        return self._registered and sockets.leave_to_newer(self.sock)

    def accept_queued(self) -> bool:
        """Accept every connection in the socket's queue regardless of the gate; closing the socket would reset
        them.

        Returns:
            False if connections can be left in the queue, because descriptors ran out.
        """
        self._paused = False
        if self._registered:
            self._accept(self._backlog + 1, None)
        return not self._paused

    def _accept(self, most: int, gate: Gate | None) -> bool:
        """Accept at most ``most`` connections. Return whether more can be queued."""
        for _ in range(most):
            if gate is not None and not gate.admits():
                self._pause()
                return False
            try:
                client, peer = socket_calls.accept(self.sock, self._family)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _PENDING_ERRORS:
                    continue
                # The connection stays in the queue, and an edge-triggered epoll does not report it again. So a
                # timer retries; by then, other connections can have ended and freed descriptors.
                hint = " (raise the limit of open files)" if error.errno in _OUT_OF_DESCRIPTORS else ""
                log.error("accept on %s: %s; waiting %g s%s", self.address, error.strerror, _PAUSE_S, hint)
                self._pause()
                return False
            client.setblocking(False)
            if gate is not None:
                gate.accepted(client.fileno())
            assert self._accepted is not None  # start() has registered this socket
            try:
                self._accepted(client, peer[:2])
            except Exception:
                # Continue after the error: the poller has already reported the connections queued behind this one,
                # and would not report them again before the next client.
                log.exception("a connection accepted on %s was not taken", self.address)
                client.close()
        return True

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._poller.loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._paused = False
        self._retry()

    def _have_waited(self) -> None:
        self._waiting, self._waited = False, True
        self._retry()

    def _retry(self) -> None:
        if self._registered:
            self._poller.requeue(self)

    def on_bug(self, error: Exception) -> None:
        """Log an error of the callback, which is a bug; see :class:`hbone.aio.poller.Handler`."""
        log.error("accept on %s failed", self.address, exc_info=error)

    def close(self) -> None:
        """Stop accepting and close the socket; idempotent."""
        if self._registered:
            self._registered = False
            self._poller.unregister(self.sock.fileno())
        self.sock.close()


async def hand_over(listening: Sequence[ListeningSocket]) -> None:
    """Prepare listening sockets for closing without losing a connection; the caller closes them afterwards.

    New connections are directed to a successor, if there is one. Connections already in the queues are accepted
    here.
    """
    # The kernel chooses the socket when the SYN arrives, and queues the connection there when its handshake ends.
    # So handshakes that started before the change still arrive in this queue shortly afterwards, and closing would
    # reset them.
    shared = [each.leave_to_successor() for each in listening]
    if any(shared):
        await asyncio.sleep(_HANDOVER_S)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _QUEUED_S
    left = [each for each in listening if not each.accept_queued()]
    while left and loop.time() < deadline_s:
        await asyncio.sleep(_PAUSE_S)  # connections that end meanwhile free descriptors
        left = [each for each in left if not each.accept_queued()]
