"""The local file: the whole example by value, and every fault with its place."""

import io
import ipaddress
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from xds.dialects.istio import local_file, local_yaml
from xds.dialects.istio.local_file import LocalMesh, parse_local_file
from xds.errors import ConfigError
from xds.model.authorization import Action, PolicyScope
from xds.model.policy import (
    AllOf,
    AnyOf,
    DestinationIp,
    DestinationPort,
    Not,
    PeerPrincipal,
    PeerServiceAccount,
    SourceIp,
)
from xds.model.service import (
    BalancerMode,
    CidrAddress,
    HealthPolicy,
    IpFamilies,
    LoadBalancing,
    Scope,
    WeightedWaypoint,
)
from xds.model.string_match import StringMatch
from xds.model.workload import (
    ApplicationTunnel,
    AppProtocol,
    GatewayAddress,
    Locality,
    NamespacedHostname,
    NetworkAddress,
    Protocol,
)

EXAMPLE = Path(__file__).parents[3] / "data/local_mesh.yaml"


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_local_file(text)
    return str(error.value)


def test_the_example_as_workloads() -> None:
    cart, waypoint, remote, external = parse_local_file(EXAMPLE.read_text()).workloads
    assert cart.addresses == ("10.20.0.11", "fd00::11")
    assert (cart.protocol, cart.service_account, cart.cluster_id) == (Protocol.HBONE, "cart", "kube-a")
    assert cart.locality == Locality("eu", "eu-1", "")
    assert cart.waypoint == GatewayAddress(NamespacedHostname("shop", "wp.shop.svc.cluster.local"), 15008)
    assert cart.services == {"shop/cart.shop.svc.cluster.local": {80: 8080}}
    assert cart.authorization_policies == ("shop/only-front",)
    assert waypoint.application_tunnel == ApplicationTunnel(AppProtocol.PROXY, 15088)
    assert remote.network_gateway == GatewayAddress(NetworkAddress("net-b", "192.0.2.10"), 15009)
    assert (remote.trust_domain, remote.service_account) == ("cluster.local", "default")  # as on the wire
    assert (external.hostname, external.addresses) == ("api.example.net", ())


def test_the_example_as_policies() -> None:
    front, strict = parse_local_file(EXAMPLE.read_text()).policies
    assert (front.scope, front.action, front.dry_run) == (PolicyScope.WORKLOAD_SELECTOR, Action.ALLOW, False)
    assert front.condition == AllOf(
        (
            AnyOf(
                (
                    AllOf(
                        (
                            AnyOf(
                                (
                                    PeerPrincipal(StringMatch("exact", "cluster.local/ns/shop/sa/front")),
                                    PeerPrincipal(StringMatch("suffix", "/sa/ops")),
                                )
                            ),
                            Not(SourceIp(ipaddress.ip_network("10.99.0.0/16"))),
                        )
                    ),
                    PeerServiceAccount("shop", "batch"),
                )
            ),
            DestinationPort(8080, 8081),
        )
    )
    assert strict.condition == Not(PeerPrincipal())
    assert strict.dry_run


def test_the_example_as_services() -> None:
    cart, waypoint, external = parse_local_file(EXAMPLE.read_text()).services
    assert cart.vips == (NetworkAddress("", "10.30.0.1"), NetworkAddress("net-b", "10.30.0.1"))
    assert (cart.ports, cart.canonical, cart.ip_families) == ({80: 8080}, True, IpFamilies.IPV4)
    assert cart.load_balancing == LoadBalancing(
        (Scope.NETWORK, Scope.REGION, Scope.ZONE), BalancerMode.FAILOVER, HealthPolicy.ONLY_HEALTHY
    )
    assert waypoint.ports == {15008: 15008}
    assert external.cidr_vips == (CidrAddress("", ipaddress.ip_network("198.51.100.0/24")),)
    assert external.weighted_waypoints == (
        WeightedWaypoint(GatewayAddress(NetworkAddress("", "10.30.0.2"), 15008), 90),
    )


def test_block_of_mapped_addresses_is_one_of_ipv4_as_on_the_wire() -> None:
    mapped = "::ffff:10.0.0.0/104"
    match = {"sourceIps": [mapped], "destinationIps": ["::ffff:192.0.2.1"]}
    policy = {"name": "p", "namespace": "n", "scope": "Global", "action": "Deny", "dryRun": False}
    service = {"name": "s", "namespace": "n", "hostname": "h", "vips": [], "ports": {}}
    mesh = parse_local_file(
        json.dumps(
            {
                "policies": [policy | {"rules": [[[match]]]}],
                "services": [service | {"cidrVips": [{"cidr": mapped}]}],
            }
        )
    )
    source, destination = ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("192.0.2.1")
    assert mesh.policies[0].condition == AllOf((SourceIp(source), DestinationIp(destination)))
    assert mesh.services[0].cidr_vips == (CidrAddress("", source),)


