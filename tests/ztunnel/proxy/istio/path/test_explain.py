"""What would become of a connection: the answers against the data path's own decisions."""

import dataclasses
import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ztunnel.proxy.istio.path.test_route import (
    BACK,
    BARE,
    BY_NAME,
    CLIENT,
    VIP,
    WAYPOINT,
    behind,
    cart,
    pod,
    wp,
)
from xds.model.address import SocketAddress
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.mesh import Mesh
from xds.model.policy import DestinationPort, Not, PeerPrincipal, PeerServiceAccount, SourceIp
from xds.model.service import BalancerMode, LoadBalancing, Scope, Service
from xds.model.workload import Health, Locality, PolicyKey, Protocol, Workload, WorkloadUid
from ztunnel.policy.engine import judge
from ztunnel.proxy.istio.path.explain import Answer, BadQuestion, Surroundings, explain, question
from ztunnel.proxy.istio.path.route import Client, Route, RouteRefused, route_for

ONLY_CLIENT = PeerServiceAccount("shop", "client")


def policy(name: str, action: Action, condition: Any, **more: Any) -> AuthorizationPolicy:
    return AuthorizationPolicy(
        name=name, namespace="shop", scope=PolicyScope.NAMESPACE, action=action, condition=condition, **more
    )


def around(*values: Workload | Service | AuthorizationPolicy, **more: Any) -> Surroundings:
    mesh = Mesh()
    mesh.apply([CLIENT, *values])
    return Surroundings(mesh=mesh, illegal_ports=(15001,), **more)


def ask(source: str, destination: str, *values: Any, identity: str = "", **more: Any) -> Answer:
    there = around(*values, **more)
    return explain(question(source, destination, identity, there), there)


# Parties


@pytest.mark.parametrize("source", ["10.0.0.1", "shop/client", "client"])
@pytest.mark.parametrize("destination", ["10.1.0.1:80", "cart.example:80"])
def test_parties_can_be_named_in_several_ways(source: str, destination: str) -> None:
    answer = ask(source, destination, cart(), BACK)
    assert answer["source"] == {
        "address": "10.0.0.1",
        "workload": "client",
        "node": None,
        "identity": "spiffe://cluster.local/ns/shop/sa/client",
    }
    assert (answer["destination"], answer["dialled"]) == (VIP, "service shop/cart.example")


@pytest.mark.parametrize(
    "name", ["cart.shop.svc.cluster.local", "cart.shop.svc.cluster.local.", "cart.shop.svc", "cart.shop", "cart"]
)
def test_service_is_found_by_short_and_full_names(name: str) -> None:
    service = Service(
        name="cart", namespace="shop", hostname="cart.shop.svc.cluster.local", vips=cart().vips, ports={80: 8080}
    )
    assert ask("shop/client", f"{name}:80", service)["dialled"] == "service shop/cart.shop.svc.cluster.local"
    own = dataclasses.replace(service, hostname="cart.shop.svc.example.org")
    name = name.replace("cluster.local", "example.org")
    answer = ask("shop/client", f"{name}:80", own, cluster_domain="example.org")
    assert answer["dialled"] == "service shop/cart.shop.svc.example.org"
    with pytest.raises(BadQuestion, match="no service or workload of this name"):
        ask("shop/client", "cart.shop:80", own)


