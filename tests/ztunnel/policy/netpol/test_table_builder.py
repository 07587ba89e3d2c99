"""The table has the meaning of the policies: hypothesis compares it with the evaluator; single rules are tested,
too.
"""

from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.ztunnel.policy.calico.cluster import BACK, FRONT, compiled, evaluator, global_policy, local_policy
from tests.ztunnel.policy.netpol.packets import packets
from tests.ztunnel.policy.strategies import mostly, some
from tproxy.expressions import Counter, Expression, Verdict
from tproxy.packets import Interpreter, Packet
from tproxy.render.text import rule_text, table_text
from xds.model import calico as c
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.calico.verdict import Code
from ztunnel.policy.netpol.metrics import counted
from ztunnel.policy.netpol.table_builder import Built, TableBuilder, comment

ENDS = {key: c.EndpointId("k8s", f"shop/{key}", "eth0") for key in ("a", "b", "far")}
ADDRESSES = {"a": ("10.0.0.1", "fd00::1"), "b": ("10.0.0.2", "fd00::2"), "far": ("10.1.0.1", "fd00:1::1")}
OUTSIDE = ("192.0.2.1", "2001:db8::1")
SETS = ("s:a", "s:b", "n:http")
NETS = tuple(map(ip_network, ("10.0.0.0/24", "10.0.0.1/32", "0.0.0.0/0", "fd00::/64", "::/0", "10.0.0.2/31")))
MEMBERS = {
    "s:a": (c.IpSetType.NET, ("10.0.0.1/32", "10.0.0.2/32", "fd00::2/128", "10.1.0.0/24", "10.0.0.0/30")),
    "s:b": (c.IpSetType.IP, ("10.0.0.1", "10.1.0.1", "fd00::1")),
    "n:http": (
        c.IpSetType.IP_AND_PORT,
        ("10.0.0.1,tcp:80", "10.0.0.2,udp:80", "fd00::1,sctp:81", "10.0.0.2,tcp:81"),
    ),
}


PORTS = ((80, 80), (1, 80), (81, 90))
PEERS = st.builds(
    c.PeerMatch,
    nets=some(NETS),
    not_nets=mostly((), some(NETS)),
    ports=some(PORTS),
    not_ports=mostly((), some(PORTS)),
    named_ports=mostly((), some(("n:http",))),
    not_named_ports=mostly((), some(("n:http",))),
    ip_sets=some(SETS[:2]),
    not_ip_sets=mostly((), some(SETS[:2])),
    ip_port_sets=mostly((), some(("n:http",))),
)
ICMP = st.builds(c.IcmpMatch, st.sampled_from((3, 8, 128)), st.sampled_from((None, 0, 1)))
RULES = st.builds(
    c.Rule,
    action=st.sampled_from([action for action in c.Action if action is not c.Action.UNKNOWN]),
    source=mostly(c.PeerMatch(), PEERS),
    destination=mostly(c.PeerMatch(), PEERS),
    protocol=st.sampled_from((None, None, 6, 17, "TCP", "udp", "SCTP", 1, "icmpv6", "nonsense")),
    not_protocol=mostly(None, st.sampled_from((6, "udp", 1, "nonsense"))),
    ip_version=mostly(0, st.sampled_from((4, 6))),
    icmp=mostly(None, ICMP),
    not_icmp=mostly(None, ICMP),
)
POLICIES = st.builds(
    c.Policy,
    namespace=st.just(""),
    inbound=st.lists(RULES, max_size=4).map(tuple),
    outbound=st.lists(RULES, max_size=3).map(tuple),
)
IDS = tuple(
    c.PolicyId(kind, "", name) for kind in ("GlobalNetworkPolicy", "StagedGlobalNetworkPolicy") for name in "12"
)
TIERS = st.builds(
    c.Tier, name=st.sampled_from(("first", "last")), ingress=some(IDS, 4), egress=some(IDS), passes=st.booleans()
)
PROFILES = {"kns.shop": c.Policy("", (c.Rule(c.Action.ALLOW),), (c.Rule(c.Action.ALLOW),))}


