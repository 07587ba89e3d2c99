"""What a tunnelled request is for: the matrix of authorities, waypoints and application tunnels."""

from typing import Any

import pytest

from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.mesh import Mesh
from xds.model.service import Service, Visibility, WeightedWaypoint
from xds.model.workload import (
    ApplicationTunnel,
    AppProtocol,
    GatewayAddress,
    Health,
    NamespacedHostname,
    NetworkAddress,
    ServiceKey,
    Workload,
    WorkloadUid,
)
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.istio.path.inbound_target import (
    InboundTarget,
    RequestRefused,
    inbound_facts,
    inbound_service,
    inbound_target,
    plain_target,
)

HERE = "10.0.0.9"
WP = ServiceKey("shop/wp.example")
CART = ServiceKey("shop/cart.example")
BY_NAME = GatewayAddress(NamespacedHostname("shop", "wp.example"), 15008)
BY_VIP = GatewayAddress(NetworkAddress("", "10.1.0.9"), 15008)
BY_IP = GatewayAddress(NetworkAddress("", HERE), 15008)
PROXY = ApplicationTunnel(AppProtocol.PROXY, 15088)
PLAIN = ApplicationTunnel(AppProtocol.NONE)


def workload(uid: str = "wp", host: str = HERE, **more: Any) -> Workload:
    return Workload(uid=WorkloadUid(uid), **({"namespace": "shop", "addresses": (host,)} | more))


def service(key: str, *vips: NetworkAddress, **more: Any) -> Service:
    namespace, _, hostname = key.partition("/")
    return Service(
        name=hostname, namespace=namespace, hostname=hostname, vips=vips, **({"ports": {80: 8080}} | more)
    )


WAYPOINT = service(WP, NetworkAddress("", "10.1.0.9"), ports={15008: 15008})


def target(
    authority: str | bytes | None, pod: Workload, *values: Workload | Service, network: str = ""
) -> InboundTarget:
    mesh = Mesh()
    mesh.apply([pod, *values])
    return inbound_target(authority, pod, HERE, mesh, network=network, illegal_ports={15001, 15006, 15008})


def refused(*args: Any, **more: Any) -> tuple[int, str]:
    with pytest.raises(RequestRefused) as error:
        target(*args, **more)
    return error.value.status, str(error.value)


# 2.3: what is asked for


@pytest.mark.parametrize(
    ("authority", "shown"),
    [(None, ""), ("", ""), ("cart", "cart"), ("10.0.0.1:0", "10.0.0.1:0"), (b"\xff:1", "\\xff:1")],
)
def test_invalid_authority_is_a_bad_request(authority: str | bytes | None, shown: str) -> None:
    assert refused(authority, workload()) == (400, f"no valid authority pseudo header: {shown}")


@pytest.mark.parametrize("port", [15001, 15006, 15008])
def test_the_proxys_own_ports_are_refused(port: int) -> None:
    assert refused(f"{HERE}:{port}", workload()) == (503, "attempted recursive call to ourselves")


def test_only_the_requested_port_is_checked_against_own_ports() -> None:
    tunnel = workload(application_tunnel=ApplicationTunnel(AppProtocol.PROXY, 15008))
    assert target(f"{HERE}:80", tunnel).address == SocketAddress(HERE, 15008)
    assert refused(f"{HERE}:15008", tunnel)[0] == 503


# 2.3.1: which addresses may be named


def test_address_of_the_connection_is_a_valid_target() -> None:
    assert target(f"{HERE}:80", workload()) == InboundTarget(SocketAddress(HERE, 80))
    assert target(f"[::ffff:{HERE}]:80", workload()) == InboundTarget(SocketAddress(HERE, 80))


@pytest.mark.parametrize("there", ["10.0.0.1", "10.1.0.1", "192.0.2.1"], ids=["pod", "service", "nothing"])
def test_other_addresses_are_refused(there: str) -> None:
    values = (workload("other", "10.0.0.1"), service(CART, NetworkAddress("", "10.1.0.1")))
    assert refused(f"{there}:80", workload(), *values) == (400, f"ip mismatch: {HERE} != {there}")


