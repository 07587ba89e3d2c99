"""One member node, one foreign node: the captured connections and their addresses, in both IP versions."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.lab import Lab, Place, Worker
from tests.netns.toys import SHORT_S, WAIT_S, app, ask, peer_address, toy_ztunnel
from tproxy.aio.kernel import BlockingKernel
from tproxy.aio.sockets import connect
from tproxy.errors import ConnectTimedOut
from tproxy.node import HOST, ORIGINAL_SOURCE_MARK, OWNERSHIP, ZTUNNEL, node

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
VIP = {4: "10.96.183.192", 6: "fd00:10:96::c0"}
PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
both_versions = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    # rp_filter is on, so that what needs it off shows.
    with Lab({"w1": ["productpage", "ratings", "outsider"], "w2": ["reviews", "stranger"]}, rp_filter=1) as lab:
        worker = lab.worker("w1")
        netns = {ZTUNNEL: worker.ztunnel.netns, HOST: worker.place.netns}
        kernel = BlockingKernel(netns, OWNERSHIP)
        kernel.apply(node(worker.wanted(["productpage", "ratings"])))
        yield lab
        kernel.close()


@pytest.fixture
def w1(lab: Lab) -> Worker:
    return lab.worker("w1")


@both_versions
def test_member_to_service_address_is_captured_with_both_addresses_kept(
    lab: Lab, w1: Worker, version: int
) -> None:
    async def main() -> None:
        async with toy_ztunnel(w1.ztunnel):
            pod = lab.pod("productpage")
            line = await ask(pod, VIP[version], 9080)
            assert line == f"15001 from {pod.address(version)} to {VIP[version]} 9080 True"

    asyncio.run(main())


@both_versions
@pytest.mark.parametrize("target", ["ratings", "reviews", "outsider"])
def test_member_to_pod_address_is_captured(lab: Lab, w1: Worker, version: int, target: str) -> None:
    async def main() -> None:
        async with toy_ztunnel(w1.ztunnel):
            pod, server = lab.pod("productpage"), lab.pod(target).address(version)
            assert await ask(pod, server) == f"15001 from {pod.address(version)} to {server} 8080 True"

    asyncio.run(main())


@both_versions
@pytest.mark.parametrize("client", ["reviews", "outsider"])
@pytest.mark.parametrize(("port", "listener"), [(8080, 15006), (15008, 15008), (15006, 15006)])
def test_others_to_member_are_captured(
    lab: Lab, w1: Worker, version: int, client: str, port: int, listener: int
) -> None:
    async def main() -> None:
        async with toy_ztunnel(w1.ztunnel):
            pod, member = lab.pod(client), lab.pod("ratings").address(version)
            line = await ask(pod, member, port)
            assert line == f"{listener} from {pod.address(version)} to {member} {port} True"

    asyncio.run(main())


@both_versions
def test_another_node_itself_is_captured(lab: Lab, w1: Worker, version: int) -> None:
    async def main() -> None:
        async with toy_ztunnel(w1.ztunnel):
            other, member = lab.worker("w2").place, lab.pod("ratings").address(version)
            line = await ask(other, member)
            assert line == f"15006 from {other.address(version)} to {member} 8080 True"

    asyncio.run(main())


@both_versions
def test_probe_of_the_own_node_reaches_the_pod_directly(lab: Lab, w1: Worker, version: int) -> None:
    async def main() -> None:
        member = lab.pod("ratings")
        async with toy_ztunnel(w1.ztunnel), app(member):
            line = await ask(w1.place, member.address(version))
            assert line == f"app ratings peer {w1.place.address(version)}"

    asyncio.run(main())


@both_versions
def test_probe_from_the_gateway_address_reaches_the_pod_directly(lab: Lab, w1: Worker, version: int) -> None:
    async def main() -> None:
        member = lab.pod("ratings")
        async with toy_ztunnel(w1.ztunnel), app(member):
            line = await ask(w1.place, member.address(version), source=w1.gateway(version))
            assert line == f"app ratings peer {w1.gateway(version)}"

    asyncio.run(main())


@both_versions
def test_member_to_its_own_node_is_not_captured(lab: Lab, w1: Worker, version: int) -> None:
    async def main() -> None:
        pod = lab.pod("productpage")
        async with toy_ztunnel(w1.ztunnel), app(w1.place, 10250):
            line = await ask(pod, w1.place.address(version), 10250)
            assert line == f"app w1 peer {pod.address(version)}"

    asyncio.run(main())


@both_versions
@pytest.mark.parametrize("server", ["reviews", "stranger"])
def test_traffic_between_others_is_untouched(lab: Lab, w1: Worker, version: int, server: str) -> None:
    async def main() -> None:
        outsider, target = lab.pod("outsider"), lab.pod(server)
        async with toy_ztunnel(w1.ztunnel), app(target):
            line = await ask(outsider, target.address(version))
            assert line == f"app {server} peer {outsider.address(version)}"

    asyncio.run(main())


@both_versions
@pytest.mark.parametrize("server", ["ratings", "reviews", "outsider"])
def test_the_proxys_own_connections_are_not_captured(lab: Lab, w1: Worker, version: int, server: str) -> None:
    async def main() -> None:
        target = lab.pod(server)
        async with toy_ztunnel(w1.ztunnel), app(target):
            line = await ask(w1.ztunnel, target.address(version))
            assert line == f"app {server} peer {w1.ztunnel.address(version)}"

    asyncio.run(main())


@both_versions
@pytest.mark.parametrize(
    ("client", "server"),
    [
        ("productpage", "ratings"),
        ("productpage", "reviews"),
        ("productpage", "outsider"),
        ("stranger", "ratings"),
        ("stranger", "outsider"),
    ],
)
def test_spoofed_source_reaches_the_server_and_replies_come_back(
    lab: Lab, w1: Worker, version: int, client: str, server: str
) -> None:
    async def main() -> None:
        target, source = lab.pod(server), lab.pod(client).address(version)
        async with toy_ztunnel(w1.ztunnel), app(target):
            line = await ask(w1.ztunnel, target.address(version), source=source, mark=ORIGINAL_SOURCE_MARK)
            assert line == f"app {server} peer {source}"

    asyncio.run(main())


@both_versions
def test_direct_connection_to_the_proxy_works(lab: Lab, w1: Worker, version: int) -> None:
    async def main() -> None:
        async with toy_ztunnel(w1.ztunnel), app(w1.ztunnel, 15021):
            own = w1.ztunnel.address(version)
            for client in (w1.place, lab.pod("outsider"), lab.pod("reviews"), lab.worker("w2").place):
                # The node's address on the cable is the gateway's.
                peer = w1.gateway(version) if client is w1.place else client.address(version)
                assert await ask(client, own, 15021) == f"app w1-ztunnel peer {peer}"
                line = await ask(client, own, 15008)
                assert line.startswith(f"15008 from {peer} to {own} 15008")

    asyncio.run(main())


@both_versions
def test_node_local_port_leads_to_the_inbound_listener(lab: Lab, w1: Worker, version: int) -> None:
    async def main() -> None:
        async with toy_ztunnel(w1.ztunnel):
            member = lab.pod("ratings").address(version)
            line = await ask(w1.ztunnel, member, 15088)
            assert line == f"15008 from {w1.ztunnel.address(version)} to {member} 15088 True"

    asyncio.run(main())


@both_versions
@pytest.mark.parametrize(
    ("client", "server"), [("productpage", "reviews"), ("reviews", "productpage"), ("outsider", "ratings")]
)
def test_udp_is_not_captured(lab: Lab, version: int, client: str, server: str) -> None:
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with lab.pod(server).socket(family, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("::" if version == 6 else "0.0.0.0", 5353))
        receiver.settimeout(WAIT_S)
        with lab.pod(client).socket(family, socket.SOCK_DGRAM) as sender:
            sender.settimeout(WAIT_S)
            sender.sendto(b"question", (str(lab.pod(server).address(version)), 5353))
            data, peer = receiver.recvfrom(100)
            assert (data, peer[0]) == (b"question", str(lab.pod(client).address(version)))
            receiver.sendto(b"answer", peer)
            assert sender.recv(100) == b"answer"


@both_versions
@pytest.mark.parametrize(("client", "server"), [("productpage", "reviews"), ("reviews", "ratings")])
def test_echo_requests_are_answered_by_the_pod(lab: Lab, version: int, client: str, server: str) -> None:
    """Without the "not tcp" rule they would end in the ztunnel."""
    assert ping(lab.pod(client), lab.pod(server), version)


def ping(client: Place, server: Place, version: int) -> bool:
    family, protocol = (
        (socket.AF_INET, socket.IPPROTO_ICMP) if version == 4 else (socket.AF_INET6, socket.IPPROTO_ICMPV6)
    )
    request = struct.pack("!BBHHH", 8 if version == 4 else 128, 0, 0, 7, 1) + b"hello"
    if version == 4:
        words = (*struct.unpack("!6H", request[:12]), request[12] << 8)
        total = sum(words)
        total = (total >> 16) + (total & 0xFFFF)
        request = request[:2] + struct.pack("!H", ~total & 0xFFFF) + request[4:]
    with client.socket(family, socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(WAIT_S)
        sock.sendto(request, (str(server.address(version)), 0))
        while True:
            data, peer = sock.recvfrom(2048)
            reply = data[20:] if version == 4 else data
            if peer[0] == str(server.address(version)) and reply[0] == (0 if version == 4 else 129):
                return True


@both_versions
def test_large_transfer_in_both_directions(lab: Lab, w1: Worker, version: int) -> None:
    async def main() -> None:
        async with toy_ztunnel(w1.ztunnel):
            loop = asyncio.get_running_loop()
            with await connect((VIP[version], 80), netns=lab.pod("productpage").netns) as sock:
                while not (await loop.sock_recv(sock, 4096)).endswith(b"\n"):
                    pass
                payload = bytes(range(256)) * 4096

                async def receive() -> bytes:
                    data = b""
                    while len(data) < len(payload):
                        data += await loop.sock_recv(sock, 1 << 16)
                    return data

                async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
                    group.create_task(loop.sock_sendall(sock, payload))
                    received = group.create_task(receive())
                assert received.result() == payload

    asyncio.run(main())


@both_versions
def test_without_a_listener_the_client_is_refused_not_leaked(lab: Lab, w1: Worker, version: int) -> None:
    """No proxy: a member's connection must not slip past to the server."""

    async def main() -> None:
        async with app(lab.pod("reviews")):
            with pytest.raises(Exception) as failure:
                await connect(
                    (lab.pod("reviews").address(version), 8080),
                    netns=lab.pod("productpage").netns,
                    timeout_s=SHORT_S,
                )
            assert isinstance(failure.value, ConnectTimedOut) or "refused" in str(failure.value)

    asyncio.run(main())


def test_spoofed_sockets_share_ports_between_destinations(lab: Lab, w1: Worker) -> None:
    """IP_BIND_ADDRESS_NO_PORT: the port is chosen at connect, so few ports carry many destinations."""

    async def main() -> None:
        source = lab.pod("productpage").ipv4
        first, second = lab.pod("ratings"), lab.pod("reviews")
        with w1.ztunnel.netns.entered():
            old = PORTS.read_text()
            PORTS.write_text("40000 40003")
        try:
            socks = []
            async with app(first), app(second):
                for target in (first, second):
                    for _ in range(3):
                        sock = await connect(
                            (target.ipv4, 8080),
                            source=source,
                            mark=ORIGINAL_SOURCE_MARK,
                            netns=w1.ztunnel.netns,
                        )
                        socks.append(sock)
                assert len({peer_address(sock) for sock in socks}) == 2
                for sock in socks:
                    sock.close()
        finally:
            with w1.ztunnel.netns.entered():
                PORTS.write_text(old)

    asyncio.run(main())
