"""The gRPC client against the embedded server over real sockets, on both event loops and in both variants."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import uvloop
from google.protobuf.message import Message

from tests.ports import free_port
from xds.aio.client import AdsClient, PerTypeClient, connect_to
from xds.aio.server import SnapshotServer
from xds.grpc.serve_error import ServeError
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import Secret
from xds.protocol.backoff import JitteredBackoff
from xds.protocol.resource import Update, UpdateRejected
from xds.protocol.snapshot import Answered, Snapshot
from xds.protocol.types import CDS, EDS, LDS, SDS

NODE = Node(id="node-1")
LIMIT_S = 20.0


class Receiver:
    """Collects updates; may refuse or hold them."""

    def __init__(self) -> None:
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self.refuse = ""
        self.hold: asyncio.Event | None = None

    async def __call__(self, update: Update) -> None:
        self.updates.put_nowait(update)
        if self.hold is not None:
            await self.hold.wait()
        if self.refuse:
            raise UpdateRejected(self.refuse)

    async def names(self) -> list[str]:
        return [resource.name for resource in (await self.updates.get()).resources]


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: str = "asyncio") -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    (uvloop.run if loop == "uvloop" else asyncio.run)(limited())


def server(addresses: list[str], answers: "asyncio.Queue[Answered] | None" = None) -> SnapshotServer:
    return SnapshotServer(
        addresses,
        identifier="test",
        on_answer=None if answers is None else lambda _, answered: answers.put_nowait(answered),
    )


def client(address: str, *, delta: bool = False) -> AdsClient:
    return AdsClient(address, NODE, delta=delta, backoff=JitteredBackoff(base_s=0.02, max_s=0.1))


def snapshot(*messages: Message) -> Snapshot:
    return Snapshot.of(messages)


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the client's log lines. gRPC's event queue, one per process, may log errors of other tests' loops."""
    return [record for record in caplog.records if record.name.startswith("xds.")]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("delta", [False, True])
def test_updates_acks_and_stats(loop: str, delta: bool) -> None:
    async def main() -> None:
        answers: asyncio.Queue[Answered] = asyncio.Queue()
        async with server(["127.0.0.1:0"], answers) as control_plane:
            control_plane.publish("node-1", snapshot(Cluster(name="a"), Listener(name="l")))
            receive = Receiver()
            async with client(control_plane.addresses[0], delta=delta) as ads:
                subscription = ads.subscribe(CDS, None, receive)
                assert await receive.names() == ["a"]
                first = await answers.get()
                assert (first.type_url, first.error) == (CDS, None)
                assert subscription.stats.version_text == first.version
                assert subscription.stats.update_success == 1
                control_plane.publish("node-1", snapshot(Cluster(name="b"), Listener(name="l")))
                update = await receive.updates.get()
                assert [resource.name for resource in update.resources] == ["b"]
                assert (update.complete, update.removed) == ((False, ("a",)) if delta else (True, ()))
                assert ads.stats.connected_state == 1
                assert ads.stats.identifier == "test"
                assert control_plane.connected() == ("node-1",)

    run(main, loop)


@pytest.mark.parametrize("delta", [False, True])
def test_control_plane_killed_and_back(delta: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="xds.aio.client")

    async def main() -> None:
        address = f"127.0.0.1:{free_port()}"
        receive = Receiver()
        async with client(address, delta=delta) as ads:
            async with server([address]) as control_plane:
                control_plane.publish("node-1", snapshot(Cluster(name="a")))
                subscription = ads.subscribe(CDS, None, receive)
                assert await receive.names() == ["a"]
            while subscription.stats.update_failure < 5:
                await asyncio.sleep(0.01)
            assert ads.stats.connected_state == 0
            async with server([address]) as control_plane:
                control_plane.publish("node-1", snapshot(Cluster(name="a"), Cluster(name="b")))
                # The incremental variant sent its versions, so only the difference arrives.
                assert await receive.names() == (["b"] if delta else ["a", "b"])
                lines.extend(record.getMessage() for record in said(caplog))

    lines: list[str] = []
    run(main)
    # A server that stops may end a connection before it refuses the next: another reason, and a line for it.
    assert sum("does not answer" in line for line in lines) in (1, 2), lines
    assert sum("control plane is back" in line for line in lines) == 1
    assert len([line for line in lines if "still does not answer" not in line]) in (3, 4), lines


