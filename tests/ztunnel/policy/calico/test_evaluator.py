"""Evaluation: fast, explained and literal, held to one answer; and the rows of Calico's own scenarios."""

import gc
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.ztunnel.policy.calico.literal import UNREADABLE, Literal
from xds.model import calico as c
from ztunnel.policy.calico import evaluator as module
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import PROFILE_TIER, Code, Identity, RuleRef, Verdict, identity_of
from ztunnel.policy.calico.walk import Outcome, walk

POD = c.EndpointId("k8s", "shop/web-0", "eth0")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.1.0.1", "fd00::1", None)
SETS = ("s:a", "s:b", "n:http", "s:never")
PRINCIPALS = ("", "spiffe://cluster.local/ns/shop/sa/web", "spiffe://cluster.local/ns/prod/sa/db")
PATHS = (None, "", "/", "/public", "/public/..%2fadmin", "/admin", "/%XY", "relative")
NETS = (ip_network("10.0.0.0/24"), ip_network("10.0.0.1/32"), ip_network("fd00::/8"), None)
SELECTORS = ("", "role == 'web'", "!has(role)", "broken ==")


def some(values: tuple[Any, ...], most: int = 2) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.one_of(st.just(()), st.lists(st.sampled_from(values), max_size=most, unique=True).map(tuple))


def mostly(default: Any, other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(default), st.just(default), other)


PORTS = ((80, 80), (1, 1024), (8080, 8090))
PEERS = st.builds(
    c.PeerMatch,
    nets=some(NETS),
    not_nets=mostly((), some(NETS)),
    ports=some(PORTS),
    not_ports=mostly((), some(PORTS)),
    named_ports=mostly((), some(SETS)),
    not_named_ports=mostly((), some(SETS)),
    ip_sets=some(SETS),
    not_ip_sets=mostly((), some(SETS)),
    ip_port_sets=mostly((), some(SETS)),
    selector=st.sampled_from(SELECTORS[:2]),
    namespace_selector=mostly("", st.sampled_from(("env == 'prod'", "broken =="))),
    account_names=mostly((), some(("web", "db"))),
    account_selector=mostly("", st.sampled_from(SELECTORS)),
)
HTTP = st.builds(
    c.HttpMatch,
    methods=some(("GET", "POST", "*")),
    paths=some((c.PathMatch("/public", True), c.PathMatch("/admin", False), c.PathMatch("/%XY", True))),
)
ICMP = st.builds(c.IcmpMatch, st.sampled_from((3, 8)), st.sampled_from((None, 0, 1)))
RULES = st.builds(
    c.Rule,
    action=st.sampled_from(list(c.Action)),
    source=mostly(c.PeerMatch(), PEERS),
    destination=mostly(c.PeerMatch(), PEERS),
    protocol=st.sampled_from((None, None, 6, 17, "TCP", "udp", "nonsense")),
    not_protocol=mostly(None, st.sampled_from((6, "udp", "nonsense"))),
    ip_version=mostly(0, st.sampled_from((4, 6))),
    http=mostly(c.HttpMatch(), HTTP),
    icmp=mostly(None, ICMP),
    not_icmp=mostly(None, ICMP),
)
POLICIES = st.builds(
    c.Policy,
    namespace=st.sampled_from(("", "shop")),
    inbound=st.lists(RULES, max_size=4).map(tuple),
    outbound=st.lists(RULES, max_size=2).map(tuple),
)
IDS = tuple(
    c.PolicyId(kind, "", name)
    for kind in ("GlobalNetworkPolicy", "StagedGlobalNetworkPolicy")
    for name in ("one", "two", "three")
)
TIERS = st.builds(
    c.Tier, name=st.sampled_from(("first", "last")), ingress=some(IDS, 4), egress=some(IDS), passes=st.booleans()
)
ENDPOINTS = st.builds(
    c.Endpoint, tiers=st.lists(TIERS, max_size=3).map(tuple), profiles=some(("kns.shop", "ksa.web"))
)
MEMBERS = {
    c.IpSetType.NET: ("10.0.0.0/24", "10.0.0.1/32", "10.1.0.1/32", "fd00::/64", "0.0.0.0/0", UNREADABLE),
    c.IpSetType.IP_AND_PORT: ("10.0.0.1,tcp:80", "10.0.0.2,udp:80", "fd00::1,tcp:8080", UNREADABLE),
    c.IpSetType.IP: ("10.0.0.1", "fd00::1", UNREADABLE),
}
#: What an id is the set of never changes, so that deltas fit.
KINDS = {"s:a": c.IpSetType.NET, "s:b": c.IpSetType.IP, "n:http": c.IpSetType.IP_AND_PORT}


