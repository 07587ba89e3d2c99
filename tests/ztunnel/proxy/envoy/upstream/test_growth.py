"""What a change costs among many clusters, counted in work, not in time."""

import asyncio
import gc
import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from xds.dialects.envoy import Surroundings
from xds.dialects.envoy import cluster as cluster_dialect
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.json import parse_value
from xds.protocol.resource import Receive, Resource, SubscriptionStats, Update
from xds.protocol.types import CDS, EDS
from ztunnel.proxy.dataplane.resolver import Resolver
from ztunnel.proxy.envoy.config.sources import Sources
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.upstream import cluster as clusters
from ztunnel.proxy.envoy.upstream import manager as managers
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, Surround
from ztunnel.proxy.envoy.upstream.manager import ClusterManager
from ztunnel.runtime.clock import SystemClock


class Subscribed:
    """One subscription, fed by the test."""

    def __init__(self, receive: Receive) -> None:
        self.stats = SubscriptionStats()
        self.receive = receive

    def set_names(self, names: Iterable[str]) -> None:
        """Not for clusters."""

    def close(self) -> None:
        """Nothing to do."""


class Source:
    """Subscriptions by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Subscribed] = {}

    def subscribe(
        self,
        type_url: str,
        names: Iterable[str] | None,
        receive: Receive,
        *,
        initial_fetch_timeout_s: float = 15.0,
        on_initial_timeout: Callable[[], None] | None = None,
    ) -> Subscribed:
        (name,) = names or ()
        subscribed = self.by_name[name] = Subscribed(receive)
        return subscribed


def cluster(name: str, connect_timeout: str = "1s", alt_stat_name: str = "") -> Resource:
    document = {
        "name": name,
        "alt_stat_name": alt_stat_name,
        "type": "EDS",
        "connect_timeout": connect_timeout,
        "eds_cluster_config": {"eds_config": {"ads": {}}},
    }
    return Resource(name=name, version="1", body=registry.pack(parse_value(document, Cluster).message))


def assignment(name: str, *hosts: str) -> Update:
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": 80}}}} for host in hosts
    ]
    document = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    body = registry.pack(parse_value(document, ClusterLoadAssignment).message)
    return Update(type_url=EDS, version="1", resources=(Resource(name=name, version="1", body=body),))


class Calls:
    """Counts calls of a function of a module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.count = 0
        original = getattr(module, name)

        def counting(*args: Any) -> Any:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(module, name, counting)


class Mesh:
    """A manager with so many clusters, warm."""

    def __init__(self) -> None:
        self.source = Source()
        self.stats = Stats()
        self.retired: list[LiveCluster] = []
        sources = Sources(self.source, lambda _: self.source, lambda _: self.source)
        surroundings = Surroundings(read_file=lambda _: b"", environment={})
        surround = Surround(
            sources=sources,
            secrets=SecretStore(sources, surroundings, self.stats, SystemClock()),
            stats=self.stats,
            clock=SystemClock(),
            rng=random.Random(1),
            resolver=Resolver(),
            prober=None,  # type: ignore[arg-type]  # no cluster has checks
            strict_tls=True,
        )
        self.manager = ClusterManager(surround, surroundings, self.retired.append)

    async def receive(self, *resources: Resource, complete: bool) -> None:
        update = Update(type_url=CDS, version="v", resources=resources, complete=complete)
        receiving = asyncio.get_running_loop().create_task(self.manager.receive(update))
        for resource in resources:
            while (subscribed := self.source.by_name.get(resource.name)) is None:
                await asyncio.sleep(0)
            await subscribed.receive(assignment(resource.name, "10.0.0.1", "10.0.0.2"))
        await receiving

    async def close(self) -> None:
        for retired in self.retired:
            await retired.close()
        await self.manager.close()


@pytest.mark.parametrize("size", [3, 120])
@pytest.mark.parametrize("complete", [True, False])
def test_update_compiles_only_changed_clusters(monkeypatch: pytest.MonkeyPatch, size: int, complete: bool) -> None:
    async def main() -> None:
        mesh = Mesh()
        everything = [cluster(f"c{number}") for number in range(size)]
        await mesh.receive(*everything, complete=True)
        assert len(mesh.manager.active) == size
        cluster_dialect._named.clear()
        compiled = Calls(monkeypatch, managers, "compile_cluster")
        changed = cluster("c1", "2s")
        before = mesh.manager.get("c0")
        update = [everything[0], changed, *everything[2:]] if complete else [changed]
        mesh.source.by_name.pop("c1")
        await mesh.receive(*update, complete=complete)
        assert compiled.count == 1
        assert mesh.manager.get("c0") is before
        found = mesh.manager.get("c1")
        assert found is not None
        assert found.model.connect_timeout_s == 2
        assert [retired.model.name for retired in mesh.retired] == ["c1"]
        await mesh.close()

    asyncio.run(main())