def test_an_empty_file_is_an_empty_mesh() -> None:
    assert parse_local_file("") == LocalMesh()
    assert parse_local_file("{}") == LocalMesh()
    assert parse_local_file("workloads:\npolicies:\n") == LocalMesh()


WORKLOAD = "workloads: [{uid: u, namespace: n, workloadIps: [], services: {}, %s}]"
SERVICE = "services: [{name: s, namespace: n, hostname: h, vips: [], ports: {}, %s}]"
POLICY = "policies: [{name: p, namespace: n, scope: Global, action: Deny, dryRun: false, rules: %s}]"


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("[]", "the file must be a mapping with workloads, policies and services"),
        ("stray: 1", "stray: unknown key"),
        ("workloads: {}", "workloads: must be a list"),
        ("workloads: [7]", "workloads[0]: must be a mapping"),
        (WORKLOAD % "stray: 1", "workloads[0].stray: unknown key"),
        (WORKLOAD % "protocol: SSL", "workloads[0].protocol: 'SSL' is none of TCP, HBONE"),
        (WORKLOAD % "networkMode: [1]", "workloads[0].networkMode: [1] is none of Standard, HostNetwork"),
        (WORKLOAD % "status: healthy", "workloads[0].status: 'healthy' is none of Healthy, Unhealthy"),
        (WORKLOAD % "node: 7", "workloads[0].node: 7 is no string"),
        (WORKLOAD % "capacity: -1", "workloads[0].capacity: -1 is no number from 0 to 4294967295"),
        (WORKLOAD % "capacity: true", "workloads[0].capacity: True is no number from 0 to 4294967295"),
        (WORKLOAD % "nativeTunnel: 1", "workloads[0].nativeTunnel: 1 is neither true nor false"),
        (WORKLOAD % "workloadType: x", "workloads[0].workloadType: 'x' is none of deployment, cronjob, pod, job"),
        (WORKLOAD % "locality: {region: r, zone: z}", "workloads[0].locality.subzone: is required"),
        (
            WORKLOAD % "waypoint: {destination: x, hboneMtlsPort: 1}",
            "workloads[0].waypoint.destination: 'x' is neither network/address nor namespace/hostname",
        ),
        (
            WORKLOAD % "applicationTunnel: {protocol: PROXY, port: 70000}",
            "applicationTunnel.port: 70000 is no port",
        ),
        (SERVICE % "visibility: None", "services[0].visibility: 'None' is none of Public, Namespace"),
        (SERVICE % "cidrVips: [{cidr: x}]", "services[0].cidrVips[0].cidr: 'x' is no block of addresses"),
        (
            SERVICE % "weightedWaypoints: [{weight: 1}]",
            "services[0].weightedWaypoints[0].destination: is required",
        ),
        (SERVICE % "loadBalancer: {mode: x}", "services[0].loadBalancer.mode: 'x' is none of Standard"),
        (
            SERVICE % "loadBalancer: {routingPreferences: [Zone, x]}",
            "services[0].loadBalancer.routingPreferences[1]: 'x' is none of Region",
        ),
        (
            SERVICE % "endpoints: {u: {workloadUid: u, port: {}}}",
            "services[0].endpoints.u: no such workload in this file",
        ),
        ("services: [{name: s, namespace: n, hostname: h, ports: {}}]", "services[0].vips: is required"),
        (
            "services: [{name: s, namespace: n, hostname: h, vips: [10.0.0.1], ports: {a: 1}}]",
            "services[0].vips[0]: '10.0.0.1' is not network/address; services[0].ports: 'a' is no port",
        ),
        (
            "services: [{name: s, namespace: n, hostname: a/b, vips: [], ports: {}}]",
            "services[0]: failed to parse namespaced hostname: n/a/b",
        ),
        (
            "workloads: [{}]",
            "workloads[0].namespace: is required; workloads[0].workloadIps: is required; "
            "workloads[0].services: is required; workloads[0].uid: is required",
        ),
        (
            "workloads: [{uid: u, namespace: n, workloadIps: [x], services: {s: {}}}]",
            "workloads[0].workloadIps[0]: 'x' is no IP address; "
            "workloads[0].services.s: failed to parse namespaced hostname: s",
        ),
        (
            "policies: [{name: p, namespace: n, scope: Global, action: Log, dryRun: no, rules: []}]",
            "[0].action: 'Log'",
        ),
        (POLICY % "[[[{stray: []}]]]", "policies[0].rules[0][0][0].stray: unknown key"),
        (POLICY % "[[{}]]", "policies[0].rules[0][0]: must be a list"),
        (
            POLICY % '[[[{principals: ["x"]}]]]',
            "principals[0]: a string match is !Exact, !Prefix, !Suffix or !Presence",
        ),
        (POLICY % '[[[{principals: [!Regex "x"]}]]]', "could not determine a constructor for the tag '!Regex'"),
        (POLICY % '[[[{principals: [!Exact ["x"]]}]]]', "!Exact needs a string"),
        (POLICY % '[[[{notPrincipals: [!Exact "spiffe://x"]}]]]', "notPrincipals[0]: never matches: principals"),
        (POLICY % "[[[{sourceIps: [10.0.0.0/33]}]]]", "sourceIps[0]: '10.0.0.0/33' is no block of addresses"),
        (POLICY % "[[[{destinationPorts: [65536]}]]]", "destinationPorts[0]: 65536 is no port"),
        (POLICY % f"[[[{{destinationPorts: ['{'8' * 5000}']}}]]]", "8' is no port"),
        (POLICY % "[[[{serviceAccounts: [{namespace: n}]}]]]", "serviceAccounts[0].serviceAccount: is required"),
        ("workloads: []\nworkloads: []", "'workloads' is repeated"),
        ("a: [", "not valid YAML"),
    ],
)
def test_faults_have_their_place(text: str, faults: str) -> None:
    assert faults in refused(text)


