"""Resources and local files are applied to the mesh, or refused with a reason."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from xds.aio.client import AdsClient
from xds.aio.grpc_server import new_server
from xds.errors import ConfigError
from xds.model.mesh import Changes, Mesh
from xds.proto import registry
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DeltaDiscoveryResponse
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import Resource as WireResource
from xds.proto.istio.security import authorization_pb2 as security
from xds.proto.istio.workload import workload_pb2 as wds
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.backoff import DoublingBackoff, StreamEnd
from xds.protocol.client_state import ISTIO
from xds.protocol.resource import Resource, Update, UpdateRejected
from xds.protocol.types import ADDRESS, AUTHORIZATION, method_path
from ztunnel.proxy.istio.xds.mesh_feed import LocalFile, MeshFeed

LIMIT_S = 20.0


def packed(message: Any) -> AnyMessage:
    return registry.pack(message)


def workload(uid: str, *hosts: bytes, **more: Any) -> Resource:
    message = wds.Address(workload=wds.Workload(uid=uid, namespace="shop", addresses=hosts, **more))
    return Resource(name=uid, version="1", body=packed(message))


def service(hostname: str, **more: Any) -> Resource:
    message = wds.Address(service=wds.Service(name=hostname, namespace="shop", hostname=hostname, **more))
    return Resource(name=f"shop/{hostname}", version="1", body=packed(message))


def policy(name: str, **more: Any) -> Resource:
    message = security.Authorization(name=name, namespace="shop", **more)
    return Resource(name=f"shop/{name}", version="", body=packed(message))


def addresses(*resources: Resource, removed: tuple[str, ...] = ()) -> Update:
    return Update(type_url=ADDRESS, version="", resources=resources, removed=removed)


def policies(*resources: Resource, removed: tuple[str, ...] = ()) -> Update:
    return Update(type_url=AUTHORIZATION, version="", resources=resources, removed=removed)


def run(main: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main

    asyncio.run(limited())


def test_a_response_is_one_batch() -> None:
    mesh, heard = Mesh(), list[Changes]()
    mesh.watch(heard.append)
    feed = MeshFeed(mesh)
    run(feed.receive_addresses(addresses(workload("a"), service("x"))))
    run(feed.receive_addresses(addresses(workload("b"), removed=("a", "shop/x", "unknown", "un/known/name"))))
    assert len(heard) == 2
    assert [value.uid for value in mesh.workloads()] == ["b"]
    assert list(mesh.services()) == []


def test_bad_resource_is_refused_alone() -> None:
    mesh = Mesh()
    empty = Resource(name="empty", version="1", body=AnyMessage())
    broken = Resource(name="broken", version="1", body=AnyMessage(type_url=ADDRESS, value=b"\xff"))
    nothing = Resource(name="nothing", version="1", body=packed(wds.Address()))
    with pytest.raises(UpdateRejected) as rejected:
        run(
            MeshFeed(mesh).receive_addresses(
                addresses(workload("short", b"abc"), workload("a"), empty, broken, nothing, service("x"))
            )
        )
    reasons = str(rejected.value).split("; ")
    assert reasons[0] == "short: failed to parse address, had 3 bytes"
    assert reasons[1] == "empty: XDS payload without resource"
    assert reasons[2].startswith("broken: decode: failed to decode Protobuf message")
    assert reasons[3] == "nothing: unknown address type"
    assert set(rejected.value.rejected or ()) == {"short", "empty", "broken", "nothing"}
    assert [value.uid for value in mesh.workloads()] == ["a"]
    assert mesh.service("shop/x") is not None


def test_a_refused_resource_leaves_its_predecessor() -> None:
    mesh = Mesh()
    feed = MeshFeed(mesh)
    run(feed.receive_addresses(addresses(workload("a", bytes([10, 0, 0, 1])))))
    with pytest.raises(UpdateRejected):
        run(feed.receive_addresses(addresses(workload("a", b"abc"))))
    assert mesh.workload_at("", "10.0.0.1") is not None


def test_the_addresses_of_a_refused_resource_without_an_earlier_version_are_known_as_refused() -> None:
    mesh = Mesh()
    feed = MeshFeed(mesh)
    host, vip, block = bytes([10, 0, 0, 1]), bytes([10, 1, 0, 1]), bytes([10, 2, 0, 0])
    pod = workload("a", host, b"abc", bytes([10, 0, 0, 2]), network="west", tunnel_protocol=9)
    node = workload("b", bytes([10, 9, 0, 1]), network_mode=wds.HOST_NETWORK, tunnel_protocol=9)
    cart = service(
        "x",
        addresses=[{"address": vip}, {"address": vip, "length": 99}, {"address": block, "length": 16}],
        ip_families=9,
    )
    with pytest.raises(UpdateRejected):
        run(feed.receive_addresses(addresses(pod, node, cart)))
    assert sorted(each.name for each in mesh.refused_resources()) == ["a", "shop/x"]
    for network, address, name in (
        ("west", "10.0.0.1", "a"),
        ("west", "10.0.0.2", "a"),
        ("", "10.1.0.1", "shop/x"),
        ("", "10.2.3.4", "shop/x"),
    ):
        found = mesh.refused_at(network, address)
        assert found is not None
        assert found.name == name
    assert mesh.refused_at("", "10.0.0.1") is mesh.refused_at("", "10.9.0.1") is None
    run(feed.receive_addresses(addresses(workload("a", host, network="west"), removed=("shop/x",))))
    assert list(mesh.refused_resources()) == []


def test_a_big_response_with_a_refused_resource_marks_its_addresses() -> None:
    mesh = Mesh()
    feed = MeshFeed(mesh)
    run(feed.receive_addresses(addresses(workload("old", bytes([10, 0, 0, 1])))))
    refused = workload("new", bytes([10, 0, 0, 1]), tunnel_protocol=9)
    others = [workload(f"w{number}") for number in range(100)]
    with pytest.raises(UpdateRejected):
        run(feed.receive_addresses(addresses(*others, refused, removed=("old", "new"))))
    assert mesh.refused_at("", "10.0.0.1") is not None


def test_policies_are_added_and_removed_and_their_faults_logged(caplog: pytest.LogCaptureFixture) -> None:
    mesh = Mesh()
    feed = MeshFeed(mesh)
    run(feed.receive_authorizations(policies(policy("p"), policy("q", action=7))))
    assert {value.key for value in mesh.policies()} == {"shop/p", "shop/q"}
    assert "policy=shop/q faults=action: unknown enumeration value 7" in caplog.text
    run(feed.receive_authorizations(policies(removed=("shop/p",))))
    assert {value.key for value in mesh.policies()} == {"shop/q"}
    with pytest.raises(UpdateRejected, match="bad: a policy needs a name"):
        run(
            feed.receive_authorizations(
                policies(Resource(name="bad", version="", body=packed(security.Authorization())))
            )
        )


def test_big_response_yields_to_the_event_loop() -> None:
    async def main() -> None:
        mesh = Mesh()
        feed = MeshFeed(mesh)
        turns = 0
        ended = False

        async def count() -> None:
            nonlocal turns
            while not ended:
                turns += 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(count())
            await feed.receive_addresses(
                addresses(*(workload(f"w{number}") for number in range(2000)), service("x"))
            )
            await feed.receive_addresses(addresses(removed=tuple(f"w{number}" for number in range(1000))))
            ended = True
        assert turns > 15
        assert len(list(mesh.workloads())) == 1000

    run(main())


@pytest.mark.parametrize("count", [10, 200], ids=["small", "big"])
def test_address_that_changes_its_workload_is_never_unknown(count: int) -> None:
    """Connections to an unknown address are passed through as plain text."""

    async def main() -> None:
        mesh = Mesh()
        feed = MeshFeed(mesh)
        hosts = [f"10.0.0.{number}" for number in range(count)]

        def pods(name: str) -> list[Resource]:
            return [workload(f"{name}{number}", bytes((10, 0, 0, number))) for number in range(count)]

        await feed.receive_addresses(addresses(*pods("old"), service("x")))
        unknown: list[str] = []
        mesh.watch(lambda _: unknown.extend(host for host in hosts if mesh.workload_at("", host) is None))
        gone = tuple(f"old{number}" for number in range(count))
        await feed.receive_addresses(addresses(*pods("new"), service("x"), removed=(*gone, "shop/x")))
        assert unknown == []
        assert {each.uid for each in mesh.workloads()} == {f"new{number}" for number in range(count)}
        assert mesh.service("shop/x") is not None, "removed and added in one response"

    run(main())


# The local file

ONE = "workloads: [{uid: a, namespace: n, workloadIps: [10.0.0.1], services: {n/h: {80: 80}}}]\n"
SERVICE = "services: [{name: h, namespace: n, hostname: h, vips: [], ports: {80: 80}}]\n"
POLICY = "policies: [{name: p, namespace: n, scope: Namespace, action: Deny, dryRun: false, rules: []}]\n"


def save(path: Path, text: str) -> None:
    """Save a file the way editors do."""
    path.with_suffix(".new").write_text(text)
    os.rename(path.with_suffix(".new"), path)


def test_a_changed_file_is_applied_as_its_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(ONE + SERVICE + POLICY)
    caplog.set_level(logging.INFO, logger="ztunnel.proxy.istio.xds.mesh_feed")

    async def main() -> None:
        mesh = Mesh()
        changes: asyncio.Queue[Changes] = asyncio.Queue()
        feed = MeshFeed(mesh)
        await feed.receive_addresses(addresses(workload("from xds")))
        async with LocalFile(str(path), feed):
            assert list(mesh.endpoints("n/h")) == ["a"]
            stop = mesh.watch(changes.put_nowait)
            save(path, SERVICE + ONE.replace("10.0.0.1", "10.0.0.2"))
            change = await changes.get()
            assert (change.workloads, change.services, change.policies) == ({"a"}, set(), {"n/p"})
            assert mesh.workload_at("", "10.0.0.2") is not None
            save(path, ONE + "stray: 1")
            while "refused" not in caplog.text:
                await asyncio.sleep(0.01)
            assert "stray: unknown key" in caplog.text
            assert mesh.service("n/h") is not None
            path.unlink()
            save(path, "")
            await changes.get()
            stop()
            assert [value.uid for value in mesh.workloads()] == ["from xds"]
            assert list(mesh.services()) == []

    run(main())


@pytest.mark.parametrize("text", [None, "stray: 1", b"\xff"])
def test_at_the_start_a_faulty_file_is_an_error(tmp_path: Path, text: str | bytes | None) -> None:
    path = tmp_path / "mesh.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    async def main() -> None:
        async with LocalFile(str(path), MeshFeed(Mesh())):
            pytest.fail("must not start")

    with pytest.raises(ConfigError):
        run(main())


# Over a real stream


class ControlPlane:
    """A scripted control plane, with its received requests."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[DeltaDiscoveryRequest] = asyncio.Queue()
        self.responses: asyncio.Queue[DeltaDiscoveryResponse | None] = asyncio.Queue()
        self.address = ""

    async def __aenter__(self) -> "ControlPlane":
        import grpc
        import grpc.aio

        async def stream(requests: Any, context: Any) -> Any:
            async def read() -> None:
                async for request in requests:
                    self.requests.put_nowait(request)

            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(read())
                while (response := await self.responses.get()) is not None:
                    await context.write(response)
                reading.cancel()

        service_name, _, method = method_path(None, delta=True)[1:].rpartition("/")
        handler = grpc.stream_stream_rpc_method_handler(
            stream,
            request_deserializer=DeltaDiscoveryRequest.FromString,
            response_serializer=DeltaDiscoveryResponse.SerializeToString,
        )
        self._server = new_server()
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service_name, {method: handler}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        server = self._server
        del self._server  # its handlers hold us: see SnapshotServer.__aexit__
        await server.stop(None)

    def say(
        self, nonce: str, *resources: Resource, type_url: str = ADDRESS, removed: tuple[str, ...] = ()
    ) -> None:
        self.responses.put_nowait(
            DeltaDiscoveryResponse(
                type_url=type_url,
                nonce=nonce,
                resources=[WireResource(name=r.name, version=r.version, resource=r.body) for r in resources],
                removed_resources=removed,
            )
        )


