"""A proxy that is killed under a holder: no connection is refused, and the next proxy serves what waits."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netns.istio import HELLO, AmbientMesh, ask, eventually, mesh_of
from tests.netns.toys import app
from tests.ports import free_port

SAID = "the crashed process's configuration is used"
pytestmark = [pytest.mark.netns, pytest.mark.timeout(180)]
#: On a busy machine the next proxy can take longer than a handshake may take otherwise.
PATIENT = {"ZTUNNEL_HANDSHAKE_TIMEOUT": "60s", "ZTUNNEL_CONNECT_TIMEOUT": "60s"}


def serving(mesh: AmbientMesh, node: str) -> int:
    """Return the process under a node's holder, or 0 between two."""
    return next(iter(children(mesh.proxies[node].process.pid)), 0)


def keeps_configuration(mesh: AmbientMesh, node: str) -> bool:
    held = Path(f"/proc/{mesh.proxies[node].process.pid}/fd")
    return any("memfd:configuration" in os.readlink(each) for each in held.iterdir())


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_killed_proxy_of_a_mesh_refuses_nothing(tmp_path: Path, workers: str) -> None:
    async def main() -> None:
        nodes = {"w1": ["client"], "w2": ["far"]}
        env = {"ZTUNNEL_HOLD_SOCKETS": "true", "ZTUNNEL_WORKER_THREADS": workers, **PATIENT}
        async with (
            mesh_of(nodes, tmp_path, captured=["client", "far"], env=env) as mesh,
            app(mesh.lab.pod("far")),
        ):
            client, far = mesh.lab.pod("client"), mesh.lab.pod("far").ipv4

            async def together() -> None:
                answers = await asyncio.gather(*(ask(client, far, 8080, wait_s=60.0) for _ in range(20)))
                assert all(answer.endswith(HELLO) for answer in answers)

            await together()
            for node in ("w1", "w2"):
                proxy = mesh.proxies[node]
                await eventually(
                    lambda proxy=proxy: proxy.metric("ztunnel_workers") == int(workers), "all workers serve"
                )
                first = serving(mesh, node)
                # A worker that sees nothing of its main process's end must neither accept nor keep anything.
                old = [first, *children(first)]
                for worker in old[1:]:
                    os.kill(worker, signal.SIGSTOP)
                assert first  # 0 would be this process's group
                os.kill(first, signal.SIGKILL)
                await eventually(
                    lambda node=node, first=first: serving(mesh, node) not in (0, first), "a new proxy"
                )
                # Until the kernel has ended a worker, the other node's tunnel connections to it are open.
                await eventually(
                    lambda old=old: not any(Path(f"/proc/{pid}").exists() for pid in old), "all ended"
                )
                await together()
                assert "the proxy ended by signal 9 and is started again" in proxy.log_path.read_text()
                await eventually(proxy.ready, "ready")
                assert proxy.metric("ztunnel_crashes_total") == 1
                assert mesh.proxies[node].process.poll() is None
            # Sockets without a process that accepts are not kept.
            for _ in range(3):
                await together()

    asyncio.run(main())


def test_a_killed_proxy_serves_again_without_its_control_plane(tmp_path: Path) -> None:
    async def main() -> None:
        nodes, env = {"w1": ["client"], "w2": ["far"]}, {"ZTUNNEL_HOLD_SOCKETS": "true", **PATIENT}
        async with (
            mesh_of(nodes, tmp_path, captured=["client", "far"], env=env) as mesh,
            app(mesh.lab.pod("far")),
        ):
            client, far = mesh.lab.pod("client"), mesh.lab.pod("far").ipv4
            assert (await ask(client, far, 8080)).endswith(HELLO)
            for node in nodes:
                await eventually(lambda node=node: keeps_configuration(mesh, node), "the configuration is kept")
            await asyncio.sleep(1.5)  # changes are written a second later
            await mesh.stop_control_plane()
            for node in ("w1", "w2"):
                first = serving(mesh, node)
                assert first  # 0 would be this process's group
                os.kill(first, signal.SIGKILL)
                await eventually(lambda node=node, old=first: serving(mesh, node) not in (0, old), "a new proxy")
                assert (await ask(client, far, 8080, wait_s=60.0)).endswith(HELLO)
                await eventually(mesh.proxies[node].ready, "ready")
                # A writer of its own writes the log, later.
                await eventually(lambda node=node: SAID in mesh.proxies[node].log_path.read_text(), "its line")
                assert mesh.proxies[node].metric("ztunnel_xds_staleness_seconds") > 0

    asyncio.run(main())


def test_a_killed_proxy_of_envoys_dialect_refuses_nothing(tmp_path: Path) -> None:
    port, behind = free_port(), free_port()
    (tmp_path / "bootstrap.yaml").write_text(f"""
node: {{id: node-1, cluster: c}}
static_resources:
  listeners:
  - name: tcp
    address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: tcp
          cluster: app
  clusters:
  - name: app
    load_assignment:
      cluster_name: app
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {behind}}}}}}}
""")
    asyncio.run(_killed(tmp_path, port, behind))


async def _killed(folder: Path, port: int, behind: int) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", behind)
    command = [sys.executable, "-m", "ztunnel", "proxy", "--bootstrap", str(folder / "bootstrap.yaml")]
    for page in ("admin", "readiness", "metrics"):
        command += [f"--{page}", f"127.0.0.1:{free_port()}"]
    command.append("--hold-sockets")
    with (folder / "log").open("wb") as log:
        holder = subprocess.Popen(command, stderr=log)
    try:
        await eventually(lambda: holder.poll() is not None or "live" in (folder / "log").read_text(), "live")
        for _ in range(2):
            os.kill(children(holder.pid)[0], signal.SIGKILL)
            assert await asyncio.gather(*(_said(port) for _ in range(10))) == [b"here"] * 10
    finally:
        holder.terminate()
        status = await asyncio.to_thread(holder.wait, 30)
        server.close()
    assert status == 0, (folder / "log").read_text()


async def _said(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(30):
        said = await reader.read()
    writer.close()
    return said
