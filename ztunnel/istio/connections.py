"""What is open in one pod: connections by direction, tunnel connections, sockets that are neither yet.

A connection is registered before its policy is checked, so that a policy that changes in between finds it. Drain
and stop wait for these tables; the dump prints them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from enum import Enum

from hbone.aio.connection import Connection
from hbone.aio.tunnel import TunnelCarrier
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from ztunnel.dataplane.connection_entry import Abort, ConnectionEntry, ConnectionTable, all_emptied
from ztunnel.identity.crl import RevocationLists
from ztunnel.istio.certificates.manager import WorkloadCertificate
from ztunnel.istio.outcome import REVOKED
from ztunnel.istio.record import Record

#: How long idle tunnels may take to hear that there will be no more: some round trips, and the second for which a
#: server still takes what its peer had under way (``ConnectionSettings.drain_grace_s``); a guess.
_GOODBYE_S = 2.0


class PodConnection(ConnectionEntry):
    """One connection of a pod.

    Attributes:
        record: its account.
        original: what was dialled (outbound), or the service the client meant (inbound), for the dump.
        actual: the application's address (inbound).
        protocol: ``TCP``, ``HBONE`` or ``DOUBLEHBONE``.
        facts: what policies judge (inbound).
        admitted: it has been let in, so that a change of policies concerns it (inbound).
        connection: the tunnel connection that carries it.
        inner: of a double tunnel, the connection within.
        peer: the certificate of the other end, where no TLS is in between to prove it.
    """

    __slots__ = ("actual", "admitted", "connection", "facts", "inner", "original", "peer", "protocol", "record")

    def __init__(self, record: Record, abort: Abort) -> None:
        super().__init__(abort)
        self.record = record
        self.original: str | None = None
        self.actual: SocketAddress | None = None
        self.protocol = "TCP"
        self.facts: ConnectionFacts | None = None
        self.admitted = False
        self.connection: TunnelCarrier | None = None
        self.inner: Connection | None = None
        self.peer: WorkloadCertificate | None = None


class Phase(Enum):
    """How far a pod's proxy is from its end.

    ========  ==============================  ==========================================
    phase     new connections                 tunnel connections
    ========  ==============================  ==========================================
    SERVING   accepted                        take tunnels
    DRAINING  left to a successor             hear GOAWAY as soon as they are established
    ENDED     none, joined ones included      aborted
    ========  ==============================  ==========================================
    """

    SERVING = "serving"
    DRAINING = "draining"
    ENDED = "ended"


class PodConnections:
    """The tables of one pod.

    Attributes:
        arriving: accepted and in no other table yet: TLS or SOCKS is being negotiated, or a certificate awaited.
        inbound, outbound: connections by direction.
        tunnels: tunnel connections that end here: drained, and re-checked for revocation.
        phase: see there; moves forward only.
    """

    def __init__(self) -> None:
        self.arriving = ConnectionTable[socket.socket]()
        self.inbound = ConnectionTable[PodConnection]()
        self.outbound = ConnectionTable[PodConnection]()
        self.tunnels = ConnectionTable[Connection]()
        self.phase = Phase.SERVING

    def descriptors(self) -> int:
        """Return about how many descriptors the pod uses; a connection that is relayed has two."""
        return len(self.arriving) + len(self.tunnels) + 2 * (len(self.inbound) + len(self.outbound))

    def established(self, sock: socket.socket, connection: Connection) -> None:
        """Move an accepted socket to the tunnel connections; called once its handshake is over."""
        self.tunnels.add(connection)
        self.arriving.remove(sock)
        if self.phase is not Phase.SERVING:
            connection.drain()

    # The order of a drain (see PodProxy.drain): begin_drain, listeners handed over, say_goodbye, left, end_all.

    def begin_drain(self) -> None:
        """Have tunnel connections whose handshake ends from now on send GOAWAY at once."""
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING

    def say_goodbye(self) -> None:
        """Send GOAWAY on every tunnel connection that is established."""
        for connection in self.tunnels:
            connection.drain()

    async def left(self, until_s: float) -> int:
        """Wait until every connection has ended, at most until ``until_s`` of the loop's time.

        Returns:
            How many are left.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                # A peer may have asked for a tunnel before it heard of the end, or may be about to hear: idle
                # tunnel connections and handshakes get some round trips. They are not waited for any longer.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await all_emptied(self.arriving, self.inbound, self.outbound, self.tunnels)
                await all_emptied(self.inbound, self.outbound)
        return len(self.inbound) + len(self.outbound)

    def end_all(self, reason: str) -> None:
        """End everything now; what arrives later is refused by its phase."""
        self.phase = Phase.ENDED
        for connection in self.tunnels:
            connection.abort("pod removed")
        for entry in (*self.inbound, *self.outbound):
            entry.end(reason)

    def end_revoked(
        self, lists: RevocationLists, dialled: tuple[Connection, ...], rejections: dict[str, int]
    ) -> None:
        """End every connection whose peer is on a revocation list now.

        Args:
            lists: the current ones.
            dialled: tunnel connections that this pod opened.
            rejections: counted here, by reporter.
        """
        for connection in self.tunnels:
            if _is_listed(lists, connection):
                rejections["destination"] += 1
                _end_carried(self.inbound, connection)
                connection.close()
        for connection in dialled:
            if _is_listed(lists, connection):
                rejections["source"] += 1
                _end_carried(self.outbound, connection)
                connection.abort(REVOKED)
        # Peers of a double tunnel's inner connection, and those of joined tunnels, where no connection is.
        for reporter, table in (("destination", self.inbound), ("source", self.outbound)):
            for entry in table:
                if (entry.inner is not None and _is_listed(lists, entry.inner)) or (
                    entry.peer is not None and entry.peer.is_revoked_by(lists)
                ):
                    rejections[reporter] += 1
                    entry.end(REVOKED)

    def dump(self) -> dict[str, list[dict[str, str | None]]]:
        """Return ``connections`` of the dump; equal inbound ones collapse, as in upstream's table.

        ``srcIdentity``, what an inbound client has proven, is ours: the Rust ztunnel does not show it.
        """
        inbound = {
            (
                str(entry.record.source),
                entry.original,
                str(entry.actual),
                entry.protocol,
                _proven(entry.record),
            ): None
            for entry in self.inbound
        }
        return {
            "inbound": [
                {
                    "actualDst": actual,
                    "originalDst": original,
                    "protocol": protocol,
                    "src": src,
                    "srcIdentity": identity,
                }
                for src, original, actual, protocol, identity in inbound
            ],
            "outbound": [
                {
                    "actualDst": str(entry.record.destination),
                    "originalDst": entry.original,
                    "protocol": entry.protocol,
                    "src": str(entry.record.source),
                }
                for entry in self.outbound
            ],
        }


def _proven(record: Record) -> str | None:
    return str(record.source_identity) if record.secured and record.source_identity is not None else None


def _is_listed(lists: RevocationLists, connection: Connection) -> bool:
    return (
        connection.facts is not None and bool(connection.facts.chain) and lists.is_revoked(connection.facts.chain)
    )


def _end_carried(table: ConnectionTable[PodConnection], connection: Connection) -> None:
    for entry in table:
        if entry.connection is connection:
            entry.end(REVOKED)
