"""Compiles the clauses of a rule to checks on facts. Absent clauses need no check. Pure.

A clause cannot be evaluated if it names a missing IP set, has a text that is not a network or selector, or needs
facts the flow lacks: the address and port of a pipe, or the type of an ICMP packet. In an allowing rule such a
clause does not match, because the rule might be narrower than it looks. In a rule that denies or passes to the
next tier, not matching would be permissive, so the clause ends the evaluation there
(:class:`~ztunnel.policy.calico.verdict.Undecidable`).

If only connections are evaluated (``connections_only``), a rule must never admit more than with requests: an
allowing rule with an HTTP clause does not match, and a client without an identity does not satisfy a rule that
allows by identity. (Calico lets IP sets decide about such a client, for permissive mTLS. Denying rules still use
IP sets here.) If the connection leads to a waypoint that evaluates requests by these policies, an allowing rule's
HTTP clause is left to the waypoint.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, TypeAlias

from xds.model import calico as c
from xds.model.address import IpNetwork
from xds.model.selector import Labels, SelectorError, parse_selector
from ztunnel.policy.calico.http_path import is_below, normal_path
from ztunnel.policy.calico.ip_sets import address_number
from ztunnel.policy.calico.verdict import Code, Facts, Peer, RuleRef, Undecidable

Check: TypeAlias = Callable[[Facts], bool]


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause of a rule: its name in explanations, and its check."""

    name: str
    check: Check


def all_hold(checks: Iterable[Check], facts: Facts) -> bool:
    """Return whether all checks hold. If one fails, the result is False, even if others raise
    :class:`Undecidable`.

    Raises:
        Undecidable: no check fails, and one cannot be evaluated.
    """
    undecidable = None
    for check in checks:
        try:
            if not check(facts):
                return False
        except Undecidable as error:
            undecidable = error
    if undecidable is not None:
        raise undecidable
    return True


_SIDES: Final[dict[str, Callable[[Facts], Peer]]] = {
    "source": attrgetter("source"),
    "destination": attrgetter("destination"),
}


def connection_clauses(rule: c.Rule, policy_namespace: str, *, connections_only: bool = False) -> list[Clause]:
    """Return the clauses of a rule that do not depend on HTTP, cheap ones first.

    Args:
        policy_namespace: the namespace of the rule's policy. Empty for a global policy and for a profile.
        connections_only: see the module.
    """
    clauses: list[Clause] = []
    if rule.protocol is not None:
        clauses.append(Clause("protocol", _protocol(rule.protocol)))
    if rule.not_protocol is not None:
        excluded = _protocol(rule.not_protocol)
        clauses.append(Clause("notProtocol", lambda facts: not excluded(facts)))
    if rule.ip_version:
        clauses.append(Clause("ipVersion", _ip_version(rule.ip_version, denies=rule.action.may_deny)))
    denies = rule.action.may_deny
    if rule.icmp is not None:
        clauses.append(Clause("icmp", _icmp(rule.icmp, denies=denies)))
    if rule.not_icmp is not None:
        clauses.append(Clause("notICMP", _not_icmp(rule.not_icmp, denies=denies)))
    needs_identity = connections_only and rule.action is c.Action.ALLOW
    for side, peer in (("source", rule.source), ("destination", rule.destination)):
        if needs_identity and _is_about_identity(peer):
            clauses.append(Clause(f"{side} without an identity", _has_identity(_SIDES[side])))
        clauses += _peer_clauses(side, peer, policy_namespace, denies=denies)
    return clauses


def _is_about_identity(peer: c.PeerMatch) -> bool:
    """Return whether one side of a rule selects by identity, and has no IP set that could decide by address.

    Selectors of namespaces and pods usually have IP sets. A namespace selector without one selects identities.
    """
    return bool(peer.account_names or peer.account_selector or (peer.namespace_selector and not peer.ip_sets))


def _has_identity(of: "_Of") -> Check:
    return lambda facts: of(facts).identity.account != ""


