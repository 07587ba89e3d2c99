"""Tunnels within the node have the logs, metrics and denials of tunnels over the wire."""

import asyncio
import re
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.netns.istio import HELLO, AmbientMesh, ask, mesh_of, refused
from tests.netns.toys import app
from tproxy.aio.sockets import connect

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]

MESH: dict[str, Any] = {
    "services": {
        "shop": {"addresses": ["10.96.0.10"], "ports": {"http": {"port": 80, "target": 8080}}, "pods": ["server"]}
    },
    "policies": {
        "no-9999": {"action": "DENY", "pods": ["server"], "rules": [{"to": {"ports": [9999]}}]},
        "only-8080": {"action": "ALLOW", "pods": ["server"], "rules": [{"to": {"ports": [8080, 9]}}]},
        "watched": {
            "action": "DENY",
            "dry_run": True,
            "pods": ["server"],
            "rules": [{"from": {"principals": ["cluster.local/ns/default/sa/client"]}}],
        },
    },
}


async def calls(mesh: AmbientMesh) -> list[object]:
    """Make an application's calls; return what it sees."""
    client, server = mesh.lab.pod("client"), mesh.lab.pod("server")
    loop, seen = asyncio.get_running_loop(), list[object]()
    async with app(server):
        for host, port in ((server.ipv4, 8080), (server.ipv6, 8080), ("10.96.0.10", 80)):
            seen.append(await ask(client, host, port))
        seen += [
            await refused(client, server.ipv4, 9999),  # denied by a policy
            await refused(client, server.ipv4, 7777),  # allowed by none
            await refused(client, server.ipv4, 9),  # nobody listens
            await refused(client, server.ipv4, 15006),  # a port of the proxy
        ]
        with await connect((server.ipv4, 8080), netns=client.netns) as sock:  # a reset of the client
            await loop.sock_sendall(sock, HELLO)
            received = b""
            async with asyncio.timeout(20):
                while not received.endswith(HELLO):
                    received += await loop.sock_recv(sock, 1000)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return seen


#: What differs from connection to connection.
_SOURCE_PORT = re.compile(r":\d+$")


def comparable(line: dict[str, Any]) -> tuple[tuple[str, object], ...]:
    fields = {key: value for key, value in line.items() if key not in ("time", "duration")}
    fields["src.addr"] = _SOURCE_PORT.sub("", fields["src.addr"])
    return tuple(sorted(fields.items()))


def traffic(page: str) -> list[str]:
    return sorted(
        line
        for line in page.splitlines()
        if line.startswith(("istio_tcp_conn", "istio_tcp_rec", "istio_tcp_sent", "istio_authz"))
    )


def test_node_local_tunnels_behave_like_tunnels_on_the_wire(tmp_path: Path) -> None:
    async def observed(shortcut: bool) -> tuple[list[object], dict[str, list[object]], list[str], bool]:
        folder = tmp_path / str(shortcut)
        folder.mkdir()
        env = {"ZTUNNEL_NODE_LOCAL_SHORTCUT": str(shortcut).lower()}
        async with mesh_of({"w1": ["client", "server"]}, folder, mesh=MESH, env=env) as mesh:
            seen = await calls(mesh)
            proxy = mesh.node_of("client")
            lines = {}
            for direction in ("outbound", "inbound"):
                lines[direction] = sorted(map(comparable, await proxy.lines(direction, 8)))
            tunnels = proxy.metric("istio_tcp_sockets_open", reporter="destination")
            return seen, lines, traffic(proxy.get(15020, "/metrics")[1]), tunnels > 0

    async def main() -> None:
        with_it, without = await observed(True), await observed(False)
        assert with_it[3] is False
        assert without[3] is True  # it made a difference
        assert with_it[0] == without[0]
        for direction in ("outbound", "inbound"):
            assert with_it[1][direction] == without[1][direction]
        assert with_it[2] == without[2]

    asyncio.run(main())
