"""Compiles resources to PolicySync's objects: converts selectors to IP sets, orders tiers, inherits labels. Pure.

Like in Felix, a rule has the texts of its selectors, to evaluate identities, and the ids of their IP sets, to
evaluate addresses. Ids equal Calico's, so that a client could use either server.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Final, TypeAlias

from xds.model import calico as c
from xds.model.address import IpNetwork
from xds.model.selector import (
    All,
    And,
    Compare,
    Global,
    Has,
    In,
    Node,
    Not,
    Or,
    Selector,
    hashed_id,
    parse_selector,
)
from ztunnel.policy.calico.resources import (
    ACCOUNT_LABEL,
    BUILT_IN_TIERS,
    NAMESPACE_LABEL,
    OF_ACCOUNT,
    OF_NAMESPACE,
    ORCHESTRATOR_LABEL,
    ApiPolicy,
    ApiProfile,
    ApiRule,
    Entity,
    HostEndpoint,
    Labelled,
    NamedPort,
    NetworkSet,
    Pod,
    Resources,
    Service,
    own_label,
)
from ztunnel.policy.calico.resources import Node as ApiNode

IpAddress: TypeAlias = IPv4Address | IPv6Address
#: Namespace and name.
PodKey: TypeAlias = tuple[str, str]

NAME_LABEL: Final = "projectcalico.org/name"
#: The label that API servers give every Namespace (LabelMetadataName of k8s.io/api/core/v1).
_METADATA_NAME: Final = "kubernetes.io/metadata.name"
#: The maximum length of a label value in Kubernetes. A longer account name is not used as a label.
_LABEL_LENGTH: Final = 63


@dataclass(slots=True)
class Compiled:
    """All objects that a node can receive, by key.

    Attributes:
        ip_sets: type and members of each IP set that a rule names.
        pods: uid, namespace and name of the pods that are endpoints.
        nodes: the node of each endpoint.
        captured: endpoints whose traffic goes through their node's proxy.
    """

    ip_sets: dict[str, tuple[c.IpSetType, frozenset[str]]] = field(default_factory=dict)
    policies: dict[c.PolicyId, c.Policy] = field(default_factory=dict)
    profiles: dict[str, c.Policy] = field(default_factory=dict)
    endpoints: dict[c.EndpointId, c.Endpoint] = field(default_factory=dict)
    accounts: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    namespaces: dict[str, dict[str, str]] = field(default_factory=dict)
    uids: dict[str, c.EndpointId] = field(default_factory=dict)
    nodes: dict[c.EndpointId, str] = field(default_factory=dict)
    captured: set[c.EndpointId] = field(default_factory=set)


def compile_resources(resources: Resources) -> Compiled:
    """Compile resources to the PolicySync objects of all pods in them."""
    return _Compiler(resources).compiled()


def endpoint_id(pod: Pod) -> c.EndpointId:
    """Return the id of a pod's endpoint."""
    return c.EndpointId("k8s", f"{pod.namespace}/{pod.name}", "eth0")


def with_own_addresses(pods: Mapping[PodKey, Pod]) -> dict[PodKey, Pod]:
    """Return pods with only the addresses that they own. If several pods have an address, one pod owns it."""
    holders: dict[IpAddress, Pod] = {}
    for pod in filter(lambda pod: pod.is_endpoint, pods.values()):
        for address in pod.addresses:
            holder = holders.setdefault(address, pod)
            if pod.claim > holder.claim:
                holders[address] = pod
    return {
        key: with_addresses(pod, [address for address in pod.addresses if holders[address] is pod])
        if pod.is_endpoint
        else pod
        for key, pod in pods.items()
    }


def with_addresses(pod: Pod, held: Sequence[IpAddress]) -> Pod:
    """Return a pod with only the addresses that it owns, or the same object if it owns all its addresses."""
    return pod if len(held) == len(pod.addresses) else replace(pod, addresses=tuple(held))


@dataclass(frozen=True, slots=True)
class Selectable:
    """An object that endpoint selectors can select: a pod, or a network set."""

    labels: Mapping[str, str]
    nets: tuple[IpNetwork, ...]
    ports: tuple[NamedPort, ...] = ()


def profiles_of(pod: Pod) -> tuple[str, str]:
    """Return the names of a pod's profiles: its namespace's and its service account's."""
    return f"kns.{pod.namespace}", f"ksa.{pod.namespace}.{pod.account}"


