"""Network policy with real connections: the scenarios of Kubernetes' own tests, and random policies."""

import itertools
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.netns import netpol_scenarios as s
from tests.netns.netpol_harness import NODES, PORTS, PROTOCOLS, Cluster, Probe, outcome, probes
from tproxy.packets import Interpreter, Packet
from ztunnel.kube.objects import ObjectKey

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
NUMBERS = {"tcp": 6, "udp": 17, "sctp": 132}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.mark.parametrize("name", s.SCENARIOS)
def test_scenario(cluster: Cluster, name: str) -> None:
    assert outcome(cluster, name) == []


def test_a_change_of_one_label_changes_elements_not_chains(cluster: Cluster) -> None:
    first, second, _ = s.SCENARIOS["22 a client gains its label"]
    cluster.apply(cluster.step(first))
    # One address in each family on the node that polices x/a. The other node has no chain that uses the set.
    assert cluster.apply(cluster.step(second)) == 2
    assert cluster.apply(cluster.step(second)) == 0


PODS = [pod.replace("-", "/") for pods in NODES.values() for pod in pods]
SELECTORS = st.sampled_from([s.pods(), s.pods("a"), s.pods("b", "c"), s.key("pod", "NotIn", "a")])
PEERS = st.one_of(
    st.builds(lambda pods: {"podSelector": pods}, SELECTORS),
    st.builds(lambda spaces: {"namespaceSelector": spaces}, st.sampled_from([s.spaces(), s.spaces("y")])),
    st.builds(lambda pods: {"podSelector": pods, "namespaceSelector": s.NOT_X}, SELECTORS),
    st.sampled_from(["{y/a}", "{y/*}", "{y/*} but {y/b}"]),
)
PORT = st.one_of(
    st.builds(s.port, st.sampled_from(PORTS), st.sampled_from(["TCP", "UDP", "SCTP"])),
    st.sampled_from(
        [{}, {"protocol": "UDP"}, s.port(80, endPort=81), s.port("serve-81-tcp"), s.port("serve-80-udp", "UDP")]
    ),
)


def rules(peers: str) -> st.SearchStrategy[Any]:
    return st.lists(
        st.fixed_dictionaries(
            {}, optional={peers: st.lists(PEERS, max_size=2), "ports": st.lists(PORT, max_size=2)}
        ),
        max_size=2,
    )


SPECS = st.fixed_dictionaries(
    {"podSelector": SELECTORS, "policyTypes": st.sampled_from([["Ingress"], ["Egress"], ["Ingress", "Egress"]])},
    optional={"ingress": rules("from"), "egress": rules("to")},
)
NAMESPACED = st.dictionaries(st.sampled_from([f"{ns}/{name}" for ns in "xyz" for name in "pq"]), SPECS, max_size=4)
CLUSTER_RULE = st.one_of(
    st.builds(
        s.rule,
        st.sampled_from(["Accept", "Deny", "Pass"]),
        st.sampled_from([s.spaces(), s.spaces("y"), s.NOT_X]),
        st.sampled_from([s.tcp(80), {"udp": {}}, {"destinationNamedPort": "serve-81-tcp"}]),
    ),
    st.builds(s.rule, st.sampled_from(["Accept", "Deny", "Pass"]), st.sampled_from([s.spaces("x"), s.NOT_X])),
)


def _turned(rule: dict[str, Any]) -> dict[str, Any]:
    return {("to" if key == "from" else key): value for key, value in rule.items()}


