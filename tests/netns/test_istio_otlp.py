"""Whole proxies send their metrics and access lines to a collector on their node."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.istio import AmbientMesh, ask, eventually, mesh_of
from tests.netns.toys import app
from tests.ztunnel.proxy.otlp.collector import Collector, attributes, collecting

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
NODES = {"w1": ["client"], "w2": ["far"]}
ENV = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318",
    "OTEL_METRIC_EXPORT_INTERVAL": "200",
    "OTEL_BLRP_SCHEDULE_DELAY": "50",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "1000",
}


@contextlib.contextmanager
def collectors(mesh: AmbientMesh) -> Iterator[dict[str, Collector]]:
    """One on each node, by the node's name."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, proxy in mesh.proxies.items():
            listener = proxy.place.run(lambda: socket.create_server(("127.0.0.1", 4318)))
            found[name] = stack.enter_context(collecting(listener))
        yield found


def complete(collector: Collector) -> list[object]:
    return [record for record in collector.records() if record.body.string_value == "connection complete"]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_connection_is_a_record_of_either_node_with_one_trace(tmp_path: Path, processes: str) -> None:
    async def main() -> None:
        env = {**ENV, "ZTUNNEL_WORKER_THREADS": processes}
        async with mesh_of(NODES, tmp_path, env=env) as mesh, app(mesh.lab.pod("far")):
            client, far = mesh.lab.pod("client"), mesh.lab.pod("far")
            with collectors(mesh) as seen:
                assert await ask(client, far.ipv4, 8080) != b""
                await eventually(lambda: complete(seen["w1"]) and complete(seen["w2"]), "a record of each node")
                (near_side,), (far_side,) = complete(seen["w1"]), complete(seen["w2"])
                line = await mesh.proxies["w1"].ended("outbound", "far")
                shown = attributes(near_side)
                assert shown == {name: line[name] for name in line.keys() - {"level", "time", "scope", "message"}}
                assert attributes(far_side)["direction"] == "inbound"
                assert len(near_side.trace_id) == 16
                assert near_side.trace_id == far_side.trace_id

                def counted() -> list[object]:
                    return [
                        point
                        for metric in seen["w1"].families()
                        if metric.name == "istio_tcp_connections_closed_total"
                        for point in metric.sum.data_points
                        if attributes(point)["destination_workload"] == "far"
                    ]

                await eventually(counted, "the connection in the metrics")
                resource = attributes(seen["w1"].logs[0].resource_logs[0].resource)
                assert resource["service.name"] == "ztunnel"
                assert resource["k8s.node.name"] == "w1"
                assert mesh.proxies["w1"].metric("ztunnel_otlp_dropped_total", signal="logs") == 0

    asyncio.run(main())


def test_a_collector_that_is_away_changes_nothing_for_a_connection(tmp_path: Path) -> None:
    async def main() -> None:
        env = {**ENV, "OTEL_EXPORTER_OTLP_TIMEOUT": "100"}
        async with mesh_of(NODES, tmp_path, env=env) as mesh, app(mesh.lab.pod("far")):
            client, far = mesh.lab.pod("client"), mesh.lab.pod("far")
            proxy = mesh.proxies["w1"]
            for _ in range(5):
                assert await ask(client, far.ipv4, 8080) != b""
            await eventually(
                lambda: proxy.metric("ztunnel_otlp_dropped_total", signal="logs") == 5, "five lost lines"
            )

            def told() -> list[str]:
                return [
                    line["message"].split(" for ")[0] for line in proxy.log() if "are dropped" in line["message"]
                ]

            await eventually(
                lambda: sorted(told()) == ["otlp: access lines", "otlp: metrics"], "a line about each"
            )
            with collectors(mesh) as seen:
                assert await ask(client, far.ipv4, 8080) != b""
                await eventually(lambda: complete(seen["w1"]), "the sixth line")

    asyncio.run(main())
