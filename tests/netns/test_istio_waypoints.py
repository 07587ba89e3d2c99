"""Tunnels that end at a waypoint or go through a gateway, and waypoints that are pods like any other."""

import asyncio
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.netns.hbone_ends import HboneEnds, greeting
from tests.netns.istio import HELLO, AmbientMesh, ask, mesh_of, refused
from tests.netns.toys import app, peer_address, serving
from tproxy.aio.sockets import connect, listen

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]
IDENTITY = "spiffe://cluster.local/ns/default/sa/{}"
DOMAIN = "default.svc.cluster.local"


def service(name: str, vip: str, **more: Any) -> dict[str, Any]:
    """A service of port 80, leading to 8080."""
    return {
        "name": name,
        "namespace": "default",
        "hostname": f"{name}.{DOMAIN}",
        "vips": [f"/{vip}"] if vip else [],
        "ports": {80: 8080},
        **more,
    }


def waypoint(destination: str, port: int = 15008) -> dict[str, Any]:
    return {"destination": destination, "hboneMtlsPort": port}


def test_waypoints(tmp_path: Path) -> None:
    # workload_waypoint, service_waypoint, service_waypoint_hostname, service_waypoint_workload_hostname
    def local(mesh: AmbientMesh) -> Mapping[str, Any]:
        by_address = waypoint(f"/{mesh.lab.pod('waypoint').ipv4}")
        ports = {80: 8080}
        names = ("service", "hostname", "workload")
        return {
            "workloads": mesh.workloads(
                server={
                    "waypoint": by_address,
                    "services": {f"default/by-{name}.{DOMAIN}": ports for name in names},
                },
                waypoint={
                    "protocol": "HBONE",
                    "hostname": "waypoint.example.com",
                    # No mapping for the tunnel port: the service's own is to be used.
                    "services": {f"default/waypoint.{DOMAIN}": {15021: 15021}},
                },
            ),
            "services": [
                service("waypoint", "", ports={15008: 15008, 15021: 15021}),
                service("by-service", "10.96.1.1", waypoint=by_address),
                service("by-hostname", "10.96.1.2", waypoint=waypoint(f"default/waypoint.{DOMAIN}")),
                service("by-workload", "10.96.1.3", waypoint=waypoint("default/waypoint.example.com")),
                service("by-nobody", "10.96.1.4", waypoint=waypoint("default/nobody.example.com")),
            ],
        }

    async def main() -> None:
        nodes = {"w1": ["client"], "w2": ["server", "waypoint"]}
        captured = ["client", "server"]
        async with mesh_of(nodes, tmp_path, captured=captured, local=local) as mesh, HboneEnds(tmp_path) as ends:
            client, server, place = (mesh.lab.pod(name) for name in ("client", "server", "waypoint"))
            proxy = mesh.node_of("client")
            cases = {
                "workload_waypoint": (str(server.ipv4), 8080, None),
                "service_waypoint": ("10.96.1.1", 80, f"by-service.{DOMAIN}"),
                "service_waypoint_hostname": ("10.96.1.2", 80, f"by-hostname.{DOMAIN}"),
                "service_waypoint_workload_hostname": ("10.96.1.3", 80, f"by-workload.{DOMAIN}"),
            }
            async with ends.serving(place, "waypoint", greeting(b"waypoint\n")), app(server):
                for case, (host, port, name) in cases.items():
                    assert await ask(client, host, port) == b"waypoint\n" + HELLO, case
                    # The waypoint receives the dialled address.
                    assert ends.requests[-1].head.authority == f"{host}:{port}".encode(), case
                    (line,) = await proxy.lines("outbound", 1, dst_hbone_addr=f"{host}:{port}")
                    assert line["dst.addr"] == f"{place.ipv4}:15008", case
                    assert line["dst.workload"] == "waypoint", case
                    assert line["dst.identity"] == IDENTITY.format("waypoint"), case
                    assert line.get("dst.service") == name, case
                    fields = dict(ends.requests[-1].head.headers)
                    assert fields[b"forwarded"].startswith(b'for="10.244.1.10:'), case
                    assert fields[b"forwarded"].endswith(f";host={name}".encode() if name else b'"'), case
                assert await refused(client, "10.96.1.4", 80)
                await proxy.failed("unknown waypoint: waypoint nobody.example.com not found", "outbound")

    asyncio.run(main())


