"""Turns open relays and their connection into a serializable value and socket descriptors. Another process uses
both to continue these relays.

The smallest movable part is a *unit*: one HTTP/2 connection with the relays of all its tunnels, or a relay of two
plain sockets. :class:`Frozen` stops a unit and reads its :class:`UnitState`. Then either :meth:`Frozen.leave`
releases the unit, because another process continues it, or :meth:`Frozen.thaw` continues it in this process. While
the unit is frozen, its sockets are neither read nor written. This process can still end the unit, for example
because of a policy. Then :attr:`Frozen.unchanged` is false, and only :meth:`Frozen.thaw` is allowed.

:func:`resumed` recreates a unit from its state. The unit is idle until :meth:`Resumed.start`. Until then the
sockets belong to the old process.

The descriptors of a unit are in this order: the connection's descriptor, then for each relay its plain sockets.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec

from hbone.aio.connection import Connection, RequestSink
from hbone.aio.connection_settings import ConnectionSettings, MovedConnection, Progress
from hbone.aio.end import End
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, MovedRelay, Relay, continued
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.end_state import SinkState, SourceState
from hbone.engine_state import SCHEMA, EngineState, Unfrozen, engine_of, engine_state
from hbone.events import Header
from hbone.tls import Unmovable
from hbone.tls_records import RecordSession, record_state
from hbone.tls_state import RecordState

__all__ = [
    "SCHEMA",
    "Frozen",
    "RelayState",
    "Resumed",
    "UnitState",
    "Unmovable",
    "resumed",
]

log = logging.getLogger(__name__)

_ENDING = "about to end"


class PlainState(msgspec.Struct, frozen=True, kw_only=True, tag="plain"):
    """The state of a plain socket. ``pending`` are the bytes that its network has not accepted yet."""

    source: str
    sink: str
    pending: bytes


class TunnelState(msgspec.Struct, frozen=True, kw_only=True, tag="tunnel"):
    """The state of one stream on the unit's connection.

    Attributes:
        pending: bytes that wait for room in the flow-control window or output.
        owed: the number of bytes passed to the other end whose credit was not yet returned to the remote side.
    """

    stream_id: int
    source: str
    sink: str
    pending: bytes
    owed: int
    headers: tuple[Header, ...]


EndValue: TypeAlias = PlainState | TunnelState


class RelayState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a relay and of its two ends.

    Attributes:
        first: which end stopped first, 0 or 1. ``None``: neither end has stopped.
        open_sinks: for each end, whether we can still send to it.
        sent, received: bytes moved until now.
        quiet, seen: see :class:`hbone.aio.relay.MovedRelay`.
    """

    ends: tuple[EndValue, EndValue]
    first: int | None
    open_sinks: tuple[bool, bool]
    sent: int
    received: int
    quiet: int = 0
    seen: int = -1