@st.composite
def set_updates(draw: st.DrawFn) -> c.Update:
    set_id = draw(st.sampled_from(tuple(KINDS)))
    members = some(MEMBERS[KINDS[set_id]], 5)
    return draw(
        st.one_of(
            st.builds(c.IpSetUpdate, st.just(set_id), st.just(KINDS[set_id]), members),
            st.builds(c.IpSetDelta, st.just(set_id), members, st.just(())),
            st.builds(c.IpSetDelta, st.just(set_id), st.just(()), members),
            st.just(c.IpSetRemove(set_id)),
        )
    )


LABELS = st.dictionaries(st.sampled_from(("role", "env")), st.sampled_from(("web", "prod")), max_size=2)
UPDATES = st.one_of(
    set_updates(),
    st.builds(c.PolicyUpdate, st.sampled_from(IDS), st.one_of(st.none(), POLICIES, POLICIES, POLICIES)),
    st.builds(c.ProfileUpdate, st.sampled_from(("kns.shop", "ksa.web")), st.one_of(st.none(), POLICIES, POLICIES)),
    st.builds(c.EndpointUpdate, st.just(POD), ENDPOINTS),
    st.builds(c.ServiceAccountUpdate, st.just("shop"), st.just("web"), LABELS),
    st.builds(c.NamespaceUpdate, st.sampled_from(("shop", "prod")), LABELS),
)
FLOWS = st.builds(
    c.Flow,
    source_ip=st.sampled_from(ADDRESSES),
    destination_ip=st.sampled_from(ADDRESSES),
    source_port=st.sampled_from((0, 80, 50000)),
    destination_port=st.sampled_from((0, 80, 8080, 9999)),
    protocol=st.sampled_from((6, 6, 17, 1, 58, 0, 300)),
    icmp=st.sampled_from((None, (8, 0), (3, 1))),
    source_principal=st.sampled_from(PRINCIPALS),
    destination_principal=st.sampled_from(PRINCIPALS),
    source_labels=st.sampled_from(((), (("role", "web"),))),
    method=st.sampled_from((None, "GET", "DELETE", "")),
    path=st.sampled_from(PATHS),
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(UPDATES, min_size=3, max_size=14),
    st.lists(st.tuples(st.integers(0, 14), UPDATES), max_size=3),
    st.lists(FLOWS, min_size=1, max_size=6),
    st.sampled_from(list(c.Direction)),
    st.booleans(),
    st.booleans(),
)
def test_index_cache_and_walk_answer_as_the_literal_reading(
    updates: list[c.Update],
    later: list[tuple[int, c.Update]],
    flows: list[c.Flow],
    direction: c.Direction,
    enforced: bool,
    connections_only: bool,
) -> None:
    """Also after each further update, with tiers compiled before it and answers kept from before it."""
    evaluator = Evaluator(Store(), connections_only=connections_only)
    literal = Literal(connections_only=connections_only)
    for update in (*updates, c.InSync()):
        evaluator.apply(update)
        literal.apply(update)
    for _, update in ((0, c.InSync()), *later):
        evaluator.apply(update)
        literal.apply(update)
        for flow in (*flows, *flows):
            verdict = evaluator.check(POD, flow, direction, enforced=enforced)
            assert verdict.code == literal.check(POD, flow, direction, enforced=enforced)
            endpoint = evaluator.store.endpoints.get(POD)
            if endpoint is not None and 0 < flow.protocol < 256:
                steps = walk(
                    evaluator.store,
                    endpoint,
                    flow,
                    identities(flow),
                    direction,
                    enforced=enforced,
                    connections_only=connections_only,
                )
                assert steps.verdict.code == verdict.code
                assert verdict.code is Code.INTERNAL or steps.verdict == verdict


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(UPDATES, min_size=3, max_size=14), FLOWS, st.sampled_from(list(c.Direction)))
def test_judging_connections_never_opens_more_than_judging_requests(
    updates: list[c.Update], flow: c.Flow, direction: c.Direction
) -> None:
    """What is let through as a connection is let through as any well-formed request of it, and as a connection."""
    requests, connections = Evaluator(Store()), Evaluator(Store(), connections_only=True)
    for update in (*updates, c.InSync()):
        requests.apply(update)
        connections.apply(update)
    if connections.check(POD, replace(flow, method=None, path=None), direction).allowed:
        for method, path in ((None, None), ("GET", "/public"), ("POST", "/admin"), ("DELETE", "/public/x")):
            assert requests.check(POD, replace(flow, method=method, path=path), direction).allowed


def identities(flow: c.Flow) -> tuple[Identity, Identity]:
    found = [
        identity_of(principal, frozenset()) for principal in (flow.source_principal, flow.destination_principal)
    ]
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


WEB = "spiffe://cluster.local/ns/shop/sa/web"
ONE = c.PolicyId("GlobalNetworkPolicy", "", "one")
TWO = c.PolicyId("NetworkPolicy", "shop", "two")
STAGED = c.PolicyId("StagedGlobalNetworkPolicy", "", "staged")
ALLOW, DENY, PASS, LOG = c.Rule(c.Action.ALLOW), c.Rule(c.Action.DENY), c.Rule(c.Action.PASS), c.Rule(c.Action.LOG)
FLOW = c.Flow(
    source_ip="10.0.0.1",
    destination_ip="10.0.0.2",
    destination_port=80,
    source_principal=WEB,
    method="GET",
    path="/a",
)