def test_a_waypoint_that_is_somebody_else(tmp_path: Path) -> None:
    def local(mesh: AmbientMesh) -> Mapping[str, Any]:
        by_address = waypoint(f"/{mesh.lab.pod('waypoint').ipv4}")
        return {
            "workloads": mesh.workloads(server={"waypoint": by_address}, waypoint={"protocol": "HBONE"}),
        }

    async def main() -> None:
        nodes = {"w1": ["client"], "w2": ["server", "waypoint"]}
        async with (
            mesh_of(nodes, tmp_path, captured=["client", "server"], local=local) as mesh,
            HboneEnds(tmp_path) as ends,
        ):
            server, place = mesh.lab.pod("server"), mesh.lab.pod("waypoint")
            async with ends.serving(place, "impostor", greeting(b"waypoint\n")), app(server):
                assert await refused(mesh.lab.pod("client"), server.ipv4, 8080)
            expected, shown = IDENTITY.format("waypoint"), IDENTITY.format("impostor")
            line = await mesh.node_of("client").failed(f"expected SAN ({expected}), got {shown}", "outbound")
            assert line["error"].startswith("io error: ")
            assert not ends.requests

    asyncio.run(main())


# Waypoints that are captured pods


async def read_proxy_header(sock: socket.socket) -> tuple[str, str, dict[int, bytes]]:
    """Addresses and TLVs of a PROXY v2 header."""
    loop = asyncio.get_running_loop()

    async def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += await loop.sock_recv(sock, size - len(data))
        return data

    start = await exactly(16)
    assert start[:13] == bytes.fromhex("0D0A0D0A000D0A515549540A21")
    body = await exactly(struct.unpack("!H", start[14:])[0])
    assert start[13] == 0x11
    source, destination = socket.inet_ntoa(body[:4]), socket.inet_ntoa(body[4:8])
    port = struct.unpack("!H", body[10:12])[0]
    values, rest = {}, body[12:]
    while rest:
        kind, size = struct.unpack("!BH", rest[:3])
        values[kind], rest = rest[3 : 3 + size], rest[3 + size :]
    return source, f"{destination}:{port}", values


@pytest.mark.parametrize("node", ["w1", "w2"], ids=["same_node", "other_node"])
@pytest.mark.parametrize("protocol", ["NONE", "PROXY"], ids=["plain", "proxy_protocol"])
def test_sandwich_waypoint(tmp_path: Path, protocol: str, node: str) -> None:
    # sandwich_waypoint_plain, sandwich_waypoint_proxy_protocol
    def local(mesh: AmbientMesh) -> Mapping[str, Any]:
        return {
            "workloads": mesh.workloads(
                server={"services": {f"default/shop.{DOMAIN}": {80: 8080}}},
                waypoint={
                    "applicationTunnel": {"protocol": protocol, "port": 15088},
                    "services": {f"default/waypoint.{DOMAIN}": {}},
                },
            ),
            "services": [
                service("waypoint", "10.96.1.9", ports={}),  # no port at all: the tunnel's contents decide
                service("shop", "10.96.1.1", waypoint=waypoint("/10.96.1.9")),
            ],
        }

    async def main() -> None:
        nodes = {"w1": ["client"], "w2": ["server"]}
        nodes[node].append("waypoint")
        headers, peers = [], []
        async with mesh_of(nodes, tmp_path, local=local) as mesh:
            client, server, place = (mesh.lab.pod(name) for name in ("client", "server", "waypoint"))

            async def pass_on(sock: socket.socket) -> bytes:
                """Act as a layer 7 proxy: read the client's identity, dial the server, and forward its first
                line.
                """
                peers.append(str(peer_address(sock).ip))
                if protocol == "PROXY":
                    headers.append(await read_proxy_header(sock))
                upstream = await connect((str(server.ipv4), 8080), netns=place.netns)
                with upstream:
                    line = await asyncio.get_running_loop().sock_recv(upstream, 1000)
                return b"waypoint\n" + line

            async with app(server), serving(listen("::", 15088, netns=place.netns), pass_on):
                answer = await ask(client, "10.96.1.1", 80)
            assert answer == f"waypoint\napp server peer {place.ipv4}\n".encode() + HELLO
            line = await mesh.node_of("client").ended("outbound", "waypoint")
            assert line["dst.hbone_addr"] == "10.96.1.1:80"
            inbound = await mesh.node_of("waypoint").ended("inbound", "waypoint")
            assert inbound["src.identity"] == IDENTITY.format("client")
            assert inbound["bytes_recv"] == len(HELLO)  # the header is not counted
            # With a PROXY header the client's address need not be used as the source.
            assert peers == ["127.0.0.1" if protocol == "PROXY" else str(client.ipv4)]
            if protocol == "PROXY":
                (header,) = headers
                assert header[:2] == (str(client.ipv4), "10.96.1.1:80")
                assert header[2] == {0xD0: IDENTITY.format("client").encode()}

    asyncio.run(main())


