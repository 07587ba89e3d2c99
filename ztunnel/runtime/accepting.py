"""Listening sockets in the private epoll: who gets what they accept, and what happens when descriptors run out."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence

from hbone.aio.poller import READABLE, Poller
from tproxy.aio import sockets
from xds.model.address import SocketAddress

log = logging.getLogger(__name__)

#: Accepts per event and listener, so that a storm on one does not starve the bytes of the others.
_ACCEPTS_PER_TURN = 32
_PAUSE_S = 0.5
#: How long another process may take to accept what it is to have; a guess between what it takes when it is idle,
#: a tenth of that, and what a client would notice.
_COURTESY_S = 0.001
#: Between leaving new connections to a successor and closing: what handshakes of a slow network need; a guess.
_HANDOVER_S = 0.2
#: What accept(2) reports of the connection it would have returned: "pending network errors". The next one may be
#: fine, and since the epoll is edge-triggered it would wait for yet another to arrive if the loop ended here.
_PENDING_ERRORS = (
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


#: Takes one accepted connection, non-blocking, with the peer's address.
Accepted = Callable[[socket.socket, tuple[str, int]], None]


class ListeningSocket:
    """One listening socket and who gets what it accepts.

    Args:
        is_ours: asked before each connection when other processes accept from the same socket: ``False`` lets them
            go first.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: SocketAddress,
        backlog: int,
        poller: Poller,
        *,
        is_ours: Callable[[], bool] | None = None,
    ) -> None:
        self.sock = sock
        self.address = address
        self._backlog = backlog
        self._accepted: Accepted | None = None
        self._poller = poller
        self._registered = False
        self._is_ours = is_ours
        self._waiting = self._waited = False

    def start(self, accepted: Accepted) -> None:
        """Listen, and pass each connection to ``accepted``; called again, only the receiver changes."""
        self._accepted = accepted
        if not self._registered:
            self._registered = True
            self.sock.listen(self._backlog)
            self._poller.register(self.sock.fileno(), self)

    def on_event(self, mask: int) -> None:
        """See :class:`hbone.aio.poller.Handler`."""
        if not (mask & READABLE or not mask):
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
        if self._accept(most):
            self._poller.requeue(self)

    def leave_to_successor(self) -> bool:
        """Let new connections go to whoever else listens on this port, as far as there is anybody.

        Returns:
            False: nobody else can, for the port is not shared.
        """
        return self._registered and sockets.leave_to_newer(self.sock)

    def take_waiting(self) -> None:
        """Accept everything that the kernel has connected already; closing would reset it."""
        if self._registered:
            self._accept(self._backlog + 1)

    def _accept(self, most: int) -> bool:
        """Accept so many; whether more may be waiting."""
        for _ in range(most):
            try:
                client, peer = self.sock.accept()
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _PENDING_ERRORS:
                    continue
                if error.errno in _OUT_OF_DESCRIPTORS:
                    log.error(
                        "accept on %s: %s; waiting %g s (raise the limit of open files)",
                        self.address,
                        error.strerror,
                        _PAUSE_S,
                    )
                    self._poller.loop.call_later(_PAUSE_S, self._again)
                    return False
                raise
            client.setblocking(False)
            assert self._accepted is not None  # start() has registered this socket
            try:
                self._accepted(client, peer[:2])
            except Exception:
                # The connections behind this one have had their edge and would wait for the next client's.
                log.exception("a connection accepted on %s was not taken", self.address)
                client.close()
        return True

    def _have_waited(self) -> None:
        self._waiting, self._waited = False, True
        self._again()

    def _again(self) -> None:
        if self._registered:
            self._poller.requeue(self)

    def on_bug(self, error: Exception) -> None:
        """See :class:`hbone.aio.poller.Handler`."""
        log.error("accept on %s failed", self.address, exc_info=error)

    def close(self) -> None:
        """Stop accepting."""
        if self._registered:
            self._registered = False
            self._poller.unregister(self.sock.fileno())
        self.sock.close()


async def hand_over(listening: Sequence[ListeningSocket]) -> None:
    """Do what must be done before listening sockets close, so that no client notices.

    New connections go to a successor, as far as there is one; what was connected before is accepted here.
    """
    shared = [each.leave_to_successor() for each in listening]
    if any(shared):
        await asyncio.sleep(_HANDOVER_S)
    for each in listening:
        each.take_waiting()
