"""Captured pods and others: which connections become tunnels, which stay plain, and the logs of both sides."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from deploy.lab import Place
from tests.netns.istio import HELLO, AmbientMesh, ask, eventually, mesh_of, refused
from tests.netns.toys import app

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]
IDENTITY = "spiffe://cluster.local/ns/default/sa/{}"


async def hello(client: Place, server: Place, version: int = 4) -> bytes:
    """Call the application of a pod, and check that it sees the client."""
    answer = await ask(client, server.address(version), 8080)
    assert answer == f"app {server.name} peer {client.address(version)}\n".encode() + HELLO
    return answer


@pytest.mark.parametrize("interpreter", [{}, {"PYTHONOPTIMIZE": "2"}], ids=["plain", "as in the image"])
def test_captured_pods_of_one_node_and_of_two(interpreter: dict[str, str], tmp_path: Path) -> None:
    # local_captured_inpod, cross_node_captured_inpod
    async def main() -> None:
        nodes = {"w1": ["client", "near"], "w2": ["far"]}
        async with mesh_of(nodes, tmp_path, env=interpreter) as mesh:
            client = mesh.lab.pod("client")
            for name in ("near", "far"):
                server = mesh.lab.pod(name)
                async with app(server):
                    answer = await hello(client, server)
                outbound = await mesh.node_of("client").ended("outbound", name)
                inbound = await mesh.node_of(name).ended("inbound", name)
                for line in (outbound, inbound):
                    assert line["src.identity"] == IDENTITY.format("client")
                    assert line["dst.identity"] == IDENTITY.format(name)
                    assert line["dst.addr"] == f"{server.ipv4}:15008"
                    assert line["dst.hbone_addr"] == f"{server.ipv4}:8080"
                assert (outbound["bytes_sent"], outbound["bytes_recv"]) == (len(HELLO), len(answer))
                assert (inbound["bytes_sent"], inbound["bytes_recv"]) == (len(answer), len(HELLO))
                counted: dict[str, Any] = {
                    "destination_workload": name,
                    "connection_security_policy": "mutual_tls",
                }
                for proxy, reporter in ((mesh.node_of("client"), "source"), (mesh.node_of(name), "destination")):
                    labels = {**counted, "reporter": reporter, "response_flags": "-"}
                    assert proxy.metric("istio_tcp_connections_closed_total", **labels) == 1
                    labels.pop("response_flags")
                    assert proxy.metric("istio_tcp_connections_opened_total", **labels) == 1
                    assert proxy.metric("istio_tcp_received_bytes_total", **labels) == len(HELLO)
                    assert proxy.metric("istio_tcp_sent_bytes_total", **labels) == len(answer)

    asyncio.run(main())


def test_a_server_or_a_client_outside_the_mesh(tmp_path: Path) -> None:
    # server_uncaptured_inpod, client_uncaptured_inpod
    async def main() -> None:
        nodes = {"w1": ["client", "near"], "w2": ["outside"]}
        async with mesh_of(nodes, tmp_path, captured=["client", "near"]) as mesh:
            client, near, outside = (mesh.lab.pod(name) for name in ("client", "near", "outside"))
            async with app(near), app(outside):
                await hello(client, outside)
                await hello(outside, near)
            proxy = mesh.node_of("client")
            outbound = await proxy.ended("outbound", "outside")
            assert outbound["dst.addr"] == f"{outside.ipv4}:8080"
            inbound = await proxy.ended("inbound", "near")
            assert (inbound["src.workload"], inbound["dst.addr"]) == ("outside", f"{near.ipv4}:8080")
            for line in (outbound, inbound):
                assert not {"src.identity", "dst.identity", "dst.hbone_addr"} & line.keys()
            assert proxy.metric("istio_tcp_connections_opened_total", connection_security_policy="unknown") == 2

    asyncio.run(main())


def test_a_proxy_of_one_workload(tmp_path: Path) -> None:
    # server_uncaptured_dedicated, client_uncaptured_dedicated, cross_node_captured_dedicated
    async def main() -> None:
        nodes = {"w1": ["client"], "w2": ["server", "outside"]}
        captured = ["client", "server"]
        async with mesh_of(nodes, tmp_path, captured=captured, dedicated=True) as mesh:
            client, server, outside = (mesh.lab.pod(name) for name in ("client", "server", "outside"))
            for name in captured:  # each is ready, and carries no connection yet
                (own,) = mesh.node_of(name).dump()["certificates"]
                assert (own["identity"], own["state"]) == (IDENTITY.format(name), "Available")
            async with app(server), app(outside):
                await hello(client, server)
                await hello(client, outside)
                await hello(outside, server)
            secured = await mesh.node_of("client").ended("outbound", "server")
            assert secured["src.identity"] == IDENTITY.format("client")
            assert secured["dst.identity"] == IDENTITY.format("server")
            assert "dst.identity" not in await mesh.node_of("client").ended("outbound", "outside")
            tunnel, plain = await mesh.node_of("server").lines("inbound", 2, dst_workload="server")
            assert (tunnel["src.identity"], plain["src.workload"]) == (IDENTITY.format("client"), "outside")
            assert "src.identity" not in plain

    asyncio.run(main())


def test_ipv6_from_end_to_end(tmp_path: Path) -> None:
    async def main() -> None:
        nodes = {"w1": ["client", "near"], "w2": ["far", "outside"]}
        async with mesh_of(nodes, tmp_path, captured=["client", "near", "far"]) as mesh:
            client, outside = mesh.lab.pod("client"), mesh.lab.pod("outside")
            for name in ("near", "far"):
                server = mesh.lab.pod(name)
                async with app(server):
                    await hello(client, server, 6)
                    await hello(outside, server, 6)
                tunnel, plain = await mesh.node_of(name).lines("inbound", 2, dst_workload=name)
                assert tunnel["dst.hbone_addr"] == f"[{server.ipv6}]:8080"
                assert plain["dst.addr"] == f"[{server.ipv6}]:8080"

    asyncio.run(main())


@pytest.mark.parametrize("preserved", [True, False], ids=["true", "false"])
def test_original_source(tmp_path: Path, *, preserved: bool) -> None:
    # ENABLE_ORIG_SRC; over the shortcut, over the wire, and plain
    async def main() -> None:
        nodes = {"w1": ["client", "near"], "w2": ["far", "outside"]}
        env = {"ENABLE_ORIG_SRC": str(preserved).lower()}
        async with mesh_of(nodes, tmp_path, captured=["client", "near", "far"], env=env) as mesh:
            for client, server in (("client", "near"), ("client", "far"), ("outside", "near")):
                to = mesh.lab.pod(server)
                async with app(to):
                    answer = await ask(mesh.lab.pod(client), to.ipv4, 8080)
                seen = mesh.lab.pod(client) if preserved else to
                assert answer == f"app {server} peer {seen.ipv4}\n".encode() + HELLO

    asyncio.run(main())


SERVICE = {"services": {"shop": {"addresses": ["10.96.0.10"], "ports": {"http": {"port": 80, "target": 8080}}}}}


def test_service_loadbalancing(tmp_path: Path) -> None:
    # service_loadbalancing, test_vip_request
    async def main() -> None:
        nodes = {"w1": ["client", "near"], "w2": ["far"]}
        described: dict[str, Any] = {"shop": {**SERVICE["services"]["shop"], "pods": ["near", "far"]}}
        async with mesh_of(nodes, tmp_path, mesh={"services": described}) as mesh:
            client, hit = mesh.lab.pod("client"), set[bytes]()
            async with app(mesh.lab.pod("near")), app(mesh.lab.pod("far")):
                for _ in range(50):
                    answer = await ask(client, "10.96.0.10", 80)
                    hit.add(answer.split()[1])
                    if len(hit) == 2:
                        break
            assert hit == {b"near", b"far"}
            for name in ("near", "far"):
                outbound = await mesh.node_of("client").ended("outbound", name)
                inbound = await mesh.node_of(name).ended("inbound", name)
                assert outbound["dst.service"] == inbound["dst.service"] == "shop.default.svc.cluster.local"
                assert outbound["dst.hbone_addr"] == f"{mesh.lab.pod(name).ipv4}:8080"
                labels = {"destination_service": "shop.default.svc.cluster.local", "destination_workload": name}
                source, destination = mesh.node_of("client"), mesh.node_of(name)
                for proxy, reporter in ((source, "source"), (destination, "destination")):
                    labels["reporter"] = reporter
                    assert proxy.metric("istio_tcp_connections_opened_total", **labels) >= 1

    asyncio.run(main())


def test_a_service_without_endpoints_is_down(tmp_path: Path) -> None:
    async def main() -> None:
        described: dict[str, Any] = {"shop": {**SERVICE["services"]["shop"], "pods": []}}
        async with mesh_of({"w1": ["client"]}, tmp_path, mesh={"services": described}) as mesh:
            assert await refused(mesh.lab.pod("client"), "10.96.0.10", 80)
            line = await mesh.node_of("client").failed("no healthy upstream: 10.96.0.10:80")
            assert line["message"] == "connection failed"
            assert mesh.node_of("client").metric("istio_tcp_connections_opened_total") == 0

    asyncio.run(main())


async def socks(mesh: AmbientMesh, client: Place, kind: int, host: bytes, port: int) -> bytes:
    """CONNECT over SOCKS5, then ``hello world``."""
    loop = asyncio.get_running_loop()
    sock = client.socket()
    sock.setblocking(False)
    with sock:
        async with asyncio.timeout(20):
            await loop.sock_connect(sock, ("127.0.0.1", 15080))
            await loop.sock_sendall(sock, b"\5\1\0")
            assert await loop.sock_recv(sock, 2) == b"\5\0"
            await loop.sock_sendall(sock, b"\5\1\0" + bytes([kind]) + host + port.to_bytes(2, "big"))
            reply = await loop.sock_recv(sock, 10)
            if reply[1]:
                return reply
            await loop.sock_sendall(sock, HELLO)
            sock.shutdown(socket.SHUT_WR)
            received = b""
            while data := await loop.sock_recv(sock, 65536):
                received += data
            return received


def test_requests_over_socks(tmp_path: Path) -> None:
    # test_hbone_request, test_tcp_request, test_vip_request, test_hostname_request, each [_local]
    async def main() -> None:
        nodes = {"w1": ["client", "near"], "w2": ["far", "outside"]}
        shop = SERVICE["services"]["shop"]
        described: dict[str, Any] = {"shop": {**shop, "pods": ["far"]}, "void": {**shop, "addresses": []}}
        env = {"UNSTABLE_ENABLE_SOCKS5": "true", "ISTIO_META_DNS_CAPTURE": "true"}
        captured = ["client", "near", "far"]
        async with mesh_of(nodes, tmp_path, captured=captured, mesh={"services": described}, env=env) as mesh:
            client = mesh.lab.pod("client")
            for name in ("near", "far", "outside"):
                server = mesh.lab.pod(name)
                async with app(server):
                    answer = await socks(mesh, client, 1, server.ipv4.packed, 8080)
                    assert answer.endswith(HELLO)
                    answer = await socks(mesh, client, 4, server.ipv6.packed, 8080)
                    assert answer.endswith(HELLO)
                lines = await mesh.node_of("client").lines("outbound", 2, dst_workload=name)
                assert {"dst.identity" in line for line in lines} == {name != "outside"}
            async with app(mesh.lab.pod("far")):
                name = b"shop.default.svc.cluster.local"
                for kind, host in ((1, bytes((10, 96, 0, 10))), (3, bytes([len(name)]) + name)):
                    assert (await socks(mesh, client, kind, host, 80)).endswith(HELLO)
            lines = await mesh.node_of("client").lines("outbound", 2, dst_service=name.decode())
            assert {line["dst.workload"] for line in lines} == {"far"}
            missing = b"void.default.svc.cluster.local"
            assert (await socks(mesh, client, 3, bytes([len(missing)]) + missing, 80))[1] == 4

    asyncio.run(main())


def test_metrics_through_the_proxys_own_tunnel_listener(tmp_path: Path) -> None:
    # test_hbone_metrics_access
    async def main() -> None:
        async with mesh_of({"w1": ["client"], "w2": ["other"]}, tmp_path) as mesh:
            for node in ("w1", "w2"):
                host, request = mesh.proxies[node].place.ipv4, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
                answer = await ask(mesh.lab.pod("client"), host, 15020, request)
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
                assert b"istio_build" in answer
                line = await mesh.proxies[node].ended("inbound", f"ztunnel-{node}")
                assert line["src.identity"] == IDENTITY.format("client")
                assert line["dst.hbone_addr"] == f"{host}:15020"

    asyncio.run(main())


def test_certificates_are_prefetched_and_forgotten(tmp_path: Path) -> None:
    # test_prefetch_forget_certs
    async def main() -> None:
        nodes = {"w1": ["client", "leaving"], "w2": ["far"]}
        async with mesh_of(nodes, tmp_path) as mesh:
            proxy = mesh.node_of("client")

            def identities() -> set[str]:
                return {entry["identity"] for entry in proxy.dump()["certificates"]}

            ztunnel = "spiffe://cluster.local/ns/istio-system/sa/ztunnel"
            own = {IDENTITY.format("client"), IDENTITY.format("leaving"), ztunnel}
            assert await eventually(lambda: identities() == own, "own identities prefetched, the others' not")
            mesh.pods["leaving"] = {"service_account": "client"}
            mesh.write_mesh()
            await eventually(
                lambda: identities() == own - {IDENTITY.format("leaving")}, "the last pod's identity forgotten"
            )

    asyncio.run(main())