# Other networks


REMOTE = IDENTITY.format("remote")
BAGGAGE = (
    b"k8s.cluster.name=far,k8s.namespace.name=elsewhere,k8s.deployment.name=remote-deployment,"
    b"service.name=remote-app,service.version=v2"
)


def _two_networks(mesh: AmbientMesh, gateway: dict[str, Any]) -> Mapping[str, Any]:
    remote = {
        "uid": "far//Pod/default/remote",
        "name": "remote",
        "namespace": "default",
        "workloadIps": [],
        "protocol": "HBONE",
        "network": "far",
        "networkGateway": gateway,
        "services": {f"default/shop.{DOMAIN}": {80: 8080}},
    }
    gateways = {"protocol": "HBONE", "services": {f"default/gateway.{DOMAIN}": {15009: 15008}}}
    return {
        "workloads": [*mesh.workloads(gateway=gateways), remote],
        "services": [
            service("shop", "10.96.1.1", subjectAltNames=[REMOTE]),
            service("gateway", "10.96.1.8", ports={15009: 15008}),
        ],
    }


@pytest.mark.parametrize("by_hostname", [False, True], ids=["double_hbone1", "double_hbone2"])
def test_double_hbone(tmp_path: Path, *, by_hostname: bool) -> None:
    def local(mesh: AmbientMesh) -> Mapping[str, Any]:
        if by_hostname:
            return _two_networks(mesh, waypoint(f"default/gateway.{DOMAIN}", 15009))
        return _two_networks(mesh, waypoint(f"/{mesh.lab.pod('gateway').ipv4}"))

    async def main() -> None:
        nodes = {"w1": ["client", "gateway"]}
        async with (
            mesh_of(nodes, tmp_path, captured=["client"], local=local) as mesh,
            HboneEnds(tmp_path) as ends,
        ):
            client, place = mesh.lab.pod("client"), mesh.lab.pod("gateway")
            inner = ends.gateway("remote", headers=((b"baggage", BAGGAGE),), first=b"remote\n")
            async with ends.serving(place, "gateway", inner):
                assert await ask(client, "10.96.1.1", 80) == b"remote\n" + HELLO
            outer, within = ends.requests
            assert outer.head.authority == within.head.authority == f"shop.{DOMAIN}:80".encode()
            assert b"x-forwarded-network" not in dict(outer.head.headers)
            assert dict(within.head.headers)[b"x-forwarded-network"] == b""
            (line,) = await mesh.node_of("client").lines("outbound", 1, dst_service=f"shop.{DOMAIN}")
            assert line["dst.addr"] == f"{place.ipv4}:15008"
            assert line["dst.workload"] == "remote-deployment"
            # The namespace is taken from the certificate, whatever the baggage contains.
            assert (line["dst.namespace"], line["dst.cluster"]) == ("default", "far")
            assert line["dst.identity"] == REMOTE
            assert (line["bytes_sent"], line["bytes_recv"]) == (len(HELLO), len(HELLO) + len(b"remote\n"))
            labels = {"destination_workload": "remote-deployment", "destination_principal": REMOTE}
            assert mesh.node_of("client").metric("istio_tcp_connections_closed_total", **labels) == 1

    asyncio.run(main())


def test_double_hbone_only_to_who_the_service_says(tmp_path: Path) -> None:
    async def main() -> None:
        def local(mesh: AmbientMesh) -> Mapping[str, Any]:
            return _two_networks(mesh, waypoint(f"/{mesh.lab.pod('gateway').ipv4}"))

        nodes = {"w1": ["client", "gateway"]}
        async with (
            mesh_of(nodes, tmp_path, captured=["client"], local=local) as mesh,
            HboneEnds(tmp_path) as ends,
        ):
            inner = ends.gateway("impostor", first=b"remote\n")
            async with ends.serving(mesh.lab.pod("gateway"), "gateway", inner):
                assert await refused(mesh.lab.pod("client"), "10.96.1.1", 80)
            await mesh.node_of("client").failed(f"expected SAN ({REMOTE}), got", "outbound")
            assert len(ends.requests) == 1  # nothing was asked for within

    asyncio.run(main())