@st.composite
def worlds(draw: st.DrawFn) -> Compiled:
    """Draw two pods of this node and one of another. Everything that their policies name exists and has one
    type.
    """
    found = Compiled()
    for key, (kind, members) in MEMBERS.items():
        found.ip_sets[key] = (kind, frozenset(draw(some(members, 5))))
    for policy_id in IDS:
        found.policies[policy_id] = draw(POLICIES)
    found.profiles = PROFILES | {"ksa.web": draw(POLICIES)}
    for name, addresses in ADDRESSES.items():
        networks = tuple(map(ip_network, addresses))
        tiers = tuple(draw(st.lists(TIERS, max_size=2)))
        profiles = draw(st.sampled_from((("kns.shop",), ("ksa.web", "kns.shop"), ("ksa.web",), ())))
        found.endpoints[ENDS[name]] = c.Endpoint("", networks, tiers, profiles)
        found.nodes[ENDS[name]] = "n2" if name == "far" else "n1"
    return found


def verdict_of_policies(found: Compiled, packet: Packet) -> bool:
    made = evaluator(found)
    source, destination = str(packet.source), str(packet.destination)
    flow = c.Flow(
        source_ip=source,
        destination_ip=destination,
        source_port=packet.source_port,
        destination_port=packet.destination_port,
        protocol=packet.protocol,
        icmp=(packet.icmp_type, packet.icmp_code) if packet.protocol in c.ICMP_PROTOCOLS.values() else None,
    )
    if source == destination:
        return True
    where = {address: ENDS[name] for name in ("a", "b") for address in ADDRESSES[name]}
    for address, direction in ((source, c.Direction.EGRESS), (destination, c.Direction.INGRESS)):
        if address in where and made.check(where[address], flow, direction).code is not Code.OK:
            return False
    return True


@settings(max_examples=examples(250), deadline=None)
@given(worlds(), st.lists(packets([*ADDRESSES.values(), OUTSIDE]), min_size=4, max_size=12))
def test_the_table_decides_as_the_policies(found: Compiled, sent: list[Packet]) -> None:
    built = TableBuilder().build(found, "n1")
    assert not built.unseen
    made = Interpreter(built.table)
    for packet in sent:
        accepted = verdict_of_policies(found, packet)
        assert made.judge(packet).accepted == accepted, packet
        if not made.reads_source_ports:
            assert made.judge(replace(packet, source_port=packet.source_port ^ 1)).accepted == accepted, packet


@settings(max_examples=examples(60), deadline=None)
@given(worlds(), worlds())
def test_a_builder_that_has_built_before_builds_the_same(before: Compiled, found: Compiled) -> None:
    builder = TableBuilder()
    builder.build(before, "n1")
    again, fresh = builder.build(found, "n1"), TableBuilder().build(found, "n1")
    assert {item.name: item for item in again.table.sets} == {item.name: item for item in fresh.table.sets}
    assert {item.name: item for item in again.table.chains} == {item.name: item for item in fresh.table.chains}
    assert (again.owners, again.policed, set(again.unseen)) == (fresh.owners, fresh.policed, set(fresh.unseen))


def test_what_has_not_changed_is_the_same_object() -> None:
    rules = "{action: Allow, source: {selector: has(app)}}, {action: Allow, source: {nets: [192.0.2.0/24]}}"
    found = compiled(global_policy("one", f"{{selector: app == 'backend', ingress: [{rules}]}}"))
    builder = TableBuilder()
    first = builder.build(found, "n1").table
    second = builder.build(found, "n1").table
    named = {chain.name: chain for chain in first.chains if chain.hook is None}
    assert all(named[chain.name] is chain for chain in second.chains if chain.hook is None)
    sets = {item.name: item for item in first.sets}
    policies = [item for item in second.sets if item.name[:2] in ("s4", "n4")]
    assert len(policies) == 2
    assert all(sets[item.name] is item for item in policies)


