"""The resources that Istio's node proxies receive for a mesh file."""

import ipaddress
from typing import Any

import yaml
from google.protobuf.json_format import MessageToDict

from tests.ztunnel.control_plane.meshes import BOOKINFO, document, mesh
from xds.dialects.istio.addresses import compile_address
from xds.dialects.istio.authorization import compile_authorization
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.mesh import Mesh
from xds.model.workload import NamespacedHostname, Workload
from xds.proto.istio.security import authorization_pb2 as security
from xds.proto.istio.workload import workload_pb2 as wds
from xds.proto.pool import POOL
from xds.protocol.snapshot import Named, Snapshot
from ztunnel.control_plane.mesh import parse_mesh
from ztunnel.control_plane.workloads import WorkloadConfig
from ztunnel.policy.engine import judge


def resources(**changes: Any) -> dict[str, Named]:
    return {named.name: named for named in WorkloadConfig(mesh(**changes)).resources()}


def workload(found: dict[str, Named], pod: str) -> wds.Workload:
    message = found[f"Kubernetes//Pod/default/{pod}"].message
    assert isinstance(message, wds.Address)
    return message.workload


def service(found: dict[str, Named], name: str) -> wds.Service:
    message = found[name].message
    assert isinstance(message, wds.Address)
    return message.service


def policy(found: dict[str, Named], name: str) -> security.Authorization:
    message = found[name].message
    assert isinstance(message, security.Authorization)
    return message


REVIEWS = "default/reviews.default.svc.cluster.local"


def test_a_pod_is_a_workload() -> None:
    found = resources()
    assert MessageToDict(
        workload(found, "reviews-v1"), preserving_proto_field_name=True, descriptor_pool=POOL
    ) == {
        "uid": "Kubernetes//Pod/default/reviews-v1",
        "name": "reviews-v1",
        "namespace": "default",
        "addresses": ["CvQBFw=="],  # 10.244.1.23
        "tunnel_protocol": "HBONE",
        "trust_domain": "cluster.local",
        "service_account": "bookinfo-reviews",
        "node": "worker",
        "canonical_name": "reviews-v1",
        "canonical_revision": "latest",
        "workload_name": "reviews-v1",
        "cluster_id": "Kubernetes",
        "services": {REVIEWS: {"ports": [{"service_port": 9080, "target_port": 9080}]}},
        "authorization_policies": ["default/reviews-viewer"],
    }
    assert workload(found, "legacy").tunnel_protocol == wds.NONE
    assert found["Kubernetes//Pod/default/reviews-v1"].aliases == ("/10.244.1.23",)


def test_a_service_has_its_addresses_ports_and_backends() -> None:
    found = resources()
    assert MessageToDict(service(found, REVIEWS), preserving_proto_field_name=True, descriptor_pool=POOL) == {
        "name": "reviews",
        "namespace": "default",
        "hostname": "reviews.default.svc.cluster.local",
        "addresses": [{"address": "CmC3wA=="}],
        "ports": [{"service_port": 9080, "target_port": 9080}],
    }
    named = found[REVIEWS]
    assert named.aliases == ("/10.96.183.192",)
    assert named.companions == tuple(f"Kubernetes//Pod/default/reviews-v{n}" for n in (1, 2, 3))


def test_addresses_of_both_families_ports_that_differ_and_another_cluster() -> None:
    pods = {"p": {"node": "worker", "addresses": ["10.0.0.1", "fd00::1"], "workload": "shop", "version": "v2"}}
    services = {"s": {"addresses": ["fd00::9"], "ports": {"http": {"port": 80, "target": 8080}}, "pods": ["p"]}}
    found = resources(pods=pods, services=services, policies={}, cluster="c1", trust_domain="td.example")
    address = found["c1//Pod/default/p"].message
    assert isinstance(address, wds.Address)
    assert list(address.workload.addresses) == [ipaddress.ip_address(a).packed for a in ("10.0.0.1", "fd00::1")]
    assert (address.workload.cluster_id, address.workload.trust_domain) == ("c1", "td.example")
    assert (address.workload.canonical_name, address.workload.canonical_revision) == ("shop", "v2")
    (port,) = address.workload.services["default/s.default.svc.cluster.local"].ports
    assert (port.service_port, port.target_port) == (80, 8080)