def evaluator(*updates: c.Update, tiers: tuple[c.Tier, ...] = (), profiles: tuple[str, ...] = ()) -> Evaluator:
    found = Evaluator(Store())
    for update in (*updates, c.EndpointUpdate(POD, c.Endpoint("", (), tiers, profiles)), c.InSync()):
        found.apply(update)
    return found


def policy(policy_id: c.PolicyId, *rules: c.Rule) -> c.Update:
    return c.PolicyUpdate(policy_id, c.Policy(policy_id.namespace, rules))


def tier(*policies: c.PolicyId, name: str = "default", passes: bool = False) -> c.Tier:
    return c.Tier(name, policies, (), passes)


def with_rule(*rules: c.Rule, of: c.PolicyId = ONE) -> Evaluator:
    return evaluator(policy(of, *rules), tiers=(tier(of),))


def matches(rule: dict[str, Any], flow: c.Flow = FLOW, *updates: c.Update, of: c.PolicyId = ONE) -> bool:
    """Whether a rule that allows matches, as the only one."""
    found = evaluator(*updates, policy(of, c.Rule(c.Action.ALLOW, **rule)), tiers=(tier(of),))
    return found.check(POD, flow).allowed


def source(**clauses: Any) -> dict[str, Any]:
    return {"source": c.PeerMatch(**clauses)}


def destination(**clauses: Any) -> dict[str, Any]:
    return {"destination": c.PeerMatch(**clauses)}


def flow(**changes: Any) -> c.Flow:
    return replace(FLOW, **changes)


def test_before_the_snapshot_is_complete_nothing_can_be_said() -> None:
    assert Evaluator(Store()).check(POD, FLOW).code is Code.UNAVAILABLE


def test_an_endpoint_that_is_unknown_is_denied() -> None:
    found = evaluator()
    assert found.check(None, FLOW).code is Code.PERMISSION_DENIED
    assert found.check(c.EndpointId("k8s", "shop/other", "eth0"), FLOW).code is Code.PERMISSION_DENIED


def test_an_endpoint_without_tiers_and_profiles_is_denied() -> None:
    verdict = evaluator().check(POD, FLOW)
    assert (verdict.code, verdict.rule) == (Code.PERMISSION_DENIED, RuleRef(PROFILE_TIER, None, -1))


@pytest.mark.parametrize(
    ("rules", "code", "index"),
    [
        ((ALLOW,), Code.OK, 0),
        ((DENY,), Code.PERMISSION_DENIED, 0),
        ((LOG, ALLOW), Code.OK, 1),
        ((LOG,), Code.PERMISSION_DENIED, -1),
        ((), Code.PERMISSION_DENIED, -1),
        ((ALLOW, DENY), Code.OK, 0),
        ((c.Rule(c.Action.UNKNOWN),), Code.INVALID_ARGUMENT, 0),
        ((ALLOW, c.Rule(c.Action.UNKNOWN)), Code.OK, 0),
    ],
)
def test_the_first_rule_that_matches_decides(rules: tuple[c.Rule, ...], code: Code, index: int) -> None:
    verdict = with_rule(*rules).check(POD, FLOW)
    assert verdict.rule is not None
    assert (verdict.code, verdict.rule.index, verdict.rule.policy) == (code, index, ONE)


def test_a_rule_that_passes_leaves_its_tier_only() -> None:
    found = evaluator(
        policy(ONE, PASS, DENY), policy(TWO, ALLOW), tiers=(tier(ONE, name="first"), tier(TWO)), profiles=()
    )
    assert found.check(POD, FLOW).rule == RuleRef("default", TWO, 0)


@pytest.mark.parametrize("passes", [True, False])
def test_the_end_of_a_tier(passes: bool) -> None:
    found = evaluator(policy(ONE), policy(TWO, ALLOW), tiers=(tier(ONE, name="first", passes=passes), tier(TWO)))
    assert found.check(POD, FLOW).rule == (RuleRef("default", TWO, 0) if passes else RuleRef("first", ONE, -1))


@pytest.mark.parametrize(
    ("rules", "code"),
    [((ALLOW,), Code.OK), ((DENY,), Code.PERMISSION_DENIED), ((PASS,), Code.PERMISSION_DENIED), ((), Code.OK)],
)
def test_profiles_come_after_the_tiers(rules: tuple[c.Rule, ...], code: Code) -> None:
    found = evaluator(
        c.ProfileUpdate("first", c.Policy("", rules)),
        c.ProfileUpdate("second", c.Policy("", (ALLOW,))),
        profiles=("first", "second"),
    )
    assert found.check(POD, FLOW).code is code