@pytest.mark.parametrize(
    ("source", "destination", "error"),
    [
        ("", VIP, "source '': no workload NAMESPACE/NAME, and no address"),
        ("shop/nobody", VIP, "source 'shop/nobody': no workload"),
        ("shop/nowhere", VIP, "source 'shop/nowhere': the workload has no address"),
        ("10.0.0.1", "10.1.0.1", "destination '10.1.0.1': not HOST:PORT"),
        ("10.0.0.1", "10.1.0.1:0", "not HOST:PORT"),
        ("10.0.0.1", "nobody:80", "destination 'nobody': no service or workload"),
        ("10.0.0.1", "elsewhere.example:80", "the service has no address in network ''"),
        ("10.0.0.1", "nobody", "destination 'nobody': no service or workload"),
        ("10.0.0.1", "shop/client", "destination 'shop/client': not HOST:PORT"),
        ("10.0.0.1", "cart.example", "not HOST:PORT; the service's ports are 80, 443"),
        ("spiffe://cluster.local/ns/shop/sa/nobody", VIP, "no workload has this identity"),
        ("spiffe://cluster.local/ns/shop/sa/nowhere", VIP, "no workload has this identity"),
    ],
)
def test_unknown_parties_are_named(source: str, destination: str, error: str) -> None:
    elsewhere = Service(name="elsewhere", namespace="shop", hostname="elsewhere.example")
    with pytest.raises(BadQuestion, match=error.replace("(", r"\(")):
        ask(source, destination, pod("nowhere"), elsewhere, cart(ports={443: 443, 80: 80}))


def test_source_can_be_an_identity_and_a_single_port_is_implied() -> None:
    others = (pod("a-client", "10.0.0.7", service_account="other"), pod("z", "10.0.0.8", service_account="client"))
    answer = ask("spiffe://cluster.local/ns/shop/sa/client", "cart.example", cart(), BACK, *others)
    assert answer["source"]["workload"] == "client"
    assert answer == ask("shop/client", "cart.example:80", cart(), BACK, *others)


# Of connections that were seen


def test_inbound_question_judges_exactly_the_given_identity() -> None:
    deny = policy("only-client", Action.ALLOW, ONLY_CLIENT)
    there = around(BACK, deny)

    def verdict(identity: str) -> Answer:
        return explain(question("10.0.0.1:4000", "10.0.0.2:8080", identity, there, inbound=True), there)

    assert verdict(str(CLIENT.identity))["inbound"]["allowed_by"] == "shop/only-client"
    plain = verdict("")
    assert plain["verdict"] == "refused by the destination"
    assert plain["source"]["identity"] is None
    assert "ways" not in plain


@pytest.mark.parametrize(
    ("endpoint", "dialled"),
    [
        ("10.0.0.2:8080", VIP),  # by the endpoint's own ports
        ("10.0.0.77:8080", VIP),  # an endpoint that has gone: by the service's
        ("10.1.0.1:443", "10.1.0.1:443"),  # of a waypoint's tunnel: it names what was dialled
    ],
)
def test_the_port_that_was_dialled_is_found_by_the_endpoint(endpoint: str, dialled: str) -> None:
    there = around(cart(), BACK)
    assert str(question("shop/client", "cart.example", "", there, endpoint=endpoint).destination) == dialled


@pytest.mark.parametrize(
    ("endpoint", "error"),
    [("10.0.0.2:9", "no port of the service leads to 10.0.0.2:9"), ("x", "endpoint 'x': not IP:PORT")],
)
def test_an_endpoint_that_no_port_leads_to(endpoint: str, error: str) -> None:
    there = around(cart(), BACK)
    with pytest.raises(BadQuestion, match=error):
        question("shop/client", "cart.example", "", there, endpoint=endpoint)


# Ways


def test_a_tunnel_to_an_endpoint() -> None:
    answer = ask("shop/client", VIP, cart(), BACK)
    assert answer["verdict"] == "allowed"
    assert answer["because"] == "a tunnel: the workload takes them"
    assert answer["ways"] == [
        {
            "target": "10.0.0.2:15008",
            "workload": "back",
            "node": None,
            "weight": 1,
            "authority": "10.0.0.2:8080",
            "peer_must_be": ["spiffe://cluster.local/ns/shop/sa/back"],
            "inbound": {
                "workload": "back",
                "application": "10.0.0.2:8080",
                "allowed_by": "no policy is for this workload",
            },
        }
    ]