def own_labels(known: Labelled | None, name: str) -> dict[str, str]:
    """Return an object's labels and Calico's label with its name, which is the only one if it was not read."""
    return {**(known.labels if known else {}), NAME_LABEL: name}


def namespace_labels(known: Labelled | None, name: str) -> dict[str, str]:
    """Return the labels of a namespace, with the one that API servers add and files can lack."""
    return {**own_labels(known, name), _METADATA_NAME: name}


def namespace_profile(name: str, labels: Mapping[str, str]) -> ApiProfile:
    """Return the profile that a namespace implies. It allows all traffic, and its endpoints inherit its labels."""
    allow = (ApiRule(c.Action.ALLOW),)
    return ApiProfile(f"kns.{name}", allow, allow, {OF_NAMESPACE + key: value for key, value in labels.items()})


def account_profile(namespace: str, name: str, labels: Mapping[str, str]) -> ApiProfile:
    """Return the profile that a service account implies. It has no rules, and its endpoints inherit its labels."""
    prefixed = {OF_ACCOUNT + key: value for key, value in labels.items()}
    return ApiProfile(f"ksa.{namespace}.{name}", (), (), prefixed)


def pod_selectable(pod: Pod, labels_of: Callable[[str], Mapping[str, str]]) -> Selectable:
    """Return a pod as an object for selectors. ``labels_of`` has the labels inherited from each profile."""
    labels = {**_chosen(pod.labels), NAMESPACE_LABEL: pod.namespace, ORCHESTRATOR_LABEL: "k8s"}
    if len(pod.account) < _LABEL_LENGTH:
        labels[ACCOUNT_LABEL] = pod.account
    for name in profiles_of(pod):
        for key, value in labels_of(name).items():
            labels.setdefault(key, value)
    return Selectable(labels, tuple(ip_network(address) for address in pod.addresses), pod.ports)


