"""The open connections of one pod by direction, and the tunnel connections that carry them.

Each is an entry (:class:`~ztunnel.proxy.dataplane.live_table.Life`) of the process's connection table
(:mod:`ztunnel.proxy.dataplane.live_table`), added before policies judge the connection. Drain and stop wait for
these groups, and the config dump lists them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from hbone.aio.connection import Connection
from hbone.aio.relay import Relay
from hbone.aio.tunnel import TunnelCarrier
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from ztunnel.proxy.dataplane.life_table import ALLOWED, Event, State, Verdict
from ztunnel.proxy.dataplane.live_table import Abort, Life, Lives, LiveTable, all_emptied
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.access_record import Record
from ztunnel.proxy.istio.accounting.outcome import REVOKED
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate

if TYPE_CHECKING:
    from xds.model import calico as c  # only in proxies that enforce Calico's policies

#: How long idle tunnel connections are kept after GOAWAY: some round trips, and the second during which a server
#: still accepts requests in flight (``ConnectionSettings.drain_grace_s``). A guess.
_GOODBYE_S = 2.0


class PodConnection(Life):
    """One connection of a pod: a captured connection, or a request inside a tunnel connection.

    Args:
        judged_by: returns the policies' verdict, called once :attr:`state` is past *identified*.

    Attributes:
        record: its record for logs and metrics.
        original: the dialled address (outbound), or the service requested by the client (inbound), for the dump.
        actual: the application's address (inbound).
        protocol: ``TCP``, ``HBONE`` or ``DOUBLEHBONE``.
        facts: the input of the mesh's policies (inbound).
        flow: what Calico's policies evaluate (outbound).
        connection: the tunnel connection that carries it.
        inner: a double tunnel's inner connection.
        peer: the other end's certificate in a node-local tunnel, which has no TLS to verify it.
        relay: the relay that carries its bytes, once it is open.
    """

    __slots__ = (
        "_judged_by",
        "actual",
        "connection",
        "facts",
        "flow",
        "inner",
        "original",
        "peer",
        "protocol",
        "record",
        "relay",
    )

    def __init__(
        self,
        group: Lives[PodConnection],
        record: Record,
        abort: Abort,
        judged_by: Callable[[PodConnection], Verdict],
    ) -> None:
        super().__init__(group, abort)
        self._judged_by = judged_by
        self.record = record
        self.original: str | None = None
        self.actual: SocketAddress | None = None
        self.protocol = "TCP"
        self.facts: ConnectionFacts | None = None
        self.flow: c.Flow | None = None
        self.connection: TunnelCarrier | None = None
        self.inner: Connection | None = None
        self.peer: WorkloadCertificate | None = None
        self.relay: Relay | None = None

    def carried_by(self, relay: Relay, *, state: State = State.OPEN) -> None:
        """Set the state to ``state``: from now on a relay carries the bytes, and ends the connection."""
        self.relay = relay
        self.opened(relay.abort, state=state, finish=relay.finish)
        if self.record.addons is not None:
            self.tell_addons()

    def tell_addons(self) -> None:
        """Inform addons that the connection is open and relays bytes."""
        asked = self.record.asked or self.record.taken_over()
        if asked is not None:
            asked.opened(self, self.record.counts)

    def judge(self) -> Verdict:
        return self._judged_by(self)

    def peer_is_revoked(self, lists: RevocationLists | None) -> bool:
        """Return whether the certificate of a peer that has no table entry of its own is revoked.

        Such peers are the far ends of a double tunnel's inner connection, and of a node-local tunnel.
        """
        if lists is None:
            return False
        if self.inner is not None and is_listed(lists, self.inner):
            return True
        return self.peer is not None and self.peer.is_revoked_by(lists)


class Carrier(Life):
    """One tunnel connection of a pod, accepted or dialled.

    Args:
        lists: returns the revocation lists.
        rejected: called to count a peer whose certificate is found revoked.

    Attributes:
        connection: the HTTP/2 connection, or ``None`` before its handshake is complete.
        dialled: for a dialled connection, its address and the accepted identities.
    """

    __slots__ = ("_lists", "_rejected", "connection", "dialled")

    def __init__(
        self,
        group: Lives[Carrier],
        lists: Callable[[], RevocationLists | None],
        rejected: Callable[[], None],
    ) -> None:
        super().__init__(group)
        self._lists = lists
        self._rejected = rejected
        self.connection: Connection | None = None
        self.dialled: tuple[SocketAddress, tuple[str, ...]] | None = None

    def judge(self) -> Verdict:
        lists = self._lists()
        if lists is None or self.connection is None or not is_listed(lists, self.connection):
            return ALLOWED
        self._rejected()
        return Verdict(REVOKED)


class Phase(Enum):
    """The stages of ending a pod's proxy.

    ========  ==============================  ==========================================
    phase     new connections                 tunnel connections
    ========  ==============================  ==========================================
    SERVING   accepted                        take tunnels
    DRAINING  left to a successor             get GOAWAY as soon as they are established
    ENDED     none, not even node-local       closed
    ========  ==============================  ==========================================
    """

    SERVING = "serving"
    DRAINING = "draining"
    ENDED = "ended"


class PodConnections:
    """The groups of one pod.

    Attributes:
        arriving: accepted connections without a known destination: SOCKS clients, and captured connections for a
            short time.
        inbound, outbound: connections by direction.
        carriers: accepted tunnel connections, including those still in their handshake.
        dialled: tunnel connections that the pool has opened or is opening.
        phase: the pod's phase. It only advances.
    """

    def __init__(self, table: LiveTable) -> None:
        # A review visits the groups in this order: connections before the tunnel connections that carry them,
        # because ending a tunnel connection ends its tunnels too.
        self.arriving: Lives[Life] = Lives(table)
        self.inbound: Lives[PodConnection] = Lives(table)
        self.outbound: Lives[PodConnection] = Lives(table)
        self.carriers: Lives[Carrier] = Lives(table)
        self.dialled: Lives[Carrier] = Lives(table)
        self.phase = Phase.SERVING

    @property
    def groups(self) -> tuple[Lives[Any], ...]:
        """All groups."""
        return *self.ended_here, self.dialled

    @property
    def ended_here(self) -> tuple[Lives[Any], ...]:
        """All groups except the dialled tunnel connections, which the pool closes."""
        return self.arriving, self.inbound, self.outbound, self.carriers

    def descriptors(self) -> int:
        """Return the approximate number of file descriptors that the pod uses. A relayed connection has two."""
        return len(self.arriving) + len(self.carriers) + 2 * len(self)

    def __len__(self) -> int:
        """The number of connections that are open now."""
        return len(self.inbound) + len(self.outbound)

    # The order of a drain (see PodProxy.drain): begin_drain, listeners handed over, send_goaway, left, finish_all.

    def begin_drain(self) -> None:
        """Begin a drain: from now on, new tunnel connections send GOAWAY right after their handshake."""
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING

    def send_goaway(self) -> None:
        """Send GOAWAY on every tunnel connection, as soon as it is established."""
        self.carriers.review(Event.DRAIN)

    async def left(self, until_s: float) -> int:
        """Wait until every connection has ended, but no longer than until ``until_s`` on the event loop's clock.

        Returns:
            The number of remaining connections.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                # A peer can have requested a tunnel before our GOAWAY arrived, or can still be in its handshake:
                # leave idle tunnel connections and handshakes open for some round trips.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await all_emptied(self.arriving, self.inbound, self.outbound, self.carriers)
                await all_emptied(self.inbound, self.outbound)
        return len(self)

    def finish_all(self, reason: str) -> None:
        """Close all connections in order, because the grace period is over."""
        self.phase = Phase.ENDED
        for group in self.ended_here:
            group.review(Event.DEADLINE, reason)

    def end_all(self, reason: str) -> None:
        """End all connections now. The pod's phase makes it refuse new ones."""
        self.phase = Phase.ENDED
        for group in self.ended_here:
            group.review(Event.STOP, reason)

    async def closed(self) -> None:
        """Wait until all ended connections are closed. Those without a fiber close in the next iteration of the
        event loop.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await all_emptied(*self.ended_here)

    def dissolve(self) -> None:
        """Remove the pod's groups from the process's connection table; idempotent."""
        for group in self.groups:
            group.dissolve()

    def end_carried(self, connection: Connection, reason: str) -> int:
        """End all tunnels that a tunnel connection carries, giving each the reason why the connection ended.

        Returns:
            The number of ended tunnels.
        """
        carried = [e for group in (self.inbound, self.outbound) for e in group if e.connection is connection]
        for entry in carried:
            entry.end(reason)
        return len(carried)

    def dump(self, now_s: float) -> dict[str, list[Shown]]:
        """Return the pod's ``connections`` for the config dump. Equal inbound ones are merged, as in the Rust
        ztunnel.

        Identities, ages, byte counts and services are additions to the Rust ztunnel's format. Merged connections
        show the highest age and the sum of their bytes; ``sent`` counts bytes from the client to the application.

        Args:
            now_s: monotonic seconds.
        """
        inbound: dict[tuple[str, ...], Shown] = {}
        for entry in self.inbound:
            shown: Shown = {
                "actualDst": str(entry.actual),
                "originalDst": entry.original,
                "protocol": entry.protocol,
                "src": str(entry.record.source),
                "srcIdentity": _proven(entry.record),
            }
            key = tuple(map(str, shown.values()))
            if key in inbound:
                _merge(inbound[key], entry.record, now_s)
            else:
                inbound[key] = shown | _amounts(entry.record, now_s)
        return {
            "inbound": list(inbound.values()),
            "outbound": [
                {
                    "actualDst": str(entry.record.destination),
                    "originalDst": entry.original,
                    "protocol": entry.protocol,
                    "src": str(entry.record.source),
                    "dstIdentity": _reached(entry.record),
                    **_amounts(entry.record, now_s),
                }
                for entry in self.outbound
            ],
        }


#: An entry of the dump.
Shown = dict[str, str | int | float | None]


def _amounts(record: Record, now_s: float) -> Shown:
    return {
        "service": record.service.hostname if record.service is not None else None,
        "ageSeconds": round(now_s - record.started_s, 3),
        "bytesSent": record.counts.sent,
        "bytesReceived": record.counts.received,
    }


def _merge(shown: Shown, record: Record, now_s: float) -> None:
    """Merge a connection's age and byte counts into the dump entry of an equal connection."""
    age, sent, received = shown["ageSeconds"], shown["bytesSent"], shown["bytesReceived"]
    assert isinstance(age, float) and isinstance(sent, int) and isinstance(received, int)  # noqa: PT018
    shown["ageSeconds"] = max(age, round(now_s - record.started_s, 3))
    shown["bytesSent"] = sent + record.counts.sent
    shown["bytesReceived"] = received + record.counts.received


def _reached(record: Record) -> str | None:
    secured = record.secured and record.destination_identity is not None
    return str(record.destination_identity) if secured else None


def _proven(record: Record) -> str | None:
    return str(record.source_identity) if record.secured and record.source_identity is not None else None


def is_listed(lists: RevocationLists, connection: Connection) -> bool:
    """Return whether a revocation list contains a certificate of the chain that the peer sent in its handshake."""
    return (
        connection.facts is not None and bool(connection.facts.chain) and lists.is_revoked(connection.facts.chain)
    )