@pytest.mark.parametrize(
    ("destination", "values", "because"),
    [
        ("192.0.2.1:443", (), "plain TCP to where it was going: it is outside the mesh"),
        (
            VIP,
            (cart(load_balancing=LoadBalancing((), BalancerMode.PASSTHROUGH)),),
            "its service passes connections",
        ),
        (
            "10.0.0.5:80",
            (pod("old", "10.0.0.5", protocol="TCP"),),
            "plain TCP: the workload does not take tunnels",
        ),
        (VIP, (cart(waypoint=BY_NAME), BACK, wp(), WAYPOINT), "a tunnel to the waypoint of the service"),
        (
            "10.0.0.6:80",
            (pod("v", "10.0.0.6", waypoint=BY_NAME), wp(), WAYPOINT),
            "to the waypoint of the workload",
        ),
    ],
)
def test_explain_of_destinations_without_a_tunnel(destination: str, values: tuple[Any, ...], because: str) -> None:
    answer = ask("shop/client", destination, *values)
    assert because in answer["because"]
    assert answer["verdict"] == "allowed"


def test_left_out_endpoints_have_a_reason() -> None:
    near = Locality("r", "z", "s")
    client = pod("client", "10.0.0.1", locality=near)
    strict = LoadBalancing((Scope.REGION,), BalancerMode.STRICT)
    answer = ask(
        "shop/client",
        VIP,
        client,
        cart(load_balancing=strict, ports={80: 0}),  # a named port: only the endpoint knows it
        behind("good", "10.0.1.1", locality=near),
        behind("sick", "10.0.1.2", locality=near, status=Health.UNHEALTHY),
        behind("none", "10.0.1.3", locality=near, capacity=0),
        behind("port", "10.0.1.4", locality=near, ports={81: 81}),
        behind("far", "10.0.1.5"),
        behind("bare", locality=near),
        behind("failed", "10.0.1.6", locality=near),
        avoided=(WorkloadUid("failed"),),
    )
    assert [way["workload"] for way in answer["ways"]] == ["good"]
    assert {each["workload"]: each["because"] for each in answer["left_out"]} == {
        "sick": "unhealthy",
        "none": "its weight is 0",
        "port": "it does not serve port 80",
        "bare": "it has no address",
        "far": "the service wants the client's own region",
        "failed": "it failed recently: taken only if no other is left",
    }


def test_service_without_endpoints_lists_left_out_endpoints() -> None:
    answer = ask("shop/client", VIP, cart(), behind("sick", "10.0.1.2", status=Health.UNHEALTHY))
    assert answer["verdict"] == f"refused: no healthy upstream: {VIP}"
    assert answer["left_out"] == [{"workload": "sick", "because": "unhealthy"}]


def test_a_port_that_the_service_lacks_is_the_reason_of_the_refusal() -> None:
    answer = ask("shop/client", "10.1.0.1:81", cart(), BACK)
    assert answer["verdict"] == "refused: no healthy upstream: 10.1.0.1:81"
    assert answer["because"] == "the service has no port 81"


def test_endpoints_of_a_waypoint_that_are_left_out_have_a_reason() -> None:
    down = dataclasses.replace(WAYPOINT, uid=WorkloadUid("down"), capacity=0)
    answer = ask("shop/client", VIP, cart(waypoint=BY_NAME), BACK, wp(), down, WAYPOINT)
    assert answer["because"] == "a tunnel to the waypoint of the service"
    assert answer["left_out"] == [{"workload": "down", "because": "its weight is 0"}]


def test_all_endpoints_are_ways_if_all_have_failed() -> None:
    others = [behind(name, f"10.0.1.{number}") for number, name in enumerate("abc", 1)]
    answer = ask("shop/client", VIP, cart(), *others, avoided=[each.uid for each in others])
    assert {way["workload"] for way in answer["ways"]} == {"a", "b", "c"}


def test_failed_endpoints_are_no_ways_if_another_is_left() -> None:
    others = [behind(name, f"10.0.1.{number}") for number, name in enumerate("abc", 1)]
    answer = ask("shop/client", VIP, cart(), *others, avoided=[others[0].uid, others[2].uid])
    assert [way["workload"] for way in answer["ways"]] == ["b"]


