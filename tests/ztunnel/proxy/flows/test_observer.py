"""Hubble's gRPC service, called by grpcio; the real programs are in tests/ztunnel/ask/flows/test_hubble.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from tests.hbone.certificates import Authority
from tests.limits import WAIT_S
from tests.ztunnel.proxy.envoy.harness import run
from tests.ztunnel.proxy.flows import hubble_ui
from tests.ztunnel.proxy.flows.observers import fill, secret, serving
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.path.test_route import CLIENT
from xds.model.workload import Workload, WorkloadUid
from xds.proto.hubble.flow.flow_pb2 import DROPPED, ERROR, FORWARDED, FlowFilter
from xds.proto.hubble.health.health_pb2 import HealthCheckResponse
from xds.proto.hubble.observer.observer_pb2 import (
    GetFlowsRequest,
    GetFlowsResponse,
    GetNamespacesResponse,
    GetNodesResponse,
    ServerStatusResponse,
)
from xds.proto.hubble.peer.peer_pb2 import PEER_ADDED, PEER_DELETED, PEER_UPDATED, ChangeNotification
from ztunnel.proxy.flows import observer as module
from ztunnel.proxy.flows.hubble import BY_ITSELF
from ztunnel.proxy.flows.observer import MOST_CALLS, Observer
from ztunnel.proxy.flows.page import OtherFlows, lines
from ztunnel.proxy.flows.settings import HubbleSettings, Peer, hubble_settings
from ztunnel.proxy.istio.accounting.flows import peers_in, ring_of, shape
from ztunnel.proxy.istio.settings.config import IstioConfig

FLOWS = "/observer.Observer/GetFlows"
MessageT = TypeVar("MessageT", bound=Message)
#: Of the descriptor pool of the messages above, not of protobuf's default pool.
Timestamp = type(GetFlowsRequest().since)


class Client:
    """A client of a channel; messages of calls that have only an answer are empty."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def ask(self, method: str, kind: type[MessageT]) -> MessageT:
        return kind.FromString(await self._channel.unary_unary(method)(b""))

    def stream(self, request: GetFlowsRequest) -> Any:
        return self._channel.unary_stream(FLOWS)(request.SerializeToString())

    async def flows(self, **request: Any) -> list[GetFlowsResponse]:
        return [GetFlowsResponse.FromString(each) async for each in self.stream(GetFlowsRequest(**request))]

    async def verdicts(self, **request: Any) -> list[int]:
        return [each.flow.verdict for each in await self.flows(**request)]

    def notified(self) -> Any:
        return self._channel.unary_stream("/peer.Peer/Notify")(b"")


@asynccontextmanager
async def plain(observer: Observer) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(observer.address) as channel:
        yield Client(channel)


def asked(
    tmp_path: Path,
    body: Callable[[Client, Harness], Awaitable[None]],
    env: dict[str, str] | None = None,
    **more: Any,
) -> None:
    """Run ``body`` with a client of a proxy that has three flows."""

    async def check(harness: Harness) -> None:
        fill(harness)
        async with (
            serving(harness, HubbleSettings(address=f"unix:{tmp_path}/hubble.sock", **more)) as observer,
            plain(observer) as client,
        ):
            await body(client, harness)

    served(check, env)


def test_server_status_and_nodes_describe_this_node(tmp_path: Path) -> None:
    async def body(client: Client, harness: Harness) -> None:
        status = await client.ask("/observer.Observer/ServerStatus", ServerStatusResponse)
        assert (status.num_flows, status.seen_flows, status.max_flows) == (3, 3, 4096)
        assert status.num_connected_nodes.value == 1
        assert status.HasField("num_unavailable_nodes")
        assert status.flows_rate == 3 / 60
        (node,) = (await client.ask("/observer.Observer/GetNodes", GetNodesResponse)).nodes
        assert (node.name, node.num_flows, node.tls.enabled) == ("c1/n1", 3, False)
        found = await client.ask("/observer.Observer/GetNamespaces", GetNamespacesResponse)
        assert [each.namespace for each in found.namespaces] == ["shop"]
        health = await client.ask("/grpc.health.v1.Health/Check", HealthCheckResponse)
        assert health.status == HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.ask("/observer.Observer/GetAgentEvents", HealthCheckResponse)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asked(tmp_path, body)


