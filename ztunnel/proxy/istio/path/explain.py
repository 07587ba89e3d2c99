"""Explains what the data path would decide about a hypothetical connection in an Istio mesh. Pure.

Every decision is taken by the data path's own function (:func:`~ztunnel.proxy.istio.path.route.route_for`,
:func:`~ztunnel.proxy.istio.path.inbound_target.inbound_target`,
:func:`~ztunnel.proxy.istio.path.judgement.judgement`). This module looks up the source and the destination,
repeats the decision for each endpoint that load balancing could choose, and reports the results.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, assert_never

from hbone.errors import TlsError, TlsReason
from xds.model.address import SocketAddress, canonical, is_loopback
from xds.model.authorization import AuthorizationPolicy
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.mesh import Mesh
from xds.model.service import Service
from xds.model.workload import Protocol, Workload, WorkloadUid
from ztunnel.policy.engine import holds
from ztunnel.policy.reasons import reason
from ztunnel.proxy.identity.peer import foreign
from ztunnel.proxy.istio.accounting.outcome import RECURSIVE_CALL
from ztunnel.proxy.istio.path.balance import Question as Draw
from ztunnel.proxy.istio.path.balance import candidates_for, pick
from ztunnel.proxy.istio.path.inbound_target import RequestRefused, inbound_facts, inbound_target, plain_target
from ztunnel.proxy.istio.path.judgement import judgement
from ztunnel.proxy.istio.path.route import (
    Client,
    Direct,
    DoubleTunnel,
    Named,
    Route,
    RouteRefused,
    Tunnel,
    route_for,
    source_host,
)

Answer = dict[str, Any]
#: Predicts the TLS handshake between a client (``None`` if its workload is unknown) and a server that must have
#: one of the given identities. Returns whether it can succeed, as far as this proxy can know, and why.
Handshake = Callable[[Workload | None, Workload, tuple[str, ...]], tuple[bool, str]]

#: At most this many endpoints and policies are printed. The rest are only counted.
_MOST_SHOWN: Final = 32
_DAY_S: Final = 86400
_REFUSED: Final = "refused: "
_NO_ZTUNNEL: Final = "no ztunnel captures the workload's connections: its policies are not enforced"
_WAYPOINTS_OWN: Final = "the waypoint decides about what goes through it"
_WAYPOINTS_DOOR: Final = f"{_WAYPOINTS_OWN}; these are for its own door"


class BadQuestion(ValueError):
    """The source or destination of a question is neither known in the mesh nor an address. The text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A hypothetical connection to explain.

    Attributes:
        host: the client's address.
        source: the workload at ``host``. ``None``: a client outside the mesh, which has no proxy.
        destination: the dialled address or name.
        identity: the identity in the client's certificate. Empty for plain text.
        inbound: whether to explain only the destination proxy's decision, about a client with exactly
            ``identity``.
        captured: whether a ztunnel captures the source's connections. Otherwise the kernel routes them.
    """

    host: str
    source: Workload | None
    destination: SocketAddress
    identity: str = ""
    inbound: bool = False
    captured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The state of the proxy that answers the question.

    Attributes:
        network: the node's network.
        illegal_ports: the proxy's own ports in pods.
        avoided: recently failed endpoints, which load balancing avoids.
        cluster_domain: the domain of Kubernetes' services.
        handshake: predicts TLS handshakes from certificates and revocation lists. ``None`` if there are none, as
            when explaining from a config dump.
    """

    mesh: Mesh
    network: str = ""
    illegal_ports: Collection[int] = ()
    avoided: Collection[WorkloadUid] = ()
    cluster_domain: str = "cluster.local"
    handshake: Handshake | None = None


