"""The live connections of one pod by direction, and the tunnel connections that carry them.

Each is a life of the process's table (:mod:`ztunnel.proxy.dataplane.lives`), registered before policy judges it.
Drain and stop wait for these groups, and the dump prints them.
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
from ztunnel.proxy.dataplane.life import ALLOWED, Event, State, Verdict
from ztunnel.proxy.dataplane.lives import Abort, Life, Lives, LiveTable, all_emptied
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.outcome import REVOKED
from ztunnel.proxy.istio.accounting.record import Record
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate

if TYPE_CHECKING:
    from xds.model import calico as c  # only where Calico's policies are obeyed

#: How long idle tunnel connections are kept after GOAWAY: some round trips, and the second during which a server
#: still accepts requests in flight (``ConnectionSettings.drain_grace_s``). A guess.
_GOODBYE_S = 2.0


class PodConnection(Life):
    """One connection of a pod: captured, or a request of a tunnel connection.

    Args:
        judged_by: gives the verdict once :attr:`state` has passed *identified*.

    Attributes:
        record: its record for logs and metrics.
        original: the dialled address (outbound), or the service requested by the client (inbound), for the dump.
        actual: the application's address (inbound).
        protocol: ``TCP``, ``HBONE`` or ``DOUBLEHBONE``.
        facts: the input of the mesh's policies (inbound).
        flow: the input of Calico's policies (outbound).
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
        """Enter ``state``: a relay carries its bytes, and ends it."""
        self.relay = relay
        self.opened(relay.abort, state=state, finish=relay.finish)
        if self.record.addons is not None:
            self.tell_addons()

    def tell_addons(self) -> None:
        """Inform addons that bytes flow."""
        asked = self.record.asked or self.record.taken_over()
        if asked is not None:
            asked.opened(self, self.record.counts)

    def judge(self) -> Verdict:
        return self._judged_by(self)

    def peer_is_revoked(self, lists: RevocationLists | None) -> bool:
        """Return whether a peer without a life of its own is on a revocation list.

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
        rejected: counts a peer that is found revoked.

    Attributes:
        connection: ``None`` before the end of its handshake.
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
    """How far a pod's proxy is from its end.

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
        carriers: tunnel connections that were accepted here, their handshakes included.
        dialled: tunnel connections that the pool has opened or is opening.
        phase: the pod's phase. It only advances.
    """

    def __init__(self, table: LiveTable) -> None:
        # A review visits groups in this order: connections before their carriers, whose end also ends their
        # tunnels.
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
        """All groups except the connections that the pool closes."""
        return self.arriving, self.inbound, self.outbound, self.carriers

    def descriptors(self) -> int:
        """Return the pod's approximate number of descriptors. A relayed connection has two."""
        return len(self.arriving) + len(self.carriers) + 2 * len(self)

    def __len__(self) -> int:
        """How many connections are carried now."""
        return len(self.inbound) + len(self.outbound)

    # The order of a drain (see PodProxy.drain): begin_drain, listeners handed over, send_goaway, left, finish_all.

    def begin_drain(self) -> None:
        """Make new tunnel connections send GOAWAY right after their handshake."""
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING

    def send_goaway(self) -> None:
        """Send GOAWAY on every tunnel connection that is established, and on others when they are."""
        self.carriers.review(Event.DRAIN)

    async def left(self, until_s: float) -> int:
        """Wait until every connection has ended, at most until ``until_s`` of the loop's time.

        Returns:
            The number of remaining connections.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                # A peer can have requested a tunnel before our GOAWAY arrived, or can still be in its handshake:
                # idle tunnel connections and handshakes get some round trips.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await all_emptied(self.arriving, self.inbound, self.outbound, self.carriers)
                await all_emptied(self.inbound, self.outbound)
        return len(self)

    def finish_all(self, reason: str) -> None:
        """Close all lives in order, because the grace period is over."""
        self.phase = Phase.ENDED
        for group in self.ended_here:
            group.review(Event.DEADLINE, reason)

    def end_all(self, reason: str) -> None:
        """End all lives now. Later ones are refused by the pod's phase."""
        self.phase = Phase.ENDED
        for group in self.ended_here:
            group.review(Event.STOP, reason)

    async def closed(self) -> None:
        """Wait until ended lives are closed. Lives without a fiber close in the next loop iteration."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await all_emptied(*self.ended_here)

    def dissolve(self) -> None:
        """Take the groups out of the process's table; idempotent."""
        for group in self.groups:
            group.dissolve()

    def end_carried(self, connection: Connection, reason: str) -> int:
        """End the tunnels of a tunnel connection with the connection's reason.

        Returns:
            How many connections those were.
        """
        carried = [e for group in (self.inbound, self.outbound) for e in group if e.connection is connection]
        for entry in carried:
            entry.end(reason)
        return len(carried)

    def dump(self, now_s: float) -> dict[str, list[Shown]]:
        """Return ``connections`` of the dump. Equal inbound ones are merged, like in upstream's table.

        The Rust ztunnel has neither identities, ages, bytes nor services. Merged connections have the highest age
        and the sum of the bytes; sent is from the client to the application.

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
    """Add the age and the bytes of an equal connection to an entry."""
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
    """Return whether a connection's peer is revoked, by the chain from its handshake."""
    return (
        connection.facts is not None and bool(connection.facts.chain) and lists.is_revoked(connection.facts.chain)
    )
