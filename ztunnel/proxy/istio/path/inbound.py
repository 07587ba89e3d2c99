"""START HERE for connections to a pod: tunnels on 15008, captured plain connections on 15006.

The methods for both follow a connection top to bottom: the peer, its request, the policy check, the application,
the bytes. Each connection has an entry in the connection table (:mod:`ztunnel.proxy.dataplane.live_table`) from
the time it is accepted. :mod:`ztunnel.proxy.istio.path.admission` decides about new requests, and
:meth:`Inbound.verdict` checks open connections again after changes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from hbone.aio.connection import Connection
from hbone.aio.end import End
from hbone.aio.fiber import Fiber, current
from hbone.aio.relay import LINGER_S, relay
from hbone.aio.requests import Request, Requests
from hbone.aio.server import serve_connection
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectRefused, HboneError, PeerSilent, TlsError, TlsReason, TunnelBroken
from hbone.events import Headers
from hbone.tunnel_headers import forwarded_host
from tproxy.errors import TproxyError
from xds.model.address import SocketAddress
from xds.model.facts import PeerCertificate
from xds.model.workload import Workload
from ztunnel.proxy.dataplane.apart import run_apart
from ztunnel.proxy.dataplane.handshake_limiter import PendingHandshake
from ztunnel.proxy.dataplane.life_table import Event, State, Verdict
from ztunnel.proxy.dataplane.live_table import Life
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.outcome import (
    DRAINED,
    POLICY_CHANGE,
    REVOKED,
    EarlyDeny,
    Failed,
    broken,
    gave_up,
    of_reason,
    of_relay,
    unreachable,
)
from ztunnel.proxy.istio.certificates.manager import IdentityError, WorkloadCertificate, disagreement
from ztunnel.proxy.istio.path.admission import Admission, Refusal
from ztunnel.proxy.istio.path.authorizer import Authorizer
from ztunnel.proxy.istio.path.connections import Phase
from ztunnel.proxy.istio.path.early_denials import EarlyDenials, account_rejected, handshake_error
from ztunnel.proxy.istio.path.inbound_target import inbound_facts, inbound_service, plain_target
from ztunnel.proxy.istio.path.node_local import InboundHalf, NodeLocalRequest, TunnelRequest
from ztunnel.proxy.istio.path.planned_request import PlannedInbound
from ztunnel.proxy.istio.path.pod_connection import Carrier, PodConnection, is_listed
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.request_plans import Peer, RequestPlans, enter_pod, enter_trace
from ztunnel.proxy.istio.path.route import source_host
from ztunnel.proxy.istio.settings.config import PLAINTEXT_PORT

if TYPE_CHECKING:
    from ztunnel.proxy.tap.capture import Capture

log = logging.getLogger(__name__)
_NO_CERTIFICATE: Final = PeerCertificate()


def _seen(
    capture: Capture,
    entry: PodConnection,
    application: PlainSocket,
    tunnel: Tunnel | None = None,
    headers: Headers = (),
) -> End:
    """Return the application's end of a connection, wrapped so that a tap of this pod captures its bytes."""
    from ztunnel.proxy.istio.path.tapped import observed  # imported here to save memory: most proxies have no taps

    assert entry.actual is not None
    return observed(capture, entry, application, tunnel, entry.actual, headers)


