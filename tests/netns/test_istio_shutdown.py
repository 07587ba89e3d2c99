"""How a proxy shuts down, and how the next one takes over."""

import asyncio
import contextlib
import errno
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.lab import Place
from tests.netns.hbone_ends import HboneEnds
from tests.netns.istio import HELLO, AmbientMesh, NodeProxy, ask, eventually, mesh_of, refused
from tests.netns.test_istio_policy import ends, held, lives
from tests.netns.toys import app
from tproxy.aio.sockets import listen
from tproxy.errors import TproxyError
from ztunnel.node.agent.node import Phase
from ztunnel.proxy.istio.zds.pods import PodUid

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]
NODES = {"w1": ["client"], "w2": ["server"]}


async def exited(process: "subprocess.Popen[bytes]", wait_s: float = 10.0) -> int:
    code = await eventually(lambda: None if process.poll() is None else (process.returncode,), "the end", wait_s)
    return int(code[0])


@contextlib.asynccontextmanager
async def running(tmp_path: Path, **env: str) -> AsyncIterator[AmbientMesh]:
    async with mesh_of(NODES, tmp_path, env=env) as mesh, app(mesh.lab.pod("server")):
        yield mesh


def nobody_listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def quit_politely(proxy: NodeProxy) -> None:
    assert proxy.get(15000, "/quitquitquit")[0] == 405
    assert proxy.get(15000, "/quitquitquit", "POST") == (200, "shutdown now\n")


def terminate(proxy: NodeProxy) -> None:
    proxy.process.send_signal(signal.SIGTERM)


def interrupt(proxy: NodeProxy) -> None:
    proxy.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("end", [terminate, interrupt, quit_politely], ids=["sigterm", "sigint", "quitquitquit"])
def test_shutdown_lifecycle(tmp_path: Path, end: object) -> None:
    # test_shutdown_lifecycle, test_quit_lifecycle
    assert callable(end)

    async def main() -> None:
        async with running(tmp_path) as mesh:
            for proxy in mesh.proxies.values():
                await asyncio.to_thread(end, proxy) if end is quit_politely else end(proxy)
                assert await exited(proxy.process) == 0
                assert "shutdown complete component=proxy" in proxy.log_path.read_text()

    asyncio.run(main())


@pytest.mark.parametrize("node", ["w1", "w2"], ids=["client", "server"])
def test_ztunnel_shutdown(tmp_path: Path, node: str) -> None:
    # test_ztunnel_shutdown, test_shutdown_drain: either side's proxy
    async def main() -> None:
        async with running(tmp_path) as mesh:
            client, server, proxy = mesh.lab.pod("client"), mesh.lab.pod("server"), mesh.proxies[node]
            async with held(mesh, "client", "server") as sock:
                terminate(proxy)
                taker, port = (client, 15001) if node == "w1" else (server, 15008)
                await eventually(lambda: taker.run(nobody_listens, port), "the ports given up")
                assert not proxy.ready()
                await lives(sock)
                try:
                    assert await refused(client, server.ipv4, 8080)  # nobody takes new ones
                except TproxyError:
                    assert node == "w1"  # there they are not even connected
                await lives(sock)
                assert proxy.process.poll() is None
            assert await exited(proxy.process) == 0
            (line,) = [
                line for line in proxy.access() if line.get("bytes_sent", 0) + line.get("bytes_recv", 0) > 30
            ]
            assert "error" not in line

    asyncio.run(main())


@pytest.mark.parametrize("node", ["w1", "w2"], ids=["client", "server"])
def test_shutdown_forced_drain(tmp_path: Path, node: str) -> None:
    async def main() -> None:
        async with running(tmp_path, TERMINATION_GRACE_PERIOD_SECONDS="1") as mesh:
            proxy = mesh.proxies[node]
            async with held(mesh, "client", "server") as sock:
                terminate(proxy)
                await ends(sock)
            assert await exited(proxy.process) == 0
            warning = "drain duration expired with pending connections, forcefully shutting down"
            assert warning in proxy.log_path.read_text()
            line = await proxy.failed("connection closed due to connection drain")
            assert line["dst.workload"] == "server"

    asyncio.run(main())