def built(policies: str, node: str = "n1", *, tunnels: bool = False) -> Built:
    return TableBuilder(tunnels=tunnels).build(compiled(policies), node)


def accepts(made: Built, source: str, destination: str, port: int = 8080, **what: Any) -> bool:
    packet = Packet(source=ip_address(source), destination=ip_address(destination), destination_port=port, **what)
    return Interpreter(made.table).judge(packet).accepted


def test_a_node_without_policies_has_empty_maps_and_lets_everything_through() -> None:
    made = built("")
    assert made.policed == {c.Direction.INGRESS: frozenset(), c.Direction.EGRESS: frozenset()}
    assert accepts(made, "10.0.0.3", "10.0.0.2")


def test_only_pods_of_this_node_are_judged() -> None:
    deny = global_policy("deny", "{selector: all(), types: [Ingress, Egress]}")
    made = built(deny)
    assert made.policed[c.Direction.INGRESS] == {BACK, FRONT}
    assert not accepts(made, "10.0.0.3", "10.0.0.2")
    assert accepts(made, "192.0.2.1", "10.0.0.3")


def test_an_address_of_the_nodes_range_is_closed_until_its_pod_is_known() -> None:
    cidrs = (ip_network("10.0.0.0/29"), ip_network("fd00::/126"))
    made = TableBuilder(pod_cidrs=cidrs).build(compiled(""), "n1")
    known, elsewhere = ("10.0.0.1", "10.0.0.2"), ("10.0.0.8", "10.0.9.9", "192.0.2.1")
    for new in ("10.0.0.3", "10.0.0.7", "10.0.0.0"):  # one of them is a pod of another node, by mistake
        for other in (*known, *elsewhere):
            assert not accepts(made, new, other)
            assert not accepts(made, other, new)
    for one in known:
        for other in (*known, *elsewhere):
            assert accepts(made, one, other)
            assert accepts(made, other, one)
    assert not accepts(made, "fd00::2", "fd00::1")
    assert accepts(made, "2001:db8::1", "fd00::1")
    # Neighbour discovery of the new pod is accepted, and so are answers on connections that were allowed before.
    assert accepts(made, "fd00::2", "fd00::1", protocol=58, icmp_type=135)


def test_the_first_pod_of_a_node_is_closed_until_it_is_known() -> None:
    made = TableBuilder(pod_cidrs=(ip_network("10.7.0.0/24"),)).build(compiled(""), "n7")
    assert not accepts(made, "192.0.2.1", "10.7.0.4")
    assert not accepts(made, "10.7.0.4", "192.0.2.1")
    assert accepts(made, "192.0.2.1", "10.0.0.1")


def test_a_pod_reaches_itself_through_its_own_service() -> None:
    made = built(global_policy("deny", "{selector: all(), types: [Ingress, Egress]}"))
    assert accepts(made, "10.0.0.2", "10.0.0.2")


def test_a_rule_with_http_lets_nothing_through_and_is_named() -> None:
    rule = "{action: Allow, http: {methods: [GET]}}"
    made = built(global_policy("web", f"{{selector: app == 'backend', ingress: [{rule}]}}"))
    assert not accepts(made, "10.0.0.1", "10.0.0.2")
    assert [str(item) for item in made.unseen] == [
        "GlobalNetworkPolicy/web ingress rule 0: the kernel sees no HTTP"
    ]


def test_service_accounts_are_the_addresses_of_their_pods() -> None:
    rule = "{action: Allow, source: {serviceAccounts: {names: [frontend]}}}"
    made = built(local_policy("web", f"{{selector: app == 'backend', ingress: [{rule}]}}"))
    assert not made.unseen
    assert accepts(made, "10.0.0.1", "10.0.0.2")
    assert not accepts(made, "10.0.0.3", "10.0.0.2")


