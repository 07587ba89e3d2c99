"""Calls the addons' hooks for the connections of an Istio mesh; see :mod:`ztunnel.proxy.addons.host`.

=================  ===================================================================================
hook               when
=================  ===================================================================================
``connecting``     a route and an endpoint were chosen, before dialling. Called once per connection: further
                   attempts keep the verdicts
``accepting``      policies (the mesh's and Calico's) allow the connection; its application is not dialled yet
``opened``         the relay has started
``closed``         the access line is written, and ``opened`` was called
``refused``        the access line is written, and ``opened`` was not called
=================  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from hbone.aio.deadline import Deadline
from hbone.aio.socket import PlainSocket
from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.mesh import Mesh
from xds.model.service import Service
from xds.model.workload import Workload, WorkloadUid
from ztunnel.addons import Direction, Facts, MeshSummary, Path
from ztunnel.addons import Record as Ended
from ztunnel.addons import Workload as Side
from ztunnel.proxy.addons.decide import Labels
from ztunnel.proxy.addons.host import AddonHost, Asked, held
from ztunnel.proxy.dataplane.client_hello import MAX_BYTES, NeedMore, NotTls, parse_client_hello
from ztunnel.proxy.dataplane.names_answered import NamesAnswered
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.istio.accounting.access_record import Record
from ztunnel.proxy.istio.accounting.metrics import PeerLabels
from ztunnel.proxy.istio.accounting.outcome import Failed
from ztunnel.proxy.istio.path.addon_labels import addon_labels
from ztunnel.proxy.istio.path.pod_connection import PodConnection

_PATHS: Final = {"TCP": Path.DIRECT, "HBONE": Path.TUNNEL, "DOUBLEHBONE": Path.DOUBLE_TUNNEL}
_NO_SIDE: Final = Side()
#: The longest wait for a ClientHello, in seconds. A TLS client sends it as soon as it is connected.
_HELLO_S: Final = 0.2
#: The number of workloads whose descriptions for addons are cached.
_MOST_SIDES: Final = 4096


class PodAddons:
    """Calls this process's addons about the connections of pods.

    Args:
        host: calls the addons.

    Attributes:
        names: the host names that the proxy's DNS server has resolved for pods, by address.
    """

    def __init__(self, host: AddonHost) -> None:
        self.host = host
        self.names = NamesAnswered()
        self._sides: dict[WorkloadUid, tuple[Workload, Side, str]] = {}

    def connecting_now(self, entry: PodConnection, dialled: SocketAddress, server_name: str = "") -> bool:
        """Ask the addons about an outbound connection whose route is in its record, without waiting for an answer.

        Args:
            entry: the connection's entry.
            dialled: the address that the application dialled.
            server_name: the server name in the application's ClientHello, if an addon needs this name.

        Returns:
            True if the connection can continue, because no addon returned a verdict. After False, call
            :meth:`connecting`.
        """
        record = entry.record
        facts = self._outbound(self.host.next_number(), record, entry.protocol, dialled, server_name)
        asked = record.asked = Asked(self.host, facts)
        return self.host.ask_now(self.host.connecting, asked)

    async def connecting(
        self, entry: PodConnection, client: PlainSocket, dialled: SocketAddress
    ) -> tuple[Labels, ...] | None:
        """Ask the addons about an outbound connection whose route is in its record, or finish what
        :meth:`connecting_now` began.

        It is called again before each further attempt, and then only stores the new route.

        Args:
            entry: the connection's entry.
            client: the application's end.
            dialled: the address that the application dialled.

        Returns:
            The labels of preferred endpoints. The caller then chooses an endpoint again, by these labels.
            ``None``: keep the endpoint, because no addon had a preference or waited.

        Raises:
            Failed: an addon denies the connection.
        """
        record = entry.record
        if record.asked is None:
            name = ""
            if "server_name" in self.host.needs and record.destination_workload is None:
                with held(entry):
                    name = await _server_name(client)
            self.connecting_now(entry, dialled, name)
        elif not _is_undecided(record):
            self._rerouted(record, entry.protocol)
            return None
        asked = record.asked
        assert isinstance(asked, Asked)
        await self.host.decide_rest(entry, asked)
        _raise_denial(asked)
        return asked.outcome.prefer if asked.waited or asked.outcome.prefer else None

    def accepting_now(self, entry: PodConnection) -> bool:
        """Ask the addons about an inbound connection that policy allows, without waiting for an answer.

        Returns:
            True if the connection can continue, because no addon returned a verdict. After False, call
            :meth:`accepting`.
        """
        record = entry.record
        asked = record.asked = Asked(self.host, self._inbound(record))
        return self.host.ask_now(self.host.accepting, asked)

    async def accepting(self, entry: PodConnection) -> None:
        """Ask the addons about an inbound connection that policy allows, or finish what :meth:`accepting_now`
        began.

        Raises:
            Failed: an addon denies the connection.
        """
        record = entry.record
        if not _is_undecided(record) and self.accepting_now(entry):
            return
        asked = record.asked
        assert isinstance(asked, Asked)
        await self.host.decide_rest(entry, asked)
        _raise_denial(asked)

    def mesh_changed(self, mesh: Mesh) -> None:
        """Notify the addons soon that the mesh has changed."""
        self.host.mesh_changed(lambda: _summary(mesh))

    def _rerouted(self, record: Record, protocol: str) -> None:
        """Store the endpoint of a further attempt in the connection's facts, for later hooks."""
        asked = record.asked
        if isinstance(asked, Asked):
            old = asked.facts
            dialled = SocketAddress(old.destination_address, old.destination_port)
            asked.facts = self._outbound(old.connection, record, protocol, dialled, old.server_name)

    def taken_over(self, record: Record) -> Asked:
        """Return an :class:`Asked` without verdicts, for a connection that another process opened."""
        if record.direction.value == "inbound":
            return Asked(self.host, self._inbound(record))
        protocol = "HBONE" if record.hbone_authority else "TCP"
        return Asked(self.host, self._outbound(self.host.next_number(), record, protocol, record.destination))

    def ended(self, record: Record, reason: str, duration_s: float) -> None:
        """Notify the addons that a connection has ended. Called when its access line is written."""
        asked = record.asked
        if not isinstance(asked, Asked):  # refused before a hook was asked
            asked = self.taken_over(record)
        counts = record.counts
        values = (asked.facts, counts.sent, counts.received, duration_s, reason, asked.addon)
        asked.ended(tuple.__new__(Ended, values))

    # Facts

    def _side(self, workload: Workload | None, labels: PeerLabels) -> tuple[object, Side, str]:
        """Describe one side of a connection to addons, by its workload or else by its metric labels.

        Returns:
            The workload (used only by the cache), the description, and the identity that this side should have.
        """
        if workload is None:
            return None, _of_labels(labels) if labels.known else _NO_SIDE, ""
        known = self._sides.get(workload.uid)
        if known is not None and known[0] is workload:
            return known
        side = _described(workload)
        if len(self._sides) >= _MOST_SIDES:
            self._sides.clear()
        found = self._sides[workload.uid] = workload, side, str(workload.identity)
        return found

    def _outbound(
        self, number: int, record: Record, protocol: str, dialled: SocketAddress, server_name: str = ""
    ) -> Facts:
        source, service, pod = record.source, record.service, record.source_workload
        _, near, own = self._side(pod, record.source_labels)
        _, far, theirs = self._side(record.destination_workload, record.destination_labels)
        names = self.names.of((near.namespace, near.name), dialled.host) if self.names.known else ()
        if record.secured and record.destination_workload is None:  # the far side of a double tunnel
            theirs = _text(record.destination_identity)
        # This creates the same object as Facts(...), but twice as fast.
        return tuple.__new__(
            Facts,
            (
                number,
                "istio",
                Direction.OUTBOUND,
                _PATHS[protocol],
                near,
                source.host,
                source.port,
                own,
                far,
                dialled.host,
                dialled.port,
                theirs if record.secured else "",
                _shown(record.destination),
                service.hostname if service is not None else "",
                names,
                server_name,
            ),
        )

    def _inbound(self, record: Record) -> Facts:
        source, service = record.source, record.service
        # Use the application's address, which the tunnel request names, because the tunnel connection itself went
        # to port 15008.
        wanted = record.hbone_authority
        port = wanted.rpartition(":")[2]
        return Facts(
            self.host.next_number(),
            "istio",
            Direction.INBOUND,
            Path.TUNNEL if wanted else Path.DIRECT,
            self._side(record.source_workload, record.source_labels)[1],
            source.host,
            source.port,
            _text(record.source_identity),
            self._side(record.destination_workload, record.destination_labels)[1],
            record.destination.host,
            int(port) if port.isascii() and port.isdigit() else record.destination.port,
            _text(record.destination_identity) if record.secured else "",
            "",
            service.hostname if service is not None else "",
        )


