"""Groups a process's open connections into units. Each unit moves to another process as a whole; see
:func:`movable_units`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hbone.aio.connection import Connection
from hbone.aio.handover import Frozen, UnitState
from hbone.aio.relay import Relay
from hbone.aio.tunnel import Tunnel
from xds.model.address import SocketAddress
from ztunnel.proxy.istio.accounting.access_record import Direction
from ztunnel.proxy.istio.handover.entries import entry_value
from ztunnel.proxy.istio.handover.messages import CarrierValue, Offer, PodKey
from ztunnel.proxy.istio.path.node import pod_key
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.istio.path.pod_connection import Carrier, PodConnection

Half = tuple[PodProxy, PodConnection]


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """Connections that move together: a tunnel connection with the relays of its tunnels, or a relay of two plain
    sockets.

    Attributes:
        pod: the connection's pod. For a node-local tunnel, the client's pod.
        carrier: the connection-table entry of the tunnel connection, if there is one.
        relays: each relay with its connection-table entries.
    """

    pod: PodProxy
    carrier: Carrier | None = None
    relays: list[tuple[Relay, list[Half]]] = field(default_factory=list)
    _carrier_value: CarrierValue | None = None

    @property
    def key(self) -> int:
        """An identifier of this unit, equal in every list returned by :func:`movable_units`."""
        return id(self.carrier or self.relays[0][0])

    @property
    def connection(self) -> Connection | None:
        """The tunnel connection."""
        return self.carrier.connection if self.carrier is not None else None

    @property
    def entries(self) -> int:
        """The number of pod connections."""
        return sum(len(halves) for _, halves in self.relays)

    def freeze(self) -> Frozen:
        """Stop the unit's connections and read their state; see
        :class:`ztunnel.proxy.dataplane.handover.giver.Unit`.
        """
        self._carrier_value = self.carrier_value()
        return Frozen([relay for relay, _ in self.relays], self.connection)

    def carrier_value(self) -> CarrierValue | None:
        """The state of the tunnel connection that is not part of its HTTP/2 engine, TLS session or socket."""
        carrier = self.carrier
        if carrier is None or carrier.connection is None:
            return None
        key: PodKey = pod_key(self.pod.name)
        if carrier.dialled is not None:
            idle_s = self.pod.tunnels.pool.idle_s(carrier.connection)
            return CarrierValue(pod=key, dialled=carrier.dialled, idle_s=idle_s)
        sock = carrier.connection.link.sock
        source, local = SocketAddress.of(sock.getpeername()[:2]), SocketAddress.of(sock.getsockname()[:2])
        return CarrierValue(pod=key, source=source, local=local)

    def offer(self, number: int, state: UnitState, now_s: float) -> Offer:
        """Return the message that offers this unit, which must be frozen."""
        entries = tuple(
            tuple(entry_value(pod_key(pod.name), entry, now_s) for pod, entry in halves)
            for _, halves in self.relays
        )
        return Offer(number=number, unit=state, carrier=self._carrier_value, entries=entries)

    def went(self) -> None:
        """Count the unit's traffic in this process. The other process continues, and writes the
        access log lines.
        """
        for _, halves in self.relays:
            for _, entry in halves:
                entry.record.went()


def movable_units(pods: Iterable[PodProxy]) -> tuple[list[Unit], Counter[str]]:
    """Return the units of all pods, and the number of connections that cannot move, by reason."""
    pods, stays = list(pods), Counter[str]()
    carriers: dict[int, Unit] = {}
    for pod in pods:
        for carrier in (*pod.connections.carriers, *pod.connections.dialled):
            if carrier.connection is None:
                stays["in its handshake"] += 1
            elif not carrier.reason:
                carriers[id(carrier.connection)] = Unit(pod=pod, carrier=carrier)
        stays["no destination yet"] += len(pod.connections.arriving)
    found = list(carriers.values())
    for relay, halves in _relays(pods, stays):
        tunnels = [end for end in relay.ends or () if isinstance(end, Tunnel)]
        if any(entry.inner is not None for _, entry in halves):
            stays["double tunnel"] += len(halves)
        elif any(entry.record.asked is not None for _, entry in halves):
            stays["watched by an addon"] += len(halves)
        elif not tunnels:
            found.append(Unit(pod=halves[0][0], relays=[(relay, halves)]))
        elif len(tunnels) == 1 and (unit := carriers.get(id(tunnels[0].connection))) is not None:
            unit.relays.append((relay, halves))
        else:
            stays["of a kind that does not move"] += 1
    return found, +stays


def _relays(pods: list[PodProxy], stays: Counter[str]) -> Iterator[tuple[Relay, list[Half]]]:
    """Yield the running relays, each with its connection-table entries, the outbound entry first."""
    relays: dict[int, tuple[Relay, list[Half]]] = {}
    groups = [(pod, pod.connections.outbound) for pod in pods] + [(pod, pod.connections.inbound) for pod in pods]
    for pod, group in groups:
        for entry in group:
            relay = entry.relay
            if relay is None or relay.ends is None:
                stays["being opened" if relay is None else "about to end"] += 1
            elif entry.reason:
                stays["about to end"] += 1
            else:
                relays.setdefault(id(relay), (relay, []))[1].append((pod, entry))
    for relay, halves in relays.values():
        # The other half of this node-local tunnel belongs to a pod that is not in ``pods``, so the tunnel stays.
        if len(halves) == 1 and halves[0][1].peer is not None:
            stays["half of a node-local tunnel"] += 1
        else:
            assert len(halves) < 2 or halves[0][1].record.direction is Direction.OUTBOUND
            yield relay, halves
