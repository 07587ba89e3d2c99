"""Objects become resources. Faulty ones keep their last good form, or close the pods that they select."""

from typing import Any

from ztunnel.kube.objects import ObjectKey
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects


def network_policy(spec: dict[str, Any], name: str = "web") -> tuple[ObjectKey, dict[str, Any]]:
    metadata = {"name": name, "namespace": "shop"}
    body = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
    return ObjectKey("NetworkPolicy", "shop", name), body


GOOD = {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{}]}
BAD = GOOD | {"policyTypes": ["Inward"]}


def test_a_resource_follows_its_object() -> None:
    objects = PolicyObjects()
    key, body = network_policy(GOOD)
    [(table, policy_id, policy)] = objects.changes({key: body})
    assert table == "policies"
    assert (policy.ingress, policy.egress, len(policy.inbound)) == (True, False, 1)
    assert objects.changes({key: None}) == [("policies", policy_id, None)]
    assert objects.changes({key: None}) == []


def test_a_faulty_change_leaves_the_last_good_form() -> None:
    objects = PolicyObjects()
    key, body = network_policy(GOOD)
    objects.changes({key: body})
    assert objects.changes({key: network_policy(BAD)[1]}) == []
    assert "Inward" in str(objects.problems[key])
    assert "last good form" in str(objects.problems[key])
    objects.changes({key: body})
    assert not objects.problems


def test_a_policy_that_was_never_good_closes_what_it_selects() -> None:
    objects = PolicyObjects()
    key, body = network_policy(BAD)
    [(_, _, policy)] = objects.changes({key: body})
    assert "app == 'web'" in policy.selector
    assert (policy.ingress, policy.egress, policy.order) == (True, True, float("-inf"))
    assert [rule.action for rule in policy.inbound + policy.outbound] == ["deny", "deny"]
    assert "closed meanwhile: ingress and egress of " in str(objects.problems[key])
    [(_, _, mended)] = objects.changes({key: network_policy(GOOD)[1]})
    assert mended.order == 1000
    assert not objects.problems


def test_with_a_faulty_selector_it_closes_its_namespace_in_the_directions_that_it_governs() -> None:
    objects = PolicyObjects()
    key, body = network_policy({"podSelector": {"matchExpressions": [{"key": "app", "operator": "Near"}]}})
    [(_, policy_id, policy)] = objects.changes({key: body})
    assert (policy_id.namespace, policy.selector) == ("shop", "projectcalico.org/orchestrator == 'k8s'")
    assert (policy.ingress, policy.egress) == (True, False)
    assert "app" not in str(policy.selector)
    Compiler().apply([("policies", policy_id, policy)])


def test_a_kind_that_is_not_understood_is_a_problem() -> None:
    objects = PolicyObjects()
    key = ObjectKey("BGPPeer", "", "one")
    body = {"apiVersion": "projectcalico.org/v3", "kind": "BGPPeer", "metadata": {"name": "one"}}
    assert objects.changes({key: body}) == []
    assert "makes no policy here" in str(objects.problems[key])


def test_closed_policy_follows_the_selector_of_its_next_faulty_form() -> None:
    objects = PolicyObjects()
    key, body = network_policy(BAD)
    objects.changes({key: body})
    [(_, _, policy)] = objects.changes(
        dict([network_policy(BAD | {"podSelector": {"matchLabels": {"app": "db"}}})])
    )
    assert "app == 'db'" in policy.selector
    assert [rule.action for rule in policy.inbound + policy.outbound] == ["deny", "deny"]
    assert "closed meanwhile" in str(objects.problems[key])
    [(_, policy_id, mended)] = objects.changes({key: network_policy(GOOD)[1]})
    assert mended.order == 1000
    assert objects.changes({key: network_policy(BAD)[1]}) == []
    assert "last good form" in str(objects.problems[key])
    assert objects.changes({key: None}) == [("policies", policy_id, None)]


def test_the_last_good_form_of_a_deleted_object_is_not_that_of_its_successor() -> None:
    objects, compiler = PolicyObjects(), Compiler()
    key, body = network_policy(GOOD)
    successor = network_policy(BAD)[1]
    body["metadata"]["uid"], successor["metadata"]["uid"] = "1", "2"
    compiler.apply(objects.changes({key: body}))
    compiler.apply(objects.changes({key: successor}))
    [policy] = compiler.resources.policies.values()
    assert [rule.action for rule in policy.inbound] == ["deny"]
    assert "closed meanwhile" in str(objects.problems[key])
    tier_key = ObjectKey("Tier", "", "first")
    tier = {"apiVersion": "projectcalico.org/v3", "kind": "Tier", "metadata": {"name": "first", "uid": "1"}}
    compiler.apply(objects.changes({tier_key: {**tier, "spec": {"order": 1, "defaultAction": "Pass"}}}))
    assert list(compiler.resources.tiers) == ["first"]
    tier["metadata"] = {"name": "first", "uid": "2"}
    compiler.apply(objects.changes({tier_key: {**tier, "spec": {"order": "first"}}}))
    assert not compiler.resources.tiers
    assert "not in force" in str(objects.problems[tier_key])