async def _server_name(client: PlainSocket) -> str:
    """Return the server name (SNI) of a client's TLS ClientHello, or an empty string. The bytes stay in the
    kernel.

    If the client sends no bytes because its server speaks first, this gives up after :data:`_HELLO_S` seconds.
    """
    seen = b""
    try:
        with Deadline(client.poller, _HELLO_S):
            while True:
                more = await client.peek(MAX_BYTES, seen=len(seen))
                if len(more) <= len(seen):
                    return ""
                seen = more
                try:
                    return parse_client_hello(seen).server_name
                except NeedMore:
                    continue
    except (NotTls, TimeoutError):
        return ""


def _summary(mesh: Mesh) -> MeshSummary:
    """Return the numbers of workloads, services and policies in the mesh, for addons."""
    counts = mesh.counts()
    return MeshSummary(counts["workloads"], counts["services"], counts["policies"])


def _is_undecided(record: Record) -> bool:
    """Return whether some of the hooks called by :meth:`AddonHost.ask_now` have not answered yet."""
    return isinstance(record.asked, Asked) and record.asked.undecided is not None


def _raise_denial(asked: Asked) -> None:
    if asked.outcome.denied:
        raise Failed(asked.outcome.denied, Reason.ADDON)


def would_connect(
    source: Workload,
    host: str,
    dialled: SocketAddress,
    service: Service | None,
    there: Workload | None,
    way: Mapping[str, Any],
    names: tuple[str, ...] = (),
) -> Facts:
    """Return the facts of a hypothetical connection, as the hook ``connecting`` would get them.

    Args:
        source: the workload that would open the connection.
        host: the address of ``source``.
        dialled: the address that its application would dial.
        service: the service at ``dialled``, if there is one.
        there: the destination workload, if it is known.
        way: the description of one candidate endpoint (an entry of ``ways``) in an answer of
            :func:`ztunnel.proxy.istio.path.explain.explain`.
        names: the names that the pod has resolved to ``dialled``.
    """
    return Facts(
        dialect="istio",
        direction=Direction.OUTBOUND,
        path=Path.DOUBLE_TUNNEL if "gateway" in way else Path.TUNNEL if "authority" in way else Path.DIRECT,
        source=_described(source),
        source_address=host,
        source_identity=str(source.identity),
        destination=_described(there) if there is not None else _NO_SIDE,
        destination_address=dialled.host,
        destination_port=dialled.port,
        destination_identity=str(there.identity) if there is not None and "authority" in way else "",
        endpoint=str(way.get("target", "")),
        service=service.hostname if service is not None else "",
        names=names,
    )


