"""Options, errors and leaks of the sockets; tests that need capture are in test_interception."""

import asyncio
import contextlib
import errno
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from unittest import mock

import pytest
import uvloop

from deploy.lab import Lab
from tests.netns.toys import WAIT_S, app, ask, peer_address
from tests.programs import needed
from tproxy.aio import socket_calls, sockets
from tproxy.aio.netns import Netns
from tproxy.aio.sockets import (
    IP_TRANSPARENT,
    Keepalive,
    canonical,
    connect,
    dialled_address,
    listen,
    local_address,
    original_destination,
)
from tproxy.errors import ConnectFailed, ConnectTimedOut, KernelRefused, PortTaken
from xds.model.address import SocketAddress
from ztunnel.proxy.envoy.path.dial import _connect_now
from ztunnel.proxy.envoy.stream.stream_info import UpstreamOptions
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
ROOT = Path(__file__).parents[2]
on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[..., None]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab({"w1": ["client", "server"]}) as lab:
        yield lab


@pytest.fixture(scope="module")
def silent(lab: Lab) -> Netns:
    """Map 192.0.2.1 to a hardware address that no machine has."""
    client = lab.pod("client")
    for words in ("route add 192.0.2.1 dev eth0", "neigh add 192.0.2.1 lladdr 02:00:00:00:00:01 dev eth0"):
        assert client.popen([needed("ip"), *words.split()]).wait(WAIT_S) == 0
    return client.netns


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@on_both_loops
def test_connect_returns_a_connected_socket_with_its_options(lab: Lab, run: Run) -> None:
    async def main() -> None:
        server = lab.pod("server")
        async with app(server):
            with await connect(
                (server.ipv4, 8080), netns=lab.pod("client").netns, mark=7, keepalive=Keepalive(idle_s=11)
            ) as sock:
                assert not sock.getblocking()
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK) == 7
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 11
                assert peer_address(sock) == (server.ipv4, 8080)
                assert local_address(sock).ip == lab.pod("client").ipv4

    run(main())


@on_both_loops
def test_silence_is_a_timeout(silent: Netns, run: Run) -> None:
    async def main() -> None:
        before = open_descriptors()
        with pytest.raises(ConnectTimedOut, match=r"no answer in 0\.05 s"):
            await connect(("192.0.2.1", 80), netns=silent, timeout_s=0.05)
        assert open_descriptors() == before

    run(main())


@on_both_loops
def test_cancelled_connect_leaks_nothing(silent: Netns, run: Run) -> None:
    async def main() -> None:
        before = open_descriptors()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(connect(("192.0.2.1", 80), netns=silent)) for _ in range(20)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert open_descriptors() == before + 20
            for task in tasks:
                task.cancel()
        assert open_descriptors() == before
        # The numbers are free for new sockets, which no old watcher may disturb.
        with listen("127.0.0.1", 0) as server:
            port = server.getsockname()[1]
            for _ in range(20):
                (await connect(("127.0.0.1", port), timeout_s=WAIT_S)).close()

    run(main())


@on_both_loops
def test_refused_is_an_error_with_the_reason(lab: Lab, run: Run) -> None:
    async def main() -> None:
        with pytest.raises(ConnectFailed, match="Connection refused") as failure:
            await connect((lab.pod("server").ipv4, 81), netns=lab.pod("client").netns)
        assert isinstance(failure.value.error, ConnectionRefusedError)

    run(main())


def test_a_taken_port_is_named(lab: Lab) -> None:
    space = lab.pod("server").netns
    with listen("::", 9000, netns=space):
        with pytest.raises(PortTaken, match=r"\[::\]:9000"):
            listen("::", 9000, netns=space)
        with pytest.raises(PortTaken, match=r"127\.0\.0\.1:9000"):
            listen("127.0.0.1", 9000, netns=space)


def test_reuse_port_lets_two_generations_overlap(lab: Lab) -> None:
    space = lab.pod("server").netns
    with listen("::", 9001, netns=space, reuse_port=True), listen("::", 9001, netns=space, reuse_port=True):
        pass


def test_a_foreign_address_needs_freebind_or_transparent(lab: Lab) -> None:
    space = lab.pod("server").netns
    with pytest.raises(KernelRefused, match="EADDRNOTAVAIL"):
        listen("192.0.2.9", 9002, netns=space)
    for options in ({"freebind": True}, {"transparent": True}):
        with listen("192.0.2.9", 9002, netns=space, **options):
            pass


def test_options_are_set_before_bind(lab: Lab) -> None:
    options = ((socket.SOL_IP, IP_TRANSPARENT, 1), (socket.SOL_SOCKET, socket.SO_MARK, 0x402))
    with listen("192.0.2.9", 9003, netns=lab.pod("server").netns, socket_options=options) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK) == 0x402


@pytest.mark.parametrize(("address", "version"), [("::", 4), ("::", 6), ("0.0.0.0", 4)])
def test_dual_stack_listeners_show_plain_addresses(lab: Lab, address: str, version: int) -> None:
    async def main() -> None:
        client, server = lab.pod("client"), lab.pod("server")
        loop = asyncio.get_running_loop()
        with listen(address, 9004, netns=server.netns) as listener:
            async with asyncio.timeout(WAIT_S):
                with await connect((server.address(version), 9004), netns=client.netns):
                    accepted, _ = await loop.sock_accept(listener)
                    with accepted:
                        assert peer_address(accepted).ip == client.address(version)
                        assert local_address(accepted) == (server.address(version), 9004)
                        assert original_destination(accepted) == (server.address(version), 9004, False)
                        assert dialled_address(accepted, version) == (str(server.address(version)), 9004)

    asyncio.run(main())


