"""An endpoint that fails before its answer is replaced by another; after a verdict no other is tried."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hbone.aio.connection_settings import ConnectionSettings
from hbone.settings import Http2Settings
from tests.netns.hbone_ends import HboneEnds, greeting
from tests.netns.istio import HELLO, AmbientMesh, ask, eventually, mesh_of, refused
from tests.netns.test_istio_bytes import everything
from tests.netns.toys import app, serving
from tproxy.aio.sockets import connect, listen

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]

#: Services by their first endpoint, which is nearly always chosen, and the way in which it fails. The other
#: endpoint is good.
VIPS = {
    "closed": "10.96.2.1",  # refuses the dial of a tunnel
    "plain": "10.96.2.2",  # is outside the mesh, and refuses the dial
    "garbled": "10.96.2.3",  # does not speak TLS
    "down": "10.96.2.4",  # answers 503
    "idle": "10.96.2.5",  # is a captured pod of the client's node, where nobody listens
    "remote": "10.96.2.6",  # the same on another node
    "strict": "10.96.2.7",  # answers 401
    "impostor": "10.96.2.8",  # is somebody else
    "shaky": "10.96.2.9",  # crashes over a request, once it has been told to; holds early bytes
}
NODES = {"w1": ["client", "idle"], "w2": ["good", *(name for name in VIPS if name != "idle")]}
CAPTURED = ["client", "idle", "good", "remote"]


def _services(mesh: AmbientMesh) -> Mapping[str, Any]:
    host = "{}.default.svc.cluster.local"
    endpoints: dict[str, dict[str, Any]] = {
        name: {
            "services": {f"default/{host.format(name)}": {80: 8080}},
            "capacity": 1_000_000,
            "protocol": "TCP" if name == "plain" else "HBONE",
        }
        for name in VIPS
    }
    endpoints["good"] = {"services": {f"default/{host.format(name)}": {80: 8080} for name in VIPS}}
    common = {"namespace": "default", "ports": {80: 8080}}
    services = [
        {"name": name, "hostname": host.format(name), "vips": [f"/{vip}"], **common} for name, vip in VIPS.items()
    ]
    return {"workloads": mesh.workloads(**endpoints), "services": services}


@contextlib.asynccontextmanager
async def endpoints(tmp_path: Path, **env: str) -> AsyncIterator[tuple[AmbientMesh, HboneEnds]]:
    """The mesh, with its bad endpoints at work."""

    async def garbage(sock: object) -> bytes:
        return b"220 mail.example.com ESMTP\r\n" * 10

    async with contextlib.AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(
            mesh_of(NODES, tmp_path, captured=CAPTURED, local=_services, env=env)
        )
        ends = await stack.enter_async_context(HboneEnds(tmp_path))
        garbled = listen("::", 15008, netns=mesh.lab.pod("garbled").netns)
        await stack.enter_async_context(serving(garbled, garbage))
        for name, status in (("down", 503), ("strict", 401), ("impostor", 200)):
            account = "thief" if name == "impostor" else name
            server = ends.serving(mesh.lab.pod(name), account, greeting(b"stolen\n"), status=status)
            await stack.enter_async_context(server)
        shaky = ends.serving(
            mesh.lab.pod("shaky"),
            "shaky",
            greeting(b"steady\n"),
            settings=ConnectionSettings(http2=Http2Settings(early_data=True)),
            crashes=lambda: ends.requests[:-1] != [],
        )
        await stack.enter_async_context(shaky)
        await stack.enter_async_context(app(mesh.lab.pod("good")))
        yield mesh, ends


def test_another_endpoint_when_one_fails(tmp_path: Path) -> None:
    async def main() -> None:
        async with endpoints(tmp_path) as (mesh, ends):
            client, proxy = mesh.lab.pod("client"), mesh.node_of("client")
            good = f"app good peer {client.ipv4}\n".encode()
            for number, name in enumerate(("closed", "plain", "garbled", "down", "idle", "remote"), start=1):
                # The client sends first, and its bytes arrive complete and once.
                assert await ask(client, VIPS[name], 80) == good + HELLO, name
                hostname = f"{name}.default.svc.cluster.local"
                (line,) = await proxy.lines("outbound", 1, dst_service=hostname)
                assert (line["dst.workload"], line.get("error")) == ("good", None), name
                assert (line["bytes_sent"], line["bytes_recv"]) == (len(HELLO), len(good + HELLO)), name
                assert proxy.metric("ztunnel_connect_retries_total") == number, name
                # One connection, counted where it went.
                counted = {"reporter": "source", "destination_service": hostname}
                for event in ("opened", "closed"):
                    for workload, count in ((name, 0), ("good", 1)):
                        found = proxy.metric(
                            f"istio_tcp_connections_{event}_total", destination_workload=workload, **counted
                        )
                        assert found == count, (name, event, workload)
                assert proxy.metric("istio_tcp_connections_failed_total", **counted) == 0
            # Failed endpoints are avoided for some time.
            asked = len(ends.requests)
            for _ in range(5):
                assert await ask(client, VIPS["down"], 80) == good + HELLO
            assert len(ends.requests) == asked == 1
            assert proxy.metric("ztunnel_connect_retries_total") == number

    asyncio.run(main())


def test_a_verdict_is_final(tmp_path: Path) -> None:
    async def main() -> None:
        async with endpoints(tmp_path) as (mesh, ends):
            client, proxy = mesh.lab.pod("client"), mesh.node_of("client")
            assert await refused(client, VIPS["strict"], 80)
            await proxy.failed("http status: 401 Unauthorized", "outbound")
            assert await refused(client, VIPS["impostor"], 80)
            await proxy.failed("identity verification error: peer did not present the expected SAN", "outbound")
            assert proxy.metric("ztunnel_connect_retries_total") == 0
            assert not mesh.node_of("good").access("inbound")
            assert [request.head.authority for request in ends.requests] == [
                f"{mesh.lab.pod('strict').ipv4}:8080".encode()
            ]

    asyncio.run(main())


@pytest.mark.parametrize("early_data", [True, False])
def test_what_may_have_been_delivered_is_not_sent_elsewhere(tmp_path: Path, *, early_data: bool) -> None:
    async def main() -> None:
        env = {"ZTUNNEL_EARLY_DATA": str(early_data).lower()}
        async with endpoints(tmp_path, **env) as (mesh, ends):
            client, proxy = mesh.lab.pod("client"), mesh.node_of("client")
            assert await ask(client, VIPS["shaky"], 80) == b"steady\n" + HELLO
            # Its first bytes have arrived before the proxy sees the connection.
            proxy.process.send_signal(signal.SIGSTOP)
            with await connect((VIPS["shaky"], 80), netns=client.netns) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, HELLO)
                sock.shutdown(socket.SHUT_WR)
                proxy.process.send_signal(signal.SIGCONT)
                if early_data:
                    with pytest.raises(ConnectionResetError):
                        await everything(sock)
                    assert proxy.metric("ztunnel_connect_retries_total") == 0
                    assert not mesh.node_of("good").access("inbound")
                else:
                    assert await everything(sock) == f"app good peer {client.ipv4}\n".encode() + HELLO
            assert len(ends.requests) == 2

    asyncio.run(main())


def test_without_retries(tmp_path: Path) -> None:
    async def main() -> None:
        async with endpoints(tmp_path, ZTUNNEL_CONNECT_RETRIES="0") as (mesh, _):
            client, proxy = mesh.lab.pod("client"), mesh.node_of("client")
            for name, error in {
                "closed": "io error: Connection refused (os error 111)",
                "down": "http status: 503 Service Unavailable",
                "idle": "http status: 503 Service Unavailable",
            }.items():
                for attempt in (1, 2):  # nor does a failure steer the connections after it
                    assert await refused(client, VIPS[name], 80), name
                    lines = await proxy.lines("outbound", attempt, dst_workload=name)
                    assert [line["error"] for line in lines] == [error] * attempt
            assert not mesh.node_of("good").access("inbound")

    asyncio.run(main())


def test_an_endpoint_that_goes_while_it_is_dialled(tmp_path: Path) -> None:
    # The failure of the last attempt is logged once. The absence of further endpoints is not logged.
    stays = asyncio.Event()

    async def main() -> None:
        def local(mesh: AmbientMesh) -> Mapping[str, Any]:
            described = _services(mesh)
            only = [each for each in described["services"] if each["name"] == "garbled"]
            gone = {} if not stays.is_set() else {"services": {}}
            workloads = [
                each | (gone if each["name"] == "garbled" else {"services": {}}) for each in described["workloads"]
            ]
            return {"services": only, "workloads": workloads}

        async with mesh_of(NODES, tmp_path, captured=CAPTURED, local=local) as mesh:
            client, proxy = mesh.lab.pod("client"), mesh.node_of("client")
            dialled, go = asyncio.Event(), asyncio.Event()

            async def late_garbage(sock: object) -> bytes:
                dialled.set()
                await go.wait()
                return b"x" * 100

            async with (
                serving(listen("::", 15008, netns=mesh.lab.pod("garbled").netns), late_garbage),
                asyncio.TaskGroup() as group,
            ):
                asking = group.create_task(refused(client, VIPS["garbled"], 80))
                await dialled.wait()
                stays.set()
                await mesh.change_local(local)
                await eventually(lambda: _has_no_endpoint(proxy.dump()), "the endpoint gone")
                go.set()
                assert await asking
            lines = await eventually(lambda: proxy.access("outbound"), "an access line")
            assert [line["message"] for line in lines] == ["connection complete"]
            assert "error" in lines[0]

    asyncio.run(main())


def _has_no_endpoint(dump: Any) -> bool:
    return all(not service["endpoints"] for service in dump["services"])
