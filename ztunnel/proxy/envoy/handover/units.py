"""Groups Envoy's live connections into units that move together; see :func:`movable_units`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hbone.aio.connection import Connection
from hbone.aio.handover import Frozen, UnitState, Unmovable
from hbone.aio.relay import Relay
from hbone.aio.tunnel import Tunnel
from ztunnel.proxy.envoy.handover.messages import AcceptedValue, DialledValue, Offer
from ztunnel.proxy.envoy.handover.values import hop_value
from ztunnel.proxy.envoy.listeners.connections import Connections, LiveConnection, LiveHop, LiveRequest
from ztunnel.proxy.envoy.path.connect import Connector

Hops = tuple[LiveHop, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """A unit of Envoy's dialect for :class:`ztunnel.proxy.dataplane.handover.giver.Giver`.

    Attributes:
        connector: owns the tunnel connections dialled by this process.
        connection: the tunnel connection, if there is one.
        accepted: the connection's table entry, if the connection was accepted.
        relays: each relay with its hops, outermost first.
    """

    connector: Connector
    connection: Connection | None = None
    accepted: LiveConnection | None = None
    relays: list[tuple[Relay, Hops]] = field(default_factory=list)

    @property
    def key(self) -> int:
        """Identifies this unit. The key stays the same in every list that :func:`movable_units` returns."""
        return id(self.connection or self.relays[0][0])

    @property
    def entries(self) -> int:
        """The number of pod connections in this unit."""
        return len(self.relays)

    def freeze(self) -> Frozen:
        """Stop the relays of the unit, and return their state.

        Raises:
            Unmovable: the unit cannot move, or cannot move yet.
        """
        for relay, _ in self.relays:
            progress = relay.progress
            if relay.on_half_close is not None and progress is not None and progress.first is not None:
                raise Unmovable("its route timeout is running")
        return Frozen([relay for relay, _ in self.relays], self.connection)

    def offer(self, number: int, state: UnitState, now_s: float) -> Offer:
        """Return the message that offers the unit, after its relays were stopped."""
        relays = tuple(tuple(hop_value(hop, now_s) for hop in hops) for _, hops in self.relays)
        return Offer(number=number, unit=state, carrier=self._carrier_value(now_s), relays=relays)

    def _carrier_value(self, now_s: float) -> AcceptedValue | DialledValue | None:
        if self.connection is None:
            return None
        if self.accepted is not None:
            return AcceptedValue(hop=hop_value(self.accepted, now_s))
        dialled = self.connector.tunnels.dialled[self.connection]
        return DialledValue(
            cluster=dialled.cluster.model.name,
            address=dialled.key.address,
            options=dialled.key.options,
            idle_s=self.connector.tunnels.idle_s(self.connection) or 0.0,
            age_s=dialled.counted.age_s,
        )

    def went(self) -> None:
        """Mark the hops as moved, so that the other process writes their access lines and counts their ends."""
        for _, hops in self.relays:
            for hop in hops:
                hop.moved = True
            upstream = hops[0].upstream
            assert upstream is not None
            upstream.moved = True
        if self.accepted is not None:
            self.accepted.moved = True
        elif self.connection is not None:
            self.connector.tunnels.went(self.connection)


def movable_units(connections: Connections, connector: Connector) -> tuple[list[Unit], Counter[str]]:
    """Return all movable units of this process, and the number of connections that cannot move, by reason."""
    stays = Counter[str]()
    carriers: dict[int, Unit] = {}
    for life in connections:
        if life.tunnels is not None and not life.reason:
            carriers[id(life.tunnels)] = Unit(connector=connector, connection=life.tunnels, accepted=life)
    for connection in connector.tunnels.dialled:
        if connector.tunnels.idle_s(connection) is not None:
            carriers[id(connection)] = Unit(connector=connector, connection=connection)
    found = list(carriers.values())
    for relay, hops in _relays(connections, stays):
        tunnels = [end for end in relay.ends or () if isinstance(end, Tunnel)]
        if any(hop.asked is not None for hop in hops):
            stays["watched by an addon"] += 1
        elif not tunnels:
            found.append(Unit(connector=connector, relays=[(relay, hops)]))
        elif len(tunnels) == 1 and (unit := carriers.get(id(tunnels[0].connection))) is not None:
            unit.relays.append((relay, hops))
        else:
            stays["of a kind that does not move"] += 1
    return found, +stays


def _relays(connections: Connections, stays: Counter[str]) -> Iterator[tuple[Relay, Hops]]:
    """Yield the running relays, each with its hops."""
    for first in (*connections, *connections.hops):
        relay, upstream = first.relay, first.upstream
        if relay is not None and upstream is not None:
            hops = (first, *upstream.hops)
            if relay.ends is None or any(hop.reason for hop in hops):
                stays["about to end"] += 1
            else:
                yield relay, hops
        elif isinstance(first, LiveConnection):
            stays["being opened"] += first.tunnels is None
        elif isinstance(first, LiveRequest):
            stays["being opened"] += 1
