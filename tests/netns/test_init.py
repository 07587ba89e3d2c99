"""``ztunnel init`` in real pods: what is captured and what is not, by user, port, range and device."""

import argparse
import asyncio
import contextlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from deploy.lab import Lab, Place
from tests.netns.dumps import everything, without_generation
from tests.netns.toys import WAIT_S, app, serving
from tests.programs import needed
from tproxy.aio.loopback import put_address, remove_address
from tproxy.aio.sockets import listen, original_destination
from tproxy.render.text import table_text
from tproxy.sidecar import PASSTHROUGH, USER, Sidecar, sidecar
from ztunnel.sidecar.init.command import BAD_FLAGS, DONE, NOT_CAPTURED, run
from ztunnel.sidecar.init.flags import add_flags

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
ROOT = Path(__file__).parents[2]
VIP = {4: "10.96.183.192", 6: "fd00:10:96::c0"}
LOOPBACK = {4: "127.0.0.1", 6: "::1"}
APPLICATION = 1000
PORTS = (15001, 15006, 15008, 15053)
both_versions = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab({"w1": ["member", "neighbour"]}) as lab:
        yield lab


@pytest.fixture
def member(lab: Lab) -> Iterator[Place]:
    pod = lab.pod("member")
    yield pod
    assert init(pod, "--cleanup-only")[0] == DONE


def init(pod: Place, *flags: str) -> tuple[int, str, str]:
    """Run the command in a pod. Return its status and its output."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    out, err = io.StringIO(), io.StringIO()
    status = pod.run(run, parser.parse_args(flags), out, err)
    return status, out.getvalue(), err.getvalue()


def socket_of(place: Place, user: int, group: int, family: socket.AddressFamily) -> socket.socket:
    """A socket as a process of this user makes it: the rules match who has made it."""
    with place.netns.entered():
        os.setegid(group)
        os.seteuid(user)
        try:
            return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        finally:
            os.seteuid(0)
            os.setegid(0)


async def reached(
    place: Place, target: object, port: int, *, user: int = APPLICATION, group: int = APPLICATION, source: str = ""
) -> str:
    """The listener that takes a connection: the port of the proxy, or the application's pod."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in str(target) else socket.AF_INET
    with socket_of(place, user, group, family) as sock:
        if source:
            sock.bind((source, 0))
        async with asyncio.timeout(WAIT_S):
            await loop.sock_connect(sock, (str(target), port))
            said = (await loop.sock_recv(sock, 4096)).decode()
    words = said.split()
    if words[0] == "app":
        return words[1]
    assert words[1:] == [str(target), str(port)], said
    return words[0]


@contextlib.asynccontextmanager
async def toy_proxy(place: Place) -> AsyncIterator[None]:
    """Run listeners like a proxy's. Each sends its port and the connection's original destination."""
    async with contextlib.AsyncExitStack() as stack:
        for port in PORTS:

            async def answer(client: socket.socket, port: int = port) -> bytes:
                wanted = original_destination(client)
                return f"{port} {wanted.ip} {wanted.port}\n".encode()

            await stack.enter_async_context(serving(listen("::", port, netns=place.netns), answer))
        yield


@contextlib.asynccontextmanager
async def pods(lab: Lab, *ports: int) -> AsyncIterator[tuple[Place, Place]]:
    """A pod with a proxy, a neighbour without, applications in both."""
    member, neighbour = lab.pod("member"), lab.pod("neighbour")
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(toy_proxy(member))
        for place in (member, neighbour):
            for port in (8080, *ports):
                await stack.enter_async_context(app(place, port))
        yield member, neighbour


@both_versions
def test_the_default_captures_all_but_the_proxys_own(lab: Lab, member: Place, version: int) -> None:
    async def main() -> None:
        async with pods(lab, 15021) as (member, neighbour):
            own, far = member.address(version), neighbour.address(version)
            assert await reached(member, far, 8080) == "15001"
            assert await reached(member, VIP[version], 9080) == "15001"
            assert await reached(neighbour, own, 8080) == "15006"
            # Tunnels and excluded ports arrive as they are.
            assert await reached(neighbour, own, 15008) == "15008"
            assert await reached(neighbour, own, 15021) == "member"
            # An application's connection to itself is not captured.
            assert await reached(member, LOOPBACK[version], 8080) == "member"
            assert await reached(member, own, 8080) == "member"
            # So is the proxy, to anywhere, by user or by group, and to the application from its own source.
            for user, group in ((USER, USER), (USER, 7), (7, USER)):
                assert await reached(member, far, 8080, user=user, group=group) == "neighbour"
            source = str(PASSTHROUGH[4 if version == 4 else 6])
            assert await reached(member, own, 8080, user=USER, group=USER, source=source) == "member"
            # Without that source it is the pod that calls itself through a service.
            assert await reached(member, own, 8080, user=USER, group=USER) == "15006"
            assert await reached(member, own, 15008, user=USER, group=USER) == "15008"

    assert init(member, "-d", "15090,15021,15020")[0] == DONE
    asyncio.run(main())