def test_idle_tunnels_get_goaway_at_shutdown(tmp_path: Path) -> None:
    # Otherwise what peers send at that moment is lost.
    async def main() -> None:
        nodes = {"w1": ["server"], "w2": ["stranger"]}
        async with mesh_of(nodes, tmp_path, captured=["server"]) as mesh, HboneEnds(tmp_path) as ends_of:
            server, proxy = mesh.lab.pod("server"), mesh.node_of("server")
            place = mesh.lab.pod("stranger")
            async with app(server), ends_of.connection(place, server.ipv4, "a", expect="server") as connection:
                assert await ends_of.status(connection, f"{server.ipv4}:8080") == 200
                terminate(proxy)
                async with asyncio.timeout(20):
                    await connection.wait_closed()
                assert connection.engine.going_away
            assert await exited(proxy.process) == 0

    asyncio.run(main())


def test_a_handshake_that_is_under_way_is_finished(tmp_path: Path) -> None:
    # A reset would count as a failed endpoint. GOAWAY states that the request was not processed.
    async def main() -> None:
        nodes = {"w1": ["server"], "w2": ["stranger"]}
        async with mesh_of(nodes, tmp_path, captured=["server"]) as mesh, HboneEnds(tmp_path) as ends_of:
            server, proxy = mesh.lab.pod("server"), mesh.node_of("server")
            place = mesh.lab.pod("stranger")

            async def the_end_begins() -> None:
                await asyncio.sleep(0.1)  # accepted
                terminate(proxy)
                await eventually(lambda: server.run(nobody_listens, 15008), "the port given up")
                await asyncio.sleep(0.1)

            making = ends_of.connection(place, server.ipv4, "a", expect="server", connected=the_end_begins)
            async with making as connection:
                async with asyncio.timeout(20):
                    await connection.wait_closed()
                assert connection.engine.going_away
            assert await exited(proxy.process) == 0

    asyncio.run(main())


def test_server_shutdown(tmp_path: Path) -> None:
    # test_server_shutdown: the server's pod goes, at once
    async def main() -> None:
        async with running(tmp_path) as mesh:
            client, server, proxy = mesh.lab.pod("client"), mesh.lab.pod("server"), mesh.node_of("server")
            async with held(mesh, "client", "server") as sock:
                await proxy.agent.remove(PodUid("uid-server"), grace_s=0)
                await ends(sock)
            line = await proxy.failed("connection closed due to connection drain", "inbound")
            assert line["dst.workload"] == "server"
            # The mesh still lists tunnels, but no proxy accepts them.
            assert await refused(client, server.ipv4, 8080)
            line = await mesh.node_of("client").failed("Connection refused (os error 111)", "outbound")
            assert line["dst.workload"] == "server"

    asyncio.run(main())


# Ports that are taken


def test_conflicting_bind_error(tmp_path: Path) -> None:
    # test_conflicting_bind_error_{inbound, inbound_plaintext, outbound}: a pod whose port is taken is pending, and
    # starts by itself later. Other pods are not affected.
    ports = {"inbound": 15008, "plaintext": 15006, "outbound": 15001}

    async def main() -> None:
        async with mesh_of({"w1": ["client", *ports]}, tmp_path, captured=["client"]) as mesh:
            proxy = mesh.node_of("client")
            agent = proxy.agent
            with contextlib.ExitStack() as stack:
                for name, port in ports.items():
                    stack.enter_context(listen("::", port, netns=mesh.lab.pod(name).netns))
                    await agent.enrol(mesh.described(mesh.lab.pod(name)))
                    status = agent.pods()[PodUid(f"uid-{name}")]
                    assert status.phase is Phase.PENDING
                    assert f"failed to bind to port {port}" in status.error
                assert proxy.metric("workload_manager_pending_proxy_count") == len(ports)
            await eventually(lambda: all(pod.phase is Phase.ENABLED for pod in agent.pods().values()), "retries")
            assert proxy.metric("workload_manager_pending_proxy_count") == 0

    asyncio.run(main())