def test_all_faults_are_told_together() -> None:
    text = "services: [{name: s, namespace: n, hostname: h, vips: [], ports: {}, a: 1}]\nb: 2\nworkloads: 3"
    assert refused(text) == "services[0].a: unknown key; b: unknown key; workloads: must be a list"


def test_names_are_unique() -> None:
    twice = "{uid: u, namespace: n, workloadIps: [], services: {}}"
    assert refused(f"workloads: [{twice}, {twice}]") == "workloads[1]: u is workloads[0] already"


def test_a_service_may_name_its_endpoints() -> None:
    text = (
        (WORKLOAD % "").replace(", }", "}") + "\n" + SERVICE % "endpoints: {u: {workloadUid: u, port: {80: 8080}}}"
    )
    (workload,) = parse_local_file(text).workloads
    assert workload.services == {"n/h": {80: 8080}}
    assert "status: Unhealthy but the workload is Healthy" in refused(
        text.replace("port: {80: 8080}", "port: {}, status: Unhealthy")
    )


def test_json_is_yaml() -> None:
    rules = [[[{"principals": [{"Exact": "a"}, {"Presence": []}], "destinationPorts": [80]}]]]
    policy = {
        "name": "p",
        "namespace": "n",
        "scope": "Namespace",
        "action": "Allow",
        "dryRun": False,
        "rules": rules,
    }
    workload = {"uid": "u", "namespace": "n", "workloadIps": [], "services": {"n/h": {"80": 8080}}}
    mesh = parse_local_file(json.dumps({"policies": [policy], "workloads": [workload]}))
    assert mesh.workloads[0].services == {"n/h": {80: 8080}}
    assert json.loads(json.dumps(mesh.policies[0].rules)) == rules


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text("ab:- #'\"\n{}&*!~1", max_size=6)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab1~", max_size=2), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text("abc", max_size=3), VALUES, max_size=4), st.booleans())
def test_documents_are_read_as_yaml_reads_them(document: dict[str, Any], flow: bool) -> None:
    """The same object in two places becomes an anchor and an alias, which are read as YAML defines them."""
    document = {**document, "list": [document.get("a"), document.get("a")], "again": document}
    assert read(yaml.safe_dump(document, default_flow_style=flow)) == document


@given(st.text(alphabet="{}[]:,!&*-<\n ab\"'1.", max_size=60))
@example("!1\n1:")
@example("!!seq {a: b}")
@example("a: !!seq {a: b}")
@example("a: !!map [a]")
@example("a: !!bool x")
@example("a: !!timestamp x")
def test_any_text_is_read_as_yaml_reads_it(text: str) -> None:
    try:
        found = read(text)
    except local_yaml.Unreadable:
        return
    assert found == (yaml.safe_load(text) or {})


