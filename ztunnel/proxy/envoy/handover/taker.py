"""The taking side of a hand-over in Envoy's dialect: rebuilds offered units, and continues them.

Names in an offer are looked up in the configuration of this process. A unit is declined if its listener, filter
chain or cluster is missing, or if the filter chain now has another kind (TCP or tunnel). A unit that was taken
over is at once checked against the current filters and policies.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.end import End
from hbone.aio.handover import Resumed, resumed
from hbone.aio.poller import Poller
from hbone.aio.relay import Relay
from hbone.aio.requests import Requests
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectionBroken
from xds.model.address import InternalAddress
from xds.model.cluster import Endpoint
from xds.model.http import Route
from ztunnel.proxy.dataplane.handover import messages
from ztunnel.proxy.dataplane.handover.taker import Declining
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.pool_key import PoolKey
from ztunnel.proxy.dataplane.upstream import Upstream
from ztunnel.proxy.envoy.handover.messages import AcceptedValue, DialledValue, HopValue, Kind, Offer
from ztunnel.proxy.envoy.handover.values import info_of
from ztunnel.proxy.envoy.listeners.chains import LiveChain
from ztunnel.proxy.envoy.listeners.connections import Connections, InnerHop, LiveConnection, LiveHop, LiveRequest
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.listeners.table import ListenerTable
from ztunnel.proxy.envoy.path.connect import Connector, request_open
from ztunnel.proxy.envoy.path.dial import ClusterUpstream, CountedConnection, count_end, count_open
from ztunnel.proxy.envoy.path.tcp_proxy import TcpProxies, idle_timeout_s
from ztunnel.proxy.envoy.path.terminate import RequestRefused, TunnelRules, tunnel_route
from ztunnel.proxy.envoy.path.tunnel_pools import TunnelKey
from ztunnel.proxy.envoy.path.tunnel_server import Served, TunnelServer
from ztunnel.proxy.envoy.stream.outcome import NOT_SERVED, Refused
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster
from ztunnel.proxy.envoy.upstream.host import Host
from ztunnel.proxy.envoy.upstream.manager import ClusterManager
from ztunnel.runtime.clock import Clock

log = logging.getLogger(__name__)

_CHANGED = "its filter chain has changed"

#: Registers further policy checks of a hop whose chain, cluster and host are known; see
#: :meth:`ztunnel.proxy.envoy.path.calico.Enforcer.watch`.
Watch = Callable[[LiveHop, Host], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The objects of this process that carry connections.

    Attributes:
        listeners, clusters: the active configuration.
        connections: the table of all live connections.
        connector: owns the pools.
        proxies, tunnels: continue the connections of TCP and tunnel chains.
        rules: checks which targets requests can name.
        run: runs the coroutine that carries a connection to its end.
        objection: returns why this process cannot take units now, or an empty text if it can.
        watch: registers checks by Calico's policies, if there are any.
    """

    listeners: ListenerTable
    clusters: ClusterManager
    connections: Connections
    connector: Connector
    proxies: TcpProxies
    tunnels: TunnelServer
    rules: TunnelRules
    poller: Poller
    clock: Clock
    run: Callable[[Coroutine[Any, Any, None], str], object]
    objection: Callable[[], str]
    watch: Watch | None


class Hop(NamedTuple):
    """A hop that continues in this process: the received description, and the matching configuration here."""

    value: HopValue
    info: StreamInfo
    listener: LiveListener
    chain: LiveChain
    cluster: LiveCluster | None
    host: Host | None

    @property
    def place(self) -> tuple[LiveCluster, Host]:
        """The cluster and the host that the connection was opened to.

        Raises:
            ValueError: the hop has no cluster and host, because it is a tunnel connection.
        """
        if self.cluster is None or self.host is None:
            raise ValueError("a relay to no host")
        return self.cluster, self.host


async def make(parts: Parts, offer: messages.Offer, socks: list[socket.socket]) -> Pending:
    """Build the unit described by an offer, using the offer's sockets; implements
    :data:`ztunnel.proxy.dataplane.handover.taker.Make`.
    """
    if not isinstance(offer, Offer):
        raise Declining("an offer of another dialect")
    objection = parts.objection()
    if objection:
        raise Declining(objection)
    _check(offer)
    carrier = offer.carrier
    served: Served | None = None
    requests: Requests | None = None
    accepted: Hop | None = None
    key: tuple[LiveCluster, TunnelKey] | None = None
    settings: ConnectionSettings = default_client()
    if isinstance(carrier, AcceptedValue):
        accepted = _hop(parts, carrier.hop, None)
        served = Served(accepted.chain)
        requests = parts.tunnels.requests_of(served)
        settings = parts.tunnels.settings_for(accepted.chain)
    hops = [[_hop(parts, value, accepted) for value in values] for values in offer.relays]
    unit: Resumed
    if isinstance(carrier, DialledValue):
        cluster = _cluster(parts, carrier.cluster)
        settings = parts.connector.tunnels.settings_for(cluster)
        unit = resumed(offer.unit, socks, settings, parts.poller, None)
        try:
            assert unit.connection is not None
            key = cluster, _key(cluster, carrier, unit.connection)
        except BaseException:
            _discard(unit, socks)
            raise
    else:
        unit = resumed(offer.unit, socks, settings, parts.poller, requests)
    try:
        return Pending(parts, unit, hops, carrier, served, accepted, requests, key)
    except BaseException:
        _discard(unit, socks)
        raise