CLUSTER_SPEC = st.builds(
    lambda priority, subject, tier, inward, outward: s.admin(
        priority, subject, tier, ingress=inward, egress=[_turned(rule) for rule in outward]
    ),
    st.integers(0, 3),
    st.sampled_from([s.spaces(), s.spaces("x"), s.NOT_X]),
    st.sampled_from(["Admin", "Baseline"]),
    st.lists(CLUSTER_RULE, max_size=2),
    st.lists(CLUSTER_RULE, max_size=2),
)
POLICIES = st.builds(
    dict.__or__, NAMESPACED, st.dictionaries(st.sampled_from(["/p", "/q"]), CLUSTER_SPEC, max_size=2)
)
TRIED = st.lists(
    st.tuples(
        st.sampled_from(PODS), st.sampled_from(PODS), st.sampled_from(PORTS), st.sampled_from(list(PROTOCOLS))
    ),
    min_size=12,
    max_size=24,
    unique=True,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(POLICIES, TRIED)
def test_the_kernels_verdict_is_the_tables(
    cluster: Cluster, policies: dict[str, Any], tried: list[tuple[str, str, int, str]]
) -> None:
    """The kernel decides as the table says; policy/netpol/test_table.py compares the table with policies."""
    cluster.apply(cluster.step(s.Step(policies, "")))
    made = [Interpreter(node.built.table) for node in cluster.nodes if node.built is not None]
    wanted = []
    for source, destination, port, protocol in tried:
        if source == destination:
            continue
        allowed = [
            all(
                table.judge(
                    Packet(
                        source=ip_address(cluster.address(source, version)),
                        destination=ip_address(cluster.address(destination, version)),
                        protocol=NUMBERS[protocol],
                        destination_port=port,
                    )
                ).accepted
                for table in made
            )
            for version in (4, 6)
        ]
        assert allowed[0] == allowed[1]
        wanted.append(Probe(source, destination, port, protocol, allowed[0]))
    assert cluster.wrong(wanted) == []


@pytest.mark.parametrize("version", [4, 6])
def test_established_connections_are_judged_again_when_policies_change(cluster: Cluster, version: int) -> None:
    cluster.apply(cluster.base())
    for port in (80, 81):
        cluster.drain(cluster.listeners["x-a", port, "tcp"])  # of connections that earlier tests left waiting
    with cluster.opened("y/b", "x/a", 80, version) as stays, cluster.opened("y/b", "x/a", 81, version) as goes:
        served = cluster.accepted("x/a", 80)
        cut = cluster.accepted("x/a", 81)
        with served, cut:
            only = s.ingress(s.A, s.sources(ports=[s.port(80)]))
            cluster.apply(cluster.step(s.Step({"x/p": only}, "")))
            assert cluster.end_connections() >= 1
            # Both ends send. Neither the client's packets nor the server's restore the connection.
            for sock in (cut, goes, served, stays):
                sock.send(b"hello")
            assert cluster.hears(stays) == b"hello"
            assert cluster.hears(served) == b"hello"
            assert cluster.silent(goes)
            assert cluster.silent(cut)
            assert cluster.end_connections() == 0


PING = {4: {"protocol": "ICMP", "icmp": {"type": 8}}, 6: {"protocol": "ICMPv6", "icmp": {"type": 128}}}


def ping_policy(cluster: Cluster, *rules: dict[str, Any]) -> dict[ObjectKey, Any]:
    """Return the lab's objects, and a policy of Calico's with these rules for pod x/a."""
    return cluster.base() | {
        ObjectKey("NetworkPolicy.projectcalico.org", "x", "ping"): {
            "apiVersion": "projectcalico.org/v3",
            "kind": "NetworkPolicy",
            "metadata": {"name": "ping", "namespace": "x"},
            "spec": {"selector": "pod == 'a'", "types": ["Ingress"], "ingress": list(rules)},
        }
    }


@pytest.mark.parametrize("version", [4, 6])
def test_pings_are_let_through_by_their_type(cluster: Cluster, version: int) -> None:
    rule = {"action": "Allow", **PING[version]}
    tcp = {"action": "Allow", "protocol": "TCP", "destination": {"ports": [80]}}
    cluster.apply(ping_policy(cluster, rule, tcp))
    assert cluster.wrong(probes("+y/b>x/a:80 -y/b>x/a:81")) == []
    with cluster.pinging("y/b", version) as ping:
        assert ping("x/a", number=1)
        # A ping that is allowed is no connection that a change ends.
        assert cluster.end_connections() == 0
        assert ping("x/a", number=2)
        cluster.apply(ping_policy(cluster, {**rule, "icmp": {"type": rule["icmp"]["type"], "code": 1}}, tcp))
        assert cluster.end_connections() == 1
        assert not ping("x/a", number=3)
        cluster.apply(ping_policy(cluster, {"action": "Allow", "protocol": rule["protocol"]}, tcp))
        assert ping("x/a", number=4)
        without = {"action": "Allow", "protocol": rule["protocol"], "notICMP": rule["icmp"]}
        cluster.apply(ping_policy(cluster, without, tcp))
        assert cluster.end_connections() == 1
        assert not ping("x/a", number=5)


def tiers(count: int) -> dict[ObjectKey, Any]:
    """Return tiers with a policy each, which passes all but TCP to port 81 on."""
    found: dict[ObjectKey, Any] = {}
    for at in range(count):
        deny = {"action": "Deny", "protocol": "TCP", "destination": {"ports": [81 if at == count - 1 else 7]}}
        spec = {"tier": f"t{at}", "selector": "all()", "ingress": [deny, {"action": "Pass"}]}
        for kind, name, body in (("Tier", f"t{at}", {"order": at}), ("GlobalNetworkPolicy", f"t{at}.p", spec)):
            found[ObjectKey(kind, "", name)] = {
                "apiVersion": "projectcalico.org/v3", "kind": kind, "metadata": {"name": name}, "spec": body
            }  # fmt: skip
    return found


def test_the_kernel_takes_any_number_of_tiers(cluster: Cluster) -> None:
    cluster.apply(cluster.base() | tiers(40))
    assert cluster.wrong(probes("+y/b>x/a:80 -y/b>x/a:81 +y/b>x/a:81/udp")) == []


def test_probes_are_read() -> None:
    assert [str(probe) for probe in probes("+x/b>x/a:80 -y/b>x/a:81/udp")] == [
        "+x/b>x/a:80/tcp",
        "-y/b>x/a:81/udp",
    ]


def test_every_pair_talks_without_policies(cluster: Cluster) -> None:
    cluster.apply(cluster.base())
    pairs = itertools.permutations(PODS, 2)
    assert cluster.wrong([Probe(a, b, 80, "tcp", True) for a, b in pairs]) == []