def test_an_assignment_that_is_repeated_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        mesh = Mesh()
        await mesh.receive(cluster("c"), complete=True)
        found = mesh.manager.get("c")
        assert found is not None
        hosts = list(found.hosts.hosts)
        compiled = Calls(monkeypatch, clusters, "compile_assignment")
        receive = mesh.source.by_name["c"].receive
        await receive(assignment("c", "10.0.0.1", "10.0.0.2"))
        assert compiled.count == 0
        await receive(assignment("c", "10.0.0.2", "10.0.0.3"))
        assert compiled.count == 1
        assert found.hosts.hosts[0] is hosts[1]
        await receive(assignment("c", "10.0.0.1", "10.0.0.2"))
        assert [str(host) for host in found.hosts.hosts] == ["10.0.0.1:80", "10.0.0.2:80"]
        await mesh.close()

    asyncio.run(main())


def test_warm_cluster_has_no_task_and_no_unused_metric() -> None:
    async def main() -> None:
        mesh = Mesh()
        await mesh.receive(*(cluster(f"c{number}") for number in range(60)), complete=True)
        assert len(asyncio.all_tasks()) == 1
        assert not [metric for metric in mesh.stats._metrics if metric.startswith("cluster.")]
        shown = {metric.name: metric for metric in mesh.stats}
        assert shown["cluster.c0.membership_total"].value == 2  # type: ignore[union-attr]  # a gauge
        assert shown["cluster.c0.warming_state"].value == 0  # type: ignore[union-attr]  # a gauge
        assert "cluster.c59.upstream_cx_total" in shown
        await mesh.close()

    asyncio.run(main())


def test_a_removed_cluster_is_freed_without_the_collector() -> None:
    """After the start the heap is frozen: a cycle in it would stay for ever."""

    async def main() -> None:
        mesh = Mesh()
        await mesh.receive(cluster("c"), complete=True)
        mesh.source.by_name.clear()
        gone = weakref.ref(mesh.manager.get("c"))
        gc.disable()
        try:
            await mesh.receive(complete=True)
            await mesh.close()
            mesh.retired.clear()
            assert gone() is None
        finally:
            gc.enable()

    asyncio.run(main())


def test_a_cluster_leaves_no_metrics_of_any_version_behind() -> None:
    async def main() -> None:
        mesh = Mesh()
        for timeout in ("1s", "2s", "3s"):
            await mesh.receive(cluster("c", timeout), complete=True)
            found = mesh.manager.get("c")
            assert found is not None
            if timeout != "3s":
                found.stats.cx_overflow.value += 1
        assert {metric.name: metric for metric in mesh.stats}["cluster.c.upstream_cx_overflow"].used
        await mesh.receive(complete=True)
        assert [metric.name for metric in mesh.stats if metric.name.startswith("cluster.")] == []
        await mesh.close()

    asyncio.run(main())


def test_clusters_with_the_same_alt_stat_name_share_metrics_until_both_are_removed() -> None:
    async def main() -> None:
        mesh = Mesh()
        first, second = (cluster(name, alt_stat_name="shared") for name in ("a", "b"))
        await mesh.receive(first, second, complete=True)
        for name in ("a", "b"):
            found = mesh.manager.get(name)
            assert found is not None
            found.stats.cx_total.value += 1
        mesh.source.by_name.clear()
        # The cluster whose values were shown last is removed.
        update = Update(type_url=CDS, version="v", resources=(), removed=("b",))
        await mesh.manager.receive(update)
        shown = {metric.name: metric for metric in mesh.stats}
        assert shown["cluster.shared.upstream_cx_total"].value == 2  # type: ignore[union-attr]  # a counter
        assert shown["cluster.shared.membership_total"].value == 2  # type: ignore[union-attr]  # a gauge
        await mesh.manager.receive(replace(update, removed=("a",)))
        assert [metric.name for metric in mesh.stats if metric.name.startswith("cluster.")] == []
        await mesh.close()

    asyncio.run(main())


def test_newest_of_equal_bodies_is_kept() -> None:
    """A body from a response keeps all of that response in memory."""

    async def main() -> None:
        mesh = Mesh()
        await mesh.receive(cluster("c"), complete=True)
        again = cluster("c")
        await mesh.manager.receive(Update(type_url=CDS, version="2", resources=(again,), complete=True))
        found = mesh.manager.get("c")
        assert found is not None
        assert found.body is again.body
        repeated = assignment("c", "10.0.0.1", "10.0.0.2")
        await mesh.source.by_name["c"].receive(repeated)
        assert found._assigned is repeated.resources[0].body
        assert (found.unchanged_updates, found.empty_updates) == (1, 0)
        await mesh.source.by_name["c"].receive(Update(type_url=EDS, version="3", resources=(), removed=("c",)))
        assert (found.unchanged_updates, found.empty_updates) == (1, 1)
        await mesh.close()

    asyncio.run(main())