class Inbound(PlannedInbound):
    """Serves the inbound connections of one pod. Also implements ``NodeLocalTarget``, to accept node-local
    tunnels.
    """

    def __init__(self, pod: PodContext, authorizer: Authorizer | None = None) -> None:
        authorizer = authorizer or Authorizer(pod.node)
        self._illegal_ports = pod.node.config.illegal_ports
        super().__init__(pod, authorizer, RequestPlans(pod, authorizer, self._illegal_ports))
        self._pod = pod
        self._node = pod.node
        self._admission = Admission(pod, self.authorizer)
        self._denials = EarlyDenials(pod.node)
        # This callback is not a method of this object: the handshake limiter outlives the pod's last connection,
        # and a method would create a reference cycle.
        rejected = partial(account_rejected, self._denials)
        self._limiter = pod.node.half_open.limiter(self._handshake_begins, rejected)
        pod.local.watch(self._mesh_changed)

    # Accepting

    def accepted(self, sock: socket.SocketType, peer: tuple[str, int]) -> None:
        """Start serving an accepted tunnel connection; returns at once. Called by the listener on port 15008."""
        carrier = Carrier(self._pod.connections.carriers, self._node.revocation_lists, self._rejected)
        self._count_socket(carrier)
        self._limiter.enter(sock, peer, carrier)

    def accepted_plain(self, sock: socket.SocketType, peer: tuple[str, int]) -> None:
        """Start serving a captured plain connection; returns at once. Called by the listener on port 15006."""
        self._pod.tasks.run(self._node.poller, self._plain(sock, peer), "inbound plaintext")

    def _count_socket(self, life: Life) -> None:
        """Count a connection's socket as open until the connection's table entry ends."""
        self._node.count_sockets("destination", +1)
        life.own(partial(self._node.count_sockets, "destination", -1))

    def _rejected(self) -> None:
        self._node.metrics.crl_rejections["destination"] += 1

    # Tunnels

    def _handshake_begins(self, pending: PendingHandshake) -> Fiber:
        return self._pod.tasks.run(self._node.poller, self._tunnels(pending), "inbound")

    async def _tunnels(self, pending: PendingHandshake) -> None:
        """Serve one tunnel connection, from its TLS handshake until it ends."""
        node, pod, sock = self._node, self._pod, pending.sock
        carrier: Carrier = pending.owner
        owned: socket.SocketType | None = sock
        try:
            try:
                source, local = SocketAddress.of(pending.peer), SocketAddress.of(sock.getsockname())
            except OSError:
                return
            certificate = await pod.certificate((await pod.local.get()).workload)
            context = certificate.server_context()
            carrier.state = State.HANDSHAKE
            here = Peer(source, local)

            def established(connection: Connection) -> None:
                facts = connection.facts
                assert facts is not None
                here.connection, here.certificate = connection, PeerCertificate(uri_sans=facts.uri_sans)
                here.identity = here.certificate.identity
                connection.handshake_s = pending.proved()
                self._established(carrier, here, connection)

            owned = None  # from here on serve_connection owns the socket
            try:
                await serve_connection(
                    sock,
                    context,
                    pod.server_settings,
                    node.poller,
                    lambda request: self._request(here, request),
                    take_now=partial(self.take, here),
                    on_established=established,
                )
            finally:
                if here.connection is not None:
                    self._ended(here, pending)
        except EarlyDeny as denial:
            self._denials.write(source, local, denial)
        except IdentityError as error:
            self._denials.write(source, local, EarlyDeny(f"signing error: {error}", Reason.CERTIFICATE))
        except TlsError as error:
            if error.reason is TlsReason.REVOKED and not error.by_peer:
                self._rejected()
            self._denials.write(source, local, handshake_error(error))
        except PeerSilent as error:
            self._denials.write(source, local, handshake_error(error))
        except HboneError as error:
            if here.connection is None:
                self._denials.write(source, local, handshake_error(error))
            else:
                log.debug("a tunnel connection from %s ended: %s", source, error)
        finally:
            pending.ended()
            carrier.close()
            if owned is not None:
                owned.close()

    def _established(self, carrier: Carrier, peer: Peer, connection: Connection) -> None:
        """Let a tunnel connection accept requests, unless the peer's certificate was revoked during the handshake.

        Raises:
            TlsError: the certificate was revoked.
        """
        lists = self._node.revocation_lists()
        if lists is not None and is_listed(lists, connection):
            raise TlsError(TlsReason.REVOKED, "certificate revoked during the handshake")
        connections = self._pod.connections
        carrier.connection = connection
        if connections.phase is not Phase.SERVING:
            carrier.leave()

        def ended(reason: str) -> None:
            connections.end_carried(connection, reason)
            connection.close()

        def aborted(reason: str) -> None:
            if connections.end_carried(connection, reason) == 0 and reason == REVOKED:
                # Without tunnels on this connection, no access line reports the revocation, so log it here.
                self._denials.write(peer.source, peer.local, EarlyDeny(reason, Reason.REVOKED))
            connection.abort(reason)

        carrier.opened(aborted, leave=connection.drain, finish=ended)

    def _ended(self, peer: Peer, pending: PendingHandshake | None = None) -> None:
        """Count and log a tunnel connection that was closed because its peer exceeded a protocol limit."""
        connection = peer.connection
        if connection is not None and connection.ended_by_limit:
            if pending is not None:
                pending.offended()
            self._node.metrics.closed_for_abuse += 1
            if self._denials.limit.admits():
                log.warning(
                    "tunnel connection ended by a limit src.addr=%s src.identity=%s error=%s",
                    peer.source,
                    peer.identity or "",
                    connection.error,
                )

    # Tunnel connections taken over from another process: see ztunnel.proxy.istio.handover

    def requests_of(self, peer: Peer) -> Requests:
        """Return the handler for requests on a peer's tunnel connection."""
        return Requests(lambda request: self._request(peer, request), partial(self.take, peer))

    async def serve_moved(self, peer: Peer, requests: Requests, connection: Connection) -> None:
        """Serve a connection that another process has accepted, until it ends.

        Args:
            peer: the other end of the connection.
            requests: the handler from :meth:`requests_of` that ``connection`` was created with.
            connection: the connection, closed by this call. Its open tunnels belong to other tasks.
        """
        carrier = Carrier(self._pod.connections.carriers, self._node.revocation_lists, self._rejected)
        self._count_socket(carrier)
        try:
            facts = connection.facts
            if facts is not None:
                peer.certificate = PeerCertificate(uri_sans=facts.uri_sans)
                peer.identity = peer.certificate.identity
            peer.connection = connection
            self._established(carrier, peer, connection)
            self._pod.connections.carriers.judge(carrier)
            await connection.wait_closed()
            await requests.wait(cancel=False, timeout_s=LINGER_S)
        except TlsError as error:
            connection.abort(str(error))
            self._rejected()
            self._pod.connections.end_carried(connection, REVOKED)
        finally:
            connection.abort("no longer served")
            await requests.wait(cancel=True)
            self._ended(peer)
            carrier.close()

    async def _request(self, peer: Peer, request: Request) -> None:
        """Answer one request of a tunnel connection: usually a CONNECT, carried to the application."""
        node, head = self._node, request.head
        record = Record(node, Direction.INBOUND, peer.source, peer.local)
        cancel = current(node.poller).cancel
        entry = PodConnection(self._pod.connections.inbound, record, cancel, self.verdict)
        entry.connection = peer.connection
        failure: Failed | None = None
        enter_trace(record, request, node)
        try:
            if head.method != b"CONNECT" or head.protocol is not None:
                method = head.method.decode("latin-1")
                raise Refusal(400, EarlyDeny(f"expected method CONNECT, got {method}", Reason.BAD_REQUEST))
            tunnel = TunnelRequest((head.authority or b"").decode("latin-1"), forwarded_host(head.headers))
            # Look up the pod's workload for each request, because it can have changed since the tunnel connection
            # was opened.
            labels = await self._pod.local.get()
            self._admission.describe_peer(record, peer, head.headers)
            enter_pod(record, labels)
            application = await self._admission.admit(entry, labels, tunnel, peer)
            try:
                # Send the 200 only after the application has accepted: until then the client can switch to another
                # endpoint, and bytes sent along with the CONNECT wait in the stream.
                baggage = ((b"baggage", labels.baggage),) if node.config.baggage else ()
                accepted = request.accept(baggage)
                capture = self._pod.tap
                there: End = application
                if capture is not None:
                    there = _seen(capture, entry, application, accepted, head.headers)
                running = relay(accepted, there, record.counts)
                entry.carried_by(running)
                ended = await running
                if entry.reason:
                    failure = of_reason(entry.reason)
                elif ended.error is not None:
                    failure = of_relay(ended.error, from_client=ended.first is not there)
            finally:
                application.close()
        except EarlyDeny as denial:  # the control plane does not know this pod
            record.denied_early(denial)
            request.refuse(503)
        except Refusal as refusal:
            failure = refusal.entered(record)
            request.refuse(refusal.status)
        except HboneError as error:
            # The stream ended before the request was accepted. If this proxy ended it on purpose, the entry has a
            # reason.
            failure = of_reason(entry.reason) if entry.reason else broken(error)
        except asyncio.CancelledError:
            failure = of_reason(entry.reason) if entry.reason else gave_up()
            # If a policy that arrived during the dial denies the request, answer 401. The client then does not try
            # another endpoint. In all other cases the unanswered stream is reset, and the client can retry
            # elsewhere.
            if entry.reason == POLICY_CHANGE and not request.answered:
                request.refuse(401)
            raise
        except Exception as error:
            record.failed_by_bug(error)
            raise
        finally:
            entry.close()
            record.complete(failure)

    def _entry(self, record: Record) -> PodConnection:
        """Add the connection carried by the current fiber to the connection table."""
        cancel = current(self._node.poller).cancel
        return PodConnection(self._pod.connections.inbound, record, cancel, self.verdict)

    # Node-local tunnels

    async def open_node_local(self, request: NodeLocalRequest) -> InboundHalf | None:
        """Accept a tunnel from a pod of this node directly, without TLS and HTTP/2 in between.

        A TLS handshake between the two pods' certificates would have to succeed. All other checks are as over the
        network.

        Returns:
            The open half, or ``None`` if the tunnel must go over the network, where the handshake reports why.

        Raises:
            ConnectRefused: the request was refused, as it would be over the network.
        """
        pod, node = self._pod, self._node
        here, own = pod.local.current, request.certificate
        host = source_host(request.labels.workload, request.outer.record.source.host, request.target.host)
        if here is None or host is None:
            return None
        there = await pod.certificate(here)
        if not self._agree(own, there, request.identities):
            return None
        if pod.connections.phase is Phase.ENDED:
            return None  # the pod has stopped meanwhile, and a connection registered now would never be ended
        # Without a TLS connection, each half keeps the other half's certificate, to check it against later
        # revocation lists.
        request.outer.peer = there
        client = SocketAddress(host, request.outer.record.source.port)
        identity = own.issued.identity
        peer = Peer(client, request.target, None, PeerCertificate(uri_sans=(str(identity),)), identity)
        record = Record(node, Direction.INBOUND, client, request.target, request.outer.record.counts)
        record.source_workload, record.source_labels = request.labels.workload, request.labels.secured
        record.source_identity = identity
        opening = self._open_half(record, own, request.tunnel, peer)
        return await run_apart(pod.tasks, node.poller, opening, "inbound node-local", _discard_half)

    async def _open_half(
        self,
        record: Record,
        client: WorkloadCertificate,
        tunnel: TunnelRequest,
        peer: Peer,
    ) -> InboundHalf:
        """Open the inbound half of a node-local tunnel, in its own fiber.

        Args:
            record: the inbound half's record.
            client: the client's certificate.
            tunnel: the request.
            peer: the client.

        Raises:
            ConnectRefused: the request was refused, as it would be over the network.
            TunnelBroken: this pod's proxy ended the tunnel before answering.
        """
        entry = self._entry(record)
        entry.peer = client
        failure: Failed | None = None
        try:
            # Look up the pod's workload only now, because it can have changed while the caller waited for the
            # certificate. Policies that came with the change apply to this tunnel.
            labels = await self._pod.local.get()
            enter_pod(record, labels)
            application = await self._admission.admit(entry, labels, tunnel, peer)
        except EarlyDeny as denial:  # the control plane does not know this pod
            record.denied_early(denial)
            raise ConnectRefused(503) from denial
        except Refusal as refusal:
            failure = refusal.entered(record)
            raise ConnectRefused(refusal.status) from refusal
        except asyncio.CancelledError as error:
            failure = of_reason(entry.reason)
            # The 401 of a policy keeps the client from trying another endpoint. After other errors the client can
            # try one.
            if entry.reason == POLICY_CHANGE:
                raise ConnectRefused(401) from error
            raise TunnelBroken(entry.reason or DRAINED, unprocessed=True) from error
        except Exception as error:
            record.failed_by_bug(error)
            raise
        else:
            entry.own(application.close)
            entry.state = State.JOINED
            capture = self._pod.tap
            return InboundHalf(application if capture is None else _seen(capture, entry, application), entry)
        finally:
            if entry.state is not State.JOINED:
                entry.close()
                record.complete(failure)

    def _agree(self, client: WorkloadCertificate, server: WorkloadCertificate, expected: tuple[str, ...]) -> bool:
        """Return whether a TLS handshake with these two certificates would succeed now."""
        now = datetime.fromtimestamp(self._node.clock.wall(), UTC)
        return not disagreement(client, server, expected, now)

    # Plain connections

    async def _plain(self, sock: socket.SocketType, peer: tuple[str, int]) -> None:
        """Carry one captured connection of a client outside the mesh."""
        node = self._node
        client = PlainSocket(sock, node.poller)
        failure: Failed | None = None
        entry: PodConnection | None = None
        try:
            source = SocketAddress.of(peer)
            destination = self._pod.sockets.original_destination(sock, source)
            record = Record(node, Direction.INBOUND, source, destination)
            entry = self._entry(record)
            entry.actual = destination
            self._count_socket(entry)
            failure = await self._carry_plain(entry, client, source, destination)
        except EarlyDeny as denial:
            assert entry is not None
            entry.record.denied_early(denial)
        except Refusal as refusal:
            assert entry is not None
            failure = refusal.entered(entry.record)
        except asyncio.CancelledError:
            failure = of_reason(entry.reason if entry is not None else "")
            raise
        except OSError as error:
            log.debug("a client disconnected before its connection was served: %s", error)
        except Exception as error:
            if entry is not None:
                entry.record.failed_by_bug(error)
            raise
        finally:
            client.close()
            if entry is not None:
                entry.close()
                entry.record.complete(failure)

    async def _carry_plain(
        self, entry: PodConnection, client: PlainSocket, source: SocketAddress, destination: SocketAddress
    ) -> Failed | None:
        node, sockets, record = self._node, self._pod.sockets, entry.record
        target = plain_target(destination, self._illegal_ports)
        labels = await self._pod.local.get()
        workload = node.mesh.workload_at(node.config.network, source.host)
        if workload is not None:
            record.source_workload, record.source_labels = workload, node.labels_of(workload).plain
        record.destination_workload, record.destination_labels = labels.workload, labels.secured
        record.service = inbound_service(target, labels.workload, node.mesh, None)
        entry.facts = inbound_facts(source, destination, None)
        record.opened()
        await self._admission.authorize(entry, entry.facts, labels.workload)
        shown = sockets.application_source(PLAINTEXT_PORT, source.host, destination.host)
        try:
            application = await sockets.dial(destination, source=shown)
        except (TproxyError, OSError) as error:
            return unreachable(error)
        try:
            capture = self._pod.tap
            there = application if capture is None else _seen(capture, entry, application)
            running = relay(client, there, record.counts)
            entry.carried_by(running)
            ended = await running
            if entry.reason:
                return of_reason(entry.reason)
            if ended.error is not None:
                return of_relay(ended.error, from_client=ended.first is client)
            return None
        finally:
            application.close()

    # Change

    def _mesh_changed(self, workload: Workload) -> None:
        if self.authorizer.changed(workload):
            self._pod.connections.inbound.review(Event.POLICIES)

    def verdict(self, entry: PodConnection) -> Verdict:
        """Check an open connection again by the current revocation lists and policies."""
        if entry.peer_is_revoked(self._node.revocation_lists()):
            self._rejected()
            return Verdict(REVOKED)
        workload = self._pod.local.last
        assert workload is not None
        assert entry.facts is not None
        verdict = self.authorizer.verdict(workload, entry.facts)
        if verdict.reason:
            record = entry.record
            log.info(
                "connection %s(%s)->%s (%s) closed because it's no longer allowed after a policy update",
                record.source,
                record.source_identity or "",
                entry.actual,
                workload.uid,
            )
        return verdict

    def close(self) -> None:
        """Close accepted connections whose handshake has not begun. Idempotent. The pod's connection groups end
        all other connections.
        """
        self._limiter.close()


def _discard_half(half: InboundHalf) -> None:
    half.finish(of_reason(""))