def _discard(unit: Resumed, socks: list[socket.socket]) -> None:
    unit.discard()
    socks.clear()


def _check(offer: Offer) -> None:
    """Check that an offer is consistent.

    Raises:
        ValueError: parts of the offer contradict each other.
    """
    carrier, unit = offer.carrier, offer.unit
    if len(offer.relays) != len(unit.relays) or (carrier is None) != (unit.carrier is None):
        raise ValueError("other relays or tunnel connections than the unit's")
    if carrier is None and len(offer.relays) != 1:
        raise ValueError("several relays of plain sockets")
    first = Kind.REQUEST if isinstance(carrier, AcceptedValue) else Kind.CONNECTION
    for values in offer.relays:
        if not values or values[0].kind is not first:
            raise ValueError("a relay without a connection")
        if any(value.kind not in (Kind.INNER, Kind.JOINED) for value in values[1:]):
            raise ValueError("a relay of several connections")
        if any(value.kind is Kind.JOINED for value in values[1:-1]) or (
            carrier and values[-1].kind is Kind.JOINED
        ):
            raise ValueError("a tunnel within the node that leads on")
    if isinstance(carrier, AcceptedValue) and carrier.hop.kind is not Kind.CONNECTION:
        raise ValueError("a tunnel connection that nothing has accepted")


def _cluster(parts: Parts, name: str) -> LiveCluster:
    cluster = parts.clusters.get(name)
    if cluster is None:
        raise Declining("its cluster is not known")
    return cluster


def _hop(parts: Parts, value: HopValue, accepted: Hop | None) -> Hop:
    """Look up the listener, chain and cluster of a hop received from another process.

    Args:
        accepted: the accepted connection on which the hop, a request, has arrived. ``None`` for other hops.

    Raises:
        Declining: this process lacks the hop's listener, chain or cluster.
        ValueError: the received description is malformed.
    """
    connection_id = accepted.info.connection_id if accepted is not None else next(parts.connections.ids)
    info = info_of(value.info, connection_id, parts.clock.monotonic())
    if accepted is not None:
        listener, chain = accepted.listener, accepted.chain
        info.tls = accepted.info.tls
        if info.facts == accepted.info.facts:
            info.facts = accepted.info.facts  # the requests of a connection share them
    else:
        listener, chain = _place(parts, value.kind, info)
    info.listener_metadata, info.chain_metadata = listener.model.metadata, chain.model.metadata
    info.manager = chain.manager.model if value.kind in (Kind.REQUEST, Kind.JOINED) and chain.manager else None
    if not info.cluster:
        return Hop(value, info, listener, chain, None, None)
    cluster = _cluster(parts, info.cluster)
    info.cluster_metadata = cluster.model.metadata
    if info.endpoint is None:
        raise ValueError("a hop to a cluster without a host")
    host = cluster.host_at(info.endpoint)
    info.endpoint = host.endpoint
    return Hop(value, info, listener, chain, cluster, host)


def _place(parts: Parts, kind: Kind, info: StreamInfo) -> tuple[LiveListener, LiveChain]:
    """Return the current listener and filter chain of a hop.

    Raises:
        Declining: the listener or the chain does not exist any more, or the chain has another kind.
    """
    inner = kind is Kind.INNER
    listener = parts.listeners.internal(info.listener) if inner else parts.listeners.get(info.listener)
    if listener is None:
        raise Declining("its listener is not known")
    chain = listener.chain_for(info.facts)
    if chain is None:
        raise Declining("no filter chain for it")
    if not chain.is_complete:
        raise Declining("a filter of its chain has not arrived")
    if chain.name != info.chain or (chain.tls is None) is not (info.tls is None):
        raise Declining(_CHANGED)
    tunnels = kind is Kind.JOINED or info.protocol == "HTTP/2"
    if (chain.manager is None) is tunnels or (inner and not chain.takes_internal):
        raise Declining(_CHANGED)
    return listener, chain