def test_get_flows_selects_by_time_and_number(tmp_path: Path) -> None:
    async def body(client: Client, harness: Harness) -> None:
        every = await client.flows()
        assert [each.flow.verdict for each in every] == [FORWARDED, DROPPED, ERROR]
        assert every[0].flow.extensions.type_url.endswith("google.protobuf.Struct")
        assert every[0].node_name == every[0].flow.node_name
        second = every[1].time
        assert await client.verdicts(number=2) == [DROPPED, ERROR]
        assert await client.verdicts(number=2, first=True) == [FORWARDED, DROPPED]
        assert await client.verdicts(since=second) == [DROPPED, ERROR]
        assert await client.verdicts(since=second, number=1) == [DROPPED]
        assert await client.verdicts(until=second) == [FORWARDED, DROPPED]
        assert await client.verdicts(number=1, whitelist=[FlowFilter(verdict=[DROPPED])]) == [DROPPED]
        assert await client.verdicts(blacklist=[FlowFilter(verdict=[DROPPED])]) == [FORWARDED, ERROR]
        one = GetFlowsRequest()
        one.field_mask.paths.extend(("time", "ethernet", "of_a_later_version"))
        assert len([each async for each in client.stream(one)]) == 3

    asked(tmp_path, body)


def test_newest_matching_flows_are_found_among_many_others(tmp_path: Path) -> None:
    async def body(client: Client, harness: Harness) -> None:
        for _ in range(40):
            fill(harness)
        wanted = [FlowFilter(verdict=[DROPPED])]
        assert await client.verdicts(number=30, whitelist=wanted) == [DROPPED] * 30
        assert await client.verdicts(number=2**64 - 1, whitelist=wanted) == [DROPPED] * 41
        times = [each.time.ToNanoseconds() for each in await client.flows(number=100)]
        assert len(times) == 100
        assert times == sorted(times)

    asked(tmp_path, body)


def with_bytes(*data: int) -> FlowFilter:
    return FlowFilter.FromString(bytes(data))


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"first": True, "follow": True}, "exclude each other"),
        ({"since": Timestamp(seconds=1 << 62)}, "since"),
        ({"until": Timestamp(nanos=-1)}, "until"),
        ({"whitelist": [with_bytes(0x4A, 1, 0x61)]}, "http_status_code is not supported"),
        ({"blacklist": [with_bytes(0xBA, 0x3E, 0)]}, "cel_expression is not supported"),
        ({"whitelist": [with_bytes(0xFA, 0x7F, 0)]}, "number 2047 is not supported"),
        ({"whitelist": [FlowFilter(source_ip=["10.0.0"])]}, "source_ip"),
        ({"whitelist": [FlowFilter(source_label=["a=("])]}, "not a label selector"),
        ({"whitelist": [FlowFilter(protocol=["tls"])]}, "not a protocol"),
        ({"whitelist": [FlowFilter(source_port=["http"])]}, "not a port"),
    ],
)
def test_unsupported_request_field_is_refused_by_name(tmp_path: Path, request_: dict[str, Any], text: str) -> None:
    async def body(client: Client, harness: Harness) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.flows(**request_)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in str(error.value.details())

    asked(tmp_path, body)


def test_following_call_gets_new_flows_and_lost_events(tmp_path: Path) -> None:
    async def body(client: Client, harness: Harness) -> None:
        call = client.stream(GetFlowsRequest(follow=True, whitelist=[FlowFilter(verdict=[ERROR])]))
        old = client.stream(GetFlowsRequest(follow=True, number=1))
        first = GetFlowsResponse.FromString(await old.read())
        assert first.flow.verdict == ERROR
        await asyncio.sleep(0.1)
        fill(harness)
        assert GetFlowsResponse.FromString(await call.read()).flow.verdict == ERROR
        assert GetFlowsResponse.FromString(await old.read()).flow.verdict == FORWARDED
        for _ in range(3):
            fill(harness)
        assert GetFlowsResponse.FromString(await call.read()).lost_events.num_events_lost == 1
        for each in (call, old):
            each.cancel()

    asked(tmp_path, body, {"ZTUNNEL_FLOWS": "4"})