def pings(clauses: str, action: str = "Allow") -> Built:
    rules = f"{{action: {action}, {clauses}}}, {{action: Allow, protocol: TCP, destination: {{ports: [8080]}}}}"
    end = ", {action: Allow}" if action == "Deny" else ""
    return built(global_policy("ping", f"{{selector: has(app), ingress: [{rules}{end}]}}"))


def answers(made: Built, version: int, kind: int, code: int = 0) -> bool:
    ends = ("10.0.0.9", "10.0.0.2") if version == 4 else ("fd00::9", "fd00::1")
    protocol = c.ICMP_PROTOCOLS[version]
    return accepts(made, *ends, 0, protocol=protocol, icmp_type=kind, icmp_code=code)


@pytest.mark.parametrize(
    ("clauses", "accepted", "refused"),
    [
        ("protocol: ICMP", [(4, 8), (4, 0), (4, 3, 1)], [(6, 128)]),
        ("protocol: ICMP, icmp: {}", [(4, 8), (4, 13)], [(6, 128)]),
        ("protocol: ICMP, icmp: {type: 8}", [(4, 8), (4, 8, 5)], [(4, 0), (6, 8), (6, 128)]),
        ("protocol: ICMP, icmp: {type: 3, code: 4}", [(4, 3, 4)], [(4, 3), (4, 4, 4)]),
        ("protocol: ICMP, notICMP: {type: 8}", [(4, 0), (4, 3, 8)], [(4, 8), (4, 8, 1), (6, 1)]),
        ("protocol: ICMP, notICMP: {type: 3, code: 4}", [(4, 3), (4, 4, 4)], [(4, 3, 4)]),
        ("protocol: ICMP, icmp: {type: 3}, notICMP: {type: 3, code: 4}", [(4, 3)], [(4, 3, 4), (4, 8)]),
        ("protocol: ICMPv6", [(6, 128), (6, 1)], [(4, 8)]),
        ("protocol: ICMPv6, icmp: {type: 128}", [(6, 128)], [(6, 129), (4, 128)]),
        ("protocol: 58, notICMP: {type: 128}", [(6, 1)], [(6, 128), (4, 8)]),
        ("protocol: 1, icmp: {type: 0}", [(4, 0)], [(4, 8)]),
    ],
)
def test_icmp_rules_are_judged_by_type_and_code(
    clauses: str, accepted: list[tuple[int, ...]], refused: list[tuple[int, ...]]
) -> None:
    allow, deny = pings(clauses), pings(clauses, "Deny")
    assert not allow.unseen
    for packet in accepted:
        assert answers(allow, *packet)
        assert not answers(deny, *packet)
    for packet in refused:
        assert not answers(allow, *packet)
        assert answers(deny, *packet)
    assert accepts(allow, "10.0.0.9", "10.0.0.2", 8080)
    assert not accepts(allow, "10.0.0.9", "10.0.0.2", 8081)


def test_a_rule_without_a_protocol_can_leave_out_a_type_of_icmp() -> None:
    found = compiled(global_policy("one", "{selector: app == 'frontend', ingress: [{action: Allow}]}"))
    [(policy_id, policy)] = found.policies.items()
    rules = (c.Rule(c.Action.ALLOW, not_icmp=c.IcmpMatch(8)),)
    found.policies[policy_id] = replace(policy, inbound=rules)
    made = TableBuilder().build(found, "n1")
    assert accepts(made, "10.0.0.9", "10.0.0.1")
    for kind, accepted in ((8, False), (0, True)):
        assert accepts(made, "10.0.0.9", "10.0.0.1", protocol=1, icmp_type=kind) == accepted