def read(text: str) -> dict[object, object]:
    found = local_yaml.sections(text)
    return {key: list(value) if isinstance(value, Iterator) else value for key, value in found}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: &x [*x]", "contains itself by an alias"),
        ("a: *x", "found undefined alias 'x'"),
        ("a: &x 1\nb: &x 2", "found duplicate anchor 'x'"),
        ("a: {b: 1, b: 2}", "'b' is repeated"),
        ("a: [{<<: 1}]", "expected a mapping or list of mappings for merging"),
        ("a: {[1]: 2}", "found unhashable key"),
        ("a: 1\n---\nb: 2", "there is another document"),
        ("workloads: []\npolicies: ]", "line 2, column 11"),
        ("a: !!python/object:os.system []", "could not determine a constructor"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefgh")),
            "its aliases would make more than",
        ),
        ("a: " + "[" * 5000, "not valid YAML"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, fault: str) -> None:
    assert fault in refused(text)


def test_plain_scalars_are_read_by_version_1_2() -> None:
    text = "a: [10:00, 2026-01-01, 2026-99-99, =, yes, on, 1_000, 0x1f, 1e3, true, ~]"
    values = ["10:00", "2026-01-01", "2026-99-99", "=", "yes", "on", "1_000", 31, 1000.0, True, None]
    assert read(text)["a"] == values


def test_a_mapping_takes_what_it_merges_unless_it_has_its_own() -> None:
    text = "base: &b {x: 1, y: 2}\nother: &o {y: 3, z: 4}\nall: {<<: [*b, *o], x: 0}"
    assert read(text)["all"] == yaml.safe_load(text)["all"] == {"x": 0, "y": 2, "z": 4}


def test_an_element_is_read_before_the_next_one_is_parsed() -> None:
    """A mesh of 45 MB is never whole in memory as text or values."""
    source = io.StringIO("workloads:\n" + "- {a: b}\n" * 100_000)
    sections = local_yaml.sections(source)
    _, elements = next(sections)
    assert isinstance(elements, Iterator)
    assert next(elements) == {"a": "b"}
    assert source.tell() < 100_000


@given(st.text(alphabet="{}[]:,!&*-\n ab\"'1.", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_local_file(text)
    except ConfigError:
        pass


_REQUIRED = ("uid", "namespace", "workloadIps", "services")
_VALUES: dict[str, list[object]] = {
    "uid": ["u", "", None, 1],
    "name": ["n", None, 2],
    "namespace": ["ns", "", None],
    "serviceAccount": ["a", "", None, True],
    "trustDomain": ["td", ""],
    "workloadIps": [[], ["10.0.0.1", "fd00::1"], ["x"], None, "10.0.0.1", [None]],
    "protocol": ["HBONE", "TCP", "hbone", 1],
    "networkMode": ["HostNetwork", "Standard", ""],
    "workloadType": ["pod", "deployment", "x"],
    "clusterId": ["c", ""],
    "nativeTunnel": [True, "true", 0],
    "status": ["Unhealthy", "Healthy", "?"],
    "capacity": [0, 7, -1, 2**32, True],
    "authorizationPolicies": [["ns/p"], [], [1], "ns/p"],
    "services": [{}, None, {"ns/a.b": {80: 8080}}, {"bad": {}}, {"ns/a": {"80": 0}}, []],
    "waypoint": [{"destination": "n/10.0.0.1", "hboneMtlsPort": 15008}, {}],
    "locality": [{"region": "r", "zone": "z", "subzone": "s"}, {}],
    "colour": ["red"],
}


@given(
    value=st.one_of(
        st.sampled_from([None, [], "x", {1: 2}]),
        st.fixed_dictionaries(
            {name: st.sampled_from(_VALUES[name]) for name in _REQUIRED},
            optional={name: st.sampled_from(values) for name, values in _VALUES.items() if name not in _REQUIRED},
        ),
    )
)
@example(value={"uid": "u", "namespace": "ns", "workloadIps": ["10.0.0.1"], "services": {"ns/a.b": {80: 8080}}})
def test_a_plain_workload_is_read_as_any_other(value: object) -> None:
    found, reader = local_file._plain_workload(value), local_file._Reader()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_file, "_plain_workload", lambda _: None)
        expected = reader.workload(value, "w")
    assert found is None or (found, []) == (expected, reader.faults)


def test_the_usual_workload_is_plain() -> None:
    value: dict[str, Any] = {"uid": "u", "namespace": "ns", "workloadIps": ["10.0.0.1"], "services": {}}
    assert local_file._plain_workload(value) is not None
    assert local_file._plain_workload({**value, "waypoint": {}}) is None
