"""Plans against the decision made anew, in meshes that change."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ztunnel.proxy.istio.pods import APP_PORT, NODE, VIP, endpoint, shop, workload
from xds.model.address import SocketAddress
from xds.model.mesh import Mesh
from xds.model.service import WeightedWaypoint
from xds.model.workload import GatewayAddress, NamespacedHostname, NetworkAddress, Protocol
from ztunnel.proxy.istio.accounting import flows
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.accounting.workload_labels import labels_of
from ztunnel.proxy.istio.path import plans as module
from ztunnel.proxy.istio.path.failed_endpoints import FailedEndpoints
from ztunnel.proxy.istio.path.plans import Plan, Plans, enter_route
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.route import Client, Missing, Route, RouteRefused, Tunnel, route_for

POD = workload("client", "127.0.1.1")
ADDRESSES = ("127.0.1.2", "127.0.1.3", "127.0.1.8")
DIALLED = [SocketAddress(host, port) for host in (*ADDRESSES, VIP, "127.1.0.2") for port in (80, APP_PORT)]
WAYPOINT = GatewayAddress(NetworkAddress("", "127.0.1.8"), 15008)
NAMED = GatewayAddress(NamespacedHostname("default", "gate.example"), 15008)


class Around:
    """The parts of a pod and its node that plans need."""

    def __init__(self) -> None:
        self.mesh = Mesh(node=NODE)
        self.mesh.apply([POD])
        self.node: Any = SimpleNamespace(
            mesh=self.mesh,
            rng=random.Random(1),
            failed_endpoints=FailedEndpoints(),
            clock=SimpleNamespace(monotonic=lambda: 0.0, wall=lambda: 0.0),
            addons=None,
            config=SimpleNamespace(network="", node_local_shortcut=True),
            metrics=Metrics("1", 100),
            asked=set(),
            ask=None,
            labels_of=labels_of,
        )
        self.labels = labels_of(POD)
        local = SimpleNamespace(known=lambda: self.labels)
        self.plans = Plans(cast("PodContext", SimpleNamespace(node=self.node, local=local)), (15001,))

    def anew(self, destination: SocketAddress) -> Route | None:
        """The decision, without a plan."""
        client = Client(workload=self.labels.workload, host="127.0.1.1")
        avoid = self.node.failed_endpoints.current(0.0)
        try:
            return route_for(client, destination, self.mesh, self.node.rng.randrange, avoid=avoid)
        except (RouteRefused, Missing):
            return None

    def check(self, destination: SocketAddress) -> Plan | None:
        """Compare a plan with the decision made anew, by the same draws."""
        state = self.node.rng.getstate()
        plan = self.plans.plan("127.0.1.1", destination)
        self.node.rng.setstate(state)
        route = self.anew(destination)
        if plan is None:
            weighted = any(each.weighted_waypoints for each in self.mesh.services())
            assert not isinstance(route, Tunnel) or not isinstance(route.target, SocketAddress) or weighted
            return None
        assert plan.route == route
        assert isinstance(route, Tunnel)
        assert (plan.target, plan.labels) == (route.target, self.labels)
        shown = plan.described
        assert shown.destination_workload is route.workload
        assert shown.service is route.service
        assert shown.hbone_authority == route.authority
        record = Record(self.node, Direction.OUTBOUND, destination, destination)
        record.source_workload = self.labels.workload
        enter_route(record, route, route.target, self.labels, self.node)
        assert shown.references == flows.references(record, lambda value: value)
        return plan


gateways = st.sampled_from([None, WAYPOINT, NAMED])
workloads = st.builds(
    lambda name, host, protocol, gateway, network: endpoint(
        name, host, protocol=protocol, waypoint=gateway, network=network, node="elsewhere"
    ),
    st.sampled_from(["one", "two", "gate"]),
    st.sampled_from(ADDRESSES),
    st.sampled_from([Protocol.HBONE, Protocol.TCP]),
    gateways,
    st.sampled_from(["", "", "", "far"]),
)
services = st.builds(
    lambda name, vip, gateway, weights: replace(
        shop(vips=(NetworkAddress("", vip),), waypoint=gateway),
        name=name,
        hostname=f"{name}.example",
        weighted_waypoints=tuple(WeightedWaypoint(gateway, weight) for weight in weights if gateway is not None),
    ),
    st.sampled_from(["shop", "gate"]),
    st.sampled_from([VIP, "127.1.0.2"]),
    gateways,
    st.sampled_from([(), (), (1, 2)]),
)
changes = st.one_of(
    st.tuples(st.just("put"), st.one_of(workloads, services)),
    st.tuples(st.just("remove"), st.sampled_from(["one", "two", "gate", "shop"])),
    st.tuples(st.just("fail"), st.sampled_from(["one", "two"])),
    st.tuples(st.just("rename"), st.sampled_from(["a", "b"])),
)


def apply(around: Around, change: tuple[str, Any]) -> None:
    kind, what = change
    mesh = around.mesh
    if kind == "put":
        mesh.apply([what])
    elif kind == "remove":
        mesh.apply((), [uid for uid in [workload(what, ADDRESSES[0]).uid] if mesh.workload(uid)])
        mesh.apply((), [key for key in [f"default/{what}.example"] if mesh.service(key)])
    elif kind == "fail":
        around.node.failed_endpoints.add(workload(what, ADDRESSES[0]).uid, 0.0)
    else:
        renamed = workload("client", "127.0.1.1", canonical_name=what)
        mesh.apply([renamed])
        around.labels = labels_of(renamed)


@given(st.lists(st.one_of(changes, st.sampled_from(DIALLED)), max_size=40))
def test_plan_equals_a_new_decision_after_any_changes(steps: Iterable[Any]) -> None:
    around = Around()
    around.mesh.apply([shop(), endpoint("one", ADDRESSES[0], node="elsewhere")])
    for step in steps:
        if isinstance(step, SocketAddress):
            around.check(step)
        else:
            apply(around, step)
    for destination in DIALLED:
        around.check(destination)
        around.check(destination)


def test_an_unchanged_decision_keeps_its_plan() -> None:
    around = Around()
    around.mesh.apply([endpoint("one", ADDRESSES[0], node="elsewhere")])
    plan = around.check(SocketAddress(ADDRESSES[0], APP_PORT))
    around.mesh.apply([workload("unrelated", "127.0.7.7")])
    assert around.check(SocketAddress(ADDRESSES[0], APP_PORT)) is plan
    around.mesh.apply([endpoint("one", ADDRESSES[0], node="elsewhere", canonical_name="new")])
    assert around.check(SocketAddress(ADDRESSES[0], APP_PORT)) is not plan


def test_the_number_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 4)
    around = Around()
    around.mesh.apply([endpoint("one", ADDRESSES[0], node="elsewhere")])
    for port in range(1, 30):
        assert around.check(SocketAddress(ADDRESSES[0], port)) is not None
        assert len(around.plans._trees) <= 4
        assert len(around.plans._made) <= 4


def test_plans_of_removed_endpoints_are_dropped() -> None:
    around = Around()
    around.mesh.apply([shop(), endpoint("stays", "10.1.0.1", node="elsewhere")])
    kept = around.check(SocketAddress("10.1.0.1", APP_PORT))
    for number in range(1000):
        one = endpoint("goes", f"10.2.{number // 250}.{number % 250}", node="elsewhere")
        around.mesh.apply([one])
        assert around.check(SocketAddress(one.addresses[0], APP_PORT)) is not None
        around.mesh.apply((), [one.uid])
    assert len(around.plans._made) <= 2 * module._LEAST_PRUNED
    assert around.check(SocketAddress("10.1.0.1", APP_PORT)) is kept


def test_a_call_to_the_proxy_itself_has_no_plan() -> None:
    around = Around()
    around.mesh.apply([endpoint("one", "127.0.0.1", node="elsewhere")])
    assert around.check(SocketAddress("127.0.0.1", 80)) is not None
    assert around.plans.plan("127.0.1.1", SocketAddress("127.0.0.1", 15001)) is None


def test_unrequested_on_demand_destination_has_no_plan() -> None:
    around = Around()

    async def ask(key: str) -> None:
        raise AssertionError(key)

    around.node.ask = ask
    destination = SocketAddress(ADDRESSES[0], APP_PORT)
    assert around.plans.plan("127.0.1.1", destination) is None
    around.node.asked.add(f"/{destination.host}")
    around.mesh.apply([endpoint("one", ADDRESSES[0], node="elsewhere")])
    assert around.plans.plan("127.0.1.1", destination) is not None
