"""The control plane unreachable and back, used on demand, and reached by TLS."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deploy.lab import Place
from tests.netns.istio import HELLO, AmbientMesh, NodeProxy, ask, eventually, mesh_of, refused
from tests.netns.toys import app
from tproxy.aio.sockets import connect, listen
from tproxy.errors import ConnectFailed, TproxyError
from ztunnel.control_plane.server import ControlPlane
from ztunnel.control_plane.tokens import node_token
from ztunnel.proxy.identity import authority as ca
from ztunnel.runtime.tasks import Tasks

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]

VIP = "10.96.1.1"
NODES = {"w1": ["client"], "w2": ["one", "two", "outside"]}
CAPTURED = ["client", "one", "two"]
STALENESS = "ztunnel_xds_staleness_seconds"


def services(*pods: str) -> dict[str, Any]:
    return {"web": {"addresses": [VIP], "ports": {"http": {"port": 80, "target": 8080}}, "pods": list(pods)}}


class Chat:
    """An application's connection that stays open."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def says(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._sock, 65536)

    async def echoes(self, text: bytes = HELLO) -> bool:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._sock, text)
        received = b""
        while len(received) < len(text):
            received += await loop.sock_recv(self._sock, 65536)
        return received == text


@contextlib.asynccontextmanager
async def chat(pod: Place, host: object, port: int) -> AsyncIterator[Chat]:
    with await connect((str(host), port), netns=pod.netns) as sock:
        yield Chat(sock)


def served_by(answer: bytes) -> str:
    return answer.split()[1].decode() if answer.startswith(b"app ") else ""


def certificates(proxy: NodeProxy) -> dict[str, dict[str, Any]]:
    return {entry["identity"].rpartition("/")[2]: entry for entry in proxy.dump()["certificates"]}


def has_certificate(proxy: NodeProxy, account: str) -> bool:
    return certificates(proxy).get(account, {}).get("state") == "Available"


def test_while_the_control_plane_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        options = {"mesh": {"services": services("one")}, "captured": CAPTURED}
        async with mesh_of(NODES, tmp_path, **options) as mesh, app(mesh.lab.pod("one")), app(mesh.lab.pod("two")):
            client, proxy = mesh.lab.pod("client"), mesh.node_of("client")
            async with chat(client, VIP, 80) as open_before:
                assert served_by(await open_before.says()) == "one"
                assert proxy.metric(STALENESS) == 0
                await mesh.stop_control_plane()
                await eventually(lambda: proxy.metric(STALENESS) > 0.2, "staleness rises")
                stale_s = proxy.metric(STALENESS)
                assert await open_before.echoes()
                assert served_by(await ask(client, VIP, 80)) == "one"
                # The mesh changes meanwhile, but the proxy is not notified.
                mesh.write_mesh(services=services("two"))
                assert served_by(await ask(client, VIP, 80)) == "one"
                assert proxy.ready()
                await eventually(lambda: proxy.metric(STALENESS) > stale_s + 1, "and rises")
                await mesh.start_control_plane()
                await eventually(lambda: proxy.metric(STALENESS) == 0, "staleness falls")
                endpoints = "Kubernetes//Pod/default/two"
                await eventually(lambda: endpoints in str(proxy.dump()["services"]), "the change arrives")
                assert served_by(await ask(client, VIP, 80)) == "two"
                assert await open_before.echoes()
            assert proxy.metric("istio_xds_connection_terminations_total") >= 1
            # The output has only log lines, whatever libraries print.
            assert all(line.startswith("{") for line in proxy.log_path.read_text().splitlines())

    asyncio.run(main())


def test_a_proxy_that_starts_while_nobody_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh, app(mesh.lab.pod("one")):
            proxy = mesh.proxies["w1"]
            await eventually(lambda: has_certificate(mesh.proxies["w2"], "one"), "the other node's is there")
            await mesh.stop_control_plane()
            proxy.process.terminate()
            assert await asyncio.to_thread(proxy.process.wait, 10) == 0
            proxy.process = mesh.start_proxy(mesh.lab.worker("w1"))

            def pending() -> bool:
                with contextlib.suppress(OSError):
                    return proxy.get(15021, "/healthz/ready") == (
                        500,
                        "not ready, pending: certificates, state manager, workload proxy manager\n",
                    )
                return False

            await eventually(pending, "the servers answer")
            await eventually(
                lambda: proxy.metric("istio_xds_connection_terminations_total", reason="ConnectionError") >= 2,
                "attempts are counted",
            )
            assert proxy.metric(STALENESS) > 0
            with pytest.raises(ConnectFailed):  # captured, and nobody captures
                await ask(mesh.lab.pod("client"), mesh.lab.pod("one").ipv4, 8080)
            await mesh.start_control_plane()
            await eventually(proxy.ready, "ready")
            answer = await ask(mesh.lab.pod("client"), mesh.lab.pod("one").ipv4, 8080)
            assert served_by(answer) == "one"

    asyncio.run(main())


