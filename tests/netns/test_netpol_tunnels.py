"""The same policies inside tunnels: scenarios through two proxies, and random ones beside the kernel's verdict."""

import contextlib
import select
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.netns import netpol_scenarios as s
from tests.netns.netpol_harness import PORTS, Probe, outcome
from tests.netns.netpol_tunnels import TunnelledCluster
from tests.netns.test_netpol import PODS, POLICIES
from tproxy.packets import Interpreter, Packet
from ztunnel.policy.netpol.table_builder import TableBuilder

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TunnelledCluster]:
    with TunnelledCluster() as cluster:
        yield cluster


@pytest.mark.parametrize("name", s.SCENARIOS)
def test_scenario(cluster: TunnelledCluster, name: str) -> None:
    assert outcome(cluster, name) == []


TRIED = st.lists(
    st.tuples(st.sampled_from(PODS), st.sampled_from(PODS), st.sampled_from(PORTS)),
    min_size=12,
    max_size=24,
    unique=True,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(POLICIES, TRIED)
def test_the_verdict_in_a_tunnel_is_the_plain_ones(
    cluster: TunnelledCluster, policies: dict[str, Any], tried: list[tuple[str, str, int]]
) -> None:
    """Plain verdicts equal the kernel's, by tests/netns/test_netpol.py with tables that let no tunnel through."""
    cluster.apply(cluster.step(s.Step(policies, "")))
    compiled = cluster.compiler.compiled
    plain = [Interpreter(TableBuilder().build(compiled, node.name).table) for node in cluster.nodes]
    wanted = []
    for source, destination, port in tried:
        allowed = [
            all(
                table.judge(
                    Packet(
                        source=ip_address(cluster.address(source, version)),
                        destination=ip_address(cluster.address(destination, version)),
                        protocol=socket.IPPROTO_TCP,
                        destination_port=port,
                    )
                ).accepted
                for table in plain
            )
            for version in (4, 6)
        ]
        assert allowed[0] == allowed[1]
        wanted.append(Probe(source, destination, port, "tcp", allowed[0]))
    assert cluster.wrong(wanted) == []


def test_a_denial_came_through_a_tunnel_and_names_the_policy(cluster: TunnelledCluster) -> None:
    only_b = s.Step({"z/only-b": s.ingress(s.A, s.sources(s.of_pods("b")))}, "")
    cluster.apply(cluster.step(only_b))
    assert cluster.wrong([Probe("z/b", "z/a", 80, "tcp", True), Probe("y/a", "z/a", 81, "tcp", False)]) == []

    def denied() -> list[dict[str, Any]]:
        lines = cluster.mesh.proxies["w2"].access("inbound")
        return [line for line in lines if line.get("policy.name") == "KubernetesNetworkPolicy/z/only-b"]

    cluster.until(lambda: len(denied()) == 2)
    for line in denied():
        assert line["src.identity"] == "spiffe://cluster.local/ns/y/sa/y-a"
        # The tunnel's port, and the port that was judged.
        ends = (line["dst.addr"], line["dst.hbone_addr"])
        assert [end.rpartition(":")[2] for end in ends] == ["15008", "81"]


@pytest.mark.parametrize("version", [4, 6])
def test_live_tunnels_are_judged_again_when_policies_change(cluster: TunnelledCluster, version: int) -> None:
    cluster.apply(cluster.base())
    for listener in cluster.listeners.values():
        cluster.drain(listener)
    with contextlib.ExitStack() as stack:
        stays, goes = (stack.enter_context(cluster.opened("y/b", "x/a", port, version)) for port in PORTS)
        for sock in (stays, goes):
            sock.send(b"hello")
        cluster.until(lambda: all(_waits(cluster.listeners["x-a", port, "tcp"]) for port in PORTS))
        served, cut = (stack.enter_context(cluster.accepted("x/a", port)) for port in PORTS)
        assert (cluster.hears(served), cluster.hears(cut)) == (b"hello", b"hello")
        only = s.ingress(s.A, s.sources(ports=[s.port(80)]))
        cluster.apply(cluster.step(s.Step({"x/p": only}, "")))
        with contextlib.suppress(ConnectionResetError):
            assert goes.recv(1) == b""
        with contextlib.suppress(ConnectionResetError):
            assert cut.recv(1) == b""
        served.send(b"still here")
        assert cluster.hears(stays) == b"still here"


def _waits(listener: socket.socket) -> bool:
    return bool(select.select([listener], [], [], 0)[0])
