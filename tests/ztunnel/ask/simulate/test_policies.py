"""AuthorizationPolicies as people write them, and the mesh of a dump."""

from typing import Any

import pytest
import yaml

from xds.dialects.istio.local_file import LocalMesh
from xds.errors import ConfigError
from xds.model.authorization import Action, PolicyScope
from ztunnel.ask.simulate.policies import applied, mesh_of, read_policies

BACK = {
    "uid": "c//Pod/shop/back",
    "name": "back",
    "namespace": "shop",
    "workloadIps": ["10.0.0.2"],
    "protocol": "HBONE",
    "canonicalName": "back",
    "canonicalRevision": "v1",
    "services": ["shop/cart.example"],
}
OLD = {
    "name": "old",
    "namespace": "shop",
    "scope": "WorkloadSelector",
    "action": "Deny",
    "rules": [[[{"principals": [{"Exact": "cluster.local/ns/shop/sa/thief"}]}]]],
}
DUMP: dict[str, Any] = {
    "workloads": [{**BACK, "authorizationPolicies": ["shop/old"]}, {**BACK, "uid": "u2", "name": "b2"}],
    "policies": [OLD],
}


def written(*rules: Any, name: str = "p", metadata: dict[str, Any] | None = None, **spec: Any) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "security.istio.io/v1",
            "kind": "AuthorizationPolicy",
            "metadata": {"name": name, "namespace": "shop", **(metadata or {})},
            "spec": {**spec, "rules": list(rules)},
        }
    )


def read(text: str) -> Any:
    (proposal,) = read_policies(text, "new.yaml", "istio-system")
    return proposal


def test_every_attribute_is_read_in_the_form_of_dumps() -> None:
    rule = {
        "from": [
            {"source": {"principals": ["cluster.local/ns/a/sa/b", "*"], "notNamespaces": ["*-dev", "test-*"]}},
            {
                "source": {
                    "serviceAccounts": ["web", "other/api"],
                    "ipBlocks": ["10.0.0.0/8"],
                    "notIpBlocks": ["10.1.0.0/16"],
                }
            },
        ],
        "to": [{"operation": {"ports": ["80", "443"], "notPorts": ["81"]}}],
        "when": [
            {"key": "source.ip", "notValues": ["10.2.0.0/16"]},
            {"key": "destination.port", "values": ["80"], "notValues": ["82"]},
        ],
    }
    policy = read(written(rule, action="DENY")).policy
    assert (policy.key, policy.action, policy.scope, policy.dry_run) == (
        "shop/p",
        Action.DENY,
        PolicyScope.NAMESPACE,
        False,
    )
    accounts = [
        {"namespace": "shop", "serviceAccount": "web"},
        {"namespace": "other", "serviceAccount": "api"},
    ]
    assert policy.rules == (
        [
            [
                {
                    "notNamespaces": [{"Suffix": "-dev"}, {"Prefix": "test-"}],
                    "principals": [{"Exact": "cluster.local/ns/a/sa/b"}, {"Presence": []}],
                },
                {"serviceAccounts": accounts, "sourceIps": ["10.0.0.0/8"], "notSourceIps": ["10.1.0.0/16"]},
            ],
            [{"destinationPorts": [80, 443], "notDestinationPorts": [81]}],
            [{"notSourceIps": ["10.2.0.0/16"]}],
            [{"destinationPorts": [80], "notDestinationPorts": [82]}],
        ],
    )


def test_scope_action_and_dry_run() -> None:
    plain = read(written({}))
    assert (plain.policy.action, plain.policy.scope) == (Action.ALLOW, PolicyScope.NAMESPACE)
    assert read(written(metadata={"namespace": "istio-system"})).policy.scope is PolicyScope.GLOBAL
    selected = read(written(selector={"matchLabels": {"app": "back"}}))
    assert (selected.policy.scope, selected.labels) == (PolicyScope.WORKLOAD_SELECTOR, {"app": "back"})
    for value, dry_run in (
        ("true", True),
        ("1", True),
        ("T", True),
        ("tRUE", False),
        ("yes", False),
        ("0", False),
    ):
        proposal = read(written(metadata={"annotations": {"istio.io/dry-run": value}}))
        assert proposal.policy.dry_run is dry_run, value


