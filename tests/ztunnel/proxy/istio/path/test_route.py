"""The table of outbound decisions, row by row, and what its rows are made of."""

import ipaddress
from collections.abc import Collection
from typing import Any

import pytest

from xds.model.address import SocketAddress
from xds.model.mesh import Mesh
from xds.model.refused import RefusedResource
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
    NamespacedHostname,
    NetworkAddress,
    NetworkMode,
    Protocol,
    ServiceKey,
    Workload,
    WorkloadUid,
)
from ztunnel.proxy.istio.path.route import (
    Client,
    Direct,
    DoubleTunnel,
    Missing,
    Named,
    Route,
    RouteRefused,
    Tunnel,
    route_for,
)

CART = ServiceKey("shop/cart.example")
WP = ServiceKey("shop/wp.example")
VIP = "10.1.0.1:80"


def pod(uid: str, *hosts: str, **more: Any) -> Workload:
    values = {"namespace": "shop", "name": uid, "protocol": Protocol.HBONE, "service_account": uid}
    return Workload(uid=WorkloadUid(uid), addresses=hosts, **(values | more))


def behind(
    uid: str, *hosts: str, key: ServiceKey = CART, ports: dict[int, int] | None = None, **more: Any
) -> Workload:
    return pod(uid, *hosts, services={key: {80: 8080} if ports is None else ports}, **more)


def cart(*vips: str, **more: Any) -> Service:
    values: dict[str, Any] = {
        "vips": tuple(NetworkAddress("", vip) for vip in vips or ("10.1.0.1",)),
        "ports": {80: 8080},
    }
    return Service(name="cart", namespace="shop", hostname="cart.example", **(values | more))


def wp(**more: Any) -> Service:
    values: dict[str, Any] = {"vips": (NetworkAddress("", "10.1.0.9"),), "ports": {15008: 15008}}
    return Service(name="wp", namespace="shop", hostname="wp.example", **(values | more))


CLIENT = pod("client", "10.0.0.1", "fd00::1")
BY_NAME = GatewayAddress(NamespacedHostname("shop", "wp.example"), 15008)
BY_VIP = GatewayAddress(NetworkAddress("", "10.1.0.9"), 15008)
BY_IP = GatewayAddress(NetworkAddress("", "10.0.0.9"), 15008)
WAYPOINT = behind("wp", "10.0.0.9", key=WP, ports={15008: 15008})
BACK = behind("back", "10.0.0.2")
BARE = pod("bare", "10.0.0.3")


def identity(account: str) -> str:
    return f"spiffe://cluster.local/ns/shop/sa/{account}"


def mesh(*values: Workload | Service | RefusedResource) -> Mesh:
    made = Mesh()
    made.apply([CLIENT, *values])
    return made


def route(
    destination: str,
    *values: Workload | Service | RefusedResource,
    client: Workload = CLIENT,
    network: str = "",
    avoid: Collection[str] = (),
    seed: int = 0,
) -> Route:
    return route_for(
        Client(workload=client, host=client.addresses[0], network=network),
        SocketAddress.parse(destination),
        mesh(*values),
        lambda below: seed % below,
        avoid={WorkloadUid(uid) for uid in avoid},
    )


def refused(destination: str, *values: Workload | Service | RefusedResource, **more: Any) -> str:
    with pytest.raises(RouteRefused) as error:
        route(destination, *values, **more)
    return str(error.value)


def tunnel(found: Route) -> Tunnel:
    assert isinstance(found, Tunnel)
    return found


def double(found: Route) -> DoubleTunnel:
    assert isinstance(found, DoubleTunnel)
    return found


# Row 1


@pytest.mark.parametrize("gateway", [BY_NAME, BY_VIP, BY_IP], ids=["name", "vip", "ip"])
def test_row_1_a_service_with_a_waypoint_goes_to_the_waypoint(gateway: GatewayAddress) -> None:
    service = cart(waypoint=gateway)
    sans = ("spiffe://cluster.local/ns/shop/sa/extra", "no identity")
    waypoint = wp(subject_alt_names=sans)
    found = tunnel(route(VIP, service, BACK, waypoint, WAYPOINT))
    extra = () if gateway is BY_IP else (sans[0],)
    assert found == Tunnel(
        target=SocketAddress("10.0.0.9", 15008),
        authority=VIP,
        identities=(*extra, identity("wp")),
        workload=WAYPOINT,
        service=service,
        waypoint=True,
    )