def test_only_policies_for_whole_namespaces_go_by_scope() -> None:
    found = resources(
        policies={
            "everybody": {"action": "DENY", "rules": [{"to": {"ports": [22]}}]},
            "some": {"pods": ["productpage"], "rules": [{}], "dry_run": True},
            "nobody": {"service_account": "bookinfo-reviews"},
            "watch": {"action": "AUDIT", "rules": [{}]},
        }
    )
    everybody, some, nobody = (policy(found, f"default/{name}") for name in ("everybody", "some", "nobody"))
    assert (everybody.scope, everybody.action) == (security.NAMESPACE, security.DENY)
    assert (some.scope, some.action, some.dry_run) == (security.WORKLOAD_SELECTOR, security.ALLOW, True)
    assert len(some.rules) == 1
    assert not some.rules[0].clauses, "a rule without conditions always matches, an empty match never"
    assert not nobody.rules
    assert "default/watch" not in found
    assert list(workload(found, "productpage").authorization_policies) == ["default/some"]
    assert list(workload(found, "reviews-v2").authorization_policies) == ["default/nobody"]
    assert list(workload(found, "legacy").authorization_policies) == []


def test_every_condition_of_a_rule() -> None:
    source = {
        "principals": ["td/ns/a/sa/b", "*/sa/c", "td/*", "*"],
        "not_principals": ["x"],
        "namespaces": ["n*"],
        "not_namespaces": ["m"],
        "ip_blocks": ["10.0.0.0/8"],
        "not_ip_blocks": ["fd00::/64"],
    }
    rule = {"from": source, "to": {"ports": [80, 81], "not_ports": [82]}}
    found = resources(policies={"p": {"rules": [rule, {}]}})
    (first, second) = policy(found, "default/p").rules
    assert not second.clauses
    ((match,),) = [clause.matches for clause in first.clauses]
    assert MessageToDict(match, preserving_proto_field_name=True, descriptor_pool=POOL) == {
        "principals": [{"exact": "td/ns/a/sa/b"}, {"suffix": "/sa/c"}, {"prefix": "td/"}, {"presence": {}}],
        "not_principals": [{"exact": "x"}],
        "namespaces": [{"prefix": "n"}],
        "not_namespaces": [{"exact": "m"}],
        "source_ips": [{"address": "CgAAAA==", "length": 8}],
        "not_source_ips": [{"address": "/QAAAAAAAAAAAAAAAAAAAA==", "length": 64}],
        "destination_ports": [80, 81],
        "not_destination_ports": [82],
    }


def test_a_waypoint_is_a_service_that_judges_what_is_behind_it() -> None:
    pods = {
        **BOOKINFO["pods"],
        "waypoint": {
            "node": "worker",
            "addresses": ["10.244.1.99"],
            "service_account": "bookinfo-reviews",
            "hbone": True,
        },
    }
    policies = {
        **BOOKINFO["policies"],
        "no-ssh": {"action": "DENY", "rules": [{"to": {"ports": [22]}}, {}]},
    }
    found = resources(pods=pods, waypoints={"bookinfo-reviews": {"pods": ["waypoint"]}}, policies=policies)
    name = "default/waypoint.bookinfo-reviews.default.mesh.internal"
    assert list(service(found, name).addresses) == []
    assert found[name].companions == ("Kubernetes//Pod/default/waypoint",)
    own = workload(found, "waypoint")
    assert own.native_tunnel
    assert not own.HasField("waypoint")
    assert [(p.service_port, p.target_port) for p in own.services[name].ports] == [(15008, 15008)]
    behind = workload(found, "reviews-v1")
    for reference in (behind.waypoint, service(found, REVIEWS).waypoint):
        assert reference.hostname.hostname == "waypoint.bookinfo-reviews.default.mesh.internal"
        assert reference.hbone_mtls_port == 15008
    assert not workload(found, "productpage").HasField("waypoint")
    assert list(behind.authorization_policies) == [
        "default/no-ssh..behind-waypoint..bookinfo-reviews",
        "default/istio-waypoint..bookinfo-reviews",
    ]
    assert list(workload(found, "productpage").authorization_policies) == ["default/no-ssh"]
    assert policy(found, "default/no-ssh").scope == security.WORKLOAD_SELECTOR
    reviews = [security.StringMatch(exact="cluster.local/ns/default/sa/bookinfo-reviews")]
    with_port, without = policy(found, "default/no-ssh..behind-waypoint..bookinfo-reviews").rules
    for rule in (with_port, without):
        assert list(rule.clauses[0].matches[0].not_principals) == reviews
    assert list(with_port.clauses[0].matches[0].destination_ports) == [22]
    only = policy(found, "default/istio-waypoint..bookinfo-reviews")
    assert only.action == security.ALLOW
    assert list(only.rules[0].clauses[0].matches[0].principals) == reviews


