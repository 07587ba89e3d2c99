"""When something around a proxy breaks, it continues to serve, loses nothing, recovers by itself and logs the
cause.

Long tests run with ``make faults`` only.
"""

import asyncio
import contextlib
import heapq
import itertools
import os
import random
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.lab import Lab
from tests.netns.istio import HELLO, WAIT_S, AmbientMesh, ask, eventually, mesh_of
from tests.netns.test_istio_policy import held, lives
from tests.netns.toys import app
from tproxy.aio.sockets import connect
from tproxy.errors import TproxyError
from ztunnel.proxy.istio.zds.pods import PodUid

pytestmark = [pytest.mark.netns, pytest.mark.timeout(180)]
NODES = {"w1": ["client", "near"], "w2": ["far", "outside"]}
CAPTURED = ["client", "near", "far"]
LONG = pytest.mark.skipif(not os.environ.get("FAULTS"), reason="NOT TESTED: takes long; make faults")
_ETH_P_ALL, _SOL_PACKET, _PACKET_VNET_HDR = 3, 263, 15
_MOST_BYTES = 70_000


async def serves(mesh: AmbientMesh, *servers: str) -> None:
    """New connections from the client arrive."""
    for server in servers:
        assert (await ask(mesh.lab.pod("client"), mesh.lab.pod(server).ipv4, 8080)).endswith(HELLO)


# The log


@pytest.mark.parametrize("output", ["full disk", "closed pipe", "pipe that nobody reads"])
def test_a_log_that_cannot_be_written(tmp_path: Path, output: str) -> None:
    """Row 59 of the attacks: no processor time, lines dropped and counted, traffic unhurt."""

    async def main() -> None:
        async with mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh, app(mesh.lab.pod("far")):
            proxy = mesh.proxies["w1"]
            proxy.process.kill()
            proxy.process.wait()
            reading, writing = os.pipe()
            with contextlib.ExitStack() as stack:
                if output == "full disk":
                    os.close(writing)
                    os.close(reading)
                    writing = os.open("/dev/full", os.O_WRONLY)
                elif output == "closed pipe":
                    os.close(reading)
                else:
                    stack.callback(os.close, reading)
                with contextlib.closing(os.fdopen(writing, "wb")) as stdout:
                    proxy.process = mesh.start_proxy(mesh.lab.worker("w1"), stdout=stdout)
                await eventually(proxy.ready, "ready without a log")
                async with held(mesh, "client", "far") as sock:
                    for _ in range(20):
                        await serves(mesh, "far")
                    await lives(sock)
                if output != "pipe that nobody reads":  # there 64 KiB fit into the pipe
                    await eventually(lambda: proxy.metric("ztunnel_log_lines_dropped_total") > 0, "lines counted")
                before_s = _processor_s(proxy.process.pid)
                await asyncio.sleep(1.0)
                assert _processor_s(proxy.process.pid) - before_s < 0.5, "it tries again without a pause"

    asyncio.run(main())


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Ports


def test_no_port_left_towards_one_target(tmp_path: Path) -> None:
    """Row 32: a clear error, other targets unhurt, and connections again when ports are free."""

    async def main() -> None:
        async with (
            mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh,
            app(mesh.lab.pod("outside")),
            app(mesh.lab.pod("outside"), 8081),
            app(mesh.lab.pod("far")),
        ):
            client, outside, proxy = mesh.lab.pod("client"), mesh.lab.pod("outside"), mesh.proxies["w1"]
            ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
            # With these 8 ports, each connection uses one of the application's and one of the proxy's.
            client.run(lambda: ports.write_text("40000 40007"))
            loop = asyncio.get_running_loop()
            async with contextlib.AsyncExitStack() as stack:

                async def served() -> bool:
                    try:
                        sock = await connect((str(outside.ipv4), 8080), netns=client.netns)
                        stack.enter_context(sock)
                        async with asyncio.timeout(WAIT_S):
                            return (await loop.sock_recv(sock, 1000)).startswith(b"app")
                    except (OSError, TproxyError):
                        return False

                count = 0
                while count < 9 and await served():
                    count += 1
                assert 0 < count <= 8
                # More for the application's next connection, and for the proxy's to another target.
                client.run(lambda: ports.write_text("40000 40100"))
                assert (await ask(client, outside.ipv4, 8081)).endswith(HELLO)
                await serves(mesh, "far")
            assert (await ask(client, outside.ipv4, 8080)).endswith(HELLO)
            assert proxy.ready()

    asyncio.run(main())


# Namespaces and processes


def test_a_namespace_that_disappears(tmp_path: Path) -> None:
    """The pod's runtime removes it without notice. Other pods are served, and the proxy releases the pod."""

    async def main() -> None:
        nodes = {"w1": ["client", "gone"], "w2": ["far"]}
        async with mesh_of(nodes, tmp_path) as mesh, app(mesh.lab.pod("far")):
            proxy, agent = mesh.proxies["w1"], mesh.proxies["w1"].agent
            async with held(mesh, "client", "far") as sock:
                subprocess.run(["ip", "netns", "del", mesh.lab.pod("gone").netns.name], check=True)
                await serves(mesh, "far")
                await eventually(lambda: PodUid("uid-gone") not in agent.pods(), "the agent notices", 60)
                await eventually(
                    lambda: proxy.metric("workload_manager_active_proxy_count") == 1, "the proxy lets go", 60
                )
                await lives(sock)
            await serves(mesh, "far")
            assert proxy.ready()

    asyncio.run(main())