def test_a_tier_with_policies_for_the_other_direction_only_has_no_say() -> None:
    egress = c.Tier("first", (), (ONE,))
    found = evaluator(policy(ONE, DENY), policy(TWO, ALLOW), tiers=(egress, tier(TWO)))
    assert found.check(POD, FLOW).allowed
    assert not found.check(POD, FLOW, c.Direction.EGRESS).allowed


def test_staged_policies_say_what_they_would_do_and_nothing_else() -> None:
    found = evaluator(
        policy(STAGED, DENY), policy(ONE, ALLOW), tiers=(tier(STAGED, name="staged"), tier(STAGED, ONE))
    )
    assert found.check(POD, FLOW).rule == RuleRef("default", ONE, 0)
    assert found.check(POD, FLOW, enforced=False).rule == RuleRef("staged", STAGED, 0)


def test_a_staged_policy_leaves_the_end_of_its_tier_to_the_others() -> None:
    found = evaluator(policy(STAGED), policy(ONE), tiers=(tier(STAGED, ONE),))
    assert found.check(POD, FLOW).rule == RuleRef("default", ONE, -1)


def test_a_policy_that_is_missing_is_an_error_when_it_is_reached() -> None:
    missing = evaluator(policy(ONE, LOG), tiers=(tier(ONE, TWO),))
    verdict = missing.check(POD, FLOW)
    assert verdict.code is Code.INTERNAL
    assert "NetworkPolicy/shop/two of tier default" in verdict.message
    assert evaluator(policy(ONE, ALLOW), tiers=(tier(ONE, TWO),)).check(POD, FLOW).allowed
    missing.apply(policy(TWO, ALLOW))
    assert missing.check(POD, FLOW).allowed
    missing.apply(c.PolicyUpdate(TWO, None))
    assert missing.check(POD, FLOW).code is Code.INTERNAL


def test_a_profile_that_is_missing_is_an_error() -> None:
    assert evaluator(profiles=("kns.shop",)).check(POD, FLOW).code is Code.INTERNAL


@pytest.mark.parametrize(
    "principal", ["nonsense", "spiffe://td/ns/shop", "spiffe:///ns/a/sa/b", f"{WEB}/", f"{WEB}\n"]
)
@pytest.mark.parametrize("side", ["source_principal", "destination_principal"])
def test_a_malformed_principal_is_denied_and_not_taken_for_plain_text(principal: str, side: str) -> None:
    found = with_rule(c.Rule(c.Action.ALLOW, c.PeerMatch(account_names=("web",))))
    assert found.check(POD, flow(**{side: principal})).code is Code.PERMISSION_DENIED


GONE = "s:never"
NOWHERE = c.Flow(protocol=6, source_principal=WEB)
#: A clause that cannot be judged, and a flow that shows it.
UNJUDGED: list[tuple[dict[str, Any], c.Flow]] = [
    ({"ip_version": 4}, NOWHERE),
    ({"icmp": c.IcmpMatch(8)}, replace(FLOW, protocol=1)),
    ({"not_icmp": c.IcmpMatch(8)}, replace(FLOW, protocol=58)),
    *(
        ({side: c.PeerMatch(**clause)}, flow)
        for side in ("source", "destination")
        for clause, flow in (
            ({"ip_sets": (GONE,)}, FLOW),
            ({"not_ip_sets": (GONE,)}, FLOW),
            ({"ip_port_sets": (GONE,)}, FLOW),
            ({"named_ports": (GONE,)}, FLOW),
            ({"not_named_ports": (GONE,)}, FLOW),
            ({"nets": (None,)}, FLOW),
            ({"not_nets": (None,)}, FLOW),
            ({"nets": (ip_network("10.0.0.0/8"),)}, NOWHERE),
            ({"not_nets": (ip_network("10.0.0.0/8"),)}, NOWHERE),
            ({"ip_sets": ("s:a",)}, NOWHERE),
            ({"not_ip_sets": ("s:a",)}, NOWHERE),
            ({"ip_port_sets": ("n:http",)}, NOWHERE),
            ({"named_ports": ("n:http",)}, NOWHERE),
            ({"not_named_ports": ("n:http",)}, NOWHERE),
            ({"ports": ((80, 80),)}, NOWHERE),
            ({"ports": ((1, 60_000),)}, NOWHERE),
            ({"not_ports": ((80, 80),)}, NOWHERE),
        )
    ),
    ({"source": c.PeerMatch(account_selector="role ==")}, FLOW),
    ({"source": c.PeerMatch(namespace_selector="env ==")}, FLOW),
    ({"http": c.HttpMatch(paths=(c.PathMatch("/a", True),))}, replace(FLOW, path="a")),
]


