"""The root of istiod's certificate authority is replaced, and nodes learn this at different times. Meanwhile their
pods keep connections open, use pooled tunnel connections, and open new tunnel connections.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from deploy.lab import may_make_namespaces
from tests.apiserver.server import ApiServer, api_server
from tests.hbone.certificates import Authority
from tests.istiod.mesh import MeshOfIstiod
from tests.istiod.server import PLUGGED_IN
from tests.netns.istio import HELLO, ask, eventually, mesh_of, refused
from tests.netns.test_istio_exhaustion import WallClock
from tests.netns.test_istio_policy import ends, held, lives
from tests.netns.toys import app

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not may_make_namespaces(), reason="NOT TESTED: network namespaces need root"),
]
NODES = {"w1": ["one", "near"], "w2": ["two"], "w3": ["three"]}


def plug_in(folder: Path, issuer: Authority, roots: Sequence[Authority]) -> None:
    """Write the files of the secret ``cacerts``: an intermediate that issues, and the trusted roots."""
    folder.mkdir(exist_ok=True)
    private = issuer.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "ca-cert.pem").write_bytes(issuer.pem)
    (folder / "ca-key.pem").write_bytes(private)
    (folder / "cert-chain.pem").write_bytes(issuer.pem)
    (folder / "root-cert.pem").write_bytes(b"".join(root.pem for root in roots))


class Renewals:
    """Makes the proxies of single nodes renew their certificates, by setting the clocks of these nodes ahead.

    Args:
        folder: has the files of the clocks. Proxies that are started with :attr:`env` use them.
    """

    def __init__(self, folder: Path) -> None:
        self._clocks = {}
        for node in NODES:
            (folder / f"clock-{node}").mkdir()
            self._clocks[node] = WallClock(folder / f"clock-{node}")
        clock = f"{folder}/clock-{{node}}"
        self.env = {"LD_PRELOAD": f"{clock}/wall_clock.so", "CLOCK_OFFSET": f"{clock}/clock_offset"}
        self._count = 0

    async def at(self, mesh: MeshOfIstiod, node: str, roots: Sequence[Authority]) -> None:
        """Renew a node's certificates. Return once each has exactly these roots."""
        assert mesh.istiod is not None

        def certificates() -> dict[str, tuple[str, list[str]]]:
            """Return the serial numbers of leaf and roots by identity."""
            return {
                entry["identity"]: (
                    entry["certChain"][0]["serialNumber"],
                    [root["serialNumber"] for root in entry["rootCerts"]],
                )
                for entry in mesh.proxies[node].dump()["certificates"]
                if entry["certChain"]
            }

        before = certificates()
        self._count += 1
        # Each new certificate is valid for 24 h of the real time, and renewed half a lifetime after its issue.
        self._clocks[node].jump(13 * 3600 + self._count * 600)
        # A proxy compares its clock with the times of renewals when an identity is added.
        name = f"added-{self._count}"
        await mesh.istiod.account("default", name)
        await mesh.istiod.pod("default", name, [f"10.250.0.{self._count}"], node=node, account=name)
        wanted = [str(root.certificate.serial_number) for root in roots]

        def renewed() -> bool:
            found = certificates()
            return (
                len(found) == len(before) + 1
                and all(roots == wanted for _, roots in found.values())
                and all(found[identity][0] != leaf for identity, (leaf, _) in before.items())
            )

        await eventually(renewed, f"renewed certificates in {node}")
        self._clocks[node].jump(0)


