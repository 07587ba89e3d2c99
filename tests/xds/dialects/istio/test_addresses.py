"""``istio.workload.Address``: every field and every refusal."""

import ipaddress
from collections.abc import Callable
from typing import Any

import pytest

from xds.dialects.istio.addresses import compile_address
from xds.errors import ConfigError
from xds.model.service import (
    BalancerMode,
    CidrAddress,
    HealthPolicy,
    IpFamilies,
    LoadBalancing,
    Scope,
    Service,
    Visibility,
    WeightedWaypoint,
)
from xds.model.workload import (
    ApplicationTunnel,
    AppProtocol,
    GatewayAddress,
    Health,
    Locality,
    NamespacedHostname,
    NetworkAddress,
    NetworkMode,
    Protocol,
    Workload,
)
from xds.proto.istio.workload import workload_pb2 as wds

UID = "cluster//Pod/shop/cart"


def compiled_workload(**fields: Any) -> Workload:
    message = wds.Address(workload=wds.Workload(**({"uid": UID, "namespace": "shop"} | fields)))
    value = compile_address(message.SerializeToString())
    assert isinstance(value, Workload)
    return value


def compiled_service(**fields: Any) -> Service:
    values = {"name": "cart", "namespace": "shop", "hostname": "cart.example"}
    value = compile_address(wds.Address(service=wds.Service(**(values | fields))).SerializeToString())
    assert isinstance(value, Service)
    return value


def test_a_bare_workload_has_the_defaults_of_the_wire() -> None:
    value = compiled_workload()
    assert value == Workload(uid=value.uid, namespace="shop")
    assert (value.trust_domain, value.service_account, value.cluster_id, value.capacity) == (
        "cluster.local",
        "default",
        "Kubernetes",
        1,
    )


def test_a_workload_with_everything() -> None:
    value = compiled_workload(
        name="cart",
        addresses=[bytes([10, 0, 0, 1]), ipaddress.ip_address("fd00::1").packed],
        hostname="db.example",
        network="west",
        tunnel_protocol=wds.HBONE,
        network_mode=wds.HOST_NETWORK,
        trust_domain="td",
        service_account="sa",
        waypoint=wds.GatewayAddress(
            hostname=wds.NamespacedHostname(namespace="shop", hostname="wp.example"), hbone_mtls_port=15008
        ),
        network_gateway=wds.GatewayAddress(
            address=wds.NetworkAddress(network="west", address=bytes([192, 0, 2, 1])), hbone_mtls_port=15009
        ),
        node="n1",
        canonical_name="cart",
        canonical_revision="v2",
        workload_type=wds.CRONJOB,
        workload_name="cart-job",
        native_tunnel=True,
        application_tunnel=wds.ApplicationTunnel(protocol=wds.ApplicationTunnel.PROXY, port=15088),
        services={"shop/cart.example": wds.PortList(ports=[wds.Port(service_port=80, target_port=8080)])},
        authorization_policies=["shop/p"],
        status=wds.UNHEALTHY,
        cluster_id="c1",
        locality=wds.Locality(region="r", zone="z", subzone="s"),
        capacity={"value": 7},
    )
    assert value == Workload(
        uid=value.uid,
        namespace="shop",
        name="cart",
        addresses=("10.0.0.1", "fd00::1"),
        hostname="db.example",
        network="west",
        protocol=Protocol.HBONE,
        network_mode=NetworkMode.HOST_NETWORK,
        trust_domain="td",
        service_account="sa",
        waypoint=GatewayAddress(NamespacedHostname("shop", "wp.example"), 15008),
        network_gateway=GatewayAddress(NetworkAddress("west", "192.0.2.1"), 15009),
        node="n1",
        canonical_name="cart",
        canonical_revision="v2",
        workload_type="cronjob",
        workload_name="cart-job",
        native_tunnel=True,
        application_tunnel=ApplicationTunnel(AppProtocol.PROXY, 15088),
        services={"shop/cart.example": {80: 8080}},  # type: ignore[dict-item]
        authorization_policies=("shop/p",),  # type: ignore[arg-type]
        status=Health.UNHEALTHY,
        cluster_id="c1",
        locality=Locality("r", "z", "s"),
        capacity=7,
    )


