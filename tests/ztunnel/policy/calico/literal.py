"""Evaluation as Calico's description has it, sentence by sentence: slow, without index, cache or compiling."""

from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any

from xds.model import calico as c
from xds.model.address import IpNetwork
from xds.model.selector import SelectorError, parse_selector
from ztunnel.policy.calico.http_path import normal_path
from ztunnel.policy.calico.verdict import Code

#: A member that no set can read.
UNREADABLE = "nonsense"
Sets = dict[str, tuple[c.IpSetType, set[str]]]


class Stop(Exception):
    """Evaluation cannot go on."""

    def __init__(self, code: Code) -> None:
        super().__init__(code)
        self.code = code


class Literal:
    """A store of plain dictionaries, changed by the same updates."""

    def __init__(self, *, connections_only: bool = False) -> None:
        self.connections_only = connections_only
        self.sets: Sets = {}
        self.policies: dict[c.PolicyId, c.Policy] = {}
        self.profiles: dict[str, c.Policy] = {}
        self.endpoints: dict[c.EndpointId, c.Endpoint] = {}
        self.accounts: dict[tuple[str, str], dict[str, str]] = {}
        self.namespaces: dict[str, dict[str, str]] = {}

    def apply(self, update: c.Update) -> None:
        match update:
            case c.IpSetUpdate():
                self.sets[update.id] = (update.type, set(update.members))
            case c.IpSetDelta():
                if update.id in self.sets:
                    members = self.sets[update.id][1]
                    members |= set(update.added)
                    members -= set(update.removed)
            case c.IpSetRemove():
                self.sets.pop(update.id, None)
            case c.PolicyUpdate():
                put(self.policies, update.id, update.policy)
            case c.ProfileUpdate():
                put(self.profiles, update.name, update.profile)
            case c.EndpointUpdate():
                put(self.endpoints, update.id, update.endpoint)
            case c.ServiceAccountUpdate():
                put(self.accounts, (update.namespace, update.name), update.labels)
            case c.NamespaceUpdate():
                put(self.namespaces, update.name, update.labels)

    def check(self, endpoint: c.EndpointId, flow: c.Flow, direction: c.Direction, *, enforced: bool) -> Code:
        if endpoint not in self.endpoints or not 1 <= flow.protocol <= 255:
            return Code.PERMISSION_DENIED
        try:
            return self._walk(self.endpoints[endpoint], flow, direction, enforced=enforced)
        except Stop as stop:
            return stop.code

    def _walk(self, endpoint: c.Endpoint, flow: c.Flow, direction: c.Direction, *, enforced: bool) -> Code:
        for tier in endpoint.tiers:
            in_scope = [
                policy for policy in tier.policies(direction) if not (enforced and policy.kind in c.STAGED_KINDS)
            ]
            if not in_scope:
                continue
            action = None
            for policy_id in in_scope:
                if policy_id not in self.policies:
                    raise Stop(Code.INTERNAL)
                action = self._first(self.policies[policy_id], flow, direction)
                if action is not None:
                    break
            if action is c.Action.ALLOW:
                return Code.OK
            if action is c.Action.DENY or (action is None and not tier.passes):
                return Code.PERMISSION_DENIED
        for name in endpoint.profiles:
            if name not in self.profiles:
                raise Stop(Code.INTERNAL)
            action = self._first(self.profiles[name], flow, direction)
            if action is not None:
                return Code.OK if action is c.Action.ALLOW else Code.PERMISSION_DENIED
        return Code.PERMISSION_DENIED

    def _first(self, policy: c.Policy, flow: c.Flow, direction: c.Direction) -> c.Action | None:
        for rule in policy.rules(direction):
            if rule.action is not c.Action.LOG and self._matches(rule, policy.namespace, flow):
                if rule.action is c.Action.UNKNOWN:
                    raise Stop(Code.INVALID_ARGUMENT)
                return rule.action
        return None

    def _matches(self, rule: c.Rule, namespace: str, flow: c.Flow) -> bool:
        """Return whether a rule matches. Of a rule that denies, a clause that is None cannot be evaluated."""
        clauses = [*self._clauses(rule, namespace, flow)]
        denies = rule.action in (c.Action.DENY, c.Action.PASS, c.Action.UNKNOWN)
        if False in clauses or (None in clauses and not denies):
            return False
        if None in clauses:
            raise Stop(Code.INTERNAL)
        if self.connections_only and (rule.http.methods or rule.http.paths):
            if rule.action is c.Action.PASS:
                raise Stop(Code.INVALID_ARGUMENT)
            return denies
        return self.connections_only or http_matches(rule, flow)

    def _clauses(self, rule: c.Rule, namespace: str, flow: c.Flow) -> Iterator[bool | None]:
        yield rule.protocol is None or protocol_is(rule.protocol, flow)
        yield rule.not_protocol is None or not protocol_is(rule.not_protocol, flow)
        yield rule.icmp is None or icmp_is(rule.icmp, flow)
        yield rule.not_icmp is None or inverse(icmp_is(rule.not_icmp, flow))
        address = flow.destination_ip or flow.source_ip
        if rule.ip_version:
            yield None if address is None else ip_address(address).version == rule.ip_version
        source = (flow.source_ip, flow.source_port, flow.source_principal, flow.source_labels)
        destination = (
            flow.destination_ip,
            flow.destination_port,
            flow.destination_principal,
            flow.destination_labels,
        )
        for peer, (ip, port, principal, labels) in ((rule.source, source), (rule.destination, destination)):
            yield from self._address(peer, ip, port, flow.protocol)
            if principal:
                yield from self._identity(peer, principal, dict(labels), namespace)
            elif self.connections_only and rule.action is c.Action.ALLOW:
                by_name = peer.account_names or peer.account_selector
                yield not by_name and not (peer.namespace_selector and not peer.ip_sets)

    def _address(self, peer: c.PeerMatch, ip: str | None, port: int, protocol: int) -> Iterator[bool | None]:
        def has_port(set_id: str) -> bool | None:
            return self._has_port(set_id, ip, protocol, port)

        def has_one_of(ranges: tuple[tuple[int, int], ...], sets: tuple[str, ...]) -> bool | None:
            known = ip is not None or port > 0
            found = [first <= port <= last if known else None for first, last in ranges]
            return any_of([*found, *map(has_port, sets)])

        def is_inside(nets: tuple[IpNetwork | None, ...]) -> bool | None:
            return None if ip is None else any(ip_address(ip) in net for net in nets if net is not None)

        if peer.ports or peer.named_ports:
            yield has_one_of(peer.ports, peer.named_ports)
        yield inverse(has_one_of(peer.not_ports, peer.not_named_ports))
        if peer.nets:
            before = peer.nets[: peer.nets.index(None)] if None in peer.nets else peer.nets
            yield is_inside(before) or (None if None in peer.nets or ip is None else False)
        if peer.not_nets:
            yield None if None in peer.not_nets else inverse(is_inside(peer.not_nets))
        yield all_of([self._has(set_id, ip) for set_id in peer.ip_sets])
        yield inverse(any_of([self._has(set_id, ip) for set_id in peer.not_ip_sets]))
        yield all_of([has_port(set_id) for set_id in peer.ip_port_sets])

    def _identity(
        self, peer: c.PeerMatch, principal: str, labels: dict[str, str], policy_namespace: str
    ) -> Iterator[bool | None]:
        _, _, _, _, namespace, _, account = principal.split("/")
        yield not peer.account_names or account in peer.account_names
        labels |= self.accounts.get((namespace, account), {})
        if peer.account_selector:
            yield selects(peer.account_selector, labels)
        local = peer.selector or peer.not_selector or peer.account_names or peer.account_selector
        if peer.namespace_selector:
            yield selects(peer.namespace_selector, self.namespaces.get(namespace, {}))
        elif policy_namespace and local:
            yield namespace == policy_namespace

    def _has(self, set_id: str, ip: str | None) -> bool | None:
        """Return whether a set has an address; None if there is no such set, or no address."""
        if set_id not in self.sets or ip is None:
            return None
        kind, members = self.sets[set_id]
        if kind is c.IpSetType.IP_AND_PORT:
            return None if UNREADABLE in members else False
        known = [member for member in members if member != UNREADABLE]
        if any(ip_address(ip) in ip_network(member) for member in known):
            return True
        return None if UNREADABLE in members else False

    def _has_port(self, set_id: str, ip: str | None, protocol: int, port: int) -> bool | None:
        if set_id not in self.sets or ip is None:
            return None
        kind, members = self.sets[set_id]
        names = [name for name, number in c.PROTOCOLS.items() if number == protocol]
        if kind is c.IpSetType.IP_AND_PORT and any(f"{ip},{name}:{port}" in members for name in names):
            return True
        return None if UNREADABLE in members else False