@pytest.mark.parametrize("gateway", [BY_NAME, BY_VIP, BY_IP], ids=["name", "vip", "ip"])
def test_row_1_the_waypoint_itself_goes_to_the_endpoints(gateway: GatewayAddress) -> None:
    # Upstream routes it to itself for ever: a captured waypoint that dials the original address never reaches the
    # service.
    service = cart(waypoint=gateway)
    assert tunnel(route(VIP, service, BACK, wp(), WAYPOINT, client=WAYPOINT)).workload is BACK
    impostor = pod("client", "10.0.0.1", service_account="wp")
    assert tunnel(route(VIP, service, BACK, wp(), WAYPOINT, client=impostor)).workload is WAYPOINT
    assert refused(VIP, service, wp(), WAYPOINT, client=WAYPOINT) == f"no healthy upstream: {VIP}"


@pytest.mark.parametrize("destination", [VIP, "10.0.0.2:8080"], ids=["service", "workload"])
def test_waypoint_that_is_unhealthy_or_terminating_goes_to_the_endpoints(destination: str) -> None:
    leaving = behind("wp", "10.0.0.9", key=WP, ports={15008: 15008}, status=Health.UNHEALTHY)
    other = behind("wp-2", "10.0.0.10", key=WP, ports={15008: 15008}, service_account="wp")
    back = behind("back", "10.0.0.2", waypoint=BY_NAME)
    found = tunnel(route(destination, cart(waypoint=BY_NAME), back, wp(), other, client=leaving))
    assert (found.target, found.waypoint) == (SocketAddress("10.0.0.2", 15008), False)


def test_row_1_also_for_passthrough_services_and_those_without_endpoints() -> None:
    service = cart(waypoint=BY_NAME, load_balancing=LoadBalancing(mode=BalancerMode.PASSTHROUGH))
    assert tunnel(route(VIP, service, wp(), WAYPOINT)).waypoint


def test_row_1_is_about_services_only_a_workload_at_the_address_comes_first() -> None:
    both = cart("10.0.0.3", waypoint=BY_NAME)
    found = tunnel(route("10.0.0.3:80", both, BARE, BACK, wp(), WAYPOINT))
    assert (found.workload, found.waypoint) == (BACK, False)  # whom to connect to asks for the service first


def test_weighted_waypoints_are_drawn_by_weight() -> None:
    other = behind("wp2", "10.0.0.8", key=ServiceKey("none/none"))
    weighted = (
        WeightedWaypoint(BY_NAME, 3),
        WeightedWaypoint(GatewayAddress(NetworkAddress("", "10.0.0.8"), 15008), 1),
    )
    service = cart(weighted_waypoints=weighted)
    drawn = [tunnel(route(VIP, service, wp(), WAYPOINT, other, seed=seed)).workload.uid for seed in range(4)]
    assert drawn == ["wp", "wp", "wp", "wp2"]


@pytest.mark.parametrize("weighted", [(), (WeightedWaypoint(BY_VIP, 0),)])
def test_without_weight_the_single_waypoint_is_used(weighted: tuple[WeightedWaypoint, ...]) -> None:
    service = cart(weighted_waypoints=weighted, waypoint=BY_IP)
    assert tunnel(route(VIP, service, WAYPOINT)).workload is WAYPOINT
    assert tunnel(route(VIP, cart(weighted_waypoints=weighted), BACK)).workload is BACK


def test_a_waypoint_is_preferred_in_the_dialled_family_by_name_and_in_its_own_by_address() -> None:
    both = behind("wp", "10.0.0.9", "fd00::9", key=WP, ports={15008: 15008})
    service = cart("fd01::1", waypoint=BY_NAME)
    assert tunnel(route("[fd01::1]:80", service, wp(), both)).target == SocketAddress("fd00::9", 15008)
    assert tunnel(route("[fd01::1]:80", service, wp(), WAYPOINT)).target == SocketAddress("10.0.0.9", 15008)
    by_vip = cart("fd01::1", waypoint=BY_VIP)
    assert tunnel(route("[fd01::1]:80", by_vip, wp(), both)).target == SocketAddress("10.0.0.9", 15008)


