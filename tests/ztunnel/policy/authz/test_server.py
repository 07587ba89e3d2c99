"""The policy server over a real socket: checks in all versions, health, limits of time, log lines, and a flood."""

import asyncio
import logging
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.ztunnel.policy.calico.test_follower import run, until
from xds.aio.channel import Channel
from xds.dialects.calico.authorization import decode_request, decode_response, encode_request
from xds.errors import ConfigError
from xds.grpc.status import RpcFailed
from xds.model import calico as c
from xds.proto.dikastes.healthz_pb2 import HealthCheckResponse
from xds.proto.envoy.service.auth.v3.external_auth_pb2 import CheckRequest, CheckResponse
from ztunnel.policy.authz.server import CHECK_METHODS, HEALTH, LIVENESS, READINESS, AuthzSettings, PolicyServer
from ztunnel.policy.calico import evaluator as evaluator_module
from ztunnel.policy.calico.follower import Follower
from ztunnel.policy.calico.verdict import Code
from ztunnel.runtime.clock import SystemClock

ONE = c.PolicyId("GlobalNetworkPolicy", "", "get-only")
WEB = "spiffe://cluster.local/ns/shop/sa/web"
GET = c.Flow(
    source_ip="10.0.0.1",
    destination_ip="10.0.0.2",
    source_port=40000,
    destination_port=80,
    source_principal=WEB,
    method="GET",
    path="/public/x?token=secret",
)
POST = c.Flow(destination_ip="10.0.0.2", source_principal=WEB, method="POST", path="/public?token=secret")
RULES = (
    c.Rule(
        c.Action.ALLOW,
        c.PeerMatch(account_names=("web",)),
        http=c.HttpMatch(("GET",), (c.PathMatch("/public", True),)),
    ),
)


def pod(number: int) -> c.EndpointId:
    return c.EndpointId("k8s", f"shop/web-{number}", "eth0")


class Snapshot(Follower):
    """A follower whose store is complete from the start, as if a stream had just sent InSync."""

    def __init__(self, *endpoints: int, clock: Any = None) -> None:
        super().__init__("unix:/nowhere", clock or SystemClock())
        self.evaluator.apply(c.PolicyUpdate(ONE, c.Policy("", RULES)))
        for number in endpoints:
            address = ip_network(f"10.0.0.{number}/32")
            self.evaluator.apply(
                c.EndpointUpdate(pod(number), c.Endpoint("", (address,), (c.Tier("default", (ONE,)),)))
            )
        self.evaluator.apply(c.InSync())
        self.in_sync = True


@asynccontextmanager
async def serving(
    folder: Path, follower: Follower, settings: AuthzSettings | None = None
) -> AsyncIterator[tuple[PolicyServer, Channel]]:
    path = f"unix:{folder}/authz.sock"
    server = PolicyServer([path], follower, SystemClock(), settings or AuthzSettings())
    async with server, Channel(path) as channel:
        yield server, channel


async def check(channel: Channel, flow: c.Flow, method: str = CHECK_METHODS[0]) -> tuple[int, str]:
    return decode_response(await channel.unary(method, encode_request(flow), timeout_s=5))


@pytest.mark.parametrize("method", CHECK_METHODS)
def test_every_version_of_the_service_answers(method: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, Snapshot(2)) as (server, channel):
            assert await check(channel, GET, method) == (0, "")
            code, message = await check(channel, POST, method)
            assert code == 7
            assert message == "denied by default|GlobalNetworkPolicy/get-only|end of tier"
            assert server.answers == {Code.OK: 1, Code.PERMISSION_DENIED: 1}

    run(main)


def test_60_kb_of_metadata_are_taken(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            serving(tmp_path, Snapshot(2)),
            grpc.aio.insecure_channel(f"unix:{tmp_path}/authz.sock") as channel,
        ):
            call = channel.unary_unary(CHECK_METHODS[0])
            answer = await call(encode_request(GET), metadata=(("x-much", "a" * 60_000),), timeout=5)
            assert decode_response(answer) == (0, "")

    run(main)