@pytest.mark.parametrize("port", [15000, 15020, 15021, 15008, 15006, 15001])
def test_conflicting_bind_error_of_the_process(tmp_path: Path, port: int) -> None:
    # test_conflicting_bind_error_admin, and all of them in dedicated mode: no process
    async def main() -> None:
        async with mesh_of({"w1": ["client", "server"]}, tmp_path, captured=["client"]) as mesh:
            server, worker = mesh.lab.pod("server"), mesh.lab.worker("w1")
            info = {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "default/server/server"}
            with listen("127.0.0.1" if port == 15000 else "::", port, netns=server.netns):
                process = mesh.start_proxy(worker, server, **info)
                assert await exited(process) == 1
            assert f":{port}: stop it" in (tmp_path / "server.log").read_text()

    asyncio.run(main())


# One generation after the other


PAUSE_S = 0.01


class Load:
    """Clients that open short connections, and count the results. Each pauses after every connection, because a
    process that starts beside them needs the cores as well.
    """

    def __init__(self, client: Place, host: object) -> None:
        self._client = client
        self._host = host
        self.done = 0
        self.failures: list[str] = []
        self.stop = asyncio.Event()

    async def run(self) -> None:
        while not self.stop.is_set():
            try:
                answer = await ask(self._client, self._host, 8080)
                if not answer.endswith(HELLO):
                    self.failures.append(f"after {self.done}: {answer!r}")
            except (OSError, TproxyError, TimeoutError) as error:
                self.failures.append(f"after {self.done}: {error!r}")
            self.done += 1
            await asyncio.sleep(PAUSE_S)


def test_two_generations_overlap(tmp_path: Path) -> None:
    async def main() -> None:
        nodes = {"w1": ["client", "near"], "w2": ["far", "outside"]}
        env = {"TERMINATION_GRACE_PERIOD_SECONDS": "60"}  # connections are held over both generations
        async with (
            mesh_of(nodes, tmp_path, captured=["client", "near", "far"], env=env) as mesh,
            contextlib.AsyncExitStack() as stack,
        ):
            worker, proxy = mesh.lab.worker("w1"), mesh.proxies["w1"]
            client, near, far, outside = (mesh.lab.pod(name) for name in ("client", "near", "far", "outside"))
            for server in (near, far):
                await stack.enter_async_context(app(server))
            old = [
                await stack.enter_async_context(held(mesh, *who))
                for who in (("client", "near"), ("client", "far"), ("outside", "near"), ("far", "near"))
            ]
            loads = [
                Load(client, far.ipv4),
                Load(client, near.ipv4),
                Load(outside, near.ipv4),
                Load(far, near.ipv4),
            ]
            async with asyncio.TaskGroup() as group:
                for load in loads:
                    for _ in range(4):
                        group.create_task(load.run())
                for generation in range(2):
                    # Each generation is in its own namespace, like the pods of a DaemonSet.
                    before, place = proxy, (worker.ztunnel, worker.place)[generation % 2]
                    process = mesh.start_proxy(worker, place)
                    proxy = NodeProxy(place, tmp_path, process, before.agent, before.pods)
                    await eventually(proxy.ready, "the next generation ready")
                    done = [load.done for load in loads]
                    terminate(before)
                    await eventually(
                        lambda done=done: all(load.done > was + 40 for load, was in zip(loads, done, strict=True)),
                        "load carried on",
                    )
                    assert [load.failures for load in loads] == [[]] * 4, generation
                for load in loads:
                    load.stop.set()
                for sock in old:
                    await lives(sock)

    asyncio.run(main())
