"""Revoked certificates are refused in handshakes, and their live connections end when the list arrives."""

import asyncio
import datetime
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from tests.netns.hbone_ends import HboneEnds
from tests.netns.istio import HELLO, AmbientMesh, NodeProxy, eventually, mesh_of, refused
from tests.netns.toys import app
from tproxy.aio.sockets import connect

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]
IDENTITY = "spiffe://cluster.local/ns/default/sa/{}"
REJECTIONS = "istio_crl_policy_rejections_total"


def publish(folder: Path, *serials: int) -> None:
    """Write the mesh's revocation list."""
    root = x509.load_pem_x509_certificate((folder / "ca" / "root-cert.pem").read_bytes())
    key = load_pem_private_key((folder / "ca" / "root-key.pem").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateRevocationListBuilder().issuer_name(root.subject)
    builder = builder.last_update(now).next_update(now + datetime.timedelta(days=1))
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        builder = builder.add_revoked_certificate(entry)
    new = folder / "crl.new"
    new.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))  # type: ignore[arg-type]
    new.rename(folder / "crl.pem")


async def serial_of(mesh: AmbientMesh, account: str) -> int:
    """Return the serial number of the certificate that a pod's own proxy presents for it."""
    proxy = mesh.node_of(account)

    def found() -> int | None:
        for entry in proxy.dump()["certificates"]:
            if entry["identity"] == IDENTITY.format(account) and entry["certChain"]:
                return int(entry["certChain"][0]["serialNumber"])
        return None

    return int(await eventually(found, f"a certificate of {account}"))


#: The side whose certificate is revoked, and the side that notices it.
SIDES = pytest.mark.parametrize(
    ("revoked", "reporter"), [("client", "destination"), ("server", "source")], ids=["crl_inbound", "crl_outbound"]
)
NODES = pytest.mark.parametrize("node", ["w1", "w2"], ids=["same_node", "other_node"])


def nodes_with(node: str) -> dict[str, list[str]]:
    nodes: dict[str, list[str]] = {"w1": ["client"], "w2": ["other"]}
    nodes[node].append("server")
    return nodes


def test_a_successor_that_cannot_read_the_list_is_not_ready(tmp_path: Path) -> None:
    """It would refuse every peer, and end the connections that move to it."""

    async def main() -> None:
        async with mesh_of(nodes_with("w1"), tmp_path, env={"CRL_PATH": f"{tmp_path}/crl.pem"}) as mesh:
            worker, before = mesh.lab.worker("w1"), mesh.proxies["w1"]
            file = tmp_path / "next.pem"
            file.write_text("nonsense")
            process = mesh.start_proxy(worker, worker.ztunnel, CRL_PATH=str(file))
            after = NodeProxy(worker.ztunnel, mesh.folder, process, before.agent, before.pods)
            await eventually(
                lambda: after.readiness() == "not ready, pending: revocation lists\n", "all else is complete"
            )
            publish(tmp_path)
            (tmp_path / "crl.pem").rename(file)
            await eventually(after.ready, "ready")

    asyncio.run(main())


@SIDES
@NODES
def test_terminates_existing_connection_on_revocation(
    tmp_path: Path, revoked: str, reporter: str, node: str
) -> None:
    # crl_{inbound,outbound}_terminates_existing_connection_on_revocation, and of the next connection
    # crl_{inbound,outbound}_rejects_revoked_cert
    async def main() -> None:
        env = {"CRL_PATH": f"{tmp_path}/crl.pem"}
        async with mesh_of(nodes_with(node), tmp_path, env=env) as mesh:
            loop, server = asyncio.get_running_loop(), mesh.lab.pod("server")
            judge = mesh.node_of("client" if reporter == "source" else "server")
            async with app(server):
                with await connect((server.ipv4, 8080), netns=mesh.lab.pod("client").netns) as sock:
                    await loop.sock_sendall(sock, HELLO)
                    async with asyncio.timeout(20):
                        received = b""
                        while not received.endswith(HELLO):
                            received += await loop.sock_recv(sock, 1000)
                    publish(tmp_path, await serial_of(mesh, "other"))  # nobody's concern
                    publish(tmp_path, await serial_of(mesh, revoked))
                    await ended(sock)
                assert judge.metric(REJECTIONS, reporter=reporter) == 1
                assert await refused(mesh.lab.pod("client"), server.ipv4, 8080)
                assert judge.metric(REJECTIONS, reporter=reporter) > 1
            direction = "outbound" if reporter == "source" else "inbound"
            line = await judge.failed("connection closed: peer certificate revoked by CRL", direction)
            assert line["dst.workload"] == "server"
            labels = {"reporter": reporter, "response_flags": "CERT_REVOKED"}
            assert judge.metric("istio_tcp_connections_closed_total", **labels) == 1
            await judge.failed("certificate revoked by a revocation list", direction)

    asyncio.run(main())


async def ended(sock: socket.socket, wait_s: float = 8.0) -> None:
    """Wait until a connection is over, in whichever way."""
    async with asyncio.timeout(wait_s):
        try:
            while await asyncio.get_running_loop().sock_recv(sock, 65536):
                pass
        except ConnectionResetError:
            pass


def test_the_far_end_of_a_double_tunnel_is_revoked(tmp_path: Path) -> None:
    remote, hostname = IDENTITY.format("remote"), "shop.default.svc.cluster.local"

    def local(mesh: AmbientMesh) -> Mapping[str, Any]:
        gateway = {"destination": f"/{mesh.lab.pod('gateway').ipv4}", "hboneMtlsPort": 15008}
        far: dict[str, Any] = {"uid": "far", "namespace": "default", "workloadIps": [], "protocol": "HBONE"}
        far |= {"network": "far", "networkGateway": gateway, "services": {f"default/{hostname}": {80: 80}}}
        shop: dict[str, Any] = {"name": "shop", "namespace": "default", "hostname": hostname, "ports": {80: 80}}
        shop |= {"vips": ["/10.96.1.1"], "subjectAltNames": [remote]}
        return {"workloads": [*mesh.workloads(gateway={"protocol": "HBONE"}), far], "services": [shop]}

    async def main() -> None:
        env = {"CRL_PATH": f"{tmp_path}/crl.pem"}
        async with (
            mesh_of({"w1": ["client", "gateway"]}, tmp_path, captured=["client"], local=local, env=env) as mesh,
            HboneEnds(tmp_path) as ends,
        ):
            loop = asyncio.get_running_loop()
            inner = ends.gateway("remote", first=b"remote\n")
            async with ends.serving(mesh.lab.pod("gateway"), "gateway", inner):
                with await connect(("10.96.1.1", 80), netns=mesh.lab.pod("client").netns) as sock:
                    async with asyncio.timeout(20):
                        assert await loop.sock_recv(sock, 1000) == b"remote\n"
                    publish(tmp_path, ends.serials["remote"])
                    await ended(sock)
            await mesh.node_of("client").failed("peer certificate revoked by CRL", "outbound")
            assert mesh.node_of("client").metric(REJECTIONS, reporter="source") == 1

    asyncio.run(main())