def has_http(rule: c.Rule) -> bool:
    """Return whether a rule has an HTTP clause."""
    return bool(rule.http.methods or rule.http.paths)


def unseen_http_clause(rule: c.Rule, place: RuleRef) -> Check | None:
    """Return the check that replaces a rule's HTTP clause for connections. None without an HTTP clause.

    Call the check last. Calico's API permits HTTP clauses only on allowing rules. Other rules with one can still
    arrive over the wire, and must not admit a request either: a denying rule denies every request, and passing on
    some requests would require knowing which.

    Args:
        place: the rule's place, for :attr:`~ztunnel.policy.calico.verdict.Facts.unseen`.
    """
    if not has_http(rule) or rule.action not in (c.Action.ALLOW, c.Action.PASS):
        return None

    def allows(facts: Facts) -> bool:
        if facts.left_to:
            facts.left = place
            return True
        if facts.unseen is None:
            facts.unseen = place
        return False

    def passes(facts: Facts) -> bool:
        raise Undecidable(Code.INVALID_ARGUMENT, f"{place} passes HTTP requests on, which are not seen here")

    return passes if rule.action is c.Action.PASS else allows


def http_clause(rule: c.Rule) -> Check | None:
    """Return the check of a rule's HTTP clause, or None if it has none. Call the check last.

    A flow without HTTP satisfies it. The check raises :class:`Undecidable` for a request whose path does not begin
    with a slash. A path without a normal form matches no allowing rule and every denying rule, and ends the
    evaluation at a passing rule.
    """
    if not has_http(rule):
        return None
    methods, paths = frozenset(rule.http.methods), rule.http.paths
    any_method = not methods or "*" in methods
    known = [(normal, path.prefix) for path in paths if (normal := normal_path(path.path)) is not None]
    exact = frozenset(path for path, prefix in known if not prefix)
    prefixes = [path for path, prefix in known if prefix]
    denies, passes = rule.action.may_deny, rule.action is c.Action.PASS

    def check(facts: Facts) -> bool:
        facts.read_http = True
        if facts.method is None and facts.path is None:
            return True
        if not (any_method or facts.method in methods):
            return False
        if not paths or facts.path is None:
            return True
        if not facts.path.startswith("/"):
            raise Undecidable(Code.INVALID_ARGUMENT, "the request's path does not begin with a slash")
        path = facts.normal_path
        if path is None and passes:
            raise Undecidable(Code.INVALID_ARGUMENT, "the request's path can be read in more than one way")
        if path is None:
            return denies
        return path in exact or any(is_below(path, prefix) for prefix in prefixes)

    return check


def _protocol(protocol: int | str) -> Check:
    number = protocol if isinstance(protocol, int) else c.PROTOCOLS.get(protocol.lower())
    return lambda facts: facts.protocol == number


def _icmp(wanted: c.IcmpMatch, *, denies: bool) -> Check:
    def check(facts: Facts) -> bool:
        if facts.protocol not in _ICMP:
            return False
        if facts.icmp is None:
            return _unreadable(_ICMP_TYPE, denies=denies)
        return _is_icmp(facts.icmp, wanted)

    return check


def _not_icmp(excluded: c.IcmpMatch, *, denies: bool) -> Check:
    def check(facts: Facts) -> bool:
        if facts.protocol not in _ICMP:
            return True
        if facts.icmp is None:
            return _unreadable(_ICMP_TYPE, denies=denies)
        return not _is_icmp(facts.icmp, excluded)

    return check


def _is_icmp(found: tuple[int, int], wanted: c.IcmpMatch) -> bool:
    return found[0] == wanted.type and wanted.code in (None, found[1])


_ICMP: Final = frozenset(c.ICMP_PROTOCOLS.values())
_ICMP_TYPE: Final = "the type of an ICMP packet"


def _ip_version(version: int, *, denies: bool) -> Check:
    def check(facts: Facts) -> bool:
        address = facts.destination.address or facts.source.address
        if address is None:
            return _unreadable("the IP version of a flow without addresses", denies=denies)
        return address_number(address)[0] == version

    return check