def test_a_waypoint_without_that_port_is_used_if_it_takes_tunnels_itself() -> None:
    sandwiched = behind(
        "wp", "10.0.0.9", key=WP, ports={}, application_tunnel=ApplicationTunnel(AppProtocol.PROXY, 15088)
    )
    found = tunnel(route(VIP, cart(waypoint=BY_NAME), wp(ports={}), sandwiched))
    assert found.target == SocketAddress("10.0.0.9", 15008)


def test_waypoint_can_be_a_workload_named_by_hostname() -> None:
    named = pod("wp", "10.0.0.9", hostname="wp.example")
    assert tunnel(route(VIP, cart(waypoint=BY_NAME), named)).target == SocketAddress("10.0.0.9", 15008)


# Row 2

EAST = GatewayAddress(NetworkAddress("west", "192.0.2.1"), 15009)
REMOTE = behind("remote", network="west", network_gateway=EAST)
GATEWAY = pod("gateway", "192.0.2.1", network="west")
SANS = ("spiffe://cluster.local/ns/shop/sa/inner", "garbage")


def test_row_2_a_waypoint_in_another_network_is_reached_through_its_gateway() -> None:
    far = behind("wp", key=WP, ports={15008: 15008}, network="west", network_gateway=EAST)
    service = cart(waypoint=BY_NAME)
    found = double(route(VIP, service, wp(subject_alt_names=SANS), far, GATEWAY))
    assert found == DoubleTunnel(
        target=SocketAddress("192.0.2.1", 15009),
        authority="cart.example:80",
        identities=(identity("gateway"),),
        inner_identities=(SANS[0],),
        gateway=GATEWAY,
        workload=far,
        service=service,
    )


# Row 3


@pytest.mark.parametrize(
    ("gateway", "text"),
    [
        (BY_NAME, "unknown waypoint: waypoint wp.example not found"),
        (BY_IP, "unknown waypoint: waypoint /10.0.0.9 not found"),
    ],
)
def test_row_3_missing_waypoint_is_never_bypassed(gateway: GatewayAddress, text: str) -> None:
    assert refused(VIP, cart(waypoint=gateway), BACK) == text


def test_row_3_waypoint_without_endpoints_is_never_bypassed() -> None:
    assert refused(VIP, cart(waypoint=BY_NAME), BACK, wp()) == "unknown waypoint: waypoint wp.example not found"


# Rows 4 and 5


@pytest.mark.parametrize(
    ("destination", "values"),
    [
        (VIP, (cart(),)),
        ("10.1.0.1:81", (cart(), BACK)),
        (VIP, (cart(), behind("back", "10.0.0.2", status=Health.UNHEALTHY))),
        (VIP, (cart(ports={80: 0}), behind("back", "10.0.0.2", ports={}))),
        (VIP, (cart(), behind("back", "10.0.0.2", capacity=0))),
    ],
    ids=["empty", "port", "unhealthy", "named port", "no capacity"],
)
def test_row_4_service_without_endpoints_is_refused(destination: str, values: tuple[Any, ...]) -> None:
    assert refused(destination, *values) == f"no healthy upstream: {destination}"


@pytest.mark.parametrize(
    ("destination", "values"),
    [
        ("192.0.2.7:443", ()),
        (VIP, (cart(load_balancing=LoadBalancing(mode=BalancerMode.PASSTHROUGH)), BACK)),
        ("10.0.0.5:80", (behind("host", "10.0.0.5", network_mode=NetworkMode.HOST_NETWORK),)),
        (VIP, (cart(visibility=Visibility.NAMESPACE, vips=(NetworkAddress("west", "10.1.0.1"),)),)),
    ],
    ids=["unknown", "passthrough service", "host network", "another network's address"],
)
def test_row_5_unknown_destination_passes_through(destination: str, values: tuple[Any, ...]) -> None:
    assert route(destination, *values) == Direct(target=SocketAddress.parse(destination))


def test_row_5_service_invisible_to_the_client_passes_through() -> None:
    hidden = Service(
        name="x",
        namespace="other",
        hostname="x",
        vips=(NetworkAddress("", "10.1.0.1"),),
        ports={80: 80},
        visibility=Visibility.NAMESPACE,
    )
    assert route(VIP, hidden) == Direct(target=SocketAddress.parse(VIP))


