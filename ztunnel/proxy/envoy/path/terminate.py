"""Terminates tunnels: chooses the route of a CONNECT request and connects to the application.

Used for tunnels from the network and for node-local tunnels (``internal.shortcut``).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hbone.events import RequestHead
from xds.model.address import SocketAddress, is_loopback
from xds.model.cluster import Cluster, Discovery
from xds.model.http import HttpConnectionManager, Route, RouteTable, VirtualHost
from xds.model.metadata import NO_METADATA, Metadata
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.dataplane.upstream import Upstream
from ztunnel.proxy.envoy.listeners.chains import LiveChain, LiveConnectionManager
from ztunnel.proxy.envoy.listeners.connections import LiveHop
from ztunnel.proxy.envoy.path.dial import ClusterUpstream, Dialler, count_failure
from ztunnel.proxy.envoy.stream.outcome import Denied, Refused, UpstreamFailed
from ztunnel.proxy.envoy.stream.request_headers import header_values, traceparent
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster
from ztunnel.proxy.envoy.upstream.host import Host
from ztunnel.proxy.envoy.upstream.manager import ClusterManager

#: The HTTP/2 error code CONNECT_ERROR. Envoy resets the stream with this code after a failed CONNECT.
CONNECT_ERROR = 10

NO_IP_ADDRESS = "a tunnel can only lead to an IP address"
#: The response body of Envoy's RBAC filter.
DENIED = b"RBAC: access denied"
_RESET = b"upstream connect error or disconnect/reset before headers. reset reason: "
_BODIES = {
    "remote": _RESET + b"remote connection failure",
    "local": _RESET + b"connection timeout",
    "overflow": _RESET + b"overflow",
    "no host": b"no healthy upstream",
}


#: Checks a tunnel's application before the proxy dials it. Raises ``Denied`` to refuse the application.
AdmitsApplication = Callable[[LiveHop, SocketAddress], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The HTTP response to a refused request."""

    status: int
    details: str
    body: bytes = b""
    reset_code: int = 0
    failure: Reason = Reason.BAD_REQUEST


_NO_ROUTE = Answer(404, "route_not_found", failure=Reason.NO_ROUTE)