def _peer_clauses(side: str, peer: c.PeerMatch, policy_namespace: str, *, denies: bool) -> list[Clause]:
    of = _SIDES[side]
    clauses: list[Clause] = []

    def add(name: str, check: Check) -> None:
        clauses.append(Clause(f"{side}.{name}", check))

    if peer.ports or peer.named_ports:
        add("ports", _ports(of, peer.ports, peer.named_ports, denies=denies))
    if peer.not_ports or peer.not_named_ports:
        add("notPorts", _not_ports(of, peer.not_ports, peer.not_named_ports, denies=denies))
    if peer.nets:
        add("nets", _nets(of, peer.nets, denies=denies))
    if peer.not_nets:
        add("notNets", _not_nets(of, peer.not_nets, denies=denies))
    if peer.ip_sets:
        add("selector", _in_all(of, peer.ip_sets, denies=denies))
    if peer.not_ip_sets:
        add("notSelector", _in_none(of, peer.not_ip_sets, denies=denies))
    if peer.ip_port_sets:
        add("services", _port_in_all(of, peer.ip_port_sets, denies=denies))
    if peer.account_names:
        add("serviceAccounts.names", _account_names(of, frozenset(peer.account_names)))
    if peer.account_selector:
        add("serviceAccounts.selector", _account_selector(of, peer.account_selector, denies=denies))
    namespace = _namespace(of, peer, policy_namespace, denies=denies)
    if namespace is not None:
        add("namespaceSelector", namespace)
    return clauses


_Of: TypeAlias = Callable[[Facts], Peer]


def _all_there(facts: Facts, sets: Iterable[str], *, denies: bool) -> bool:
    """Return whether the store has all of these IP sets.

    Raises:
        Undecidable: a set is missing, and the rule denies.
    """
    for set_id in sets:
        if set_id not in facts.ip_sets:
            if denies:
                raise Undecidable(Code.INTERNAL, f"IP set {set_id} is missing or cannot be read")
            return False
    return True


def _is_member(facts: Facts, wanted: frozenset[str], found: frozenset[str], *, denies: bool) -> bool:
    """Return whether the found IP sets include all required ones.

    Raises:
        Undecidable: all sets that are not found are missing from the store, and the rule denies.
    """
    if wanted <= found:
        return True
    others = wanted - found
    if denies and not any(set_id in facts.ip_sets for set_id in others):
        _all_there(facts, others, denies=True)
    return False


_ADDRESS: Final = "the address of an end that has none"
_PORT: Final = "the port of an end that has no address"


def _unreadable(what: str, *, denies: bool) -> bool:
    """Return False for a clause that cannot be evaluated, if its rule allows.

    Raises:
        Undecidable: the rule denies, or passes to the next tier.
    """
    if denies:
        raise Undecidable(Code.INTERNAL, f"{what} cannot be read")
    return False


def _ports(of: _Of, ranges: tuple[tuple[int, int], ...], sets: tuple[str, ...], *, denies: bool) -> Check:
    def check(facts: Facts) -> bool:
        peer = of(facts)
        if _has_one_of(peer, ranges, sets):
            return True
        if peer.address is None and (sets or not peer.port):
            return _unreadable(_PORT, denies=denies)
        if denies:
            _all_there(facts, sets, denies=True)
        return False

    return check


def _not_ports(of: _Of, ranges: tuple[tuple[int, int], ...], sets: tuple[str, ...], *, denies: bool) -> Check:
    def check(facts: Facts) -> bool:
        peer = of(facts)
        if _has_one_of(peer, ranges, sets):
            return False
        if peer.address is None and (sets or not peer.port):
            return _unreadable(_PORT, denies=denies)
        return _all_there(facts, sets, denies=denies)

    return check


