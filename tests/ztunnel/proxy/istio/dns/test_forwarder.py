"""Asking name servers, over real sockets: whom, how often, and whose answer is believed."""

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.update
import pytest

from tests.limits import WAIT_S
from tests.ztunnel.proxy.istio.dns.upstreams import Behaviour, Upstream, open_socket, plain, silent
from tproxy.errors import KernelRefused
from ztunnel.proxy.istio.dns.forwarder import (
    Cache,
    Forwarder,
    ForwardFailed,
    NameServer,
    name_servers,
    search_domains,
)
from ztunnel.proxy.istio.dns.message import Query, read_query

ONE = "a.example.com. 60 A 10.0.0.1"


def query(name: str = "a.example.com", kind: str = "A", number: int = 7, **options: Any) -> Query:
    return read_query(dns.message.make_query(name, kind, id=number, **options).to_wire())


def test_name_servers_of_resolv_conf() -> None:
    text = """
    # nameserver 10.0.0.9
    domain example.com
    nameserver 10.0.0.1 # the first
    nameserver 2001:db8::1
    nameserver fe80::1%eth0
    nameserver nonsense
    nameserver
    ;nameserver 10.0.0.8
    nameserver\t10.0.0.2
    """
    hosts = [server.host for server in name_servers(text, ipv6=True)]
    assert hosts == ["10.0.0.1", "2001:db8::1", "10.0.0.2"]
    assert [server.host for server in name_servers(text, ipv6=False)] == ["10.0.0.1", "10.0.0.2"]
    assert len(name_servers("nameserver 10.0.0.1\n" * 100, ipv6=True)) == 8
    assert str(NameServer("::1")) == "[::1]:53"


def test_search_domains_of_resolv_conf() -> None:
    assert search_domains("nameserver 10.0.0.1\n") == ()
    text = "domain a.example\nsearch NS.svc.cluster.local. cluster.local .\n# search x"
    assert search_domains(text) == ("ns.svc.cluster.local", "cluster.local")
    assert search_domains("search a b\ndomain c") == ("c",)


class Site:
    """Name servers 127.0.0.1, 127.0.0.2, ... on one port, and a forwarder that uses them."""

    def __init__(self, tmp_path: Path, servers: list[Upstream], forwarder: Forwarder) -> None:
        self.path = tmp_path / "resolv.conf"
        self.servers = servers
        self.forwarder = forwarder

    async def ask(self, asked: Query | None = None) -> dns.message.Message:
        return dns.message.from_wire(await self.forwarder.forward(asked or query()))


