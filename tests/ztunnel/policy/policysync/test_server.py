"""The PolicySync server over real sockets, with our own client at the other end, and with gRPC's."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ztunnel.policy.calico.cluster import BACK, FRONT, SEED, compiled, flow
from tests.ztunnel.policy.calico.test_follower import LOOPS, following, run, until
from xds.aio.channel import Channel
from xds.dialects.calico.policysync import PolicyForm, decode, decode_report, encode_report
from xds.grpc.serve_error import ServeError
from xds.model import calico as c
from xds.proto.felix.policysync_pb2 import ReportResult
from ztunnel.policy.authz import reporter as reporter_module
from ztunnel.policy.authz.reporter import Reporter
from ztunnel.policy.calico.follower import METHOD
from ztunnel.policy.calico.verdict import Code, RuleRef, Verdict
from ztunnel.policy.policysync.flows import COUNTED_RULES, FlowCounts, Flows
from ztunnel.policy.policysync.metrics import families
from ztunnel.policy.policysync.server import REPORT, Binder, PolicySyncServer, pod_socket


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


def test_reports_of_flows_are_added_up(tmp_path: Path) -> None:
    flows = [
        c.FlowReport(
            source_ip="10.0.0.1",
            destination_ip="10.0.0.2",
            source_port=port,
            destination_port=80,
            protocol=6,
            allowed=port < 3,
            policy=c.PolicyId("GlobalNetworkPolicy", "", "one"),
            index=0,
            packets=2,
            octets=100,
        )
        for port in range(1, 5)
    ]

    async def main() -> None:
        async with AsyncExitStack() as stack:
            server = await opened(stack, tmp_path)
            channel = await stack.enter_async_context(Channel(f"unix:{tmp_path}/back"))

            async def taken(message: bytes) -> bool:
                return ReportResult.FromString(await channel.unary(REPORT, message, timeout_s=5)).successful

            for flow in flows:
                assert await taken(encode_report(flow))
            assert not await taken(b"\xff")
            rule = "GlobalNetworkPolicy/one|rule 0"
            assert server.flows.by_rule == {
                (rule, "allowed"): FlowCounts(flows=2, packets=4, octets=200),
                (rule, "denied"): FlowCounts(flows=2, packets=4, octets=200),
            }
            shown = {
                (sample.name, *sample.labels.values()): sample.value
                for family in families(server, 0, ())
                for sample in family.samples
            }
            assert shown["policysync_flow_bytes_total", rule, "denied"] == 200
            assert shown[("policysync_report_faults_total",)] == 1

    run(main)


def test_rules_beyond_a_number_are_counted_together() -> None:
    flows = Flows()
    for number in range(COUNTED_RULES + 5):
        policy = c.PolicyId("GlobalNetworkPolicy", "", f"p{number}")
        flows.add(replace(FLOW, policy=policy))
    assert flows.by_rule["others", "allowed"].flows == 5
    assert len(flows.by_rule) == COUNTED_RULES + 1


FLOW = c.FlowReport(
    source_ip="", destination_ip="fd00::1", source_port=0, destination_port=0, protocol="sctp", allowed=True
)


@pytest.mark.parametrize(
    "report",
    [
        FLOW,
        replace(FLOW, policy=c.PolicyId("Profile", "", "kns.shop"), index=3, allowed=False, protocol=17),
        replace(FLOW, policy=c.PolicyId("NetworkPolicy", "shop", "x"), packets=1, octets=2),
    ],
)
def test_reports_survive_the_wire(report: c.FlowReport) -> None:
    assert decode_report(encode_report(report)) == report


def test_a_policy_server_reports_each_flow_once_an_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "MOST_FLOWS", 2)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            reporter = Reporter(f"unix:{tmp_path}/back", interval_s=0.02)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            running = tasks.create_task(reporter.run())
            allowed = Verdict(Code.OK, rule=RuleRef("default", c.PolicyId("GlobalNetworkPolicy", "", "one"), 2))
            reporter.note(c.Flow(source_ip="10.0.0.1"), allowed)
            await until(lambda: reporter.left_out == 1)  # there is no server yet
            server = await opened(stack, tmp_path)
            for flow in (
                c.Flow(source_ip="10.0.0.1"),
                c.Flow(source_ip="10.0.0.1"),
                c.Flow(),
                c.Flow(source_port=1),
            ):
                reporter.note(flow, allowed)
            assert reporter.left_out == 2
            await until(lambda: reporter.sent + reporter.left_out == 4)
            reporter.note(c.Flow(), allowed)
            await until(lambda: reporter.sent > 0)
            assert set(server.flows.by_rule) == {("GlobalNetworkPolicy/one|rule 2", "allowed")}
            running.cancel()

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