def test_a_capacity_of_zero_is_not_the_default() -> None:
    assert compiled_workload(capacity={"value": 0}).capacity == 0


def test_mapped_addresses_are_ipv4() -> None:
    mapped = ipaddress.ip_address("::ffff:10.0.0.1").packed
    assert compiled_workload(addresses=[mapped]).addresses == ("10.0.0.1",)


def test_a_bare_service_has_the_defaults_of_the_wire() -> None:
    assert compiled_service() == Service(name="cart", namespace="shop", hostname="cart.example")


def test_a_service_with_everything() -> None:
    waypoint = wds.GatewayAddress(address=wds.NetworkAddress(address=bytes([10, 1, 0, 2])), hbone_mtls_port=1)
    expected = GatewayAddress(NetworkAddress("", "10.1.0.2"), 1)
    assert compiled_service(
        addresses=[
            wds.NetworkAddress(network="west", address=bytes([10, 1, 0, 1])),
            wds.NetworkAddress(address=bytes([10, 1, 0, 1]), length=32),
            wds.NetworkAddress(address=bytes([10, 2, 3, 4]), length=16),
            wds.NetworkAddress(address=bytes(16), length=128),
            wds.NetworkAddress(address=ipaddress.ip_address("fd00::").packed, length=32),
            wds.NetworkAddress(address=bytes(4), length=0),
        ],
        ports=[wds.Port(service_port=80, target_port=8080), wds.Port(service_port=81)],
        subject_alt_names=["spiffe://td/ns/n/sa/s"],
        waypoint=waypoint,
        weighted_waypoints=[wds.WeightedWaypoint(destination=waypoint, weight=9)],
        load_balancing=wds.LoadBalancing(
            routing_preference=[wds.LoadBalancing.NETWORK, wds.LoadBalancing.REGION],
            mode=wds.LoadBalancing.FAILOVER,
            health_policy=wds.LoadBalancing.ALLOW_ALL,
        ),
        ip_families=wds.IPV6_ONLY,
        canonical=True,
        visibility=wds.Service.NAMESPACE,
    ) == Service(
        name="cart",
        namespace="shop",
        hostname="cart.example",
        vips=(NetworkAddress("west", "10.1.0.1"), NetworkAddress("", "10.1.0.1"), NetworkAddress("", "::")),
        cidr_vips=(
            CidrAddress("", ipaddress.ip_network("10.2.0.0/16")),
            CidrAddress("", ipaddress.ip_network("fd00::/32")),
            CidrAddress("", ipaddress.ip_network("0.0.0.0/0")),
        ),
        ports={80: 8080, 81: 0},
        subject_alt_names=("spiffe://td/ns/n/sa/s",),
        waypoint=expected,
        weighted_waypoints=(WeightedWaypoint(expected, 9),),
        load_balancing=LoadBalancing((Scope.NETWORK, Scope.REGION), BalancerMode.FAILOVER, HealthPolicy.ALLOW_ALL),
        ip_families=IpFamilies.IPV6,
        canonical=True,
        visibility=Visibility.NAMESPACE,
    )


def test_an_unspecified_mode_is_standard_and_an_unknown_visibility_public() -> None:
    value = compiled_service(load_balancing=wds.LoadBalancing(), visibility=9)
    assert value.mode is BalancerMode.STANDARD
    assert value.visibility is Visibility.PUBLIC