def test_canonical() -> None:
    assert canonical("::ffff:10.0.0.1") == ip_address("10.0.0.1")
    assert canonical("fe80::1%eth0") == ip_address("fe80::1")
    assert canonical(ip_address("fd00::1")) == ip_address("fd00::1")
    with pytest.raises(ValueError, match="nonsense"):
        canonical("nonsense")


def test_a_pod_can_talk_to_itself_in_its_namespace(lab: Lab) -> None:
    async def main() -> None:
        server = lab.pod("server")
        async with app(server):
            assert await ask(server, "127.0.0.1") == "app server peer 127.0.0.1"

    asyncio.run(main())


def test_a_client_and_who_appears_as_it_use_different_ports(lab: Lab) -> None:
    # A client that got the port of a connection in its name would be led into that one by connection tracking.
    async def main() -> None:
        client, server = lab.pod("client"), lab.pod("server")
        ports: dict[bool, set[int]] = {False: set(), True: set()}
        async with app(server), contextlib.AsyncExitStack() as stack:
            for impersonated in (False, True) * 50:
                sock = await connect(
                    (server.ipv4, 8080), source=client.ipv4 if impersonated else None, netns=client.netns
                )
                stack.enter_context(sock)
                assert local_address(sock).ip == client.ipv4
                ports[impersonated].add(local_address(sock).port)
        assert {port % 2 for port in ports[False]} == {0}  # the kernel's part of it
        assert {port % 2 for port in ports[True]} == {1}
        assert len(ports[True]) > 40  # chosen freely: RFC 6056
        assert min(ports[True]) >= 32768
        assert max(ports[True]) < 61000

    asyncio.run(main())


def test_a_port_that_is_taken_is_passed_over(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        place, source = lab.pod("client"), "127.0.0.9"
        offered: list[int] = []
        monkeypatch.setattr(sockets, "foreign_port", lambda: offered.pop(0))

        async def port(to: int, *ports: int) -> int:
            offered[:] = ports
            sock = stack.enter_context(await connect(("127.0.0.1", to), source=source, netns=place.netns))
            assert not offered
            return local_address(sock).port

        async with app(place), app(place, 8081), contextlib.AsyncExitStack() as stack:
            before = open_descriptors()
            assert await port(8080, 40001) == 40001
            assert await port(8080, 40001, 40003) == 40003  # two connections cannot be the same one
            assert await port(8081, 40001) == 40001  # but this is another
            stack.enter_context(listen("0.0.0.0", 40005, netns=place.netns))
            assert await port(8080, 40005, 40007) == 40007
            assert await port(8080, *[40001] * 8) % 2 == 0  # the kernel's choice in the end
            # Ours and the application's of five connections, and the listener.
            assert await eventually_equal(open_descriptors, before + 11)
            with pytest.raises(ConnectFailed) as failed:
                await port(1, 40009)
            assert failed.value.error is not None
            assert failed.value.error.errno == errno.ECONNREFUSED  # which no other port would mend
            assert open_descriptors() == before + 11

    asyncio.run(main())


def test_the_kernel_chooses_the_port_when_all_others_are_taken(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with thousands of connections to one server has few free ports among those chosen at random."""

    async def main() -> None:
        place, address = lab.pod("client"), SocketAddress("127.0.0.1", 8080)
        cluster = mock.Mock(spec=LiveCluster, model=mock.Mock(keepalive=None, bind_source=None))
        monkeypatch.setattr(socket_calls, "foreign_port", lambda: 40001)
        async with app(place):
            before = open_descriptors()
            with contextlib.ExitStack() as stack, place.netns.entered():
                ports = []
                for _ in range(2):
                    sock, _ = _connect_now(cluster, address, UpstreamOptions(source="127.0.0.9"))
                    ports.append(stack.enter_context(contextlib.closing(sock)).getsockname()[1])
            assert ports[0] == 40001
            assert ports[1] % 2 == 0
            assert await eventually_equal(open_descriptors, before)

    asyncio.run(main())


async def eventually_equal(value: Callable[[], int], expected: int) -> bool:
    async with asyncio.timeout(WAIT_S):
        while value() != expected:
            await asyncio.sleep(0.01)
    return True


WITHOUT = """
import asyncio, sys
from tproxy.aio.sockets import connect, listen
from tproxy.aio.netns import Netns
from tproxy.errors import NeedCapability
def attempt(work):
    try:
        work()
    except NeedCapability as error:
        print(error.capability, "|", error)
attempt(lambda: listen("127.0.0.1", 0, transparent=True))
attempt(lambda: listen("127.0.0.1", 0, mark=1))
attempt(lambda: listen("127.0.0.1", 80))
attempt(lambda: asyncio.run(connect(("127.0.0.1", 1), source="192.0.2.1")))
attempt(lambda: asyncio.run(connect(("127.0.0.1", 1), mark=1)))
attempt(Netns.create)
"""


def test_missing_capabilities_are_named() -> None:
    done = subprocess.run(
        ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", WITHOUT],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=30,
        check=True,
    )
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()] == [
        "CAP_NET_ADMIN",
        "CAP_NET_ADMIN",
        "CAP_NET_BIND_SERVICE",
        "CAP_NET_ADMIN",
        "CAP_NET_ADMIN",
        "CAP_SYS_ADMIN",
    ]
    assert "securityContext" in done.stdout