class RequestRefused(Exception):
    """The proxy refuses a tunnel request and answers it with an error.

    Attributes:
        answer: the response.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status, answer.details)
        self.answer = answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelRules:
    """Checks which targets tunnel requests can name.

    Attributes:
        check_authority: whether a tunnel can only name the pod that its connection was opened to. If not (like in
            Envoy), a client with access to one pod of the node can reach every pod, checked only by the first
            pod's policy.
        judge_ports: whether policies see the application's port. If not (like in Envoy), policies see the captured
            port, 15008, so a DENY by port never matches a tunnel.
        own_ports: returns this proxy's listening ports, which no tunnel is allowed to name.
    """

    own_ports: Callable[[], Collection[int]]
    check_authority: bool = True
    judge_ports: bool = True

    def require_own_address(self, info: StreamInfo, cluster: Cluster) -> int:
        """Check that the request names the pod of its captured connection, and no port of this proxy.

        If the request does not have the header named by the configuration, the authority is used, because today's
        ztunnels and waypoints do not send ``x-envoy-original-dst-host``.

        Returns:
            The named port, or 0 without a check.

        Raises:
            RequestRefused: the request names another pod, a port of this proxy, or no valid address.
        """
        config = cluster.original_dst
        if not self.check_authority or cluster.discovery is not Discovery.ORIGINAL_DST:
            return 0
        assert config is not None
        own = info.destination.host
        header = None
        for name, value in info.request_headers:
            if name == config.http_header_name:
                header = value
                break
        authority = SocketAddress.parse_or_none(info.authority)
        named = authority if header is None else SocketAddress.parse_or_none(header)
        if named is None:
            text = header if header is not None else info.authority
            raise RequestRefused(Answer(400, f"no valid authority pseudo header: {text}"))
        for address in (named, authority):
            if address is not None and address.host != own:
                raise RequestRefused(Answer(400, f"ip mismatch: {own} != {address.host}"))
        if named.port in self.own_ports() or is_loopback(named.host):
            raise RequestRefused(
                Answer(503, "attempted recursive call to ourselves", failure=Reason.RECURSIVE_CALL)
            )
        if config.use_http_header and header is None:
            info.request_headers = (*info.request_headers, (config.http_header_name, str(named)))
        return named.port


class Application(NamedTuple):
    """The route chosen for a tunnel request, and the host that the request is for."""

    route: Route
    cluster: LiveCluster
    host: Host
    address: SocketAddress


class RequestPlan:
    """The decisions that are the same for all requests with equal heads on one tunnel connection.

    A route depends on the head and the connection manager's routes. The address check depends on the head, the
    cluster and this proxy's ports. If the route table or the cluster was replaced, the decision is made again. The
    ports are checked for each request.

    Attributes:
        authority, headers, trace: the parts of the head as texts.
        route: the chosen route. ``None``: unknown, or it depends on more than the head.
        routes: the table that ``route`` was chosen from.
        virtual_host: the metadata of the route's virtual host.
        cluster: the cluster that the address was checked for.
        checked: the headers after the check.
        port: the port named by the request, or 0.
    """

    __slots__ = (
        "authority",
        "checked",
        "cluster",
        "headers",
        "port",
        "route",
        "routes",
        "trace",
        "virtual_host",
    )

    def __init__(self, head: RequestHead) -> None:
        self.authority = (head.authority or b"").decode("latin-1")
        self.headers = tuple([(n.decode("latin-1"), v.decode("latin-1")) for n, v in head.headers])
        self.trace = traceparent(self.headers)
        self.routes: RouteTable | None = None
        self.route: Route | None = None
        self.virtual_host: Metadata = NO_METADATA
        self.cluster: Cluster | None = None
        self.checked = self.headers
        self.port = 0


class Terminator:
    """Opens connections to applications for tunnel requests.

    Args:
        clusters: looks up clusters by name.
        dialler: opens sockets.
        rng: picks among weighted clusters.
        rules: checks which targets requests can name.
        admit: an additional check of the application. ``None`` disables it.

    Attributes:
        rules: see above.
        waits: whether ``admit`` is set and must be awaited.
    """

    def __init__(
        self,
        clusters: ClusterManager,
        dialler: Dialler,
        rng: random.Random,
        rules: TunnelRules,
        admit: AdmitsApplication | None = None,
    ) -> None:
        self._clusters = clusters
        self._dialler = dialler
        self._rng = rng
        self.rules = rules
        self._admit = admit
        self.waits = admit is not None

    async def open(self, hop: LiveHop, chain: LiveChain) -> tuple[Route, ClusterUpstream]:
        """Connect to a request's application.

        Raises:
            RequestRefused: the request is refused. The error contains the answer, and ``hop`` has the response
                flags.
        """
        chosen = self.choose(hop, chain)
        try:
            if self._admit is not None:
                await self._admit(hop, chosen.address)
            if hop.addons is not None:
                await hop.addons.accepting(hop, chosen.address)
        except Refused as error:
            raise _refusal(hop, error) from error
        dialled = self.dial_now(hop, chosen)
        return chosen.route, dialled if isinstance(dialled, Upstream) else await dialled

    def choose(self, hop: LiveHop, chain: LiveChain, plan: RequestPlan | None = None) -> Application:
        """Choose a request's application, and check whether policies allow it.

        Args:
            hop: the request.
            chain: the filter chain of the request's connection.
            plan: the plan for the request's head, which stores the choices.

        Raises:
            RequestRefused: see :meth:`open`.
        """
        info = hop.info
        route, cluster = self._cluster_of(hop, chain, plan)
        try:
            host = cluster.choose(info)
            endpoint = host.endpoint
            address = endpoint.address
            info.upstream_host = str(address)
            info.endpoint = endpoint
            info.upstream_metadata = endpoint.metadata
            info.attempts += 1
            if not isinstance(address, SocketAddress):
                raise UpstreamFailed(NO_IP_ADDRESS)
            if self.rules.judge_ports:
                hop.require_port(address)
        except Refused as error:
            raise _refusal(hop, error) from error
        return Application(route, cluster, host, address)

    def _cluster_of(self, hop: LiveHop, chain: LiveChain, plan: RequestPlan | None) -> tuple[Route, LiveCluster]:
        """Choose a request's route and its cluster, and check the address that the request names.

        Raises:
            RequestRefused: see :meth:`open`.
        """
        info, manager = hop.info, chain.manager
        assert manager is not None
        if plan is not None and plan.route is not None and plan.routes is manager.routes:
            route = plan.route
            info.route_metadata, info.virtual_host_metadata = route.metadata, plan.virtual_host
        else:
            route = self._route(manager, info)
            if plan is not None and manager.routes is not None and manager.routes.chosen_by_heads:
                plan.routes, plan.route = manager.routes, route
                plan.virtual_host = info.virtual_host_metadata
        choice, cluster = self._clusters.pick(route.clusters, self._rng)
        name = choice.name
        info.cluster, hop.cluster = name, cluster
        info.route = route.name
        if cluster is None:
            manager.no_cluster.value += 1
            info.flags.add(Flag.NO_CLUSTER)
            raise RequestRefused(
                Answer(route.cluster_not_found_status, "cluster_not_found", failure=Reason.NO_ROUTE)
            )
        info.upstream_cluster = cluster.model.alt_stat_name or name
        if (
            plan is not None
            and plan.cluster is cluster.model
            and not (plan.port and plan.port in self.rules.own_ports())
        ):
            info.request_headers = plan.checked
        else:
            port = self.rules.require_own_address(info, cluster.model)
            if plan is not None:
                plan.cluster, plan.checked, plan.port = cluster.model, info.request_headers, port
        return route, cluster

    def dial_now(
        self, hop: LiveHop, chosen: Application
    ) -> ClusterUpstream | Coroutine[Any, Any, ClusterUpstream]:
        """Dial an application. If it does not accept before this returns, return a coroutine instead.

        Raises:
            RequestRefused: see :meth:`open`.
        """
        _, cluster, host, address = chosen
        info, transport = hop.info, cluster.only_transport or cluster.transport(host)
        hop.state = State.DIALING
        try:
            dialled = self._dialler.dial_now(info, cluster, host, address, transport)
        except Refused as error:
            raise _unreachable(hop, chosen, error) from error
        if not isinstance(dialled, Upstream):
            return self._dialled(hop, chosen, dialled)
        info.ready_s = hop.clock.monotonic() - info.started
        info.connected, info.failure = True, None
        return dialled

    @staticmethod
    async def _dialled(
        hop: LiveHop, chosen: Application, dialling: Coroutine[Any, Any, ClusterUpstream]
    ) -> ClusterUpstream:
        info = hop.info
        try:
            upstream = await dialling
        except Refused as error:
            raise _unreachable(hop, chosen, error) from error
        finally:
            info.ready_s = hop.clock.monotonic() - info.started
        info.connected, info.failure = True, None
        return upstream

    def _route(self, manager: LiveConnectionManager, info: StreamInfo) -> Route:
        try:
            return tunnel_route(manager.model, manager.routes, info)
        except RequestRefused as refusal:
            manager.no_route.value += refusal.answer is _NO_ROUTE
            raise


def _unreachable(hop: LiveHop, chosen: Application, error: Refused) -> RequestRefused:
    """Count a failed connection to the application, and return the answer to the tunnel request."""
    if isinstance(error, UpstreamFailed):
        count_failure(chosen.cluster, chosen.host, error)
    hop.info.ready_s = hop.clock.monotonic() - hop.info.started
    return _refusal(hop, error)


def _refusal(hop: LiveHop, error: Refused) -> RequestRefused:
    """Record why a tunnel request is refused, and return the answer."""
    hop.refused(error)
    if isinstance(error, Denied):
        return RequestRefused(Answer(403, error.details, DENIED))
    return RequestRefused(_answer_to(error))


def _answer_to(error: Refused) -> Answer:
    """Return Envoy's answer if a host is unreachable: 503, with the same body for every cause."""
    if isinstance(error, UpstreamFailed):
        kind = "local" if error.timed_out else "remote"
        details = f"upstream_reset_before_response_started{{remote_connection_failure|{error.reason}}}"
        if error.timed_out:
            details = "upstream_reset_before_response_started{connection_timeout}"
        return Answer(503, details, _BODIES[kind], CONNECT_ERROR)
    if error.flag is Flag.UPSTREAM_OVERFLOW:
        return Answer(503, "upstream_reset_before_response_started{overflow}", _BODIES["overflow"], CONNECT_ERROR)
    return Answer(503, "no_healthy_upstream", _BODIES["no host"], CONNECT_ERROR)


