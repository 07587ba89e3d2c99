"""What the two ends of a relay have in common.

Two ends, ``a`` and ``b``, are each other's ``peer``. Each is a source (what its network sends goes into the
peer) and a sink (what the peer gives goes out to its network). Data moves by direct calls:

- An end that *pulls* from a socket asks ``peer.reserve(limit)`` for room, reads straight into it, and calls
  ``peer.commit(n)``. Without room (None) it stops reading until ``peer`` calls ``resume()``.
- An end that is *pushed* to (a tunnel: its bytes arrive with those of other streams) calls
  ``peer.write(chunks, size)``, then ``peer.flush()`` before the chunks' buffer is used again. The peer copies only
  what its network does not take, and calls ``delivered(n)`` as bytes leave, which returns credit.

``write_eof`` passes a half-close on, ``write_reset`` an abortive close, which ends both directions. A sink whose
network is gone discards what it is given until the relay is over, so that the other direction can still end in
order. Which event leads where is one table for all ends, :mod:`hbone.end_state`; an end here says only how its
network is told.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod

from hbone.aio.poller import Poller
from hbone.end_state import TRANSITIONS, EndAction, EndEvent, SinkState, SourceState

CHUNK_BYTES = 256 * 1024


def failure_after_end(sock: socket.socket) -> OSError | None:
    """What befell a socket after its other side ended its direction, or ``None``.

    A receive cannot tell: after a FIN it says EOF, whatever came later. ``SO_ERROR`` does, once.
    """
    number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return OSError(number, os.strerror(number)) if number else None


class RelayObserver(ABC):
    """What an end reports to; the relay that it belongs to."""

    __slots__ = ()

    @abstractmethod
    def read_ended(self, end: End, error: Exception | None, *, clean: bool) -> None:
        """``end`` gives no more; ``clean``: ``error`` counts as an ordinary end."""

    @abstractmethod
    def write_ended(self, end: End) -> None:
        """Everything for ``end``, its EOF included, was handed to the network or discarded; idempotent."""

    @abstractmethod
    def reset_sent(self) -> None:
        """An end has sent a reset, and everything before it: neither direction can continue."""

    @abstractmethod
    def sink_broken(self, end: End, error: Exception) -> None:
        """``end`` discards from now on; the relay lingers for the other direction, within a limit."""

    @abstractmethod
    def fail(self, end: End, error: Exception) -> None:
        """``end`` can neither read nor write any more."""


class End(ABC):
    """One end; owned and closed by the code that made it, also after a relay."""

    __slots__ = ("peer", "poller", "read_bytes", "relay", "sink", "source")

    poller: Poller
    peer: End | None
    relay: RelayObserver | None
    source: SourceState
    sink: SinkState
    read_bytes: int
    """Bytes that came from this end's network and went into a relay, live."""

    # Called by the relay

    def join_relay(self, relay: RelayObserver, peer: End) -> None:
        """Become part of a relay; nothing moves before :meth:`start`."""
        self.relay = relay
        self.peer = peer

    @abstractmethod
    def start(self) -> None:
        """Begin to read; what was pushed back or came early goes first."""

    def leave_relay(self) -> None:
        """Forget relay and peer, which breaks the reference cycle; the relay is over."""
        self.relay = None
        self.peer = None

    def end_in_order(self) -> None:  # noqa: B027  streams need nothing: their owner's close is a CANCEL
        """Have the close that follows look like an end, whatever the network has sent and was not read."""

    @abstractmethod
    def close(self, error: Exception | None = None) -> None:
        """Release everything at once; idempotent. ``error`` tells the peer why where the protocol can."""

    # Called by the peer

    @abstractmethod
    def reserve(self, limit: int) -> memoryview | None:
        """Return room for at most ``limit`` bytes; None: wait until this end calls ``resume`` of the caller."""

    @property
    def scatters(self) -> bool:
        """Whether :meth:`reserve_many` gives more room than :meth:`reserve`."""
        return False

    def reserve_many(self, limit: int) -> list[memoryview] | None:
        """As :meth:`reserve`, in several views to be filled in order."""
        room = self.reserve(limit)
        return None if room is None else [room]

    @abstractmethod
    def commit(self, size: int) -> None:
        """Take the first ``size`` bytes, at least 1, of the reserved room."""

    @abstractmethod
    def write(self, chunks: list[memoryview], size: int) -> None:
        """Take all ``size`` bytes; the views are valid until ``flush`` returned."""

    @abstractmethod
    def flush(self) -> None:
        """Send what ``write`` gave, copy the rest."""

    @abstractmethod
    def write_eof(self) -> None:
        """End this direction; the network learns it after what is pending. No bytes may follow."""

    @abstractmethod
    def write_reset(self) -> None:
        """Abort: what is pending leaves, then the network learns that this is no orderly end.

        RFC 9113, 8.5: a reset of TCP becomes CONNECT_ERROR, and an error of the stream or of its connection a
        reset of TCP. An end would make a truncated answer look complete.
        """

    @abstractmethod
    def resume(self) -> None:
        """Read again: the peer has room."""

    @abstractmethod
    def delivered(self, size: int) -> None:
        """Take note that ``size`` bytes given by ``write`` have left: their credit can return."""

    # States: see hbone.end_state

    def advance(self, event: EndEvent, error: Exception | None = None, *, clean: bool = True) -> None:
        """Apply ``event``: change the states, then act. ``error`` and ``clean`` are for the relay's report.

        The states change before the actions run, for an action may lead back here: an EOF passed to the peer can
        end the relay, and its owner closes both ends. ``relay`` and ``peer`` are read anew for each action,
        because any of them may be the relay's last.
        """
        transition = TRANSITIONS[self.source, self.sink, event]
        self.source, self.sink = transition.source, transition.sink
        actions = transition.actions
        for action in actions:
            relay, peer = self.relay, self.peer
            if action is EndAction.REPORT_READ:
                if peer is not None:
                    peer.flush()
                if relay is not None:
                    relay.read_ended(self, error, clean=clean)
            elif action is EndAction.PASS_EOF:
                if peer is not None:
                    peer.write_eof()
            elif action is EndAction.PASS_RESET:
                if peer is not None:
                    peer.write_reset()
            elif action is EndAction.DISCARD:
                self._discard(error, resumes=EndAction.REPORT_WRITTEN not in actions)
            elif action is EndAction.SEND_EOF:
                self._send_eof()
                if relay is not None:
                    relay.write_ended(self)
            elif action is EndAction.SEND_RESET:
                self._send_reset()
                if relay is not None:
                    relay.reset_sent()
            elif action is EndAction.REPORT_WRITTEN:
                if relay is not None:
                    relay.write_ended(self)
            else:
                self._both_over()

    def _discard(self, error: Exception | None, *, resumes: bool) -> None:
        relay = self.relay
        if relay is not None and error is not None:
            relay.sink_broken(self, error)
        dropped = self._drop_pending()
        peer = self.peer
        if peer is not None:
            if dropped:
                peer.delivered(dropped)
            # A peer that waited for room reads on, into the void: only so can its own end be seen.
            if resumes:
                peer.resume()

    def _both_over(self) -> None:
        """Nothing more can reach the network or come from it."""
        if self.relay is not None:
            self.relay.write_ended(self)

    @abstractmethod
    def _drop_pending(self) -> int:
        """Drop what waits for the network; return the bytes whose credit the peer has not got back."""

    @abstractmethod
    def _send_eof(self) -> None:
        """End our direction of the network; nothing is pending."""

    @abstractmethod
    def _send_reset(self) -> None:
        """Cut the network off; nothing is pending."""

    def __enter__(self) -> End:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error if isinstance(error, Exception) else None)