@pytest.mark.parametrize("connections_only", [False, True])
@pytest.mark.parametrize(("clause", "about"), UNJUDGED)
def test_a_clause_that_cannot_be_judged_lets_nothing_through(
    clause: dict[str, Any], about: c.Flow, connections_only: bool
) -> None:
    """Whatever the action is: what comes after the rule would allow, in its tier and in the next one."""
    if connections_only and "http" in clause:
        clause = {**clause, "source": c.PeerMatch(ip_sets=(GONE,))}
    for action in (c.Action.ALLOW, c.Action.DENY, c.Action.PASS, c.Action.UNKNOWN):
        found = Evaluator(Store(), connections_only=connections_only)
        rules = (c.Rule(action, **clause), *((ALLOW,) if action is not c.Action.ALLOW else ()))
        endpoint = c.Endpoint("", (), (tier(ONE, name="first"), tier(TWO)), ())
        for update in (
            policy(ONE, *rules),
            policy(TWO, ALLOW),
            NET_SET,
            PORT_SET,
            c.EndpointUpdate(POD, endpoint),
        ):
            found.apply(update)
        found.apply(c.InSync())
        verdict = found.check(POD, about)
        assert not verdict.allowed, action
        walked = walk(found.store, endpoint, about, identities(about), connections_only=connections_only).verdict
        assert walked.code is verdict.code


@pytest.mark.parametrize(
    ("action", "clause", "member", "other"),
    [
        (c.Action.ALLOW, "ip_sets", Code.OK, Code.PERMISSION_DENIED),
        (c.Action.DENY, "ip_sets", Code.PERMISSION_DENIED, Code.INTERNAL),
        (c.Action.ALLOW, "not_ip_sets", Code.PERMISSION_DENIED, Code.PERMISSION_DENIED),
        (c.Action.DENY, "not_ip_sets", Code.OK, Code.INTERNAL),
    ],
)
def test_a_member_that_cannot_be_read_leaves_the_others_in_force(
    action: c.Action, clause: str, member: Code, other: Code
) -> None:
    broken = c.IpSetUpdate("s:b", c.IpSetType.IP, ("10.0.0.1", UNREADABLE))
    rules = (c.Rule(action, c.PeerMatch(**{clause: ("s:b",)})), *((ALLOW,) if action is c.Action.DENY else ()))
    found = evaluator(broken, policy(ONE, *rules), tiers=(tier(ONE),))
    assert found.check(POD, FLOW).code is member
    assert found.check(POD, flow(source_ip="10.0.0.9")).code is other


def test_a_rule_that_passes_some_requests_on_does_not_guess_about_a_path() -> None:
    http = c.HttpMatch(paths=(c.PathMatch("/a", True),))
    found = with_rule(c.Rule(c.Action.PASS, http=http), ALLOW)
    assert found.check(POD, flow(path="/%XY")).code is Code.INVALID_ARGUMENT


def test_trust_domains_can_be_listed() -> None:
    found = Evaluator(Store(), frozenset({"cluster.local"}))
    for update in (policy(ONE, ALLOW), c.EndpointUpdate(POD, c.Endpoint("", (), (tier(ONE),))), c.InSync()):
        found.apply(update)
    assert found.check(POD, FLOW).allowed
    assert not found.check(POD, flow(source_principal="spiffe://other/ns/shop/sa/web")).allowed


NET_SET = c.IpSetUpdate("s:a", c.IpSetType.NET, ("10.0.0.0/24",))
PORT_SET = c.IpSetUpdate("n:http", c.IpSetType.IP_AND_PORT, ("10.0.0.2,tcp:80", "10.0.0.2,sctp:81"))
SHOP = c.NamespaceUpdate("shop", {"env": "prod"})
ACCOUNT = c.ServiceAccountUpdate("shop", "web", {"role": "web"})
NET = ip_network("10.0.0.0/24")
SIX = ip_network("fd00::/8")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, True),
        ({"protocol": 6}, True),
        ({"protocol": "TCP"}, True),
        ({"protocol": 17}, False),
        ({"protocol": "nonsense"}, False),
        ({"not_protocol": "udp"}, True),
        ({"not_protocol": 6}, False),
        ({"not_protocol": "nonsense"}, True),
        ({"ip_version": 4}, True),
        ({"ip_version": 6}, False),
        ({"icmp": c.IcmpMatch(8)}, False),
        ({"not_icmp": c.IcmpMatch(8)}, True),
        (source(nets=(NET,)), True),
        (source(nets=(SIX,)), False),
        (source(nets=(SIX, NET)), True),
        (source(nets=(NET, None)), True),
        (source(nets=(None, NET)), False),
        (source(not_nets=(NET,)), False),
        (source(not_nets=(SIX,)), True),
        (source(not_nets=(SIX, None)), False),
        (destination(ports=((80, 80),)), True),
        (destination(ports=((81, 90), (70, 80))), True),
        (destination(ports=((1, 65535),)), True),
        (destination(ports=((81, 81),)), False),
        (destination(not_ports=((80, 80),)), False),
        (destination(not_ports=((81, 81),)), True),
        (source(ports=((80, 80),)), False),
        (source(ip_sets=("s:a",)), True),
        (source(ip_sets=("s:a", "s:never")), False),
        (source(ip_sets=("s:never",)), False),
        (source(not_ip_sets=("s:a",)), False),
        (source(not_ip_sets=("s:never",)), False),
        (destination(named_ports=("n:http",)), True),
        (destination(named_ports=("n:never",), ports=((80, 80),)), True),
        (destination(named_ports=("n:never",)), False),
        (source(named_ports=("n:http",)), False),
        (destination(not_named_ports=("n:http",)), False),
        (destination(not_named_ports=("n:never",)), False),
        (destination(ip_port_sets=("n:http",)), True),
        (destination(ip_port_sets=("n:never",)), False),
        (source(account_names=("web",)), True),
        (source(account_names=("db", "web")), True),
        (source(account_names=("db",)), False),
        (source(account_selector="role == 'web'"), True),
        (source(account_selector="role != 'web'"), False),
        (source(account_selector="role =="), False),
        (source(account_names=("web",), account_selector="has(nothing)"), False),
        (source(namespace_selector="env == 'prod'"), True),
        (source(namespace_selector="env == 'test'"), False),
        (source(namespace_selector="env =="), False),
        (destination(account_names=("web",)), True),  # the destination has no principal: plain text
    ],
)
def test_each_clause_of_a_rule_matches_a_tcp_flow_or_not(rule: dict[str, Any], expected: bool) -> None:
    assert matches(rule, FLOW, NET_SET, PORT_SET, SHOP, ACCOUNT) is expected


