"""Groups one pod's open connections by direction, together with the tunnel connections that carry them.

Each connection has an entry (:mod:`ztunnel.proxy.istio.path.pod_connection`) in the process's connection table
(:mod:`ztunnel.proxy.dataplane.live_table`), added before policies are checked. Drain and stop wait until the
pod's groups of entries are empty, and the config dump lists them.
"""

from __future__ import annotations

import asyncio
import contextlib
from enum import Enum
from typing import Any

from hbone.aio.connection import Connection
from ztunnel.proxy.dataplane.life_table import Event
from ztunnel.proxy.dataplane.live_table import Life, Lives, LiveTable, all_emptied
from ztunnel.proxy.istio.accounting.access_record import Record
from ztunnel.proxy.istio.path.pod_connection import Carrier, PodConnection

#: How long idle tunnel connections are kept open after GOAWAY: some round trips, and the second during which a
#: server still accepts requests in flight (``ConnectionSettings.drain_grace_s``). A guess.
_GOODBYE_S = 2.0
#: How long a drain waits for a peer that has stopped reading the last bytes of ended streams, and how often it
#: checks.
_STALLED_S = 2.0  # a guess
_CHECK_S = 0.02


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
    """The groups of one pod's connection-table entries.

    Attributes:
        arriving: accepted connections without a known destination: SOCKS clients, and captured connections for a
            short time.
        inbound, outbound: connections by direction.
        carriers: accepted tunnel connections, including those still in their handshake.
        dialled: tunnel connections that the pool has opened or is opening.
        phase: the pod's phase. It only advances.
    """

    def __init__(self, table: LiveTable) -> None:
        # A review of the connection table visits the groups in this order. Connections come before the tunnel
        # connections that carry them, because ending a tunnel connection ends its tunnels, too.
        self.arriving: Lives[Life] = Lives(table)
        self.inbound: Lives[PodConnection] = Lives(table)
        self.outbound: Lives[PodConnection] = Lives(table)
        self.carriers: Lives[Carrier] = Lives(table)
        self.dialled: Lives[Carrier] = Lives(table)
        self.phase = Phase.SERVING

    @property
    def groups(self) -> tuple[Lives[Any], ...]:
        """All groups of the pod's table entries."""
        return *self.ended_here, self.dialled

    @property
    def ended_here(self) -> tuple[Lives[Any], ...]:
        """The groups whose connections this object ends: all except the dialled tunnel connections, which the pool
        closes.
        """
        return self.arriving, self.inbound, self.outbound, self.carriers

    def descriptors(self) -> int:
        """Return the approximate number of file descriptors that the pod uses. A relayed connection has two."""
        return len(self.arriving) + len(self.carriers) + 2 * len(self)

    def __len__(self) -> int:
        """The number of connections that are open now."""
        return len(self.inbound) + len(self.outbound)

    # PodProxy.drain calls begin_drain, leaves the ports to a successor, and then calls send_goaway, left and
    # finish_all.

    def begin_drain(self) -> None:
        """Begin a drain: from now on, new tunnel connections send GOAWAY right after their handshake."""
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING

    def send_goaway(self) -> None:
        """Send GOAWAY on every tunnel connection, as soon as it is established."""
        self.carriers.review(Event.DRAIN)

    async def left(self, until_s: float) -> int:
        """Wait until every connection has ended, at most until ``until_s`` on the event loop's clock.

        Returns:
            The number of remaining connections.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                # Leave idle tunnel connections and handshakes open for some round trips: a peer can have requested
                # a tunnel before our GOAWAY reached it, or can still be in its handshake.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await all_emptied(self.arriving, self.inbound, self.outbound, self.carriers)
                await all_emptied(self.inbound, self.outbound)
                await self._delivered()
        return len(self)

    async def _delivered(self) -> None:
        """Wait until peers have acknowledged the last bytes of ended streams, except peers that have read no bytes
        for :data:`_STALLED_S`.

        A stream already counts as ended when its last bytes are queued, so closing its connection then could
        discard them.
        """
        loop = asyncio.get_running_loop()
        open_connections = [each.connection for each in (*self.carriers, *self.dialled) if each.connection]
        waiting = {
            connection: (size, loop.time())
            for connection in open_connections
            if (size := connection.link.in_flight)
        }
        while waiting:
            await asyncio.sleep(_CHECK_S)
            for connection, (before, since_s) in list(waiting.items()):
                size, now_s = connection.link.in_flight, loop.time()
                if 0 < size < before:
                    waiting[connection] = size, now_s
                elif not size or now_s - since_s >= _STALLED_S:
                    del waiting[connection]

    def finish_all(self, reason: str) -> None:
        """Close all connections gracefully, because the grace period is over."""
        self.phase = Phase.ENDED
        for group in self.ended_here:
            group.review(Event.DEADLINE, reason)

    def end_all(self, reason: str) -> None:
        """End all connections now, and refuse new ones."""
        self.phase = Phase.ENDED
        for group in self.ended_here:
            group.review(Event.STOP, reason)

    async def closed(self) -> None:
        """Wait until all ended connections are closed. Some connections close only in the next iteration of the
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
        """End all tunnels that a tunnel connection carries.

        Args:
            connection: the tunnel connection.
            reason: why this connection has ended, also recorded for each tunnel.

        Returns:
            The number of ended tunnels.
        """
        carried = [e for group in (self.inbound, self.outbound) for e in group if e.connection is connection]
        for entry in carried:
            entry.end(reason)
        return len(carried)

    def dump(self, now_s: float) -> dict[str, list[Shown]]:
        """Return the pod's ``connections`` for the config dump. Equal inbound connections are merged, as in the
        Rust ztunnel.

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
