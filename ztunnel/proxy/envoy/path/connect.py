"""Opens the upstream of a hop and its TCP proxy: picks a cluster and a host, opens a socket or a tunnel.

If the endpoint is an internal listener, the connection continues in this process: the inner hop is a second
:class:`LiveHop` with its own counters and log line, but no bytes are copied between the two hops. With the
node-local shortcut, a tunnel to a pod of this node continues in this process at the pod's inbound filter chain,
which checks it like a tunnel from the network.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, assert_never

from hbone.aio.answers import OnAnswer
from hbone.aio.end import End
from hbone.aio.poller import Poller
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectRefused, HboneError, PoolClosed
from hbone.pool import PoolFull
from tproxy.errors import TproxyError
from xds.model.address import InternalAddress, NamedAddress, PipeAddress, SocketAddress
from xds.model.cluster import InternalUpstream, TransportSocket
from xds.model.facts import ConnectionFacts
from ztunnel.proxy.dataplane.attempts import Attempts, GiveUp
from ztunnel.proxy.dataplane.attempts import Reason as GivenUp
from ztunnel.proxy.dataplane.live_table import Abort, cancels_current_task
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.dataplane.upstream import Upstream
from ztunnel.proxy.envoy.listeners.chains import LiveTcpProxy
from ztunnel.proxy.envoy.listeners.connections import LiveHop
from ztunnel.proxy.envoy.listeners.plans import Plan, TunnelRequest
from ztunnel.proxy.envoy.path.dial import (
    ClusterUpstream,
    CountedConnection,
    Dialler,
    count_end,
    count_failure,
    count_request,
    failure_of,
    with_header,
)
from ztunnel.proxy.envoy.path.internal import Entry, InternalListeners
from ztunnel.proxy.envoy.path.opening import Choice, Opening
from ztunnel.proxy.envoy.path.tunnel_pools import TunnelPools
from ztunnel.proxy.envoy.path.tunnel_request import request_for
from ztunnel.proxy.envoy.stream.outcome import Denied, NoCluster, Overflow, Refused, UpstreamFailed
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, LiveTransport
from ztunnel.proxy.envoy.upstream.host import Host
from ztunnel.proxy.envoy.upstream.manager import ClusterManager
from ztunnel.proxy.envoy.upstream.outlier import Result
from ztunnel.proxy.flows.times import ConnectionTimes

log = logging.getLogger(__name__)

INVALID_ARGUMENT = "Invalid argument"
NO_ADDRESS = "endpoint has no address yet"
NO_HTTP2 = "tunnels need HTTP/2, which the cluster does not speak"
CLUSTER_OVERRIDE = "envoy.tcp_proxy.cluster"
DISABLE_TUNNELING = "envoy.tcp_proxy.disable_tunneling"
RESPONSE_HEADERS = "envoy.tcp_proxy.propagate_response_headers"
_CLIENT_ADDRESS = "envoy://internal_client_address/"


#: Labels that addons prefer. A host is preferred if it has all these labels; see
#: :mod:`ztunnel.proxy.addons.decide`.
Labels = frozenset[tuple[str, str]]
#: An additional check of a host before a connection to it is opened. It raises ``Denied`` to refuse the host.
AdmitsHost = Callable[[LiveHop, LiveTcpProxy, Host], Awaitable[None]]


class _Replaced(Exception):
    """The cluster was replaced or removed during an attempt, before the attempt had sent its request."""


class Connector:
    """Opens upstreams.

    Args:
        clusters: looks up clusters by name.
        dialler: opens sockets.
        internal: opens connections to internal listeners and, for node-local tunnels, to inbound filter chains.
        poller: this loop's poller.
        rng: picks among weighted clusters.
        keep_client_address: whether tunnels behind an internal listener keep the client's address, which Envoy
            loses (``tunnel_source``).
        times: records the durations of handshakes.
        early_data: whether to send the first bytes of a connection along with its CONNECT, if the peer announces
            that it buffers these bytes.
        admit: an additional check of a host. ``None`` disables it.
    """

    def __init__(
        self,
        clusters: ClusterManager,
        dialler: Dialler,
        internal: InternalListeners,
        poller: Poller,
        rng: random.Random,
        *,
        times: ConnectionTimes,
        keep_client_address: bool,
        early_data: bool,
        admit: AdmitsHost | None = None,
    ) -> None:
        self._clusters = clusters
        self._dialler = dialler
        self._internal = internal
        self._poller = poller
        self._rng = rng
        self._times = times
        self._keep_client_address = keep_client_address
        self._admit = admit
        self.tunnels = TunnelPools(dialler, poller, times, early_data=early_data)

    # Opening the upstream of a TCP proxy, step by step

    async def open(
        self, hop: LiveHop, proxy: LiveTcpProxy, client: End | None = None, begun: Opening | None = None
    ) -> ClusterUpstream:
        """Connect a hop to a host of its cluster. The filter's configuration limits the number of attempts.

        Args:
            hop: the connection.
            proxy: the TCP proxy filter of the connection.
            client: the downstream end, for sending its first bytes along with a CONNECT.
            begun: the first attempt, from :meth:`begin`.

        Raises:
            Refused: no attempt succeeded. ``hop`` has the flags.
        """
        info, model = hop.info, proxy.model
        tunnelled = tunnels(proxy, info) if begun is None else begun.tunnelled
        cluster = self._cluster_of(hop, proxy, tunnelled=tunnelled) if begun is None else begun.cluster
        subset = info.subset
        # Like Envoy's ``max_connect_attempts``, this limits the number of attempts, with a back-off, but not their
        # time.
        attempts: Attempts[Host] = Attempts(model.max_connect_attempts - 1, _is_repeatable)
        prefer: tuple[Labels, ...] = ()
        while True:
            if begun is None:
                cluster = self._current(hop, proxy, cluster)
                avoid = attempts.avoid
                if prefer:
                    avoid = _not_preferred(prefer, cluster, subset, avoid)
                host = cluster.choose(
                    info, subset=subset, hash_source=model.hash_source_ip, avoid=avoid, drops=False
                )
                if hop.addons is not None:
                    if hop.asked is not None:
                        hop.addons.rehosted(hop, host, tunnelled=tunnelled)
                    else:
                        info.upstream_host = str(host.endpoint.address)
                        wanted = await hop.addons.connecting(hop, host, tunnelled=tunnelled)
                        if wanted is not None:
                            prefer = wanted
                            continue
                choice = Choice(cluster, host, cluster.only_transport or cluster.transport(host))
                info.attempts += 1
            else:
                choice = Choice(cluster, begun.host, begun.transport)
            try:
                upstream = await self._attempt(hop, proxy, choice, client, begun, tunnelled=tunnelled)
            except _Replaced:
                info.attempts -= 1
                begun = None
                continue
            except UpstreamFailed as error:
                count_failure(cluster, choice.host, error)
                verdict = attempts.failed(error, 0.0, choice.host)
                if isinstance(verdict, GiveUp):
                    if verdict.reason is GivenUp.NO_RETRIES:
                        cluster.stats.cx_attempts_exceeded.value += 1
                        info.flags.add(Flag.UPSTREAM_RETRY_EXHAUSTED)
                    raise
                hop.refused(error)  # as in Envoy, logs report this even if a later attempt succeeds
            else:
                info.connected, info.failure = True, None
                return upstream
            finally:
                info.ready_s = hop.clock.monotonic() - info.started
            begun = None
            info.failed = (*info.failed, choice.host.endpoint)
            await self._back_off(proxy, verdict.failures)

    def _cluster_of(self, hop: LiveHop, proxy: LiveTcpProxy, *, tunnelled: bool) -> LiveCluster:
        """Choose the cluster of a hop.

        Raises:
            NoCluster: the cluster does not exist.
        """
        info = hop.info
        info.tunnelled = tunnelled
        override = info.facts.filter_state.get(CLUSTER_OVERRIDE) if info.facts.filter_state else None
        if override:
            name, cluster = override, self._clusters.get(override)
            info.subset = proxy.model.metadata_match
        else:
            choice, cluster = self._clusters.pick(proxy.model.clusters, self._rng)
            name, info.subset = choice.name, proxy.subset_of(choice)
        return self._note_cluster(hop, proxy, name, cluster)

    def _current(self, hop: LiveHop, proxy: LiveTcpProxy, cluster: LiveCluster) -> LiveCluster:
        """Return the active version of a hop's cluster. Each attempt uses the newest version, like in Envoy.

        Raises:
            NoCluster: the cluster was removed meanwhile.
        """
        name = hop.info.cluster
        active = self._clusters.get(name)
        return cluster if active is cluster else self._note_cluster(hop, proxy, name, active)

    @staticmethod
    def _note_cluster(hop: LiveHop, proxy: LiveTcpProxy, name: str, cluster: LiveCluster | None) -> LiveCluster:
        info = hop.info
        info.cluster, hop.cluster = name, cluster
        if cluster is None:
            proxy.cx_no_route.value += 1
            raise NoCluster()
        info.cluster_metadata = cluster.model.metadata
        info.upstream_cluster = cluster.model.alt_stat_name or name
        return cluster

    # The steps of ``open``, without a coroutine

    def begin(
        self,
        hop: LiveHop,
        proxy: LiveTcpProxy,
        client: PlainSocket | None,
        answered: OnAnswer,
        abort: Abort,
        plan: Plan | None = None,
    ) -> Opening | None:
        """Begin the first attempt of :meth:`open`, as far as this is possible without waiting.

        If the result is ``requested``, ``answered`` is called later. The caller then calls :meth:`opened`, or,
        after an error, :meth:`stop` and :meth:`open`. If the result is not ``requested``, the caller calls
        :meth:`open` with the result at once.

        Args:
            hop, proxy, client: see :meth:`open`.
            answered: see :meth:`hbone.aio.pool.Pool.open_on`.
            abort: ends the connection until the tunnel is answered.
            plan: stores the request for a tunnel, if all connections of the plan make an equal request.

        Returns:
            None if addons or policies decide about each host, so that the attempt has not begun.

        Raises:
            Refused: there is no cluster or no host.
        """
        if self._admit is not None or hop.addons is not None:
            return None
        info, model = hop.info, proxy.model
        tunnelled = tunnels(proxy, info)
        cluster = self._cluster_of(hop, proxy, tunnelled=tunnelled)
        subset = info.subset
        host = cluster.choose(info, subset=subset, hash_source=model.hash_source_ip, drops=False)
        transport = cluster.only_transport or cluster.transport(host)
        opening = Opening(hop, proxy, Choice(cluster, host, transport), tunnelled)
        info.attempts += 1
        _note_host(info, host)
        address = host.endpoint.address
        try:
            if type(address) is InternalAddress:
                inner = self._entered(opening, address, abort)
                early = None if opening.header else client
                try:
                    further = opening.inner = self.begin(inner.hop, inner.proxy, early, answered, abort)
                except Refused as error:
                    opening.error = _end_inner(opening, inner.hop, error)
                else:
                    opening.requested = further is not None and further.requested
            elif tunnelled and type(address) is SocketAddress and cluster.model.http2 is not None:
                self._request(opening, address, client, answered, plan)
        except Refused as error:
            opening.error = error
        return opening

    def _request(
        self,
        opening: Opening,
        address: SocketAddress,
        client: PlainSocket | None,
        answered: OnAnswer,
        plan: Plan | None,
    ) -> None:
        """Request a tunnel on an open connection that has room, unless the far end is in this process.

        Raises:
            Refused: see :func:`_asked` and :meth:`TunnelPools.key_of`.
        """
        info, cluster, transport = opening.hop.info, opening.cluster, opening.transport
        stays = _can_stay(info, transport)
        asked = _asked(info, cluster, opening.proxy, plan)
        if stays and self._internal.leads_here(address):
            return
        reserved = self.tunnels.reserve(info, cluster, transport, address)
        if reserved is not None:
            pool, place = reserved
            cluster.breaker.requests += 1
            opening.tunnel = pool.open_on(place, asked.block, client, answered)
            opening.requested = True

    def stop(self, opening: Opening, error: BaseException | None) -> None:
        """Close a requested tunnel that was not opened. :meth:`open` continues afterwards.

        Args:
            opening: from :meth:`begin`.
            error: the answer. ``None`` if the same attempt can be made again.
        """
        last = opening.last
        tunnel, last.tunnel = last.tunnel, None
        if tunnel is not None:
            last.cluster.breaker.requests -= 1
            tunnel.close()
        last.error = _failed(last.cluster, error) if isinstance(error, HboneError) else error

    def opened(self, opening: Opening) -> ClusterUpstream:
        """Record that the peer has answered the tunnel's CONNECT with 200, and return the tunnel's upstream."""
        hop, cluster, info = opening.hop, opening.cluster, opening.hop.info
        if opening.inner is not None:
            upstream = self._entered_upstream(opening, opening.inner.hop, self.opened(opening.inner))
        else:
            tunnel = opening.tunnel
            assert tunnel is not None
            cluster.breaker.requests -= 1
            upstream = self._tunnelled(hop, opening.proxy, cluster, opening.host, opening.transport, tunnel)
        if cluster.outlier is not None:
            cluster.report(opening.host, Result.SUCCESS)
        info.connected, info.failure = True, None
        info.ready_s = hop.clock.monotonic() - info.started
        return upstream

    async def _back_off(self, proxy: LiveTcpProxy, failures: int) -> None:
        """Wait before the next attempt, exponentially with full jitter, like Envoy's ``backoff_options``."""
        base = proxy.model.backoff_base_s
        if base:
            longest = proxy.model.backoff_max_s or base * 10
            await asyncio.sleep(self._rng.random() * min(longest, base * 2 ** (failures - 1)))

    async def _attempt(
        self,
        hop: LiveHop,
        proxy: LiveTcpProxy,
        choice: Choice,
        client: End | None,
        begun: Opening | None,
        *,
        tunnelled: bool,
    ) -> ClusterUpstream:
        info = hop.info
        cluster, host, transport = choice
        if begun is not None and begun.error is not None:
            raise begun.take_error()
        if begun is None:
            _note_host(info, host)
            if self._admit is not None:
                await self._admit(hop, proxy, host)
        match host.endpoint.address:
            case InternalAddress() as address:
                upstream = await self._enter(begun or Opening(hop, proxy, choice, tunnelled), address, client)
            case SocketAddress() as address if tunnelled:
                upstream = await self._tunnel(hop, proxy, choice, address, client)
            case PipeAddress() if tunnelled:
                raise UpstreamFailed("a tunnel needs a host with an IP address")
            case SocketAddress() | PipeAddress() as address:
                upstream = await self._dialler.dial(info, cluster, host, address, transport)
            case NamedAddress():
                raise UpstreamFailed(NO_ADDRESS, failure=Reason.DNS)
            case _:
                assert_never(host.endpoint.address)
        if cluster.outlier is not None:
            cluster.report(host, Result.SUCCESS)
        return upstream

    # Internal listeners

    async def _enter(self, opening: Opening, address: InternalAddress, client: End | None) -> ClusterUpstream:
        """Connect to an internal listener in this process. Like in Envoy, the text of a failure is ``Invalid
        argument``.
        """
        if opening.inner is not None:
            hop, proxy = opening.inner.hop, opening.inner.proxy
        else:
            hop, proxy = self._entered(opening, address, cancels_current_task(self._poller))
        counted = opening.counted
        assert counted is not None
        try:
            # With a PROXY header, no data is sent along with the CONNECT, because it would arrive before the
            # header.
            upstream = await self.open(hop, proxy, None if opening.header else client, opening.inner)
        except Refused as error:
            raise _end_inner(opening, hop, error) from error
        except BaseException:
            hop.close()
            counted.ended(by_peer=False, in_use=True)
            raise
        return self._entered_upstream(opening, hop, upstream)

    def _entered(self, opening: Opening, address: InternalAddress, abort: Abort) -> Entry:
        """Open a connection to an internal listener.

        Raises:
            UpstreamFailed: the listener does not exist, or refuses the connection.
        """
        outer, cluster, transport = opening.hop.info, opening.cluster, opening.transport
        if transport.context is not None:
            raise UpstreamFailed("connections to an internal listener have no TLS")
        if transport.proxy_version is not None:
            opening.header = with_header(outer, transport.proxy_version).first_bytes
        metadata, shared = passed_on(outer.facts, cluster, opening.host, transport.model)
        outer.upstream_local = _CLIENT_ADDRESS
        inner = self._internal.enter(
            address, outer, metadata, shared, abort, keep_options=self._keep_client_address
        )
        counted = opening.counted = CountedConnection(cluster, self._poller)
        if inner is None:
            behind = outer.behind.failure if outer.behind is not None else None
            failed = UpstreamFailed(INVALID_ARGUMENT, failure=behind or Reason.NO_ROUTE)
            counted.failed(failed)
            raise failed
        counted.connected()  # before the inner hop connects, like in Envoy
        inner.proxy.cx_total.value += 1
        return inner

    @staticmethod
    def _entered_upstream(opening: Opening, inner: LiveHop, upstream: ClusterUpstream) -> ClusterUpstream:
        """Turn the upstream of the hop behind an internal listener into the upstream of the preceding hop."""
        cluster, host, counted, header = opening.cluster, opening.host, opening.counted, opening.header
        assert counted is not None
        if header:
            upstream.end.write([memoryview(header)], len(header))
            upstream.end.flush()
        upstream.hops = (inner, *upstream.hops)
        upstream.on_close(inner.close)
        count_request(cluster, host)
        upstream.on_close(lambda: count_end(cluster, host, counted, upstream))
        return upstream

    # Tunnels

    async def _tunnel(
        self,
        hop: LiveHop,
        proxy: LiveTcpProxy,
        choice: Choice,
        address: SocketAddress,
        client: End | None,
    ) -> ClusterUpstream:
        """Open a tunnel: send a CONNECT request, and wait until it is answered with 200.

        Raises:
            _Replaced: the cluster was replaced or removed before the request was sent.
            Refused: the tunnel was not opened.
        """
        cluster, host, transport = choice
        if cluster.model.http2 is None:
            raise UpstreamFailed(NO_HTTP2)
        asked = _asked(hop.info, cluster, proxy)
        key = self.tunnels.key_of(hop.info, cluster, transport, address)
        if _can_stay(hop.info, transport) and self._internal.leads_here(address):
            local = await self._internal.shortcut(hop, transport.context, address, asked.authority, asked.headers)
            if local is not None:
                local.on_close(self._account_request(cluster, host))
                return local
        pool = self.tunnels.of(cluster)
        if pool is None:
            if self._is_retired(cluster):
                raise _Replaced()  # this pool would never be drained
            pool = self.tunnels.new(cluster)
        breaker = cluster.breaker
        breaker.requests += 1
        try:
            tunnel = await pool.open(key, asked.fields, client if type(client) is PlainSocket else None)
        except (HboneError, TproxyError, UpstreamFailed) as error:
            if isinstance(error, PoolClosed) and self._is_retired(cluster):
                raise _Replaced() from error
            raise _failed(cluster, error) from error
        finally:
            breaker.requests -= 1
        return self._tunnelled(hop, proxy, cluster, host, transport, tunnel)

    def _is_retired(self, cluster: LiveCluster) -> bool:
        return self._clusters.get(cluster.model.name) is not cluster

    def _tunnelled(
        self,
        hop: LiveHop,
        proxy: LiveTcpProxy,
        cluster: LiveCluster,
        host: Host,
        transport: LiveTransport,
        tunnel: Tunnel,
    ) -> ClusterUpstream:
        """Return the upstream of a tunnel whose CONNECT was accepted, and store the facts about the tunnel."""
        info, connection, context = hop.info, tunnel.connection, transport.context
        if connection.handshake_s:
            self._times.first_request(connection, info.trace.encode(), hop.clock.wall())
        info.upstream_local = str(SocketAddress.of(connection.local_name))
        facts = connection.facts
        info.upstream_uri_sans = facts.uri_sans if facts is not None else ()
        info.upstream_tls = facts
        info.upstream_certificate = context.presented.certificate if context is not None else None
        info.upstream_sni = context.model.sni if context is not None else ""
        if proxy.model.tunneling is not None and proxy.model.tunneling.propagate_response_headers:
            text = ",".join(f"{name.decode()}:{value.decode('latin-1')}" for name, value in tunnel.headers)
            info.facts.filter_state[RESPONSE_HEADERS] = text
        return Upstream(tunnel, self._account_request(cluster, host))

    @staticmethod
    def _account_request(cluster: LiveCluster, host: Host) -> Callable[[], None]:
        """Count an open request of a cluster and its host. Return a function that counts its end."""
        cluster.stats.rq_total.value += 1
        host.rq_total += 1
        host.rq_success += 1
        return request_open(cluster, host)


