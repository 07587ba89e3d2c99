"""What the tunnel proxy asks of Calico's policies: verdicts by the ends' addresses, and their counts."""

from dataclasses import replace

import pytest

from tests.ztunnel.policy.calico.stores import (
    ALLOW,
    DB_HOST,
    DENY,
    ELSEWHERE,
    FLOW,
    ONE,
    STAGED,
    WEB_HOST,
    both,
    snapshot,
)
from xds.model import calico as c
from ztunnel.policy import ledger
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.guard import Guard, results
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import Code, RuleRef
from ztunnel.policy.ledger import TierPolicy, Use, Uses

INGRESS, EGRESS = c.Direction.INGRESS, c.Direction.EGRESS


def guard(*updates: c.Update, allow_unknown: bool = False) -> Guard:
    evaluator = Evaluator(Store(), connections_only=True)
    for update in updates:
        evaluator.apply(update)
    return Guard(lambda: evaluator, lambda: 100.0, allow_unknown=allow_unknown)


def test_ingress_is_judged_by_the_destination_and_egress_by_the_source() -> None:
    only_in = c.PolicyUpdate(ONE, c.Policy("", (ALLOW,), (DENY,)))
    found = guard(*snapshot(), only_in)
    assert found.check(INGRESS, FLOW).allowed
    denied = found.check(EGRESS, FLOW)
    assert denied.verdict.rule == RuleRef("default", ONE, 0)
    assert denied.fields == (
        ("policy.tier", "default"),
        ("policy.name", "GlobalNetworkPolicy/one"),
        ("policy.rule", "0"),
    )
    assert found.check(INGRESS, replace(FLOW, source_ip=ELSEWHERE)).allowed


NODE = "10.0.0.254"
NODE_SET = c.IpSetUpdate(c.NODE_ADDRESSES, c.IpSetType.IP, (NODE, "fd00::fe"))


def test_a_node_and_its_pods_reach_each_other_where_the_source_says_who_the_node_is() -> None:
    for updates, allowed in (((NODE_SET, *snapshot(DENY)), True), (snapshot(DENY), False)):
        found = guard(*updates)
        assert found.check(INGRESS, replace(FLOW, source_ip=NODE)).allowed is allowed
        assert found.check(EGRESS, replace(FLOW, destination_ip=NODE)).allowed is allowed
        assert found.check(EGRESS, replace(FLOW, destination_ip=WEB_HOST)).allowed is allowed
        assert not found.check(INGRESS, replace(FLOW, source_ip=ELSEWHERE)).allowed
        assert not found.check(EGRESS, replace(FLOW, destination_ip=ELSEWHERE)).allowed
        # The other way round the address is a pod's as any other.
        assert not found.check(INGRESS, replace(FLOW, source_ip=DB_HOST, destination_ip=WEB_HOST)).allowed


def test_a_tunnel_that_comes_from_the_node_does_not_switch_isolation_off() -> None:
    found = guard(NODE_SET, *snapshot(DENY))
    tunnelled = replace(FLOW, source_ip=NODE, source_principal="spiffe://cluster.local/ns/x/sa/y")
    assert not found.check(INGRESS, tunnelled).allowed
    assert not found.check(INGRESS, replace(tunnelled, source_principal="no identity")).allowed


def test_the_nodes_addresses_allow_nothing_before_the_store_is_complete_or_when_they_cannot_be_read() -> None:
    flow = replace(FLOW, source_ip=NODE)
    assert not guard(NODE_SET, *snapshot(DENY)[:-1]).check(INGRESS, flow).allowed
    broken = c.IpSetUpdate(c.NODE_ADDRESSES, c.IpSetType.IP, (NODE, "no address"))
    assert not guard(broken, *snapshot(DENY)).check(INGRESS, flow).allowed


