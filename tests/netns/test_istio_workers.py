"""Several processes act as one proxy: connections are spread, and logs and pages show everything once."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deploy.lab import Place, Worker
from tests.generated import at_night
from tests.netns.istio import HELLO, AmbientMesh, NodeProxy, ask, eventually, mesh_of, refused
from tests.netns.test_istio_crl import publish, serial_of
from tests.netns.test_istio_policy import ends, held, lives
from tests.netns.test_istio_shutdown import Load, exited, terminate
from tests.netns.toys import app
from ztunnel.node.agent.node import Phase
from ztunnel.proxy.istio.zds.pods import PodUid

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
NODES = {"w1": ["client", "near"], "w2": ["far"]}
TWO = {"ZTUNNEL_WORKER_THREADS": "2"}


def workers_of(proxy: NodeProxy) -> list[int]:
    """Process ids of a proxy's workers."""
    found = []
    for task in Path(f"/proc/{proxy.process.pid}/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if b"\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def established(pid: int, port: int) -> int:
    """Connections of a process in a pod's namespace whose own port is this: those that it accepted there."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            match = re.match(r"socket:\[(\d+)\]", os.readlink(entry))
            if match:
                inodes.add(match[1])
    found = 0
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/thread-self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == "01" and int(fields[1].rpartition(":")[2], 16) == port:
                found += 1
    return found


def shares(mesh: AmbientMesh, proxy: NodeProxy, pod: str, port: int) -> list[int]:
    """Connections that each worker has accepted in a pod."""
    place = mesh.lab.pod(pod)
    return sorted(place.run(lambda: [established(pid, port) for pid in workers_of(proxy)]))


def listens(proxy: NodeProxy) -> bool:
    """Return whether a proxy has bound the ports of its pods, and has its certificates."""
    return "certificates" not in proxy.readiness() and any(
        line["message"] == "listener established" and "component" in line and line["address"].endswith(":15001")
        for line in proxy.log()
    )


class WorkersOnOneNode(AmbientMesh):
    """A mesh whose second node has a proxy without workers, for tests that only use it as the other end."""

    def start_proxy(self, worker: Worker, place: Place | None = None, **more: Any) -> "subprocess.Popen[bytes]":
        threads = {} if worker.place.name == "w1" else {"ZTUNNEL_WORKER_THREADS": "1"}
        return super().start_proxy(worker, place, **{**threads, **more})


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, kind: type[AmbientMesh] = WorkersOnOneNode, **env: str
) -> AsyncIterator[AmbientMesh]:
    async with (
        mesh_of(NODES, tmp_path, env={**TWO, **env}, kind=kind) as mesh,
        app(mesh.lab.pod("near")),
        app(mesh.lab.pod("far")),
    ):
        for node in NODES if kind is AmbientMesh else ("w1",):
            proxy = mesh.proxies[node]
            await eventually(lambda proxy=proxy: proxy.metric("ztunnel_workers") == 2, "both workers")
        yield mesh


async def many(stack: contextlib.AsyncExitStack, mesh: AmbientMesh, count: int, *who: str) -> list[Any]:
    return [await stack.enter_async_context(held(mesh, *who)) for _ in range(count)]


def test_connections_are_spread_and_shown_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, AmbientMesh) as mesh, contextlib.AsyncExitStack() as stack:
            proxy, far = mesh.proxies["w1"], mesh.proxies["w2"]
            assert len(workers_of(proxy)) == len(workers_of(far)) == 2
            assert proxy.metric("ztunnel_workers") == 2
            assert proxy.dump()["config"]["numWorkerThreads"] == 2
            for server in ("near", "far"):
                await many(stack, mesh, 6, "client", server)
            least, most = shares(mesh, proxy, "client", 15001)
            assert least + most == 12
            assert least >= 3, "one worker has nearly everything"  # 6 unless the machine is busy
            # One page, one dump.
            opened = {"reporter": "source", "source_workload": "client"}
            assert proxy.metric("istio_tcp_connections_opened_total", **opened) == 12
            assert proxy.metric("istio_tcp_sockets_open", reporter="source") == 12
            assert far.metric("istio_tcp_connections_opened_total", reporter="destination") == 6
            connections = proxy.connections()
            assert [each["direction"] for each in connections].count("outbound") == 12
            assert [each["direction"] for each in connections].count("inbound") == 6
            # As in one process, the tunnels of one connection are one entry. Here each worker has an entry.
            assert [each["direction"] for each in far.connections()].count("inbound") == 2
            await stack.aclose()
            # One log of whole lines.
            lines = await proxy.lines("outbound", 12)
            assert len(lines) == 12
            # One flight recorder, with the connections of both workers by time.
            status, page = proxy.get(15000, "/flows")
            flows = [json.loads(line)["flow"] for line in page.splitlines()]
            assert status == 200
            assert [flow["traffic_direction"] for flow in flows].count("EGRESS") == 12
            assert [flow["time"] for flow in flows] == sorted(flow["time"] for flow in flows)
            assert sum(line["bytes_sent"] for line in lines) == proxy.metric(
                "istio_tcp_received_bytes_total", **opened
            )
            assert [line for line in proxy.log_path.read_text().splitlines() if not line.startswith("{")] == []

    asyncio.run(main())


def test_a_policy_reaches_every_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, AmbientMesh) as mesh, contextlib.AsyncExitStack() as stack:
            proxy = mesh.proxies["w1"]
            near = await many(stack, mesh, 6, "client", "near")
            far = await many(stack, mesh, 2, "client", "far")
            assert 0 not in shares(mesh, proxy, "client", 15001)
            principals = ["cluster.local/ns/default/sa/client"]
            rule = {"action": "DENY", "rules": [{"from": {"principals": principals}}]}
            mesh.write_mesh(policies={"no-client": rule})
            for sock in (*near, *far):
                await ends(sock)
            closed = {"reporter": "destination", "response_flags": "DENY"}
            await eventually(
                lambda: proxy.metric("istio_tcp_connections_closed_total", **closed) == 6, "six counted"
            )
            mesh.write_mesh(policies={})
            client, host = mesh.lab.pod("client"), mesh.lab.pod("far").ipv4
            async with asyncio.timeout(20):
                while await refused(client, host, 8080):
                    pass

    asyncio.run(main())


def test_renewed_certificates_reach_every_worker(tmp_path: Path) -> None:
    async def main() -> None:
        # The embedded authority issues certificates with the requested lifetime. They are renewed after half of
        # it.
        async with running(tmp_path, AmbientMesh, SECRET_TTL="6s") as mesh, contextlib.AsyncExitStack() as stack:
            first = await serial_of(mesh, "client")
            before = await many(stack, mesh, 4, "client", "far")

            def renewed() -> bool:
                entries = mesh.proxies["w1"].dump()["certificates"]
                serials = {each["serialNumber"] for entry in entries for each in entry["certChain"][:1]}
                return bool(serials) and str(first) not in serials

            await eventually(renewed, "renewed")
            # After the first certificates have run out, none of these would shake hands with them.
            expired = asyncio.get_running_loop().time() + 6
            await eventually(lambda: asyncio.get_running_loop().time() > expired, "the first have run out")
            await many(stack, mesh, 4, "client", "far")
            assert 0 not in shares(mesh, mesh.proxies["w1"], "client", 15001)
            for sock in before:
                await lives(sock)

    asyncio.run(main())


def test_revocation_reaches_every_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, AmbientMesh, CRL_PATH=str(tmp_path / "crl.pem")) as mesh:
            async with contextlib.AsyncExitStack() as stack:
                near = await many(stack, mesh, 4, "client", "near")
                far = await many(stack, mesh, 4, "client", "far")
                publish(tmp_path, await serial_of(mesh, "client"))
                for sock in (*near, *far):
                    await ends(sock)
            client = mesh.lab.pod("client")
            for server in ("near", "far"):
                for _ in range(4):
                    assert await refused(client, mesh.lab.pod(server).ipv4, 8080)

    asyncio.run(main())


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as mesh, contextlib.AsyncExitStack() as stack:
            proxy, client = mesh.proxies["w1"], mesh.lab.pod("client")
            near = await many(stack, mesh, 8, "client", "near")
            assert proxy.metric("istio_tcp_connections_opened_total", reporter="source") == 8
            killed, other = workers_of(proxy)
            lost = client.run(lambda: established(killed, 15001))
            os.kill(killed, signal.SIGKILL)
            # Nobody is refused meanwhile, and the process stays ready.
            load = Load(client, mesh.lab.pod("near").ipv4)
            async with asyncio.TaskGroup() as group:
                group.create_task(load.run())
                await eventually(
                    lambda: (
                        proxy.metric("ztunnel_worker_restarts_total") == 1 and proxy.metric("ztunnel_workers") == 2
                    ),
                    "replaced",
                )
                load.stop.set()
                assert proxy.ready()
            assert load.failures == []
            assert other in workers_of(proxy)
            assert killed not in workers_of(proxy)
            survivors = 0
            for sock in near:
                with contextlib.suppress(AssertionError, OSError):
                    await lives(sock)
                    survivors += 1
            assert survivors == 8 - lost
            # The counts of the dead worker are kept, and what it had open counts as closed.
            opened = {"reporter": "source", "destination_workload": "near"}
            await eventually(
                lambda: proxy.metric("istio_tcp_connections_opened_total", **opened) >= 8 + load.done - 8,
                "counted",
            )
            assert proxy.metric("istio_tcp_sockets_open", reporter="source") == 8 - lost
            # The new one has pods, mesh and certificates.
            os.kill(other, signal.SIGKILL)
            assert (await ask(client, mesh.lab.pod("far").ipv4, 8080)).endswith(HELLO)
            assert "signal SIGKILL" in proxy.log_path.read_text()

    asyncio.run(main())


def test_connections_wait_for_a_worker_when_all_die(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as mesh:
            proxy, client = mesh.proxies["w1"], mesh.lab.pod("client")
            for pid in workers_of(proxy):
                os.kill(pid, signal.SIGKILL)
            await eventually(lambda: not proxy.ready(), "not ready any more")
            assert (await ask(client, mesh.lab.pod("far").ipv4, 8080)).endswith(HELLO)
            await eventually(proxy.ready, "ready again")

    asyncio.run(main())


def test_a_worker_that_hangs_is_done_without(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as mesh, contextlib.AsyncExitStack() as stack:
            proxy, client = mesh.proxies["w1"], mesh.lab.pod("client")
            await many(stack, mesh, 4, "client", "far")
            opened = {"reporter": "source", "destination_workload": "far"}
            assert proxy.metric("istio_tcp_connections_opened_total", **opened) == 4
            before = shares(mesh, proxy, "client", 15001)
            hanging, other = workers_of(proxy)
            os.kill(hanging, signal.SIGSTOP)
            try:
                # No counter decreases, and other workers accept new connections although that one has fewer.
                await many(stack, mesh, 4, "client", "far")
                assert proxy.metric("istio_tcp_connections_opened_total", **opened) == 8
                assert proxy.metric("ztunnel_workers_late_total") >= 1
                unknown = 8 - len(proxy.connections())  # its own
                assert unknown in before
                assert shares(mesh, proxy, "client", 15001) == sorted([unknown, 8 - unknown])
                # A new pod does not wait for ever: a worker that does not answer is killed.
                await proxy.agent.remove(PodUid("uid-near"), grace_s=0)
                await eventually(lambda: proxy.metric("ztunnel_worker_restarts_total") == 1, "replaced")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(hanging, signal.SIGCONT)
            assert other in workers_of(proxy)
            assert (await ask(client, mesh.lab.pod("far").ipv4, 8080)).endswith(HELLO)

    asyncio.run(main())


def test_pods_come_and_go(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            mesh_of({"w1": ["client", "server"]}, tmp_path, captured=["client"], env=TWO) as mesh,
            app(mesh.lab.pod("server")),
            contextlib.AsyncExitStack() as stack,
        ):
            proxy, server = mesh.proxies["w1"], mesh.lab.pod("server")
            await eventually(lambda: proxy.metric("ztunnel_workers") == 2, "both workers")
            await proxy.agent.enrol(mesh.described(server))
            assert proxy.agent.pods()[PodUid("uid-server")].phase is Phase.ENABLED
            mesh.captured.append("server")
            mesh.write_mesh()

            def tunnelled() -> bool:
                shown = {workload["name"]: workload["protocol"] for workload in proxy.dump()["workloads"]}
                return shown["server"] == "HBONE"

            await eventually(tunnelled, "the server is in the mesh")
            sockets = await many(stack, mesh, 4, "client", "server")
            files = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in workers_of(proxy)]
            await proxy.agent.remove(PodUid("uid-server"), grace_s=0)
            for sock in sockets:
                await ends(sock)
            # Its listeners and its namespace are given back everywhere.
            await eventually(
                lambda: all(
                    len(list(Path(f"/proc/{pid}/fd").iterdir())) < before
                    for pid, before in zip(workers_of(proxy), files, strict=True)
                ),
                "descriptors closed",
            )
            assert "uid-server" not in proxy.dump()["workloadState"]
            assert proxy.metric("ztunnel_worker_restarts_total") == 0

    asyncio.run(main())


def test_the_end_waits_for_connections_of_every_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as mesh, contextlib.AsyncExitStack() as stack:
            proxy = mesh.proxies["w1"]
            sockets = await many(stack, mesh, 4, "client", "far")
            pids = workers_of(proxy)
            # As a shell does: to the whole process group.
            for pid in (proxy.process.pid, *pids):
                os.kill(pid, signal.SIGTERM)
            await eventually(lambda: not proxy.ready(), "draining")
            for sock in sockets:
                await lives(sock)
            for sock in sockets:
                sock.close()
            assert await exited(proxy.process) == 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
            assert len([line for line in proxy.access("outbound") if "error" not in line]) == 4
            assert "worker is replaced" not in proxy.log_path.read_text()

    asyncio.run(main())


def test_workers_end_with_the_main_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as mesh:
            proxy = mesh.proxies["w1"]
            pids = workers_of(proxy)
            proxy.process.kill()
            await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all ended")

    asyncio.run(main())


@pytest.mark.parametrize("threads", ["1", "3", *at_night(["2"], [])])
def test_a_successor_with_any_number_of_workers_takes_over(tmp_path: Path, threads: str) -> None:
    async def main() -> None:
        async with running(tmp_path) as mesh, contextlib.AsyncExitStack() as stack:
            worker, before, client = mesh.lab.worker("w1"), mesh.proxies["w1"], mesh.lab.pod("client")
            old = await many(stack, mesh, 4, "client", "far")
            loads = [Load(client, mesh.lab.pod(name).ipv4) for name in ("near", "far") for _ in range(2)]
            async with asyncio.TaskGroup() as group:
                for load in loads:
                    group.create_task(load.run())
                process = mesh.start_proxy(worker, worker.ztunnel, ZTUNNEL_WORKER_THREADS=threads)
                after = NodeProxy(worker.ztunnel, tmp_path, process, before.agent, before.pods)
                if threads != "1":
                    # It listens, but no worker accepts yet.
                    await eventually(lambda: "workers" in after.readiness() and listens(after), "pods are bound")
                    assert await ask(client, mesh.lab.pod("near").ipv4, 8080)
                    assert "workers" in after.readiness(), "the connection has not waited for a worker"
                await eventually(after.ready, "the successor ready")
                done = [load.done for load in loads]
                terminate(before)
                await eventually(
                    lambda: all(load.done > was + 20 for load, was in zip(loads, done, strict=True)), "carried on"
                )
                for load in loads:
                    load.stop.set()
            assert [load.failures for load in loads] == [[]] * 4
            for sock in old:
                await lives(sock)
                sock.close()
            assert await exited(before.process) == 0

    asyncio.run(main())


def test_one_log_filter(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as mesh, contextlib.AsyncExitStack() as stack:
            proxy = mesh.proxies["w1"]
            assert proxy.get(15000, "/logging?level=access=off", "POST")[0] == 200
            await many(stack, mesh, 4, "client", "near")
            await stack.aclose()
            await eventually(lambda: proxy.metric("istio_tcp_sockets_open", reporter="source") == 0, "ended")
            assert proxy.get(15000, "/logging?level=access=info", "POST")[0] == 200
            await many(stack, mesh, 2, "client", "far")
            await stack.aclose()
            await proxy.lines("outbound", 2)
            assert [line["dst.workload"] for line in proxy.access()] == ["far", "far"]

    asyncio.run(main())