@pytest.mark.parametrize("gateway", [BY_NAME, BY_VIP, BY_IP], ids=["name", "vip", "ip"])
@pytest.mark.parametrize("kind", ["pod", "service", "weighted"])
def test_waypoint_accepts_addresses_of_its_workloads(gateway: GatewayAddress, kind: str) -> None:
    waypoint = workload(services={WP: {15008: 15008}})
    match kind:
        case "pod":
            there: Workload | Service = workload("other", "10.0.0.1", waypoint=gateway)
        case "service":
            there = service(CART, NetworkAddress("", "10.0.0.1"), waypoint=gateway)
        case _:
            weighted = (WeightedWaypoint(gateway, 1),)
            there = service(CART, NetworkAddress("", "10.0.0.1"), weighted_waypoints=weighted)
    assert target("10.0.0.1:80", waypoint, WAYPOINT, there) == InboundTarget(SocketAddress(HERE, 80))


@pytest.mark.parametrize("gateway", [BY_NAME, BY_VIP, GatewayAddress(NetworkAddress("", "10.0.0.8"), 15008)])
def test_addresses_of_another_waypoints_workloads_are_refused(gateway: GatewayAddress) -> None:
    stranger = workload()
    actual = workload("actual", "10.0.0.8", services={WP: {15008: 15008}})
    there = workload("other", "10.0.0.1", waypoint=gateway)
    assert refused("10.0.0.1:80", stranger, WAYPOINT, actual, there)[0] == 400


def test_unhealthy_waypoint_accepts_its_workloads() -> None:
    ill = workload(services={WP: {15008: 15008}}, status=Health.UNHEALTHY)
    there = workload("other", "10.0.0.1", waypoint=BY_NAME)
    assert target("10.0.0.1:80", ill, WAYPOINT, there).address == SocketAddress(HERE, 80)


def test_application_with_a_tunnel_protocol_accepts_any_target() -> None:
    assert target("192.0.2.1:80", workload(application_tunnel=PLAIN)).address == SocketAddress(HERE, 80)


# 2.3.2: the application's address


@pytest.mark.parametrize(
    ("tunnel", "expected", "header"),
    [
        (None, 80, None),
        (PLAIN, 80, None),
        (ApplicationTunnel(AppProtocol.NONE, 15088), 15088, None),
        (ApplicationTunnel(AppProtocol.PROXY), 80, SocketAddress(HERE, 80)),
        (PROXY, 15088, SocketAddress(HERE, 80)),
    ],
)
def test_application_tunnels(
    tunnel: ApplicationTunnel | None, expected: int, header: SocketAddress | None
) -> None:
    pod = workload(application_tunnel=tunnel)
    assert target(f"{HERE}:80", pod) == InboundTarget(SocketAddress(HERE, expected), header)


@pytest.mark.parametrize(
    ("ports", "mapped", "expected"),
    [({80: 8080}, {80: 9090}, 9090), ({80: 8080}, {}, 8080), ({80: 0}, {80: 9090}, 9090)],
)
@pytest.mark.parametrize("status", list(Health))
def test_name_maps_to_the_endpoints_or_the_services_port(
    ports: dict[int, int], mapped: dict[int, int], expected: int, status: Health
) -> None:
    held = service(CART, ports=ports)
    found = target("Cart.example:80", workload(services={CART: mapped}, status=status), held)
    assert found == InboundTarget(SocketAddress(HERE, expected), service=held)


@pytest.mark.parametrize("ports", [{}, {80: 0}, {81: 8080}])
def test_a_name_without_such_a_port_is_refused(ports: dict[int, int]) -> None:
    assert refused("cart.example:80", workload(services={CART: {}}), service(CART, ports=ports)) == (
        503,
        "requested service cart.example:80 found, but cannot resolve port",
    )


def test_a_name_of_another_pods_service_is_refused() -> None:
    other = workload("other", "10.0.0.8", services={CART: {}})
    assert refused("cart.example:80", workload(services={WP: {}}), other, service(CART), WAYPOINT) == (
        503,
        "requested service cart.example found, but this workload is no endpoint of it",
    )


@pytest.mark.parametrize("waypoint", [BY_NAME, BY_VIP, BY_IP])
def test_waypoint_accepts_its_services_by_name(waypoint: GatewayAddress) -> None:
    held = service(CART, waypoint=waypoint)
    found = target("cart.example:80", workload(services={WP: {}}), held, WAYPOINT)
    assert found == InboundTarget(SocketAddress(HERE, 8080), service=held)