def test_unreachable_endpoint_does_not_decide_for_reachable_ones() -> None:
    lost = behind("lost", "10.0.1.1", network="far")
    for others in ((lost, BACK), (BACK, lost)):
        answer = ask("shop/client", VIP, cart(), *others)
        assert answer["verdict"] == "refused for 1 of 2 endpoints"
        assert {way["workload"]: way.get("refused") for way in answer["ways"]} == {
            "lost": "no valid routing destination for workload: lost",
            "back": None,
        }
    answer = ask("shop/client", VIP, cart(), lost)
    assert answer["verdict"] == "refused: no valid routing destination for workload: lost"


def test_each_workload_of_a_gateway_is_a_way() -> None:
    far = behind("far", "10.0.1.1", network="far", network_gateway=BY_NAME)
    gates = [pod(f"gate{number}", f"10.0.3.{number}", services={wp().key: {15008: 15008}}) for number in (1, 2)]
    service = cart(subject_alt_names=("spiffe://cluster.local/ns/shop/sa/far",))
    answer = ask("shop/client", VIP, service, far, wp(), *gates)
    assert [(way["gateway"], way["workload"]) for way in answer["ways"]] == [("gate1", "far"), ("gate2", "far")]


def test_policies_see_the_address_that_the_client_has_towards_the_endpoint() -> None:
    """A service of two families may be dialled by one, and its endpoint reached by the other."""
    client = pod("client", "10.0.0.1", "fd00::1")
    deny = policy("six", Action.DENY, SourceIp(ipaddress.ip_network("fd00::/16")))
    answer = ask("10.0.0.1", VIP, client, cart(), behind("back", "fd00::2"), deny)
    assert answer["ways"][0]["inbound"]["refused"] == "explicitly denied by: shop/six"


def test_an_identity_of_another_trust_domain_is_refused_in_the_handshake() -> None:
    there = around(BACK)
    asked = question("10.0.0.1", "10.0.0.2:8080", "spiffe://other/ns/shop/sa/client", there, inbound=True)
    answer = explain(asked, there)
    assert answer["verdict"] == "refused by the destination"
    assert "expected trustdomain (cluster.local)" in answer["inbound"]["refused"]
    assert (answer["inbound"]["workload"], answer["inbound"]["application"]) == ("back", "10.0.0.2:8080")


@pytest.mark.parametrize("source", ["10.0.0.1", "192.0.2.7"])
def test_the_proxys_own_ports_are_refused(source: str) -> None:
    answer = ask(source, "10.0.0.2:15001", BACK)
    place = answer if "inbound" in answer else answer["ways"][0]
    assert answer["verdict"] == "refused by the destination"
    assert "attempted recursive call to ourselves" in str(place)
    assert ask("10.0.0.1", "127.0.0.1:15001")["verdict"] == "refused: attempted recursive call to ourselves"


def test_policies_of_a_waypoint_that_ends_tunnels_itself_are_its_own() -> None:
    deny = policy("all", Action.DENY, ONLY_CLIENT)
    own = dataclasses.replace(WAYPOINT, native_tunnel=True)
    answer = ask("shop/client", VIP, cart(waypoint=BY_NAME), BACK, wp(), own, deny)
    (way,) = answer["ways"]
    assert (answer["verdict"], "inbound" in way) == ("allowed", False)
    assert way["policies_because"] == "the waypoint decides about what goes through it"
    behind_ztunnel = ask("shop/client", VIP, cart(waypoint=BY_NAME), BACK, wp(), WAYPOINT, deny)
    assert behind_ztunnel["verdict"] == "refused by the destination"


# Policies


def test_the_policy_that_decides_comes_first_with_its_clause() -> None:
    answer = ask(
        "shop/client",
        VIP,
        cart(),
        BACK,
        policy("others", Action.DENY, PeerServiceAccount("shop", "other")),
        policy("ports", Action.DENY, DestinationPort(8080, 8081)),
    )
    inbound = answer["ways"][0]["inbound"]
    assert (answer["verdict"], inbound["refused"]) == (
        "refused by the destination",
        "explicitly denied by: shop/ports",
    )
    first, second = inbound["policies"]
    assert first == {"policy": "shop/ports", "action": "Deny", "holds": True, "because": "the port is 8080"}
    assert (second["policy"], second["holds"]) == ("shop/others", False)