@pytest.mark.parametrize("action", [c.Action.DENY, c.Action.PASS, c.Action.UNKNOWN])
@pytest.mark.parametrize(
    "peer",
    [
        c.PeerMatch(nets=(None,)),
        c.PeerMatch(not_nets=(None,)),
        c.PeerMatch(ip_sets=("s:gone",)),
        c.PeerMatch(not_ip_sets=("s:gone",)),
        c.PeerMatch(named_ports=("n:gone",)),
        c.PeerMatch(named_ports=("n:gone",), ports=((9, 9),)),
        c.PeerMatch(not_named_ports=("n:gone",)),
        c.PeerMatch(ip_port_sets=("n:gone",)),
    ],
)
def test_what_cannot_be_read_of_a_rule_that_does_not_allow_drops(action: c.Action, peer: c.PeerMatch) -> None:
    found = compiled(global_policy("one", "{selector: app == 'backend', ingress: [{action: Allow}]}"))
    [(policy_id, policy)] = found.policies.items()
    rules = (c.Rule(action, source=peer), *policy.inbound)
    found.policies[policy_id] = replace(policy, inbound=rules)
    made = TableBuilder().build(found, "n1")
    assert not accepts(made, "10.0.0.1", "10.0.0.2")
    # An unknown action drops, whatever the rest of the rule is.
    assert made.unseen


def test_a_policy_that_is_missing_closes_its_pods() -> None:
    found = compiled(global_policy("one", "{selector: app == 'backend', ingress: [{action: Allow}]}"))
    found.policies.clear()
    made = TableBuilder().build(found, "n1")
    assert not accepts(made, "10.0.0.1", "10.0.0.2")
    assert "missing" in str(made.unseen[0])


def test_a_cut_connection_is_not_taken_up_again_by_its_answers() -> None:
    made = built(global_policy("deny", "{selector: app == 'backend', types: [Ingress]}"))
    # front accepts all, and back may send all. But this packet does not open a connection.
    assert accepts(made, "10.0.0.2", "10.0.0.1", tcp_flags=0x02)
    assert not accepts(made, "10.0.0.2", "10.0.0.1", tcp_flags=0x10)
    assert accepts(made, "10.0.0.2", "10.0.0.1", tcp_flags=0x10, state=0x2)


def test_neighbour_discovery_is_always_let_through() -> None:
    made = built(global_policy("deny", "{selector: all(), types: [Ingress, Egress]}"))
    for kind, accepted in ((133, True), (137, True), (128, False)):
        assert accepts(made, "fd00::9", "fd00::1", protocol=58, icmp_type=kind) == accepted


@pytest.mark.parametrize("tunnels", [False, True])
def test_tunnels_pass_only_where_the_proxy_judges_what_is_inside(tunnels: bool) -> None:
    found = compiled(global_policy("deny", "{selector: all(), types: [Ingress, Egress]}"))
    found.captured = {BACK}
    made = TableBuilder(tunnels=tunnels).build(found, "n1")
    assert accepts(made, "10.0.0.3", "10.0.0.2", 15008) == tunnels
    assert accepts(made, "10.0.0.2", "10.0.0.3", 15008) == tunnels
    assert not accepts(made, "10.0.0.3", "10.0.0.2", 8080)
    # front is not in the mesh, so traffic to its port 15008 is like any other.
    assert not accepts(made, "10.0.0.3", "10.0.0.1", 15008)
    assert not accepts(made, "10.0.0.1", "10.0.0.3", 15008)


def test_pods_with_the_same_policies_share_their_chain() -> None:
    made = built(global_policy("one", "{selector: all(), ingress: [{action: Allow, protocol: TCP}]}"))
    [ingress] = [item for item in made.table.sets if item.name == "ingress4"]
    assert len(ingress.elements) == 2
    assert len({element.verdict for element in ingress.elements}) == 1


