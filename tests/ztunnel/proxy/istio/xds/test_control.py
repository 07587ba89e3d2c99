"""Resources from the embedded control plane over a Unix socket; and when the proxy counts as ready, or as
disconnected.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_S
from tests.ztunnel.proxy.istio.nodes import LOCAL
from xds.errors import ConfigError
from xds.model.mesh import Mesh
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DeltaDiscoveryResponse
from xds.protocol.resource import Update, UpdateRejected
from xds.protocol.types import method_path
from ztunnel.control_plane.server import ControlPlane as Server
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.xds import control as module
from ztunnel.proxy.istio.xds.control import ADDRESS, AUTHORIZATION, ControlPlane

MESH = """
nodes: {w1: {}, w2: {}}
pods:
  a: {node: w1, addresses: [10.0.0.1]}
  b: {node: w2, addresses: [10.0.0.2]}
"""


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def server(folder: Path) -> AsyncIterator[None]:
    (folder / "mesh.yaml").write_text(MESH)
    plane = Server(folder / "mesh.yaml", [f"unix:{folder}/xds"], folder / "ca")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(plane.run())
        await plane.ready.wait()
        yield
        running.cancel()


def client(folder: Path, env: Mapping[str, str] | None = None) -> tuple[ControlPlane, Mesh, Metrics]:
    given = {"XDS_ADDRESS": f"unix:{folder}/xds", "NODE_NAME": "w1", "ISTIO_META_DNS_CAPTURE": "false"}
    config = config_from({**given, **(env or {})}, cpus=1, read_file=lambda path: None)
    mesh, metrics = Mesh(node="w1"), Metrics("v", 100)
    return ControlPlane(config, mesh, metrics), mesh, metrics


def test_control_plane_is_ready_after_both_resource_types(tmp_path: Path) -> None:
    async def main() -> None:
        control, mesh, metrics = client(tmp_path)
        async with control:
            assert not control.ready.is_set()
            await until(lambda: metrics.xds_terminations().get("ConnectionError", 0) >= 2)
            assert control.staleness_s > 0
            async with server(tmp_path):
                async with asyncio.timeout(WAIT_S):
                    await control.ready.wait()
                assert control.staleness_s == 0
                assert {workload.name for workload in mesh.workloads()} == {"a", "b"}
                assert metrics.xds_messages == {ADDRESS: 1, AUTHORIZATION: 1}
                assert metrics.xds_bytes[ADDRESS] > 50
                assert metrics.xds_bytes[AUTHORIZATION] == 0
            await until(lambda: control.staleness_s > 0.1)
            assert control.ready.is_set()
            assert {workload.name for workload in mesh.workloads()} == {"a", "b"}
            ended = metrics.xds_terminations()
            assert set(ended) <= {"ConnectionError", "Error", "Reconnect", "Complete"}
            assert sum(ended.values()) >= 3

    asyncio.run(main())


def test_refused_answer_does_not_make_ready(tmp_path: Path) -> None:
    async def main() -> None:
        control, _, metrics = client(tmp_path)

        async def refuse(update: Update) -> None:
            raise UpdateRejected("no")

        async def take(update: Update) -> None:
            pass

        for type_url, receive in ((ADDRESS, take), (AUTHORIZATION, refuse)):
            with contextlib.suppress(UpdateRejected):
                await control._counted(type_url, receive)(Update(type_url=type_url, version="", resources=()))
        assert not control.ready.is_set()
        assert metrics.xds_messages == {ADDRESS: 1, AUTHORIZATION: 1}
        await control._counted(AUTHORIZATION, take)(Update(type_url=AUTHORIZATION, version="", resources=()))
        assert control.ready.is_set()

    asyncio.run(main())


def test_a_control_plane_that_refuses_every_stream_counts_as_away(tmp_path: Path) -> None:
    """As istiod does with an expired token: each attempt opens a stream and writes to it."""
    import grpc
    import grpc.aio

    began_s: list[float] = []

    async def stream(requests: Any, context: Any) -> Any:
        began_s.append(asyncio.get_running_loop().time())
        if len(began_s) > 1:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "token expired")
        for _ in range(2):
            request = await anext(requests)
            await context.write(DeltaDiscoveryResponse(type_url=request.type_url, nonce="1"))
        await ended.wait()

    async def main() -> None:
        service, _, method = method_path(None, delta=True)[1:].rpartition("/")
        handler = grpc.stream_stream_rpc_method_handler(
            stream,
            request_deserializer=DeltaDiscoveryRequest.FromString,
            response_serializer=DeltaDiscoveryResponse.SerializeToString,
        )
        refusing = grpc.aio.server()
        refusing.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        refusing.add_insecure_port(f"unix:{tmp_path}/xds")
        await refusing.start()
        control, _, metrics = client(tmp_path)
        try:
            async with control:
                async with asyncio.timeout(WAIT_S):
                    await control.ready.wait()
                assert control.staleness_s == 0
                ended.set()
                await until(lambda: metrics.xds_terminations().get("Error", 0) >= 4)
                refused_for_s = asyncio.get_running_loop().time() - began_s[1]
                assert control.staleness_s >= refused_for_s
        finally:
            await refusing.stop(None)

    ended = asyncio.Event()
    asyncio.run(main())


def test_on_demand_readiness_needs_only_policies(tmp_path: Path) -> None:
    async def main() -> None:
        control, mesh, _ = client(tmp_path, {"XDS_ON_DEMAND": "true"})
        assert control.on_demand
        async with server(tmp_path), control:
            async with asyncio.timeout(WAIT_S):
                await control.ready.wait()
            await control.ask("/10.0.0.2")
            assert mesh.workload_at("", "10.0.0.2") is not None
            for unknown in ("/192.0.2.1", "default/nobody.example.com", "Kubernetes//Pod/default/nobody"):
                await control.ask(unknown)
            assert mesh.workload_at("", "192.0.2.1") is None
            for again in ("/10.0.0.2", "/192.0.2.1"):
                await control.ask(again)

    asyncio.run(main())


def test_on_demand_request_outlives_a_cancelled_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.05)

    async def main() -> None:
        control, mesh, _ = client(tmp_path, {"XDS_ON_DEMAND": "true"})
        async with control:
            results = await asyncio.gather(*(control.ask("/10.0.0.2") for _ in range(3)), return_exceptions=True)
            assert [type(result) for result in results] == [TimeoutError] * 3
            async with server(tmp_path):
                await until(lambda: mesh.workload_at("", "10.0.0.2") is not None)

    asyncio.run(main())


def test_proxy_without_a_control_plane_is_ready_at_once(tmp_path: Path) -> None:
    workload = f"{{uid: {LOCAL.uid}, name: local, namespace: default, workloadIps: [127.0.0.1], services: {{}}}}"
    local = f"workloads: [{workload}]\npolicies: []\nservices: []\n"

    async def main() -> None:
        control, mesh, metrics = client(tmp_path, {"XDS_ADDRESS": "", "LOCAL_XDS": local})
        async with control:
            assert control.ready.is_set()
            assert not control.on_demand
            assert control.staleness_s == 0
            assert metrics.xds_terminations() == {}
            assert mesh.workload_at("", "127.0.0.1") is not None

    asyncio.run(main())


def test_unusable_local_file_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        control, _, _ = client(tmp_path, {"XDS_ADDRESS": "", "LOCAL_XDS_PATH": str(tmp_path / "nothing.yaml")})
        with pytest.raises(ConfigError, match=r"nothing\.yaml"):
            async with control:
                pass

    asyncio.run(main())