def question(
    source: str,
    destination: str,
    identity: str,
    around: Surroundings,
    *,
    inbound: bool = False,
    captured: bool = False,
    endpoint: str = "",
) -> Question:
    """Parse a question.

    Args:
        source: an address with or without a port, ``namespace/pod``, a workload's uid, or a SPIFFE id, which
            selects the first workload with that identity.
        destination: ``HOST:PORT``, where the host is an address, a service's name (``NAME.NAMESPACE`` is enough)
            or ``namespace/pod``. With ``endpoint``, or if the service has one port, also a service's name alone.
        identity: a SPIFFE id. Empty means the source's own identity, or plain text if ``inbound``.
        around: the proxy's state, for looking up names in its mesh.
        inbound: see :class:`Question`.
        captured: whether a proxy is known to have captured the connection. Otherwise it is assumed captured if the
            source accepts tunnels according to the control plane, or if there is an identity, which only a ztunnel
            can prove.
        endpoint: ``IP:PORT`` of the application that a connection to the service reached, taken from an access
            line. It determines the service's port, which access lines do not contain.

    Raises:
        BadQuestion: a name or address is unknown or malformed.
    """
    workload, host = _source(source, around)
    namespace = workload.namespace if workload is not None else ""
    name, colon, port = destination.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        if colon:
            raise BadQuestion(f"destination {destination!r}: not HOST:PORT")
        if endpoint:
            dialled = _behind(destination, namespace, endpoint, around)
        else:
            dialled = _only_port(destination, namespace, around)
    else:
        dialled = SocketAddress(_destination(name, namespace, around), int(port))
    captured = captured or bool(identity) or (workload is not None and workload.protocol is Protocol.HBONE)
    own = str(workload.identity) if workload is not None and captured and not inbound else ""
    return Question(
        host=host,
        source=workload,
        destination=dialled,
        identity=identity or own,
        inbound=inbound,
        captured=captured,
    )


def explain(asked: Question, around: Surroundings) -> Answer:
    """Return the answer as plain values with stable keys, ready for JSON."""
    answer: Answer = {"verdict": "", "source": _shown_source(asked), "destination": str(asked.destination)}
    if asked.source is None or asked.inbound:
        local = around.mesh.workload_at(around.network, asked.destination.host)
        if local is None:
            return answer | {"verdict": "not known here: neither end is a workload of the mesh"}
        allowed, inbound = _arriving(asked, local, around)
        return answer | {"inbound": inbound, "verdict": "allowed" if allowed else "refused by the destination"}
    if not asked.captured:
        return answer | _uncaptured(asked, asked.source, around)
    return answer | _outbound(asked, asked.source, around)


def certificate(state: str, ends: datetime | None, now_s: float) -> Answer:
    """Return the section of the answer about the source's certificate.

    Args:
        state: why there is no certificate. Empty if there is one, or if no pod of this node has the identity.
        ends: the certificate's expiry time, or ``None`` without a certificate.
        now_s: seconds of the wall clock.
    """
    if ends is None:
        return {"state": state or "none here: no pod of this node has the identity"}
    left_s = ends.timestamp() - now_s
    return {
        "state": "available" if left_s > 0 else "expired",
        "valid_until": f"{ends:%Y-%m-%dT%H:%M:%SZ}",
        "days_left": math.floor(10 * left_s / _DAY_S) / 10,
    }


# Source and destination