def _key(cluster: LiveCluster, carrier: DialledValue, connection: Connection) -> TunnelKey:
    """Return the key of a connection in its cluster's pool.

    Raises:
        Declining: the host is no longer in the cluster, or its certificate cannot be trusted.
    """
    host = cluster.host_at(Endpoint(address=carrier.address))
    context, facts = cluster.transport_of(host).context, connection.facts
    if (context is None) is not (facts is None):
        raise Declining("its cluster's transport socket has changed")
    generation = 0
    if context is not None and facts is not None:
        if context.has_revoked(facts.chain):
            raise Declining("its peer is revoked")
        # If the current TLS context could verify the peer only by a new handshake, the connection continues, but
        # gets no new tunnels.
        generation = context.generation if context.trusts(facts) else -1
    return PoolKey(carrier.address, context, generation, carrier.options)


class Pending:
    """An offered unit that has been rebuilt but not started. Either :meth:`start` or :meth:`discard` is called,
    once.
    """

    def __init__(
        self,
        parts: Parts,
        unit: Resumed,
        hops: list[list[Hop]],
        carrier: AcceptedValue | DialledValue | None,
        served: Served | None,
        accepted: Hop | None,
        requests: Requests | None,
        key: tuple[LiveCluster, TunnelKey] | None,
    ) -> None:
        self._parts = parts
        self._unit = unit
        self._hops = hops
        self._carrier = carrier
        self._served = served
        self._accepted = accepted
        self._requests = requests
        self._key = key
        self._routes = [self._route_of(each[0]) for each in hops]
        for index, each in enumerate(hops):
            for hop in each:
                _ = hop.place  # checked here, because start() must not fail
            unit.idle_timeouts_s[index] = self._idle_timeout_s(each, self._routes[index])

    @property
    def entries(self) -> int:
        """The number of pod connections in this unit."""
        return len(self._hops)

    def _route_of(self, hop: Hop) -> Route | None:
        manager = hop.chain.manager
        if hop.value.kind is not Kind.REQUEST or manager is None:
            return None
        try:
            return tunnel_route(manager.model, manager.routes, hop.info)
        except RequestRefused:
            return None  # routes apply only to new requests

    def _idle_timeout_s(self, hops: Sequence[Hop], route: Route | None) -> float | None:
        first, *further = hops
        manager, proxy = first.chain.manager, first.chain.proxy
        if manager is not None:
            return self._parts.tunnels.idle_timeout_s(manager, route)
        assert proxy is not None
        return idle_timeout_s(proxy, further)

    def discard(self) -> None:
        """Discard the rebuilt unit, because the other process keeps the connections."""
        self._unit.discard()

    def start(self) -> None:
        """Start to carry the unit's connections, which belong to this process from now on."""
        unit = self._unit
        life = self._register_accepted()
        # Register the hops before checking policies, so that a policy change in between finds the hops, and their
        # end is counted.
        lives = [self._register(hops, ends) for hops, ends in zip(self._hops, unit.ends, strict=True)]
        try:
            unit.start()
        except ConnectionBroken as error:
            log.error("a connection was lost while it was taken over error=%s", error)
            unit.discard()
        self._serve_connection(life)
        for number, (first, ends) in enumerate(zip(lives, unit.ends, strict=True)):
            relay = unit.relays[number] if number < len(unit.relays) else None
            self._serve_relay(number, first, ends, relay)
        for first in lives:
            upstream = first.upstream
            for hop in (first, *(upstream.hops if upstream is not None else ())):
                self._judge(hop)
        if life is not None:
            self._judge(life)

    def _judge(self, life: LiveHop) -> None:
        """Check a hop against the current configuration. The hop's listener can already be missing there."""
        connections = self._parts.connections
        if life.state is State.CLOSED:
            return
        if self._parts.listeners.get(life.info.listener) is not life.owner.latest:
            life.end(NOT_SERVED)
        elif isinstance(life, LiveConnection):
            connections.judge(life)
        else:
            connections.hops.judge(life)

    # The tunnel connection

    def _register_accepted(self) -> LiveConnection | None:
        hop, served, connection = self._accepted, self._served, self._unit.connection
        if hop is None or served is None or connection is None:
            return None
        life = self._connection(hop, partial(connection.abort, "no longer served"))
        life.port_known = not self._parts.rules.judge_ports
        served.connection = life
        return life

    def _serve_connection(self, life: LiveConnection | None) -> None:
        connection, parts = self._unit.connection, self._parts
        if connection is None:
            return
        if life is not None:
            assert self._served is not None
            assert self._requests is not None
            self._served.opened(connection)
            work = _then_close(life, parts.tunnels.serve_moved(self._served, self._requests, connection))
            parts.run(work, f"{life.id} moved")
        elif isinstance(self._carrier, DialledValue) and self._key is not None:
            tunnels = [end for pair in self._unit.ends for end in pair if isinstance(end, Tunnel)]
            cluster, key = self._key
            parts.connector.tunnels.adopt(
                connection, cluster, key, tunnels, idle_s=self._carrier.idle_s, age_s=self._carrier.age_s
            )
            if parts.clusters.get(cluster.model.name) is not cluster:  # replaced since the unit was made
                pool = parts.connector.tunnels.retire(cluster)
                if pool is not None:
                    pool.drain()

    # A relay

    def _register(self, hops: Sequence[Hop], ends: tuple[End, End]) -> LiveHop:
        """Register the hops of a relay. Return the first hop; its ``upstream`` contains the other hops."""
        lives = [self._life(hop, ends) for hop in hops]
        for outer, inner in pairwise(hops):
            outer.info.behind = inner.info
        upstream: ClusterUpstream = Upstream(ends[1])
        upstream.hops = tuple(lives[1:])
        for index in reversed(range(len(hops))):
            upstream.on_close(self._counted(hops, index, upstream))
            if index:
                upstream.on_close(lives[index].close)
        lives[0].upstream = upstream
        return lives[0]

    def _life(self, hop: Hop, ends: tuple[End, End]) -> LiveHop:
        """Register one hop."""
        parts, info, listener, chain = self._parts, hop.info, hop.listener, hop.chain
        life: LiveHop
        match hop.value.kind:
            case Kind.CONNECTION:
                life = self._connection(hop, ends[0].close)
            case Kind.REQUEST:
                assert self._served is not None
                life = parts.tunnels.register(self._served, info, None, came=True)
            case Kind.INNER:
                life = InnerHop(parts.connections.hops, info, listener, parts.clock, None, came=True)
            case Kind.JOINED:
                port_known = not parts.rules.judge_ports
                life = LiveHop(parts.connections.hops, info, listener, parts.clock, port_known=port_known)
                life.account = parts.connections.account
                assert chain.manager is not None
                chain.manager.rq_active.stored += 1
                life.own(chain.manager.request_ended)
        life.chain, life.cluster, life.application = chain, hop.cluster, hop.value.application
        if hop.value.kind is not Kind.CONNECTION and hop.value.kind is not Kind.REQUEST:
            life.filter_sinks = chain.sinks
            chain.hold(info)
        if parts.watch is not None and hop.host is not None:
            try:
                parts.watch(life, hop.host)
            except Refused as error:
                life.end(error.details or NOT_SERVED)
        return life

    def _connection(self, hop: Hop, release: Callable[[], object]) -> LiveConnection:
        parts, info, chain = self._parts, hop.info, hop.chain
        life = LiveConnection(
            parts.connections, info, hop.listener, parts.clock, None, hop.value.pod, release, came=True
        )
        life.chain = chain
        if chain.manager is None:
            life.filter_sinks = chain.sinks
        chain.hold(info)
        return life

    def _counted(self, hops: Sequence[Hop], index: int, upstream: ClusterUpstream) -> Callable[[], object]:
        """Count a hop's open connection or request in its cluster. Return a function that counts the end."""
        hop = hops[index]
        cluster, host = hop.place
        within = index + 1 < len(hops) and hops[index + 1].value.kind is Kind.JOINED
        if within or (isinstance(upstream.end, Tunnel) and not isinstance(host.endpoint.address, InternalAddress)):
            return request_open(cluster, host)
        count_open(cluster, host)
        counted = CountedConnection(cluster, self._parts.poller, hop.value.info.age_s)
        return lambda: count_end(cluster, host, counted, upstream)

    def _serve_relay(self, number: int, first: LiveHop, ends: tuple[End, End], relay: Relay | None) -> None:
        parts, info = self._parts, first.info
        if relay is None:
            info.termination_details = info.response_details = "connection lost on its way from another process"
            upstream = first.upstream
            assert upstream is not None
            upstream.close()
            first.close()
            return
        # Mark the hops as open now. If this waited for the fiber's first step, a policy change in between would
        # treat the hops as not yet open.
        first.opened(relay.abort, finish=relay.finish)
        for inner in first.upstream.hops if first.upstream is not None else ():
            inner.opened(relay.abort, state=State.JOINED, finish=relay.finish)
        if isinstance(first, LiveRequest):
            tunnel, requests, served = ends[0], self._requests, self._served
            assert isinstance(tunnel, Tunnel)
            assert requests is not None
            assert served is not None
            requests.adopt(tunnel, parts.tunnels.carry_moved(served, first, tunnel, relay, self._routes[number]))
        elif isinstance(first, LiveConnection) and first.chain is not None and first.chain.proxy is not None:
            work = parts.proxies.carry_moved(first, first.chain.proxy, ends, relay)
            parts.run(_then_close(first, work), f"{first.id} moved")


async def _then_close(life: LiveConnection, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    finally:
        life.close()
