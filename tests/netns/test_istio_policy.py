"""Policies and workloads that change while connections live."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.netns.istio import HELLO, AmbientMesh, NodeProxy, ask, mesh_of, refused
from tests.netns.toys import app
from tproxy.aio.sockets import connect
from ztunnel.cli import main as command

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]
NODES = {"w1": ["client", "near"], "w2": ["far", "outside"]}
CAPTURED = ["client", "near", "far"]
DENY_CLIENT = {
    "name": "deny-client",
    "namespace": "default",
    "scope": "WorkloadSelector",
    "action": "Deny",
    "dryRun": False,
    "rules": [[[{"serviceAccounts": [{"namespace": "default", "serviceAccount": "client"}]}]]],
}
ALLOW_CLIENT = {**DENY_CLIENT, "name": "allow-client", "action": "Allow"}


@contextlib.asynccontextmanager
async def held(mesh: AmbientMesh, client: str, server: str) -> AsyncIterator[socket.socket]:
    """A connection that has carried something, and stays."""
    to = mesh.lab.pod(server).ipv4
    with await connect((to, 8080), netns=mesh.lab.pod(client).netns) as sock:
        await lives(sock)
        yield sock


async def lives(sock: socket.socket) -> None:
    loop, received = asyncio.get_running_loop(), b""
    await loop.sock_sendall(sock, HELLO)
    async with asyncio.timeout(20):
        while not received.endswith(HELLO):
            data = await loop.sock_recv(sock, 1000)
            assert data
            received += data


async def ends(sock: socket.socket) -> None:
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().sock_recv(sock, 1000) == b""


def test_live_connections_are_judged_again_when_a_policy_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def explained(proxy: NodeProxy, *words: str) -> Any:
        """Run the command on a proxy's node; return its status, and the answers."""
        status = proxy.place.run(command, ["explain", *words, "--json"])
        found = json.loads(capsys.readouterr().out)
        return status, found.get("items", found)

    def what_is_said_of_live_connections(mesh: AmbientMesh, tunnelled: socket.socket) -> None:
        source = "{}:{}".format(*tunnelled.getsockname())
        status, (out,) = explained(mesh.node_of("client"), "--connection", source)
        assert (status, out["verdict"], out["ways"][0]["taken"]) == (0, "allowed", True)
        far = mesh.node_of("far")
        entries = [each for each in far.connections() if each["direction"] == "inbound"]
        proven = {each["srcIdentity"]: each for each in entries}
        assert set(proven) == {f"spiffe://cluster.local/ns/default/sa/{name}" for name in ("client", "near")} | {
            None
        }
        for identity, each in proven.items():
            status, (into,) = explained(far, "--connection", f"{each['src']}-{each['actualDst']}")
            assert (status, into["verdict"], into["source"]["identity"]) == (0, "allowed", identity)

    async def main() -> None:
        async with (
            mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh,
            contextlib.AsyncExitStack() as stack,
        ):
            for name in ("near", "far"):
                await stack.enter_async_context(app(mesh.lab.pod(name)))
            joined, tunnelled, plain, other = [
                await stack.enter_async_context(held(mesh, *who))
                for who in (("client", "near"), ("client", "far"), ("outside", "far"), ("near", "far"))
            ]
            what_is_said_of_live_connections(mesh, tunnelled)
            principals = ["cluster.local/ns/default/sa/client"]
            rule = {"action": "DENY", "rules": [{"from": {"principals": principals}}]}
            mesh.write_mesh(policies={"no-client": rule})
            await ends(joined)
            await ends(tunnelled)
            await lives(plain)
            await lives(other)
            for name in ("near", "far"):
                proxy = mesh.node_of(name)
                line = await proxy.failed("connection closed due to policy change", "inbound")
                assert (line["src.workload"], line["dst.workload"]) == ("client", name)
                status, (told,) = explained(proxy, "--log-line", json.dumps(line))
                assert (status, told["inbound"]["refused"]) == (1, "explicitly denied by: default/no-client")
                labels = {"reporter": "destination", "destination_workload": name, "response_flags": "DENY"}
                assert proxy.metric("istio_tcp_connections_closed_total", **labels) == 1
                text = proxy.log_path.read_text()
                assert "closed because it's no longer allowed after a policy update" in text
            # On the client's side this is no failure. The tunnel ends when the application has closed.
            tunnelled.close()
            for line in await mesh.node_of("client").lines("outbound", 2):
                assert "error" not in line
            mesh.write_mesh(
                policies={"mesh-only": {"action": "DENY", "rules": [{"from": {"not_principals": ["*"]}}]}}
            )
            await ends(plain)
            await lives(other)
            to = f"{mesh.lab.pod('far').ipv4}:8080"
            for name, verdict in (("outside", "refused by the destination"), ("near", "allowed")):
                _, told = explained(mesh.node_of("far"), f"default/{name}", to)
                assert told["verdict"] == verdict
            assert await ask(mesh.lab.pod("client"), mesh.lab.pod("far").ipv4, 8080)  # and the client is back

    asyncio.run(main())


def test_live_connections_are_judged_again_when_the_workload_changes(tmp_path: Path) -> None:
    def naming(*policies: Mapping[str, Any], **named: list[str]) -> Any:
        def local(mesh: AmbientMesh) -> Mapping[str, Any]:
            references = {
                name: {"authorizationPolicies": [f"default/{policy}" for policy in named.get(name, [])]}
                for name in ("near", "far")
            }
            return {"workloads": mesh.workloads(**references), "policies": list(policies)}

        return local

    async def main() -> None:
        async with (
            mesh_of(NODES, tmp_path, captured=CAPTURED, local=naming(DENY_CLIENT)) as mesh,
            contextlib.AsyncExitStack() as stack,
        ):
            client, near, far = (mesh.lab.pod(name) for name in ("client", "near", "far"))
            for server in (near, far):
                await stack.enter_async_context(app(server))
            joined = await stack.enter_async_context(held(mesh, "client", "near"))
            tunnelled = await stack.enter_async_context(held(mesh, "client", "far"))
            # The policy existed before. New is that it applies to this workload.
            await mesh.change_local(naming(DENY_CLIENT, far=["deny-client"]))
            await ends(tunnelled)
            await mesh.node_of("far").failed("connection closed due to policy change", "inbound")
            assert await refused(client, far.ipv4, 8080)
            await lives(joined)

            # A policy that is named and has not arrived admits no connection, but gets time to arrive: new
            # connections wait for it, and live ones continue.
            await mesh.change_local(naming(near=["allow-client"], far=["allow-client"]))
            waiting = await stack.enter_async_context(asyncio.TaskGroup())
            asked = waiting.create_task(ask(client, far.ipv4, 8080))
            await lives(joined)
            await mesh.change_local(naming(ALLOW_CLIENT, near=["allow-client"], far=["allow-client"]))
            assert (await asked).endswith(HELLO)
            await lives(joined)

            # If it does not arrive, live connections are closed as well.
            await mesh.change_local(naming(ALLOW_CLIENT, near=["never"], far=["never"]))
            asked_in_vain = waiting.create_task(refused(client, far.ipv4, 8080))
            await lives(joined)
            await ends(joined)
            assert await asked_in_vain
            await mesh.node_of("near").failed("connection closed due to policy change", "inbound")
            await mesh.node_of("far").failed("policy rejection: policy default/never has not arrived", "inbound")

    asyncio.run(main())