def all_of(found: list[bool | None]) -> bool | None:
    return False if False in found else None if None in found else True


def any_of(found: list[bool | None]) -> bool | None:
    return True if True in found else None if None in found else False


def inverse(found: bool | None) -> bool | None:
    return None if found is None else not found


def put(table: Any, key: object, value: object) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def protocol_is(protocol: int | str, flow: c.Flow) -> bool:
    number = protocol if isinstance(protocol, int) else c.PROTOCOLS.get(protocol.lower())
    return number == flow.protocol


def icmp_is(wanted: c.IcmpMatch, flow: c.Flow) -> bool | None:
    """Return whether a flow is of a type of ICMP; None if its type is not known."""
    if flow.protocol not in (1, 58):
        return False
    if flow.icmp is None:
        return None
    return flow.icmp[0] == wanted.type and (wanted.code is None or wanted.code == flow.icmp[1])


def selects(text: str, labels: dict[str, str]) -> bool | None:
    try:
        return parse_selector(text).matches(labels)
    except SelectorError:
        return None


def http_matches(rule: c.Rule, flow: c.Flow) -> bool:
    if flow.method is None and flow.path is None:
        return True
    methods, paths = rule.http.methods, rule.http.paths
    if methods and "*" not in methods and flow.method not in methods:
        return False
    if not paths or flow.path is None:
        return True
    if not flow.path.startswith("/"):
        raise Stop(Code.INVALID_ARGUMENT)
    path = normal_path(flow.path)
    if path is None and rule.action is c.Action.PASS:
        raise Stop(Code.INVALID_ARGUMENT)
    if path is None:
        return rule.action in (c.Action.DENY, c.Action.UNKNOWN)
    for match in paths:
        wanted = normal_path(match.path)
        if wanted is None:
            continue
        below = path.startswith(wanted.rstrip(b"/") + b"/")
        if path == wanted or (match.prefix and below):
            return True
    return False