def tunnel_route(model: HttpConnectionManager, table: RouteTable | None, info: StreamInfo) -> Route:
    """Return the route of a request for a tunnel, and store the route's metadata in ``info``.

    Args:
        model: the configuration of the connection manager that received the request.
        table: the manager's routes, or ``None`` if they have not arrived.
        info: the request.

    Raises:
        RequestRefused: no route leads the request to a cluster.
    """
    host = _virtual_host(table.virtual_hosts, info.authority) if table is not None else None
    route = _route_in(host, info)
    if host is not None:
        info.virtual_host_metadata = host.metadata
    if route is None:
        info.flags.add(Flag.NO_ROUTE)
        raise RequestRefused(_NO_ROUTE)
    info.route_metadata = route.metadata
    if route.direct_status:
        raise RequestRefused(Answer(route.direct_status, "direct_response", route.direct_body))
    # A route that matches by path can have ``connect_config``, too, but only a CONNECT request can become a
    # tunnel.
    if not (route.tunnel and info.method == "CONNECT" and model.allows_connect):
        raise RequestRefused(Answer(403, "upgrade_failed"))
    return route


def _route_in(host: VirtualHost | None, info: StreamInfo) -> Route | None:
    """Return the first route of a virtual host that matches a request."""
    if host is not None:
        for route in host.routes:
            if _matches(route, info):
                return route
    return None