def run(
    tmp_path: Path, behaviours: list[Behaviour], body: Callable[[Site], Awaitable[None]], **options: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            servers: list[Upstream] = []
            try:
                for index, behave in enumerate(behaviours):
                    port = servers[0].port if servers else 0
                    servers.append(await Upstream(f"127.0.0.{index + 1}", port, behave).__aenter__())
                path = tmp_path / "resolv.conf"
                path.write_text("".join(f"nameserver {server.host}\n" for server in servers))
                port = servers[0].port if servers else 53
                forwarder = Forwarder(open_socket, path, port=port, **{"timeout_s": 0.3, **options})
                await body(Site(tmp_path, servers, forwarder))
            finally:
                for server in servers:
                    await server.__aexit__()

    asyncio.run(main())


def test_forwarded_queries_use_random_ids_and_ports(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        for number in range(20):
            answer = await site.ask(query(f"n{number}.example.com", number=7))
            assert (answer.id, answer.answer[0].to_text()) == (7, "a.example.com. 60 IN A 10.0.0.1")
        seen = site.servers[0].queries
        assert len({asked.id for asked, _, _ in seen}) > 15
        assert len({port for _, _, port in seen}) > 10

    run(tmp_path, [plain(ONE)], body)


def test_two_servers_are_queried_in_parallel_and_the_first_answer_is_used(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        answer = await site.ask()
        assert answer.rcode() == dns.rcode.NOERROR
        assert len(site.servers[0].queries) == 1
        assert site.servers[2].queries == []

    run(tmp_path, [silent, plain(ONE), plain(ONE)], body, timeout_s=WAIT_S)
    run(tmp_path, [plain(code=dns.rcode.REFUSED), plain(ONE), plain(ONE)], body, timeout_s=WAIT_S)


def test_next_two_servers_are_queried_after_a_timeout(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        assert (await site.ask()).answer
        assert [len(server.queries) for server in site.servers] == [2, 1, 1], "the third, and the first once more"

    run(tmp_path, [silent, silent, plain(ONE)], body)


def test_refusal_is_returned_if_no_server_answers_better(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        assert (await site.ask()).rcode() == dns.rcode.SERVFAIL
        assert [len(server.queries) for server in site.servers] == [1, 1], "who has refused is not asked again"

    run(tmp_path, [plain(code=dns.rcode.SERVFAIL), silent], body)


def test_silent_servers_fail_after_all_attempts(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        with pytest.raises(ForwardFailed, match=r"127.0.0.1:\d+: no answer within 0.05 s"):
            await site.ask()
        assert len(site.servers[0].queries) == 3

    run(tmp_path, [silent], body, timeout_s=0.05)

    async def unreachable(site: Site) -> None:
        site.path.write_text("nameserver 127.0.0.77\n")
        with pytest.raises(ForwardFailed, match="Connection refused"):
            await site.ask()
        site.path.write_text("")
        other = Forwarder(open_socket, site.path)
        with pytest.raises(ForwardFailed, match="no name server in"):
            await other.forward(query())
        with pytest.raises(ForwardFailed, match="cannot read"):
            await Forwarder(open_socket, tmp_path / "nowhere").forward(query())

    run(tmp_path, [silent], unreachable)


def test_forged_answers_are_ignored(tmp_path: Path) -> None:
    def forge(asked: dns.message.Message, protocol: str) -> list[bytes]:
        (right,) = plain(ONE)(asked, protocol)
        (evil,) = plain("a.example.com. 60 A 6.6.6.6")(asked, protocol)
        other = dns.message.make_query("b.example.com", "A", id=asked.id)
        (elsewhere,) = plain("a.example.com. 60 A 6.6.6.6")(other, protocol)
        wrong_id = ((asked.id + 1) % 65536).to_bytes(2, "big") + evil[2:]
        return [b"", evil[:5], wrong_id, elsewhere, asked.to_wire(), right]

    async def body(site: Site) -> None:
        assert (await site.ask()).answer[0].to_text().endswith("10.0.0.1")

    run(tmp_path, [forge], body)


def test_truncated_answer_is_queried_again_by_tcp(tmp_path: Path) -> None:
    many = [f"a.example.com. 60 TXT {'x' * 200}{n}" for n in range(10)]

    async def body(site: Site) -> None:
        answer = await site.ask(query(kind="TXT"))
        assert sum(len(records) for records in answer.answer) == 10
        assert [protocol for _, protocol, _ in site.servers[0].queries] == ["udp", "tcp"]
        await site.ask(query(kind="TXT"))
        assert len(site.servers[0].queries) == 2, "remembered whole"

    run(tmp_path, [plain(*many)], body, timeout_s=5.0)


def cut_short(code: int = 0) -> Behaviour:
    """Sends one record and TC over UDP, and closes TCP connections without an answer."""

    def behave(asked: dns.message.Message, protocol: str) -> list[bytes]:
        if protocol == "tcp":
            return []
        response = dns.message.from_wire(plain(ONE, code=code)(asked, protocol)[0])
        response.flags |= dns.flags.TC
        return [response.to_wire()]

    return behave


@pytest.mark.parametrize(
    "others",
    [[], [plain(code=dns.rcode.SERVFAIL)], [silent], [cut_short(dns.rcode.REFUSED)]],
    ids=["alone", "a-failure", "silence", "a-truncated-failure"],
)
def test_truncated_answer_is_passed_on_if_tcp_fails(tmp_path: Path, others: list[Behaviour]) -> None:
    async def body(site: Site) -> None:
        answer = await site.ask()
        assert (answer.rcode(), bool(answer.flags & dns.flags.TC)) == (dns.rcode.NOERROR, True)
        assert answer.answer[0].to_text() == "a.example.com. 60 IN A 10.0.0.1"
        before = len(site.servers[0].queries)
        await site.ask()
        assert len(site.servers[0].queries) == 2 * before, "not cached"

    run(tmp_path, [cut_short(), *others], body)


def test_whole_answer_of_another_server_is_preferred_to_a_truncated_one(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        answer = await site.ask()
        assert not answer.flags & dns.flags.TC
        assert answer.answer[0].to_text().endswith("10.0.0.9")

    run(tmp_path, [cut_short(), cut_short(), plain("a.example.com. 60 A 10.0.0.9")], body)


def test_any_type_class_and_opcode_is_forwarded(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        for kind in ("SRV", "PTR", "HTTPS", "TYPE65280", "ANY"):
            await site.ask(query(kind=kind))
        await site.ask(query("version.bind", "TXT", rdclass="CH"))
        update = dns.update.UpdateMessage("example.com", id=77)
        update.add("a", 60, "A", "10.0.0.1")
        answer = await site.ask(read_query(update.to_wire()))
        assert (answer.id, answer.opcode()) == (77, dns.opcode.UPDATE)
        seen = [asked for asked, _, _ in site.servers[0].queries]
        assert len(seen) == 7
        assert isinstance(seen[-1], dns.update.UpdateMessage)
        assert len(seen[-1].update) == 1

    run(tmp_path, [plain()], body)


def test_changed_resolv_conf_is_reloaded(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        site.path.write_text("nameserver 127.0.0.1\n")
        await site.ask(query("a.example.com"))
        new = tmp_path / "new"
        new.write_text("nameserver 127.0.0.2\n")
        os.replace(new, site.path)
        await site.ask(query("b.example.com"))
        site.path.unlink()
        await site.ask(query("c.example.com"))
        assert [len(server.queries) for server in site.servers] == [1, 2]

    run(tmp_path, [plain(ONE), plain(ONE)], body)


def test_server_whose_socket_the_kernel_refuses_is_a_failed_server(tmp_path: Path) -> None:
    """A kernel without IPv6 and an IPv6 server; or no free descriptors."""
    refused = {socket.AF_INET6}

    def make(family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        if family in refused:
            raise KernelRefused("make a socket", errno.EAFNOSUPPORT)
        return socket.socket(family, kind)

    async def body(site: Site) -> None:
        site.path.write_text("nameserver 2001:db8::1\nnameserver 127.0.0.1\n")
        forwarder = Forwarder(make, site.path, port=site.servers[0].port, timeout_s=WAIT_S)
        assert dns.message.from_wire(await forwarder.forward(query())).answer
        refused.add(socket.AF_INET)
        with pytest.raises(ForwardFailed, match=r"127.0.0.1:\d+: kernel refused make a socket: EAFNOSUPPORT"):
            await forwarder.forward(query("b.example.com"))

    run(tmp_path, [plain(ONE)], body)


def test_sockets_are_the_callers_and_none_is_left_open(tmp_path: Path) -> None:
    made: list[socket.socket] = []

    def make(family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        made.append(socket.socket(family, kind))
        return made[-1]

    async def body(site: Site) -> None:
        forwarder = Forwarder(make, site.path, port=site.servers[0].port, timeout_s=WAIT_S)
        await forwarder.forward(query())
        asking = asyncio.get_running_loop().create_task(forwarder.forward(query("silence.example.com")))
        while len(site.servers[1].queries) < 2:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert made
        assert all(sock.fileno() == -1 for sock in made)

    def by_name(asked: dns.message.Message, protocol: str) -> list[bytes]:
        return [] if "silence" in asked.question[0].name.to_text() else plain(ONE)(asked, protocol)

    run(tmp_path, [silent, by_name], body)


def test_cache_is_bounded_and_entries_expire() -> None:
    cache = Cache(capacity=2)
    for number in range(3):
        asked = query(f"n{number}.example.com")
        (response,) = plain("a.example.com. 60 A 10.0.0.1")(dns.message.from_wire(asked.wire), "udp")
        cache.put(asked, response, 100.0)
        cache.get(query("n0.example.com"), 100.0)
    assert len(cache) == 2
    assert cache.get(query("n1.example.com"), 100.0) is None, "unused longest"
    kept = cache.get(query("N0.example.com"), 130.5)
    assert kept is not None
    assert dns.message.from_wire(kept).answer[0].ttl == 30
    assert cache.get(query("n0.example.com"), 160.0) is None
    assert len(cache) == 1


def test_cache_is_bounded_by_bytes() -> None:
    cache = Cache(budget_bytes=10_000)
    for number in range(50):
        asked = query(f"n{number}.example.com", kind="TXT")
        (response,) = plain(f"a.example.com. 60 TXT {'x' * 200}")(dns.message.from_wire(asked.wire), "tcp")
        cache.put(asked, response, 100.0)
        cache.put(asked, response, 100.0)
    assert 8 <= len(cache) <= 16
    assert cache.get(query("n49.example.com", kind="TXT"), 100.0) is not None


def test_concurrent_queries_are_limited_per_pod_and_process(tmp_path: Path) -> None:
    async def main() -> None:
        asked = asyncio.Event()
        places = asyncio.Semaphore(3)

        def behave(message: dns.message.Message, protocol: str) -> list[bytes]:
            asked.set()
            return plain("a.example.com. 60 A 192.0.2.1")(message, protocol) if answering else []

        answering = False
        path = tmp_path / "resolv.conf"
        path.write_text("nameserver 127.0.0.1\n")
        async with Upstream("127.0.0.1", 0, behave) as upstream:
            one, two = (
                Forwarder(open_socket, path, port=upstream.port, timeout_s=0.2, attempts=100, places=places)
                for _ in range(2)
            )
            tasks = [
                asyncio.get_running_loop().create_task(each.forward(query(f"{number}.example.com", number=number)))
                for each in (one, two)
                for number in range(5)
            ]
            await asyncio.wait_for(asked.wait(), 10)
            assert places.locked()
            assert len({message.question[0].name for message, _, _ in upstream.queries}) <= 3
            answering = True
            assert len(await asyncio.gather(*tasks)) == 10
            assert not places.locked()

    asyncio.run(main())
