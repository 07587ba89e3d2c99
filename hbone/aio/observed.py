"""Shows the bytes of a relay's end to an observer, such as a packet capture, as they pass.

The owner of a relay replaces one end by an :class:`ObservedEnd`. Relays without an observer have no additional
cost. The :class:`ObservedEnd` is the peer of the other end, and a :class:`_FarSide` is the peer of the observed
end. Both forward every call at once, so back pressure, half closes and resets work as between the two real ends,
and no byte is delayed. There are two differences. Plain sockets are not spliced (:mod:`hbone.aio.splice`), because
their bytes must pass through this process. And the owner sends no first bytes along with a CONNECT, because these
would bypass the relay.
"""

from __future__ import annotations

from typing import Protocol

from hbone.aio.end import End, RelayObserver
from hbone.end_state import SINK_BROKEN, SinkState, SourceState


class StreamObserver(Protocol):
    """Receives the bytes of a relay's end. It must not raise, and must copy the bytes that it keeps."""

    def received(self, chunk: memoryview) -> None:
        """Called with bytes received from the end's network; the view is valid until this returns."""

    def sent(self, chunk: memoryview) -> None:
        """Called with bytes about to be sent to the end's network; the view is valid until this returns."""

    def receive_ended(self, *, reset: bool) -> None:
        """Called when the end's network has ended its direction by a FIN or a reset."""

    def send_ended(self, *, reset: bool) -> None:
        """Called when no further bytes will be sent to the end's network, only a FIN or a reset."""

    def left(self) -> None:
        """Called last, when the relay is over, with or without an error."""


class ObservedEnd(End):
    """Replaces ``inner`` in a relay; closing it closes ``inner``.

    Args:
        inner: the observed end. No relay must use it yet.
        observer: called from the start of the relay to its end.
    """

    __slots__ = ("_observer", "_rooms", "inner")

    def __init__(self, inner: End, observer: StreamObserver) -> None:
        self.inner = inner
        self.poller = inner.poller
        self.peer = None
        self.relay = None
        self.source = SourceState.OPEN
        self.sink = SinkState.OPEN
        self.read_bytes = 0
        self._observer = observer
        self._rooms: list[memoryview] = []

    # Calls by the relay

    def join_relay(self, relay: RelayObserver, peer: End) -> None:
        self.relay = relay
        self.peer = peer
        self.inner.join_relay(_Reports(self), _FarSide(self))

    def start(self) -> None:
        self.inner.start()

    def leave_relay(self) -> None:
        self.inner.leave_relay()
        self.relay = None
        self.peer = None
        self._rooms = []
        self._observer.left()

    def lingered(self) -> None:
        self.inner.lingered()

    def close(self, error: Exception | None = None) -> None:
        self.inner.close(error)

    # Calls by the other end, with bytes for the inner end's network

    def reserve(self, limit: int) -> memoryview | None:
        room = self.inner.reserve(limit)
        self._rooms = [room] if room is not None else []
        return room

    @property
    def scatters(self) -> bool:
        return self.inner.scatters

    def reserve_many(self, limit: int) -> list[memoryview] | None:
        rooms = self.inner.reserve_many(limit)
        self._rooms = rooms if rooms is not None else []
        return rooms

    def commit(self, size: int) -> None:
        rooms, self._rooms = self._rooms, []
        # If the inner end's network accepts no more bytes, the inner end discards them, so they are not shown as
        # sent.
        if self.inner.sink is not SINK_BROKEN:
            _show(self._observer.sent, rooms, size)
        self.inner.commit(size)

    def write(self, chunks: list[memoryview], size: int) -> None:
        if self.inner.sink is not SINK_BROKEN:
            for chunk in chunks:
                self._observer.sent(chunk)
        self.inner.write(chunks, size)

    def flush(self) -> None:
        self.inner.flush()

    def write_eof(self) -> None:
        self._observer.send_ended(reset=False)
        self.inner.write_eof()

    def write_reset(self) -> None:
        self._observer.send_ended(reset=True)
        self.inner.write_reset()

    def resume(self) -> None:
        self.inner.resume()

    def delivered(self, size: int) -> None:
        self.inner.delivered(size)

    # Calls by the peer of the inner end, with bytes from the inner end's network

    def show_received(self, chunks: list[memoryview], size: int) -> None:
        """Count ``size`` bytes of ``chunks``, and show them to the observer before they are passed on."""
        self.read_bytes += size
        _show(self._observer.received, chunks, size)

    def show_receive_ended(self, *, reset: bool) -> None:
        """Report to the observer that no more bytes will be received."""
        self._observer.receive_ended(reset=reset)

    # The following methods are no-ops: the inner end has the states, and applies the events itself.

    def _drop_pending(self) -> int:
        return 0

    def _send_eof(self) -> None:
        """No-op, because the inner end sends its EOF itself."""

    def _send_reset(self) -> None:
        """No-op, because the inner end sends its reset itself."""