def _has_one_of(peer: Peer, ranges: tuple[tuple[int, int], ...], sets: tuple[str, ...]) -> bool:
    """Return whether one side of the flow is known to have a port in the given ranges or IP sets."""
    if peer.address is None and not peer.port:
        return False
    return _in_ranges(peer.port, ranges) or (bool(sets) and not peer.port_sets.isdisjoint(sets))


def _in_ranges(port: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= port <= last for first, last in ranges)


def _nets(of: _Of, networks: tuple[IpNetwork | None, ...], *, denies: bool) -> Check:
    # A text that is not a network has an effect only when it is reached, because an earlier entry can match.
    whole = None not in networks
    tests = [_in_network(network) for network in networks[: None if whole else networks.index(None)] if network]

    def check(facts: Facts) -> bool:
        address = of(facts).address
        if address is None:
            return _unreadable(_ADDRESS, denies=denies)
        if any(test(address) for test in tests):
            return True
        return not whole and _unreadable("a network", denies=denies)

    return check


def _not_nets(of: _Of, networks: tuple[IpNetwork | None, ...], *, denies: bool) -> Check:
    if None in networks:
        return lambda facts: _unreadable("a network", denies=denies)
    tests = [_in_network(network) for network in networks if network]

    def check(facts: Facts) -> bool:
        address = of(facts).address
        if address is None:
            return _unreadable(_ADDRESS, denies=denies)
        return not any(test(address) for test in tests)

    return check


def _in_network(network: IpNetwork) -> Callable[[str], bool]:
    version, start, mask = network.version, int(network.network_address), int(network.netmask)

    def check(address: str) -> bool:
        found, number = address_number(address)
        return found == version and number & mask == start

    return check


def _in_all(of: _Of, sets: tuple[str, ...], *, denies: bool) -> Check:
    wanted = frozenset(sets)

    def check(facts: Facts) -> bool:
        peer = of(facts)
        if peer.address is None:
            return _unreadable(_ADDRESS, denies=denies)
        return _is_member(facts, wanted, peer.sets, denies=denies)

    return check


def _in_none(of: _Of, sets: tuple[str, ...], *, denies: bool) -> Check:
    def check(facts: Facts) -> bool:
        peer = of(facts)
        if peer.address is None:
            return _unreadable(_ADDRESS, denies=denies)
        return peer.sets.isdisjoint(sets) and _all_there(facts, sets, denies=denies)

    return check


def _port_in_all(of: _Of, sets: tuple[str, ...], *, denies: bool) -> Check:
    wanted = frozenset(sets)

    def check(facts: Facts) -> bool:
        peer = of(facts)
        if peer.address is None:
            return _unreadable(_ADDRESS, denies=denies)
        return _is_member(facts, wanted, peer.port_sets, denies=denies)

    return check


def _account_names(of: _Of, names: frozenset[str]) -> Check:
    # For a client without an identity the IP sets decide alone, so that permissive mTLS works.
    return lambda facts: not (account := of(facts).identity.account) or account in names


def _account_selector(of: _Of, text: str, *, denies: bool) -> Check:
    matches = _selector(text, denies=denies)

    def check(facts: Facts) -> bool:
        peer = of(facts)
        return not peer.identity.account or matches(peer.labels)

    return check


def _namespace(of: _Of, peer: c.PeerMatch, policy_namespace: str, *, denies: bool) -> Check | None:
    if peer.namespace_selector:
        matches = _selector(peer.namespace_selector, denies=denies)

        def check(facts: Facts) -> bool:
            found = of(facts)
            return not found.identity.namespace or matches(found.namespace_labels)

        return check
    # Selectors of pods and service accounts in a namespaced policy only select in the policy's namespace.
    local = peer.selector or peer.not_selector or peer.account_names or peer.account_selector
    if policy_namespace and local:
        return lambda facts: of(facts).identity.namespace in ("", policy_namespace)
    return None


def _selector(text: str, *, denies: bool) -> Callable[[Labels], bool]:
    try:
        return parse_selector(text).matches
    except SelectorError:
        return lambda labels: _unreadable(f"selector {text!r}", denies=denies)