def test_a_successor_gets_connections_once_it_has_certificates(tmp_path: Path) -> None:
    """Both processes listen meanwhile, and the running one has valid certificates. The successor crashes at each
    stage.
    """

    async def main() -> None:
        async with mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh, app(mesh.lab.pod("one")):
            client, one = mesh.lab.pod("client"), mesh.lab.pod("one")
            worker, before = mesh.lab.worker("w1"), mesh.proxies["w1"]
            authority = f"unix:{tmp_path}/ca.sock"

            def successor() -> NodeProxy:
                process = mesh.start_proxy(worker, worker.ztunnel, CA_ADDRESS=authority)
                return NodeProxy(worker.ztunnel, mesh.folder, process, before.agent, before.pods)

            async def carried(proxy: NodeProxy) -> bool:
                """Whether each of eight connections is served, all of them by this proxy."""
                opened = proxy.metric("istio_tcp_connections_opened_total", reporter="source")
                for _ in range(8):
                    assert served_by(await ask(client, one.ipv4, 8080)) == "one"
                return proxy.metric("istio_tcp_connections_opened_total", reporter="source") == opened + 8

            async def crash(proxy: NodeProxy) -> None:
                proxy.process.kill()
                await asyncio.to_thread(proxy.process.wait, 20)

            after = successor()
            await eventually(
                lambda: after.readiness() == "not ready, pending: certificates\n", "all else is complete"
            )
            assert await carried(before)
            await crash(after)
            assert await carried(before)
            plane = ControlPlane(tmp_path / "mesh.yaml", [authority], tmp_path / "ca")
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(plane.run())
                await plane.ready.wait()
                after = successor()
                await eventually(after.ready, "ready")
                assert await carried(after)
                await crash(after)
                assert await carried(before)
                after = successor()
                await eventually(after.ready, "ready")
                mesh.proxies["w1"] = after
                before.process.terminate()
                assert await asyncio.to_thread(before.process.wait, 20) == 0
                assert await carried(after)
                serving.cancel()

    asyncio.run(main())


def test_certificates_are_renewed_when_it_is_back(tmp_path: Path) -> None:
    """An outage longer than certificates live, in seconds instead of hours."""

    async def main() -> None:
        env = {"SECRET_TTL": "8s"}
        async with mesh_of(NODES, tmp_path, captured=CAPTURED, env=env) as mesh, app(mesh.lab.pod("one")):
            client, one = mesh.lab.pod("client"), mesh.lab.pod("one")
            proxies = [mesh.proxies["w1"], mesh.proxies["w2"]]
            assert served_by(await ask(client, one.ipv4, 8080)) == "one"
            first = certificates(proxies[0])["client"]["certChain"][0]["serialNumber"]

            def serial() -> str:
                entry = certificates(proxies[0])["client"]
                return str(entry["certChain"][0]["serialNumber"]) if entry["certChain"] else ""

            await eventually(lambda: serial() not in ("", first), "a renewal while all is well")
            assert served_by(await ask(client, one.ipv4, 8080)) == "one"
            await mesh.stop_control_plane()
            await eventually(
                lambda: certificates(proxies[0])["client"]["state"].startswith("Unavailable"),
                "the certificate ends",
            )
            assert await refused(client, one.ipv4, 8080)
            errors = await eventually(
                lambda: [line["error"] for line in proxies[0].access("outbound") if "error" in line], "the line"
            )
            assert errors[0].startswith("identity error: ")
            await mesh.start_control_plane()
            for proxy, name in zip(proxies, ("client", "one"), strict=True):
                await eventually(
                    lambda proxy=proxy, name=name: certificates(proxy)[name]["state"] == "Available",
                    f"{name} has a certificate again",
                )
            assert served_by(await ask(client, one.ipv4, 8080)) == "one"

    asyncio.run(main())


# On demand