@pytest.mark.parametrize(
    ("rule", "changes", "expected"),
    [
        (destination(ip_port_sets=("n:http",)), {"protocol": 132, "destination_port": 81}, True),
        (destination(ip_port_sets=("n:http",)), {"destination_port": 81}, False),
        (source(nets=(NET,)), {"source_ip": None}, False),
        (source(ip_sets=("s:a",)), {"source_ip": None}, False),
        (source(nets=(SIX,)), {"source_ip": "fd00::1"}, True),
        (source(account_names=("db",)), {"source_principal": ""}, True),
        (source(account_selector="has(nothing)"), {"source_principal": ""}, True),
        (source(namespace_selector="has(nothing)"), {"source_principal": ""}, True),
        (source(account_selector="team == 'x'"), {"source_labels": (("team", "x"),)}, True),
        (source(account_selector="role == 'x'"), {"source_labels": (("role", "x"),)}, False),
        ({"protocol": 6}, {"protocol": 300}, False),
        ({"not_protocol": 6}, {"protocol": 300}, False),
    ],
)
def test_clauses_match_flows_without_the_usual_facts(
    rule: dict[str, Any], changes: dict[str, Any], expected: bool
) -> None:
    assert matches(rule, flow(**changes), NET_SET, PORT_SET, SHOP, ACCOUNT) is expected


@pytest.mark.parametrize(
    ("clauses", "namespace", "expected"),
    [
        ({"selector": "app == 'x'"}, "shop", True),
        ({"selector": "app == 'x'"}, "prod", False),
        ({"not_selector": "app == 'x'"}, "prod", False),
        ({"account_names": ("web",)}, "prod", False),
        ({"account_selector": "all()"}, "prod", False),
        ({}, "prod", True),
        ({"selector": "app == 'x'", "namespace_selector": "all()"}, "prod", True),
    ],
)
def test_a_policy_of_a_namespace_means_pods_and_accounts_of_its_own(
    clauses: dict[str, Any], namespace: str, expected: bool
) -> None:
    peer = flow(source_principal=f"spiffe://cluster.local/ns/{namespace}/sa/web")
    assert matches(source(**clauses), peer, of=TWO) is expected
    assert matches(source(**clauses), peer, of=ONE)


@pytest.mark.parametrize(
    "clauses",
    [
        {"ip_sets": ("s:never",)},
        {"not_ip_sets": ("s:never",)},
        {"named_ports": ("n:never",)},
        {"not_named_ports": ("n:never",)},
        {"ip_port_sets": ("n:never",)},
        {"nets": (None,)},
        {"not_nets": (None,)},
        {"account_selector": "broken =="},
        {"namespace_selector": "broken =="},
    ],
)
@pytest.mark.parametrize("action", [c.Action.DENY, c.Action.UNKNOWN])
def test_a_denial_that_cannot_be_evaluated_is_an_error_unless_another_clause_fails(
    clauses: dict[str, Any], action: c.Action
) -> None:
    rule = c.Rule(action, c.PeerMatch(**clauses))
    assert with_rule(rule, ALLOW).check(POD, FLOW).code is Code.INTERNAL
    other = replace(rule, destination=c.PeerMatch(ports=((81, 81),)))
    assert with_rule(other, ALLOW).check(POD, FLOW).allowed


def test_a_set_that_arrives_or_goes_counts_at_once() -> None:
    found = with_rule(c.Rule(c.Action.ALLOW, c.PeerMatch(ip_sets=("s:a",))))
    assert not found.check(POD, FLOW).allowed
    for update, allowed in (
        (NET_SET, True),
        (c.IpSetDelta("s:a", (), ("10.0.0.0/24",)), False),
        (c.IpSetDelta("s:a", ("10.0.0.1/32",), ()), True),
        (c.IpSetRemove("s:a"), False),
    ):
        found.apply(update)
        assert found.check(POD, FLOW).allowed is allowed


