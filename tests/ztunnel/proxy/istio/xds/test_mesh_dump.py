"""Dumps of the mesh: shapes by value, and the local file through a dump and back."""

import json
from pathlib import Path

from xds.dialects.istio.local_file import parse_local_file
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.mesh import Mesh
from xds.model.policy import Never
from xds.model.service import Service
from xds.model.workload import Health, ServiceKey, Workload, WorkloadUid
from ztunnel.proxy.istio.xds import mesh_dump

EXAMPLE = Path(__file__).parents[4] / "data/local_mesh.yaml"


def example() -> Mesh:
    local = parse_local_file(EXAMPLE.read_text())
    mesh = Mesh()
    mesh.apply([*local.workloads, *local.policies, *local.services])
    return mesh


def test_minimal_workload_dumps_the_required_keys() -> None:
    mesh = Mesh()
    mesh.apply([Workload(uid=WorkloadUid("u"), namespace="n")])
    assert list(mesh_dump.workloads(mesh)) == [
        {
            "workloadIps": [],
            "protocol": "TCP",
            "networkMode": "Standard",
            "name": "",
            "namespace": "n",
            "status": "Healthy",
            "clusterId": "Kubernetes",
            "capacity": 1,
            "uid": "u",
            "trustDomain": "cluster.local",
            "serviceAccount": "default",
            "workloadType": "deployment",
        }
    ]


def test_workloads_are_sorted_and_name_their_services() -> None:
    shown = list(mesh_dump.workloads(example()))
    assert [workload["uid"] for workload in shown] == sorted(workload["uid"] for workload in shown)
    cart = next(workload for workload in shown if workload["name"] == "cart-7c9f")
    assert cart["services"] == ["shop/cart.shop.svc.cluster.local"]
    assert cart["waypoint"] == {"destination": "shop/wp.shop.svc.cluster.local", "hboneMtlsPort": 15008}
    assert cart["locality"] == {"region": "eu", "zone": "eu-1", "subzone": ""}
    remote = next(workload for workload in shown if workload["name"] == "cart-remote")
    assert remote["networkGateway"] == {"destination": "net-b/192.0.2.10", "hboneMtlsPort": 15009}


def test_services_are_sorted_and_show_their_endpoints() -> None:
    shown = list(mesh_dump.services(example()))
    assert [service["hostname"] for service in shown] == sorted(service["hostname"] for service in shown)
    assert shown[0] == {
        "name": "cart",
        "namespace": "shop",
        "hostname": "cart.shop.svc.cluster.local",
        "vips": ["/10.30.0.1", "net-b/10.30.0.1"],
        "ports": {"80": 8080},
        "endpoints": {
            uid: {"workloadUid": uid, "port": {"80": 8080}, "status": "Healthy"}
            for uid in ("kube-a//Pod/shop/cart-7c9f", "kube-b//Pod/shop/cart-remote")
        },
        "subjectAltNames": ["spiffe://cluster.local/ns/shop/sa/cart"],
        "canonical": True,
        "visibility": "Public",
        "loadBalancer": {
            "routingPreferences": ["Network", "Region", "Zone"],
            "mode": "Failover",
            "healthPolicy": "OnlyHealthy",
        },
        "ipFamilies": "IPv4",
    }
    assert shown[1]["cidrVips"] == [{"network": "", "cidr": "198.51.100.0/24"}]


def test_policies_are_sorted_and_show_faults_only_where_there_are_some() -> None:
    mesh = example()
    faulty = AuthorizationPolicy(
        name="a",
        namespace="n",
        scope=PolicyScope.GLOBAL,
        action=Action.ALLOW,
        condition=Never(),
        faults=("rules[0]: x",),
    )
    mesh.apply([faulty])
    shown = list(mesh_dump.policies(mesh, {"n/a": {"denied": 3}}))
    assert [policy["name"] for policy in shown] == ["a", "only-front", "strict"]
    assert shown[0]["faults"] == ["rules[0]: x"]
    assert shown[0]["decisions"] == {"denied": 3}
    assert shown[2] == {
        "name": "strict",
        "namespace": "shop",
        "scope": "Namespace",
        "action": "Deny",
        "dryRun": True,
        "rules": [[[{"notPrincipals": [{"Presence": []}]}]]],
    }


def test_staged_endpoints_are_by_service_and_uid() -> None:
    mesh = Mesh()
    key = ServiceKey("n/late")
    mesh.apply([Workload(uid=WorkloadUid("u"), namespace="n", services={key: {80: 1}}, status=Health.UNHEALTHY)])
    assert mesh_dump.staged_services(mesh) == {
        "n/late": {"u": {"workloadUid": "u", "port": {"80": 1}, "status": "Unhealthy"}}
    }
    mesh.apply([Service(name="late", namespace="n", hostname="late")])
    assert mesh_dump.staged_services(mesh) == {}


def test_the_static_configuration_is_a_local_file_itself() -> None:
    local = parse_local_file(EXAMPLE.read_text())
    shown = mesh_dump.static_config(local)
    assert list(shown) == ["workloads", "policies", "services"]
    assert parse_local_file(json.dumps(shown)) == local
