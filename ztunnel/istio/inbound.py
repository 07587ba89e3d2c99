"""START HERE for what comes to a pod: tunnels on 15008, captured plain connections on 15006.

Both read top to bottom: who comes, what they want, may they, the application, the bytes. A connection is in the
table before it is judged, so that a policy that changes in between still finds it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from datetime import UTC, datetime

from hbone.aio.connection import Connection
from hbone.aio.relay import relay
from hbone.aio.server import Request, serve_connection
from hbone.aio.socket import PlainSocket
from hbone.errors import ConnectRefused, HboneError, PeerSilent, TlsError, TlsReason
from hbone.headers import first, forwarded_host, parse_baggage
from tproxy.aio import sockets
from tproxy.errors import ConnectFailed, ConnectTimedOut, TproxyError
from xds.model.address import SocketAddress, canonical
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.identity import SpiffeId
from xds.model.mesh import WorkloadPolicies
from xds.model.workload import AppProtocol, Workload
from ztunnel.dataplane.proxy_protocol import encode_header
from ztunnel.istio.authorizer import Judge, Rejected
from ztunnel.istio.certificates.manager import IdentityError, Revocations, WorkloadCertificate
from ztunnel.istio.config import HBONE_PORT, PLAINTEXT_PORT
from ztunnel.istio.inbound_target import InboundTarget, RequestRefused, inbound_service, inbound_target
from ztunnel.istio.metrics import Side
from ztunnel.istio.node import Described
from ztunnel.istio.outcome import (
    POLICY_CHANGE,
    RECURSIVE_CALL,
    EarlyDeny,
    Failed,
    Flags,
    io_text,
    of_reason,
    of_relay,
)
from ztunnel.istio.pod import Live, PodProxy, ends_this_task, is_revoked
from ztunnel.istio.record import Direction, Record

log = logging.getLogger(__name__)

#: Policies that arrive a moment after the workload that names them are waited for.
_POLICY_GRACE_S = 5.0


class _Refusal(Exception):
    """A request gets an answer instead of a tunnel.

    Attributes:
        status: of the answer.
        early: the text of an early denial; empty when ``failure`` completes an opened record.
    """

    def __init__(self, status: int, *, early: str = "", failure: Failed | None = None) -> None:
        super().__init__(status, early or str(failure))
        self.status = status
        self.early = early
        self.failure = failure


@dataclass(slots=True, eq=False)
class _Peer:
    """Who is at the other end of a tunnel connection."""

    source: SocketAddress
    local: SocketAddress
    connection: Connection | None = None
    names: tuple[str, ...] = ()
    identity: SpiffeId | None = None


@dataclass(slots=True, eq=False)
class Joined:
    """The inbound half of a tunnel that never left the node."""

    end: PlainSocket
    live: Live
    inbound: Inbound

    def finish(self, failure: Failed | None) -> Failed | None:
        """Account for it; what the outbound half says of its end."""
        ended_here = self.live.reason
        self.inbound.left(self.live, of_reason(ended_here) if ended_here else failure)
        # Over the wire the client's side sees CANCEL, an ordinary end.
        return None if ended_here else failure


class Inbound:
    """Connections that come to one pod."""

    def __init__(self, pod: PodProxy) -> None:
        self._pod = pod
        self._node = pod.node
        self._judge = Judge(pod.node)
        self._again: asyncio.TimerHandle | None = None
        pod.on_policies = self._policies_changed
        pod.join = self.join

    # Accepting

    def accepted(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        """A tunnel connection; returns at once."""
        self._pod.arriving.add(sock)
        self._pod.tasks.run(self._node.poller, self._tunnels(sock, peer), "inbound")

    def accepted_plain(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        """A captured plain connection; returns at once."""
        self._pod.arriving.add(sock)
        self._pod.tasks.run(self._node.poller, self._plain(sock, peer), "inbound plaintext")

    # Tunnels

    async def _tunnels(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        """One connection that brings tunnels, until it ends."""
        node, pod = self._node, self._pod
        try:
            source, local = _address(peer), _address(sock.getsockname())
        except OSError:
            pod.arrived(sock)
            sock.close()
            return
        node.sockets("destination", +1)
        owned: socket.socket | None = sock
        try:
            certificate = await pod.certificate((await pod.local.get()).workload)
            here = _Peer(source, local)

            def established(connection: Connection) -> None:
                facts = connection.facts
                assert facts is not None
                here.connection, here.names = connection, facts.uri_sans
                here.identity = _first_identity(facts.uri_sans)
                pod.tunnels[connection] = facts.chain
                pod.arrived(sock)
                if pod.draining:
                    connection.drain()

            owned = None
            try:
                await serve_connection(
                    sock,
                    certificate.server_context(),
                    node.server_settings,
                    node.poller,
                    lambda request: self._request(here, request),
                    on_established=established,
                )
            finally:
                if here.connection is not None:
                    pod.tunnel_left(here.connection)
        except EarlyDeny as denial:
            self._denied(source, local, str(denial))
        except IdentityError as error:
            self._denied(source, local, f"signing error: {error}")
        except TlsError as error:
            if error.reason is TlsReason.REVOKED and not error.by_peer:
                node.metrics.crl_rejections["destination"] += 1
            self._denied(source, local, f"tls handshake error: {error}")
        except PeerSilent as error:
            self._denied(source, local, f"tls handshake error: {error}")
        except HboneError as error:
            log.debug("a tunnel connection from %s ended: %s", source, error)
        finally:
            pod.arrived(sock)
            node.sockets("destination", -1)
            if owned is not None:
                owned.close()

    def _denied(self, source: SocketAddress, local: SocketAddress, reason: str) -> None:
        Record(self._node, Direction.INBOUND, source, local).denied_early(reason)

    async def _request(self, peer: _Peer, request: Request) -> None:
        """One request of a tunnel connection: usually a CONNECT, carried to the application."""
        node, head = self._node, request.head
        record = Record(node, Direction.INBOUND, peer.source, peer.local)
        live = Live(record, ends_this_task())
        live.connection = peer.connection
        failure: Failed | None = None
        try:
            if head.method != b"CONNECT" or head.protocol is not None:
                raise _Refusal(400, early=f"expected method CONNECT, got {head.method.decode('latin-1')}")
            authority = (head.authority or b"").decode("latin-1")
            who = await self._described_now()
            self._describe(record, peer, who, head.headers)
            application = await self._admit(live, who, authority, forwarded_host(head.headers), peer)
            try:
                baggage = ((b"baggage", who.baggage),) if node.config.baggage else ()
                running = relay(request.accept(baggage), application, record.counts)
                live.ends_by(running.abort)
                ended = await running
                if live.reason:
                    failure = of_reason(live.reason)
                elif ended.error is not None:
                    failure = of_relay(ended.error, from_client=ended.first is not application)
            finally:
                application.close()
        except _Refusal as refusal:
            failure = refusal.failure
            if refusal.early:
                record.denied_early(refusal.early)
            request.refuse(refusal.status)
        except HboneError as error:
            failure = Failed(f"h2 failed: {error}", Flags.H2_HANDSHAKE_FAILURE)
        except asyncio.CancelledError:
            failure = of_reason(live.reason) if live.reason else Failed("h2 failed: the client gave up")
            if live.reason == POLICY_CHANGE and not request.answered:
                request.refuse(401)  # a verdict, which must not be tried elsewhere
            raise
        finally:
            self.left(live, failure)

    async def _described_now(self) -> Described:
        """This pod as it is for a new request: its connection may be older than the policies that it names.

        Raises:
            _Refusal: the control plane does not know it.
        """
        try:
            return await self._pod.local.get()
        except EarlyDeny as denial:
            raise _Refusal(503, early=str(denial)) from denial

    def _describe(
        self, record: Record, peer: _Peer, who: Described, headers: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        """Labels of both sides: what the peer says of itself, and over it what the control plane says of it."""
        node = self._node
        identity = peer.identity
        principal = str(identity) if identity is not None else ""
        network = node.config.network
        forwarded_network = first(headers, b"x-forwarded-network")
        through_gateway = (
            forwarded_network is not None and forwarded_network.decode("latin-1").lower() != network.lower()
        )
        workload = None if through_gateway else node.mesh.workload_at(network, peer.source.host)
        if workload is not None:
            record.source_workload = workload
            there = node.described(workload)
            known = there.secured_side.principal == principal
            record.source_side = there.secured_side if known else there.side._replace(principal=principal)
        elif node.config.baggage:
            record.source_side = Side.of_baggage(parse_baggage(headers), principal)
        else:
            record.source_side = Side(principal=principal)
        record.secured = True
        record.source_identity = identity
        record.destination_workload = who.workload
        record.destination_side = who.secured_side
        record.destination_identity = who.workload.identity

    # What tunnels and joined tunnels have in common

    async def _admit(
        self, live: Live, who: Described, authority: str, meant: str | None, peer: _Peer
    ) -> PlainSocket:
        """Find the application, judge, dial.

        Args:
            live: not yet in the table.
            who: this pod.
            authority: what the tunnel names.
            meant: the service in ``forwarded``.
            peer: who comes.

        Raises:
            _Refusal: with the answer.
        """
        node, pod, record = self._node, self._pod, live.record
        try:
            target = inbound_target(
                authority,
                who.workload,
                peer.local.host,
                node.mesh,
                network=node.config.network,
                illegal_ports=node.config.illegal_ports,
            )
        except RequestRefused as refused:
            raise _Refusal(refused.status, early=refused.reason) from refused
        record.hbone_authority = authority
        record.service = inbound_service(target, who.workload, node.mesh, meant)
        live.original, live.actual, live.protocol = meant, target.address, "HBONE"
        live.facts = ConnectionFacts(
            source=peer.source,
            direct_source=peer.source,
            destination=target.address,
            transport_protocol="tls",
            peer=PeerCertificate(uri_sans=peer.names),
        )
        pod.inbound[live] = None
        record.opened()
        await self._allowed(live, who.workload)
        try:
            application = await self._dial(target, who.workload, peer.source)
        except (TproxyError, OSError) as error:
            raise _Refusal(503, failure=_unreachable(error)) from error
        if target.proxy_destination is not None:
            identity = str(peer.identity) if peer.identity is not None else None
            source = _of_one_family(peer, record.source_workload, target.proxy_destination)
            application.send_first(encode_header(source, target.proxy_destination, identity))
        return application

    async def _allowed(self, live: Live, workload: Workload) -> None:
        assert live.facts is not None
        try:
            await self._judge.admit(workload, live.facts, live.record, _POLICY_GRACE_S)
        except Rejected as rejected:
            text = f"connection closed due to policy rejection: {rejected}"
            raise _Refusal(401, failure=Failed(text, Flags.DENY)) from rejected
        live.admitted = True

    async def _dial(self, target: InboundTarget, workload: Workload, client: SocketAddress) -> PlainSocket:
        pod, address = self._pod, target.address
        tunnel = workload.application_tunnel
        if tunnel is not None and tunnel.protocol is AppProtocol.PROXY and self._node.config.localhost_app_tunnel:
            loopback = "::1" if ":" in address.host else "127.0.0.1"
            sock = await pod.connect(SocketAddress(loopback, address.port))
        else:
            source = client.host if pod.preserves_source[HBONE_PORT] else None
            sock = await pod.connect(address, source=source)
        return PlainSocket(sock, self._node.poller, fresh=True)

    # Tunnels of this very node

    async def join(
        self,
        outer: Live,
        who: Described,
        own: WorkloadCertificate,
        local: SocketAddress,
        authority: str,
        service: str | None,
    ) -> Joined | None:
        """Take a tunnel from a pod of this node without TLS and HTTP/2 in between.

        Both certificates must be there, valid, not revoked, and of one root and trust domain, as a handshake would
        want; and everything behind the handshake is as on the wire.

        Args:
            outer: the outbound half; both count the same bytes, and each knows the other's certificate.
            who: the pod it is in; ``own``: that pod's certificate.
            local: of this pod's addresses the one that would be dialled.
            authority: what the CONNECT would name; ``service``: what ``forwarded`` would.

        Returns:
            ``None``: over the wire, please.

        Raises:
            ConnectRefused: as over the wire.
        """
        pod = self._pod
        here, host = pod.local.current, _own_address(who.workload, outer.record.source.host, local.host)
        if here is None or host is None:
            return None
        there = await pod.certificate(here)
        if not _would_shake_hands(own, there, self._node.revocations):
            return None  # and the handshake says why
        if pod.join is None:
            return None  # the pod went meanwhile
        outer.peer = there
        described = self._node.described(here)
        client = SocketAddress(host, outer.record.source.port)
        peer = _Peer(client, local, None, (str(own.issued.identity),), own.issued.identity)
        record = Record(self._node, Direction.INBOUND, client, local)
        record.counts = outer.record.counts
        live = Live(record, ends_this_task())
        live.peer = own
        self._describe(record, peer, described, ((b"baggage", who.baggage),))
        record.source_workload, record.source_side = who.workload, who.secured_side
        try:
            application = await self._admit(live, described, authority, service, peer)
        except _Refusal as refusal:
            if refusal.early:
                record.denied_early(refusal.early)
            self.left(live, refusal.failure)
            raise ConnectRefused(refusal.status) from refusal
        except BaseException as error:
            self.left(live, of_reason(live.reason))
            task = asyncio.current_task()
            if live.reason == POLICY_CHANGE and task is not None and not task.uncancel():
                raise ConnectRefused(401) from error  # of the two halves' task only this one was meant
            raise
        return Joined(application, live, self)

    def left(self, live: Live, failure: Failed | None) -> None:
        """A connection is over."""
        self._pod.left(live, self._pod.inbound)
        live.record.complete(failure)

    # Plain connections

    async def _plain(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        """One captured connection of somebody outside the mesh."""
        node = self._node
        client = PlainSocket(sock, node.poller)
        node.sockets("destination", +1)
        record: Record | None = None
        failure: Failed | None = None
        live: Live | None = None
        try:
            found = sockets.original_destination(sock)
            source, destination = _address(peer), SocketAddress(str(found.ip), found.port)
            record = Record(node, Direction.INBOUND, source, destination)
            live = Live(record, ends_this_task())
            failure = await self._carry_plain(live, client, source, destination)
        except EarlyDeny as denial:
            assert record is not None
            record.denied_early(str(denial))
        except _Refusal as refusal:
            failure = refusal.failure
        except asyncio.CancelledError:
            failure = of_reason(live.reason if live is not None else "")
            raise
        except OSError as error:
            log.debug("a client was gone before its connection was looked at: %s", error)
        finally:
            self._pod.arrived(sock)
            client.close()
            node.sockets("destination", -1)
            if live is not None:
                self.left(live, failure)

    async def _carry_plain(
        self, live: Live, client: PlainSocket, source: SocketAddress, destination: SocketAddress
    ) -> Failed | None:
        node, pod, record = self._node, self._pod, live.record
        if destination.port in node.config.illegal_ports:
            raise EarlyDeny(RECURSIVE_CALL)
        who = await pod.local.get()
        workload = node.mesh.workload_at(node.config.network, source.host)
        if workload is not None:
            record.source_workload, record.source_side = workload, node.described(workload).side
        record.destination_workload, record.destination_side = who.workload, who.secured_side
        target = InboundTarget(destination)
        record.service = inbound_service(target, who.workload, node.mesh, None)
        live.actual = destination
        live.facts = ConnectionFacts(source=source, direct_source=source, destination=destination)
        pod.inbound[live] = None
        pod.arrived(client.sock)
        record.opened()
        await self._allowed(live, who.workload)
        preserved = source.host if pod.preserves_source[PLAINTEXT_PORT] else None
        try:
            sock = await pod.connect(destination, source=preserved)
            application = PlainSocket(sock, node.poller, fresh=True)
        except (TproxyError, OSError) as error:
            return _unreachable(error)
        try:
            running = relay(client, application, record.counts)
            live.ends_by(running.abort)
            ended = await running
            if live.reason:
                return of_reason(live.reason)
            if ended.error is not None:
                return of_relay(ended.error, from_client=ended.first is client)
            return None
        finally:
            application.close()

    # Change

    def _policies_changed(self, workload: Workload, policies: WorkloadPolicies) -> None:
        """Other policies judge this pod: every live connection is judged again."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if policies.missing:
            # A workload is announced before the policy it names. What runs goes on until the policy is here, or
            # until it has had its time to come.
            loop = asyncio.get_running_loop()
            self._again = loop.call_later(_POLICY_GRACE_S, self._judge_all, workload)
            return
        self._judge_all(workload)

    def _judge_all(self, workload: Workload) -> None:
        self._again = None
        workload = self._pod.local.current or workload
        for live in list(self._pod.inbound):
            # Who waits for its first judgement gets it by what is in force then.
            if live.admitted and live.facts is not None and not self._judge.still_allowed(workload, live.facts):
                record = live.record
                log.info(
                    "connection %s(%s)->%s (%s) closed because it's no longer allowed after a policy update",
                    record.source,
                    record.source_identity or "",
                    live.actual,
                    workload.uid,
                )
                live.end(POLICY_CHANGE)


