"""One pod with its own rules: redirected connections, exempt ones, and open connections during a change."""

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

from deploy.lab import Lab, Place, Worker
from tests.netns.dumps import everything, without_generation
from tests.netns.toys import SHORT_S, WAIT_S, app, ask, peer_address, serving
from tests.programs import needed
from tproxy.aio.kernel import BlockingKernel
from tproxy.aio.sockets import connect, listen, original_destination
from tproxy.expressions import Family, accept
from tproxy.inpod import (
    DNS_PORT,
    HOST,
    INBOUND_PLAINTEXT_PORT,
    OUTBOUND_PORT,
    OWNERSHIP,
    POD,
    PROBE_OWNERSHIP,
    PROBE_SOURCES,
    PROXY_MARK,
    TUNNEL_PORT,
    Capture,
    Probed,
    pod,
    probes,
)
from tproxy.operations import AddChain, AddTable, AppendRule, DeleteTable, NftTransaction
from tproxy.render.text import table_text
from tproxy.resources import Chain, Hook, HookPoint, Rule, nothing

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
VIP = {4: "10.96.183.192", 6: "fd00:10:96::c0"}
LOOPBACK = {4: "127.0.0.1", 6: "::1"}
both_versions = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    # rp_filter is on: replies that loop over lo must not need it off.
    with Lab({"w1": ["member", "neighbour"], "w2": ["stranger"]}, rp_filter=1) as lab:
        for probe in PROBE_SOURCES:
            command = ["ip", "address", "add", str(probe), "dev", "lo"]
            assert lab.worker("w1").place.popen(command).wait(WAIT_S) == 0
        yield lab


@pytest.fixture
def w1(lab: Lab) -> Worker:
    return lab.worker("w1")


@pytest.fixture
def member(lab: Lab) -> Place:
    return lab.pod("member")


@pytest.fixture
def neighbour(lab: Lab) -> Place:
    return lab.pod("neighbour")


@pytest.fixture
def kernel(member: Place) -> Iterator[BlockingKernel]:
    with contextlib.closing(BlockingKernel({POD: member.netns}, OWNERSHIP)) as kernel:
        yield kernel
        kernel.apply(nothing(pod(Capture())))


@pytest.fixture
def captured(kernel: BlockingKernel) -> None:
    kernel.apply(pod(Capture()))


@contextlib.asynccontextmanager
async def toy_proxy(place: Place) -> AsyncIterator[None]:
    """Run listeners like the proxy's. Each sends its port, the client's address, and the connection's original
    destination.
    """
    async with contextlib.AsyncExitStack() as stack:
        for address, port in (
            ("::", OUTBOUND_PORT),
            ("::", INBOUND_PLAINTEXT_PORT),
            ("::", TUNNEL_PORT),
            ("127.0.0.1", DNS_PORT),
            ("::1", DNS_PORT),
        ):

            async def answer(client: socket.socket, port: int = port) -> bytes:
                wanted, peer = original_destination(client), peer_address(client)
                return f"{port} from {peer.ip} to {wanted.ip} {wanted.port} {wanted.restored}\n".encode()

            sock = listen(address, port, mark=PROXY_MARK, netns=place.netns)
            await stack.enter_async_context(serving(sock, answer))
        yield


def udp_socket(place: Place, version: int, address: str, port: int, mark: int = 0) -> socket.socket:
    sock = place.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
    sock.bind((address, port))
    sock.settimeout(WAIT_S)
    return sock


def test_twice_changes_nothing_and_removal_leaves_no_trace(kernel: BlockingKernel, member: Place) -> None:
    foreign = (
        AddTable(Family.INET, "kube-proxy"),
        AddChain(
            Family.INET, "kube-proxy", Chain("x", hook=Hook(kind="nat", point=HookPoint.OUTPUT, priority=-99))
        ),
        AppendRule(Family.INET, "kube-proxy", "x", Rule(accept(), "somebody else's")),
    )
    kernel._carry_out(NftTransaction(POD, foreign))
    before = without_generation(everything(member.netns))
    for wanted in (Capture(), Capture(dns=False), Capture(new_connections_only=True), Capture(draining=True)):
        assert kernel.apply(pod(wanted))
        assert kernel.apply(pod(wanted)) == ()
        found = kernel.read().namespaces[POD]
        assert set(found.tables) == set(pod(wanted).namespaces[POD].tables)
    kernel.apply(nothing(pod(Capture())))
    assert without_generation(everything(member.netns)) == before
    kernel._carry_out(NftTransaction(POD, (DeleteTable(Family.INET, "kube-proxy"),)))