@pytest.mark.parametrize("delta", [False, True])
def test_nack_tells_the_reason_and_keeps_the_last_good_version(delta: bool) -> None:
    async def main() -> None:
        answers: asyncio.Queue[Answered] = asyncio.Queue()
        async with server(["127.0.0.1:0"], answers) as control_plane:
            control_plane.publish("node-1", snapshot(Cluster(name="a")))
            receive = Receiver()
            async with client(control_plane.addresses[0], delta=delta) as ads:
                stats = ads.subscribe(CDS, None, receive).stats
                good = await answers.get()
                receive.refuse = "Error adding/updating cluster(s) b: why"
                control_plane.publish("node-1", snapshot(Cluster(name="b")))
                assert (await answers.get()).error == "Error adding/updating cluster(s) b: why"
                assert (stats.version_text, stats.update_rejected) == (good.version, 1)
                receive.refuse = ""
                control_plane.publish("node-1", snapshot(Cluster(name="c")))
                assert (await answers.get()).error is None

    run(main)


def test_a_bug_in_a_receiver_is_a_nack_and_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        answers: asyncio.Queue[Answered] = asyncio.Queue()
        calls = 0

        async def receive(update: Update) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise KeyError("oops")

        async with server(["127.0.0.1:0"], answers) as control_plane:
            control_plane.publish("node-1", snapshot(Cluster(name="a")))
            async with client(control_plane.addresses[0]) as ads:
                ads.subscribe(CDS, None, receive)
                assert "internal error: KeyError" in str((await answers.get()).error)
                control_plane.publish("node-1", snapshot(Cluster(name="b")))
                assert (await answers.get()).error is None

    run(main)
    assert any(record.exc_info for record in said(caplog))


def test_a_warming_receiver_holds_back_its_own_ack_only() -> None:
    async def main() -> None:
        answers: asyncio.Queue[Answered] = asyncio.Queue()
        clusters, endpoints = Receiver(), Receiver()
        clusters.hold = asyncio.Event()
        async with server(["127.0.0.1:0"], answers) as control_plane:
            control_plane.publish("node-1", snapshot(Cluster(name="a"), ClusterLoadAssignment(cluster_name="a")))
            async with client(control_plane.addresses[0]) as ads:
                ads.subscribe(CDS, None, clusters)
                await clusters.names()
                ads.subscribe(EDS, ["a"], endpoints)
                assert await endpoints.names() == ["a"]
                assert (await answers.get()).type_url == EDS
                clusters.hold.set()
                assert (await answers.get()).type_url == CDS

    run(main)


@pytest.mark.parametrize("delta", [False, True])
def test_subscriptions_of_one_type_get_their_own_and_late_ones_what_is_known(delta: bool) -> None:
    async def main() -> None:
        async with server(["127.0.0.1:0"]) as control_plane:
            control_plane.publish(
                "node-1", snapshot(*(ClusterLoadAssignment(cluster_name=name) for name in "abc"))
            )
            one, two, late = Receiver(), Receiver(), Receiver()
            async with client(control_plane.addresses[0], delta=delta) as ads:
                first = ads.subscribe(EDS, ["a"], one)
                ads.subscribe(EDS, ["b"], two)
                assert (await one.names(), await two.names()) == (["a"], ["b"])
                ads.subscribe(EDS, ["a"], late)
                assert await late.names() == ["a"]
                first.set_names(["c"])
                while await one.names() != ["c"]:
                    pass
                first.close()
                control_plane.publish("node-1", snapshot(ClusterLoadAssignment(cluster_name="b", endpoints=[{}])))
                while (update := await two.updates.get()).resources[0].body.value.find(b"b") < 0:
                    pass
                assert update.resources[0].name == "b"
                assert one.updates.empty()

    run(main)