@pytest.mark.parametrize("method", CHECK_METHODS)
def test_a_request_of_any_version_may_lack_everything(method: str, tmp_path: Path) -> None:
    """A network filter asks about a connection. A missing method is not an empty method, which would not match.

    For versions before v3 both readings must allow, because Calico's server reads it as an empty method.
    """
    connected = 0 if ".v3." in method else 7
    connection, empty = CheckRequest(), CheckRequest()
    connection.attributes.destination.address.socket_address.address = "10.0.0.2"
    empty.attributes.request.http.SetInParent()

    async def main() -> None:
        async with serving(tmp_path, Snapshot(2)) as (_, channel):
            for message, code in ((CheckRequest(), connected), (connection, connected), (empty, 7)):
                answer = await channel.unary(method, message.SerializeToString(), timeout_s=5)
                assert decode_response(answer)[0] == code

    run(main)


def test_the_socket_is_open_to_other_users_from_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, Snapshot(2)):
            assert stat.S_IMODE(os.stat(tmp_path / "authz.sock").st_mode) == 0o777
        assert os.listdir(tmp_path) == []

    run(main)


def test_health(tmp_path: Path) -> None:
    async def healthy(channel: Channel, method: str) -> bool:
        return HealthCheckResponse.FromString(await channel.unary(method, b"", timeout_s=5)).healthy

    async def main() -> None:
        follower = Snapshot(2)
        async with serving(tmp_path, follower) as (_, channel):
            for ready in (True, False, True):
                follower.in_sync = ready
                assert await healthy(channel, READINESS) is ready
                assert await healthy(channel, LIVENESS)
                assert await channel.unary(HEALTH, b"", timeout_s=5) == (b"\x08\x01" if ready else b"\x08\x02")

    run(main)


def test_a_node_is_served_by_the_destinations_address(tmp_path: Path) -> None:
    async def main() -> None:
        follower = Snapshot(2, 3)
        async with serving(tmp_path, follower, AuthzSettings(per_host=True)) as (_, channel):
            assert (await check(channel, GET))[0] == 0
            other = c.Flow(destination_ip="10.0.0.9", source_principal=WEB, method="GET", path="/public")
            assert (await check(channel, other))[0] == 7
        async with serving(tmp_path, follower) as (_, channel):  # as a pod's server: two endpoints are none
            assert (await check(channel, GET))[0] == 7

    run(main)


def test_before_the_first_snapshot_nobody_is_let_in(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, Follower("unix:/nowhere", SystemClock())) as (_, channel):
            assert await check(channel, GET) == (14, "no policy has been received yet")

    run(main)


def test_policies_may_be_too_old(tmp_path: Path) -> None:
    class Clock(SystemClock):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    async def main() -> None:
        clock = Clock()
        follower = Snapshot(2, clock=clock)
        async with serving(tmp_path, follower, AuthzSettings(max_stale_s=60)) as (_, channel):
            follower.in_sync, follower._lost_at = False, 0.0
            clock.now = 59
            assert (await check(channel, GET))[0] == 0
            clock.now = 61
            assert await check(channel, GET) == (14, "policies have been out of date for 61 s")

    run(main)


def test_bytes_that_are_no_request_are_an_invalid_argument(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, Snapshot(2)) as (server, channel):
            answer = decode_response(await channel.unary(CHECK_METHODS[0], b"\xff", timeout_s=5))
            assert answer[0] == 3
            assert (await check(channel, GET))[0] == 0
            assert server.answers == {Code.INVALID_ARGUMENT: 1, Code.OK: 1}

    run(main)


def test_denials_are_explained_on_request_only(tmp_path: Path) -> None:
    async def answer(settings: AuthzSettings, flow: c.Flow) -> CheckResponse:
        async with serving(tmp_path, Snapshot(2), settings) as (_, channel):
            data = await channel.unary(CHECK_METHODS[0], encode_request(flow), timeout_s=5)
            return CheckResponse.FromString(data)

    async def main() -> None:
        plain = await answer(AuthzSettings(), POST)
        assert not plain.HasField("denied_response")
        assert not plain.HasField("dynamic_metadata")
        told = await answer(AuthzSettings(explain=True), POST)
        assert told.denied_response.status.code == 403
        assert {header.header.key: header.header.value for header in told.denied_response.headers} == {
            "x-policy-tier": "default",
            "x-policy-policy": "GlobalNetworkPolicy/get-only",
            "x-policy-rule": "-1",
        }
        allowed = await answer(AuthzSettings(explain=True), GET)
        assert not allowed.HasField("denied_response")
        assert allowed.dynamic_metadata["rule"] == "0"

    run(main)