@both_versions
def test_excluded_ports_ranges_groups_and_devices(lab: Lab, member: Place, version: int) -> None:
    neighbour = lab.pod("neighbour")
    far, host = neighbour.address(version), 32 if version == 4 else 128

    async def captured(*flags: str, port: int = 8080, group: int = APPLICATION, **env: str) -> tuple[str, str]:
        """Return who accepts a connection to the neighbour, and one from it."""
        os.environ.update(env)
        try:
            assert init(member, *flags)[0] == DONE
        finally:
            for name in env:
                del os.environ[name]
        sent = await reached(member, far, port, group=group)
        return sent, await reached(neighbour, member.address(version), port)

    async def main() -> None:
        async with pods(lab, 9000):
            assert await captured() == ("15001", "15006")
            assert await captured("-o", "8080") == ("neighbour", "15006")
            assert await captured("-x", f"{far}/{host}") == ("neighbour", "15006")
            assert await captured("-i", f"{VIP[version]}/{host}") == ("neighbour", "15006")
            assert await captured("-i", f"{far}/{host}") == ("15001", "15006")
            assert await captured("-i", "", "-q", "9000") == ("neighbour", "15006")
            assert await captured("-i", "", "-q", "9000", port=9000) == ("15001", "15006")
            assert await captured("-b", "9000") == ("15001", "member")
            assert await captured("-b", "9000", port=9000) == ("15001", "15006")
            assert await captured("-b", "") == ("15001", "member")
            assert await captured("-d", "8080") == ("15001", "member")
            assert await captured("-c", "eth0") == ("neighbour", "member")
            assert await captured("-c", "et+") == ("neighbour", "member")
            assert await captured("-c", "eth0+,eth") == ("neighbour", "member")
            assert await captured("-c", "eth+0,et") == ("15001", "15006")
            assert await captured("-k", "eth0") == ("15001", "15001")
            assert await captured("-k", "e+") == ("15001", "15001")
            assert await captured(ISTIO_OUTBOUND_OWNER_GROUPS="1000,5") == ("15001", "15006")
            assert await captured(ISTIO_OUTBOUND_OWNER_GROUPS="5") == ("neighbour", "15006")
            assert await captured(ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE="1000") == ("neighbour", "15006")
            assert await captured("--drop-invalid") == ("15001", "15006")

    asyncio.run(main())


@both_versions
def test_dns_over_tcp_and_udp(lab: Lab, member: Place, version: int) -> None:
    async def main() -> None:
        async with pods(lab, 53) as (_, neighbour):
            far = neighbour.address(version)
            assert await reached(member, far, 53) == "15053"
            assert await reached(member, far, 53, user=USER) == "neighbour"
            # UDP as well, to a socket that answers from loopback, as the proxy's does.
            family = socket.AF_INET if version == 4 else socket.AF_INET6
            udp = socket.SOCK_DGRAM
            with member.socket(family, udp) as server, member.socket(family, udp) as asks:
                server.bind((LOOPBACK[version], 15053))
                for sock in (server, asks):
                    sock.settimeout(WAIT_S)
                asks.sendto(b"who?", (str(far), 53))
                query, peer = server.recvfrom(100)
                server.sendto(query + b" me", peer)
                assert asks.recvfrom(100) == (b"who? me", (str(far), 53, *((0, 0) if version == 6 else ())))

    assert init(member, "--capture-all-dns")[0] == DONE
    asyncio.run(main())


def test_twice_changes_nothing_and_cleaning_up_leaves_no_trace(member: Place) -> None:
    before = without_generation(everything(member.netns))
    status, said, _ = init(member, "--redirect-dns", "--capture-all-dns", "--drop-invalid")
    assert (status, said.split()[1]) == (DONE, "changes")
    assert init(member, "--capture-all-dns", "--drop-invalid") == (DONE, "nothing to change\n", "")
    assert not member.run(put_address, PASSTHROUGH[6])
    # Another command line replaces the rules in one transaction.
    assert init(member)[1] != "nothing to change\n"
    assert init(member, "--cleanup-only")[0] == DONE
    assert without_generation(everything(member.netns)) == before
    assert init(member, "--cleanup-only") == (DONE, "nothing to change\n", "")
    assert not member.run(remove_address, PASSTHROUGH[6])