def test_the_table_reads_as_nft_prints_it() -> None:
    ports = "{protocol: TCP, port: 80}, {protocol: TCP, port: 8000, endPort: 8100}"
    block = "{ipBlock: {cidr: 10.246.33.0/24, except: [10.246.33.10/32, 10.246.33.13/31]}}"
    policy = f"""
{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: block, namespace: shop}},
 spec: {{podSelector: {{matchLabels: {{app: backend}}}}, ingress: [{{from: [{block}], ports: [{ports}]}}]}}}}
"""
    made = built(policy)
    text = table_text(made.table)
    assert "elements = { 10.246.33.0-10.246.33.9, 10.246.33.11, 10.246.33.14-10.246.33.255 }" in text
    assert "elements = { 80, 8000-8100 }" in text
    [chain] = [chain for chain in made.table.chains if chain.name in made.owners]
    [rule] = chain.rules
    assert "meta l4proto tcp ip saddr @n4-" in rule_text(rule.phrase)
    assert rule.comment == "KubernetesNetworkPolicy/shop/block ingress 0"


def test_comments_fit_the_kernel() -> None:
    assert comment("x" * 120) == "x" * 120
    assert len(comment("y" * 300)) == 120
    assert comment('"ä"') == "'?'"


def tiers(count: int, action: str, end: str) -> str:
    text = "".join(
        f"{{apiVersion: projectcalico.org/v3, kind: Tier, metadata: {{name: t{at}}},"
        f" spec: {{order: {at}, defaultAction: {end}}}}}\n---\n"
        for at in range(count)
    )
    for at in range(count):
        rules = f"{{action: Deny, protocol: TCP, destination: {{ports: [{1000 + at}]}}}}, {{action: {action}}}"
        text += global_policy(f"t{at}.p", f"{{tier: t{at}, selector: all(), ingress: [{rules}]}}")
    return text


def depth(made: Built, name: str) -> int:
    chains = {chain.name: chain for chain in made.table.chains}
    called = {
        word.chain
        for rule in chains[name].rules
        for word in rule.phrase
        if isinstance(word, Verdict) and word.chain
    }
    return 1 + max((depth(made, each) for each in called), default=0)


@pytest.mark.parametrize(("action", "end"), [("Pass", "Deny"), ("Log", "Pass")])
def test_the_number_of_tiers_is_not_the_depth_of_the_chains(action: str, end: str) -> None:
    made = built(tiers(100, action, end))
    [ingress] = [item for item in made.table.sets if item.name == "ingress4"]
    assert {depth(made, element.verdict.chain) for element in ingress.elements if element.verdict} == {3}
    assert accepts(made, "10.0.0.3", "10.0.0.2", 999)
    for port in (1000, 1001, 1099):
        assert not accepts(made, "10.0.0.3", "10.0.0.2", port)


def test_packets_that_pass_are_counted_for_their_policy() -> None:
    rules = "{action: Allow, protocol: UDP}, {action: Pass, protocol: TCP}, {action: Deny}"
    made = built(global_policy("one", f"{{selector: all(), ingress: [{rules}]}}"))
    policy = c.PolicyId("GlobalNetworkPolicy", "", "one")
    [(text, owner)] = made.passing.items()
    assert (text, owner) == ("GlobalNetworkPolicy/one ingress 1", (policy, c.Direction.INGRESS))
    assert set(made.owners.values()) == {owner}
    assert len(made.owners) == 2  # before the rule that passes, and after it
    chains = [
        replace(
            chain, rules=tuple(replace(rule, phrase=tuple(map(counted_once, rule.phrase))) for rule in chain.rules)
        )
        for chain in made.table.chains
    ]
    found = counted(made, replace(made.table, chains=tuple(chains)))
    assert {key: count for key, count in found.items() if key[0] == str(policy)} == {
        (str(policy), "ingress", verdict): 1 for verdict in ("allowed", "passed", "dropped")
    }


def counted_once(word: Expression) -> Expression:
    return Counter(1, 60) if isinstance(word, Counter) else word