def request_open(cluster: LiveCluster, host: Host) -> Callable[[], None]:
    """Add an open request to the gauges. Return a function that removes the request from the gauges."""
    stats = cluster.stats
    stats.rq_active.stored += 1
    host.rq_active += 1
    cluster.breaker.requests += 1

    def closed() -> None:
        stats.rq_active.stored -= 1
        host.rq_active -= 1
        cluster.breaker.requests -= 1

    return closed


def passed_on(
    outer: ConnectionFacts, cluster: LiveCluster, host: Host, transport: TransportSocket
) -> tuple[dict[str, Mapping[str, Any]], tuple[tuple[str, bool], ...]]:
    """Return the metadata and shared filter state that a transport socket passes on to an internal listener."""
    if not isinstance(transport, InternalUpstream):
        return {}, ()
    of_host, of_cluster = host.endpoint.metadata, cluster.model.metadata
    metadata = {name: of_host[name] for name in transport.host if name in of_host}
    metadata |= {name: of_cluster[name] for name in transport.cluster if name in of_cluster}
    return metadata, outer.shared_state


def tunnels(proxy: LiveTcpProxy, info: StreamInfo) -> bool:
    """Return whether a TCP proxy filter opens a tunnel for a connection."""
    return proxy.hostname is not None and DISABLE_TUNNELING not in info.facts.filter_state