def test_denials_are_logged_at_a_limited_rate_and_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ztunnel.policy.authz")

    async def main() -> None:
        async with serving(tmp_path, Snapshot(2)) as (server, channel):
            await asyncio.gather(*(check(channel, POST) for _ in range(200)))
            assert server.answers[Code.PERMISSION_DENIED] == 200

    run(main)
    lines = [record.getMessage() for record in caplog.records if record.name == "ztunnel.policy.authz.server"]
    assert 0 < len(lines) < 150
    assert "get-only" in lines[0]
    assert "path='/public'" in lines[0]
    assert not any("secret" in line for line in lines)


def test_a_flood_of_checks_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, Snapshot(2)) as (server, channel):

            async def client() -> None:
                for _ in range(20):
                    assert (await check(channel, GET))[0] == 0

            await asyncio.gather(*(client() for _ in range(64)))
            await until(lambda: server.answers[Code.OK] == 1280)

    run(main)


def test_a_client_that_floods_with_checks_of_every_kind_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client is answered meanwhile. Requests that are too large or not a check are refused by name."""
    monkeypatch.setattr(evaluator_module, "CACHED_VERDICTS", 100)

    async def main() -> None:
        follower = Snapshot(2)
        async with serving(tmp_path, follower) as (server, channel):

            async def flood(client: int) -> None:
                for number in range(20):
                    principal = f"spiffe://cluster.local/ns/shop/sa/{'y' * (number * 200)}{client}"
                    await check(
                        channel, c.Flow(destination_ip="10.0.0.2", source_port=number, source_principal=principal)
                    )

            async with Channel(f"unix:{tmp_path}/authz.sock") as other, asyncio.TaskGroup() as tasks:
                floods = [tasks.create_task(flood(client)) for client in range(64)]
                answered = 0
                while not all(task.done() for task in floods):
                    assert (await check(other, GET))[0] == 0
                    answered += 1
                assert answered > 5
                assert decode_response(await other.unary(CHECK_METHODS[0], b"\xff", timeout_s=5))[0] == 3
                with pytest.raises(RpcFailed, match="RESOURCE_EXHAUSTED"):
                    await other.unary(CHECK_METHODS[0], b"x" * 5_000_000, timeout_s=5)
                assert (await check(other, GET))[0] == 0
            plans = follower.evaluator._plans.values()
            assert 0 < sum(len(plan.answers) for plan in plans) <= 100
            assert len(server.uses) <= 3

    run(main)


@pytest.mark.parametrize(
    "flow",
    [GET, POST, c.Flow(), c.Flow(protocol=17, destination_ip="fd00::1", destination_labels=(("a", "b"),))],
)
def test_requests_survive_the_wire(flow: c.Flow) -> None:
    assert decode_request(encode_request(flow)) == flow


@pytest.mark.parametrize(
    "flow", [c.Flow(source_ip="::", source_port=65536), c.Flow(destination_ip="::", destination_port=2**32 - 1)]
)
def test_ports_beyond_the_highest_are_refused(flow: c.Flow) -> None:
    with pytest.raises(ConfigError, match="a port must be at most 65535, not"):
        decode_request(encode_request(flow))


def test_what_is_absent_stays_absent() -> None:
    request = CheckRequest()
    request.attributes.source.address.pipe.path = "/x"
    request.attributes.destination.address.socket_address.address = "not an address"
    flow = decode_request(request.SerializeToString())
    assert (flow.source_ip, flow.destination_ip, flow.method, flow.path) == (None, None, None, None)
    request.attributes.request.http.SetInParent()
    flow = decode_request(request.SerializeToString())
    assert (flow.method, flow.path) == ("", "")
    assert decode_request(b"").protocol == 6
