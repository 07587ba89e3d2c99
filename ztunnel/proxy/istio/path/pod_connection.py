"""Defines the connection-table entries of a pod's connections and tunnel connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from hbone.aio.connection import Connection
from hbone.aio.relay import Relay
from hbone.aio.tunnel import TunnelCarrier
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from ztunnel.proxy.dataplane.life_table import ALLOWED, State, Verdict
from ztunnel.proxy.dataplane.live_table import Abort, Life, Lives
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.access_record import Record
from ztunnel.proxy.istio.accounting.outcome import REVOKED
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate

if TYPE_CHECKING:
    from xds.model import calico as c  # only in proxies that enforce Calico's policies


class PodConnection(Life):
    """One connection of a pod: a captured connection, or a request inside a tunnel connection.

    Args:
        judged_by: returns the policies' verdict on the connection. It is called only after the :attr:`state`
            *identified*. ``None`` if a subclass overrides :meth:`judge`.

    Attributes:
        record: the connection's record for logs and metrics.
        original: the dialled address (outbound), or the service requested by the client (inbound), for the dump.
        actual: the application's address (inbound).
        protocol: ``TCP``, ``HBONE`` or ``DOUBLEHBONE``.
        facts: the input of the mesh's policies (inbound).
        flow: the input of Calico's policies (outbound).
        connection: the tunnel connection that carries this connection.
        inner: a double tunnel's inner connection.
        peer: the far pod's certificate in a node-local tunnel, which has no TLS connection to check later.
        relay: the relay that carries the connection's bytes, once it is open.
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
        judged_by: Callable[[PodConnection], Verdict] | None = None,
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
        """Record that ``relay`` now carries the bytes. From now on, ending the connection aborts the relay."""
        self.relay = relay
        self.opened(relay.abort, state=state, finish=relay.finish)
        if self.record.addons is not None:
            self.tell_addons()

    def tell_addons(self) -> None:
        """Notify the addons that the connection is open and relays bytes."""
        asked = self.record.asked or self.record.taken_over()
        if asked is not None:
            asked.opened(self, self.record.counts)

    def judge(self) -> Verdict:
        assert self._judged_by is not None  # a subclass without this function overrides this method
        return self._judged_by(self)

    def peer_is_revoked(self, lists: RevocationLists | None) -> bool:
        """Return whether the peer of a double tunnel's inner connection, or of a node-local tunnel, has a revoked
        certificate. The peers of other connections are checked in their tunnel connection's entry.
        """
        if lists is None:
            return False
        if self.inner is not None and is_listed(lists, self.inner):
            return True
        return self.peer is not None and self.peer.is_revoked_by(lists)


@final
class Carrier(Life):
    """One tunnel connection of a pod, accepted or dialled.

    Args:
        lists: returns the revocation lists.
        rejected: called when the peer's certificate turns out to be revoked, to count this.

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


def is_listed(lists: RevocationLists, connection: Connection) -> bool:
    """Return whether a certificate in the chain that the peer sent in its handshake is revoked."""
    return (
        connection.facts is not None and bool(connection.facts.chain) and lists.is_revoked(connection.facts.chain)
    )