@pytest.mark.parametrize(
    ("make", "fields", "reason"),
    [
        (compiled_workload, {"uid": ""}, "a workload needs a uid"),
        (compiled_workload, {"addresses": [b"abc"]}, "failed to parse address, had 3 bytes"),
        (compiled_workload, {"tunnel_protocol": 2}, "unsupported tunnel protocol LEGACY_ISTIO_MTLS"),
        (compiled_workload, {"tunnel_protocol": 9}, "tunnel_protocol: unknown enumeration value 9"),
        (compiled_workload, {"network_mode": 9}, "network_mode: unknown enumeration value 9"),
        (compiled_workload, {"status": 9}, "status: unknown enumeration value 9"),
        (compiled_workload, {"workload_type": 9}, "workload_type: unknown enumeration value 9"),
        (compiled_workload, {"waypoint": {}}, "nonempty gateway address is missing address"),
        (compiled_workload, {"network_gateway": {}}, "nonempty gateway address is missing address"),
        (
            compiled_workload,
            {"waypoint": {"address": {"address": b"abcd"}, "hbone_mtls_port": 65536}},
            "hbone_mtls_port 65536 is no port",
        ),
        (compiled_workload, {"application_tunnel": {"protocol": 9}}, "application_tunnel.protocol"),
        (compiled_workload, {"application_tunnel": {"port": 70000}}, "application_tunnel.port 70000 is no port"),
        (compiled_workload, {"services": {"cart": {}}}, "failed to parse namespaced hostname: cart"),
        (compiled_workload, {"services": {"a/b/c": {}}}, "failed to parse namespaced hostname: a/b/c"),
        (compiled_workload, {"services": {"a/b": {"ports": [{"service_port": 99999}]}}}, "99999 is no port"),
        (compiled_service, {"hostname": ""}, "failed to parse namespaced hostname: shop/"),
        (compiled_service, {"addresses": [{"address": b""}]}, "failed to parse address, had 0 bytes"),
        (compiled_service, {"addresses": [{"address": b"abcd", "length": 33}]}, "prefix length 33 is more"),
        (compiled_service, {"ports": [{"target_port": 65536}]}, "target_port 65536 is no port"),
        (compiled_service, {"waypoint": {}}, "nonempty gateway address is missing address"),
        (compiled_service, {"weighted_waypoints": [{}]}, "nonempty gateway address is missing address"),
        (compiled_service, {"load_balancing": {"routing_preference": [0]}}, "routing_preference[0]: unknown"),
        (compiled_service, {"load_balancing": {"mode": 9}}, "load_balancing.mode: unknown enumeration value 9"),
        (compiled_service, {"load_balancing": {"health_policy": 9}}, "load_balancing.health_policy: unknown"),
        (compiled_service, {"ip_families": 9}, "ip_families: unknown enumeration value 9"),
    ],
)
def test_malformed_workloads_and_services_are_refused(
    make: Callable[..., object], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**fields)
    assert reason in str(refused.value)


def test_an_empty_address_and_bytes_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown address type"):
        compile_address(b"")
    with pytest.raises(ConfigError, match="decode: failed to decode Protobuf message"):
        compile_address(b"\xff")


def test_bytes_cut_anywhere_are_refused_or_a_value() -> None:
    data = wds.Address(
        workload=wds.Workload(uid=UID, namespace="shop", addresses=[b"abcd"], services={"a/b": wds.PortList()})
    ).SerializeToString()
    for cut in range(len(data)):
        try:
            assert isinstance(compile_address(data[:cut]), Workload)
        except ConfigError:
            pass


def test_a_uid_is_the_resources_name_and_not_a_copy() -> None:
    name = "".join(UID)
    data = wds.Address(workload=wds.Workload(uid=UID)).SerializeToString()
    value = compile_address(data, name)
    assert isinstance(value, Workload)
    assert value.uid is name
    other = compile_address(data, "other")
    assert isinstance(other, Workload)
    assert other.uid == UID


def test_equal_parts_of_workloads_are_one_object() -> None:
    fields: dict[str, Any] = {
        "services": {"shop/cart.example": wds.PortList(ports=[wds.Port(service_port=80, target_port=80)])},
        "authorization_policies": ["shop/p"],
        "locality": wds.Locality(region="r"),
        "node": "a node",
    }
    one, other = compiled_workload(**fields), compiled_workload(uid="other", **fields)
    for name in ("services", "authorization_policies", "locality", "node", "namespace", "trust_domain"):
        assert getattr(one, name) is getattr(other, name)