def test_a_small_edit_is_a_small_change() -> None:
    before = Snapshot.of(WorkloadConfig(mesh()).resources())
    changed = document()
    changed["pods"]["legacy"]["mesh"] = True
    after = Snapshot.of(WorkloadConfig(parse_mesh(yaml.safe_dump(changed))).resources())
    different = {
        name
        for of_type, resources_of in after.resources.items()
        for name, resource in resources_of.items()
        if before.resources[of_type].get(name) != resource
    }
    assert different == {"Kubernetes//Pod/default/legacy"}


def test_pods_of_a_node() -> None:
    config = WorkloadConfig(mesh())
    assert config.uids_on("worker") == {f"Kubernetes//Pod/default/{name}" for name in ("reviews-v1", "legacy")}
    assert config.uids_on("") == frozenset()


# ---------------------------------------------------------------------- as a node proxy understands it


def understood(**changes: Any) -> Mesh:
    """Return the mesh that a node proxy builds from the resources it receives."""
    made = Mesh()
    for named in WorkloadConfig(mesh(**changes)).resources():
        data = named.message.SerializeToString()
        if isinstance(named.message, wds.Address):
            address = compile_address(data)
            assert named.name == (address.uid if isinstance(address, Workload) else address.key)
            made.apply([address])
        else:
            policy = compile_authorization(data)
            assert (policy.key, policy.faults) == (named.name, ())
            made.apply([policy])
    return made


def admits(made: Mesh, pod: str, client: str | None, port: int = 9080) -> bool:
    destination = made.workload(f"Kubernetes//Pod/default/{pod}")
    assert destination is not None
    policies = made.policies_for(destination)
    assert policies.missing == ()
    source = SocketAddress("10.244.2.3", 1000)
    peer = None
    if client is not None:
        peer = PeerCertificate(uri_sans=(f"spiffe://cluster.local/ns/default/sa/{client}",))
    target = SocketAddress(destination.addresses[0], port)
    facts = ConnectionFacts(source=source, direct_source=source, destination=target, peer=peer)
    return judge(policies.enforced, facts).allowed


def test_served_policies_decide_like_the_mesh_file() -> None:
    made = understood()
    assert admits(made, "reviews-v1", "bookinfo-productpage")
    assert not admits(made, "reviews-v1", "bookinfo-reviews")
    assert not admits(made, "reviews-v1", None)
    assert admits(made, "productpage", None)
    nobody = understood(policies={"nobody": {"pods": ["productpage"]}})
    assert not admits(nobody, "productpage", "bookinfo-reviews")
    everybody = understood(policies={"all": {"rules": [{}]}, "no-ssh": {"action": "DENY", "rules": [{}]}})
    assert not admits(everybody, "productpage", "bookinfo-reviews")
    some = understood(policies={"no-ssh": {"action": "DENY", "rules": [{"to": {"ports": [22]}}]}})
    assert not admits(some, "productpage", "bookinfo-reviews", 22)
    assert admits(some, "productpage", None, 80)


def test_a_waypoint_is_let_in_and_nobody_else() -> None:
    waypoint = {
        "node": "worker",
        "addresses": ["10.244.1.99"],
        "service_account": "bookinfo-reviews",
        "hbone": True,
    }
    made = understood(
        pods={**BOOKINFO["pods"], "waypoint": waypoint},
        waypoints={"bookinfo-reviews": {"pods": ["waypoint"]}},
        policies={**BOOKINFO["policies"], "no-reviews": {"action": "DENY", "rules": [{}]}},
    )
    assert admits(made, "reviews-v1", "bookinfo-reviews"), "by the waypoint, which judges itself"
    assert not admits(made, "reviews-v1", "bookinfo-productpage")
    assert not admits(made, "reviews-v1", None)
    assert not admits(made, "productpage", "bookinfo-reviews"), "what is behind no waypoint is as it was"
    behind = made.workload("Kubernetes//Pod/default/reviews-v1")
    assert behind is not None
    assert behind.waypoint is not None
    assert isinstance(behind.waypoint.destination, NamespacedHostname)
    key = f"{behind.waypoint.destination.namespace}/{behind.waypoint.destination.hostname}"
    assert list(made.endpoints(key)) == ["Kubernetes//Pod/default/waypoint"]