@pytest.mark.parametrize(
    "wanted", [Capture(), Capture(versions=(4,)), Capture(virtual_interfaces=("tap0",), new_connections_only=True)]
)
def test_nft_reads_what_we_print(member: Place, wanted: Capture) -> None:
    [table] = pod(wanted).namespaces[POD].tables
    program = member.popen(
        [needed("nft"), "--check", "--file", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _, errors = program.communicate(table_text(table), timeout=WAIT_S)
    assert program.returncode == 0, errors


@both_versions
@pytest.mark.usefixtures("captured")
def test_what_the_pod_sends_is_captured(member: Place, neighbour: Place, version: int) -> None:
    async def main() -> None:
        async with toy_proxy(member):
            own = member.address(version)
            for target, port in ((VIP[version], 9080), (neighbour.address(version), 8080), (VIP[version], 15006)):
                assert await ask(member, target, port) == f"15001 from {own} to {target} {port} True"

    asyncio.run(main())


@both_versions
@pytest.mark.parametrize("client", ["neighbour", "stranger"])
@pytest.mark.usefixtures("captured")
def test_plaintext_to_the_pod_is_captured_and_tunnels_are_not(
    lab: Lab, member: Place, client: str, version: int
) -> None:
    async def main() -> None:
        async with toy_proxy(member), app(member):
            peer, own = lab.pod(client), member.address(version)
            for port, listener in ((8080, 15006), (15006, 15006), (15001, 15006)):
                restored = port != 15006
                expected = f"{listener} from {peer.address(version)} to {own} {port} {restored}"
                assert await ask(peer, own, port) == expected
            assert await ask(peer, own, 15008) == f"15008 from {peer.address(version)} to {own} 15008 False"

    asyncio.run(main())


@both_versions
@pytest.mark.usefixtures("captured")
def test_the_proxys_own_connections_are_not_captured(member: Place, neighbour: Place, version: int) -> None:
    async def main() -> None:
        async with toy_proxy(member), app(neighbour):
            line = await ask(member, neighbour.address(version), mark=PROXY_MARK)
            assert line == f"app neighbour peer {member.address(version)}"

    asyncio.run(main())


@both_versions
@pytest.mark.usefixtures("captured")
def test_delivery_with_the_clients_address_loops_back(member: Place, lab: Lab, version: int) -> None:
    async def main() -> None:
        client = lab.pod("stranger").address(version)
        async with toy_proxy(member), app(member):
            loop = asyncio.get_running_loop()
            sock = await connect(
                (member.address(version), 8080), source=client, mark=PROXY_MARK, netns=member.netns
            )
            with sock:
                async with asyncio.timeout(WAIT_S):
                    assert await loop.sock_recv(sock, 100) == f"app member peer {client}\n".encode()
                    await loop.sock_sendall(sock, b"echo")
                    assert await loop.sock_recv(sock, 100) == b"echo"

    asyncio.run(main())


@both_versions
@pytest.mark.usefixtures("captured")
def test_the_pod_reaches_itself_directly(member: Place, version: int) -> None:
    async def main() -> None:
        async with toy_proxy(member), app(member):
            for address in (LOOPBACK[version], member.address(version)):
                assert await ask(member, address) == f"app member peer {address}"

    asyncio.run(main())


@both_versions
@pytest.mark.usefixtures("captured")
def test_probes_reach_the_application_directly(w1: Worker, member: Place, version: int) -> None:
    probe = next(source for source in PROBE_SOURCES if source.version == version)

    async def main() -> None:
        async with toy_proxy(member), app(member):
            own = member.address(version)
            assert await ask(w1.place, own, source=probe) == f"app member peer {probe}"
            # Anything else of the node is not exempt.
            assert (await ask(w1.place, own)).startswith("15006 from ")

    asyncio.run(main())


@both_versions
@pytest.mark.usefixtures("captured")
def test_the_nodes_kubelet_probes_from_an_address_that_passes(w1: Worker, member: Place, version: int) -> None:
    probe = next(source for source in PROBE_SOURCES if source.version == version)
    members = [Probed(uid="uid-member", addresses=member.addresses)]

    async def main() -> None:
        before = without_generation(everything(w1.place.netns))
        with contextlib.closing(BlockingKernel({HOST: w1.place.netns}, PROBE_OWNERSHIP)) as kernel:
            async with toy_proxy(member), app(member):
                own = member.address(version)
                assert kernel.apply(probes(members, os.getuid()))
                assert kernel.apply(probes(members, os.getuid())) == ()
                assert await ask(w1.place, own) == f"app member peer {probe}"
                # Packets that only pass through the node, or come from another user of it, are not changed.
                kernel.apply(probes(members, os.getuid() + 1))
                assert (await ask(w1.place, own)).startswith("15006 from ")
                kernel.apply(probes([], os.getuid()))
                assert (await ask(w1.place, own)).startswith("15006 from ")
            kernel.apply(nothing(probes([], 0)))
        assert without_generation(everything(w1.place.netns)) == before

    asyncio.run(main())


@both_versions
def test_dns_goes_to_the_proxy_and_the_proxys_own_passes(
    kernel: BlockingKernel, member: Place, neighbour: Place, version: int
) -> None:
    resolver = str(neighbour.address(version))
    with (
        udp_socket(neighbour, version, resolver, 53) as upstream,
        udp_socket(member, version, LOOPBACK[version], DNS_PORT, PROXY_MARK) as proxy,
        udp_socket(member, version, "", 0, PROXY_MARK) as forwarding,
    ):
        for dns in (True, False, True):
            kernel.apply(pod(Capture(dns=dns)))
            # A new socket each time, because an existing translation stays.
            with udp_socket(member, version, "", 0) as client:
                client.sendto(b"query", (resolver, 53))
                if dns:
                    query, asking = proxy.recvfrom(100)
                    forwarding.sendto(query, (resolver, 53))
                    forwarded, forwarder = upstream.recvfrom(100)
                    upstream.sendto(forwarded + b" answered", forwarder)
                    answer, seen = forwarding.recvfrom(100)
                    assert seen[:2] == (resolver, 53)
                    proxy.sendto(answer, asking)
                else:
                    query, asking = upstream.recvfrom(100)
                    upstream.sendto(query + b" answered", asking)
                answer, seen = client.recvfrom(100)
                # The application sees the answer from the resolver that it queried, whichever server answered.
                assert (answer, seen[:2]) == (b"query answered", (resolver, 53))

    async def over_tcp() -> None:
        async with toy_proxy(member):
            line = await ask(member, VIP[version], 53)
            assert line == f"15053 from {member.address(version)} to {VIP[version]} 53 True"

    asyncio.run(over_tcp())


@both_versions
@pytest.mark.usefixtures("captured")
def test_a_forwarded_query_with_the_applications_own_tuple_is_another_connection(
    member: Place, neighbour: Place, version: int
) -> None:
    """In a single zone, conntrack would take the query for the application's, and return it to the proxy."""
    resolver, own = str(neighbour.address(version)), str(member.address(version))
    with (
        udp_socket(neighbour, version, resolver, 53) as upstream,
        udp_socket(member, version, LOOPBACK[version], DNS_PORT, PROXY_MARK) as proxy,
    ):
        with udp_socket(member, version, own, 4053) as client:
            client.sendto(b"query", (resolver, 53))
            assert proxy.recv(100) == b"query"
        with udp_socket(member, version, own, 4053, PROXY_MARK) as forwarding:
            forwarding.sendto(b"forwarded", (resolver, 53))
            forwarded, forwarder = upstream.recvfrom(100)
            assert (forwarded, forwarder[1]) == (b"forwarded", 4053)
            upstream.sendto(b"answer", forwarder)
            assert forwarding.recv(100) == b"answer"


@both_versions
def test_without_inbound_plaintext_reaches_the_application(
    kernel: BlockingKernel, member: Place, neighbour: Place, version: int
) -> None:
    async def main() -> None:
        kernel.apply(pod(Capture(inbound=False)))
        async with toy_proxy(member), app(member):
            own, peer = member.address(version), neighbour.address(version)
            assert await ask(neighbour, own) == f"app member peer {peer}"
            assert (await ask(neighbour, own, 15008)).startswith("15008 ")
            assert (await ask(member, VIP[version])).startswith("15001 ")

    asyncio.run(main())


@both_versions
def test_what_comes_from_a_virtual_interface_counts_as_sent(
    kernel: BlockingKernel, member: Place, neighbour: Place, version: int
) -> None:
    async def main() -> None:
        kernel.apply(pod(Capture(virtual_interfaces=("eth0",))))
        async with toy_proxy(member):
            own, peer = member.address(version), neighbour.address(version)
            assert await ask(neighbour, own) == f"15001 from {peer} to {own} 8080 True"

    asyncio.run(main())


class Open:
    """A connection that stays open, and reports whether bytes are still echoed over it."""

    def __init__(self, sock: socket.socket, line: str) -> None:
        self._socket = sock
        self.line = line

    async def echoes(self, within_s: float = WAIT_S) -> bool:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                await loop.sock_sendall(self._socket, b"still there?")
                return await loop.sock_recv(self._socket, 100) == b"still there?"
        except (TimeoutError, ConnectionError):
            return False


@contextlib.asynccontextmanager
async def opened(place: Place, address: object, port: int = 8080, **options: object) -> AsyncIterator[Open]:
    loop = asyncio.get_running_loop()
    sock = await connect((address, port), netns=place.netns, timeout_s=WAIT_S, **options)  # type: ignore[arg-type]
    with sock:
        async with asyncio.timeout(WAIT_S):
            line = (await loop.sock_recv(sock, 200)).decode().strip()
        yield Open(sock, line)


@both_versions
@pytest.mark.parametrize("keep", [False, True], ids=["everything", "new-only"])
def test_connections_open_at_enrolment(version: int, keep: bool) -> None:
    """In a namespace that has tracked nothing yet, as a pod has before it is enrolled."""

    async def main(lab: Lab) -> None:
        fresh, peer = lab.pod("fresh"), lab.pod("peer")
        with contextlib.closing(BlockingKernel({POD: fresh.netns}, OWNERSHIP)) as kernel:
            async with (
                app(fresh),
                app(peer),
                toy_proxy(fresh),
                opened(fresh, peer.address(version)) as sent,
                opened(peer, fresh.address(version)) as got,
            ):
                assert (sent.line[:8], got.line[:9]) == ("app peer", "app fresh")
                kernel.apply(pod(Capture(new_connections_only=keep)))
                assert await sent.echoes(WAIT_S if keep else SHORT_S) == keep
                assert await got.echoes(WAIT_S if keep else SHORT_S) == keep
                assert (await ask(fresh, peer.address(version))).startswith("15001 ")
                assert (await ask(peer, fresh.address(version))).startswith("15006 ")

    with Lab({"w1": ["fresh", "peer"]}) as lab:
        asyncio.run(main(lab))


@both_versions
def test_leaving_in_two_steps_lets_open_connections_end(
    kernel: BlockingKernel, member: Place, neighbour: Place, lab: Lab, version: int
) -> None:
    async def main() -> None:
        own, client = member.address(version), lab.pod("stranger").address(version)
        target = neighbour.address(version)
        kernel.apply(pod(Capture()))
        async with (
            toy_proxy(member),
            app(member),
            app(neighbour),
            opened(member, target) as sent,
            opened(neighbour, own) as received,
            opened(member, own, source=client, mark=PROXY_MARK) as delivered,
        ):
            lines = [connection.line.split()[0] for connection in (sent, received, delivered)]
            assert lines == ["15001", "15006", "app"]
            kernel.apply(pod(Capture(draining=True)))
            for connection in (sent, received, delivered):
                assert await connection.echoes()
            assert await ask(member, target) == f"app neighbour peer {own}"
            assert await ask(neighbour, own) == f"app member peer {target}"
            kernel.apply(nothing(pod(Capture())))
            # What two steps are for: this is what one would have done to them.
            assert not await sent.echoes(SHORT_S)
            assert not await received.echoes(SHORT_S)

    asyncio.run(main())


def test_a_whole_set_replaces_another_in_one_transaction(kernel: BlockingKernel) -> None:
    kernel.apply(pod(Capture()))
    done = kernel.apply(pod(Capture(inbound=False, dns=False)))
    assert [type(operation) for operation in done] == [NftTransaction]