def _address(text: str) -> str | None:
    try:
        return canonical(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        return None


def _source(text: str, around: Surroundings) -> tuple[Workload | None, str]:
    host = _address(text) or _address(text.rpartition(":")[0])
    if host is not None:
        return around.mesh.workload_at(around.network, host), host
    if text.startswith("spiffe://"):
        having = (each for each in around.mesh.workloads() if each.addresses and str(each.identity) == text)
        workload = min(having, key=lambda each: each.uid, default=None)
        if workload is None:
            raise BadQuestion(f"source {text!r}: no workload has this identity")
        return workload, workload.addresses[0]
    workload = around.mesh.workload(text) or _pod(text, around.mesh)
    if workload is None:
        raise BadQuestion(f"source {text!r}: no workload NAMESPACE/NAME, and no address")
    if not workload.addresses:
        raise BadQuestion(f"source {text!r}: the workload has no address")
    return workload, workload.addresses[0]


def _destination(name: str, namespace: str, around: Surroundings) -> str:
    mesh = around.mesh
    host = _address(name)
    if host is not None:
        return host
    workload = _pod(name, mesh)
    if workload is not None and workload.addresses:
        return workload.addresses[0]
    return _service(name, namespace, around)[1]


def _service(name: str, namespace: str, around: Surroundings) -> tuple[Service, str]:
    """Find a service by its full name, or by a short one, like the search list of Kubernetes. Return it with its
    address in this network.
    """
    mesh, domain, given = around.mesh, around.cluster_domain, name.removesuffix(".")
    names = (given, *(f"{given}.{rest}" for rest in (f"{namespace}.svc.{domain}", f"svc.{domain}", domain)))
    service = next(filter(None, (mesh.service_named(each, namespace or None) for each in names)), None)
    if service is None:
        raise BadQuestion(f"destination {name!r}: no service or workload of this name, and no address")
    own = [vip.host for vip in service.vips if vip.network == around.network]
    if not own:
        raise BadQuestion(f"destination {name!r}: the service has no address in network {around.network!r}")
    return service, own[0]


def _only_port(name: str, namespace: str, around: Surroundings) -> SocketAddress:
    """Return the address and port of a service that has a single port."""
    if _address(name) is not None or _pod(name, around.mesh) is not None:
        raise BadQuestion(f"destination {name!r}: not HOST:PORT")
    service, host = _service(name, namespace, around)
    if len(service.ports) != 1:
        ports = ", ".join(map(str, sorted(service.ports))) or "none"
        raise BadQuestion(f"destination {name!r}: not HOST:PORT; the service's ports are {ports}")
    return SocketAddress(host, *service.ports)


def _behind(name: str, namespace: str, endpoint: str, around: Surroundings) -> SocketAddress:
    """Return the service address that a client must have dialled to reach an application at ``endpoint``, IP:PORT.
    The two ports often differ.
    """
    service, host = _service(name, namespace, around)
    try:
        reached = SocketAddress.parse(endpoint)
    except ValueError:
        raise BadQuestion(f"endpoint {endpoint!r}: not IP:PORT") from None
    if any(vip.host == reached.host for vip in service.vips):
        return SocketAddress(host, reached.port)  # a tunnel to a waypoint names the dialled address
    workload = around.mesh.workload_at(around.network, reached.host)
    place = around.mesh.all_endpoints(service.key).get(workload.uid) if workload is not None else None
    # If the endpoint has left the service, only the service's own port table remains, where named target ports are
    # 0.
    for port, target in (*(place.ports.items() if place is not None else ()), *service.ports.items()):
        if target == reached.port:
            return SocketAddress(host, port)
    raise BadQuestion(f"destination {name!r}: no port of the service leads to {endpoint}")


def _pod(text: str, mesh: Mesh) -> Workload | None:
    namespace, slash, name = text.partition("/")
    if not slash:
        return None
    return next((each for each in mesh.workloads() if each.namespace == namespace and each.name == name), None)


def _shown_source(asked: Question) -> Answer:
    shown: Answer = {"address": asked.host}
    if asked.source is not None:
        shown |= {"workload": asked.source.uid, "node": asked.source.node or None}
    return shown | {"identity": asked.identity or None}


# The outbound decision


def _outbound(asked: Question, source: Workload, around: Surroundings) -> Answer:
    mesh = around.mesh
    dialled = mesh.service_at(source.network, asked.destination.host, source.namespace)
    at = dialled or mesh.workload_at(source.network, asked.destination.host)
    answer: Answer = {"dialled": _named(at)}
    if asked.destination.port in around.illegal_ports and is_loopback(asked.destination.host):
        return answer | {"verdict": f"refused: {RECURSIVE_CALL}"}
    draws: dict[Draw, None] = {}
    routes = list(_routes(asked, source, around, draws))
    first = next((route for route in routes if not isinstance(route, RouteRefused)), None)
    if first is not None:
        answer["because"] = _because(first, at)
    elif isinstance(routes[0], RouteRefused) and routes[0].because:
        answer["because"] = routes[0].because
    left_out: dict[WorkloadUid, str] = {}
    for draw in draws:
        for uid, why in candidates_for(mesh, draw).left_out(mesh, around.avoided):
            left_out.setdefault(uid, why.because(draw))
    if left_out:
        shown = list(left_out.items())[:_MOST_SHOWN]
        answer["left_out"] = [{"workload": uid, "because": why} for uid, why in shown]
    if first is not None or len(routes) > 1:
        answer |= _verdict([_way(route, asked, around) for route in routes])
    return answer if first is not None else answer | {"verdict": f"refused: {routes[0]}"}


def _verdict(ways: list[tuple[bool, Answer]]) -> Answer:
    """Combine the candidate endpoints (``ways``) into one verdict. Each comes with whether it would accept the
    connection.
    """
    refused = [way for ok, way in ways if not ok]
    failures = {way.get("handshake", "") for way in refused}
    if not refused:
        verdict = "allowed"
    elif len(refused) == len(ways) and len(failures) == 1 and (why := failures.pop()).startswith(_REFUSED):
        verdict = why
    elif not all("target" in way for way in refused):
        verdict = f"refused for {len(refused)} of {len(ways)} endpoints"
    else:
        some = "" if len(refused) == len(ways) else f" by {len(refused)} of {len(ways)} endpoints"
        verdict = f"refused by the destination{some}"
    return {"ways": [way for _, way in ways], "verdict": verdict}


def _uncaptured(asked: Question, source: Workload, around: Surroundings) -> Answer:
    """Explain a connection that no ztunnel captures at the source: plain TCP to an endpoint chosen
    by the kernel.
    """
    mesh, port = around.mesh, asked.destination.port
    dialled = mesh.service_at(source.network, asked.destination.host, source.namespace)
    at = dialled or mesh.workload_at(source.network, asked.destination.host)
    answer: Answer = {
        "dialled": _named(at),
        "because": "plain TCP: the control plane says that the source takes no tunnels, so no ztunnel takes its "
        "connections, and it proves no identity",
    }
    targets: list[tuple[Workload | None, SocketAddress]] = []
    if dialled is None:
        targets.append((at if isinstance(at, Workload) else None, asked.destination))
    else:
        for uid, endpoint in mesh.endpoints(dialled.key).items():
            workload, target = mesh.workload(uid), endpoint.ports.get(port)
            if workload is not None and target and workload.addresses:
                targets.append((workload, SocketAddress(workload.addresses[0], target)))
    if not targets:
        return answer | {"verdict": f"refused: no healthy upstream: {asked.destination}"}
    return answer | _verdict([_plain_way(asked, workload, to, around) for workload, to in targets[:_MOST_SHOWN]])


def _plain_way(
    asked: Question, workload: Workload | None, target: SocketAddress, around: Surroundings
) -> tuple[bool, Answer]:
    way: Answer = {"target": str(target)}
    if workload is None:
        return True, way
    way |= {"workload": workload.uid, "node": workload.node or None}
    if workload.protocol is not Protocol.HBONE:
        return True, way | {"policies_because": _NO_ZTUNNEL}
    allowed, way["inbound"] = _plain_inbound(asked, workload, target, around)
    return allowed, way


def _routes(
    asked: Question, source: Workload, around: Surroundings, draws: dict[Draw, None]
) -> Iterator[Route | RouteRefused]:
    """Return a route for each possible endpoint of a connection, in the order of attempts.

    For an unreachable endpoint, return the refusal that a connection would get.

    Args:
        asked: the connection.
        source: its workload.
        around: the proxy's mesh.
        draws: collects the questions to the load balancer (:class:`Draw`) about this connection.
    """
    client = Client(workload=source, host=asked.host, network=around.network)
    yielded: set[tuple[str, ...]] = set()
    for first_draw in _first_draws(asked, source, around.mesh):

        def routed(avoid: Collection[WorkloadUid], first_draw: int = first_draw) -> Route | RouteRefused:
            choose = _First(first_draw)

            def draw(question: Draw) -> WorkloadUid | None:
                draws[question] = None
                return pick(around.mesh, question, choose, avoid)

            try:
                return route_for(client, asked.destination, around.mesh, choose, draw=draw)
            except RouteRefused as refused:
                return refused

        # Recently failed endpoints are avoided, unless every endpoint has failed. Then all endpoints are
        # candidates.
        failed = set(around.avoided)
        first = routed(failed)
        avoid = failed if first.workload is None or first.workload.uid not in failed else set()
        for route in _drawn(routed, avoid):
            key = _key(route)
            if key not in yielded:  # equal if the client is itself a waypoint, which it bypasses
                yielded.add(key)
                yield route


def _drawn(
    routed: Callable[[Collection[WorkloadUid]], Route | RouteRefused], avoid: Collection[WorkloadUid]
) -> Iterator[Route | RouteRefused]:
    """Yield the route for every endpoint that can be chosen.

    After each choice, the chosen endpoint is avoided, as after a failed attempt, so that the next choice differs.
    This ends when an avoided endpoint is chosen, because no other is left.
    """
    drawn = set(avoid)
    for _ in range(_MOST_SHOWN):
        route = routed(drawn)
        workload = route.workload
        if workload is None:
            yield route
            return
        if workload.uid in drawn:
            return
        # The gateway of a double tunnel is chosen in the same way.
        gateways = set(drawn)
        if not isinstance(route, DoubleTunnel):
            yield route
        while isinstance(route, DoubleTunnel) and route.workload is workload and route.gateway.uid not in gateways:
            yield route
            gateways.add(route.gateway.uid)
            route = routed(gateways)
        drawn.add(workload.uid)


def _key(route: Route | RouteRefused) -> tuple[str, ...]:
    uid = route.workload.uid if route.workload is not None else ""
    if isinstance(route, RouteRefused):
        return (uid, str(route))
    return (uid, route.gateway.uid) if isinstance(route, DoubleTunnel) else (uid,)


class _First:
    """A deterministic replacement for random choices: returns a given number first, then always 0."""

    def __init__(self, first: int) -> None:
        self._next = first

    def __call__(self, below: int) -> int:
        drawn, self._next = self._next, 0
        return drawn % below


def _first_draws(asked: Question, source: Workload, mesh: Mesh) -> Iterator[int]:
    """Yield, for each waypoint of a service, a random number that makes the weighted choice select this
    waypoint.
    """
    service = mesh.service_at(source.network, asked.destination.host, source.namespace)
    start = 0
    for waypoint in service.weighted_waypoints if service is not None else ():
        if waypoint.weight:
            yield start
        start += waypoint.weight
    if not start:
        yield 0


def _named(at: Service | Workload | None) -> str:
    match at:
        case Service():
            return f"service {at.key}"
        case Workload():
            return f"workload {at.uid}"
        case None:
            return "nothing that the mesh knows"
        case _:
            assert_never(at)


def _because(route: Route, at: Service | Workload | None) -> str:
    match route:
        case Direct(workload=None):
            why = "its service passes connections through" if at is not None else "it is outside the mesh"
            return f"plain TCP to where it was going: {why}"
        case Direct():
            return "plain TCP: the workload does not take tunnels"
        case DoubleTunnel():
            return "a tunnel in a tunnel: the workload is in another network, behind a gateway"
        case Tunnel(waypoint=True, service=None):
            return "a tunnel to the waypoint of the workload"
        case Tunnel(waypoint=True):
            return "a tunnel to the waypoint of the service"
        case Tunnel():
            return "a tunnel: the workload takes them"
        case _:
            assert_never(route)


# One candidate endpoint


def _way(route: Route | RouteRefused, asked: Question, around: Surroundings) -> tuple[bool, Answer]:
    """Explain one candidate endpoint: whether its proxy would accept the connection, and how the connection gets
    there. Without a route the answer has no ``target``.
    """
    if isinstance(route, RouteRefused):
        nowhere: Answer = {"refused": str(route)}
        if route.workload is not None:
            nowhere |= {"workload": route.workload.uid, "node": route.workload.node or None}
        return False, nowhere
    target = route.target
    shown = f"{target.hostname}:{target.port}, by its name" if isinstance(target, Named) else str(target)
    way: Answer = {"target": shown}
    workload = route.workload
    if workload is not None:
        way |= {"workload": workload.uid, "node": workload.node or None, "weight": workload.capacity}
    if isinstance(route, Direct):
        if workload is not None and workload.protocol is not Protocol.HBONE:
            way["policies_because"] = _NO_ZTUNNEL
        return True, way
    way |= {"authority": route.authority, "peer_must_be": list(route.identities)}
    peer = route.gateway if isinstance(route, DoubleTunnel) else route.workload
    if not _shakes_hands(asked, peer, route.identities, around, way):
        return False, way
    if isinstance(route, DoubleTunnel):
        way |= {"gateway": route.gateway.uid, "inner_peer_must_be": list(route.inner_identities)}
        if not route.inner_identities:
            return False, way | {"refused": "the service names no identity that the far end could show"}
        way["policies_because"] = "they are the other network's"
        return True, way
    if route.waypoint:
        way["policies_because"] = _WAYPOINTS_OWN if route.workload.native_tunnel else _WAYPOINTS_DOOR
        if route.workload.native_tunnel:
            return True, way
    if isinstance(target, Named):
        way["inbound_because"] = "known when the name is resolved"
        return True, way
    allowed, inbound = _tunnel_inbound(asked, route.workload, route.authority, target.host, around)
    return allowed, way | ({"inbound": inbound} if "workload" in inbound else inbound)


def _arriving(asked: Question, workload: Workload, around: Surroundings) -> tuple[bool, Answer]:
    """Return whether the destination's proxy would accept a connection, and why. The decisions of the client's
    proxy are ignored.
    """
    destination = asked.destination
    if not asked.identity:
        return _plain_inbound(asked, workload, destination, around)
    answer: Answer = {"workload": workload.uid, "application": str(destination)}
    if not _shakes_hands(asked, workload, (str(workload.identity),), around, answer):
        return False, answer
    allowed, inbound = _tunnel_inbound(asked, workload, str(destination), destination.host, around)
    return allowed, answer | inbound


def _shakes_hands(
    asked: Question, peer: Workload, expected: tuple[str, ...], around: Surroundings, answer: Answer
) -> bool:
    """Return whether the TLS handshake with the destination would succeed, and add the reason to the answer."""
    if around.handshake is None or not asked.identity:
        return True
    source = asked.source
    client = source if source is not None and asked.identity == str(source.identity) else None
    able, why = around.handshake(client, peer, expected)
    answer["handshake"] = why if able else f"{_REFUSED}{why}"
    return able


def _tunnel_inbound(
    asked: Question, workload: Workload, authority: str, host: str, around: Surroundings
) -> tuple[bool, Answer]:
    """Return whether a workload's proxy would accept a tunnel, and why. Checks its handshake, request and
    policies.
    """
    if not asked.identity:
        return False, {"refused": "tls handshake error: the client has no identity"}
    refused = foreign(workload.trust_domain, (asked.identity,))
    if refused is not None:
        return False, {"refused": f"tls handshake error: {TlsError(TlsReason.SAN, refused)}"}
    try:
        target = inbound_target(
            authority,
            workload,
            host,
            around.mesh,
            network=around.network,
            illegal_ports=around.illegal_ports,
        )
    except RequestRefused as error:
        return False, {"refused": f"{error.status}: {error}"}
    peer = PeerCertificate(uri_sans=(asked.identity,))
    return _judged(workload, inbound_facts(_source_towards(asked, host), target.address, peer), around)


def _plain_inbound(
    asked: Question, workload: Workload, destination: SocketAddress, around: Surroundings
) -> tuple[bool, Answer]:
    """Return whether a workload's proxy would accept a plain connection, and why."""
    try:
        target = plain_target(destination, around.illegal_ports)
    except RequestRefused as error:
        return False, {"workload": workload.uid, "application": str(destination), "refused": str(error)}
    source = _source_towards(asked, destination.host)
    return _judged(workload, inbound_facts(source, target.address, None), around)


def _source_towards(asked: Question, host: str) -> SocketAddress:
    """Return the client's address as the next hop sees it. Its address family can differ from the dialled
    address's.
    """
    own = source_host(asked.source, asked.host, host) if asked.source is not None else None
    return SocketAddress(own or asked.host, 0)


def _judged(workload: Workload, facts: ConnectionFacts, around: Surroundings) -> tuple[bool, Answer]:
    """Return whether the workload's policies allow a connection, and why."""
    policies = around.mesh.policies_for(workload)
    answer: Answer = {"workload": workload.uid, "application": str(facts.destination)}
    decided_by, refused, _ = judgement(policies, facts)
    if policies.missing_for(facts):
        return False, answer | {"refused": refused}
    judged = [judged for tier in policies.enforced.tiers for judged in tier.policies]
    listed = [_policy(policy, facts) for each in judged if (policy := around.mesh.policy(each.name)) is not None]
    # The policies that match the connection decide, so they are listed first. The others follow, up to the limit.
    listed.sort(key=lambda each: not each["holds"])
    if listed:
        answer["policies"] = listed[:_MOST_SHOWN]
    if len(listed) > _MOST_SHOWN:
        answer["more_policies"] = len(listed) - _MOST_SHOWN
    dry_run = [_policy(policy, facts) for policy in (*policies.dry_run_deny, *policies.dry_run_allow)]
    if dry_run:
        answer["dry_run"] = dry_run[:_MOST_SHOWN]
    if refused:
        return False, answer | {"refused": refused}
    none = "no policy denies it, and none allows only some" if listed else "no policy is for this workload"
    return True, answer | {"allowed_by": decided_by or none}


def _policy(policy: AuthorizationPolicy, facts: ConnectionFacts) -> Answer:
    because = reason(policy.condition, facts)
    if policy.faults:
        because = (
            f"parts of it are not understood, so it is taken at its strictest ({policy.faults[0]}); {because}"
        )
    return {
        "policy": policy.key,
        "action": str(policy.action),
        "holds": holds(policy.condition, facts),
        "because": because,
    }
