"""Resources compiled: the description's own example, ids, members, order, inherited labels; and evaluated."""

import pytest

from tests.ztunnel.policy.calico.cluster import (
    BACK,
    FRONT,
    OTHER,
    SEED,
    compiled,
    evaluator,
    flow,
    global_policy,
    local_policy,
)
from xds.model import calico as c
from xds.model.selector import hashed_id, parse_selector
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.calico.verdict import Code


def only_rule(found: Compiled) -> c.Rule:
    [policy] = found.policies.values()
    return (policy.inbound or policy.outbound)[0]


def test_the_descriptions_example() -> None:
    found = compiled(SEED)
    policy_id = c.PolicyId("GlobalNetworkPolicy", "", "allow-frontend-to-backend")
    assert found.endpoints[BACK].tiers == (c.Tier("default", (policy_id,), (policy_id,), False),)
    rule = found.policies[policy_id].inbound[0]
    assert rule.source.ip_sets == ("s:qo6foyfZaz2qwFJur32YF5B0wW2vhcxDi4ErEA",)
    assert (rule.source.account_names, rule.source.account_selector) == (("frontend",), "role == 'web'")
    assert found.policies[policy_id].outbound == (c.Rule(c.Action.ALLOW),)
    assert found.ip_sets[rule.source.ip_sets[0]] == (c.IpSetType.NET, {"10.0.0.1/32", "fd00::1/128"})
    assert found.endpoints[FRONT].tiers == ()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, Code.OK),
        ({"method": "PUT"}, Code.PERMISSION_DENIED),
        ({"path": "/api/v1/data/x"}, Code.PERMISSION_DENIED),
        ({"path": "/api/v20/x"}, Code.PERMISSION_DENIED),
        ({"path": "/api/v2"}, Code.OK),
        ({"path": "/api/v2/x"}, Code.OK),
        ({"principal": "spiffe://cluster.local/ns/shop/sa/default"}, Code.PERMISSION_DENIED),
        # A certificate that was stolen and is used from another pod; and the pod with another certificate.
        ({"source": "10.0.0.3"}, Code.PERMISSION_DENIED),
        ({"principal": "spiffe://cluster.local/ns/test/sa/frontend"}, Code.PERMISSION_DENIED),
    ],
)
def test_the_descriptions_example_evaluated(changes: dict[str, str], code: Code) -> None:
    assert evaluator(compiled(SEED)).check(BACK, flow(**changes)).code is code


def test_a_pod_that_no_policy_selects_is_open_by_its_namespaces_profile() -> None:
    assert evaluator(compiled(SEED)).check(FRONT, flow()).allowed


def test_get_is_allowed_and_post_denied_for_a_service_account() -> None:
    allow = "{action: Allow, source: {serviceAccounts: {names: [frontend]}}, http: {methods: [GET]}}"
    made = evaluator(
        compiled(
            global_policy(
                "allow-get-only", f"{{selector: app == 'backend', ingress: [{allow}, {{action: Deny}}]}}"
            )
        )
    )
    assert made.check(BACK, flow()).allowed
    denied = made.check(BACK, flow("POST"))
    assert denied.rule is not None
    assert (denied.code, denied.rule.index) == (Code.PERMISSION_DENIED, 1)


@pytest.mark.parametrize(
    ("peer", "selector"),
    [
        ("selector: has(app)", "has(app) && projectcalico.org/namespace == 'shop'"),
        ("namespaceSelector: all()", "has(projectcalico.org/namespace)"),
        ("namespaceSelector: global()", "!has(projectcalico.org/namespace)"),
        ("namespaceSelector: env == 'prod', selector: has(app)", "pcns.env == 'prod' && has(app)"),
        ("selector: has(app), notSelector: app == 'backend'", "has(pcsa.role)"),
        ("notSelector: app == 'frontend'", "app == 'backend'"),
        ("serviceAccounts: {selector: role == 'web'}", "has(pcsa.role)"),
        ("serviceAccounts: {names: [frontend], selector: role != 'web'}", "has(none)"),
    ],
)
def test_peers_of_a_namespaces_policy(peer: str, selector: str) -> None:
    found = compiled(local_policy("p", f"{{ingress: [{{action: Allow, source: {{{peer}}}}}]}}"))
    [set_id] = only_rule(found).source.ip_sets
    shop = {"projectcalico.org/namespace": "shop", "pcns.env": "prod"}
    pods = {
        "10.0.0.1": {"app": "frontend", "pcsa.role": "web", **shop},
        "10.0.0.2": {"app": "backend", **shop},
        "10.0.0.3": {"app": "frontend", "projectcalico.org/namespace": "test", "pcns.env": "test"},
    }
    wanted = {f"{address}/32" for address, labels in pods.items() if parse_selector(selector).matches(labels)}
    assert {member for member in found.ip_sets[set_id][1] if ":" not in member} == wanted


def test_outsiders_are_excluded_by_a_set_only_where_no_selector_narrows() -> None:
    found = compiled(global_policy("p", "{ingress: [{action: Allow, source: {notSelector: app == 'frontend'}}]}"))
    rule = only_rule(found)
    assert rule.source.ip_sets == ()
    assert rule.source.not_ip_sets == (parse_selector("app == 'frontend'").identity,)


