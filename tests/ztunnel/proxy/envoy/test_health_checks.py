"""Active health checks by a whole proxy: the hosts that get connections, and the reported states."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_S
from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Json,
    ask,
    cluster,
    listener,
    run,
    tls,
)
from xds.aio.grpc_server import GrpcServer
from ztunnel.proxy.envoy.path.probe import Prober
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster
from ztunnel.proxy.envoy.upstream.health_state import CheckResult

FAST: Json = {
    "timeout": "1s",
    "interval": "0.05s",
    "unhealthy_threshold": 2,
    "healthy_threshold": 2,
    "no_traffic_interval": "0.05s",
}
TCP = {**FAST, "tcp_health_check": {}}
HTTP = {**FAST, "http_health_check": {"path": "/healthz"}}


class Backend:
    """An application that answers with its name, and requests of HTTP with a status."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.status = 200
        self.heads: list[bytes] = []
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            data = await reader.read(65536)
            if data.startswith(b"GET"):
                self.heads.append(data)
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % self.status)
            elif data:
                writer.write(self.name)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def backends(*names: str) -> AsyncIterator[list[Backend]]:
    made = [Backend(name.encode()) for name in names]
    for each in made:
        await each.start()
    try:
        yield made
    finally:
        for each in made:
            with contextlib.suppress(Exception):
                await each.stop()


def live(harness: Harness) -> LiveCluster:
    found = harness.proxy.clusters.get("app")
    assert found is not None
    return found


def flags(harness: Harness) -> list[str]:
    return [host.flags for host in live(harness).hosts.hosts]


async def answers(harness: Harness) -> set[bytes]:
    return {await ask(harness.port("l")) for _ in range(8)}


NO_PANIC = {"common_lb_config": {"healthy_panic_threshold": {"value": 0}}}