def test_explain_names_allow_policies_without_a_match() -> None:
    answer = ask("shop/client", VIP, cart(), BACK, policy("few", Action.ALLOW, PeerServiceAccount("a", "b")))
    inbound = answer["ways"][0]["inbound"]
    assert inbound["refused"] == "allow policies exist, but none allowed"
    assert "a/b: no, it is shop/client" in inbound["policies"][0]["because"]


def test_a_missing_policy_refuses() -> None:
    back = behind("back", "10.0.0.2", authorization_policies=(PolicyKey("shop/late"),))
    answer = ask("shop/client", VIP, cart(), back)
    assert answer["ways"][0]["inbound"]["refused"] == "policy shop/late has not arrived"


def test_dry_run_policies_are_listed_separately() -> None:
    dry = policy("dry", Action.DENY, ONLY_CLIENT, dry_run=True)
    inbound = ask("shop/client", VIP, cart(), BACK, dry)["ways"][0]["inbound"]
    assert inbound["dry_run"][0]["policy"] == "shop/dry"
    assert inbound["allowed_by"] == "no policy is for this workload"


def test_policy_with_faults_is_marked() -> None:
    faulty = policy("faulty", Action.DENY, ONLY_CLIENT, faults=("rules[0]: hosts",))
    shown = ask("shop/client", VIP, cart(), BACK, faulty)["ways"][0]["inbound"]["policies"][0]
    assert shown["because"].startswith(
        "parts of it are not understood, so it is taken at its strictest (rules[0]: hosts)"
    )


def test_a_client_outside_the_mesh() -> None:
    network = ipaddress.ip_network("192.0.2.0/24")
    allow = policy("net", Action.ALLOW, SourceIp(network))
    assert ask("192.0.2.7", "10.0.0.3:80", BARE, allow)["inbound"]["allowed_by"] == "shop/net"
    assert ask("198.51.100.7", "10.0.0.3:80", BARE, allow)["verdict"] == "refused by the destination"
    assert "neither end" in ask("192.0.2.7", "192.0.2.8:80")["verdict"]
    known = ask(
        "192.0.2.7", "10.0.0.3:80", BARE, policy("p", Action.ALLOW, ONLY_CLIENT), identity=str(CLIENT.identity)
    )
    assert known["inbound"]["allowed_by"] == "shop/p"


def test_pod_outside_the_mesh_has_no_identity() -> None:
    """Its connections are not captured: what a tunnel would prove for it does not count."""
    outside = pod("outside", "10.0.0.8", protocol=Protocol.TCP)
    allow = policy("only-outside", Action.ALLOW, PeerServiceAccount("shop", "outside"))
    for destination in ("10.0.0.2:8080", VIP):
        answer = ask("shop/outside", destination, outside, cart(), BACK, allow)
        assert answer["verdict"] == "refused by the destination"
        assert answer["source"]["identity"] is None
        assert answer["because"].startswith("plain TCP: the control plane says that the source takes no tunnels")
        (way,) = answer["ways"]
        assert way["target"] == "10.0.0.2:8080"
        assert way["inbound"]["refused"] == "allow policies exist, but none allowed"
    shown = ask("shop/outside", VIP, outside, cart(), BACK, allow, identity=str(outside.identity))
    assert shown["verdict"] == "allowed"  # asked as if it were