def test_initial_fetch_timeout_is_counted_and_told_once() -> None:
    async def main() -> None:
        told = asyncio.Event()
        async with server(["127.0.0.1:0"]) as control_plane, client(control_plane.addresses[0]) as ads:
            patient = ads.subscribe(SDS, ["s"], Receiver(), initial_fetch_timeout_s=0, on_initial_timeout=told.set)
            hasty = ads.subscribe(
                SDS, ["t"], Receiver(), initial_fetch_timeout_s=0.01, on_initial_timeout=told.set
            )
            await told.wait()
            assert (hasty.stats.init_fetch_timeout, patient.stats.init_fetch_timeout) == (1, 0)

    run(main)


def test_secrets_from_an_agents_socket_one_stream_each(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/sds"

    async def main() -> None:
        async with server([address]) as agent:
            agent.publish("node-1", snapshot(Secret(name="default"), Secret(name="ROOTCA")))
            async with PerTypeClient(address, NODE) as sds:
                one, two = Receiver(), Receiver()
                sds.subscribe(SDS, ["default"], one)
                root = sds.subscribe(SDS, ["ROOTCA"], two)
                assert (await one.names(), await two.names()) == (["default"], ["ROOTCA"])
                assert len(agent.connected()) == 2
                root.close()
                while len(agent.connected()) > 1:
                    await asyncio.sleep(0.01)

    run(main)


def test_a_client_that_asks_the_wrong_service_is_told() -> None:
    async def main() -> None:
        async with (
            server(["127.0.0.1:0"]) as control_plane,
            grpc.aio.insecure_channel(control_plane.addresses[0]) as channel,
        ):
            call = channel.stream_stream("/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets")()
            await call.write(b"\x22\x01x")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            call = channel.stream_stream("/acme.Service/Method")()
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED

    run(main)


def test_a_taken_port_is_an_error() -> None:
    async def main() -> None:
        async with server(["127.0.0.1:0"]) as control_plane:
            with pytest.raises(ServeError, match=control_plane.addresses[0]):
                async with server([*control_plane.addresses]):
                    pass

    run(main)


def test_leaving_ends_every_task_while_the_control_plane_is_away() -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        async with client(f"127.0.0.1:{free_port()}") as ads:
            stats = ads.subscribe(LDS, None, Receiver()).stats
            while not stats.update_failure:
                await asyncio.sleep(0.005)
        assert asyncio.all_tasks() - before == set()

    run(main)


class Hostile:
    """A server that ends each of its first connections with some bytes after its SETTINGS, and then serves well.

    It is in front of the real server: good connections are passed through byte by byte.
    """

    def __init__(self, target: str, bad: list[bytes]) -> None:
        self.target, self.bad, self.accepted = target, list(bad), 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.bad:
            writer.write(b"\0\0\0\4\0\0\0\0\0" + self.bad.pop(0))
            while await reader.read(65536):
                pass
            writer.close()
            return
        host, _, port = self.target.rpartition(":")
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pass(reader, inner_writer))
            both.create_task(self._pass(inner_reader, writer))

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()


