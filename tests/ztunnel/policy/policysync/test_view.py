"""A client receives only the objects that its endpoints need, and each after the objects that it names."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.ztunnel.policy.calico.cluster import BACK, FRONT, OTHER, PODS, SEED, compiled, global_policy
from xds.model import calico as c
from ztunnel.policy.calico.incremental import Compiler, differences
from ztunnel.policy.calico.read import read_resources
from ztunnel.policy.calico.resources import Resources
from ztunnel.policy.policysync import view as module
from ztunnel.policy.policysync.view import View, by_names, changes, excerpt, view_of

SPECS = (
    "{selector: app == 'backend', ingress: [{action: Allow, source: {selector: app == 'frontend'}}]}",
    "{selector: app == 'frontend', egress: [{action: Allow, destination: {selector: app == 'backend'}}]}",
    "{ingress: [{action: Deny, source: {notSelector: app == 'frontend'}}]}",
    "{tier: other, ingress: [{action: Pass}]}",
)


def applied(
    state: dict[str, dict[object, object]], updates: Iterable[c.Update]
) -> dict[str, dict[object, object]]:
    """Apply updates like a client. Fail if an update names a missing object."""
    sets, policies, profiles, endpoints = (state[key] for key in ("sets", "policies", "profiles", "endpoints"))
    for update in updates:
        match update:
            case c.IpSetUpdate():
                sets[update.id] = set(update.members)
            case c.IpSetDelta():
                members = sets[update.id]
                assert isinstance(members, set)
                members |= set(update.added)
                members -= set(update.removed)
            case c.IpSetRemove():
                del sets[update.id]
            case c.PolicyUpdate():
                put(policies, update.id, update.policy)
            case c.ProfileUpdate():
                put(profiles, update.name, update.profile)
            case c.EndpointUpdate():
                put(endpoints, update.id, update.endpoint)
            case _:
                pass
        for policy in (*policies.values(), *profiles.values()):
            assert isinstance(policy, c.Policy)
            for rule in (*policy.inbound, *policy.outbound):
                assert {*rule.source.ip_sets, *rule.source.not_ip_sets, *rule.destination.ip_sets} <= set(sets)
        for endpoint in endpoints.values():
            assert isinstance(endpoint, c.Endpoint)
            assert {policy for tier in endpoint.tiers for policy in (*tier.ingress, *tier.egress)} <= set(policies)
            assert set(endpoint.profiles) <= set(profiles)
    return state


def put(table: dict[object, object], key: object, value: object) -> None:
    if value is None:
        del table[key]
    else:
        table[key] = value


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from(range(len(SPECS)))), st.sets(st.sampled_from((FRONT, BACK, OTHER)))),
        max_size=4,
    )
)
def test_no_step_names_what_is_not_there_and_the_last_state_is_right(
    states: list[tuple[set[int], set[c.EndpointId]]],
) -> None:
    state: dict[str, dict[object, object]] = {key: {} for key in ("sets", "policies", "profiles", "endpoints")}
    view = View()
    for specs, endpoints in states:
        text = "".join(global_policy(f"p{index}", SPECS[index]) for index in sorted(specs))
        new = view_of(compiled(text), sorted(endpoints, key=str))
        applied(state, changes(view, new))
        view = new
        assert state["sets"] == {key: set(members) for key, (_, members) in new.ip_sets.items()}
        assert state["policies"] == new.policies
        assert state["profiles"] == new.profiles
        assert state["endpoints"] == new.endpoints


def test_only_what_the_endpoints_name_is_sent() -> None:
    found = view_of(compiled(SEED + "---\n" + global_policy("x", SPECS[1])), [BACK])
    assert [policy.name for policy in found.policies] == ["allow-frontend-to-backend"]
    assert set(found.profiles) == {"kns.shop", "ksa.shop.default"}
    assert len(found.ip_sets) == 1
    assert set(found.endpoints) == {BACK}
    assert len(found.namespaces) == 2
    assert view_of(compiled(SEED), [c.EndpointId("k8s", "shop/none", "eth0")]).endpoints == {}


def test_an_excerpt_serves_its_endpoints_and_is_not_changed_by_what_follows() -> None:
    compiler = Compiler()
    compiler.apply(differences(Resources(), read_resources({"all.yaml": PODS + SEED})))
    found = excerpt(compiler.compiled, [BACK])
    assert list(changes(view_of(compiler.compiled, [BACK]), view_of(found, found.endpoints))) == []
    assert (found.uids, found.nodes, set(found.endpoints)) == ({"u-2": BACK}, {BACK: "n1"}, {BACK})
    before = view_of(found, found.endpoints)
    compiler.apply([("policies", key, None) for key in compiler.resources.policies])
    compiler.apply([("namespaces", "test", None), ("pods", ("test", "other"), None)])
    assert view_of(found, found.endpoints) == before
    now = excerpt(compiler.compiled, [BACK])
    assert list(changes(before, view_of(now, now.endpoints)))


def test_the_nodes_addresses_are_sent_to_everybody() -> None:
    found = excerpt(compiled(SEED), [BACK])
    found.ip_sets[c.NODE_ADDRESSES] = (c.IpSetType.IP, frozenset(("10.0.0.254",)))
    first = next(changes(View(), view_of(found, [])))
    assert first == c.IpSetUpdate(c.NODE_ADDRESSES, c.IpSetType.IP, ("10.0.0.254",))


def test_no_update_is_sent_twice() -> None:
    found = view_of(compiled(SEED), [BACK])
    assert list(changes(found, found)) == []
    assert list(changes(found, view_of(compiled(SEED), [BACK]))) == []


def test_a_big_set_is_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MESSAGE_MEMBERS", 10)
    members = frozenset(f"10.0.0.{number}/32" for number in range(25))
    others = frozenset(f"10.0.1.{number}/32" for number in range(25))
    old, new, empty = (View({"s": (c.IpSetType.NET, each)}) for each in (members, others, frozenset[str]()))
    first = list(changes(View(), old))
    assert [type(update) for update in first] == [c.IpSetUpdate, c.IpSetDelta, c.IpSetDelta]
    between = list(changes(old, new))
    assert [
        (len(update.added), len(update.removed)) for update in between if isinstance(update, c.IpSetDelta)
    ] == [
        (10, 0),
        (10, 0),
        (5, 5),
        (0, 10),
        (0, 10),
    ]
    assert list(changes(View(), empty)) == [c.IpSetUpdate("s", c.IpSetType.NET, ())]


def test_old_clients_get_tiers_and_names() -> None:
    found = by_names(view_of(compiled(SEED), [BACK]))
    policy = c.PolicyId("", "default", "allow-frontend-to-backend")
    assert set(found.policies) == {policy}
    assert found.endpoints[BACK].tiers == (c.Tier("default", (policy,), (policy,)),)


def test_old_clients_get_no_staged_policy_and_no_two_of_one_name() -> None:
    allow, deny = (c.Policy("shop", (c.Rule(action),)) for action in (c.Action.ALLOW, c.Action.DENY))
    ids = [
        c.PolicyId(kind, "shop", "web")
        for kind in ("KubernetesNetworkPolicy", "NetworkPolicy", "StagedNetworkPolicy")
    ]
    staged = c.PolicyId("StagedGlobalNetworkPolicy", "", "all")
    tiers = (c.Tier("first", (staged,), (), passes=False), c.Tier("default", tuple(reversed(ids)), ()))
    view = View(
        policies=dict(zip((*ids, staged), (allow, deny, allow, allow), strict=True)),
        endpoints={BACK: c.Endpoint(tiers=tiers)},
    )
    found = by_names(view)
    kubernetes = c.PolicyId("", "default", "shop/knp.default.web")
    calico = c.PolicyId("", "default", "shop/web")
    assert found.policies == {kubernetes: allow, calico: deny}
    assert found.endpoints[BACK].tiers == (c.Tier("default", (calico, kubernetes), ()),)