def _address(name: tuple[str, int]) -> SocketAddress:
    return SocketAddress(canonical(name[0]), name[1])


def _own_address(workload: Workload, seen: str, towards: str) -> str | None:
    """What the pod of a workload would dial from: never the loopback or foreign address of who asked it to."""
    same_family = [host for host in workload.addresses if (":" in host) == (":" in towards)]
    return seen if seen in same_family else next(iter(same_family), None)


def _of_one_family(peer: _Peer, workload: Workload | None, destination: SocketAddress) -> SocketAddress:
    """The peer's address for a PROXY header, which has room for one family only.

    A service of two families may be dialled by one and its waypoint reached by the other. The header would be
    without addresses then (as upstream), which Envoy refuses; the peer's own address of the other one is as true.
    """
    source = peer.source
    if (":" in source.host) == (":" in destination.host):
        return source
    if workload is None or workload.identity != peer.identity:
        return source
    host = _own_address(workload, source.host, destination.host)
    return SocketAddress(host, source.port) if host is not None else source


def _first_identity(names: tuple[str, ...]) -> SpiffeId | None:
    for name in names:
        try:
            return SpiffeId.parse(name)
        except ValueError:
            continue
    return None


def _unreachable(error: Exception) -> Failed:
    if isinstance(error, ConnectTimedOut):
        return Failed("connection failed: deadline has elapsed")
    if isinstance(error, ConnectFailed):
        return Failed(f"connection failed: {io_text(error.error)}")
    return Failed(f"connection failed: {error}")


def _would_shake_hands(
    client: WorkloadCertificate, server: WorkloadCertificate, revocations: Revocations | None
) -> bool:
    """Whether two certificates of this node would accept each other."""
    now = datetime.now(UTC)
    if revocations is not None and any(is_revoked(revocations.current, each) for each in (client, server)):
        return False
    return (
        client.issued.identity.trust_domain == server.issued.identity.trust_domain
        and client.issued.roots_pem == server.issued.roots_pem
        and all(each.issued.not_before <= now <= each.issued.not_after for each in (client, server))
    )
