"""Evaluation: the order of tiers, policies and rules, clauses without a value, HTTP, connections, kept answers."""

import gc
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest

from tests.ztunnel.policy.calico.evaluator_case import (
    ALLOW,
    DENY,
    FLOW,
    LOG,
    NET_SET,
    ONE,
    PASS,
    POD,
    PORT_SET,
    STAGED,
    TWO,
    WEB,
    destination,
    evaluator,
    flow,
    identities,
    policy,
    source,
    tier,
    with_rule,
)
from tests.ztunnel.policy.calico.literal import UNREADABLE
from xds.model import calico as c
from ztunnel.policy.calico import evaluator as module
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import PROFILE_TIER, Code, RuleRef, Verdict
from ztunnel.policy.calico.walk import Outcome, walk


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
    """Whatever the rule's action is, later rules in its tier and in the next one must not allow the flow."""
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
    """Return the verdict of one rule for a connection. The rule is followed by a rule that allows all, or by the
    tier's end.
    """
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


def test_a_port_range_of_the_wrong_order_does_not_hide_the_length_of_another() -> None:
    # A server could make the index list all of 2**32 ports. With 2**20 this test fails without taking all memory.
    rule = c.Rule(c.Action.ALLOW, destination=c.PeerMatch(ports=((0, 2**20), (2**21, 2**20))))
    assert module._needs(rule) == ()