def test_on_demand(tmp_path: Path) -> None:
    async def main() -> None:
        env = {"XDS_ON_DEMAND": "true"}
        options: dict[str, Any] = {
            "mesh": {"services": services("one")},
            "captured": CAPTURED,
            "env": env,
        }
        async with (
            mesh_of(NODES, tmp_path, **options) as mesh,
            app(mesh.lab.pod("one")),
            app(mesh.lab.pod("two")),
            app(mesh.lab.pod("outside")),
        ):
            client, proxy = mesh.lab.pod("client"), mesh.proxies["w1"]

            def known() -> set[str]:
                return {workload["name"] for workload in proxy.dump()["workloads"]}

            # Without a request the proxy only has the workloads of its node.
            assert known() == {"client", "ztunnel-w1"}
            assert served_by(await ask(client, mesh.lab.pod("two").ipv4, 8080)) == "two"
            assert known() == {"client", "ztunnel-w1", "two"}
            line = await proxy.ended("outbound", "two")
            assert line["dst.identity"] == "spiffe://cluster.local/ns/default/sa/two"
            # A service brings its endpoints.
            assert served_by(await ask(client, VIP, 80)) == "one"
            assert (await proxy.ended("outbound", "one"))["dst.service"] == "web.default.svc.cluster.local"
            # Addresses outside the mesh are passed on, once the control plane has answered that it lacks them.
            fabric = mesh.lab.worker("w2").gateway(4)
            async with app(mesh.lab.worker("w2").place, 9090):
                assert served_by(await ask(client, fabric, 9090)) == "w2"
            # Resources that were requested stay current.
            mesh.write_mesh(services=services("two"))
            await eventually(
                lambda: "Kubernetes//Pod/default/two" in str(proxy.dump()["services"]), "the change arrives"
            )
            assert served_by(await ask(client, VIP, 80)) == "two"

    asyncio.run(main())


def test_on_demand_nothing_goes_out_unasked(tmp_path: Path) -> None:
    """An address about which the control plane cannot be asked is not treated as outside the mesh."""

    async def main() -> None:
        options: dict[str, Any] = {"captured": CAPTURED, "env": {"XDS_ON_DEMAND": "true"}}
        async with (
            mesh_of(NODES, tmp_path, **options) as mesh,
            app(mesh.lab.pod("one")),
            app(mesh.lab.pod("two")),
        ):
            client, proxy = mesh.lab.pod("client"), mesh.proxies["w1"]
            assert served_by(await ask(client, mesh.lab.pod("one").ipv4, 8080)) == "one"
            await mesh.stop_control_plane()
            assert served_by(await ask(client, mesh.lab.pod("one").ipv4, 8080)) == "one"
            two = mesh.lab.pod("two").ipv4
            for _ in range(2):
                with contextlib.suppress(ConnectionResetError):
                    assert await ask(client, two, 8080, wait_s=20) == b""

            def denied() -> list[str]:
                lines = proxy.access("outbound")
                return [line["error"] for line in lines if line["message"] == "connection failed"]

            await eventually(lambda: len(denied()) == 2, "both denials")
            assert set(denied()) == {f"the control plane did not answer about /{two} in time"}
            await mesh.start_control_plane()
            await eventually(lambda: proxy.metric(STALENESS) == 0, "connected again")
            assert served_by(await ask(client, two, 8080)) == "two"
            assert (await proxy.ended("outbound", "two"))["dst.identity"].endswith("/sa/two")

    asyncio.run(main())


# TLS