def test_unhealthy_host_gets_no_connections_until_it_recovers(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with backends("a", "b") as (a, b):
            assert (
                await harness.published(listener(), cluster(a.port, b.port, health_checks=[HTTP], **NO_PANIC))
                is None
            )
            assert flags(harness) == ["healthy", "healthy"]  # it was warm once both had been asked
            assert await answers(harness) == {b"a", b"b"}
            b.status = 503
            await harness.until(lambda: flags(harness) == ["healthy", "/failed_active_hc"])
            assert await answers(harness) == {b"a"}
            assert harness.count("cluster.app.membership_healthy") == 1
            assert harness.count("cluster.app.health_check.healthy") == 1
            b.status = 200
            await harness.until(lambda: flags(harness) == ["healthy", "healthy"])
            assert await answers(harness) == {b"a", b"b"}
            assert harness.count("cluster.app.health_check.failure") >= 1
            assert b"\r\nHost: app\r\n" in a.heads[0]
            assert a.heads[0].startswith(b"GET /healthz HTTP/1.1\r\n")

    run(tmp_path, body)


def test_host_that_does_not_listen_is_unhealthy(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with backends("a", "b") as (a, b):
            await b.stop()
            await harness.published(listener(), cluster(a.port, b.port, health_checks=[TCP], **NO_PANIC))
            assert flags(harness) == ["healthy", "/failed_active_hc"]
            assert await answers(harness) == {b"a"}
            assert harness.count("cluster.app.health_check.network_failure") >= 1
            await b.start()
            await harness.until(lambda: flags(harness) == ["healthy", "healthy"])

    run(tmp_path, body)


@pytest.mark.parametrize(("panic", "answer"), [({}, b"a"), (NO_PANIC, b"")])
def test_without_a_healthy_host_all_are_used_or_none(panic: Json, answer: bytes, tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with backends("a") as (a,):
            a.status = 500
            await harness.published(listener(), cluster(a.port, health_checks=[HTTP], **panic))
            assert flags(harness) == ["/failed_active_hc"]
            assert await answers(harness) == {answer}

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("check", "healthy"),
    [
        ({"tcp_health_check": {"send": {"text": "70"}, "receive": [{"text": "61"}]}}, True),
        ({"tcp_health_check": {"send": {"binary": "cA=="}, "receive": [{"text": "61"}, {"text": "61"}]}}, False),
        ({"http_health_check": {"path": "/", "expected_statuses": [{"start": 418, "end": 419}]}}, True),
        ({"http_health_check": {"path": "/"}}, False),
        ({"tcp_health_check": {"receive": [{"text": "61"}]}, "timeout": "0.1s"}, False),
    ],
)
def test_answers_that_pass_a_health_check(check: Json, healthy: bool, tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with backends("a") as (a,):
            a.status = 418
            await harness.published(listener(), cluster(a.port, health_checks=[{**FAST, **check}]))
            assert flags(harness) == ["healthy" if healthy else "/failed_active_hc"]

    run(tmp_path, body)


def test_endpoint_can_have_another_health_check_address_or_none(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with backends("a", "b", "health") as (a, b, health):
            kind, document = cluster(a.port, b.port, health_checks=[HTTP], **NO_PANIC)
            first, second = document["load_assignment"]["endpoints"][0]["lb_endpoints"]
            first["endpoint"]["health_check_config"] = {"port_value": health.port, "hostname": "own.example"}
            second["endpoint"]["health_check_config"] = {"disable_active_health_check": True}
            b.status = 500
            await harness.published(listener(), (kind, document))
            assert flags(harness) == ["healthy", "healthy"]
            assert (a.heads, b.heads) == ([], [])
            assert b"\r\nHost: own.example\r\n" in health.heads[0]

    run(tmp_path, body)


def test_checks_have_the_clusters_tls(tmp_path: Path) -> None:
    identities = Identities()

    async def body(harness: Harness) -> None:
        seen: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                seen.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                await writer.drain()
            writer.close()

        leaf = identities.authority.issue(SERVER)
        (tmp_path / "chain.pem").write_bytes(leaf.chain_pem)
        (tmp_path / "key.pem").write_bytes(leaf.key_pem)
        (tmp_path / "root.pem").write_bytes(identities.authority.pem)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "root.pem"))
        context.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2"])
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            check = {**HTTP, "timeout": f"{WAIT_S}s"}
            checked = cluster(port, health_checks=[check], transport_socket=tls(CLIENT, server=False))
            await harness.published(identities.secret(CLIENT), identities.root(), listener(), checked)
            assert flags(harness) == ["healthy"]
            assert seen[0] == b"GET /healthz HTTP/1.1"

    run(tmp_path, body)


def test_a_reset_by_a_host_with_tls_is_found_before_the_time_limit(tmp_path: Path) -> None:
    identities = Identities()

    async def body(harness: Harness) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        leaf = identities.authority.issue(SERVER)
        (tmp_path / "chain.pem").write_bytes(leaf.chain_pem)
        (tmp_path / "key.pem").write_bytes(leaf.key_pem)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
        context.set_alpn_protocols(["h2"])
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            check = {**HTTP, "timeout": f"{10 * WAIT_S}s", "unhealthy_threshold": 1}
            backends = cluster(port, health_checks=[check], transport_socket=tls(CLIENT, server=False))
            async with asyncio.timeout(WAIT_S):  # a listener opens after the first check of each host
                await harness.published(identities.secret(CLIENT), identities.root(), listener(), backends)
            assert flags(harness) == ["/failed_active_hc"]

    run(tmp_path, body)


def test_grpcs_health_service(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        asked: list[bytes] = []
        answer = [b"\x08\x01"]

        def check(request: bytes) -> bytes:
            asked.append(request)
            return answer[0]

        async with GrpcServer(["127.0.0.1:0"], unary={"/grpc.health.v1.Health/Check": check}) as server:
            port = int(server.addresses[0].rpartition(":")[2])
            check_by = {**FAST, "grpc_health_check": {"service_name": "shop"}}
            await harness.published(listener(), cluster(port, health_checks=[check_by]))
            assert flags(harness) == ["healthy"]
            assert asked[0] == b"\x0a\x04shop"
            answer[0] = b"\x08\x02"
            await harness.until(lambda: flags(harness) == ["/failed_active_hc"])

    run(tmp_path, body)


# Hosts that come and go


@pytest.mark.parametrize("ignore", [False, True])
def test_removed_host_serves_while_it_passes_its_checks(ignore: bool, tmp_path: Path) -> None:
    source = {"eds_config": {"ads": {}, "resource_api_version": "V3"}}

    def assigned(*ports: int) -> tuple[str, Json]:
        return "endpoints", cluster(*ports)[1]["load_assignment"]

    async def body(harness: Harness) -> None:
        async with backends("a", "b") as (a, b):
            document = {"name": "app", "type": "EDS", "eds_cluster_config": source, "health_checks": [HTTP]}
            by_eds = ("cluster", {**document, **NO_PANIC, "ignore_health_on_host_removal": ignore})
            await harness.published(listener(), by_eds, assigned(a.port, b.port))
            assert flags(harness) == ["healthy", "healthy"]
            harness.publish(listener(), by_eds, assigned(a.port))
            if ignore:
                await harness.until(lambda: flags(harness) == ["healthy"])
                return
            await harness.until(lambda: flags(harness) == ["healthy", "/pending_dynamic_removal"])
            assert await answers(harness) == {b"a", b"b"}
            b.status = 500
            await harness.until(lambda: flags(harness) == ["healthy"])
            assert await answers(harness) == {b"a"}

    run(tmp_path, body)


def test_unchecked_host_is_removed_with_discovery(tmp_path: Path) -> None:
    source = {"eds_config": {"ads": {}, "resource_api_version": "V3"}}
    by_eds = ("cluster", {"name": "app", "type": "EDS", "eds_cluster_config": source, "health_checks": [HTTP]})

    def assigned(*ports: int) -> tuple[str, Json]:
        assignment = cluster(*ports)[1]["load_assignment"]
        for each in assignment["endpoints"][0]["lb_endpoints"][1:]:
            each["endpoint"]["health_check_config"] = {"disable_active_health_check": True}
        return "endpoints", assignment

    async def body(harness: Harness) -> None:
        async with backends("a", "b") as (a, b):
            await harness.published(listener(), by_eds, assigned(a.port, b.port))
            assert flags(harness) == ["healthy", "healthy"]
            harness.publish(listener(), by_eds, assigned(a.port))
            await harness.until(lambda: flags(harness) == ["healthy"])

    run(tmp_path, body)


def test_health_check_restarts_after_an_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ask, left = Prober.ask, [2]

    async def sometimes(self: Prober, *args: Any) -> CheckResult:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("a bug")
        return await ask(self, *args)

    async def body(harness: Harness) -> None:
        async with backends("a") as (a,):
            await harness.published(listener(), cluster(a.port, health_checks=[HTTP]))
            assert flags(harness) == ["healthy"]
            left[0] = 1
            a.status = 500
            await harness.until(lambda: flags(harness) == ["/failed_active_hc"])

    monkeypatch.setattr(Prober, "ask", sometimes)
    run(tmp_path, body)
    assert [record.exc_info is not None for record in caplog.records if "starts again" in record.message] == [
        True
    ] * 3


def test_a_passed_check_ends_an_ejection(tmp_path: Path) -> None:
    outlier = {
        "outlier_detection": {"consecutive_5xx": 1, "base_ejection_time": "300s", "max_ejection_percent": 100}
    }

    async def body(harness: Harness) -> None:
        async with backends("a", "health") as (a, health):
            health.status = 500
            kind, document = cluster(a.port, health_checks=[HTTP], **outlier)
            (only,) = document["load_assignment"]["endpoints"][0]["lb_endpoints"]
            only["endpoint"]["health_check_config"] = {"port_value": health.port}
            await harness.published(listener(), (kind, document))
            await a.stop()
            assert await ask(harness.port("l")) == b""
            assert flags(harness) == ["/failed_active_hc/failed_outlier_check"]
            health.status = 200
            await harness.until(lambda: flags(harness) == ["healthy"])

    run(tmp_path, body)