GOAWAY = b"\0\0\x08\7\0\0\0\0\0" + bytes(8)
NO_STREAMS = b"\0\0\6\4\0\0\0\0\0\0\3\0\0\0\0"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "bad",
    [[GOAWAY] * 20, [NO_STREAMS + GOAWAY] * 5, [b"\0\0\1\4\0\0\0\0\0x"] * 5],
    ids=["goaway", "none", "broken"],
)
def test_a_control_plane_that_ends_new_connections_ends_nothing_else(loop: str, bad: list[bytes]) -> None:
    async def main() -> None:
        async with server(["127.0.0.1:0"]) as control_plane:
            control_plane.publish("node-1", snapshot(Cluster(name="a")))
            hostile = Hostile(control_plane.addresses[0], bad)
            front = await asyncio.start_server(hostile, "127.0.0.1", 0)
            address = f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
            async with front:
                receive = Receiver()
                async with client(address) as ads:
                    ads.subscribe(CDS, None, receive)
                    assert await receive.names() == ["a"]
                assert hostile.accepted == len(bad) + 1

    run(main, loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_bug_on_the_way_to_the_control_plane_is_logged_and_tried_again(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a client of the control plane raises, the proxy serves on with the configuration that it has."""
    attempts = 0

    async def main() -> None:
        async with server(["127.0.0.1:0"]) as control_plane:
            control_plane.publish("node-1", snapshot(Cluster(name="a")))
            good = connect_to(control_plane.addresses[0])

            def connect() -> Any:
                nonlocal attempts
                attempts += 1
                if attempts <= 2:
                    raise KeyError("oops")
                return good()

            receive = Receiver()
            backoff = JitteredBackoff(base_s=0.02, max_s=0.1)
            async with AdsClient("it", NODE, backoff=backoff, connect=connect) as ads:
                ads.subscribe(CDS, None, receive)
                assert await receive.names() == ["a"]

    run(main, loop)
    assert attempts == 3
    broken = [record for record in said(caplog) if record.exc_info]
    assert len(broken) == 2
    assert all("target=it" in record.getMessage() for record in broken)


def test_a_bug_in_writing_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    attempts = 0

    def metadata() -> tuple[tuple[str, str], ...]:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ZeroDivisionError
        return ()

    async def main() -> None:
        async with server(["127.0.0.1:0"]) as control_plane:
            control_plane.publish("node-1", snapshot(Cluster(name="a")))
            receive = Receiver()
            backoff = JitteredBackoff(base_s=0.02, max_s=0.1)
            address = control_plane.addresses[0]
            async with PerTypeClient(address, NODE, backoff=lambda: backoff, metadata=metadata) as each:
                each.subscribe(CDS, None, receive)
                assert await receive.names() == ["a"]

    run(main)
    assert attempts == 2
    assert sum(record.exc_info is not None for record in said(caplog)) == 1


@pytest.mark.parametrize("delta", [False, True])
def test_a_bug_in_delivery_makes_a_new_stream(delta: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A response without ACK or NACK would keep the server waiting for ever."""

    class Unreadable(UpdateRejected):
        @property
        def rejected(self) -> frozenset[str]:  # type: ignore[override]
            raise KeyError("oops")

        @rejected.setter
        def rejected(self, names: object) -> None:
            pass

    updates = 0
    applied = asyncio.Event()

    async def receive(update: Update) -> None:
        nonlocal updates
        updates += 1
        if updates == 1:
            raise Unreadable("no")
        applied.set()

    async def main() -> None:
        answers: asyncio.Queue[Answered] = asyncio.Queue()
        async with server(["127.0.0.1:0"], answers) as control_plane:
            control_plane.publish("node-1", snapshot(Cluster(name="a")))
            async with client(control_plane.addresses[0], delta=delta) as ads:
                ads.subscribe(CDS, None, receive)
                await applied.wait()
                assert (await answers.get()).error is None

    run(main)
    assert sum("delivery" in record.getMessage() for record in said(caplog) if record.exc_info) == 1


def test_a_bug_after_a_stream_ends_neither_the_client_nor_its_owner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The group of the client's task would cancel the task that entered it, which is the whole proxy's."""

    async def main() -> None:
        receiver = Receiver()
        port = free_port()
        failed = asyncio.Event()
        async with client(f"127.0.0.1:{port}") as ads:

            def fail(broken: object) -> None:
                failed.set()
                raise LookupError("a bug")

            with monkeypatch.context() as patched:
                patched.setattr(ads._stream, "_lost", fail)
                ads.subscribe(CDS, None, receiver)
                await failed.wait()
            async with server([f"127.0.0.1:{port}"]) as serving:
                serving.publish("node-1", snapshot(Cluster(name="c1")))
                assert await receiver.names() == ["c1"]

    run(main)
    assert "the end of a stream was not handled" in caplog.text