@LONG
@pytest.mark.parametrize("node", ["w1", "w2"])
def test_a_proxy_that_was_stopped_for_ten_seconds(tmp_path: Path, node: str) -> None:
    """After SIGSTOP, a frozen cgroup or a paused machine, open connections resume, and no stack is logged."""

    async def main() -> None:
        async with (
            mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh,
            app(mesh.lab.pod("far")),
            app(mesh.lab.pod("near")),
        ):
            proxy = mesh.proxies[node]
            async with held(mesh, "client", "far") as sock:
                proxy.process.send_signal(signal.SIGSTOP)
                try:
                    await asyncio.sleep(10.0)
                finally:
                    proxy.process.send_signal(signal.SIGCONT)
                await lives(sock)
                await serves(mesh, "far", "near")
                await eventually(lambda: proxy.metric("ztunnel_loop_stalls_total") == 1, "it is counted")
                await eventually(
                    lambda: "event loop stood still for" in proxy.log_path.read_text(), "the log says so"
                )
            assert "event loop stands still" not in proxy.log_path.read_text()

    asyncio.run(main())


@LONG
def test_a_machine_that_vanished(tmp_path: Path) -> None:
    """Without FIN or RST, clients that wait for the other end get an error within 20 s."""

    async def main() -> None:
        async with mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh, app(mesh.lab.pod("far")):
            async with held(mesh, "client", "far") as sock:
                await serves(mesh, "far")
                with mesh.lab.unplugged():
                    began_s = time.monotonic()
                    async with asyncio.timeout(60):
                        with contextlib.suppress(ConnectionResetError):
                            assert await asyncio.get_running_loop().sock_recv(sock, 1000) == b""
                    took_s = time.monotonic() - began_s
            assert took_s < 22.0, took_s  # 19.5 by its times, and a busy machine
            await serves(mesh, "far")

    asyncio.run(main())


# The network


def test_a_network_with_small_packets(tmp_path: Path) -> None:
    """Row 35: an MTU of 1280 between the nodes, which the pods do not know of."""

    async def main() -> None:
        async with mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh, app(mesh.lab.pod("far")):
            for worker in mesh.lab.workers.values():
                worker.place.run(lambda: subprocess.run(["ip", "link", "set", "eth0", "mtu", "1280"], check=True))
            await moves(mesh, 4 * 2**20)

    asyncio.run(main())


@LONG
@pytest.mark.parametrize(
    ("loss", "delay_s", "reordered"),
    [(0.05, 0.0, 0.0), (0.0, 0.1, 0.0), (0.02, 0.02, 0.2)],
    ids=["loss", "delay", "all of it"],
)
def test_a_bad_network(tmp_path: Path, loss: float, delay_s: float, reordered: float) -> None:
    """Row 35: 5 % lost, 100 ms more, packets out of order; every byte arrives, in both directions."""

    async def main() -> None:
        async with mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh, app(mesh.lab.pod("far")):
            client, far = mesh.lab.pod("client"), mesh.lab.pod("far")
            async with contextlib.AsyncExitStack() as stack:
                sock = await stack.enter_async_context(held(mesh, "client", "far"))
                with bad_wire(mesh.lab, loss=loss, delay_s=delay_s, reordered=reordered):
                    await moves(mesh, 2**20, wait_s=90)
                    for _ in range(5):
                        assert (await ask(client, far.ipv4, 8080, wait_s=30)).endswith(HELLO)
                await lives(sock)

    asyncio.run(main())


async def moves(mesh: AmbientMesh, size: int, wait_s: float = 60) -> None:
    """Check that bytes reach the far application and come back unchanged."""
    data = random.Random(1).randbytes(size)
    answer = await ask(mesh.lab.pod("client"), mesh.lab.pod("far").ipv4, 8080, data, wait_s=wait_s)
    assert answer.partition(b"\n")[2] == data


@contextlib.contextmanager
def bad_wire(lab: Lab, *, loss: float, delay_s: float, reordered: float) -> Iterator[None]:
    """Connect the nodes by a wire in user space, because the kernel might have no netem.

    Each frame is lost, or passed on after ``delay_s``; a part of them waits 5 ms more, so that later ones
    overtake.
    """
    with lab.unplugged() as (netns, ports), contextlib.ExitStack() as stack:
        ends = []
        with netns.entered():
            for port in ports:
                sock = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
                # Frames carry the kernel's pending work in their headers: segmentation and checksums.
                sock.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
                sock.bind((port, _ETH_P_ALL))
                sock.setblocking(False)
                ends.append(sock)
        stop = threading.Event()
        thread = threading.Thread(target=_pass_on, args=(ends, stop, loss, delay_s, reordered), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _pass_on(
    ends: list[socket.socket], stop: threading.Event, loss: float, delay_s: float, reordered: float
) -> None:
    rng = random.Random(1)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    for number in itertools.count():
        if stop.is_set():
            return
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, _, end, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # no room: one more that is lost
                end.send(frame)
        wait_s = min(0.05, max(0.0, waiting[0][0] - now_s)) if waiting else 0.05
        for end in select.select(ends, [], [], wait_s)[0]:
            frame, address = end.recvfrom(_MOST_BYTES)
            if address[2] != socket.PACKET_OUTGOING and rng.random() >= loss:
                late_s = delay_s + (0.005 if rng.random() < reordered else 0.0)
                heapq.heappush(waiting, (time.monotonic() + late_s, number, other[end], frame))