GET_PUBLIC = c.HttpMatch(("GET",), (c.PathMatch("/public", True), c.PathMatch("/exact/", False)))


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/public", Code.OK),
        ("GET", "/public/x?y", Code.OK),
        ("GET", "/exact", Code.OK),
        ("GET", "/exact/x", Code.PERMISSION_DENIED),
        ("GET", "/public-leak", Code.PERMISSION_DENIED),
        ("GET", "/public/..%2Fadmin", Code.PERMISSION_DENIED),
        ("GET", "/public/..;x/admin", Code.PERMISSION_DENIED),
        ("GET", "//public", Code.OK),
        ("GET", "/%XY", Code.PERMISSION_DENIED),
        ("get", "/public", Code.PERMISSION_DENIED),
        ("POST", "/public", Code.PERMISSION_DENIED),
        ("GET", "", Code.INVALID_ARGUMENT),
        ("GET", "public", Code.INVALID_ARGUMENT),
        ("POST", "public", Code.PERMISSION_DENIED),
        (None, None, Code.OK),
    ],
)
def test_http_clauses_match_method_and_normalized_path(method: str | None, path: str | None, code: Code) -> None:
    found = with_rule(c.Rule(c.Action.ALLOW, http=GET_PUBLIC))
    assert found.check(POD, flow(method=method, path=path)).code is code


def test_a_star_matches_any_http_method() -> None:
    found = with_rule(c.Rule(c.Action.ALLOW, http=c.HttpMatch(("*",))))
    assert found.check(POD, flow(method="ANYTHING")).allowed


def test_a_denial_meets_paths_that_have_no_normal_form() -> None:
    found = with_rule(c.Rule(c.Action.DENY, http=c.HttpMatch((), (c.PathMatch("/admin", True),))), ALLOW)
    assert not found.check(POD, flow(path="/%XY")).allowed
    assert found.check(POD, flow(path="/public")).allowed


def test_answers_that_read_no_http_are_kept_and_others_are_not() -> None:
    found = evaluator(
        policy(
            ONE,
            c.Rule(c.Action.ALLOW, destination=c.PeerMatch(ports=((80, 80),))),
            c.Rule(c.Action.ALLOW, http=GET_PUBLIC),
        ),
        tiers=(tier(ONE),),
    )
    first = found.check(POD, flow(path="/a"))
    assert found.check(POD, flow(path="/b")) is first
    other = flow(destination_port=81)
    assert not found.check(POD, replace(other, path="/a")).allowed
    assert found.check(POD, replace(other, path="/public")).allowed