def test_metadata_that_cannot_be_read_is_tried_again() -> None:
    async def main() -> None:
        errors: list[Exception] = [OSError("no token"), ConfigError("empty token")]

        def metadata() -> tuple[tuple[str, str], ...]:
            if errors:
                raise errors.pop(0)
            return (("authorization", "Bearer x"),)

        async with ControlPlane() as control:
            ads = AdsClient(
                control.address,
                Node(id="n"),
                delta=True,
                dialect=ISTIO,
                metadata=metadata,
                backoff=DoublingBackoff(),
            )
            async with ads:
                ads.subscribe(ADDRESS, None, MeshFeed(Mesh()).receive_addresses)
                assert (await control.requests.get()).type_url == ADDRESS
                assert ads.stats.ended[StreamEnd.CONNECTION_ERROR] == 2

    run(main())


@pytest.mark.parametrize("big", [False, True], ids=["at once", "in steps"])
def test_a_session_with_a_control_plane(big: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if big:
        monkeypatch.setattr("xds.aio.client._BIG_BYTES", 0)

    async def main() -> None:
        mesh = Mesh()
        feed = MeshFeed(mesh)
        node = Node(id="ztunnel~1.1.1.1~a.b~b.svc.cluster.local")
        async with ControlPlane() as control:
            ads = AdsClient(control.address, node, delta=True, dialect=ISTIO, backoff=DoublingBackoff())
            async with ads:
                ads.subscribe(ADDRESS, None, feed.receive_addresses)
                ads.subscribe(AUTHORIZATION, None, feed.receive_authorizations)
                for type_url in (ADDRESS, AUTHORIZATION):
                    assert await control.requests.get() == DeltaDiscoveryRequest(type_url=type_url, node=node)
                control.say("1", workload("a"), workload("bad", b"abc"))
                nack = await control.requests.get()
                assert nack == DeltaDiscoveryRequest(
                    type_url=ADDRESS,
                    response_nonce="1",
                    error_detail={"message": "bad: failed to parse address, had 3 bytes"},
                )
                assert nack.error_detail.code == 0
                control.say("2", workload("b"), removed=("gone",))
                assert await control.requests.get() == DeltaDiscoveryRequest(type_url=ADDRESS, response_nonce="2")
                control.say("3", policy("p"), type_url=AUTHORIZATION)
                assert (await control.requests.get()).response_nonce == "3"
                control.responses.put_nowait(None)
                first, second = await control.requests.get(), await control.requests.get()
                assert dict(first.initial_resource_versions) == {"a": "1", "b": "1", "bad": ""}
                assert dict(second.initial_resource_versions) == {"shop/p": ""}
                assert first.node == second.node == node
                assert not first.resource_names_subscribe  # the wildcard of old again
                assert ads.stats.ended[StreamEnd.COMPLETE] == 1
                assert {value.uid for value in mesh.workloads()} == {"a", "b"}
                assert set(feed.refused_addresses) == {"bad"}
                control.say("1", removed=("bad",))
                assert (await control.requests.get()).response_nonce == "1"
                assert feed.refused_addresses == {}, "removed while there was no stream"

    run(main())


def test_update_is_one_change_of_the_mesh() -> None:
    """Between the removal of an ALLOW policy and its successor, all that it allows would be denied."""
    mesh = Mesh()
    feed = MeshFeed(mesh)
    run(feed.receive_authorizations(policies(policy("old"))))
    seen: list[Changes] = []
    mesh.watch(seen.append)
    run(feed.receive_authorizations(policies(policy("new"), removed=("shop/old",))))
    (change,) = seen
    assert change.policies == {"shop/old", "shop/new"}