# Row 6


@pytest.mark.parametrize("known_by", ["address", "service"])
def test_row_6_another_network_is_reached_through_its_gateway(known_by: str) -> None:
    service = cart(subject_alt_names=SANS)
    gateway_service = Service(
        name="gw",
        namespace="west",
        hostname="gw",
        ports={15009: 15010},
        subject_alt_names=("spiffe://cluster.local/ns/west/sa/extra",),
    )
    by_name = GatewayAddress(NamespacedHostname("west", "gw"), 15009)
    if known_by == "address":
        found = double(route(VIP, service, REMOTE, GATEWAY))
        assert found.target == SocketAddress("192.0.2.1", 15009)
        assert found.identities == (identity("gateway"),)
    else:
        remote = behind("remote", network="west", network_gateway=by_name)
        end = pod("gateway", "192.0.2.1", network="west", services={ServiceKey("west/gw"): {15009: 15010}})
        found = double(route(VIP, service, remote, gateway_service, end))
        assert found.target == SocketAddress("192.0.2.1", 15010)
        assert found.identities == ("spiffe://cluster.local/ns/west/sa/extra", identity("gateway"))
    assert (found.authority, found.service) == ("cart.example:80", service)
    assert found.inner_identities == (SANS[0],)


def test_row_6_needs_no_target_port_which_only_the_other_network_knows() -> None:
    # istiod describes the endpoints of a service on another network as one workload. A named target port is 0.
    service = cart(ports={80: 0}, subject_alt_names=SANS)
    remote = behind("remote", ports={80: 0}, network="west", network_gateway=EAST)
    found = double(route(VIP, service, remote, GATEWAY))
    assert (found.workload, found.authority) == (remote, "cart.example:80")
    far = behind("wp", key=WP, ports={15008: 0}, network="west", network_gateway=EAST)
    attached = cart(waypoint=BY_NAME)
    assert double(route(VIP, attached, BACK, wp(ports={15008: 0}), far, GATEWAY)).workload is far


def test_row_6_without_a_gateway_is_refused() -> None:
    remote = behind("remote", "10.0.9.1", network="west")
    assert refused(VIP, cart(), remote) == "no valid routing destination for workload: remote"
    assert refused(VIP, cart(), REMOTE) == "unknown network gateway: west/192.0.2.1 not found"


def test_row_6_is_about_networks_other_than_the_clients() -> None:
    elsewhere = pod("client", "10.0.0.1", network="mine")
    target = pod("x", "10.0.0.7", network="mine")
    assert isinstance(route("10.0.0.7:80", elsewhere, target, client=elsewhere), Tunnel)


def test_a_gateway_of_the_own_network_is_not_used() -> None:
    near = behind("near", "10.0.0.2", network_gateway=EAST)
    assert tunnel(route(VIP, cart(), near, GATEWAY)).workload is near


def test_remote_endpoints_take_over_if_local_ones_are_unhealthy() -> None:
    failover = cart(load_balancing=LoadBalancing((Scope.NETWORK,), BalancerMode.FAILOVER))
    for seed in range(5):
        assert tunnel(route(VIP, failover, BACK, REMOTE, GATEWAY, seed=seed)).workload is BACK
    ill = behind("back", "10.0.0.2", status=Health.UNHEALTHY)
    assert double(route(VIP, failover, ill, REMOTE, GATEWAY)).workload is REMOTE
    assert double(route(VIP, failover, BACK, REMOTE, GATEWAY, avoid=["back"])).workload is REMOTE


# Row 7


def test_row_7_a_workload_with_a_waypoint_is_reached_through_it() -> None:
    target = pod("x", "10.0.0.4", waypoint=BY_NAME)
    found = tunnel(route("10.0.0.4:80", target, wp(), WAYPOINT))
    assert (found.target, found.authority) == (SocketAddress("10.0.0.9", 15008), "10.0.0.4:80")
    assert (found.service, found.waypoint, found.workload) == (None, True, WAYPOINT)


def test_row_7_service_without_a_waypoint_ignores_waypoints_of_its_endpoints() -> None:
    target = behind("back", "10.0.0.2", waypoint=BY_NAME)
    assert tunnel(route(VIP, cart(), target, wp(), WAYPOINT)).workload is target