def _asked(info: StreamInfo, cluster: LiveCluster, proxy: LiveTcpProxy, plan: Plan | None = None) -> TunnelRequest:
    """Return the CONNECT request for a hop's tunnel, and record it in ``info``.

    Args:
        plan: stores the request, if all connections of the plan make an equal request.

    Raises:
        Overflow: the cluster has too many requests.
        UpstreamFailed: see :func:`~ztunnel.proxy.envoy.path.tunnel_request.request_for`.
    """
    asked = plan.request if plan is not None else None
    if asked is None:
        asked = request_for(proxy, info)
        if plan is not None and proxy.same_request:
            plan.request = asked
    breaker = cluster.breaker
    if breaker.requests >= breaker.limits.max_requests:
        cluster.stats.rq_pending_overflow.value += 1
        raise Overflow()
    info.tunnel_authority, info.trace = asked.authority, asked.trace
    return asked


def _can_stay(info: StreamInfo, transport: LiveTransport) -> bool:
    """Return whether a tunnel can stay in this process. A tunnel with a PROXY header cannot, because only listener
    filters read this header, and a node-local tunnel bypasses the listener filters.
    """
    return transport.proxy_version is None and not info.options.first_bytes


def _note_host(info: StreamInfo, host: Host) -> None:
    """Record the chosen host of an attempt in the facts about the connection."""
    endpoint = host.endpoint
    info.upstream_host = endpoint.key
    info.endpoint, info.behind = endpoint, None
    info.upstream_metadata = endpoint.metadata


