"""Decides whether the proxy accepts an inbound connection to a pod, and dials the pod's application.

HBONE tunnels from the network, node-local tunnels and captured plain connections all pass through this module.
"""

from __future__ import annotations

from hbone.aio.socket import PlainSocket
from hbone.events import Headers
from hbone.tunnel_headers import first, parse_baggage
from tproxy.errors import TproxyError
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from xds.model.workload import AppProtocol, Workload
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.proxy_protocol import encode_header
from ztunnel.proxy.istio.accounting.access_record import Record
from ztunnel.proxy.istio.accounting.metrics import PeerLabels
from ztunnel.proxy.istio.accounting.outcome import REJECTED, REVOKED, EarlyDeny, Failed, of_reason, unreachable
from ztunnel.proxy.istio.accounting.workload_labels import WorkloadLabels
from ztunnel.proxy.istio.path.authorizer import Authorizer, Denied
from ztunnel.proxy.istio.path.inbound_target import (
    InboundTarget,
    RequestRefused,
    inbound_facts,
    inbound_service,
    inbound_target,
)
from ztunnel.proxy.istio.path.node_local import TunnelRequest
from ztunnel.proxy.istio.path.pod_connection import PodConnection
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.request_plans import Peer, enter_client, workload_of
from ztunnel.proxy.istio.path.route import source_host
from ztunnel.proxy.istio.settings.config import HBONE_PORT


class Refusal(Exception):
    """The refusal of a CONNECT request, which is answered with an error and not carried to the application.

    Attributes:
        status: the HTTP status of the answer.
        failure: the reason for the refusal, for the access record.
    """

    def __init__(self, status: int, failure: Failed | EarlyDeny) -> None:
        super().__init__(status, str(failure))
        self.status = status
        self.failure = failure

    def entered(self, record: Record) -> Failed | None:
        """Write the refusal to a record. A record that is not open yet is counted and logged as an early denial.
        For an open record, return the failure, which the caller uses to complete the record.
        """
        if isinstance(self.failure, Failed):
            return self.failure
        record.denied_early(self.failure)
        return None


class Admission:
    """Decides which connections to one pod are accepted, and connects to the application."""

    def __init__(self, pod: PodContext, authorizer: Authorizer) -> None:
        self._pod = pod
        self._node = pod.node
        self._authorizer = authorizer

    def describe_peer(self, record: Record, peer: Peer, headers: Headers) -> None:
        """Label the client by the control plane's description of its address, or else by its proxy's baggage.

        A request that came through another network's gateway has the gateway's address, so only baggage describes
        the client. But if the peer's certificate belongs to the workload at its own address, the peer is that
        workload, and its baggage is ignored.
        """
        node, identity = self._node, peer.identity
        workload = workload_of(peer, first(headers, b"x-forwarded-network"), node)
        if workload is not None:
            enter_client(record, workload, identity, node)
            return
        if node.config.baggage:
            record.source_labels = node.baggage_labels.labels(
                parse_baggage(headers), identity, node.clock.monotonic()
            )
        else:
            record.source_labels = PeerLabels(principal=str(identity) if identity is not None else "")
        record.source_identity = identity

    async def admit(
        self, entry: PodConnection, labels: WorkloadLabels, tunnel: TunnelRequest, peer: Peer
    ) -> PlainSocket:
        """Find the application's address, authorize the connection, and dial the application.

        Args:
            entry: the connection's entry, which this call updates.
            labels: this pod's labels.
            tunnel: the request.
            peer: the client.

        Raises:
            Refusal: the request is refused. It has the status to answer with.
        """
        node, record = self._node, entry.record
        try:
            target = inbound_target(
                tunnel.authority,
                labels.workload,
                peer.local.host,
                node.mesh,
                network=node.config.network,
                illegal_ports=node.config.illegal_ports,
            )
        except RequestRefused as refused:
            raise Refusal(refused.status, refused) from refused
        record.hbone_authority = tunnel.authority
        record.service = inbound_service(target, labels.workload, node.mesh, tunnel.service)
        entry.original, entry.actual, entry.protocol = tunnel.service, target.address, "HBONE"
        entry.facts = inbound_facts(peer.source, target.address, peer.certificate)
        record.opened()
        await self.authorize(entry, entry.facts, labels.workload)
        try:
            application = await self._dial(target, labels.workload, peer.source)
        except (TproxyError, OSError) as error:
            raise Refusal(503, unreachable(error)) from error
        if target.proxy_destination is not None:
            identity = str(peer.identity) if peer.identity is not None else None
            source = _of_one_family(peer, record.source_workload, target.proxy_destination)
            application.send_first(encode_header(source, target.proxy_destination, identity))
        return application

    async def authorize(self, entry: PodConnection, facts: ConnectionFacts, workload: Workload) -> None:
        """Check a connection against policies, revocation lists and addons.

        Raises:
            Refusal: the request is refused. It has the status to answer with.
        """
        entry.state = State.IDENTIFIED
        try:
            await self._authorizer.authorize(workload, facts, entry.record)
        except Denied as denied:
            failure = Failed(f"{REJECTED}: {denied}", denied.reason, fields=denied.fields, policy=denied.policy)
            raise Refusal(401, failure) from denied
        # The revocation lists can have changed while a node-local tunnel waited for a policy. (Connections from
        # the network are checked again by a review of the connection table.)
        revocations = self._node.revocations
        if revocations is not None and entry.peer_is_revoked(revocations.current):
            self._node.metrics.crl_rejections["destination"] += 1
            raise Refusal(401, of_reason(REVOKED))
        if self._node.addons is not None:
            try:
                await self._node.addons.accepting(entry)
            except Failed as failure:
                raise Refusal(403, failure) from failure
        entry.state = State.DIALING

    async def _dial(self, target: InboundTarget, workload: Workload, client: SocketAddress) -> PlainSocket:
        sockets, address = self._pod.sockets, target.address
        tunnel = workload.application_tunnel
        if tunnel is not None and tunnel.protocol is AppProtocol.PROXY and self._node.config.localhost_app_tunnel:
            loopback = "::1" if ":" in address.host else "127.0.0.1"
            return await sockets.dial(SocketAddress(loopback, address.port))
        source = sockets.application_source(HBONE_PORT, client.host, address.host)
        return await sockets.dial(address, source=source)


def _of_one_family(peer: Peer, workload: Workload | None, destination: SocketAddress) -> SocketAddress:
    """Return the peer's address in the destination's address family, because a PROXY header has room for one
    family only.

    A client can dial a dual-stack service over IPv4 and reach its waypoint over IPv6, or the reverse. With mixed
    families the Rust ztunnel sends a header without addresses, which Envoy refuses. The peer's own address in the
    destination's family is equally correct.
    """
    source = peer.source
    if (":" in source.host) == (":" in destination.host):
        return source
    if workload is None or workload.identity != peer.identity:
        return source
    host = source_host(workload, source.host, destination.host)
    return SocketAddress(host, source.port) if host is not None else source