def _chosen(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that users have chosen for an object in a namespace."""
    return {own_label(key): value for key, value in labels.items()}


def network_selectable(found: NetworkSet, labels_of: Callable[[str], Mapping[str, str]]) -> Selectable:
    """Return a network set as an object for selectors."""
    labels = dict(found.labels)
    if found.namespace:
        labels = {**_chosen(found.labels), NAMESPACE_LABEL: found.namespace}
        for key, value in labels_of(f"kns.{found.namespace}").items():
            labels.setdefault(key, value)
    return Selectable(labels, found.nets)


def host_selectable(found: HostEndpoint, labels_of: Callable[[str], Mapping[str, str]]) -> Selectable:
    """Return a host endpoint as an object for selectors, with the addresses in its resource."""
    labels = dict(found.labels)
    for name in found.profiles:
        for key, value in labels_of(name).items():
            labels.setdefault(key, value)
    return Selectable(labels, tuple(map(ip_network, found.addresses)), found.ports)


def node_selectable(node: ApiNode) -> Selectable:
    """Return a node as an object for node selectors. Endpoint selectors never select it."""
    return Selectable(node.labels, tuple(ip_network(address) for address in node.addresses))


class RuleCompiler(ABC):
    """Compiles rules. Subclasses provide the IP sets that rules need, and return their ids."""

    @abstractmethod
    def selector_set(self, selector: Selector) -> str:
        """Return the id of the set with the addresses that a selector selects."""

    @abstractmethod
    def named_port_set(self, selector: Selector | None, protocol: int | str | None, name: str) -> str:
        """Return the id of the set with a named port of the selected endpoints. If the selector is None, it
        selects all.
        """

    @abstractmethod
    def service_set(self, service: tuple[str, str], *, ports: bool) -> str:
        """Return the id of the set with a service's addresses, with or without its ports."""

    @abstractmethod
    def node_set(self, selector: Selector) -> str:
        """Return the id of the set with the addresses of the nodes that a selector selects."""

    def rule(self, rule: ApiRule, namespace: str) -> c.Rule:
        """Return a rule in the form of PolicySync. An empty namespace means a global policy or a profile."""
        protocol = rule.protocol.lower() if isinstance(rule.protocol, str) else rule.protocol
        not_protocol = rule.not_protocol.lower() if isinstance(rule.not_protocol, str) else rule.not_protocol
        source = self._peer(rule.source, namespace, protocol, is_destination=False)
        destination = self._peer(rule.destination, namespace, protocol, is_destination=True)
        return c.Rule(
            rule.action,
            source,
            destination,
            protocol,
            not_protocol,
            rule.ip_version,
            rule.http,
            rule.icmp,
            rule.not_icmp,
        )

    def _peer(
        self, entity: Entity, namespace: str, protocol: int | str | None, *, is_destination: bool
    ) -> c.PeerMatch:
        selector = _peer_selector(entity, namespace)
        names = [port for port in entity.ports if isinstance(port, str)]
        not_names = [port for port in entity.not_ports if isinstance(port, str)]
        ranges = tuple(port for port in entity.ports if isinstance(port, tuple))
        not_ranges = tuple(port for port in entity.not_ports if isinstance(port, tuple))
        named = tuple(self.named_port_set(selector, protocol, name) for name in names)
        not_named = tuple(self.named_port_set(selector, protocol, name) for name in not_names)
        sets: list[str] = []
        not_sets: list[str] = []
        port_sets: list[str] = []
        # The named-port set contains only selected addresses, so the selector needs no other set.
        if selector is not None and (ranges or not named):
            sets.append(self.selector_set(selector))
        if selector is None and entity.not_selector:
            not_sets.append(self.selector_set(parse_selector(entity.not_selector)))
        if entity.service is not None:
            (port_sets if is_destination else sets).append(self.service_set(entity.service, ports=is_destination))
        if entity.nodes is not None:
            sets.append(self.node_set(parse_selector(entity.nodes)))
        return c.PeerMatch(
            nets=entity.nets,
            not_nets=entity.not_nets,
            ports=ranges,
            not_ports=not_ranges,
            named_ports=named,
            not_named_ports=not_named,
            ip_sets=tuple(sets),
            not_ip_sets=tuple(not_sets),
            ip_port_sets=tuple(port_sets),
            selector=entity.selector,
            not_selector=entity.not_selector,
            namespace_selector=entity.namespace_selector,
            account_names=entity.account_names,
            account_selector=entity.account_selector,
        )


class _Compiler(RuleCompiler):
    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._result = Compiled()
        pods = with_own_addresses(resources.pods)
        self._pods = {endpoint_id(pod): pod for pod in pods.values() if pod.is_endpoint}
        self._profiles = self._all_profiles()
        self._selectable = {key: pod_selectable(pod, self._labels_of) for key, pod in self._pods.items()}
        hosts = (host_selectable(found, self._labels_of) for found in resources.host_endpoints.values())
        self._everything = [*self._selectable.values(), *self._network_sets(), *hosts]

    def compiled(self) -> Compiled:
        result = self._result
        for profile in self._profiles.values():
            rules = [tuple(self.rule(rule, "") for rule in part) for part in (profile.inbound, profile.outbound)]
            result.profiles[profile.name] = c.Policy("", *rules)
        for policy in self._resources.policies.values():
            namespace = policy.id.namespace
            rules = [
                tuple(self.rule(rule, namespace) for rule in part) for part in (policy.inbound, policy.outbound)
            ]
            result.policies[policy.id] = c.Policy(namespace, *rules)
        ordered = self._ordered_tiers()
        for key, pod in self._pods.items():
            found = self._selectable[key]
            tiers = tuple(self._tiers_of(found.labels, ordered))
            result.endpoints[key] = c.Endpoint("", found.nets, tiers, profiles_of(pod))
            result.nodes[key] = pod.node
            if pod.captured:
                result.captured.add(key)
            if pod.uid:
                result.uids[pod.uid] = key
        return result

    # Labels and profiles

    def _all_profiles(self) -> dict[str, ApiProfile]:
        """Return the existing profiles, and the profiles that namespaces and accounts imply."""
        found: dict[str, ApiProfile] = {}
        pods = [pod for pod in self._resources.pods.values() if pod.is_endpoint]
        names = {pod.namespace for pod in pods} | set(self._resources.namespaces)
        for name in sorted(names):
            known = self._resources.namespaces.get(name)
            self._result.namespaces[name] = namespace_labels(known, name)
            found[f"kns.{name}"] = namespace_profile(name, self._result.namespaces[name])
        accounts = {(pod.namespace, pod.account) for pod in pods} | set(self._resources.accounts)
        for namespace, name in sorted(accounts):
            account = self._resources.accounts.get((namespace, name))
            labels = self._result.accounts[namespace, name] = own_labels(account, name)
            found[f"ksa.{namespace}.{name}"] = account_profile(namespace, name, labels)
        return found | self._resources.profiles

    def _labels_of(self, profile: str) -> Mapping[str, str]:
        found = self._profiles.get(profile)
        return found.labels if found is not None else {}

    def _network_sets(self) -> Iterator[Selectable]:
        return (network_selectable(found, self._labels_of) for found in self._resources.network_sets.values())

    # Tiers

    def _ordered_tiers(self) -> list[tuple[str, bool, list[tuple[ApiPolicy, Selector]]]]:
        """Return the tiers in order: name, whether its end passes, and its policies in order. Nonexistent tiers
        that policies name come last and deny at their end.
        """
        known = {name: (order, passes) for name, (order, passes) in BUILT_IN_TIERS.items()}
        known |= {tier.name: (tier.order, tier.passes) for tier in self._resources.tiers.values()}
        policies: dict[str, list[ApiPolicy]] = {}
        for policy in self._resources.policies.values():
            policies.setdefault(policy.tier, []).append(policy)
        names = sorted(policies, key=lambda name: (name not in known, *known.get(name, (0.0,))[:1], name))
        return [
            (
                name,
                known[name][1] if name in known else False,
                [(policy, policy_selector(policy)) for policy in sorted(policies[name], key=place_of)],
            )
            for name in names
        ]

    def _tiers_of(
        self, labels: Mapping[str, str], ordered: Iterable[tuple[str, bool, list[tuple[ApiPolicy, Selector]]]]
    ) -> Iterator[c.Tier]:
        for name, passes, policies in ordered:
            selected = [policy for policy, selector in policies if selector.matches(labels)]
            ingress = tuple(policy.id for policy in selected if policy.ingress)
            egress = tuple(policy.id for policy in selected if policy.egress)
            if ingress or egress:
                yield c.Tier(name, ingress, egress, passes)

    # IP sets

    def _set(self, set_id: str, kind: c.IpSetType, members: Callable[[], Iterable[str]]) -> str:
        if set_id not in self._result.ip_sets:
            self._result.ip_sets[set_id] = (kind, frozenset(members()))
        return set_id

    def selector_set(self, selector: Selector) -> str:
        def members() -> Iterator[str]:
            for found in self._selected(selector):
                yield from map(str, found.nets)

        return self._set(selector.identity, c.IpSetType.NET, members)

    def named_port_set(self, selector: Selector | None, protocol: int | str | None, name: str) -> str:
        selector = selector or Selector(All())
        text = port_protocol(protocol)

        def members() -> Iterator[str]:
            for found in self._selected(selector):
                yield from named_port_members(found, text, name)

        return self._set(named_port_id(selector, text, name), c.IpSetType.IP_AND_PORT, members)

    def service_set(self, service: tuple[str, str], *, ports: bool) -> str:
        namespace = service[0]
        found = self._resources.services.get(service)
        pods = [
            selectable
            for key, selectable in self._selectable.items()
            if found is not None
            and found.selector
            and self._pods[key].namespace == namespace
            and found.selector.items() <= selectable.labels.items()
        ]

        def addresses() -> Iterator[str]:
            for pod in pods:
                yield from map(str, pod.nets)

        def with_ports() -> Iterator[str]:
            for pod in pods:
                yield from service_members(pod, found)

        kind = c.IpSetType.IP_AND_PORT if ports else c.IpSetType.NET
        return self._set(service_id(service, ports=ports), kind, with_ports if ports else addresses)

    def node_set(self, selector: Selector) -> str:
        def members() -> Iterator[str]:
            for node in self._resources.nodes.values():
                if selector.matches(node.labels):
                    yield from map(str, node_selectable(node).nets)

        return self._set(node_set_id(selector), c.IpSetType.NET, members)

    def _selected(self, selector: Selector) -> Iterator[Selectable]:
        return (found for found in self._everything if selector.matches(found.labels))


def port_protocol(protocol: int | str | None) -> str:
    """Return the protocol for a named-port set: ``any`` if the rule has no protocol with ports."""
    known = {number: text for text, number in c.PROTOCOLS.items()}
    wanted = known.get(protocol) if isinstance(protocol, int) else protocol
    return wanted if wanted in ("tcp", "udp", "sctp") else "any"


def named_port_id(selector: Selector, protocol: str, name: str) -> str:
    """Return the id of the set for a named port."""
    return hashed_id("n:", f"{selector.identity},{protocol},{name}")


def node_set_id(selector: Selector) -> str:
    """Return the id of the set with the addresses of selected nodes. Calico has no such set."""
    return hashed_id("nodes:", str(selector))


def service_id(service: tuple[str, str], *, ports: bool) -> str:
    """Return the id of the set for a service."""
    return hashed_id("svc:" if ports else "svcnoport:", "/".join(service))


def named_port_members(found: Selectable, protocol: str, name: str) -> Iterator[str]:
    """Yield the members that one endpoint adds to a named-port set."""
    for port in found.ports:
        if port.name == name and protocol in ("any", port.protocol):
            yield from _members(found.nets, port.protocol, port.port)


def service_members(found: Selectable, service: Service | None) -> Iterator[str]:
    """Yield the members that a pod adds to the set of a service's ports."""
    for protocol, target in service.targets if service is not None else ():
        for number in _target(target, protocol, found.ports):
            yield from _members(found.nets, protocol, number)


def _members(nets: Iterable[IpNetwork], protocol: str, port: int) -> Iterator[str]:
    return (f"{net.network_address},{protocol}:{port}" for net in nets)


def _target(target: int | str, protocol: str, ports: Iterable[NamedPort]) -> Iterator[int]:
    if isinstance(target, int):
        yield target
    else:
        yield from (port.port for port in ports if port.name == target and port.protocol == protocol)


def place_of(policy: ApiPolicy) -> tuple[float, str]:
    """Return the sort key of a policy within its tier."""
    return policy.order, f"{policy.id.name}/{policy.id.namespace}/{policy.id.kind}"


def policy_selector(policy: ApiPolicy) -> Selector:
    """Return the selector of the endpoints that a policy applies to."""
    parts = [parse_selector(policy.selector).root] if policy.selector.strip() else []
    if policy.namespace_selector.strip():
        parts.append(parse_selector(policy.namespace_selector).prefixed(OF_NAMESPACE).root)
        # "All namespaces" excludes objects outside of namespaces, such as a global network set.
        parts = [_replaced(part, All, Has(NAMESPACE_LABEL)) for part in parts]
    if policy.account_selector.strip():
        part = parse_selector(policy.account_selector).prefixed(OF_ACCOUNT).root
        parts.append(_replaced(part, All, Has(ACCOUNT_LABEL)))
    if policy.id.namespace:
        parts.append(_in_namespace(policy.id.namespace))
    return _joined(parts) or Selector(All())


def _peer_selector(entity: Entity, namespace: str) -> Selector | None:
    """Return the selector for the endpoints on one side of a rule. None if the side selects none."""
    accounts: list[Node] = []
    if entity.account_selector.strip():
        accounts.append(parse_selector(entity.account_selector).prefixed(OF_ACCOUNT).root)
    if entity.account_names:
        accounts.append(In(ACCOUNT_LABEL, tuple(sorted(set(entity.account_names))), negated=False))
    own = [selector.root] if (selector := _joined(accounts)) is not None else []
    if entity.selector.strip():
        own.append(parse_selector(entity.selector).root)
    parts: list[Node] = []
    if entity.namespace_selector.strip():
        part = parse_selector(entity.namespace_selector).prefixed(OF_NAMESPACE).root
        part = _replaced(part, All, Has(NAMESPACE_LABEL))
        parts.append(_replaced(part, Global, Not(Has(NAMESPACE_LABEL))))
    elif namespace and (own or entity.not_selector.strip()):
        parts.append(_in_namespace(namespace))
    joined = _joined(own)
    if joined is not None:
        parts.append(joined.root)
    positive = _joined(parts)
    if positive is not None and entity.not_selector.strip():
        negative = parse_selector(entity.not_selector).root
        return _joined([positive.root, negative.operand if isinstance(negative, Not) else Not(negative)])
    return positive


def _joined(parts: list[Node]) -> Selector | None:
    if not parts:
        return None
    return Selector(parts[0] if len(parts) == 1 else And(tuple(parts)))


def _in_namespace(name: str) -> Node:
    # Not parsed from a text, because the name of a file's object can contain quotes.
    return Compare(NAMESPACE_LABEL, "==", name)


def _replaced(node: Node, kind: type[Node], by: Node) -> Node:
    """Return a selector's tree, with every node of one kind replaced."""
    if isinstance(node, kind):
        return by
    match node:
        case Not():
            inner = _replaced(node.operand, kind, by)
            return inner.operand if isinstance(inner, Not) else Not(inner)
        case And():
            return And(tuple(_replaced(operand, kind, by) for operand in node.operands))
        case Or():
            return Or(tuple(_replaced(operand, kind, by) for operand in node.operands))
        case _:
            return node