@pytest.mark.parametrize("gateway", [BY_NAME, BY_VIP, BY_IP], ids=["name", "vip", "ip"])
def test_row_7_the_waypoint_itself_goes_to_the_workload(gateway: GatewayAddress) -> None:
    target = pod("x", "10.0.0.4", waypoint=gateway)
    assert tunnel(route("10.0.0.4:80", target, wp(), WAYPOINT, client=WAYPOINT)).workload is target
    impostor = pod("client", "10.0.0.1", service_account="wp")  # the identity alone is not enough
    assert tunnel(route("10.0.0.4:80", target, wp(), WAYPOINT, client=impostor)).workload is WAYPOINT


def test_row_7_a_service_with_the_address_of_the_workload_does_not_bypass_the_waypoint() -> None:
    service = cart("10.0.0.2", ports={80: 80})
    back = behind("back", "10.0.0.2", ports={80: 80}, waypoint=BY_NAME)
    found = tunnel(route("10.0.0.2:80", service, back, wp(), WAYPOINT))
    assert (found.target, found.waypoint, found.authority) == (
        SocketAddress("10.0.0.9", 15008),
        True,
        "10.0.0.2:80",
    )


def test_row_7_unknown_waypoint_is_never_bypassed() -> None:
    target = pod("x", "10.0.0.4", waypoint=BY_NAME)
    assert refused("10.0.0.4:80", target) == "unknown waypoint: waypoint wp.example not found"


def test_row_7_remote_waypoint_of_a_workload_is_refused() -> None:
    far = behind("wp", key=WP, ports={15008: 15008}, network="west", network_gateway=EAST)
    target = pod("x", "10.0.0.4", waypoint=BY_NAME)
    assert refused("10.0.0.4:80", target, wp(), far) == "no service for target address: 10.0.0.4:80"


def test_the_clients_own_waypoint_is_never_used() -> None:
    client = pod("client", "10.0.0.1", waypoint=BY_NAME)
    assert tunnel(route("10.0.0.3:80", client, BARE, wp(), WAYPOINT, client=client)).workload is BARE


# Rows 8 and 9


def test_row_8_a_mesh_workload_is_reached_by_a_tunnel() -> None:
    assert route("10.0.0.3:80", BARE) == Tunnel(
        target=SocketAddress("10.0.0.3", 15008),
        authority="10.0.0.3:80",
        identities=(identity("bare"),),
        workload=BARE,
    )
    service = cart(subject_alt_names=SANS)
    assert route(VIP, service, BACK) == Tunnel(
        target=SocketAddress("10.0.0.2", 15008),
        authority="10.0.0.2:8080",
        identities=(SANS[0], identity("back")),
        workload=BACK,
        service=service,
    )


def test_row_9_a_workload_outside_the_mesh_is_reached_in_plain_text() -> None:
    plain = behind("plain", "10.0.0.2", protocol=Protocol.TCP)
    service = cart()
    assert route("10.0.0.2:81", plain) == Direct(target=SocketAddress("10.0.0.2", 81), workload=plain)
    assert route(VIP, service, plain) == Direct(
        target=SocketAddress("10.0.0.2", 8080), workload=plain, service=service
    )


def test_client_can_draw_itself() -> None:
    own = behind("client", "10.0.0.1")
    assert tunnel(route(VIP, cart(), own, client=own)).target == SocketAddress("10.0.0.1", 15008)


def test_rows_1_to_3_use_the_proxys_network_and_the_others_the_clients() -> None:
    client = pod("client", "10.0.0.1", network="mine")
    mine = cart(vips=(NetworkAddress("mine", "10.1.0.1"),))
    own = behind("own", "10.0.0.2", network="mine")
    assert tunnel(route(VIP, mine, own, client=client, network="other")).workload is own


def test_waypoint_is_not_bypassed_if_the_proxy_does_not_know_its_network() -> None:
    # The control plane has got a network, and the proxy's NETWORK is still empty.
    client = pod("client", "10.0.0.1", network="mine")
    mine = cart(vips=(NetworkAddress("mine", "10.1.0.1"),), waypoint=BY_NAME)
    own = behind("own", "10.0.0.2", network="mine")
    waypoint = behind("wp", "10.0.0.9", key=WP, ports={15008: 15008}, network="mine")
    found = tunnel(route(VIP, mine, own, wp(), waypoint, client=client))
    assert (found.workload, found.authority) == (waypoint, VIP)
    assert refused(VIP, mine, own, client=client) == "unknown waypoint: waypoint wp.example not found"


