"""Policies as a real istiod describes them: which connections pass, before and after each change."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.lab import Place, may_make_namespaces
from tests.istiod.mesh import MeshOfIstiod, known, shown
from tests.istiod.server import PEER_AUTHENTICATION, POLICY, SYSTEM
from tests.istiod.test_waypoints import run
from tests.limits import WAIT_S
from tests.netns.istio import HELLO, ask, refused
from tests.netns.toys import app
from tproxy.aio.sockets import connect
from ztunnel.kube.kinds import SERVICE

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not may_make_namespaces(), reason="NOT TESTED: network namespaces need root"),
]
NODES = {"w1": ["client", "plain"], "w2": ["server"]}
CAPTURED = ["client", "server"]
SELECTED = {"selector": {"matchLabels": {"app": "server"}}}
DRY_RUN = "dry run"
STRICT, PERMISSIVE = {"mode": "STRICT"}, {"mode": "PERMISSIVE"}


async def passes(place: Place, host: object, port: int) -> bool:
    return not await refused(place, host, port)


async def latest(mesh: MeshOfIstiod, number: int) -> None:
    """Wait until every proxy has what istiod sent for all objects written until now."""
    assert mesh.istiod is not None
    spec = {"clusterIP": "None", "ports": [{"port": number}]}
    await mesh.istiod.put(SERVICE, "default", "marker", spec=spec)
    await shown(mesh, "services", "marker", lambda entry: entry is not None and str(number) in entry["ports"])


def test_peer_authentication_decides_about_new_and_open_plain_connections(tmp_path: Path) -> None:
    async def main(mesh: MeshOfIstiod) -> None:
        istiod = mesh.istiod
        assert istiod is not None
        client, plain, server = map(mesh.lab.pod, ("client", "plain", "server"))
        loop = asyncio.get_running_loop()

        async def allowed(port: int, *, plain_text: bool) -> None:
            async def agrees() -> bool:
                return await passes(plain, server.ipv4, port) is plain_text

            async with asyncio.timeout(WAIT_S):
                while not await agrees():
                    await asyncio.sleep(0.1)
            assert HELLO in await ask(client, server.ipv4, port)

        async with app(server), app(server, 8081):
            await allowed(8080, plain_text=True)
            opened = [await connect((server.ipv4, port), netns=plain.netns) for port in (8080, 8081)]
            tunnelled = await connect((server.ipv4, 8080), netns=client.netns)
            with opened[0], opened[1], tunnelled:
                for sock in (*opened, tunnelled):
                    assert await loop.sock_recv(sock, 100)
                # The port's mode is looked up before the mesh's, so 8081 stays open for plain text.
                ports = {"portLevelMtls": {"8081": PERMISSIVE}}
                await istiod.put(PEER_AUTHENTICATION, SYSTEM, "mesh", spec={"mtls": STRICT})
                await istiod.put(PEER_AUTHENTICATION, "default", "ports", spec=SELECTED | ports)
                await allowed(8080, plain_text=False)
                await allowed(8081, plain_text=True)
                async with asyncio.timeout(WAIT_S):
                    assert not await _received(opened[0])
                for sock in (opened[1], tunnelled):
                    await loop.sock_sendall(sock, HELLO)
                    async with asyncio.timeout(WAIT_S):
                        assert await loop.sock_recv(sock, 100) == HELLO

                await istiod.put(PEER_AUTHENTICATION, "default", "ports", spec=SELECTED | {"mtls": STRICT})
                await allowed(8081, plain_text=False)
                async with asyncio.timeout(WAIT_S):
                    assert not await _received(opened[1])
            await istiod.put(PEER_AUTHENTICATION, "default", "ports", spec=SELECTED | {"mtls": PERMISSIVE})
            await allowed(8081, plain_text=True)
            await istiod.client.delete(PEER_AUTHENTICATION, "default", "ports")
            await allowed(8081, plain_text=False)
            await istiod.client.delete(PEER_AUTHENTICATION, SYSTEM, "mesh")
            await allowed(8080, plain_text=True)

    run(tmp_path, main, NODES, captured=CAPTURED)


def test_strict_mode_after_port_levels_leaves_the_pod_reachable_by_tunnels(tmp_path: Path) -> None:
    # istiod then lists a policy for the pod that it never sends.
    async def main(mesh: MeshOfIstiod) -> None:
        istiod = mesh.istiod
        assert istiod is not None
        client, plain, server = map(mesh.lab.pod, ("client", "plain", "server"))
        async with app(server), app(server, 8081):
            spec = SELECTED | {"portLevelMtls": {"8081": PERMISSIVE}}
            await istiod.put(PEER_AUTHENTICATION, "default", "ports", spec=spec)
            await latest(mesh, 1)
            await istiod.put(PEER_AUTHENTICATION, SYSTEM, "mesh", spec={"mtls": STRICT})
            await shown(
                mesh,
                "workloads",
                "server",
                lambda entry: entry is not None and entry.get("authorizationPolicies"),
            )
            assert await refused(plain, server.ipv4, 8080)
            for port in (8080, 8081):
                assert HELLO in await ask(client, server.ipv4, port)

    run(tmp_path, main, NODES, captured=CAPTURED)


async def _received(sock: Any) -> bytes:
    try:
        return await asyncio.get_running_loop().sock_recv(sock, 100)
    except ConnectionResetError:
        return b""


def _deny(*rules: Any) -> dict[str, Any]:
    return {**SELECTED, "action": "DENY", "rules": list(rules)}


def _allow(*rules: Any) -> dict[str, Any]:
    return {**SELECTED, "action": "ALLOW", "rules": list(rules)}


def _source(**fields: list[str]) -> dict[str, Any]:
    return {"from": [{"source": fields}]}


def _operation(**fields: list[str]) -> dict[str, Any]:
    return {"to": [{"operation": fields}]}


_PLAIN = {"key": "source.principal", "notValues": ["*"]}
_PORT = {"key": "destination.port", "values": ["8080"]}
_EVERY = "client 8080, client 8081, plain 8080, plain 8081"
#: Policies of the namespace default, and who may connect to which ports of the pod ``server`` meanwhile. The
#: client ``plain`` has no identity.
CASES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "allow nobody": (_allow(), ""),
    "allow all": (_allow({}), _EVERY),
    "allow a client": (
        _allow(_source(principals=["cluster.local/ns/default/sa/client"])), "client 8080, client 8081"
    ),
    "allow a port, or a service account to another": (
        _allow(
            _operation(ports=["8081"]), _source(serviceAccounts=["default/client"]) | _operation(ports=["8080"])
        ),
        "client 8080, client 8081, plain 8081",
    ),
    "allow with a path never matches": (
        _allow(_operation(paths=["/"], ports=["8080"]), _operation(ports=["8081"])), "client 8081, plain 8081"
    ),
    "deny with a path matches without it": (
        _deny(_operation(paths=["/"], ports=["8080"])), "client 8081, plain 8081"
    ),
    "deny by condition": (_deny({"when": [_PLAIN, _PORT]}), "client 8080, client 8081, plain 8081"),
    "deny addresses": (_deny(_source(notIpBlocks=["10.244.1.11/32"])), "plain 8080, plain 8081"),
    "audit": ({**SELECTED, "action": "AUDIT", "rules": [{}]}, _EVERY),
    DRY_RUN: (_deny({}), _EVERY),
    "for a waypoint": (
        {"targetRefs": [{"kind": "Service", "group": "", "name": "front"}], "action": "DENY", "rules": [{}]},
        _EVERY,
    ),
    "of the namespace": (
        {"action": "DENY", "rules": [_operation(notPorts=["8081"])]}, "client 8081, plain 8081"
    ),
}  # fmt: skip


@pytest.mark.parametrize("dry_run", [False, True], ids=["", "dry_run_policies"])
def test_authorization_policies(tmp_path: Path, *, dry_run: bool) -> None:
    async def main(mesh: MeshOfIstiod) -> None:
        istiod = mesh.istiod
        assert istiod is not None
        client, plain, server = map(mesh.lab.pod, ("client", "plain", "server"))
        async with app(server), app(server, 8081):
            for number, (case, (spec, expected)) in enumerate(CASES.items(), 1):
                annotations = {"istio.io/dry-run": "true"} if case == DRY_RUN else {}
                await istiod.put(POLICY, "default", f"case-{number}", annotations=annotations, spec=spec)
                await latest(mesh, number)
                if dry_run and annotations:
                    await known(mesh, "policies", f"case-{number}")

                async def passing() -> str:
                    return ", ".join(
                        [
                            f"{place.name} {port}"
                            for place in (client, plain)
                            for port in (8080, 8081)
                            if await passes(place, server.ipv4, port)
                        ]
                    )

                async with asyncio.timeout(WAIT_S):
                    while (found := await passing()) != expected:
                        await asyncio.sleep(0.1)
                assert found == expected, case
                await istiod.client.delete(POLICY, "default", f"case-{number}")
                await known(mesh, "policies", f"case-{number}", there=False)

    settings = {"AMBIENT_ENABLE_DRY_RUN_AUTHORIZATION_POLICY": str(dry_run).lower()}
    run(tmp_path, main, NODES, captured=CAPTURED, settings=settings)