def _virtual_host(hosts: Sequence[VirtualHost], authority: str) -> VirtualHost | None:
    """Return the virtual host that best matches a request's host name. Like in Envoy, the order is: exact domain,
    longest ``*.suffix``, longest ``prefix.*``, then ``*``.
    """
    name = authority.lower()
    best: tuple[int, int] | None = None
    found = None
    for host in hosts:
        for domain in host.domains:
            rank = _domain_rank(domain, name)
            if rank is not None and (best is None or rank > best):
                best, found = rank, host
    return found


def _domain_rank(domain: str, name: str) -> tuple[int, int] | None:
    if domain == name:
        return 3, 0
    if domain == "*":
        return 0, 0
    if domain.startswith("*") and name.endswith(domain[1:]) and len(name) > len(domain) - 1:
        return 2, len(domain)
    if domain.endswith("*") and name.startswith(domain[:-1]) and len(name) > len(domain) - 1:
        return 1, len(domain)
    return None


def _header_of(info: StreamInfo, name: str) -> Sequence[str]:
    """Return the values of a header or pseudo-header as routes match them. ``host`` means the authority."""
    pseudo = {":authority": info.authority, "host": info.authority, ":method": info.method, ":path": info.path}
    value = pseudo.get(name)
    if value is None:
        return header_values(info, name)
    return (value,) if value else ()


def _matches(route: Route, info: StreamInfo) -> bool:
    connect = info.method == "CONNECT"
    if route.path is None:
        # An extended CONNECT is an upgrade to another protocol, so a CONNECT matcher does not match it (Envoy:
        # 404).
        if not connect or info.path:
            return False
    elif not info.path or not route.path.matches(info.path.partition("?")[0]):
        return False
    for wanted in route.headers:
        values = _header_of(info, wanted.name)
        if wanted.match is None:
            hit = bool(values)
        elif not values:
            return False  # as in Envoy, neither a matcher nor its inversion matches a missing header
        else:
            hit = any(map(wanted.match.matches, values))
        if hit == wanted.invert:
            return False
    return True
