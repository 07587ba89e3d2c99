"""Explains the path that a hypothetical connection would take: makes the data path's decisions and records them.
Pure.

This module uses the data path's objects and functions without counting, opening sockets or calling a balancer.
Instead of choosing an endpoint, it follows every possible endpoint. The kernel's choice of listener for a
redirected packet is unknown here, so the question can name the listener.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from xds.model.address import InternalAddress, NamedAddress, SocketAddress, canonical
from xds.model.cluster import Discovery, Endpoint, TransportSocket, proxy_version_of, security_of
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.listener import OriginalDst, OriginalSrc
from xds.model.matcher import IpTree, Matcher, MatcherList, hits
from xds.model.policy import PolicyList
from xds.model.secret import Validation
from xds.model.tls import SecretRef, TlsContext
from ztunnel.policy.engine import holds
from ztunnel.policy.reasons import reason
from ztunnel.proxy.envoy.listeners.chains import LiveChain, LiveRbac, LiveTcpProxy
from ztunnel.proxy.envoy.listeners.filters import FilterClosed, ReadsBytes, annotate, due
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.path.connect import NO_ADDRESS, NO_HTTP2, passed_on, tunnels
from ztunnel.proxy.envoy.path.internal import facts_behind
from ztunnel.proxy.envoy.path.terminate import NO_IP_ADDRESS, RequestRefused, TunnelRules, tunnel_route
from ztunnel.proxy.envoy.path.tunnel_request import tunnel_request
from ztunnel.proxy.envoy.path.verdict import verdict_of
from ztunnel.proxy.envoy.secrets.contexts import LiveContext, refusal
from ztunnel.proxy.envoy.secrets.verify import san_matches
from ztunnel.proxy.envoy.stream.outcome import UpstreamFailed
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster
from ztunnel.proxy.envoy.upstream.host import Host

Answer = dict[str, Any]

#: The largest number of nested internal listeners. The limit ends a loop of internal listeners.
_MOST_HOPS = 4
#: The number of policies to print per filter. Further policies are only counted.
_MOST_TOLD: Final = 32
_DAY_S: Final = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A hypothetical connection.

    Attributes:
        identity: the client's identity, if the connection arrives in a tunnel.
        listener: the name of the accepting listener. If it is empty, :func:`first_listener` finds the listener.
    """

    source: SocketAddress
    destination: SocketAddress
    identity: str = ""
    listener: str = ""