@pytest.mark.parametrize(("ports", "sets"), [("[http]", 0), ("[http, 90]", 1)])
def test_named_ports_are_sets_of_what_the_selector_selects(ports: str, sets: int) -> None:
    destination = f"{{selector: app == 'backend', ports: {ports}}}"
    found = compiled(
        global_policy("p", f"{{egress: [{{action: Allow, protocol: TCP, destination: {destination}}}]}}")
    )
    rule = only_rule(found)
    assert rule.destination.named_ports == ("n:tBcks54hnGESuBzOV1sYvaBdQeWBu6nw8R0jFg",)
    assert found.ip_sets[rule.destination.named_ports[0]] == (c.IpSetType.IP_AND_PORT, {"10.0.0.2,tcp:8080"})
    assert len(rule.destination.ip_sets) == sets


def test_services_are_their_pods_and_ports() -> None:
    service = "{services: {name: web, namespace: shop}}"
    found = compiled(global_policy("p", f"{{egress: [{{action: Allow, destination: {service}}}]}}"))
    [set_id] = only_rule(found).destination.ip_port_sets
    assert set_id == hashed_id("svc:", "shop/web")
    assert found.ip_sets[set_id] == (c.IpSetType.IP_AND_PORT, {"10.0.0.2,tcp:8080", "10.0.0.2,udp:5353"})
    sources = compiled(global_policy("p", f"{{ingress: [{{action: Allow, source: {service}}}]}}"))
    [set_id] = only_rule(sources).source.ip_sets
    assert sources.ip_sets[set_id] == (c.IpSetType.NET, {"10.0.0.2/32"})


@pytest.mark.parametrize(
    ("service", "identity"),
    [
        ("svc:", "svc:-B0RxVUwdW1aFEcXPP4q2GF3e68JsTwIe-pf7w"),
        ("svcnoport:", "svcnoport:b_Odath8L_-pMWpLC_tua_hO2jguw5ajClao3w"),
    ],
)
def test_ids_of_services_are_calicos(service: str, identity: str) -> None:
    assert hashed_id(service, "default/web") == identity


def test_tiers_and_policies_in_order() -> None:
    tiers = "".join(
        f"{{apiVersion: projectcalico.org/v3, kind: Tier, metadata: {{name: {name}}}, spec: {{{spec}}}}}\n---\n"
        for name, spec in (
            ("late", "order: 2000000"),
            ("unordered", ""),
            ("early", "order: 5, defaultAction: Pass"),
        )
    )
    policies = "".join(
        global_policy(name, f"{{tier: {tier}, {order}ingress: [{{action: Pass}}]}}")
        for name, tier, order in (
            ("b", "early", "order: 1, "),
            ("a", "early", "order: 1, "),
            ("z", "early", "order: 0.5, "),
            ("v", "early", ""),
            ("d", "default", ""),
            ("l", "late", ""),
            ("u", "unordered", ""),
            ("m", "missing", ""),
        )
    )
    found = compiled(tiers + policies).endpoints[BACK].tiers
    assert [tier.name for tier in found] == ["early", "default", "late", "unordered", "missing"]
    assert [policy.name for policy in found[0].ingress] == ["z", "a", "b", "v"]
    assert [tier.passes for tier in found] == [True, False, False, False, False]


def test_labels_of_namespaces_and_accounts_are_inherited() -> None:
    found = compiled(
        global_policy("namespace", "{namespaceSelector: env == 'prod'}")
        + global_policy("all", "{namespaceSelector: all()}")
        + global_policy("account", "{serviceAccountSelector: role == 'web'}")
        + global_policy("none", "{namespaceSelector: env == 'none'}")
    )
    selected = {
        key: [policy.name for tier in endpoint.tiers for policy in tier.ingress]
        for key, endpoint in found.endpoints.items()
    }
    assert selected == {FRONT: ["account", "all", "namespace"], BACK: ["all", "namespace"], OTHER: ["all"]}


def test_what_clients_hear_of_namespaces_and_accounts() -> None:
    found = compiled("")
    assert found.namespaces["shop"] == {
        "env": "prod",
        "projectcalico.org/name": "shop",
        "kubernetes.io/metadata.name": "shop",
    }
    assert found.accounts["shop", "frontend"] == {"role": "web", "projectcalico.org/name": "frontend"}
    assert found.endpoints[FRONT].profiles == ("kns.shop", "ksa.shop.frontend")
    assert found.uids == {"u-1": FRONT, "u-2": BACK}
    assert found.nodes[BACK] == "n1"
    assert set(found.endpoints) == {FRONT, BACK, OTHER}


def test_kubernetes_policies_mean_their_own_namespace() -> None:
    made = evaluator(
        compiled(
            """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: p, namespace: shop}
spec:
  podSelector: {matchLabels: {app: backend}}
  ingress: [{from: [{podSelector: {matchLabels: {app: frontend}}}], ports: [{port: http}]}]
"""
        )
    )
    assert made.check(BACK, flow(None, None)).allowed
    assert not made.check(BACK, flow(None, None, port=8081)).allowed
    assert not made.check(BACK, flow(None, None, source="10.0.0.3", principal="")).allowed
    assert made.check(FRONT, flow(None, None)).allowed
