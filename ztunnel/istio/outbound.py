"""START HERE for what pods open: a captured connection to its end.

:meth:`Outbound.serve` reads top to bottom: who dials, where it goes, the tunnel or the plain connection, the
bytes. Until something has answered, an endpoint that fails is replaced by another one, within a few tries and a
time limit. The application's first bytes stay in the kernel meanwhile, also if they go along with a CONNECT, so
nothing is lost; and an endpoint that may have got them is not replaced, so nothing is delivered twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import assert_never

from hbone.aio.connection import Connection, connect
from hbone.aio.end import End
from hbone.aio.relay import LINGER_S, ByteCounts, Relay, relay
from hbone.aio.socket import PlainSocket
from hbone.errors import HboneError, TlsError, TlsReason
from hbone.events import Header, Headers
from hbone.headers import TraceParent, parse_baggage
from tproxy.aio import sockets
from tproxy.errors import TproxyError
from xds.model.address import SocketAddress, canonical, is_loopback
from xds.model.identity import SpiffeId
from xds.model.service import Service
from xds.model.workload import WorkloadUid
from ztunnel.dataplane.resolver import ResolveFailed
from ztunnel.istio import socks5
from ztunnel.istio.certificates.manager import IdentityError
from ztunnel.istio.config import HBONE_PORT
from ztunnel.istio.inbound import Joined
from ztunnel.istio.metrics import Side
from ztunnel.istio.node import Described
from ztunnel.istio.outcome import (
    RECURSIVE_CALL,
    EarlyDeny,
    Failed,
    described,
    of_reason,
    of_relay,
    worth_another_endpoint,
)
from ztunnel.istio.pod import Live, PodProxy, PoolKey, ends_this_task
from ztunnel.istio.record import Direction, Record
from ztunnel.istio.route import (
    Client,
    Direct,
    DoubleTunnel,
    Missing,
    Named,
    Route,
    RouteRefused,
    Tunnel,
    route_for,
)

log = logging.getLogger(__name__)

#: No further endpoint is tried after so long: the application has its own patience.
_PATIENCE_S = 15.0
#: A peer answers a CONNECT when it has reached its application, which it gives ten seconds. Not less than the
#: patience: after this limit nobody knows whether the application has got the first bytes.
_ANSWER_S = 15.0
#: Between looks at whether an inner tunnel's last bytes are on their way (a guess).
_LOOK_S = 0.01
#: Things one decision may need to be told about, on demand.
_MOST_QUESTIONS = 8

_DIAL_ERRORS = (HboneError, TproxyError, IdentityError, OSError)


@dataclass(slots=True, eq=False)
class Opened:
    """An open upstream: the end for the relay, and what closes after it.

    Attributes:
        joined: the inbound side, when the tunnel never left this node.
        last_words: carries what has left ``end`` and is still inside this process; without, nothing is.
    """

    end: End
    closing: list[Callable[[], object]] = field(default_factory=list)
    joined: Joined | None = None
    last_words: Callable[[], Awaitable[None]] | None = None

    def close(self) -> None:
        """Close everything, the end first."""
        self.end.close()
        for close in self.closing:
            close()


class Outbound:
    """Connections that one pod opens."""

    def __init__(self, pod: PodProxy) -> None:
        self._pod = pod
        self._node = pod.node

    # Accepting

    def accepted(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        """A captured connection; returns at once."""
        self._pod.tasks.run(self._node.poller, self._captured(sock, peer), "outbound")

    def accepted_socks(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        """A SOCKS5 client; returns at once."""
        self._pod.arriving.add(sock)
        self._pod.tasks.run(self._node.poller, self._socks(sock, peer), "socks5")

    async def _captured(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        client = PlainSocket(sock, self._node.poller)
        try:
            found = sockets.original_destination(sock)
            source = SocketAddress(canonical(peer[0]), peer[1])
            await self.serve(client, source, SocketAddress(str(found.ip), found.port))
        except OSError as error:
            log.debug("a client was gone before its connection was looked at: %s", error)
        finally:
            client.close()

    async def _socks(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        client = PlainSocket(sock, self._node.poller)
        try:
            destination = await socks5.accept(client, self._pod.resolve_name)
            self._pod.arrived(sock)  # into the table, in this very step
            if destination is not None:
                await self.serve(client, SocketAddress(canonical(peer[0]), peer[1]), destination)
        except OSError as error:
            log.debug("a SOCKS client: %s", error)
        finally:
            self._pod.arrived(sock)
            client.close()

    # One connection

    async def serve(self, client: PlainSocket, source: SocketAddress, destination: SocketAddress) -> None:
        """Carry a connection to where it belongs, and account for it. The caller closes ``client``."""
        node, pod = self._node, self._pod
        record = Record(node, Direction.OUTBOUND, source, destination)
        live = Live(record, ends_this_task())
        live.original = str(destination)
        failure: Failed | None = None
        node.sockets("source", +1)
        pod.outbound[live] = None
        try:
            failure = await self._carry(live, client, destination)
        except EarlyDeny as denial:
            record.denied_early(str(denial))
        except Failed as error:
            failure = error
        except asyncio.CancelledError:
            failure = of_reason(live.reason)
            raise
        finally:
            node.sockets("source", -1)
            pod.left(live, pod.outbound)
            record.complete(failure)

    async def _carry(self, live: Live, client: PlainSocket, destination: SocketAddress) -> Failed | None:
        if destination.port in self._node.config.illegal_ports and is_loopback(destination.host):
            raise EarlyDeny(RECURSIVE_CALL)
        record = live.record
        who = await self._pod.local.get()
        record.source_workload, record.source_side = who.workload, who.side
        upstream = await self._open(live, who, destination, client)
        record.settled()
        failure = None
        try:
            running = relay(client, upstream.end, record.counts)
            live.ends_by(running.abort)
            if upstream.joined is not None:
                upstream.joined.live.ends_by(running.abort)
            ended = await running
            if ended.error is not None:
                failure = of_relay(ended.error, from_client=ended.first is client)
            if upstream.last_words is not None and not live.reason:
                await upstream.last_words()
        finally:
            upstream.close()
            if upstream.joined is not None:
                failure = upstream.joined.finish(failure)
        return failure

    # Where to

    async def _open(
        self, live: Live, who: Described, destination: SocketAddress, application: PlainSocket
    ) -> Opened:
        """Decide and dial, again with another endpoint when one fails.

        Raises:
            EarlyDeny: there is no way.
            Failed: there is one, but it could not be opened.
        """
        node, record = self._node, live.record
        client = Client(workload=who.workload, host=record.source.host, network=node.config.network)
        give_up_s = node.clock.monotonic() + _PATIENCE_S
        tries_left = node.config.connect_retries
        failed: set[WorkloadUid] = set()
        tried: set[SocketAddress] = set()
        failure: Failed | None = None
        while True:
            avoid = node.suspects.current(node.clock.monotonic())
            try:
                route = await self._route(client, destination, avoid.union(failed) if failed else avoid)
                route, target = await self._addressed(route, who, destination)
            except EarlyDeny as denial:
                if failure is not None:  # the last endpoint is gone: what it failed with says more
                    raise failure from denial
                raise
            if failure is not None and target in tried:
                raise failure
            tried.add(target)
            _note(live, route, target, who, node.described)
            if failure is None:
                record.opened(settled=False)
            else:
                node.metrics.connect_retries += 1
            try:
                return await self._dial(live, route, target, who, application)
            except _DIAL_ERRORS as error:
                tunnel = not isinstance(route, Direct)
                if isinstance(error, TlsError) and error.reason is TlsReason.REVOKED and not error.by_peer:
                    node.metrics.crl_rejections["source"] += 1
                failure = described(error, tunnel=tunnel)
                uid = route.workload.uid if route.workload is not None else None
                if uid is None or not worth_another_endpoint(error):
                    raise failure from error
                if node.config.connect_retries:  # without, a draw is a draw, as upstream's
                    node.suspects.add(uid, node.clock.monotonic())
                failed.add(uid)
                tries_left -= 1
                if tries_left < 0 or node.clock.monotonic() > give_up_s:
                    raise failure from error
                log.debug("%s failed, another endpoint is tried: %s", target, failure)

    async def _route(self, client: Client, destination: SocketAddress, avoid: frozenset[WorkloadUid]) -> Route:
        node = self._node
        known = node.asked.__contains__ if node.ask is not None else None
        for _ in range(_MOST_QUESTIONS):
            try:
                return route_for(client, destination, node.mesh, node.rng.randrange, avoid=avoid, known=known)
            except RouteRefused as refused:
                raise EarlyDeny(str(refused)) from refused
            except Missing as missing:
                try:
                    await node.told(missing.key)
                except TimeoutError as error:
                    raise EarlyDeny(f"the control plane did not answer about {missing.key} in time") from error
        raise EarlyDeny(f"no valid routing destination for workload: {destination}")

    async def _addressed(
        self, route: Route, who: Described, dialled: SocketAddress
    ) -> tuple[Route, SocketAddress]:
        """The route with an address to dial, its host name resolved if that is what it has."""
        target = route.target
        if isinstance(target, SocketAddress):
            return route, target
        address = await self._resolved(target, who, dialled)
        return route.at(address.host) if isinstance(route, Tunnel) else route, address

    async def _resolved(self, target: Named, who: Described, dialled: SocketAddress) -> SocketAddress:
        node, uid = self._node, target.workload.uid
        labels = (*(value or "unknown" for value in who.side[:8]), target.hostname)
        node.metrics.on_demand_dns[labels] = node.metrics.on_demand_dns.get(labels, 0) + 1
        try:
            addresses = await node.names.resolve(target.hostname, target.families)
        except ResolveFailed as error:
            raise EarlyDeny(f"dns lookup: {error}") from error
        same = [address for address in addresses if (":" in address) == (":" in dialled.host)]
        if not addresses:
            raise EarlyDeny(f"no ip addresses were resolved for workload: {uid}")
        return SocketAddress(random.choice(same or list(addresses)), target.port)

    # Dialling

    async def _dial(
        self, live: Live, route: Route, target: SocketAddress, who: Described, application: PlainSocket
    ) -> Opened:
        match route:
            case Direct():
                return Opened(PlainSocket(await self._pod.connect(target), self._node.poller, fresh=True))
            case Tunnel():
                joined = await self._join(live, route, target, who)
                if joined is not None:
                    return Opened(joined.end, joined=joined)
                tunnel = await self._tunnel(target, route.identities, route.authority, live, who, application)
                return Opened(tunnel)
            case DoubleTunnel():
                return await self._double(live, route, target, who)
            case _:
                assert_never(route)

    async def _tunnel(
        self,
        target: SocketAddress,
        identities: tuple[str, ...],
        authority: str,
        live: Live,
        who: Described,
        application: PlainSocket | None = None,
    ) -> End:
        certificate = await self._pod.certificate(who.workload)
        key = PoolKey(target, identities, certificate, certificate.generation)
        async with asyncio.timeout(_ANSWER_S):
            tunnel = await self._pod.pool.open(key, _request(authority, live.record, who), application)
        live.connection = tunnel.connection
        return tunnel

    async def _double(self, live: Live, route: DoubleTunnel, target: SocketAddress, who: Described) -> Opened:
        """A tunnel inside a tunnel: TLS and HTTP/2 again, end to end with the far side, never shared.

        The inner connection runs over a socket pair whose other half is relayed into the outer tunnel: a copy
        through the kernel more, for traffic that leaves the network anyway.
        """
        node, record = self._node, live.record
        outer = await self._tunnel(target, route.identities, route.authority, live, who)
        near, far = socket.socketpair()
        for sock in (near, far):
            sock.setblocking(False)
        carrier = PlainSocket(far, node.poller)
        carrying = relay(carrier, outer, ByteCounts())
        closing: list[Callable[[], object]] = [
            lambda: carrying.abort("the inner tunnel ended"),
            carrier.close,
            outer.close,
        ]
        try:
            certificate = await self._pod.certificate(who.workload)
            context = certificate.client_context(route.inner_identities)
            inner = await connect(near, context, node.client_settings, node.poller)
            closing.insert(0, inner.close)
            live.inner = inner
            network = (b"x-forwarded-network", node.config.network.encode())
            async with asyncio.timeout(_ANSWER_S):
                tunnel = await inner.open((*_request(route.authority, record, who), network))
        except BaseException:
            for close in closing:
                close()
            near.close()
            raise
        self._learned(record, inner, tunnel.headers)

        async def last_words() -> None:
            live.ends_by(carrying.abort)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await _carried_away(inner, near, carrying)

        return Opened(tunnel, closing, last_words=last_words)

    @staticmethod
    def _learned(record: Record, inner: Connection, headers: Headers) -> None:
        """The far side says who it is only now."""
        names = inner.facts.uri_sans if inner.facts is not None else ()
        record.destination_workload = None
        record.destination_identity = SpiffeId.parse(names[0]) if names else None
        record.destination_side = Side.of_baggage(parse_baggage(headers), names[0] if names else "")

    async def _join(self, live: Live, route: Tunnel, target: SocketAddress, who: Described) -> Joined | None:
        """The inbound side of a pod of this node, without the wire between."""
        node = self._node
        if not node.config.node_local_shortcut or target.port != HBONE_PORT:
            return None
        workload = route.workload
        pod = node.pods.get((workload.namespace, workload.name, workload.service_account))
        if pod is None or pod.join is None or target.host not in workload.addresses:
            return None
        own = await self._pod.certificate(who.workload)
        service = route.service.hostname if route.service is not None else None
        return await pod.join(live, who, own, target, route.authority, service)


async def _carried_away(inner: Connection, near: socket.socket, carrying: Relay) -> None:
    """Let an inner connection that is over reach the far side, and the outer tunnel end after it.

    To close at once, as upstream does, loses what waits in the socket pair, and a gateway that sees a reset drops
    what it has not passed on. There is no close_notify: GOAWAY has said it, and what comes until the far side ends
    must still be read.
    """
    inner.engine.goaway()
    inner.flush()
    # A connection tells nobody that its last byte has left, and this one is not shared.
    while inner.error is None and (inner.link.unsent_bytes or inner.engine.output.borrows):  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    if inner.error is None:
        with contextlib.suppress(OSError):  # the outer tunnel broke meanwhile
            near.shutdown(socket.SHUT_WR)
    await carrying


def _note(
    live: Live,
    route: Route,
    target: SocketAddress,
    who: Described,
    describe: Callable[..., Described],
) -> None:
    """Enter the decision in the record and the table."""
    record = live.record
    record.destination = target
    record.service = route.service
    record.destination_workload = route.workload
    record.hbone_authority = "" if isinstance(route, Direct) else route.authority
    record.secured = not isinstance(route, Direct)
    if route.workload is not None:
        # The principal is the destination's whether or not it is proven (as upstream).
        record.destination_side = describe(route.workload).secured_side
        record.destination_identity = route.workload.identity
    if record.secured:
        record.source_identity = who.workload.identity
        record.source_side = who.secured_side
    live.connection = live.inner = live.peer = None  # of an attempt before
    live.protocol = "TCP" if not record.secured else "DOUBLEHBONE" if isinstance(route, DoubleTunnel) else "HBONE"


def _request(authority: str, record: Record, who: Described) -> tuple[Header, ...]:
    """The CONNECT of a tunnel, fields in upstream's order."""
    service: Service | None = record.service
    forwarded = f'for="{record.source}"' + (f";host={service.hostname}" if service is not None else "")
    noise = os.urandom(24)
    return (
        (b":method", b"CONNECT"),
        (b":authority", authority.encode()),
        (b"baggage", who.baggage),
        (b"forwarded", forwarded.encode()),
        (b"traceparent", TraceParent(noise[:16], noise[16:]).encode()),
    )