def would_accept(
    source: Workload | None, host: str, identity: str, there: Workload, application: SocketAddress
) -> Facts:
    """Return the facts of a hypothetical connection, as the hook ``accepting`` would get them."""
    return Facts(
        dialect="istio",
        direction=Direction.INBOUND,
        path=Path.TUNNEL if identity else Path.DIRECT,
        source=_described(source) if source is not None else _NO_SIDE,
        source_address=host,
        source_identity=identity,
        destination=_described(there),
        destination_address=application.host,
        destination_port=application.port,
        destination_identity=str(there.identity) if identity else "",
    )


def _described(workload: Workload) -> Side:
    return Side(
        workload.name,
        workload.namespace,
        workload.service_account,
        workload.node,
        workload.cluster_id,
        addon_labels(workload),
    )


@lru_cache(maxsize=1024)
def _of_labels(labels: PeerLabels) -> Side:
    named = {"app": labels.app, "version": labels.version}
    return Side(
        name=labels.workload,
        namespace=labels.namespace,
        cluster=labels.cluster,
        labels=MappingProxyType({key: value for key, value in named.items() if value}),
    )


@lru_cache(maxsize=4096)
def _shown(address: SocketAddress) -> str:
    return str(address)


@lru_cache(maxsize=4096)
def _text(identity: SpiffeId | None) -> str:
    return str(identity) if identity is not None else ""