def test_answers_are_kept_up_to_a_number_and_not_of_principals_that_are_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CACHED_VERDICTS", 10)
    found = with_rule(ALLOW)
    other = c.EndpointId("k8s", "shop/other", "eth0")
    found.apply(c.EndpointUpdate(other, c.Endpoint("", (), (tier(ONE),))))

    def kept() -> int:
        return sum(len(plan.answers) for plan in found._plans.values())

    for number in range(95):
        endpoint, direction = (POD, other)[number % 2], list(c.Direction)[number // 2 % 2]
        found.check(endpoint, flow(destination_port=number), direction)
        assert 0 < kept() <= 10
        assert found._kept == kept()
    found.apply(c.EndpointUpdate(other, None))
    found.apply(policy(ONE, DENY))
    found.check(POD, FLOW)
    before = kept()
    assert found._kept == before
    long = "spiffe://cluster.local/ns/shop/sa/" + "x" * 1_000
    assert found.check(POD, flow(source_principal=long)).code is Code.PERMISSION_DENIED
    assert kept() == before
    too_long = with_rule(ALLOW).check(POD, flow(source_principal=long + "x" * 2_000))
    assert too_long.message.startswith("not a principal of a trusted mesh")


def connection(rule: dict[str, Any], action: c.Action = c.Action.ALLOW, **changes: Any) -> Verdict:
    """The verdict of one rule where only connections are judged, before a rule that allows all or a tier's end."""
    found = Evaluator(Store(), connections_only=True)
    updates = (policy(ONE, c.Rule(action, **rule), *(() if action is c.Action.ALLOW else (ALLOW,))), IN_A)
    for update in (*updates, c.EndpointUpdate(POD, c.Endpoint("", (), (tier(ONE),))), c.InSync()):
        found.apply(update)
    return found.check(POD, flow(method=None, path=None, **changes))


HTTP_GET = {"http": c.HttpMatch(methods=("GET",))}
IN_A = c.IpSetUpdate("s:a", c.IpSetType.NET, ("10.0.0.1/32",))


def test_a_connection_is_not_allowed_by_a_rule_about_requests_and_the_message_names_it() -> None:
    verdict = connection(HTTP_GET)
    assert verdict.code is Code.PERMISSION_DENIED
    assert verdict.message == (
        "denied by default|GlobalNetworkPolicy/one|end of tier; "
        "default|GlobalNetworkPolicy/one|rule 0 allows HTTP requests, which are not seen here"
    )
    assert connection({}).allowed


@pytest.mark.parametrize("action", [c.Action.ALLOW, c.Action.DENY, c.Action.PASS])
def test_only_a_rule_that_allows_leaves_its_requests_to_a_waypoint(action: c.Action) -> None:
    found = Evaluator(Store(), connections_only=True)
    rules = policy(ONE, c.Rule(action, http=c.HttpMatch(("GET",))))
    for update in (rules, c.EndpointUpdate(POD, c.Endpoint("", (), (tier(ONE),))), c.InSync()):
        found.apply(update)
    alone = found.check(POD, FLOW)
    left = found.check(POD, replace(FLOW, requests_left_to="waypoint a/b"))
    assert not alone.allowed
    assert left.allowed is (action is c.Action.ALLOW)
    assert ("left to waypoint a/b" in left.message) is left.allowed
    assert found.check(POD, FLOW) == alone


def test_of_rules_that_may_not_have_http_a_denial_denies_and_another_is_an_error() -> None:
    assert connection(HTTP_GET, c.Action.DENY).rule == RuleRef("default", ONE, 0)
    verdict = connection(HTTP_GET, c.Action.PASS)
    assert (verdict.code, verdict.message) == (
        Code.INVALID_ARGUMENT,
        "default|GlobalNetworkPolicy/one|rule 0 passes HTTP requests on, which are not seen here",
    )


@pytest.mark.parametrize(
    ("rule", "plain"),
    [
        (source(account_names=("web",)), False),
        (source(account_selector="all()"), False),
        (destination(account_names=("web",)), False),
        (source(namespace_selector="all()"), False),
        (source(namespace_selector="all()", ip_sets=("s:a",)), True),
        (source(selector="all()", ip_sets=("s:a",)), True),
    ],
)
def test_a_connection_in_plain_text_has_no_identity_that_a_rule_could_allow(
    rule: dict[str, Any], plain: bool
) -> None:
    both = {"source_principal": WEB, "destination_principal": WEB}
    assert connection(rule, **both).allowed
    assert connection(rule, source_principal="", destination_principal="").allowed is plain
    assert not connection(rule, c.Action.DENY, source_principal="", destination_principal="").allowed


def test_the_walk_names_the_clause_that_failed() -> None:
    found = evaluator(
        policy(
            ONE,
            LOG,
            c.Rule(c.Action.ALLOW, c.PeerMatch(account_names=("db",))),
            c.Rule(c.Action.ALLOW, http=GET_PUBLIC),
        ),
        policy(STAGED, ALLOW),
        tiers=(tier(STAGED, ONE),),
    )
    result = walk(found.store, found.store.endpoints[POD], FLOW, identities(FLOW))
    assert [(step.outcome, step.clause) for step in result.steps] == [
        (Outcome.STAGED, ""),
        (Outcome.LOGGED, ""),
        (Outcome.NO_MATCH, "source.serviceAccounts.names"),
        (Outcome.NO_MATCH, "http"),
        (Outcome.DENIED, ""),
    ]


def test_endpoints_with_the_same_policies_share_the_compiled_tier() -> None:
    found = evaluator(policy(ONE, ALLOW), tiers=(tier(ONE),))
    other = c.EndpointId("k8s", "shop/web-1", "eth0")
    found.apply(c.EndpointUpdate(other, c.Endpoint("", (), (tier(ONE),))))
    assert found.check(POD, FLOW).allowed
    assert found.check(other, FLOW).allowed
    assert len(found._tiers) == 1
    for endpoint in (POD, other):
        found.apply(c.EndpointUpdate(endpoint, None))
    gc.collect()
    assert len(found._tiers) == 0


def test_an_address_finds_its_newest_endpoint() -> None:
    store = Store()
    other = c.EndpointId("k8s", "shop/web-1", "eth0")
    address = c.Endpoint("", (ip_network("10.0.0.2/32"), ip_network("fd00::2/128")))
    for endpoint_id in (POD, other):
        store.apply(c.EndpointUpdate(endpoint_id, address))
    assert store.endpoint_at("10.0.0.2") == other
    store.apply(c.EndpointUpdate(other, None))
    assert store.endpoint_at("fd00::2") == POD
    store.apply(c.EndpointUpdate(POD, c.Endpoint()))
    assert store.endpoint_at("10.0.0.2") is None
    assert store.endpoint_at(None) is None


def test_updates_about_sets_that_do_not_exist_are_counted() -> None:
    store = Store()
    store.apply(c.IpSetDelta("s:never", ("10.0.0.1",), ()))
    store.apply(c.IpSetRemove("s:never"))
    assert (store.ignored, len(store.ip_sets)) == (1, 0)