class SlowContext:
    """A call whose client reads its first message only after more connections have ended."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.got: list[GetFlowsResponse] = []
        self._meanwhile = meanwhile

    async def write(self, message: bytes) -> None:
        self.got.append(GetFlowsResponse.FromString(message))
        if len(self.got) == 1:
            self._meanwhile()


def test_flows_overwritten_while_a_following_client_reads_are_reported_as_lost() -> None:
    ring = ring_of(4)

    def end_connections(first: int, last: int) -> None:
        for port in range(first, last + 1):
            ends = (("10.0.0.1", port), ("10.0.0.2", 81))
            ring.add(time.time() + 60, 0.1, 0.1, (0, 0), ends, b"", 0, (*[None] * 7, "", BY_ITSELF, ""))

    async def body() -> None:
        context: Any = SlowContext(lambda: end_connections(5, 7))
        make = shape(IstioConfig(node="n1"))
        settings = HubbleSettings(address="unix:/nowhere")
        observer = Observer(ring, make, None, node="c1/n1", settings=settings)
        message = GetFlowsRequest(follow=True).SerializeToString()
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            call = tasks.create_task(observer._get_flows(message, context))
            await asyncio.sleep(0)
            end_connections(1, 4)
            while not context.got or context.got[-1].flow.l4.TCP.source_port != 7:
                await asyncio.sleep(0.01)
            call.cancel()
        seen = [each.lost_events.num_events_lost or -each.flow.l4.TCP.source_port for each in context.got]
        assert seen == [-1, 2, -4, -5, -6, -7]

    asyncio.run(body())


def test_following_call_misses_no_flow_that_a_worker_writes_after_its_answer(tmp_path: Path) -> None:
    async def check(harness: Harness) -> None:
        worker = ring_of(16)
        make = shape(harness.proxy.config)

        async def of_worker(after_ns: int, last: int) -> OtherFlows:
            found = OtherFlows(list(lines(worker, make, after_ns, last)))
            if not worker.total:  # a connection of the worker ends after its answer, then one of this process
                ends = (("10.0.0.1", 4000), ("10.0.0.2", 81))
                worker.add(time.time(), 0.1, 0.1, (0, 0), ends, b"", 0, (*[None] * 7, "", BY_ITSELF, ""))
                fill(harness)
            return found

        settings = HubbleSettings(address=f"unix:{tmp_path}/hubble.sock")
        async with serving(harness, settings, more=of_worker) as observer, plain(observer) as client:
            call = client.stream(GetFlowsRequest(follow=True))
            got = [GetFlowsResponse.FromString(await call.read()) for _ in range(4)]
            assert got[0].flow.l4.TCP.destination_port == 81
            call.cancel()

    served(check)


def test_flows_and_losses_of_workers_are_counted(tmp_path: Path) -> None:
    async def check(harness: Harness) -> None:
        worker = ring_of(2)
        make = shape(harness.proxy.config)
        ends = (("10.0.0.1", 4000), ("10.0.0.2", 81))

        async def of_worker(after_ns: int, last: int) -> OtherFlows:
            return OtherFlows(list(lines(worker, make, after_ns, last)), worker.counts(after_ns))

        def end_connections() -> None:
            for _ in range(3):
                worker.add(time.time(), 0.1, 0.1, (0, 0), ends, b"", 0, (*[None] * 7, "", BY_ITSELF, ""))

        settings = HubbleSettings(address=f"unix:{tmp_path}/hubble.sock")
        async with serving(harness, settings, more=of_worker) as observer, plain(observer) as client:
            end_connections()
            status = await client.ask("/observer.Observer/ServerStatus", ServerStatusResponse)
            assert (status.num_flows, status.seen_flows, status.max_flows) == (2, 3, 4098)
            assert status.flows_rate == 2 / 60
            (node,) = (await client.ask("/observer.Observer/GetNodes", GetNodesResponse)).nodes
            assert (node.num_flows, node.seen_flows) == (2, 3)
            call = client.stream(GetFlowsRequest(follow=True, number=1))
            assert GetFlowsResponse.FromString(await call.read()).HasField("flow")
            end_connections()
            assert GetFlowsResponse.FromString(await call.read()).lost_events.num_events_lost == 1
            call.cancel()

    served(check)


def test_calls_for_flows_are_bounded(tmp_path: Path) -> None:
    async def body(client: Client, harness: Harness) -> None:
        calls = [client.stream(GetFlowsRequest(follow=True, number=1)) for _ in range(MOST_CALLS)]
        for each in calls:
            await each.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.flows()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in calls:
            each.cancel()
        while True:
            await asyncio.sleep(0.02)
            try:
                assert len(await client.flows()) == 3
                return
            except grpc.aio.AioRpcError:
                continue

    asked(tmp_path, body)


def test_relay_is_notified_of_this_node_and_configured_peers(tmp_path: Path) -> None:
    async def body(client: Client, harness: Harness) -> None:
        call = client.notified()
        found = [ChangeNotification.FromString(await call.read()) for _ in range(2)]
        assert [(each.name, each.type, each.HasField("tls")) for each in found] == [
            ("c1/n1", PEER_ADDED, False),
            ("c1/n2", PEER_ADDED, False),
        ]
        assert found[1].address == "10.0.0.2:4244"
        await asyncio.sleep(0.1)
        assert not call.done()
        call.cancel()

    asked(tmp_path, body, peers=(Peer(name="c1/n2", address="10.0.0.2:4244"),))


def test_peers_of_an_istio_mesh_are_the_proxies_of_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PEERS_S", 0.05)

    def proxy(node: str, host: str, name: str = "ztunnel") -> Workload:
        uid = WorkloadUid(f"c1//Pod/istio-system/{name}-{node}")
        found = replace(CLIENT, uid=uid, name=f"{name}-{node}", namespace="istio-system", workload_name=name)
        return replace(found, node=node, cluster_id="c1", addresses=(host,))

    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply([proxy("n1", "10.0.0.1"), proxy("n2", "::2"), proxy("n2", "10.0.0.9", "istiod")])
        elsewhere = replace(proxy("n3", "10.0.0.1"), uid=WorkloadUid("c2//Pod/istio-system/ztunnel-n3"))
        harness.proxy.mesh.apply([replace(elsewhere, cluster_id="c2", network="other")])
        settings = HubbleSettings(address="0.0.0.0:4244")
        found = list(peers_in(harness.proxy.mesh, harness.proxy.config, settings.port))
        assert sorted((each.name, each.address) for each in found) == [
            ("c1/n1", "10.0.0.1:4244"),
            ("c1/n2", "[::2]:4244"),
        ]
        for address in ("unix:/x", "127.0.0.1:4244"):  # which other nodes cannot reach
            settings = HubbleSettings(address=address)
            assert list(peers_in(harness.proxy.mesh, harness.proxy.config, settings.port)) == []
        peers = {"n": Peer(name="c1/n2", address="a:1")}
        served_here = HubbleSettings(address=f"unix:{tmp_path}/s")
        async with (
            serving(harness, served_here, found=lambda: tuple(peers.values())) as observer,
            plain(observer) as client,
        ):
            call = client.notified()
            changes = [ChangeNotification.FromString(await call.read()) for _ in range(2)]
            peers["n"] = Peer(name="c1/n2", address="b:1")
            changes.append(ChangeNotification.FromString(await call.read()))
            peers.clear()
            changes.append(ChangeNotification.FromString(await call.read()))
            call.cancel()
        configured = (Peer(name="c1/n2", address="c:1"),)
        peers["n"] = Peer(name="c1/n2", address="b:1")
        async with (
            serving(
                harness, replace(served_here, peers=configured), found=lambda: tuple(peers.values())
            ) as observer,
            plain(observer) as client,
        ):
            call = client.notified()
            told = [ChangeNotification.FromString(await call.read()) for _ in range(2)]
            assert told[1].address == "c:1", "a configured peer replaces the discovered one"
            call.cancel()
        assert [each.type for each in changes] == [PEER_ADDED, PEER_ADDED, PEER_UPDATED, PEER_DELETED]

    served(check, {"POD_NAME": "ztunnel-n1", "POD_NAMESPACE": "istio-system"})


def test_hubble_over_tcp_needs_client_certificates_and_reloads_rotated_files(tmp_path: Path) -> None:
    root, other = Authority(), Authority("other")
    name = Peer(name="c1/n1", address="x").server_name

    def channel(observer: Observer, folder: Path, trusted: Authority) -> grpc.aio.Channel:
        key, chain = ((folder / each).read_bytes() for each in ("tls.key", "tls.crt"))
        credentials = grpc.ssl_channel_credentials(trusted.pem, key, chain)
        options = (("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1))
        return grpc.aio.secure_channel(observer.address, credentials, options)

    async def health(observer: Observer, folder: Path, trusted: Authority) -> int:
        async with channel(observer, folder, trusted) as opened:
            return (await Client(opened).ask("/grpc.health.v1.Health/Check", HealthCheckResponse)).status

    async def check(harness: Harness) -> None:
        folder, client = secret(tmp_path / "s", root, name), secret(tmp_path / "c", root, "client")
        stranger = secret(tmp_path / "x", other, "client")
        settings = HubbleSettings(address="127.0.0.1:0", tls=str(folder))
        async with serving(harness, settings) as observer:
            assert await health(observer, client, root) == HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError):
                await health(observer, stranger, root)
            secret(folder, other, name)
            assert await health(observer, stranger, other) == HealthCheckResponse.SERVING

    served(check)


async def reached(proxy: Any, path: Path) -> None:
    """Check that a proxy that is told to serve its flows on a path does."""
    task = asyncio.ensure_future(proxy._hubble(HubbleSettings(address=f"unix:{path}"))())  # noqa: TID251
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            await channel.channel_ready()
            status = await Client(channel).ask("/observer.Observer/ServerStatus", ServerStatusResponse)
            assert status.max_flows == 4096
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_a_proxy_of_an_istio_mesh_serves_its_flows(tmp_path: Path) -> None:
    served(lambda harness: reached(harness.proxy, tmp_path / "hubble.sock"))


def test_a_proxy_of_envoys_dialect_serves_its_flows(tmp_path: Path) -> None:
    run(tmp_path, lambda harness: reached(harness.proxy, tmp_path / "hubble.sock"))


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        ({"ZTUNNEL_HUBBLE": "0.0.0.0:4244"}, "need ZTUNNEL_HUBBLE_TLS"),
        ({"ZTUNNEL_HUBBLE": "unix:hubble.sock"}, "absolute path"),
        ({"ZTUNNEL_HUBBLE": "4244"}, "neither host:port"),
        ({"ZTUNNEL_HUBBLE_TLS": "/tls"}, "needs ZTUNNEL_HUBBLE"),
        ({"ZTUNNEL_HUBBLE": "[::1]:4244", "ZTUNNEL_HUBBLE_PEERS": "n2=10.0.0.2:4244"}, "CLUSTER/NODE"),
        ({"ZTUNNEL_HUBBLE": "localhost:4244", "ZTUNNEL_HUBBLE_PEERS": "c/n2=10.0.0.2"}, "host:port"),
    ],
)
def test_invalid_hubble_settings_are_named(env: dict[str, str], fault: str) -> None:
    _, faults = hubble_settings(env)
    assert len(faults) == 1
    assert fault in faults[0]


def test_hubble_settings_are_parsed() -> None:
    assert hubble_settings({}) == (None, [])
    env = {
        "ZTUNNEL_HUBBLE": "0.0.0.0:4244",
        "ZTUNNEL_HUBBLE_TLS": "/tls",
        "ZTUNNEL_HUBBLE_PEERS": "c.1/n.2=10.0.0.2:4244, c.1/n3=[::2]:4244",
    }
    found, faults = hubble_settings(env)
    assert (found is not None, faults) == (True, [])
    assert found is not None
    assert [each.address for each in found.peers] == ["10.0.0.2:4244", "[::2]:4244"]
    assert found.peers[0].server_name == "n-2.c-1.hubble-grpc.cilium.io"


def test_page_of_hubble_ui_shows_the_flows_of_a_namespace(tmp_path: Path) -> None:
    async def body(client: Client, harness: Harness) -> None:
        call = client.stream(hubble_ui.request("shop"))
        shown = [hubble_ui.flow_of(GetFlowsResponse.FromString(await call.read())) for _ in range(2)]
        assert hubble_ui.check(shown) == {("client", "back", 8080)}
        fill(harness)
        shown += [hubble_ui.flow_of(GetFlowsResponse.FromString(await call.read())) for _ in range(2)]
        hubble_ui.check(shown)
        call.cancel()
        every = [hubble_ui.flow_of(each) for each in await client.flows()]
        assert ("world", "world", 443) in hubble_ui.check(every)  # plain, from and to the outside

    asked(tmp_path, body)