def test_several_documents_and_lists() -> None:
    listed = {"kind": "List", "items": [yaml.safe_load(written(name="b")), yaml.safe_load(written(name="c"))]}
    text = "---\n".join((written(name="a"), "", yaml.safe_dump(listed)))
    assert [each.policy.name for each in read_policies(text, "f", "root")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "new.yaml: no AuthorizationPolicy in it"),
        ("a: [", "new.yaml: not valid YAML: while parsing a flow node"),
        ("[]", "new.yaml: must be a mapping"),
        ("kind: Deployment", "new.yaml: no apiVersion, kind Deployment: not an AuthorizationPolicy of Istio"),
        (written(action="CUSTOM"), "new.yaml: spec.action: 'CUSTOM': a ztunnel obeys ALLOW and DENY"),
        (written(targetRefs=[]), "new.yaml: spec.targetRefs: a ztunnel does not obey it"),
        (
            written({"to": [{"operation": {"paths": ["/a"]}}]}),
            "new.yaml: spec.rules[0].to[0].operation.paths: a ztunnel does not obey it; it obeys ports, notPorts",
        ),
        (
            written({}, {"from": [{"source": {"requestPrincipals": ["*"]}}]}),
            "new.yaml: spec.rules[1].from[0].source.requestPrincipals: a ztunnel does not obey it",
        ),
        (
            written({"when": [{"key": "request.headers[x]", "values": ["1"]}]}),
            "new.yaml: spec.rules[0].when[0].key: request.headers[x]: a ztunnel does not obey it",
        ),
        (
            written({"to": [{"operation": {"ports": ["http"]}}]}),
            "new.yaml: spec.rules[0].to[0].operation.ports[0]: 'http' is no port",
        ),
        (
            written({"to": [{"operation": {"ports": ["9" * 5000]}}]}),
            f"new.yaml: spec.rules[0].to[0].operation.ports[0]: '{'9' * 5000}' is no port",
        ),
        (
            written({"from": [{"source": {"principals": "x"}}]}),
            "new.yaml: spec.rules[0].from[0].source.principals: must be a list",
        ),
        (written({"from": [{"source": {}}]}), "new.yaml: spec.rules[0].from[0].source: empty"),
        (
            written({"from": [{"source": {"serviceAccounts": ["a/*"]}}]}),
            "new.yaml: spec.rules[0].from[0].source.serviceAccounts[0]: 'a/*' is not SERVICE-ACCOUNT",
        ),
        (
            written({"from": [{"source": {"ipBlocks": ["10"]}}]}),
            "new.yaml: spec.rules[0].from[0].source.ipBlocks[0]: '10' is no address or block of addresses",
        ),
        (
            written({"from": [{"source": {"principals": ["spiffe://a/ns/b/sa/c"]}}]}),
            "new.yaml: spec.rules[0].from[0].source.principals[0]: 'spiffe://a/ns/b/sa/c' never matches",
        ),
        (written(metadata={"name": None}), "new.yaml: metadata.name: is required"),
        (
            written() + "---\n" + written(selector={"matchExpressions": []}),
            "new.yaml: document 2: spec.selector.matchExpressions: a ztunnel does not obey it",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused_by_its_place(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_policies(text, "new.yaml", "istio-system")
    assert error in str(caught.value)


# The mesh with changes


def policies_of(mesh: LocalMesh) -> dict[str, list[str]]:
    return {workload.name: list(workload.authorization_policies) for workload in mesh.workloads}


def test_a_selector_takes_the_workloads_that_it_names() -> None:
    mesh = mesh_of(DUMP)
    by_label = {"matchLabels": {"app": "back", "version": "v1"}}
    after = applied(mesh, [read(written(selector=by_label))])
    assert policies_of(after) == {"back": ["shop/old", "shop/p"], "b2": ["shop/p"]}
    none = applied(mesh, [read(written(selector={"matchLabels": {"app": "front"}}))])
    assert policies_of(none) == policies_of(mesh)


def test_a_selector_of_unknown_labels_must_be_said_to_be_the_active_one() -> None:
    changed = read(written(name="old", selector={"matchLabels": {"tier": "any"}}))
    with pytest.raises(
        ConfigError, match="if the selector is that of the active policy, --same-selector shop/old"
    ):
        applied(mesh_of(DUMP), [changed])
    after = applied(mesh_of(DUMP), [changed], same_selector=["shop/old"])
    assert policies_of(after) == {"back": ["shop/old"], "b2": []}
    assert [policy.action for policy in after.policies] == [Action.ALLOW]


def test_a_changed_selector_of_an_active_policy_is_evaluated() -> None:
    mesh = mesh_of(DUMP)
    narrowed = read(written(name="old", selector={"matchLabels": {"app": "front"}}))
    assert policies_of(applied(mesh, [narrowed])) == {"back": [], "b2": []}
    widened = read(written(name="old", selector={"matchLabels": {"app": "back"}}))
    assert policies_of(applied(mesh, [widened])) == {"back": ["shop/old"], "b2": ["shop/old"]}


def test_only_an_active_policy_with_a_selector_can_keep_it() -> None:
    new = read(written(selector={"matchLabels": {"tier": "any"}}))
    with pytest.raises(ConfigError, match="--same-selector shop/p: the mesh has no such policy"):
        applied(mesh_of(DUMP), [new], same_selector=["shop/p"])


def test_policies_can_go_and_come_into_force() -> None:
    mesh = mesh_of({**DUMP, "policies": [{**OLD, "dryRun": True}]})
    (policy,) = applied(mesh, [], enforced=["shop/old"]).policies
    assert not policy.dry_run
    assert applied(mesh, [], removed=["shop/old"]).policies == ()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"removed": ["shop/none"]}, "--remove shop/none: the mesh has no such policy"),
        ({"enforced": ["shop/old"]}, "--enforce shop/old: the mesh has no such dry-run policy"),
    ],
)
def test_changes_name_what_is_there(change: dict[str, list[str]], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        applied(mesh_of(DUMP), [], **change)


def test_a_label_that_the_mesh_does_not_tell_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"new.yaml: spec.selector.matchLabels.tier: the mesh does not contain"):
        applied(mesh_of(DUMP), [read(written(selector={"matchLabels": {"tier": "x"}}))])