def _failed(cluster: LiveCluster, error: Exception) -> Refused:
    """Count a failed attempt to open a tunnel, and return the failure."""
    if isinstance(error, ConnectRefused):
        return UpstreamFailed(f"tunnel_response:{error.status}", status=error.status)
    if isinstance(error, PoolFull):
        cluster.stats.rq_pending_overflow.value += 1
        return Overflow()
    return failure_of(cluster, error)


def _end_inner(opening: Opening, hop: LiveHop, error: Refused) -> Refused:
    """End a refused hop behind an internal listener, and return the failure of the preceding hop."""
    assert opening.counted is not None
    hop.refused(error)
    hop.close()
    opening.counted.ended(by_peer=True, in_use=True)
    if isinstance(error, Denied):
        return error  # this is no failure of the host, and another attempt would be denied as well
    final = isinstance(error, UpstreamFailed) and error.final
    return UpstreamFailed(INVALID_ARGUMENT, final=final, failure=error.failure)


def _not_preferred(
    prefer: tuple[Labels, ...],
    cluster: LiveCluster,
    subset: Mapping[str, object] | None,
    failed: frozenset[Host],
) -> frozenset[Host]:
    """Return the failed hosts, and the hosts that addons do not prefer unless all preferred hosts have failed."""
    from ztunnel.proxy.envoy.path.addons import without_labels  # most proxies have no addons

    candidates = cluster.candidates(subset)
    avoid = failed | without_labels(prefer, candidates)
    return failed if avoid.issuperset(candidates) else avoid


def _is_repeatable(error: Exception) -> bool:
    return not (isinstance(error, UpstreamFailed) and error.final)
