"""The PolicySync server over real sockets, with our own client at the other end, and with gRPC's."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.ztunnel.calico.cluster import BACK, FRONT, SEED, compiled, flow
from tests.ztunnel.calico.test_follower import LOOPS, following, run, until
from xds.aio.channel import Channel
from xds.aio.grpc_server import ServeError
from xds.dialects.calico.policysync import PolicyForm, decode
from xds.model import calico as c
from xds.proto.felix.policysync_pb2 import ReportResult
from ztunnel.calico.follower import METHOD
from ztunnel.calico.verdict import Code
from ztunnel.policysync.server import REPORT, Binder, PolicySyncServer, pod_socket


async def opened(stack: AsyncExitStack, folder: Path, form: PolicyForm = PolicyForm.MESSAGES) -> PolicySyncServer:
    server = await stack.enter_async_context(PolicySyncServer(form))
    await server.open(f"{folder}/back", lambda compiled: (BACK,))
    return server


@LOOPS
@pytest.mark.parametrize("form", list(PolicyForm))
def test_a_client_follows_edits(loop: str, form: PolicyForm, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            server = await opened(stack, tmp_path, form)
            follower = await stack.enter_async_context(following(f"unix:{tmp_path}/back"))
            await until(lambda: follower.counts.streams == 1)
            assert not follower.in_sync  # there is nothing to serve yet
            server.publish(compiled(SEED))
            await until(lambda: follower.in_sync)
            assert follower.evaluator.check(BACK, flow()).allowed
            assert follower.evaluator.check(FRONT, flow()).code is Code.PERMISSION_DENIED  # not this socket's
            server.publish(compiled(SEED.replace("[GET, POST]", "[POST]")))
            await until(lambda: not follower.evaluator.check(BACK, flow()).allowed)
            server.publish(compiled(""))
            await until(lambda: follower.evaluator.check(BACK, flow("PUT", "/x")).allowed)
            assert follower.counts.streams == 1

    run(main, loop)


def test_the_last_stream_wins_and_starts_from_a_snapshot(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            server = await opened(stack, tmp_path)
            server.publish(compiled(SEED))
            channel = await stack.enter_async_context(Channel(f"unix:{tmp_path}/back"))
            first, second = [await channel.call(METHOD) for _ in range(2)]
            await first.write(b"", ended=True)
            snapshot = [await read(first)]
            while not isinstance(snapshot[-1], c.InSync):
                snapshot.append(await read(first))
            await second.write(b"", ended=True)
            assert await first.read() is None
            for expected in snapshot:
                assert await read(second) == expected
            second.cancel()

    async def read(call: object) -> c.Update | None:
        message = await call.read()  # type: ignore[attr-defined]
        assert message is not None
        return decode(message)

    run(main)


def test_the_socket_of_a_node_serves_several_processes_and_the_oldest_gives_way(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(PolicySyncServer())
            path = f"{tmp_path}/node"
            await server.open(path, lambda compiled: (BACK, FRONT), streams=2)
            server.publish(compiled(SEED))
            first = await stack.enter_async_context(following(f"unix:{path}"))
            await until(lambda: first.in_sync)
            second = await stack.enter_async_context(following(f"unix:{path}"))
            await until(lambda: second.in_sync)
            assert first.in_sync
            server.publish(compiled(SEED.replace("[GET, POST]", "[POST]")))
            for each in (first, second):
                await until(lambda each=each: not each.evaluator.check(BACK, flow()).allowed)  # type: ignore[misc]
                assert each.counts.streams == 1
            channel = await stack.enter_async_context(Channel(f"unix:{path}"))
            third = await channel.call(METHOD)
            await third.write(b"", ended=True)
            await until(lambda: first.counts.streams == 2)  # it was the oldest, and has begun anew
            third.cancel()

    run(main)


def test_a_pod_that_goes_ends_its_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            server = await opened(stack, tmp_path)
            server.publish(compiled(SEED))
            follower = await stack.enter_async_context(following(f"unix:{tmp_path}/back"))
            await until(lambda: follower.in_sync)
            server.publish(compiled("", pods=""))
            await until(lambda: follower.counts.streams == 2)
            await until(lambda: follower.in_sync)
            assert follower.evaluator.store.endpoints == {}

    run(main)


def test_flows_are_reported_to_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await opened(stack, tmp_path)
            channel = await stack.enter_async_context(Channel(f"unix:{tmp_path}/back"))
            answer = ReportResult.FromString(await channel.unary(REPORT, b"", timeout_s=5))
            assert not answer.successful

    run(main)


def test_each_pod_of_the_node_has_a_socket(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(PolicySyncServer())
            binder = Binder(server, tmp_path, "n1")
            both = compiled(SEED)
            server.publish(both)
            await binder.bind(both)
            assert set(server.paths) == {pod_socket(tmp_path, uid) for uid in ("u-1", "u-2")}
            front = await stack.enter_async_context(following(f"unix:{pod_socket(tmp_path, 'u-1')}"))
            back = await stack.enter_async_context(following(f"unix:{pod_socket(tmp_path, 'u-2')}"))
            await until(lambda: front.in_sync and back.in_sync)
            assert set(front.evaluator.store.endpoints) == {FRONT}
            assert set(back.evaluator.store.endpoints) == {BACK}
            other = compiled(SEED)
            other.nodes[FRONT] = "n2"
            await binder.bind(other)
            assert server.paths == (pod_socket(tmp_path, "u-2"),)
            assert not Path(pod_socket(tmp_path, "u-1")).exists()

    run(main)


def test_pods_with_credentials_of_a_volume_driver_have_sockets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "creds").mkdir()

    def put(name: str, text: str) -> None:
        (tmp_path / f"{name}.json").write_text(text)
        (tmp_path / f"{name}.json").rename(tmp_path / "creds" / f"{name}.json")

    async def main() -> None:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(PolicySyncServer())
            binder = Binder(server, tmp_path, "elsewhere")  # the policies' own pods are of other nodes
            both = compiled(SEED)
            server.publish(both)
            put("csi-1", '{"uid": "u-2", "workload": "back", "NAMESPACE": "shop", "ServiceAccount": "back"}')
            put("csi-2", '{"Workload": "later", "Namespace": "shop"}')
            for name, text in (("a", "{"), ("b", "[]"), ("c", '{"Workload": "x"}'), ("d", '{"Workload": ["x"]}')):
                put(name, text)
            for _ in range(2):
                await binder.bind(both)
            assert set(server.paths) == {pod_socket(tmp_path, name) for name in ("csi-1", "csi-2")}
            back = await stack.enter_async_context(following(f"unix:{pod_socket(tmp_path, 'csi-1')}"))
            later = await stack.enter_async_context(following(f"unix:{pod_socket(tmp_path, 'csi-2')}"))
            await until(lambda: back.in_sync and later.in_sync)
            assert set(back.evaluator.store.endpoints) == {BACK}
            assert later.evaluator.store.endpoints == {}
            put("a", '{"Workload": "front", "Namespace": "shop"}')
            (tmp_path / "creds" / "csi-1.json").unlink()
            await binder.bind(both)
            assert set(server.paths) == {pod_socket(tmp_path, name) for name in ("a", "csi-2")}

    run(main)
    lines = [line for line in caplog.messages if "credentials of pod not usable" in line]
    assert len(lines) == 4, "once each"
    assert lines[2].endswith("error=Namespace: must be a name, not None")


def test_a_socket_that_cannot_be_served_is_named_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(PolicySyncServer())
            binder = Binder(server, tmp_path)
            (tmp_path / "mount" / "u-2").mkdir(parents=True)
            blocking = tmp_path / "mount" / "u-2" / "socket"
            blocking.write_text("not a socket")
            for _ in range(2):
                await binder.bind(compiled(SEED))
            assert server.paths == (pod_socket(tmp_path, "u-1"),)
            assert blocking.read_text() == "not a socket"
            blocking.unlink()
            await binder.bind(compiled(SEED))
            assert len(server.paths) == 2

    run(main)
    assert len([record for record in caplog.records if "shop/back" in record.getMessage()]) == 1


def test_an_address_that_cannot_be_served_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with PolicySyncServer() as server:
            with pytest.raises(ServeError, match="No such file"):
                await server.open(f"{tmp_path}/none/x", lambda compiled: ())
            assert server.paths == ()
            await asyncio.sleep(0)

    run(main)
