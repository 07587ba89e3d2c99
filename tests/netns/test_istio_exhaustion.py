"""With too few resources, or a clock that jumps, the proxy continues to serve, recovers by itself and logs the
cause.

Long tests run with ``make faults`` only.
"""

import asyncio
import contextlib
import itertools
import mmap
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.netns.istio import HELLO, AmbientMesh, NodeProxy, ask, eventually, mesh_of, refused
from tests.netns.test_istio_faults import LONG, serves
from tests.netns.test_istio_policy import held, lives
from tests.netns.toys import app
from tproxy.aio.sockets import connect, listen
from tproxy.wire import attribute, be32, nest

pytestmark = [pytest.mark.netns, pytest.mark.timeout(180)]
NODES = {"w1": ["client", "near"], "w2": ["far"]}

# Memory

_MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")
_MIB = 2**20


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Yield a cgroup without processes. Skip the test if none can be created."""
    folder = _MEMORY_CGROUPS / f"ztunnel-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"NOT TESTED: no memory cgroup can be made: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield folder
    finally:
        folder.rmdir()


async def restarted(mesh: AmbientMesh, node: str, *prefix: str, **env: str) -> NodeProxy:
    """The proxy of a node, started again by a program."""
    proxy = mesh.proxies[node]
    proxy.process.kill()
    proxy.process.wait()
    proxy.process = mesh.start_proxy(mesh.lab.worker(node), prefix=prefix, **env)
    await eventually(proxy.ready, "ready again")
    return proxy


@contextlib.asynccontextmanager
async def unread(mesh: AmbientMesh, count: int) -> AsyncIterator[None]:
    """Connections from the client to an application that reads nothing; as much is sent as is taken."""
    loop, far = asyncio.get_running_loop(), mesh.lab.pod("far")
    async with contextlib.AsyncExitStack() as stack:
        silent = stack.enter_context(listen("::", 9090, netns=far.netns))
        group = await stack.enter_async_context(asyncio.TaskGroup())

        async def send(sock: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while True:
                    await loop.sock_sendall(sock, bytes(65536))

        for _ in range(count):
            sock = stack.enter_context(await connect((str(far.ipv4), 9090), netns=mesh.lab.pod("client").netns))
            stack.callback(group.create_task(send(sock)).cancel)
            taken, _ = await loop.sock_accept(silent)
            stack.enter_context(taken)
        yield


@LONG
@pytest.mark.parametrize("node", ["w1", "w2"])
def test_readers_that_never_read_and_a_small_memory_cgroup(tmp_path: Path, node: str) -> None:
    """Row 33: backpressure on both sides of the tunnel; no process is killed, and other pods are served."""

    async def main() -> None:
        async with mesh_of(NODES, tmp_path) as mesh, app(mesh.lab.pod("far")), app(mesh.lab.pod("near")):
            with memory_cgroup(160 * _MIB) as cgroup:
                join = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup / "cgroup.procs"))
                proxy = await restarted(mesh, node, *join)
                async with held(mesh, "client", "far") as sock, unread(mesh, 200):
                    for _ in range(20):
                        await serves(mesh, "far", "near")
                        await asyncio.sleep(0.1)
                    await lives(sock)
                await serves(mesh, "far", "near")
                assert proxy.process.poll() is None
                assert "oom_kill 0" in (cgroup / "memory.oom_control").read_text().splitlines()
                assert int((cgroup / "memory.failcnt").read_text()) == 0, "the limit was reached"
                proxy.process.kill()
                proxy.process.wait()

    asyncio.run(main())


# Connection tracking

_CT_NEW, _CT_FLUSH = 0x0100, 0x0102
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_SEEN_REPLY, _ASSURED, _CONFIRMED = 0x2, 0x4, 0x8
_ESTABLISHED = 3
_MOST_TRACKED = Path("/proc/sys/net/netfilter/nf_conntrack_max")
_TRACKED = Path("/proc/sys/net/netfilter/nf_conntrack_count")


def _tuple(kind: int, source: tuple[bytes, int], destination: tuple[bytes, int]) -> bytes:
    addresses = nest(1, attribute(1, source[0]), attribute(2, destination[0]))
    ports = attribute(2, struct.pack(">H", source[1])), attribute(3, struct.pack(">H", destination[1]))
    return nest(kind, addresses, nest(2, attribute(1, b"\x06"), *ports))


def _message(kind: int, flags: int, body: bytes) -> bytes:
    body = struct.pack(">BBH", socket.AF_INET, 0, 0) + body
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body


def track(netlink: socket.socket) -> None:
    """Fill the table of the socket's namespace with established connections of others, which nothing evicts."""
    for address in itertools.count(1):
        client = socket.inet_aton("198.18.0.0")[:2] + struct.pack(">H", address)
        batch = bytearray()
        for port in range(1, 513):
            ends = (client, port), (b"\xcb\0\x71\1", 80)
            batch += _message(
                _CT_NEW,
                _REQUEST | _CREATE,
                _tuple(1, *ends)
                + _tuple(2, *reversed(ends))
                + be32(3, _SEEN_REPLY | _ASSURED | _CONFIRMED)
                + be32(7, 600)
                + nest(4, nest(1, attribute(1, bytes((_ESTABLISHED,))))),
            )
        netlink.send(batch)
        if int(_TRACKED.read_text()) >= int(_MOST_TRACKED.read_text()):
            return


