"""The mesh of a dump: what is passed over, left out by name, or taken at its strictest."""

from typing import Any

import pytest

from xds.dialects.istio.dumped_mesh import read_dump
from xds.errors import ConfigError
from xds.model.authorization import Action, PolicyScope
from xds.model.policy import Always, Never
from xds.model.workload import Health, WorkloadUid

WORKLOAD = {"uid": "a", "name": "a", "namespace": "shop", "workloadIps": ["10.0.0.1"], "protocol": "HBONE"}
SERVICE: dict[str, Any] = {
    "name": "cart",
    "namespace": "shop",
    "hostname": "cart.example",
    "vips": ["/10.1.0.1"],
    "ports": {"80": 8080},
    "endpoints": {"a": {"workloadUid": "a", "port": {"80": 8080}, "status": "Healthy"}},
}
POLICY: dict[str, Any] = {
    "name": "p",
    "namespace": "shop",
    "scope": "Namespace",
    "action": "Allow",
    "dryRun": False,
    "rules": [[[{"destinationPorts": [80]}]]],
}


def test_endpoints_join_workloads_and_services() -> None:
    found = read_dump({"workloads": [{**WORKLOAD, "services": ["shop/cart.example"]}], "services": [SERVICE]})
    assert found.unread == ()
    (endpoint,) = found.mesh.endpoints("shop/cart.example").values()
    assert (endpoint.uid, dict(endpoint.ports)) == ("a", {80: 8080})


def test_lists_may_be_mappings_and_newer_keys_are_passed_over() -> None:
    found = read_dump({"workloads": {"a": {**WORKLOAD, "newer": 1}}, "services": {"x": {**SERVICE, "newer": {}}}})
    assert found.unread == ()
    assert found.mesh.service("shop/cart.example") is not None


def test_an_unhealthy_workload_is_still_an_endpoint() -> None:
    sick = {**WORKLOAD, "status": "Unhealthy", "services": ["shop/cart.example", "shop/unknown"]}
    mesh = read_dump({"workloads": [sick], "services": [{**SERVICE, "endpoints": {}}]}).mesh
    assert mesh.endpoints("shop/cart.example") == {}
    assert mesh.all_endpoints("shop/cart.example")[WorkloadUid("a")].status is Health.UNHEALTHY


@pytest.mark.parametrize(
    ("dump", "unread"),
    [
        ({"workloads": [{**WORKLOAD, "workloadIps": ["x"]}]}, "workload a: workloadIps[0]: 'x' is no IP address"),
        (
            {"services": [{**SERVICE, "vips": ["x"]}]},
            "service shop/cart.example: vips[0]: 'x' is not network/addr",
        ),
        ({"services": [SERVICE]}, "service shop/cart.example: endpoint a is no workload of the dump"),
        (
            {"policies": [{**POLICY, "rules": [[[{"methods": ["GET"]}]]]}]},
            "policy shop/p: rules[0][0][0].methods: unknown key; taken at its strictest",
        ),
    ],
)
def test_what_cannot_be_read_is_named(dump: dict[str, Any], unread: str) -> None:
    (line,) = read_dump(dump).unread
    assert line.startswith(unread)


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        ({"rules": [[[{"methods": ["GET"]}]]]}, Never()),
        ({"rules": [[[{"methods": ["GET"]}]]], "action": "Deny"}, Always()),
        ({"faults": ["rules[0]: hosts"]}, Never()),  # rules that the proxy did not understand are missing
        ({"faults": ["rules[0]: hosts"], "action": "Deny"}, Always()),
        ({"action": "Audit"}, Always()),
    ],
)
def test_a_policy_that_is_not_understood_is_taken_at_its_strictest(change: dict[str, Any], condition: Any) -> None:
    (policy,) = read_dump({"policies": [{**POLICY, **change}]}).mesh.policies()
    assert policy.condition == condition
    assert policy.faults


def test_refused_resources_of_a_dump_keep_their_addresses_closed() -> None:
    entry = {
        "name": "shop/new.example",
        "reason": "unknown enumeration value 9",
        "vips": ["west/10.0.0.7"],
        "cidrVips": [{"network": "", "cidr": "10.7.0.0/16"}],
    }
    found = read_dump({"refusedResources": [entry, {**entry, "vips": 5}]})
    assert len(found.unread) == 1
    assert found.mesh.refused_at("west", "10.0.0.7") is found.mesh.refused_at("", "10.7.0.1") is not None


def test_a_policy_of_an_unknown_scope_is_for_the_whole_mesh() -> None:
    (policy,) = read_dump({"policies": [{**POLICY, "scope": "Cluster"}]}).mesh.policies()
    assert (policy.scope, policy.action) == (PolicyScope.GLOBAL, Action.DENY)


@pytest.mark.parametrize("value", [7, "x", [7], {"a": 7}])
def test_a_file_that_is_no_dump_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="workloads: must be a list of mappings"):
        read_dump({"workloads": value})