# Step 4: ports


@pytest.mark.parametrize(
    ("service_port", "endpoint", "tunnel_port", "expected"),
    [
        (8080, {80: 9090}, None, 9090),
        (8080, {}, None, 8080),
        (0, {80: 9090}, None, 9090),
        (0, {80: 0}, 15088, 80),
        (0, {80: 0}, 0, None),
        (0, {80: 0}, None, None),
    ],
)
def test_target_port_order_is_endpoint_service_tunnel(
    service_port: int, endpoint: dict[int, int], tunnel_port: int | None, expected: int | None
) -> None:
    taking = None if tunnel_port is None else ApplicationTunnel(AppProtocol.PROXY, tunnel_port)
    target = behind("back", "10.0.0.2", ports=endpoint, application_tunnel=taking)
    service = cart(ports={80: service_port})
    if expected is None:
        assert refused(VIP, service, target) == f"no healthy upstream: {VIP}"
    else:
        assert tunnel(route(VIP, service, target)).authority == f"10.0.0.2:{expected}"


def test_named_ports_choose_the_endpoint_that_has_them() -> None:
    with_port, without = behind("a", "10.0.0.2", ports={80: 9090}), behind("b", "10.0.0.3", ports={})
    for seed in range(4):
        assert tunnel(route(VIP, cart(ports={80: 0}), with_port, without, seed=seed)).workload is with_port


# Step 5: addresses

BOTH = behind("back", "10.0.0.2", "fd00::2")


@pytest.mark.parametrize(
    ("families", "dialled", "expected"),
    [
        (None, "10.1.0.1", "10.0.0.2"),
        (None, "fd01::1", "fd00::2"),
        (IpFamilies.IPV4, "10.1.0.1", "10.0.0.2"),
        (IpFamilies.IPV4, "fd01::1", "10.0.0.2"),
        (IpFamilies.IPV6, "10.1.0.1", "fd00::2"),
        (IpFamilies.IPV6, "fd01::1", "fd00::2"),
        (IpFamilies.DUAL, "10.1.0.1", "10.0.0.2"),
        (IpFamilies.DUAL, "fd01::1", "fd00::2"),
    ],
)
def test_address_families_of_a_service_limit_targets(
    families: IpFamilies | None, dialled: str, expected: str
) -> None:
    service = cart("10.1.0.1", "fd01::1", ip_families=families)
    found = tunnel(route(str(SocketAddress(dialled, 80)), service, BOTH))
    assert found.target == SocketAddress(expected, 15008)
    assert found.authority == str(SocketAddress(expected, 8080))


@pytest.mark.parametrize("dialled", ["10.0.0.2", "fd00::2"])
def test_dialled_address_of_a_workload_is_its_target(dialled: str) -> None:
    assert tunnel(route(str(SocketAddress(dialled, 80)), BOTH)).target == SocketAddress(dialled, 15008)


def test_workload_without_a_permitted_address_is_refused() -> None:
    four = behind("back", "10.0.0.2")
    text = refused(VIP, cart(ip_families=IpFamilies.IPV6), four)
    assert text == "no valid routing destination for workload: back"


def test_a_workload_without_addresses_is_resolved_by_name() -> None:
    named = behind("db", hostname="db.example", protocol=Protocol.TCP)
    service = cart(ip_families=IpFamilies.IPV4)
    assert route(VIP, service, named) == Direct(
        target=Named(named, "db.example", 8080, (4,)), workload=named, service=service
    )


def test_a_tunnel_to_a_name_is_complete_once_it_is_resolved() -> None:
    named = behind("db", hostname="db.example")
    found = tunnel(route(VIP, cart(), named))
    assert found.target == Named(named, "db.example", 15008)
    resolved = found.at("fd00::7")
    assert (resolved.target, resolved.authority) == (SocketAddress("fd00::7", 15008), "[fd00::7]:8080")
    assert resolved.at("192.0.2.1") is resolved
    waypoint = behind("wp", key=WP, ports={15008: 15008}, hostname="wp.internal")
    through = tunnel(route(VIP, cart(waypoint=BY_NAME), wp(), waypoint)).at("10.0.0.9")
    assert (through.target, through.authority) == (SocketAddress("10.0.0.9", 15008), VIP)


