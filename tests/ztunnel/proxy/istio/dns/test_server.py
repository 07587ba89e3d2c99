"""The pod's name server over real sockets: UDP, TCP, limits, and what is reported."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import pytest
import uvloop

from tests.limits import WAIT_S
from tests.ztunnel.proxy.istio.dns.meshes import CLIENT, mesh, service, workload
from tests.ztunnel.proxy.istio.dns.upstreams import Behaviour, Upstream, open_socket, plain, silent
from tproxy.aio import sockets
from xds.model.workload import Workload
from ztunnel.proxy.istio.dns.answer import DnsSettings
from ztunnel.proxy.istio.dns.forwarder import Forwarder
from ztunnel.proxy.istio.dns.hosts import Hosts
from ztunnel.proxy.istio.dns.server import DnsServer, QueryReport

CART = service("cart.shop.svc.cluster.local", "10.9.0.1")
BIG = service("big.shop.svc.cluster.local")


class Pod:
    """A server on loopback, and a client of it."""

    def __init__(self, server: DnsServer, udp: tuple[str, int], tcp: tuple[str, int], upstream: Upstream) -> None:
        self.server = server
        self.udp, self.tcp = udp, tcp
        self.upstream = upstream
        self.reports: list[QueryReport] = []
        self.dropped: dict[str, int] = {}
        self.who: Callable[[], Awaitable[Workload | None]]
        self.forwarder: Forwarder

    async def ask(self, name: str, kind: str = "A", **options: Any) -> dns.message.Message:
        """Send a query over UDP; return the answer."""
        return dns.message.from_wire(await self.exchange(dns.message.make_query(name, kind, **options).to_wire()))

    async def exchange(self, wire: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.connect(self.udp)
            sock.send(wire)
            return await loop.sock_recv(sock, 65535)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.tcp)


async def talk(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, kind: str = "A"
) -> dns.message.Message:
    wire = dns.message.make_query(name, kind).to_wire()
    writer.write(len(wire).to_bytes(2, "big") + wire)
    length = int.from_bytes(await reader.readexactly(2), "big")
    return dns.message.from_wire(await reader.readexactly(length))


def run(
    tmp_path: Path,
    body: Callable[[Pod], Awaitable[None]],
    *,
    behave: Behaviour = silent,
    client: Workload | None = CLIENT,
    loop: str = "asyncio",
    **options: Any,
) -> None:
    async def who() -> Workload | None:
        return client

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), Upstream("127.0.0.1", 0, behave) as upstream:
            path = tmp_path / "resolv.conf"
            path.write_text("nameserver 127.0.0.1\n")
            forwarder = Forwarder(open_socket, path, port=upstream.port, timeout_s=0.3)
            backends = [workload(f"big-{n}", f"10.1.{n // 250}.{n % 250}", of=BIG) for n in range(256)]
            reports: list[QueryReport] = []
            dropped: dict[str, int] = {}
            server = DnsServer(
                mesh(CART, BIG, *backends),
                who,
                DnsSettings(),
                Hosts(tmp_path / "hosts"),
                forwarder,
                reports.append,
                dropped=dropped,
                **options,
            )
            udp = sockets.datagrams("127.0.0.1", 0, reuse_port=True)
            tcp = sockets.listen("127.0.0.1", 0, reuse_port=True)
            pod = Pod(server, udp.getsockname(), tcp.getsockname(), upstream)
            pod.reports, pod.dropped = reports, dropped
            pod.who, pod.forwarder = who, forwarder
            server.start([udp], [tcp])
            try:
                await body(pod)
            finally:
                await server.close()
            assert udp.fileno() == tcp.fileno() == -1

    (uvloop.run if loop == "uvloop" else asyncio.run)(main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_names_of_the_mesh_by_udp_and_tcp(tmp_path: Path, loop: str) -> None:
    async def body(pod: Pod) -> None:
        answer = await pod.ask("cart")
        assert answer.answer[0].to_text() == "cart. 30 IN A 10.9.0.1"
        assert (await pod.ask("cart", "AAAA")).answer == []
        reader, writer = await pod.connect()
        for _ in range(2):
            assert (await talk(reader, writer, "cart.shop")).answer[0][0].address == "10.9.0.1"
        writer.close()
        assert pod.upstream.queries == []
        seen = [(r.query_type, r.protocol, r.name, r.result, r.endpoints, r.forwarded) for r in pod.reports]
        assert seen == [
            ("A", "udp", "cart.", "success", 1, False),
            ("AAAA", "udp", "cart.", "no records", 0, False),
            ("A", "tcp", "cart.shop.", "success", 1, False),
            ("A", "tcp", "cart.shop.", "success", 1, False),
        ]
        assert all(report.client is CLIENT and 0 <= report.duration_s < WAIT_S for report in pod.reports)

    run(tmp_path, body, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_other_names_are_forwarded(tmp_path: Path, loop: str) -> None:
    def behave(query: dns.message.Message, protocol: str) -> list[bytes]:
        known = plain("www.example.com. 60 A 192.0.2.1")
        return (known if "www" in query.question[0].name.to_text() else plain(code=dns.rcode.NXDOMAIN))(
            query, protocol
        )

    async def body(pod: Pod) -> None:
        answer = await pod.ask("www.example.com")
        assert answer.answer[0][0].address == "192.0.2.1"
        assert not answer.flags & dns.flags.AA
        assert answer.flags & dns.flags.RA
        assert (await pod.ask("nobody.example.com")).rcode() == dns.rcode.NXDOMAIN
        assert (await pod.ask("cart.shop.svc.cluster.local", "SRV")).rcode() == dns.rcode.NXDOMAIN
        seen = [(r.query_type, r.result, r.endpoints, r.forwarded, r.failed) for r in pod.reports]
        assert seen == [
            ("A", "forwarded", 1, True, False),
            ("A", "forwarded", 0, True, True),
            ("SRV", "forwarded", 0, True, True),
        ]

    run(tmp_path, body, behave=behave, loop=loop)


@pytest.mark.parametrize("code", [dns.rcode.SERVFAIL, dns.rcode.REFUSED, dns.rcode.NXDOMAIN])
def test_errors_of_name_servers_are_failures(tmp_path: Path, code: dns.rcode.Rcode) -> None:
    async def body(pod: Pod) -> None:
        assert (await pod.ask("www.example.com")).rcode() == code
        (report,) = pod.reports
        assert report.forwarded
        assert report.failed

    run(tmp_path, body, behave=plain(code=code))


def test_names_of_the_hosts_file_are_not_forwarded(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("192.0.2.7 db.example.com cart\n")

    async def body(pod: Pod) -> None:
        answer = await pod.ask("db.example.com")
        assert [record.address for record in answer.answer[0]] == ["192.0.2.7"]
        assert not answer.flags & dns.flags.AA
        assert (await pod.ask("localhost")).answer[0][0].address == "127.0.0.1"
        assert (await pod.ask("localhost", "AAAA")).answer[0][0].address == "::1"
        assert (await pod.ask("cart")).answer[0][0].address == "10.9.0.1", "the mesh comes first"
        assert pod.upstream.queries == []
        await pod.ask("db.example.com", "TXT")
        assert len(pod.upstream.queries) == 1
        assert [report.result for report in pod.reports[:3]] == ["hosts file"] * 3

    run(tmp_path, body, behave=plain(code=dns.rcode.NXDOMAIN))


@pytest.mark.parametrize("name", ["cart", "www.example.com"])
def test_unknown_edns_version_is_refused(tmp_path: Path, name: str) -> None:
    async def body(pod: Pod) -> None:
        assert (await pod.ask(name, use_edns=1)).rcode() == dns.rcode.BADVERS
        assert pod.upstream.queries == []

    run(tmp_path, body)


def test_unreachable_name_servers_yield_servfail(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        assert (await pod.ask("www.example.com")).rcode() == dns.rcode.SERVFAIL
        (report,) = pod.reports
        assert report.result.startswith("forwarding failed (127.0.0.1:")
        assert report.failed

    run(tmp_path, body)


def test_unknown_pod_gets_servfail(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        assert (await pod.ask("cart")).rcode() == dns.rcode.SERVFAIL
        assert pod.reports[0].client is None
        assert pod.upstream.queries == []

    run(tmp_path, body, client=None)


def test_long_answers_are_truncated_over_udp_and_whole_over_tcp(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        cut = await pod.ask("big")
        assert cut.flags & dns.flags.TC
        assert 20 < len(cut.answer[0]) < 32
        assert len((await pod.ask("big", use_edns=0, payload=1232)).answer[0]) > 60
        reader, writer = await pod.connect()
        whole = await talk(reader, writer, "big")
        again = await talk(reader, writer, "big")
        writer.close()
        orders = [[record.address for record in answer.answer[0]] for answer in (whole, again)]
        assert orders[0] != orders[1], "drawn anew"
        assert not whole.flags & dns.flags.TC
        assert len({record.address for record in whole.answer[0]}) == 256

    run(tmp_path, body)


def test_long_forwarded_answers_are_truncated_over_udp(tmp_path: Path) -> None:
    many = [f"a.example.com. 60 TXT {'x' * 200}{n}" for n in range(10)]

    async def body(pod: Pod) -> None:
        cut = await pod.ask("a.example.com", "TXT")
        assert cut.flags & dns.flags.TC
        assert sum(map(len, cut.answer)) == 2, "as many as fit into 512 bytes"
        reader, writer = await pod.connect()
        assert sum(map(len, (await talk(reader, writer, "a.example.com", "TXT")).answer)) == 10
        writer.close()

    run(tmp_path, body, behave=plain(*many))


def test_bytes_that_are_no_query_do_no_harm(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        wire = dns.message.make_query("cart", "A").to_wire()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(pod.udp)
            for cut in range(12):
                sock.send(wire[:cut])
        assert dns.message.from_wire(await pod.exchange(wire[:-1])).rcode() == dns.rcode.FORMERR
        reader, writer = await pod.connect()
        writer.write(b"\x00\x03abc")
        assert await reader.read() == b""
        writer.close()
        assert (await pod.ask("cart")).answer
        assert len(pod.reports) == 1

    run(tmp_path, body)


def test_silent_tcp_connection_is_closed(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        for said in (b"", b"\x00", b"\x00\x20abc"):
            reader, writer = await pod.connect()
            writer.write(said)
            assert await reader.read() == b""
            writer.close()

    run(tmp_path, body, idle_s=0.05)


def test_tcp_connections_are_limited(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        first, second = await pod.connect(), await pod.connect()
        for pair in (first, second):
            await talk(*pair, "cart")
        reader, writer = await pod.connect()
        assert await reader.read() == b""
        writer.close()
        first[1].close()
        while pod.server._connections == 2:
            await asyncio.sleep(0)
        third = await pod.connect()
        assert (await talk(*third, "cart")).answer
        for _, open_writer in (second, third):
            open_writer.close()

    run(tmp_path, body, connections=2)


def test_concurrent_queries_are_limited(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(pod.udp)
            for number in range(5):
                sock.send(dns.message.make_query(f"n{number}.example.com", "A").to_wire())
            while not pod.upstream.queries:
                await asyncio.sleep(0.01)
            assert pod.server._queries == 2
        while pod.server._queries:
            await asyncio.sleep(0.01)
        assert len(pod.reports) == 2
        assert pod.dropped["under-way"] >= 1
        assert (await pod.ask("cart")).answer

    run(tmp_path, body, queries=2)


def test_names_for_the_proxy_itself(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        assert await pod.server.resolve("cart", ipv6=False) == "10.9.0.1"
        assert await pod.server.resolve("cart", ipv6=True) is None
        assert await pod.server.resolve("www.example.com", ipv6=False) == "192.0.2.1"
        assert await pod.server.resolve("not..a.name", ipv6=False) is None
        assert pod.reports == []

    run(tmp_path, body, behave=plain("www.example.com. 60 A 192.0.2.1"))


def test_a_datagram_from_our_own_address_is_not_answered(tmp_path: Path) -> None:
    """With CAP_NET_RAW a pod can forge such a datagram. An answer to it would come back as a query."""

    async def body(pod: Pod) -> None:
        query = dns.message.make_query("cart", "A").to_wire()
        (udp,) = (sock for sock in pod.server._sockets if sock.type == socket.SOCK_DGRAM)
        udp.sendto(query, pod.udp)
        assert (await pod.ask("cart")).answer
        assert len(pod.reports) == 1
        assert pod.dropped == {"own-address": 1}

    run(tmp_path, body)


def test_query_rate_of_a_pod_is_limited(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.connect(pod.udp)
            for _ in range(7):
                sock.send(dns.message.make_query("cart", "A").to_wire())
            for _ in range(7):  # those beyond the burst wait for the rate
                assert dns.message.from_wire(await loop.sock_recv(sock, 65535)).answer
        assert pod.dropped["rate"] >= 1
        reader, writer = await pod.connect()
        for _ in range(3):
            assert (await talk(reader, writer, "cart")).answer
        writer.close()
        assert len(pod.reports) == 10

    run(tmp_path, body, query_burst=5, query_rate=50.0)


def test_server_closes_during_a_rate_limit_pause(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(dns.message.make_query("cart", "A").to_wire(), pod.udp)
            while not pod.dropped:
                await asyncio.sleep(0)
            await pod.server.close()
        assert pod.reports == []

    run(tmp_path, body, query_burst=0, query_rate=0.001)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_queries_that_have_arrived_are_answered_before_a_server_ends(tmp_path: Path, loop: str) -> None:
    async def body(pod: Pod) -> None:
        reader, writer = await pod.connect()
        async with asyncio.TaskGroup() as tasks:
            by_udp = tasks.create_task(pod.ask("slow.example.com"))
            by_tcp = tasks.create_task(talk(reader, writer, "slow.example.org"))
            while len(pod.upstream.queries) < 2:
                await asyncio.sleep(0.01)
            queued = [tasks.create_task(pod.ask("cart")) for _ in range(3)]
            await asyncio.sleep(0)  # the datagrams are sent, and the server has not read them
            await pod.server.finish(WAIT_S)
            await pod.server.close()
        assert {by_udp.result().rcode(), by_tcp.result().rcode()} == {dns.rcode.SERVFAIL}  # silent name servers
        assert all(task.result().answer for task in queued)
        writer.close()

    run(tmp_path, body, loop=loop)


def test_a_server_that_ends_waits_for_answers_until_its_limit(tmp_path: Path) -> None:
    async def body(pod: Pod) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(pod.udp)
            sock.send(dns.message.make_query("slow.example.com", "A").to_wire())
            while not pod.upstream.queries:
                await asyncio.sleep(0.01)
            await pod.server.finish(0.01)
            assert pod.reports == [], "the name server's limit is 0.3 s"
            await pod.server.finish(0.0)

    run(tmp_path, body)


def test_new_queries_go_to_the_successor_on_the_same_ports(tmp_path: Path) -> None:
    """A datagram is in the buffer of one socket, and is lost if this one is closed."""

    async def body(old: Pod) -> None:
        new = DnsServer(
            mesh(CART), old.who, DnsSettings(), Hosts(tmp_path / "hosts"), old.forwarder, (reports := []).append
        )
        host, port = old.udp
        new.start([sockets.datagrams(host, port, reuse_port=True)], [sockets.listen(*old.tcp, reuse_port=True)])
        try:
            old.server.leave()
            for _ in range(20):
                assert (await old.ask("cart")).answer
            reader, writer = await old.connect()
            assert (await talk(reader, writer, "cart")).answer
            writer.close()
            assert (len(old.reports), len(reports)) == (0, 21)
            await old.server.finish(WAIT_S)
            await old.server.close()
            assert (await old.ask("cart")).answer
        finally:
            await new.close()

    run(tmp_path, body)