@dataclass(frozen=True, slots=True)
class SavedSecrets:
    """The certificates in a saved config dump. Dumps have no private keys, so TLS contexts cannot be built from a
    dump.

    Attributes:
        identities: the certificates' identities by secret name.
        ends: the certificates' expiry times by secret name.
    """

    identities: Mapping[str, tuple[str, ...]]
    ends: Mapping[str, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration that an explanation uses.

    Attributes:
        listeners: the active listeners, in order.
        cluster: returns a cluster by its name.
        now_s: the wall clock, for the remaining days of certificates.
        tunnel_rules: checks which targets requests can name.
        keep_client_address: whether tunnels behind an internal listener keep the client's address.
        saved: a dump's secrets, instead of TLS contexts.
        calico: explains Calico's policies where a socket is opened, see
            :func:`ztunnel.proxy.envoy.path.calico.explained`. ``None`` without such policies.
        addons: predicts the addons' verdicts, see
            :meth:`ztunnel.proxy.envoy.path.addons.StreamAddons.explained`. ``None`` without addons.
    """

    listeners: Sequence[LiveListener]
    cluster: Callable[[str], LiveCluster | None]
    now_s: float
    keep_client_address: bool = True
    _: KW_ONLY
    tunnel_rules: TunnelRules
    saved: SavedSecrets | None = None
    calico: Callable[[StreamInfo, LiveTcpProxy | None, SocketAddress, Sequence[str]], Answer] | None = None
    addons: Callable[[StreamInfo, Host, bool], Answer] | None = None


def explain(question: Question, configuration: Configuration) -> Answer:
    """Return the answer as plain values, ready for JSON.

    Raises:
        LookupError: the named listener does not exist, or no listener accepts the connection.
    """
    found, why = first_listener(question, configuration.listeners)
    hop = _Explainer(configuration).hop(found, _accepted(question, found), depth=0)
    answer: Answer = {"verdict": verdict_of(hop)}
    answer |= {"source": str(question.source), "destination": str(question.destination)}
    if question.identity:
        answer["identity"] = question.identity
    answer["listener_because"] = why
    answer["hop"] = hop
    return answer


def _accepted(question: Question, listener: LiveListener) -> StreamInfo:
    """Return the facts that a listener would have about the hypothetical connection."""
    destination = question.destination
    if _ends_tunnels(listener) and listener.model.addresses:
        # A tunnel's connection goes to the listener's port. The destination is named by the tunnel's request.
        destination = SocketAddress(destination.host, listener.model.addresses[0].port)
    facts = ConnectionFacts(source=question.source, direct_source=question.source, destination=destination)
    if question.identity:
        facts.peer = PeerCertificate(uri_sans=(question.identity,))
        facts.secured = True
    info = StreamInfo(
        connection_id=0, facts=facts, started=0.0, started_at=0.0, listener=listener.name, restored=True
    )
    info.authority = str(question.destination)
    return info


def _ends_tunnels(listener: LiveListener) -> bool:
    return any(chain.manager is not None for chain in listener.live_chains)


def client_address(given: str) -> SocketAddress:
    """Parse the source of a hypothetical connection: an IP address, with or without a port.

    Raises:
        ValueError: the text is not an IP address with or without a port.
    """
    try:
        return SocketAddress(canonical(ipaddress.ip_address(given.strip("[]"))), 0)
    except ValueError:
        return SocketAddress.parse(given)


def first_listener(question: Question, listeners: Sequence[LiveListener]) -> tuple[LiveListener, str]:
    """Return the socket listener that accepts the connection, and the reason.

    Raises:
        LookupError: no listener would accept the connection.
    """
    outside = [listener for listener in listeners if not listener.model.internal]
    if question.listener:
        for listener in listeners:
            if listener.name == question.listener:
                return listener, "the question names it"
        raise LookupError(f"no listener {question.listener}")
    if question.identity:
        for listener in outside:
            if _ends_tunnels(listener):
                return listener, "the question has an identity, and this listener ends tunnels"
    for listener in outside:
        if question.destination in listener.model.addresses:
            return listener, "it is bound to the destination"
    for listener in outside:
        if listener.model.use_original_dst and listener.model.matcher is not None:
            return listener, "it restores original destinations and matches by source: what pods send"
    for listener in outside:
        if listener.model.use_original_dst:
            return listener, "it restores original destinations"
    raise LookupError("no listener takes intercepted connections")


class _Explainer:
    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration

    def hop(self, listener: LiveListener, info: StreamInfo, depth: int) -> Answer:
        """Explain one hop: its listener filters, filter chain, policies and cluster."""
        answer: Answer = {"listener": listener.name, "address": listener.address_text}
        notes, missing_filter = _run_filters(listener, info)
        if notes:
            answer["listener_filters"] = notes
        if missing_filter:
            return answer | {"chain": None, "verdict": f"closed: {missing_filter}"}
        chain = listener.chain_for(info.facts)
        answer["chain"] = chain.name if chain is not None else None
        answer["chain_because"] = list(chain_reasons(listener, info.facts, chain))
        if chain is None:
            return answer | {"verdict": "closed: no filter chain matches"}
        if listener.model.internal and not chain.takes_internal:
            return answer | {
                "verdict": "closed: an internal listener needs a chain with a TCP proxy and without TLS"
            }
        missing = [each.name for place, each in enumerate(chain.model.discovered) if chain.lacks(place)]
        if missing:
            # A filter of this chain has not arrived. It could deny the connection, so the chain serves no
            # connections until then.
            return answer | {
                "missing_filters": missing,
                "verdict": "closed: the configuration of a filter has not arrived",
            }
        # For a tunnel connection, the application's port is not known yet.
        port_known = chain.manager is None or not self._configuration.tunnel_rules.judge_ports
        policies, denied = _policies(chain.asked(info.facts, port_known=port_known))
        if policies:
            answer["policies"] = policies
        if chain.tls is not None:
            answer["tls"] = _server_tls(chain, self._configuration)
            unproven = _unproven(chain.tls, info.facts.peer)
            if unproven:
                return answer | {"verdict": f"closed: tls handshake error: {unproven}"}
        if denied:
            return answer | {"verdict": f"closed: {denied}"}
        if chain.manager is not None:
            return answer | self._terminated(chain, info, depth)
        assert chain.proxy is not None
        chain.set_filter_state(info)
        return answer | self._proxied(chain.proxy, info, depth)

    def _proxied(self, proxy: LiveTcpProxy, info: StreamInfo, depth: int) -> Answer:
        override = info.facts.filter_state.get("envoy.tcp_proxy.cluster")
        if override:
            return {
                "cluster_because": "filter state envoy.tcp_proxy.cluster names it",
                "clusters": [self._cluster(override, info, proxy, depth, subset=proxy.model.metadata_match)],
            }
        choices = proxy.model.clusters
        answer: Answer = {"clusters": []}
        for choice in choices:
            entry = self._cluster(choice.name, info, proxy, depth, subset=proxy.subset_of(choice))
            if len(choices) > 1:
                entry["weight"] = choice.weight
            answer["clusters"].append(entry)
        return answer

    def _terminated(self, chain: LiveChain, info: StreamInfo, depth: int) -> Answer:
        """Explain a tunnel that ends at this proxy: the route and the application."""
        manager = chain.manager
        assert manager is not None
        info.method, info.manager = "CONNECT", manager.model
        # Proxies of this program send this header with each tunnel request.
        info.request_headers = (("x-envoy-original-dst-host", info.authority),)
        try:
            route = tunnel_route(manager.model, manager.routes, info)
        except RequestRefused as refusal:
            why = f"{refusal.answer.status}: {refusal.answer.details}"
            return {"verdict": why if manager.routes is not None else f"{why}, the route table has not arrived"}
        clusters = [self._cluster(choice.name, info, None, depth, chain) for choice in route.clusters]
        return {"authority": info.authority, "route": route.name, "clusters": clusters}

    # Upstream

    def _cluster(
        self,
        name: str,
        info: StreamInfo,
        proxy: LiveTcpProxy | None,
        depth: int,
        end: LiveChain | None = None,
        *,
        subset: Mapping[str, object] | None = None,
    ) -> Answer:
        """Explain the choice of a host in a cluster.

        Args:
            name: the cluster.
            info: the connection.
            proxy: the TCP proxy. ``None`` for a tunnel that ends here.
            depth: the number of hops before this one.
            end: the filter chain that terminated the tunnel, if there is a tunnel.
            subset: the metadata that a host must have.
        """
        cluster = self._configuration.cluster(name)
        answer: Answer = {"cluster": name}
        if cluster is None:
            return answer | {"verdict": "closed: there is no such cluster (NC)"}
        model = cluster.model
        answer |= {"type": str(model.discovery), "lb_policy": str(model.balancing.policy)}
        if end is not None:
            try:
                self._configuration.tunnel_rules.require_own_address(info, model)
            except RequestRefused as refusal:
                return answer | {"verdict": f"{refusal.answer.status}: {refusal.answer.details}"}
        hosts, left_out, because = _candidates(cluster, info, subset)
        answer["endpoints_because"] = because
        if left_out:
            answer["left_out"] = left_out
        answer["endpoints"] = [
            self._endpoint(cluster, host, priority, info, proxy, depth, end) for host, priority in hosts
        ]
        if not hosts:
            answer["verdict"] = "closed: no endpoint (UH)"
        return answer

    def _endpoint(
        self,
        cluster: LiveCluster,
        host: Host,
        priority: int,
        info: StreamInfo,
        proxy: LiveTcpProxy | None,
        depth: int,
        end: LiveChain | None,
    ) -> Answer:
        endpoint = host.endpoint
        answer: Answer = {
            "address": str(endpoint.address),
            "health": host.flags,
            "weight": endpoint.weight,
            "priority": priority,
        }
        if self._configuration.addons is not None and (proxy is None or not depth):
            info.upstream_cluster = cluster.model.alt_stat_name or cluster.model.name
            answer |= self._configuration.addons(info, host, proxy is None or self._is_inbound(info))
        match, transport = cluster.model.transport_socket_for(endpoint.metadata)
        if match:
            answer["transport_socket_match"] = match
        inner = security_of(transport)
        version = proxy_version_of(transport)
        if version is not None:
            answer["proxy_protocol"] = version
        if proxy is None and not isinstance(endpoint.address, SocketAddress):
            return answer | {"verdict": f"closed: {NO_IP_ADDRESS}"}
        rules = self._configuration.tunnel_rules
        if end is not None and rules.judge_ports and isinstance(endpoint.address, SocketAddress):
            policies, denied = _policies(end.asked_about(info.facts, endpoint.address))
            if policies:
                answer["policies"] = policies
            if denied:
                return answer | {"verdict": f"403: {denied}"}
        if isinstance(endpoint.address, InternalAddress):
            return answer | self._inner(cluster, host, transport, info, depth)
        if isinstance(endpoint.address, NamedAddress):
            return answer | {"verdict": f"closed: {NO_ADDRESS}"}
        if proxy is not None and isinstance(endpoint.address, SocketAddress) and tunnels(proxy, info):
            answer |= _tunnel(cluster, proxy, info, str(endpoint.address))
        if isinstance(inner, TlsContext):
            answer["tls"] = _client_tls(cluster, inner, self._configuration)
        else:
            answer["tls"] = None
        if info.options.source is not None:
            answer["leaves_from"] = info.options.source
        if info.options.mark:
            answer["mark"] = info.options.mark
        calico = self._configuration.calico
        if calico is not None and isinstance(endpoint.address, SocketAddress) and "verdict" not in answer:
            own = end.tls.local_uri_sans if end is not None and end.tls is not None else ()
            answer |= calico(info, proxy, endpoint.address, own)
        identities = (answer["tls"] or {}).get("identity")
        if identities and "tunnel" in answer and depth < _MOST_HOPS:
            assert isinstance(inner, TlsContext)
            inbound = self._inbound(
                answer["tunnel"]["authority"], identities[0], info, depth, cluster.context(inner)
            )
            if inbound is not None:
                answer["inbound"] = inbound
        return answer

    def _is_inbound(self, info: StreamInfo) -> bool:
        listeners = self._configuration.listeners
        return any(each.model.direction == "inbound" for each in listeners if each.name == info.listener)

    def _inbound(
        self, authority: str, identity: str, outer: StreamInfo, depth: int, client: LiveContext
    ) -> Answer | None:
        """Explain what happens at the far end of a tunnel. Return ``None`` if the far end is not on this node."""
        try:
            destination = SocketAddress.parse(authority)
        except ValueError:
            return None  # a name, which the far end resolves
        question = Question(source=outer.facts.source, destination=destination, identity=identity)
        for listener in self._configuration.listeners:
            if not listener.model.internal and _ends_tunnels(listener):
                info = _accepted(question, listener)
                chain = listener.chain_for(info.facts)
                # A chain without a connection manager only closes connections to pods of other nodes.
                if chain is not None and chain.manager is not None:
                    refused = self._handshake(client, chain)
                    hop = self.hop(listener, info, depth + 1)
                    return hop | {"verdict": f"closed: tls handshake error: {refused}"} if refused else hop
        return None

    def _handshake(self, client: LiveContext, chain: LiveChain) -> str:
        """Return why the TLS handshake of a node-local tunnel would fail, or the empty string."""
        if self._configuration.saved is not None or chain.tls is None:
            return ""
        return refusal(client, chain.tls, datetime.fromtimestamp(self._configuration.now_s, UTC))

    def _inner(
        self, cluster: LiveCluster, host: Host, transport: TransportSocket, outer: StreamInfo, depth: int
    ) -> Answer:
        """Explain the hop at an internal listener, which is chosen as in ``InternalListeners.enter``."""
        address = host.endpoint.address
        assert isinstance(address, InternalAddress)
        listener = next(
            (
                each
                for each in self._configuration.listeners
                if each.model.internal and each.name == address.listener
            ),
            None,
        )
        if listener is None:
            return {"verdict": f"closed: there is no internal listener {address.listener}"}
        if depth >= _MOST_HOPS:
            return {"verdict": "more internal listeners than are followed here"}
        facts = facts_behind(outer.facts, *passed_on(outer.facts, cluster, host, transport))
        info = StreamInfo(connection_id=0, facts=facts, started=0.0, started_at=0.0, listener=listener.name)
        if self._configuration.keep_client_address:
            info.options = outer.options
        return {"hop": self.hop(listener, info, depth + 1)}


# Parts of an answer


def _run_filters(listener: LiveListener, info: StreamInfo) -> tuple[list[str], str]:
    """Run the listener filters that need no bytes. Return each filter's effect, and the reason if one closes the
    connection.
    """
    notes: list[str] = []
    try:
        for name, found in due(listener.filters, info, notes):
            if not listener.model.internal and isinstance(found, ReadsBytes):
                notes.append(f"{name}: reads bytes, which a question has none of")
                continue
            annotate(found, info, name)
            if isinstance(found, OriginalSrc):
                leaves = f"upstream sockets leave from {info.options.source} with mark {found.mark}"
                notes.append(f"{name}: {leaves}")
            elif not isinstance(found, OriginalDst) or listener.model.internal:
                notes.append(f"{name}: destination is {info.facts.destination}")
    except FilterClosed as error:
        return notes, str(error)
    return notes, ""


def chain_reasons(listener: LiveListener, facts: ConnectionFacts, chain: LiveChain | None) -> Iterator[str]:
    """Return the matching steps that lead to a filter chain, one line each."""
    if listener.model.matcher is not None:
        yield from _matcher_steps(listener.model.matcher, facts)
    elif chain is not None and chain.model is not listener.model.default_chain:
        yield f"its filter_chain_match is the most specific of {len(listener.model.chains)}"
    if chain is not None and chain.model is listener.model.default_chain:
        yield "no other chain matches; this is the default chain"


def _matcher_steps(matcher: Matcher, facts: ConnectionFacts) -> Iterator[str]:
    lookup = matcher.lookup
    found = hits(lookup, facts)
    if isinstance(lookup, MatcherList):
        shown = f"list of {len(lookup.matchers)} predicates"
    else:
        entries = len(lookup.ranges) if isinstance(lookup, IpTree) else len(lookup.entries)
        shown = f"{lookup.input.kind.value} {lookup.input.read(facts)} among {entries}"
    for hit in found:
        if isinstance(hit.target, str):
            yield f"{shown}: {hit.target}"
            if not hit.keep_matching:
                return
        else:
            yield f"{shown}: found"
            yield from _matcher_steps(hit.target, facts)
            if hit.target.evaluate(facts) is not None and not hit.keep_matching:
                return
    if not found:
        yield f"{shown}: not found"
    fallback = matcher.on_no_match
    if fallback is None:
        return
    if isinstance(fallback.target, str):
        yield f"on no match: {fallback.target}"
    else:
        yield "on no match: go on"
        yield from _matcher_steps(fallback.target, facts)


def _policies(asked: Iterable[tuple[LiveRbac, ConnectionFacts]]) -> tuple[list[Answer], str]:
    """Return the result of each RBAC filter, and Envoy's termination details if one denies."""
    shown: list[Answer] = []
    for rbac, facts in asked:
        shadow, decision, denied = rbac.decide(facts)
        rules = rbac.model.rules
        if rules is None or decision is None:
            continue
        shown.append({"allowed": decision.allowed, "policy": decision.policy or None, **_judged(rules, facts)})
        if rbac.model.shadow is not None and shadow is not None:
            told = _judged(rbac.model.shadow, facts)
            shown[-1]["shadow"] = {"allowed": shadow.allowed, "policy": shadow.policy or None, **told}
        if denied:
            return shown, denied
    return shown, ""


def _judged(rules: PolicyList, facts: ConnectionFacts) -> Answer:
    """Return each policy's result with the deciding clause."""
    listed = [(policy, holds(policy.condition, facts)) for tier in rules.tiers for policy in tier.policies]
    # Matching policies decide, so they are listed first. The other policies follow, up to the limit.
    listed.sort(key=lambda each: not each[1])
    told: Answer = {
        "judged": [
            {
                "policy": policy.name,
                "action": str(policy.verdict),
                "holds": held,
                "because": reason(policy.condition, facts),
            }
            for policy, held in listed[:_MOST_TOLD]
        ]
    }
    if len(listed) > _MOST_TOLD:
        told["more_policies"] = len(listed) - _MOST_TOLD
    return told


def _candidates(
    cluster: LiveCluster, info: StreamInfo, subset: Mapping[str, object] | None
) -> tuple[list[tuple[Host, int]], list[Answer], str]:
    """Return the hosts that can be chosen, with priorities, why other hosts cannot, and how a host is chosen."""
    if cluster.model.discovery is Discovery.ORIGINAL_DST:
        hosts, because = _original(cluster, info)
        return hosts, [], because
    every = [(host, priority) for priority, level in enumerate(cluster.hosts.levels) for host in level.hosts]
    drawn = set(cluster.candidates(subset))
    hosts = [each for each in every if each[0] in drawn]
    left_out = [
        {
            "address": str(host.endpoint.address),
            "because": "another priority, locality or subset is chosen" if host.healthy else host.flags,
        }
        for host, _ in every
        if host not in drawn
    ]
    usable = sum(host.healthy for host, _ in every)
    one = "one" if len(hosts) == len(every) else f"one of {len(hosts)}"
    shown = f"{len(every)} endpoint{'' if len(every) == 1 else 's'}, {usable} healthy"
    return hosts, left_out[:_MOST_TOLD], f"{shown}, {one} is chosen per connection"


def _original(cluster: LiveCluster, info: StreamInfo) -> tuple[list[tuple[Host, int]], str]:
    before = cluster.stats.original_dst_host_invalid.value
    address = cluster.original.address(info)
    cluster.stats.original_dst_host_invalid.value = before  # undo the count, because this is only an explanation
    if address is None:
        return [], "ORIGINAL_DST: the connection has no original destination"
    known = next((host for host in cluster.all_hosts if host.endpoint.key == str(address)), None)
    host = known or Host(Endpoint(address=address))
    override = cluster.model.original_dst
    port = f", port overridden to {override.port_override}" if override and override.port_override else ""
    return [(host, 0)], f"ORIGINAL_DST: the connection's own destination{port}"


def _tunnel(cluster: LiveCluster, proxy: LiveTcpProxy, info: StreamInfo, address: str) -> Answer:
    if cluster.model.http2 is None:
        return {"verdict": f"closed: {NO_HTTP2}"}
    try:
        authority, headers = tunnel_request(proxy, info)
    except UpstreamFailed as error:
        return {"verdict": f"closed: {error}"}
    shown = [f"{name}: {value}" for name, value in headers]
    return {"tunnel": {"address": address, "authority": authority, "headers": shown}}


def _client_tls(cluster: LiveCluster, model: TlsContext, configuration: Configuration) -> Answer:
    context = cluster.context(model)
    if configuration.saved is not None:
        return {**_own(context.model, configuration), "verifies": _wanted(context.model)}
    if context.current is None:
        return {"verdict": "closed: secrets are missing", "awaits": [ref.name for ref in model.secret_refs]}
    return {**_presented(context, configuration.now_s), "verifies": _verification(context.validation)}


def _server_tls(chain: LiveChain, configuration: Configuration) -> Answer:
    context = chain.tls
    assert context is not None
    requires = {"requires_client_certificate": context.model.require_peer_certificate}
    if configuration.saved is not None:
        return {**_own(context.model, configuration), **requires, "verifies": _wanted(context.model)}
    if context.current is None:
        awaited = [ref.name for ref in chain.model.secret_refs]
        return {"verdict": "closed: secrets are missing", "awaits": awaited}
    own = _presented(context, configuration.now_s)
    return {**own, **requires, "verifies": _verification(context.validation)}


def _unproven(context: LiveContext, client: PeerCertificate | None) -> str:
    """Return why a handshake would fail because of the names in a client's certificate, or the empty string."""
    validation = context.validation or context.model.validation  # a dump's contexts have not been built
    if client is None:
        wanted = context.model.require_peer_certificate or (validation is not None and validation.restricts)
        return "the client has no certificate" if wanted else ""
    matches = validation.san_matches if validation is not None else ()
    if not matches or any(san_matches(match, "uri", name) for match in matches for name in client.uri_sans):
        return ""
    if any(match.san_type not in ("uri", "any") for match in matches):
        return ""  # the question does not have the certificate's other names
    return "the configuration does not accept the names in the client's certificate"


def _presented(context: LiveContext, now_s: float) -> Answer:
    """Return the identities in a TLS context's own certificate, and the certificate's validity."""
    leaf = context.presented.leaf
    ends = leaf.not_valid_after_utc if leaf is not None else None
    return {"identity": list(context.local_uri_sans), **_validity(ends, now_s)}


def _own(model: TlsContext, configuration: Configuration) -> Answer:
    """Return the result of :func:`_presented` from the certificates in a saved config dump."""
    source, saved = model.certificate, configuration.saved
    assert saved is not None
    if not isinstance(source, SecretRef):
        return {"identity": []}
    ends = saved.ends.get(source.name)
    return {"identity": list(saved.identities.get(source.name, ())), **_validity(ends, configuration.now_s)}


def _validity(ends: datetime | None, now_s: float) -> Answer:
    if ends is None:
        return {}
    days = math.floor(10 * (ends.timestamp() - now_s) / _DAY_S) / 10
    return {"valid_until": f"{ends:%Y-%m-%dT%H:%M:%SZ}", "days_left": days}


def _wanted(model: TlsContext) -> list[str] | None:
    """Return the requirements on the peer's certificate for a TLS context that was not built, as with a saved
    dump.
    """
    validation = model.validation
    if model.validation_ref is None:
        return _verification(validation)
    return ["a trusted root", *(_sans(validation) if validation is not None else ())]


def _sans(validation: Validation) -> list[str]:
    return [f"{san.san_type} {san.match.kind} {san.match.value}" for san in validation.san_matches]


def _verification(validation: Validation | None) -> list[str] | None:
    """Return a TLS context's requirements on the peer's certificate, or None without any."""
    if validation is None or validation.trusted_ca_pem is None:
        return None
    return ["a trusted root", *_sans(validation)]
