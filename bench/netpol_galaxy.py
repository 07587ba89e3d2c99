"""Rules of the form that Galaxy's controller makes with iptables and ipset, as nf_tables holds them.

iptables-nft writes such rules into the same kernel interface, and an ipset is a set there: a jump for each pod in
FORWARD's chain, one after the other, from a pod's chain to its policies' chains, and separate sets for each policy
and rule. Differences: ipset's hash and nf_tables' are different code, and comments of rules, which do not slow
packets, are left out. The defects of the form (its egress and node traffic) are not repeated: only ingress of pods
is generated, like in the other variants.
"""

from ipaddress import IPv4Address, IPv4Network
from typing import Final

from tproxy import expressions as e
from tproxy.expressions import Family, Phrase
from tproxy.resources import Chain, Element, Hook, HookPoint, Rule, Set, SetKey, Table
from xds.model import calico as c
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.netpol.intervals import ranges_of, without
from ztunnel.policy.netpol.table_builder import hashed

NAME: Final = "bench-galaxy"
#: The test of the family at the start of an inet table's rules. An IPv4 table has no such test.
_FAMILY_TEST: Final = len(e.family_is(Family.IPV4))


def galaxy_table(compiled: Compiled, last: str) -> Table:
    """Return the rules for all pods of compiled policies.

    Args:
        last: ``namespace/name`` of the pod whose jump stands in the middle of all jumps, its average place.
    """
    chains: dict[str, Chain] = {}
    sets: dict[str, Set] = {}
    jumps: list[Rule] = []
    selected: dict[c.PolicyId, list[IPv4Address]] = {}
    for endpoint in compiled.endpoints.values():
        for tier in endpoint.tiers:
            for policy in tier.ingress:
                selected.setdefault(policy, []).append(_address(endpoint))
    measured: Rule | None = None
    for key, endpoint in compiled.endpoints.items():
        policies = [policy for tier in endpoint.tiers for policy in tier.ingress]
        if not policies:
            continue
        for policy in policies:
            name = f"GLX-PLCY-{hashed(str(policy))}"
            if name not in chains:
                chains[name] = _policy_chain(compiled, policy, selected[policy], sets)
        calls = [Rule((e.Counter(), *e.jump(f"GLX-PLCY-{hashed(str(policy))}"))) for policy in policies]
        pod = f"GLX-POD-{hashed(key.workload)}"
        established = (*e.connection_state(e.CT_ESTABLISHED | e.CT_RELATED), e.Counter(), *e.accept())
        chains[pod] = Chain(pod, (Rule(established), *calls, Rule((e.Counter(), *e.drop()))))
        jump = Rule((*e.destination_is(_address(endpoint))[_FAMILY_TEST:], e.Counter(), *e.jump(pod)))
        if key.workload == last:
            measured = jump
        else:
            jumps.append(jump)
    if measured is not None:
        jumps.insert(len(jumps) // 2, measured)
    hook = Hook(kind="filter", point=HookPoint.FORWARD, priority=0)
    forward = Chain("FORWARD", (Rule((e.Counter(), *e.jump("GLX-INGRESS"))),), hook)
    ordered = (forward, Chain("GLX-INGRESS", tuple(jumps)), *chains.values())
    return Table(NAME, Family.IPV4, ordered, tuple(sets.values()))


def _policy_chain(
    compiled: Compiled, policy: c.PolicyId, selected: list[IPv4Address], sets: dict[str, Set]
) -> Chain:
    name = hashed(str(policy))
    own = f"GLX-ip-{name}"
    sets[own] = Set(own, SetKey.IPV4_ADDRESS, frozenset(Element(address.packed) for address in selected))
    rules = []
    for index, rule in enumerate(compiled.policies[policy].inbound):
        phrase: Phrase = ()
        if rule.source.nets:
            nets = without(
                ranges_of(filter(None, rule.source.nets), 4), ranges_of(filter(None, rule.source.not_nets), 4)
            )
            source = Set(
                f"GLX-snet-{index}-{name}",
                SetKey.IPV4_ADDRESS,
                frozenset(Element(first.to_bytes(4, "big"), last=last.to_bytes(4, "big")) for first, last in nets),
                interval=True,
            )
        elif rule.source.ip_sets:
            members = compiled.ip_sets[rule.source.ip_sets[0]][1]
            found = frozenset(Element(IPv4Network(member).network_address.packed) for member in members)
            source = Set(f"GLX-sip-{index}-{name}", SetKey.IPV4_ADDRESS, found)
        else:
            continue
        sets[source.name] = source
        phrase += e.address_in(Family.IPV4, source.name, source=True)[_FAMILY_TEST:]
        phrase += e.address_in(Family.IPV4, own, source=False)[_FAMILY_TEST:]
        if rule.protocol is not None:
            protocol = rule.protocol if isinstance(rule.protocol, int) else c.PROTOCOLS[rule.protocol.lower()]
            phrase += e.protocol_is(protocol)
            ports = rule.destination.ports or (((8080, 8080),) if rule.destination.named_ports else ())
            if ports:
                phrase += e.ports_between(2, *ports[0])
        rules.append(Rule((*phrase, e.Counter(), *e.accept())))
    return Chain(f"GLX-PLCY-{name}", tuple(rules))


def _address(endpoint: c.Endpoint) -> IPv4Address:
    found = endpoint.addresses[0].network_address
    assert isinstance(found, IPv4Address)
    return found