def test_a_reader_can_check_before_anything_changes(member: Place) -> None:
    before = without_generation(everything(member.netns))
    status, text, _ = init(member, "--print", "-o", "25")
    assert status == DONE
    assert text.count("*nat\n") == 2
    assert "-A ISTIO_OUTPUT -p tcp -m tcp --dport 25 -j RETURN" in text
    status, text, _ = init(member, "--dry-run", "-o", "25")
    assert (status, text) == (DONE, table_text(sidecar(Sidecar(exclude_outbound=(25,)))) + "\n")
    assert without_generation(everything(member.netns)) == before
    status, _, faults = init(member, "-o", "http", "-i", "10.0.0.1/33")
    assert status == BAD_FLAGS
    assert faults.splitlines() == [
        "ztunnel init: --istio-service-cidr: '10.0.0.1/33' is no IP range such as 10.0.0.0/8",
        "ztunnel init: --istio-local-outbound-ports-exclude: 'http' is no port from 1 to 65535",
    ]


def test_nft_reads_what_we_print(member: Place) -> None:
    program = member.popen(
        [needed("nft"), "--check", "--file", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _, errors = program.communicate(init(member, "-n", "--capture-all-dns", "--drop-invalid")[1], timeout=WAIT_S)
    assert program.returncode == 0, errors


def test_validation_is_by_a_connection(lab: Lab, member: Place) -> None:
    status, said, _ = init(member, "--validate", "--skip-rule-apply", "--probe-timeout", "0.5s")
    assert status == NOT_CAPTURED
    assert "IPv4: a connection to 192.0.2.1:15002 does not arrive at port 15001" in said
    status, said, _ = init(member, "--validate")
    assert status == DONE
    assert "IPv6: a connection to [2001:db8::1]:15002 is captured" in said
    # A destination that is captured is chosen, whatever is excluded.
    ranges = ("-i", "10.96.0.0/16,fd00:10:96::/64", "-x", "10.96.0.0/30")
    status, said, _ = init(member, "--validate", *ranges, "-o", "15002", "-q", "9")
    assert status == DONE
    assert "a connection to 192.0.2.1:9 is captured" in said
    status, said, _ = init(member, "--validate", *ranges)
    assert status == DONE
    assert "a connection to 10.96.0.4:15002 is captured" in said
    assert "a connection to [fd00:10:96::]:15002 is captured" in said
    excluded = ("-i", "10.0.0.0/8,fd00::/16", "-x", "10.0.0.0/9,fd00::/17,fd00:8000::/128,10.128.0.0/32")
    status, said, _ = init(member, "--validate", *excluded)
    assert status == DONE
    assert "a connection to 10.128.0.1:15002 is captured" in said
    assert "a connection to [fd00:8000::1]:15002 is captured" in said
    status, said, _ = init(member, "--validate", "-x", "192.0.0.0/8,2001::/16")
    assert status == DONE
    assert "a connection to 198.51.100.1:15002 is captured" in said
    assert "a connection to [3fff::1]:15002 is captured" in said
    # Rules that capture nothing leave nothing to say.
    status, said, _ = init(member, "--validate", "-i", "")
    assert (status, said.splitlines()[-1]) == (NOT_CAPTURED, "validation: nothing could be checked")
    # The proxy is there already.
    with listen("0.0.0.0", 15001, netns=member.netns):
        assert "cannot be checked" in init(member, "--validate")[1]


def test_with_the_capabilities_and_users_of_the_containers(member: Place) -> None:
    command = [sys.executable, "-m", "ztunnel", "init"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}

    def result(*words: str) -> tuple[int, str]:
        process = member.popen(
            [needed("setpriv"), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, _ = process.communicate(timeout=30)
        return process.returncode, said

    capable = result("--bounding-set=-all,+net_admin", *command)
    assert capable[0] == DONE, capable[1]
    incapable = result("--bounding-set=-all", *command, "--drop-invalid")
    assert incapable[0] == 1
    assert "CAP_NET_ADMIN" in incapable[1]
    # The proxy's own user, without capabilities. Its connection to the pod reaches the port for incoming ones.
    ids = (f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--bounding-set=-all")
    proxy = result(*ids, *command, "--skip-rule-apply", "--run-validation")
    assert proxy[0] == DONE, proxy[1]
    assert f"a connection to {member.ipv4}:15002 is captured" in proxy[1]


def test_another_namespace_is_named(lab: Lab, member: Place) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    out = io.StringIO()
    assert run(parser.parse_args(["--network-namespace", member.netns.name]), out, out) == DONE
    assert init(member) == (DONE, "nothing to change\n", "")
    err = io.StringIO()
    assert run(parser.parse_args(["--network-namespace", "no-such"]), out, err) == 1
    assert "no-such" in err.getvalue()