def test_before_the_first_store_is_complete_everything_is_denied() -> None:
    for allow_unknown in (False, True):
        decision = guard(*snapshot(ALLOW)[:-1], allow_unknown=allow_unknown).check(INGRESS, FLOW)
        assert (decision.verdict.code, decision.fields) == (Code.UNAVAILABLE, ())


def test_a_pod_that_is_not_known_is_denied_unless_that_is_switched_off() -> None:
    flow = replace(FLOW, destination_ip=ELSEWHERE)
    decision = guard(*snapshot(ALLOW)).check(INGRESS, flow)
    assert (decision.verdict.code, decision.pending) == (Code.PERMISSION_DENIED, True)
    assert decision.verdict.message == "the policies know no pod with the address 10.9.9.9"
    assert guard(*snapshot(ALLOW), allow_unknown=True).check(INGRESS, flow).allowed


def test_the_end_of_a_tier_is_named_as_such() -> None:
    decision = guard(*snapshot()).check(INGRESS, FLOW)
    assert dict(decision.fields)["policy.rule"] == "end of tier"
    assert not decision.pending


def test_decisions_are_counted_by_policy_and_not_when_they_are_made_again() -> None:
    found = guard(*snapshot(c.Rule(c.Action.DENY, protocol=17), ALLOW))
    found.check(INGRESS, FLOW)
    found.check(EGRESS, FLOW)
    found.check(INGRESS, FLOW, counted=False)
    found.check(INGRESS, replace(FLOW, protocol=17))
    found.check(INGRESS, replace(FLOW, destination_ip=ELSEWHERE))
    policy = ("default", "GlobalNetworkPolicy/one")
    assert dict(results(found.uses)) == {
        (*policy, "allowed"): 2,
        (*policy, "denied"): 1,
        ("none", "PERMISSION_DENIED", "denied"): 1,
    }
    assert {use.policy: use.last_s for use in found.uses} == {policy: 100.0, ("none", "PERMISSION_DENIED"): 100.0}


def test_staged_policies_are_counted_and_named_only_where_they_would_decide_otherwise() -> None:
    found = guard(*snapshot(ALLOW, staged=(c.Rule(c.Action.DENY, protocol=17),)))
    assert found.check(INGRESS, FLOW).staged == ""
    decision = found.check(INGRESS, replace(FLOW, protocol=17))
    assert (decision.allowed, decision.staged) == (True, f"denied by default|{STAGED}|rule 0")
    assert dict(results(found.uses))["default", str(STAGED), "staged denied"] == 1


def test_a_staged_policy_that_agrees_is_counted_and_the_end_of_a_tier_is_not_one() -> None:
    found = guard(*snapshot(ALLOW, staged=(ALLOW,)))
    assert found.check(INGRESS, FLOW).staged == ""
    assert dict(results(found.uses))["default", str(STAGED), "staged allowed"] == 1
    found = guard(*snapshot(staged=()))
    assert found.check(INGRESS, FLOW).staged == ""
    assert dict(results(found.uses)) == {("default", "end of tier", "denied"): 1}


def test_a_change_counts_at_once() -> None:
    evaluator = Evaluator(Store(), connections_only=True)
    found = Guard(lambda: evaluator, lambda: 0.0)
    for update in snapshot(ALLOW):
        evaluator.apply(update)
    assert found.check(INGRESS, FLOW).allowed
    assert (found.knows(WEB_HOST), found.knows(DB_HOST), found.knows(ELSEWHERE)) == (True, True, False)
    evaluator.apply(both(ONE, DENY))
    assert not found.check(INGRESS, FLOW).allowed


def test_counts_of_policies_that_made_room_stay_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_POLICIES", 2)
    uses: Uses[TierPolicy] = Uses()
    for name in ("a", "b", "c", "c"):
        uses.note(TierPolicy("default", name), Use.DENIED, 1.0)
    assert dict(results(uses)) == {
        ("default", "b", "denied"): 1,
        ("default", "c", "denied"): 2,
        ("others", "others", "denied"): 1,
    }