class _FarSide(End):
    """The peer that the observed end sees. It shows the end's bytes to the observer, and forwards them to the real
    peer.
    """

    __slots__ = ("_observed", "_rooms")

    def __init__(self, observed: ObservedEnd) -> None:
        self._observed = observed
        self._rooms: list[memoryview] = []
        self.poller = observed.poller
        self.peer = None
        self.relay = None
        self.source = SourceState.OPEN
        self.sink = SinkState.OPEN
        self.read_bytes = 0

    def start(self) -> None:
        """No-op, because the relay starts the real end."""

    def close(self, error: Exception | None = None) -> None:
        """No-op, because the owner of the real end closes it."""

    def reserve(self, limit: int) -> memoryview | None:
        there = self._observed.peer
        room = there.reserve(limit) if there is not None else None
        self._rooms = [room] if room is not None else []
        return room

    @property
    def scatters(self) -> bool:
        there = self._observed.peer
        return there is not None and there.scatters

    def reserve_many(self, limit: int) -> list[memoryview] | None:
        there = self._observed.peer
        rooms = there.reserve_many(limit) if there is not None else None
        self._rooms = rooms if rooms is not None else []
        return rooms

    def commit(self, size: int) -> None:
        """Show ``size`` received bytes to the observer while the reserved buffers still have them. Then
        commit them to the real peer.
        """
        rooms, self._rooms = self._rooms, []
        self._observed.show_received(rooms, size)
        there = self._observed.peer
        if there is not None:
            there.commit(size)

    def write(self, chunks: list[memoryview], size: int) -> None:
        self._observed.show_received(chunks, size)
        there = self._observed.peer
        if there is not None:
            there.write(chunks, size)

    def flush(self) -> None:
        there = self._observed.peer
        if there is not None:
            there.flush()

    def write_eof(self) -> None:
        self._observed.show_receive_ended(reset=False)
        there = self._observed.peer
        if there is not None:
            there.write_eof()

    def write_reset(self) -> None:
        self._observed.show_receive_ended(reset=True)
        there = self._observed.peer
        if there is not None:
            there.write_reset()

    def resume(self) -> None:
        there = self._observed.peer
        if there is not None:
            there.resume()

    def delivered(self, size: int) -> None:
        there = self._observed.peer
        if there is not None:
            there.delivered(size)

    def _drop_pending(self) -> int:
        return 0

    def _send_eof(self) -> None:
        """No-op, because the real end applies its own events."""

    def _send_reset(self) -> None:
        """No-op, because the real end applies its own events."""


class _Reports(RelayObserver):
    """Takes the place of the relay for the inner end. It forwards the inner end's reports to the real relay, as
    reports of the :class:`ObservedEnd`.
    """

    __slots__ = ("_observed",)

    def __init__(self, observed: ObservedEnd) -> None:
        self._observed = observed

    def read_ended(self, end: End, error: Exception | None, *, clean: bool) -> None:
        observed = self._observed
        observed.source = end.source
        if observed.relay is not None:
            observed.relay.read_ended(observed, error, clean=clean)

    def write_ended(self, end: End) -> None:
        observed = self._observed
        observed.sink = end.sink
        if observed.relay is not None:
            observed.relay.write_ended(observed)

    def reset_sent(self) -> None:
        if self._observed.relay is not None:
            self._observed.relay.reset_sent()

    def sink_broken(self, end: End, error: Exception) -> None:
        observed = self._observed
        observed.sink = end.sink
        if observed.relay is not None:
            observed.relay.sink_broken(observed, error)

    def fail(self, end: End, error: Exception) -> None:
        observed = self._observed
        if observed.relay is not None:
            observed.relay.fail(observed, error)


class _Show(Protocol):
    def __call__(self, chunk: memoryview) -> None:
        """Show the bytes to the observer."""


def _show(show: _Show, rooms: list[memoryview], size: int) -> None:
    """Pass the first ``size`` bytes of the buffers, which were filled in order, to the observer."""
    for room in rooms:
        if size <= 0:
            return
        show(room[:size] if len(room) > size else room)
        size -= len(room)