class TlsMesh(AmbientMesh):
    """A mesh whose control plane is reached by TLS, with tokens, on a port of the node that is forwarded to it.

    Args:
        hosts: the names in its certificate.
    """

    def __init__(self, folder: Path, *hosts: str, **env: str) -> None:
        super().__init__({"w1": ["client", "near"]}, folder, env=env)
        self._hosts = hosts
        self._port = 0
        self.token, self.root = folder / "token", folder / "root.pem"
        address = "https://127.0.0.1:15012"
        self.env = {
            "XDS_ADDRESS": address,
            "CA_ADDRESS": address,
            "XDS_ROOT_CA": str(self.root),
            "CA_ROOT_CA": str(self.root),
            "AUTH_TOKEN": str(self.token),
            **self.env,
        }

    async def start_control_plane(self) -> None:
        self.control_plane = plane = ControlPlane(
            self.folder / "mesh.yaml",
            [f"127.0.0.1:{self._port}"],
            self.folder / "ca",
            tls_hosts=self._hosts,
        )
        stack = contextlib.AsyncExitStack()
        group = await stack.enter_async_context(asyncio.TaskGroup())
        task = group.create_task(plane.run(), name="control plane")
        stack.callback(task.cancel)
        await plane.ready.wait()
        self._port = int(plane.addresses[0].rpartition(":")[2])
        self._control_stack = stack

    @contextlib.asynccontextmanager
    async def begun(self) -> AsyncIterator[NodeProxy]:
        """Everything is started, and nothing need be ready."""
        with self.lab:
            self.write_mesh()
            await self.start_control_plane()
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self.stop_control_plane)
                worker = self.lab.worker("w1")
                await stack.enter_async_context(self._leads_here(worker.place))
                await self._start(stack, worker)
                yield self.proxies["w1"]

    @contextlib.asynccontextmanager
    async def _leads_here(self, place: Place) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        tasks = Tasks("front")

        async def copy(source: socket.socket, target: socket.socket) -> None:
            while data := await loop.sock_recv(source, 65536):
                await loop.sock_sendall(target, data)
            target.shutdown(socket.SHUT_WR)

        async def one(near: socket.socket) -> None:
            with near, contextlib.suppress(TproxyError), await connect(("127.0.0.1", self._port)) as far:
                await asyncio.gather(copy(near, far), copy(far, near), return_exceptions=True)

        async def accept(listener: socket.socket) -> None:
            while True:
                near, _ = await loop.sock_accept(listener)
                near.setblocking(False)
                tasks.start(one(near), "connection")

        with listen("127.0.0.1", 15012, netns=place.netns) as listener:
            tasks.start(accept(listener), "accept")
            try:
                yield
            finally:
                await tasks.close()

    def write_token(self) -> None:
        secret = ca.token_secret(self.folder / "ca")
        self.token.write_text(node_token(secret, "w1", ca.now().timestamp() + 3600) + "\n")

    def write_root(self) -> None:
        self.root.write_bytes((self.folder / "ca" / "root-cert.pem").read_bytes())


def test_tls_with_what_comes_late(tmp_path: Path) -> None:
    """Token and root are files: not there yet, then there, the token with an end of line, the root replaced."""

    async def main() -> None:
        mesh = TlsMesh(tmp_path, "127.0.0.1")
        async with mesh.begun() as proxy:

            def logged(text: str) -> bool:
                return any(text in str(value) for line in proxy.log() for value in line.values())

            missed = f"cannot read root certificate file {mesh.root}"
            await eventually(lambda: logged(missed), "the root is missed")
            assert not proxy.ready()
            mesh.write_root()
            await eventually(lambda: logged(f"cannot read token file {mesh.token}"), "the token is missed")
            assert not proxy.ready()
            mesh.write_token()
            await eventually(proxy.ready, "ready")
            near = mesh.lab.pod("near")
            async with app(near):
                assert served_by(await ask(mesh.lab.pod("client"), near.ipv4, 8080)) == "near"
            assert mesh.token.read_text().strip() not in proxy.log_path.read_text()

            # Another authority takes over. Its root is distributed later.
            await mesh.stop_control_plane()
            (tmp_path / "ca").rename(tmp_path / "old-ca")
            await mesh.start_control_plane()
            await eventually(lambda: logged("TLS failed (chain)"), "the new authority is not believed")
            assert proxy.metric(STALENESS) > 0
            mesh.write_root()
            mesh.write_token()
            await eventually(lambda: proxy.metric(STALENESS) == 0, "connected again")

    asyncio.run(main())


@pytest.mark.parametrize("name", ["istiod.elsewhere", "127.0.0.1"])
def test_either_of_two_names_is_the_control_plane(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        names = {"ALT_XDS_HOSTNAME": "istiod.elsewhere", "ALT_CA_HOSTNAME": "istiod.elsewhere"}
        mesh = TlsMesh(tmp_path, name, **names)
        async with mesh.begun() as proxy:
            mesh.write_root()
            mesh.write_token()
            await eventually(proxy.ready, "ready")
            near = mesh.lab.pod("near")
            async with app(near):
                assert served_by(await ask(mesh.lab.pod("client"), near.ipv4, 8080)) == "near"
                await proxy.ended("inbound", "near")

    asyncio.run(main())


def test_a_control_plane_of_another_name_is_not_believed(tmp_path: Path) -> None:
    async def main() -> None:
        mesh = TlsMesh(tmp_path, "istiod.elsewhere")
        async with mesh.begun() as proxy:
            mesh.write_root()
            mesh.write_token()

            def refusals() -> float:
                return proxy.metric("istio_xds_connection_terminations_total", reason="ConnectionError")

            await eventually(
                lambda: any(
                    # In the first line the error is part of the message, in later ones a field.
                    "is for istiod.elsewhere, not for 127.0.0.1" in f"{line['message']} {line.get('error')}"
                    for line in proxy.log()
                ),
                "the name is missed",
            )
            assert refusals() >= 1
            assert not proxy.ready()

    asyncio.run(main())