def test_revoked_issuer_is_replaced_at_once(tmp_path: Path) -> None:
    root = Authority("root")
    stolen, issuer = Authority("stolen issuer", root), Authority("issuer", root)
    plugged_in, lists = tmp_path / "cacerts", tmp_path / "ca-crl.pem"
    plug_in(plugged_in, stolen, [root])
    lists.write_bytes(root.revoke())

    async def main(cluster: ApiServer) -> None:
        settings = {PLUGGED_IN: str(plugged_in)}
        async with (
            mesh_of(
                {"w1": ["one", "near"], "w2": ["two"]},
                tmp_path,
                cluster,
                kind=MeshOfIstiod,
                env={"CRL_PATH": str(lists)},
                settings=settings,
            ) as mesh,
            app(mesh.lab.pod("two")),
            app(mesh.lab.pod("near")),
        ):
            one, addresses = mesh.lab.pod("one"), [mesh.lab.pod(pod).ipv4 for pod in ("two", "near")]
            for address in addresses:
                assert (await ask(one, address, 8080)).endswith(HELLO)
            async with held(mesh, "one", "two") as far, held(mesh, "one", "near") as near:
                mesh.istiod.kill()
                plug_in(plugged_in, issuer, [root])
                await mesh.istiod.start()
                new = tmp_path / "new.pem"
                new.write_bytes(root.revoke(stolen.certificate))
                new.rename(lists)
                await ends(far)
                await ends(near)

            def renewed() -> bool:
                shown = [entry for proxy in mesh.proxies.values() for entry in proxy.dump()["certificates"]]
                wanted = str(issuer.certificate.serial_number)
                return all(entry["certChain"][1]["serialNumber"] == wanted for entry in shown)

            await eventually(renewed, "certificates of the other issuer")
            for address in addresses:
                assert (await ask(one, address, 8080)).endswith(HELLO)

    with api_server(tmp_path) as cluster:
        asyncio.run(main(cluster))


def test_replaced_root_of_the_mesh_fails_no_connection(tmp_path: Path) -> None:
    old, new = Authority("old root"), Authority("new root")
    old_issuer, new_issuer = Authority("old issuer", old), Authority("new issuer", new)
    plugged_in = tmp_path / "cacerts"
    plug_in(plugged_in, old_issuer, [old])

    async def main(cluster: ApiServer) -> None:
        renewals = Renewals(tmp_path)
        settings = {PLUGGED_IN: str(plugged_in)}
        async with contextlib.AsyncExitStack() as stack:
            mesh: Any = await stack.enter_async_context(
                mesh_of(NODES, tmp_path, cluster, kind=MeshOfIstiod, env=renewals.env, settings=settings)
            )
            istiod = mesh.istiod
            pods = {pod: mesh.lab.pod(pod) for pod in ("one", "near", "two", "three")}
            for pod in pods.values():
                await stack.enter_async_context(app(pod))
            both = [("one", "two"), ("two", "one"), ("one", "near")]
            open_connections = []

            async def check(pairs: Sequence[tuple[str, str]] = both) -> None:
                """Use all open connections and the pools, and open further connections that stay open."""
                for connection in open_connections:
                    await lives(connection)
                for client, server in pairs:
                    assert (await ask(pods[client], pods[server].ipv4, 8080)).endswith(HELLO)
                    connection = await stack.enter_async_context(held(mesh, client, server))
                    open_connections.append(connection)

            async def issue(issuer: Authority, roots: Sequence[Authority]) -> None:
                istiod.kill()
                plug_in(plugged_in, issuer, roots)
                await istiod.start()
                await check()

            await check([*both, ("one", "three"), ("three", "one")])
            await issue(old_issuer, [old, new])
            for node in ("w1", "w2"):
                await renewals.at(mesh, node, [old, new])
                await check([*both, ("one", "three"), ("three", "one")])

            await issue(new_issuer, [old, new])
            await renewals.at(mesh, "w1", [old, new])
            await check()
            # The proxy of w3 has not learned the new root: it refuses new tunnel connections with the new issuer's
            # certificates. The tunnel connection that is open carries further connections until the client renews.
            assert (await ask(pods["three"], pods["one"].ipv4, 8080)).endswith(HELLO)
            assert await refused(pods["three"], pods["near"].ipv4, 8080)
            assert await refused(pods["one"], pods["three"].ipv4, 8080)
            await renewals.at(mesh, "w2", [old, new])
            await check()

            await issue(new_issuer, [new])
            await renewals.at(mesh, "w1", [new])
            await check()
            await renewals.at(mesh, "w2", [new])
            await check()
            assert await refused(pods["three"], pods["two"].ipv4, 8080)
            await renewals.at(mesh, "w3", [new])
            await check([*both, ("one", "three"), ("three", "one")])

            for proxy in mesh.proxies.values():
                errors = [line["error"] for line in proxy.access() if line.get("error")]
                assert all("certificate" in error or "unknown ca" in error for error in errors), errors
                plain = [line for line in proxy.access() if not line.get("error") and not line.get("src.identity")]
                assert not plain
                assert not [line for line in proxy.log() if "certificate fetch failed" in line["message"]]

    with api_server(tmp_path) as cluster:
        asyncio.run(main(cluster))