class CarrierState(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP/2 connection with :class:`hbone.aio.connection_settings.Progress`; cleartext if ``tls`` is None."""

    engine: EngineState
    tls: RecordState | None
    waiting: tuple[int, ...]
    room: bool
    closing: bool
    grace: bool
    unsent: bytes


class UnitState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a unit, as defined in the module's docstring."""

    carrier: CarrierState | None
    relays: tuple[RelayState, ...]


class Frozen:
    """A stopped unit. It stays idle until :meth:`thaw` or :meth:`leave`.

    Args:
        relays: all relays of a connection's tunnels, or a single relay of two plain sockets.
        connection: the connection that carries the tunnels; ``None`` for a relay of two plain sockets.

    Attributes:
        state: the unit's state, for the other process.
        descriptors: the descriptors of the unit's sockets, which stay open in this process.

    Raises:
        Unmovable: the unit cannot move, or cannot move yet. It continues here.
    """

    def __init__(self, relays: Sequence[Relay], connection: Connection | None) -> None:
        self._connection = connection
        if connection is not None:
            _check_all_carried(connection.settle(), relays)
        self._relays = tuple(relays)
        self._plain: list[PlainSocket] = []
        for relay in self._relays:
            for end in _ends(relay):
                if type(end) is PlainSocket:
                    end.leave_splicing()
                    self._plain.append(end)
                elif type(end) is not Tunnel or end.connection is not connection:
                    raise Unmovable("of a kind that does not move")
        self._now_s = 0.0
        owner = connection if connection is not None else self._plain[0] if self._plain else None
        if owner is not None:
            self._now_s = owner.poller.loop.time()
        self.state = self._read()
        self._suspend()
        self.descriptors = [] if connection is None else [connection.link.sock.fileno()]
        self.descriptors += [end.sock.fileno() for end in self._plain]

    def _suspend(self) -> None:
        if self._connection is not None:
            self._connection.suspend()
        for end in self._plain:
            end.suspend()

    def _read(self) -> UnitState:
        connection = self._connection
        carrier = None if connection is None else _carrier_state(connection, self._now_s)
        return UnitState(carrier=carrier, relays=tuple(_relay_state(relay) for relay in self._relays))

    @property
    def unchanged(self) -> bool:
        """Whether the unit's state has not changed since it was frozen."""
        if any(end.closed for end in self._plain):
            return False
        try:
            return self._read() == self.state
        except Unmovable:
            return False

    def thaw(self) -> None:
        """Continue the unit in this process."""
        for end in self._plain:
            end.wake_up()
        if self._connection is not None:
            self._connection.wake_up()

    def leave(self) -> None:
        """Release the unit to the other process, without sending a byte. Its relays end here, and their callers
        close the unusable ends.
        """
        for relay in self._relays:
            relay.move_away()
        for end in self._plain:
            end.move_away()
        if self._connection is not None:
            self._connection.move_away()


def _check_all_carried(tunnels: dict[int, Tunnel], relays: Sequence[Relay]) -> None:
    known = {id(end) for relay in relays for end in relay.ends or ()}
    if any(id(tunnel) not in known for tunnel in tunnels.values()):
        raise Unmovable("a request is being opened")


def _ends(relay: Relay) -> tuple[End, End]:
    ends = relay.ends
    if ends is None:
        raise Unmovable(_ENDING)
    return ends


def _carrier_state(connection: Connection, now_s: float) -> CarrierState:
    if connection.error is not None:
        raise Unmovable(_ENDING)
    tls, progress = connection.link.tls, connection.progress
    try:
        engine = engine_state(connection.engine, now_s)
    except Unfrozen as error:
        raise Unmovable(str(error)) from None
    return CarrierState(
        engine=engine,
        tls=None if tls is None else record_state(tls),
        waiting=progress.waiting,
        room=progress.room,
        closing=progress.closing,
        grace=progress.grace,
        unsent=progress.unsent,
    )


def _relay_state(relay: Relay) -> RelayState:
    ends, progress = _ends(relay), relay.progress
    if progress is None:
        raise Unmovable(_ENDING)
    a, b = ends
    return RelayState(
        ends=(_end_value(a), _end_value(b)),
        first=None if progress.first is None else int(progress.first is b),
        open_sinks=(a in progress.open_sinks, b in progress.open_sinks),
        sent=relay.counts.sent,
        received=relay.counts.received,
        quiet=progress.quiet,
        seen=progress.seen,
    )


def _end_value(end: End) -> EndValue:
    if end.source is SourceState.CUT or end.sink in (
        SinkState.BROKEN,
        SinkState.RESET_PENDING,
        SinkState.RESET_SENT,
    ):
        raise Unmovable(_ENDING)
    if isinstance(end, Tunnel):
        if not end._started or end.error is not None:
            raise Unmovable(_ENDING)
        return TunnelState(
            stream_id=end.stream_id,
            source=end.source.value,
            sink=end.sink.value,
            pending=bytes(end._pending),
            owed=end._owed,
            headers=end.headers,
        )
    assert isinstance(end, PlainSocket)
    if end.closed or end.broken is not None or end._pipe is not None:
        raise Unmovable(_ENDING)
    gathered = b"".join(map(bytes, end._gather))
    return PlainState(source=end.source.value, sink=end.sink.value, pending=bytes(end._pending) + gathered)


class Resumed:
    """A unit taken over from another process, idle until :meth:`start`; made by :func:`resumed`.

    Attributes:
        connection: the unit's tunnel connection, if it has one.
        ends: the two ends of each relay.
        counts: the byte counts of each relay.
        idle_timeouts_s: the idle timeout of each relay. ``None``: no timeout.
        relays: the running relays, none before :meth:`start`. ``None``: the socket of an end cannot be watched
            (fs.epoll.max_user_watches), so the caller closes both ends.
    """

    def __init__(
        self,
        connection: Connection | None,
        ends: list[tuple[End, End]],
        counts: list[ByteCounts],
        state: UnitState,
    ) -> None:
        self.connection = connection
        self.ends = ends
        self.counts = counts
        self.idle_timeouts_s: list[float | None] = [None] * len(ends)
        self.relays: list[Relay | None] = []
        self._state = state

    def start(self) -> None:
        """Start the relays. The sockets belong to this process from now on.

        Raises:
            ConnectionBroken: the connection's socket cannot be watched.
        """
        if self.connection is not None:
            self.connection.restart()
        for (a, b), counts, state, idle_timeout_s in zip(
            self.ends, self.counts, self._state.relays, self.idle_timeouts_s, strict=True
        ):
            open_sinks = tuple(end for end, is_open in zip((a, b), state.open_sinks, strict=True) if is_open)
            first = None if state.first is None else (a, b)[state.first]
            moved = MovedRelay(first=first, open_sinks=open_sinks, quiet=state.quiet, seen=state.seen)
            try:
                self.relays.append(continued(a, b, counts, moved, idle_timeout_s))
            except OSError as error:
                log.error("a connection was lost while it was taken over error=%s", error.strerror)
                self.relays.append(None)

    def discard(self) -> None:
        """Close this process's descriptors without sending any bytes, because the other process keeps
        the sockets.
        """
        for pair in self.ends:
            for end in pair:
                if isinstance(end, PlainSocket):
                    end.move_away()
        if self.connection is not None:
            self.connection.move_away()


def resumed(
    state: UnitState,
    sockets: Sequence[socket.SocketType],
    settings: ConnectionSettings,
    poller: Poller,
    requests: RequestSink | None = None,
) -> Resumed:
    """Recreate a unit from its state. It is idle until :meth:`Resumed.start`.

    Args:
        state: the unit's state.
        sockets: non-blocking sockets, in the order that the module describes. The result owns them.
        settings: this process's connection settings. The settings that the old process has announced to the remote
            side stay in use.
        poller: this loop's poller.
        requests: handles further requests, if the unit's connection is a server's.

    Raises:
        ValueError: the state cannot be used here, or does not match ``sockets``. The caller still owns
            ``sockets``.
    """
    left = list(sockets)
    plain = sum(isinstance(end, PlainState) for relay in state.relays for end in relay.ends)
    if len(left) != plain + (state.carrier is not None):
        raise ValueError("another number of sockets than of ends")
    try:
        connection, tunnels = None, {}
        if state.carrier is not None:
            connection = _connection_of(state.carrier, left.pop(0), settings, poller, requests)
            tunnels = {
                end.stream_id: _tunnel_of(end, connection)
                for relay in state.relays
                for end in relay.ends
                if isinstance(end, TunnelState)
            }
            progress = Progress(
                waiting=state.carrier.waiting,
                room=state.carrier.room,
                closing=state.carrier.closing,
                grace=state.carrier.grace,
                unsent=state.carrier.unsent,
            )
            connection.continue_with(progress, tunnels.values())
        ends: list[tuple[End, End]] = []
        for relay in state.relays:
            a, b = (
                tunnels[end.stream_id] if isinstance(end, TunnelState) else _plain_of(end, left.pop(0), poller)
                for end in relay.ends
            )
            ends.append((a, b))
    except KeyError as error:
        raise ValueError(f"no stream {error}") from None
    counts = [ByteCounts(relay.sent, relay.received) for relay in state.relays]
    return Resumed(connection, ends, counts, state)


def _connection_of(
    state: CarrierState,
    sock: socket.SocketType,
    settings: ConnectionSettings,
    poller: Poller,
    requests: RequestSink | None,
) -> Connection:
    engine = engine_of(state.engine, poller, poller.loop.time())
    tls = None if state.tls is None else RecordSession(state.tls)
    moved = MovedConnection(engine=engine, tls=tls)
    settings = replace(settings, http2=engine.settings)
    return Connection(engine.role, sock, None, settings, poller, requests=requests, moved=moved)


def _tunnel_of(state: TunnelState, connection: Connection) -> Tunnel:
    tunnel = Tunnel(connection, state.stream_id)
    tunnel.source, tunnel.sink = SourceState(state.source), SinkState(state.sink)
    tunnel.headers = state.headers
    tunnel._pending += state.pending
    tunnel._owed = state.owed
    return tunnel


def _plain_of(state: PlainState, sock: socket.SocketType, poller: Poller) -> PlainSocket:
    end = PlainSocket(sock, poller)
    end.source, end.sink = SourceState(state.source), SinkState(state.sink)
    end._pending += state.pending
    return end
