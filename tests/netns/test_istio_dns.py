"""The DNS proxy as pods see it: captured port 53, names of the mesh, names of the world."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest

from deploy.lab import Place
from tests.netns.istio import HELLO, AmbientMesh, NodeProxy, ask, eventually, mesh_of
from tests.netns.toys import app
from tests.ztunnel.proxy.istio.dns.upstreams import Behaviour, Upstream, plain
from tproxy.aio.sockets import connect, listen

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]

#: The name server that pods are configured with; nothing has this address.
CLUSTER_DNS = "10.96.0.10"
DOMAIN = "default.svc.cluster.local"
DNS_ON = {"ISTIO_META_DNS_CAPTURE": "true", "RUST_LOG": "info,dns=debug"}
SERVICES = {
    "web": {"addresses": ["10.96.1.1"], "ports": {"http": {"port": 80, "target": 8080}}, "pods": ["web"]},
    "two": {"addresses": ["10.96.1.2", "fd00:96::2"], "ports": {"http": 80}, "pods": ["web"]},
    "headless": {"ports": {"http": 8080}, "pods": ["web", "client"]},
}


class NameServer(Upstream):
    """A name server in a namespace."""

    def __init__(self, place: Place, behave: Behaviour) -> None:
        super().__init__(str(place.ipv4), 53, behave)
        self._place = place

    async def __aenter__(self) -> "NameServer":
        loop = asyncio.get_running_loop()
        tcp = listen(self.host, self.port, netns=self._place.netns)
        udp = self._place.socket(kind=socket.SOCK_DGRAM)
        udp.setblocking(False)
        udp.bind((self.host, self.port))
        self._tcp = await asyncio.start_server(self._stream, sock=tcp)
        self._udp, _ = await loop.create_datagram_endpoint(lambda: self, sock=udp)
        return self


def names_of(mesh: AmbientMesh) -> str:
    return f"search example.org\nnameserver {mesh.lab.pod('names').ipv4}\n"


async def query(
    pod: Place,
    name: str,
    kind: str = "A",
    *,
    tcp: bool = False,
    server: tuple[str, int] = (CLUSTER_DNS, 53),
    **options: Any,
) -> dns.message.Message:
    """Ask as an application would: any name server, port 53."""
    loop = asyncio.get_running_loop()
    question = dns.message.make_query(name, kind, **options)
    wire = question.to_wire()
    async with asyncio.timeout(20):
        if tcp:
            sock = await connect(server, netns=pod.netns)
            with sock:
                await loop.sock_sendall(sock, len(wire).to_bytes(2, "big") + wire)
                received = b""
                while len(received) < 2 or len(received) < 2 + int.from_bytes(received[:2], "big"):
                    received += await loop.sock_recv(sock, 65536)
            received = received[2:]
        else:
            with pod.socket(kind=socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.connect(server)
                await loop.sock_sendall(sock, wire)
                received = await loop.sock_recv(sock, 65536)
    answer = dns.message.from_wire(received)
    assert question.is_response(answer)
    return answer


def shown(answer: dns.message.Message) -> list[str]:
    """``name kind data`` of every answer, sorted."""
    return sorted(
        f"{rrset.name} {dns.rdatatype.to_text(rrset.rdtype)} {record}"
        for rrset in answer.answer
        for record in rrset
    )


@contextlib.asynccontextmanager
async def harness(
    folder: Path, behave: Behaviour, *, kind: type[NameServer] = NameServer, **options: Any
) -> AsyncIterator[tuple[AmbientMesh, NameServer]]:
    nodes = {"w1": ["client"], "w2": ["web", "names"]}
    options = {"mesh": {"services": SERVICES}, "captured": ["client", "web"], "env": DNS_ON, **options}
    async with (
        mesh_of(nodes, folder, resolv_conf=names_of, **options) as mesh,
        kind(mesh.lab.pod("names"), behave) as names,
    ):
        yield mesh, names


@pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])
def test_names_of_the_mesh(tmp_path: Path, tcp: bool) -> None:
    async def main() -> None:
        async with harness(tmp_path, plain(code=dns.rcode.SERVFAIL)) as (mesh, names):
            client, web = mesh.lab.pod("client"), mesh.lab.pod("web")

            async def answers(name: str, kind: str = "A") -> list[str]:
                answer = await query(client, name, kind, tcp=tcp)
                assert answer.rcode() == dns.rcode.NOERROR
                assert answer.flags & dns.flags.AA
                assert answer.flags & dns.flags.RA
                assert all(rrset.ttl == 30 for rrset in answer.answer)
                return shown(answer)

            for name in (f"web.{DOMAIN}", "web", "web.default", "web.default.svc"):
                assert await answers(name) == [f"{name}. A 10.96.1.1"]
            assert await answers("web", "AAAA") == []
            assert await answers(f"two.{DOMAIN}", "AAAA") == [f"two.{DOMAIN}. AAAA fd00:96::2"]
            # The application's search list was tried on a name that is complete.
            searched = f"web.{DOMAIN}.svc.cluster.local"
            assert await answers(searched) == [
                f"web.{DOMAIN}. A 10.96.1.1",
                f"{searched}. CNAME web.{DOMAIN}.",
            ]
            assert await answers(f"headless.{DOMAIN}") == sorted(
                f"headless.{DOMAIN}. A {pod.ipv4}" for pod in (web, client)
            )
            assert await answers(f"headless.{DOMAIN}", "AAAA") == sorted(
                f"headless.{DOMAIN}. AAAA {pod.ipv6}" for pod in (web, client)
            )
            assert names.queries == []
            proxy = mesh.node_of("client")
            counted = proxy.metric(
                "istio_dns_requests_total",
                request_query_type="aaaa",
                request_protocol="tcp" if tcp else "udp",
                source_canonical_service="client",
            )
            assert counted == 3
            assert proxy.metric("istio_dns_upstream_requests_total") == 0

    asyncio.run(main())


def test_an_application_dials_what_it_was_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with harness(tmp_path, plain(code=dns.rcode.SERVFAIL)) as (mesh, _):
            client, web = mesh.lab.pod("client"), mesh.lab.pod("web")
            answer = await query(client, "web")
            async with app(web):
                received = await ask(client, str(answer.answer[0][0]), 80)
            assert received == f"app web peer {client.ipv4}\n".encode() + HELLO
            line = await mesh.node_of("client").ended("outbound", "web")
            assert line["dst.service"] == f"web.{DOMAIN}"

    asyncio.run(main())


def test_names_of_the_world_are_forwarded_out_of_the_pod(tmp_path: Path) -> None:
    async def main() -> None:
        known = plain("world.example. 77 A 192.0.2.7")
        async with harness(tmp_path, known) as (mesh, names):
            client = mesh.lab.pod("client")
            for _ in range(2):
                answer = await query(client, "world.example")
                assert shown(answer) == ["world.example. A 192.0.2.7"]
                assert not answer.flags & dns.flags.AA
            assert len(names.queries) == 1  # the second came from the cache
            assert shown(await query(client, "world.example", tcp=True)) == ["world.example. A 192.0.2.7"]
            assert (await query(client, "world.example", "TXT")).rcode() == dns.rcode.NOERROR
            proxy = mesh.node_of("client")
            assert proxy.metric("istio_dns_requests_total", request_query_type="a") == 3
            assert proxy.metric("istio_dns_upstream_requests_total", request_query_type="txt") == 1
            # Types without a name share one label, so that a pod cannot create a series for each number.
            for number in (65280, 65281):
                await query(client, "world.example", f"TYPE{number}")
            assert proxy.metric("istio_dns_requests_total", request_query_type="unknown") == 2
            assert proxy.metric("istio_dns_upstream_request_duration_seconds_count") >= 2
            lines = await eventually(
                lambda: [line for line in proxy.log() if line["scope"] == "dns"], "lines about queries"
            )
            del lines[0]["time"]
            assert json.dumps(lines[0]) == json.dumps(
                {
                    "level": "debug",
                    "scope": "dns",
                    "message": "",
                    "src.workload": "client",
                    "src.namespace": "default",
                    "query": "A",
                    "domain": "world.example.",
                    "result": "forwarded",
                    "endpoints": 1,
                }
            )

    asyncio.run(main())


def test_what_the_world_does_not_know(tmp_path: Path) -> None:
    async def main() -> None:
        async with harness(tmp_path, plain(code=dns.rcode.NXDOMAIN)) as (mesh, _):
            client = mesh.lab.pod("client")
            for tcp in (False, True):
                assert (await query(client, "nobody.example", tcp=tcp)).rcode() == dns.rcode.NXDOMAIN
            assert mesh.node_of("client").metric("istio_dns_upstream_failures_total") == 2

    asyncio.run(main())


def test_a_long_answer_is_cut_for_udp_only(tmp_path: Path) -> None:
    async def main() -> None:
        many = plain(*(f"big.example. 60 A 192.0.2.{number}" for number in range(1, 101)))
        async with harness(tmp_path, many) as (mesh, _):
            client = mesh.lab.pod("client")
            cut = await query(client, "big.example")
            assert cut.flags & dns.flags.TC
            assert len(cut.to_wire()) <= 512
            large = await query(client, "big.example", use_edns=0, payload=4096)
            assert not large.flags & dns.flags.TC
            assert (large.edns, len(shown(large))) == (0, 100)
            assert len(shown(await query(client, "big.example", tcp=True))) == 100

    asyncio.run(main())


class SlowNameServer(NameServer):
    """A name server that takes 0.3 s for an answer to a datagram."""

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        asyncio.get_running_loop().call_later(0.3, super().datagram_received, data, addr)


@pytest.mark.parametrize("workers", [1, 2])
def test_no_query_is_lost_while_a_proxy_is_replaced(tmp_path: Path, workers: int) -> None:
    """A resolver repeats a query over UDP only after five seconds."""

    async def main() -> None:
        env = DNS_ON | {"ZTUNNEL_WORKER_THREADS": str(workers)}
        behave = plain("www.example.com. 60 A 192.0.2.1")
        async with harness(tmp_path, behave, kind=SlowNameServer, env=env) as (mesh, _):
            client, worker = mesh.lab.pod("client"), mesh.lab.worker("w1")
            ended = asyncio.Event()
            answered = 0

            async def ask_often(*, tcp: bool) -> None:
                nonlocal answered
                while not ended.is_set():
                    async with asyncio.timeout(4):
                        assert (await query(client, f"n{answered}.example.com", tcp=tcp)).answer
                    answered += 1

            async with asyncio.TaskGroup() as group:
                for tcp in (False, False, False, False, True):
                    group.create_task(ask_often(tcp=tcp))
                for place in (worker.ztunnel, worker.place):
                    before = mesh.proxies["w1"]
                    process = mesh.start_proxy(worker, place)
                    after = NodeProxy(place, mesh.folder, process, before.agent, before.pods)
                    await eventually(after.ready, "the successor ready")
                    mesh.proxies["w1"] = after
                    before.process.terminate()
                    assert await asyncio.to_thread(before.process.wait, 20) == 0
                ended.set()
            assert answered > 10

    asyncio.run(main())


def test_only_dns(tmp_path: Path) -> None:
    """``ENABLE_PROXY=false``: names are answered, and nothing of the proxy listens."""

    async def main() -> None:
        env = {**DNS_ON, "ENABLE_PROXY": "false"}
        async with harness(tmp_path, plain(code=dns.rcode.SERVFAIL), env=env) as (mesh, _):
            client = mesh.lab.pod("client")
            assert shown(await query(client, "web")) == ["web. A 10.96.1.1"]
            assert shown(await query(client, "web", tcp=True)) == ["web. A 10.96.1.1"]
            dump = mesh.node_of("client").dump()
            assert (dump["config"]["proxy"], dump["config"]["dnsProxy"]) == (False, True)
            for port in (15001, 15006, 15008):
                with pytest.raises(OSError), client.socket() as sock:
                    sock.connect(("127.0.0.1", port))

    asyncio.run(main())


def test_another_address_of_the_dns_proxy(tmp_path: Path) -> None:
    async def main() -> None:
        env = {**DNS_ON, "ISTIO_META_DNS_PROXY_ADDR": "127.0.0.9:5300"}
        async with harness(tmp_path, plain(code=dns.rcode.SERVFAIL), env=env) as (mesh, _):
            client = mesh.lab.pod("client")
            for tcp in (False, True):
                answer = await query(client, "web", tcp=tcp, server=("127.0.0.9", 5300))
                assert shown(answer) == ["web. A 10.96.1.1"]
            with pytest.raises(OSError), client.socket() as sock:
                sock.connect(("127.0.0.1", 15053))

    asyncio.run(main())


def test_socks_clients_may_name_services(tmp_path: Path) -> None:
    async def main() -> None:
        env = {**DNS_ON, "UNSTABLE_ENABLE_SOCKS5": "true"}
        async with harness(tmp_path, plain(code=dns.rcode.NXDOMAIN), env=env) as (mesh, _):
            client, web = mesh.lab.pod("client"), mesh.lab.pod("web")
            async with app(web):
                for target in (
                    b"\x03\x03web\x00\x50",
                    b"\x03" + bytes([len(f"web.{DOMAIN}")]) + f"web.{DOMAIN}".encode() + b"\x00\x50",
                    b"\x01" + web.ipv4.packed + b"\x1f\x90",
                    b"\x04" + web.ipv6.packed + b"\x1f\x90",
                ):
                    request = b"\x05\x01\x00\x05\x01\x00" + target + HELLO
                    received = await ask(client, "127.0.0.1", 15080, request)
                    assert received.startswith(b"\x05\x00\x05\x00\x00\x01" + bytes(6) + b"app web peer ")
                    assert received.endswith(HELLO)
            refused = await ask(client, "127.0.0.1", 15080, b"\x05\x01\x00\x05\x01\x00\x03\x06nobody\x00\x50")
            assert refused == b"\x05\x00\x05\x04\x00\x01" + bytes(6)
            proxy = mesh.node_of("client")
            await eventually(lambda: len(proxy.access("outbound")) == 4, "a line for each")
            assert {line["dst.identity"] for line in proxy.access("outbound")} == {
                "spiffe://cluster.local/ns/default/sa/web"
            }

    asyncio.run(main())


def test_dedicated_mode(tmp_path: Path) -> None:
    """A proxy beside each workload; its search list is its own ``resolv.conf``'s."""

    async def main() -> None:
        behave = plain(code=dns.rcode.NXDOMAIN)
        async with harness(tmp_path, behave, dedicated=True) as (mesh, names):
            client, web = mesh.lab.pod("client"), mesh.lab.pod("web")
            assert shown(await query(client, "web.example.org")) == [
                "web. A 10.96.1.1",
                "web.example.org. CNAME web.",
            ]
            async with app(web):
                received = await ask(client, "10.96.1.1", 80)
            assert received.endswith(HELLO)
            line = await mesh.node_of("web").ended("inbound", "web")
            assert line["src.identity"] == "spiffe://cluster.local/ns/default/sa/client"
            assert (await query(client, "nobody.example")).rcode() == dns.rcode.NXDOMAIN
            assert len(names.queries) == 1
            dump = mesh.node_of("client").dump()
            assert "workloadState" not in dump
            assert dump["config"]["proxyWorkloadInformation"]["name"] == "client"

    asyncio.run(main())