def test_blocks_of_addresses_are_services_too() -> None:
    service = cart(vips=(), cidr_vips=(CidrAddress("", ipaddress.ip_network("10.7.0.0/16")),))
    assert tunnel(route("10.7.1.1:80", service, BACK)).workload is BACK


def test_unhealthy_endpoints_serve_where_the_service_says_so() -> None:
    ill = behind("back", "10.0.0.2", status=Health.UNHEALTHY)
    anybody = cart(load_balancing=LoadBalancing(health=HealthPolicy.ALLOW_ALL))
    assert tunnel(route(VIP, anybody, ill)).workload is ill


# Refused configuration


def unreadable(*addresses: str, network: str = "", block: str = "") -> RefusedResource:
    return RefusedResource(
        "new",
        "unknown enumeration value 9",
        tuple(NetworkAddress(network, address) for address in addresses),
        (CidrAddress(network, ipaddress.ip_network(block)),) if block else (),
    )


REFUSED = "configuration of new was refused: unknown enumeration value 9"


@pytest.mark.parametrize("destination", ["10.0.0.7:80", "[fd00::7]:80", "10.7.1.1:80"])
def test_connections_to_addresses_of_refused_configuration_fail(destination: str) -> None:
    assert refused(destination, unreadable("10.0.0.7", "fd00::7", block="10.7.0.0/16")) == REFUSED


def test_other_addresses_pass_through_beside_refused_configuration() -> None:
    found = route("10.8.0.1:80", unreadable("10.0.0.7", block="10.7.0.0/16"))
    assert found == Direct(target=SocketAddress("10.8.0.1", 80))
    found = route("10.0.0.7:80", unreadable("10.0.0.7", network="west"))
    assert found == Direct(target=SocketAddress("10.0.0.7", 80))


def test_a_passthrough_service_of_a_block_does_not_open_a_refused_address() -> None:
    everything = cart(
        vips=(),
        cidr_vips=(CidrAddress("", ipaddress.ip_network("10.0.0.0/8")),),
        load_balancing=LoadBalancing(mode=BalancerMode.PASSTHROUGH),
    )
    assert refused("10.0.0.7:80", everything, unreadable("10.0.0.7")) == REFUSED
    assert isinstance(route("10.0.0.8:80", everything, unreadable("10.0.0.7")), Direct)


def test_a_refused_waypoint_is_not_bypassed() -> None:
    assert refused(VIP, cart(waypoint=BY_IP), BACK, unreadable("10.0.0.9")) == REFUSED


def test_refused_configuration_in_the_clients_own_network_counts() -> None:
    client = pod("remote", "10.0.0.1", network="west")
    assert refused("10.0.0.7:80", unreadable("10.0.0.7", network="west"), client=client) == REFUSED


# On demand


def asked(destination: str, store: Mesh, *known: str) -> Route | str:
    try:
        return route_for(
            Client(workload=CLIENT, host="10.0.0.1"),
            SocketAddress.parse(destination),
            store,
            lambda below: 0,
            known=known.__contains__,
        )
    except Missing as missing:
        return missing.key


def test_missing_objects_are_requested_once() -> None:
    assert asked("192.0.2.7:443", mesh()) == "/192.0.2.7"
    assert asked("192.0.2.7:443", mesh(), "/192.0.2.7") == Direct(target=SocketAddress("192.0.2.7", 443))
    assert isinstance(asked("10.0.0.3:80", mesh(BARE)), Tunnel)


def test_missing_waypoints_and_gateways_are_requested() -> None:
    assert asked(VIP, mesh(cart(waypoint=BY_NAME))) == "shop/wp.example"
    assert asked(VIP, mesh(cart(waypoint=BY_IP))) == "/10.0.0.9"
    assert asked(VIP, mesh(cart(), REMOTE)) == "west/192.0.2.1"
    with pytest.raises(RouteRefused):
        asked(VIP, mesh(cart(waypoint=BY_NAME)), "shop/wp.example")