def test_unknown_or_invisible_name_is_refused() -> None:
    hidden = service("other/cart.example", visibility=Visibility.NAMESPACE)
    for values in ((), (hidden,)):
        assert refused("cart.example:80", workload(), *values) == (
            503,
            "no service or workload for hostname: cart.example",
        )


def test_a_name_prefers_the_pods_namespace() -> None:
    other = service("other/cart.example", ports={80: 1}, canonical=True)
    pod = workload(services={CART: {}, ServiceKey("other/cart.example"): {}})
    assert target("cart.example:80", pod, other, service(CART)).address.port == 8080


@pytest.mark.parametrize(
    ("vips", "network", "expected"),
    [
        ([("", "10.1.0.1")], "", "10.1.0.1"),
        ([("", "fd00::1"), ("", "10.1.0.1")], "", "10.1.0.1"),
        ([("west", "10.2.0.1"), ("", "fd00::1")], "", "fd00::1"),
        ([("west", "10.2.0.1"), ("", "fd00::1")], "west", "10.2.0.1"),
        ([("west", "10.2.0.1")], "", "10.2.0.1"),
    ],
)
def test_the_proxy_header_names_the_services_address(
    vips: list[tuple[str, str]], network: str, expected: str
) -> None:
    held = service(CART, *(NetworkAddress(*vip) for vip in vips))
    found = target("cart.example:80", workload(application_tunnel=PROXY), held, network=network)
    assert found == InboundTarget(SocketAddress(HERE, 15088), SocketAddress(expected, 80), held)


def test_a_service_without_addresses_cannot_be_named_in_a_proxy_header() -> None:
    assert refused("cart.example:80", workload(application_tunnel=PROXY), service(CART)) == (
        503,
        "requested service cart.example found, but has no IP addresses",
    )


# 9.7: which service it counts for

OTHER = ServiceKey("shop/other.example")


@pytest.mark.parametrize(
    ("port", "meant", "expected"),
    [
        (8080, None, "cart.example"),
        (9090, None, "other.example"),
        (8080, "other.example", "other.example"),
        (8080, "stranger.example", "cart.example"),
        (1, None, None),
        (1, "cart.example", "cart.example"),
    ],
)
def test_service_is_the_requested_one_or_has_the_port(port: int, meant: str | None, expected: str | None) -> None:
    pod = workload(services={CART: {}, OTHER: {80: 9090}, ServiceKey("shop/gone"): {1: 1}})
    mesh = Mesh()
    mesh.apply([pod, service(CART), service(OTHER)])
    found = inbound_service(InboundTarget(SocketAddress(HERE, port)), pod, mesh, meant)
    assert (found.hostname if found else None) == expected


def test_service_named_by_the_authority_wins() -> None:
    pod, held = workload(services={OTHER: {80: 9090}}), service(CART)
    mesh = Mesh()
    mesh.apply([pod, held, service(OTHER)])
    asked = InboundTarget(SocketAddress(HERE, 8080), service=held)
    assert inbound_service(asked, pod, mesh, "other.example") is held
    assert inbound_service(InboundTarget(SocketAddress(HERE, 9090), service=held), pod, mesh, None) is None


@pytest.mark.parametrize("peer", [None, PeerCertificate(uri_sans=("spiffe://cluster.local/ns/shop/sa/a",))])
def test_policies_evaluate_the_application_and_whether_the_client_has_a_certificate(
    peer: PeerCertificate | None,
) -> None:
    client, application = SocketAddress("10.0.0.9", 4), SocketAddress(HERE, 8080)
    assert inbound_facts(client, application, peer) == ConnectionFacts(
        source=client,
        direct_source=client,
        destination=application,
        peer=peer,
        transport_protocol="raw_buffer" if peer is None else "tls",
    )


def test_plain_connection_to_a_port_of_the_proxy_is_refused() -> None:
    assert plain_target(SocketAddress(HERE, 8080), [15008]) == InboundTarget(SocketAddress(HERE, 8080))
    with pytest.raises(RequestRefused) as refused:
        plain_target(SocketAddress(HERE, 15008), [15008])
    assert refused.value.reason is Reason.RECURSIVE_CALL
