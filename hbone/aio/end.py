"""The base class of the two endpoints (ends) of a relay.

The two ends of a relay are each other's ``peer``. Each end is a source, whose network's bytes go to the peer, and
a sink, which sends the peer's bytes to its network. Data moves by direct calls:

- An end that *pulls* from a socket asks ``peer.reserve(limit)`` for room, reads straight into it, and calls
  ``peer.commit(n)``. Without room (None) it stops reading until ``peer`` calls ``resume()``.
- A *pushed* end (a tunnel, whose bytes arrive mixed with other streams' bytes) calls ``peer.write(chunks, size)``,
  then ``peer.flush()`` before the chunks' buffer is reused. The peer copies only the bytes that its network does
  not take, and calls ``delivered(n)`` as bytes leave, which returns credit.

``write_eof`` forwards a half-close, ``write_reset`` an abortive close, which ends both directions. If the network
of a sink has ended, the sink discards its input until the relay is over, so that the other direction can still end
in order. The table in :mod:`hbone.end_state` defines the result of each event, for all kinds of ends. Each kind
only implements how to signal the event to its network.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod

from hbone.aio.poller import Poller
from hbone.end_state import TRANSITIONS, EndAction, EndEvent, SinkState, SourceState

CHUNK_BYTES = 256 * 1024


def failure_after_end(sock: socket.SocketType) -> OSError | None:
    """Return the error of a socket whose remote side had already sent a FIN, or ``None``.

    A receive cannot report this error: after a FIN it returns EOF even if a reset arrived later. ``SO_ERROR``
    reports the error once.
    """
    number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return OSError(number, os.strerror(number)) if number else None


class RelayObserver(ABC):
    """The interface through which a relay receives the events of its ends."""

    __slots__ = ()

    @abstractmethod
    def read_ended(self, end: End, error: Exception | None, *, clean: bool) -> None:
        """Record that ``end`` has no more bytes to read. If ``clean``, ``error`` counts as an orderly end."""

    @abstractmethod
    def write_ended(self, end: End) -> None:
        """Record that all output of ``end``, including its EOF, was passed to the network or discarded;
        idempotent.
        """

    @abstractmethod
    def reset_sent(self) -> None:
        """Record that an end has sent a reset, after all its bytes. Both directions of the relay end."""

    @abstractmethod
    def sink_broken(self, end: End, error: Exception) -> None:
        """Record that ``end`` discards its output from now on. The relay continues with the other direction for a
        limited time.
        """

    @abstractmethod
    def fail(self, end: End, error: Exception) -> None:
        """Record that ``end`` can neither read nor write any more."""


class End(ABC):
    """One endpoint of a relay. The code that created it owns it, and closes it after the relay."""

    __slots__ = ("peer", "poller", "read_bytes", "relay", "sink", "source")

    poller: Poller
    peer: End | None
    relay: RelayObserver | None
    source: SourceState
    sink: SinkState
    read_bytes: int
    """The number of bytes read from this end's network into a relay, updated while the relay runs."""

    # Called by the relay

    def join_relay(self, relay: RelayObserver, peer: End) -> None:
        """Make this end part of a relay. No bytes move before :meth:`start`."""
        self.relay = relay
        self.peer = peer

    @abstractmethod
    def start(self) -> None:
        """Start reading. Bytes that were pushed back or arrived early come first."""

    def restart(self) -> None:
        """Start reading, like :meth:`start`, in a relay that was taken over from another process."""
        self.start()

    def leave_relay(self) -> None:
        """Drop the references to the relay and the peer when the relay is over. This breaks their reference
        cycle.
        """
        self.relay = None
        self.peer = None

    def end_in_order(self) -> None:  # noqa: B027  streams need nothing: their owner's close is a CANCEL
        """Prepare an orderly end: the following :meth:`close` sends no reset, even if received bytes were not
        read.
        """

    def lingered(self) -> None:  # noqa: B027  streams need nothing: their connection reports every end at once
        """End the source with a reset if its network has failed. The relay calls this when it no longer waits for
        the rest of the received bytes.
        """

    @abstractmethod
    def close(self, error: Exception | None = None) -> None:
        """Release all resources at once. Idempotent. If the protocol can express ``error``, it is sent to the
        remote side.
        """

    # Called by the peer

    @abstractmethod
    def reserve(self, limit: int) -> memoryview | None:
        """Return room for at most ``limit`` bytes. If there is no room, return None, and call the peer's
        ``resume`` later.
        """

    @property
    def scatters(self) -> bool:
        """Whether :meth:`reserve_many` can return more room than :meth:`reserve`."""
        return False

    def reserve_many(self, limit: int) -> list[memoryview] | None:
        """Return room like :meth:`reserve`, but as several views, which must be filled in order."""
        room = self.reserve(limit)
        return None if room is None else [room]

    @abstractmethod
    def commit(self, size: int) -> None:
        """Accept the first ``size`` bytes (at least 1) of the reserved room, which the peer has filled."""

    @abstractmethod
    def write(self, chunks: list[memoryview], size: int) -> None:
        """Accept all ``size`` bytes. The views are valid until ``flush`` has returned."""

    @abstractmethod
    def flush(self) -> None:
        """Send the bytes given to ``write``, and copy the bytes that the network does not accept."""

    @abstractmethod
    def write_eof(self) -> None:
        """End this direction: after the pending bytes, the end is signalled to the network. No
        bytes may follow.
        """

    @abstractmethod
    def write_reset(self) -> None:
        """Abort this direction: send the pending bytes, and then a reset, so that the end does not look orderly.

        RFC 9113, 8.5: a TCP reset becomes CONNECT_ERROR, and an error of the stream or of its connection becomes a
        TCP reset. An orderly end would make a truncated response look complete.
        """

    @abstractmethod
    def resume(self) -> None:
        """Continue to read, because the peer has room again."""

    @abstractmethod
    def delivered(self, size: int) -> None:
        """Record that the peer has sent ``size`` bytes passed to its ``write``. Flow-control credit for these
        bytes can then be returned.
        """

    # States: see hbone.end_state

    def advance(self, event: EndEvent, error: Exception | None = None, *, clean: bool = True) -> None:
        """Apply ``event``: change the states of source and sink, then run the actions. ``error`` and ``clean`` are
        reported to the relay.

        States change before the actions run, because an action can call this method again: an EOF passed to the
        peer can end the relay, whose owner then closes both ends. ``relay`` and ``peer`` are read again for each
        action, because any action can end the relay.
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
            # A peer that waited for room reads again, and its bytes are discarded. Without reading, it would never
            # reach its EOF.
            if resumes:
                peer.resume()

    def _both_over(self) -> None:
        """Report to the relay that this end can neither send nor receive any more."""
        if self.relay is not None:
            self.relay.write_ended(self)

    @abstractmethod
    def _drop_pending(self) -> int:
        """Drop the pending bytes. Return the number of bytes whose credit is still owed to the peer."""

    @abstractmethod
    def _send_eof(self) -> None:
        """Signal EOF to the network. Called when no bytes are pending."""

    @abstractmethod
    def _send_reset(self) -> None:
        """Reset the network connection. Called when no bytes are pending."""

    def __enter__(self) -> End:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error if isinstance(error, Exception) else None)