def test_destinations_reachable_from_a_pod_outside_the_mesh() -> None:
    outside = pod("outside", "10.0.0.8", protocol=Protocol.TCP)
    plain = behind("plain", "10.0.1.9", protocol=Protocol.TCP)
    deny = policy("no-plain-text", Action.DENY, Not(PeerPrincipal()))
    answer = ask("shop/outside", VIP, outside, cart(), BACK, plain, deny)
    assert answer["verdict"] == "refused by the destination by 1 of 2 endpoints"
    assert [("inbound" in way, "policies_because" in way) for way in answer["ways"]] == [
        (True, False),
        (False, True),
    ]
    assert ask("shop/outside", "192.0.2.1:443", outside)["ways"] == [{"target": "192.0.2.1:443"}]
    assert ask("shop/outside", VIP, outside, cart())["verdict"] == f"refused: no healthy upstream: {VIP}"


def test_connection_seen_by_a_proxy_counts_as_captured() -> None:
    outside = pod("outside", "10.0.0.8", protocol=Protocol.TCP)
    there = around(outside, cart(), BACK)
    answer = explain(question("shop/outside", VIP, "", there, captured=True), there)
    assert answer["because"] == "a tunnel: the workload takes them"


# Agreement

_regions = st.sampled_from(["", "r", "s"])
_endpoints = st.builds(
    lambda number, status, weight, region, port, protocol: behind(
        f"e{number}",
        f"10.0.2.{number}",
        status=status,
        capacity=weight,
        locality=Locality(region),
        ports={port: 8080},
        protocol=protocol,
        service_account=f"e{number % 2}",
    ),
    st.integers(1, 6),
    st.sampled_from(list(Health)),
    st.integers(0, 2),
    _regions,
    st.sampled_from([80, 80, 81]),
    st.sampled_from(list(Protocol)),
)
_balancing = st.builds(LoadBalancing, st.sampled_from([(), (Scope.REGION,)]), st.sampled_from(list(BalancerMode)))
_policies = st.builds(
    lambda name, action, account: policy(name, action, PeerServiceAccount("shop", account)),
    st.sampled_from("abc"),
    st.sampled_from(list(Action)),
    st.sampled_from(["client", "other"]),
)


def routed(client: Workload, mesh: Mesh, seed: int) -> Route | str:
    """Return the data path's decision on a connection to the service: a route, or why there is none."""
    asked = Client(workload=client, host="10.0.0.1")
    try:
        return route_for(asked, SocketAddress.parse(VIP), mesh, lambda below: seed % below)
    except RouteRefused as refused:
        return str(refused)


@given(
    st.lists(_endpoints, max_size=6, unique_by=lambda each: each.uid),
    st.lists(_policies, max_size=3, unique_by=lambda each: each.name),
    _balancing,
    _regions,
    st.booleans(),
)
def test_explain_agrees_with_the_data_path(
    endpoints: list[Workload],
    policies: list[AuthorizationPolicy],
    balancing: LoadBalancing,
    region: str,
    waypoint: bool,
) -> None:
    client = pod("client", "10.0.0.1", locality=Locality(region))
    service = cart(load_balancing=balancing, waypoint=BY_NAME if waypoint else None)
    there = around(client, service, wp(), WAYPOINT, *endpoints, *policies)
    answer = explain(question("shop/client", VIP, "", there), there)
    told = [way["target"] for way in answer.get("ways", [])]
    drawn = set()
    for seed in range(24):
        found = routed(client, there.mesh, seed)
        if isinstance(found, str):
            assert answer["verdict"] == f"refused: {found}"
            return
        drawn.add(str(found.target))
        way = answer["ways"][told.index(str(found.target))]
        if way.get("inbound") is not None:
            assert found.workload is not None
            facts = ConnectionFacts(
                source=SocketAddress("10.0.0.1", 1),
                direct_source=SocketAddress("10.0.0.1", 1),
                destination=SocketAddress.parse(way["inbound"]["application"]),
                peer=PeerCertificate(uri_sans=(str(client.identity),)),
            )
            decided = judge(there.mesh.policies_for(found.workload).enforced, facts)
            assert ("refused" not in way["inbound"]) is decided.allowed
    # Whatever can be drawn is told, and the first that is told has the best rank: it can be drawn.
    assert drawn <= set(told)
    assert told[0] in drawn