@LONG
def test_a_table_of_connections_that_is_full(tmp_path: Path) -> None:
    """When a pod's own conntrack table is full, its new connections wait. Its open ones and other pods'
    continue.
    """

    async def main() -> None:
        async with mesh_of(NODES, tmp_path) as mesh, app(mesh.lab.pod("far")), app(mesh.lab.pod("near")):
            client, near, far = (mesh.lab.pod(name) for name in ("client", "near", "far"))
            async with held(mesh, "client", "far") as sock:
                netlink = client.run(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12))
                with netlink:
                    await asyncio.to_thread(client.run, lambda: track(netlink))
                    with pytest.raises((TimeoutError, OSError)):
                        await ask(client, far.ipv4, 8080, wait_s=2)
                    await lives(sock)
                    assert (await ask(near, far.ipv4, 8080)).endswith(HELLO)
                    assert mesh.proxies["w1"].ready()
                    netlink.send(_message(_CT_FLUSH, _REQUEST | _ACK, b""))
                    await eventually(lambda: client.run(lambda: int(_TRACKED.read_text())) < 1000, "flushed")
                await serves(mesh, "far", "near")

    asyncio.run(main())


# The wall clock


class WallClock:
    """A wall clock of the test's own for programs that it starts with :attr:`env`."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("NOT TESTED: no C compiler")
        library, file = folder / "wall_clock.so", folder / "clock_offset"
        source = Path(__file__).with_suffix("").with_name("wall_clock.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        file.write_bytes(bytes(8))
        self.env = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(file)}
        with file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), 8)

    def jump(self, ahead_s: int) -> None:
        """Be ahead of everybody else, or behind."""
        self._page[:] = struct.pack("=q", ahead_s)


def test_the_clock_of_the_tests_jumps(tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    clock.jump(-3600)
    script = "import time, datetime; print(int(time.time()), int(datetime.datetime.now().timestamp()))"
    now = int(subprocess.check_output(["date", "+%s"]))
    shown = subprocess.check_output([sys.executable, "-c", script], env={**os.environ, **clock.env}, text=True)
    assert all(-3601 <= int(text) - now <= -3590 for text in shown.split())


@LONG
@pytest.mark.parametrize("node", ["w1", "w2"])
@pytest.mark.parametrize("jump_s", [600, -90], ids=["ahead", "behind"])
def test_a_clock_that_jumps(tmp_path: Path, node: str, jump_s: int) -> None:
    """Row 18, within the two minutes that a certificate is valid before it is made: as if nothing had happened."""

    async def main() -> None:
        async with mesh_of(NODES, tmp_path) as mesh, app(mesh.lab.pod("far")), app(mesh.lab.pod("near")):
            clock = WallClock(tmp_path)
            proxy = await restarted(mesh, node, **clock.env)
            async with held(mesh, "client", "far") as sock:
                for ahead_s in (jump_s, 0):
                    clock.jump(ahead_s)
                    for _ in range(20):
                        await serves(mesh, "far", "near")
                        await asyncio.sleep(0.1)
                    await lives(sock)
            assert proxy.ready()

    asyncio.run(main())


@LONG
@pytest.mark.parametrize(
    ("jump_s", "says"),
    [(30 * 86400, "the certificate from CA expired at"), (-600, "valid from")],
    ids=["ahead", "behind"],
)
def test_a_clock_that_jumps_beyond_every_certificate(tmp_path: Path, jump_s: int, says: str) -> None:
    """Row 18: the refusal names both times, there is no loop, open connections continue, and new ones work when
    the clock is right again.
    """

    async def main() -> None:
        async with mesh_of(NODES, tmp_path) as mesh, app(mesh.lab.pod("far")), app(mesh.lab.pod("near")):
            clock = WallClock(tmp_path)
            proxy = await restarted(mesh, "w1", **clock.env)
            client, near = mesh.lab.pod("client"), mesh.lab.pod("near")
            async with held(mesh, "client", "far") as sock:
                clock.jump(jump_s)
                # Also between two pods of the node, whose certificates are both ours.
                assert await refused(client, near.ipv4, 8080)
                await eventually(lambda: f"{says} 20" in proxy.log_path.read_text(), "the log says so", 60)
                assert "and here it is 20" in proxy.log_path.read_text()
                spent_s, failures = _spent_s(proxy), _failed_fetches(proxy)
                await asyncio.sleep(5)
                assert _spent_s(proxy) - spent_s < 1.0
                # Three identities, each with a pause that begins at a second and doubles.
                assert _failed_fetches(proxy) - failures <= 12
                await lives(sock)
                clock.jump(0)
                await eventually(lambda: proxy.ready() and not _failing(proxy), "certificates", 60)
                await serves(mesh, "far", "near")

    asyncio.run(main())


def _failed_fetches(proxy: NodeProxy) -> int:
    return proxy.log_path.read_text().count("certificate fetch failed")


def _failing(proxy: NodeProxy) -> list[object]:
    """Identities whose certificate cannot be used now."""
    return [entry for entry in proxy.dump()["certificates"] if entry["state"] != "Available"]


def _spent_s(proxy: NodeProxy) -> float:
    fields = Path(f"/proc/{proxy.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
