"""Names of the host: its hosts file, its search list, and candidates that fail."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import dns.message
import dns.rcode
import pytest

from tests.ztunnel.proxy.istio.dns.upstreams import Behaviour, Upstream, plain, silent
from xds.model.address import SocketAddress
from xds.model.dns import DnsResolver
from ztunnel.proxy.dataplane.resolver import Answer, ResolveFailed, Resolver, addresses_in

SEARCH = "search a.test b.test\noptions ndots:2 timeout:1 attempts:1\n"


def fails(code: int) -> Behaviour:
    return plain(code=code)


def answered(folder: Path, name: str, settings: DnsResolver, resolv_conf: str = "") -> tuple[Answer, list[str]]:
    """Resolve by a server that is not in resolv.conf; returns the answer, and each query's protocol and name."""
    (folder / "resolv.conf").write_text(resolv_conf)

    def server(query: dns.message.Message, protocol: str) -> list[bytes]:
        asked = query.question[0].name.to_text()
        return (plain(f"{asked} 7 A 192.0.2.1") if asked == "web.a.test." else fails(dns.rcode.NXDOMAIN))(
            query, protocol
        )

    async def main() -> tuple[Answer, list[str]]:
        async with Upstream("127.0.0.1", 0, server) as upstream:
            servers = (SocketAddress("127.0.0.1", upstream.port),)
            host = Resolver(folder / "hosts", folder / "resolv.conf", port=1, lifetime_s=0.3)
            answer = await host.with_settings(replace(settings, servers=servers)).resolve(name, "V4_ONLY")
            asked = [f"{protocol} {query.question[0].name}" for query, protocol, _ in upstream.queries]
            return answer, asked

    return asyncio.run(main())


def resolved(
    folder: Path, name: str, behave: Callable[[str], Behaviour], family: str = "V4_ONLY", hosts: str = ""
) -> tuple[Answer, list[str]]:
    """Resolve, and return which names were asked for."""
    (folder / "resolv.conf").write_text(f"nameserver 127.0.0.1\n{SEARCH}")
    (folder / "hosts").write_text(hosts)

    def server(query: dns.message.Message, protocol: str) -> list[bytes]:
        return behave(query.question[0].name.to_text())(query, protocol)

    async def main() -> tuple[Answer, list[str]]:
        async with Upstream("127.0.0.1", 0, server) as upstream:
            resolver = Resolver(folder / "hosts", folder / "resolv.conf", port=upstream.port, lifetime_s=0.3)
            answer = await resolver.resolve(name, family)
            return answer, list(
                dict.fromkeys(query.question[0].name.to_text() for query, _, _ in upstream.queries)
            )

    return asyncio.run(main())


@pytest.mark.parametrize(
    "first",
    [fails(dns.rcode.SERVFAIL), fails(dns.rcode.REFUSED), fails(dns.rcode.NXDOMAIN), plain(), silent],
    ids=["SERVFAIL", "REFUSED", "NXDOMAIN", "no records", "silence"],
)
def test_next_candidate_of_the_search_list_is_queried_after_a_failure(tmp_path: Path, first: Behaviour) -> None:
    def behave(name: str) -> Behaviour:
        return plain(f"{name} 60 A 192.0.2.1") if name == "web.b.test." else first

    answer, asked = resolved(tmp_path, "web", behave)
    assert answer == Answer(("192.0.2.1",), 60.0)
    assert asked == ["web.a.test.", "web.b.test."]


def test_name_with_enough_dots_is_queried_unchanged_first(tmp_path: Path) -> None:
    def behave(name: str) -> Behaviour:
        return plain(f"{name} 60 A 192.0.2.1") if name == "a.b.c.b.test." else fails(dns.rcode.SERVFAIL)

    assert resolved(tmp_path, "a.b.c", behave)[1] == ["a.b.c.", "a.b.c.a.test.", "a.b.c.b.test."]
    with pytest.raises(ResolveFailed):
        resolved(tmp_path, "a.b.c.", behave)


def test_failure_is_reported_rather_than_nxdomain(tmp_path: Path) -> None:
    def behave(name: str) -> Behaviour:
        return fails(dns.rcode.REFUSED if name == "web." else dns.rcode.NXDOMAIN)

    with pytest.raises(ResolveFailed, match="REFUSED"):
        resolved(tmp_path, "web", behave)


@pytest.mark.parametrize("resolv_conf", ["", "nameserver 127.0.0.1\n"])
def test_configured_servers_replace_those_of_the_host(tmp_path: Path, resolv_conf: str) -> None:
    answer, asked = answered(tmp_path, "web.a.test", DnsResolver(), resolv_conf)
    assert (answer, asked) == (Answer(("192.0.2.1",), 7.0), ["udp web.a.test."])


def test_fallback_servers_are_used_only_without_name_servers(tmp_path: Path) -> None:
    settings = DnsResolver(servers_are_fallback=True)
    assert answered(tmp_path, "web.a.test", settings)[1] == ["udp web.a.test."]
    with pytest.raises(ResolveFailed):
        answered(tmp_path, "web.a.test", settings, "nameserver 127.0.0.1\n")


def test_queries_use_tcp_if_configured(tmp_path: Path) -> None:
    assert answered(tmp_path, "web.a.test", DnsResolver(tcp=True))[1] == ["tcp web.a.test."]


def test_names_are_completed_unless_the_search_list_is_off(tmp_path: Path) -> None:
    assert answered(tmp_path, "web", DnsResolver(), "search a.test\n")[1] == ["udp web.a.test."]
    with pytest.raises(ResolveFailed):
        answered(tmp_path, "web", DnsResolver(search=False), "search a.test\n")


def test_answers_of_getaddrinfo_are_valid_for_a_minute(tmp_path: Path) -> None:
    assert answered(tmp_path, "web.a.test", DnsResolver(has_ttls=False))[0].ttl_s == 60.0


def test_silent_server_is_queried_the_configured_number_of_times(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("")

    async def main() -> int:
        async with Upstream("127.0.0.1", 0, silent) as upstream:
            servers = (SocketAddress("127.0.0.1", upstream.port),)
            settings = DnsResolver(servers=servers, query_timeout_s=0.4, tries=3)
            with pytest.raises(ResolveFailed):
                await Resolver(tmp_path / "hosts", tmp_path / "resolv.conf", settings=settings).resolve(
                    "web.", "V4_ONLY"
                )
            return len(upstream.queries)

    assert asyncio.run(main()) in (2, 3)  # the library backs off between rounds within the same time


def test_host_without_name_servers_is_a_failed_lookup(tmp_path: Path) -> None:
    with pytest.raises(ResolveFailed, match="has no name server"):
        asyncio.run(Resolver(tmp_path / "hosts", tmp_path / "none").resolve("web", "V4_ONLY"))


@pytest.mark.parametrize(
    ("family", "addresses"),
    [
        ("V4_ONLY", ("192.0.2.7",)),
        ("V6_ONLY", ("2001:db8::7",)),
        ("AUTO", ("2001:db8::7",)),
        ("V4_PREFERRED", ("192.0.2.7",)),
        ("ALL", ("2001:db8::7", "192.0.2.7")),
    ],
)
def test_hosts_file_is_used_before_name_servers(tmp_path: Path, family: str, addresses: tuple[str, ...]) -> None:
    hosts = "192.0.2.7 Web web.example # 192.0.2.8\n2001:db8::7\tweb\nnonsense web\n"
    answer, asked = resolved(tmp_path, "web", lambda name: silent, family, hosts)
    assert (answer.addresses, asked) == (addresses, [])


def test_family_missing_in_the_hosts_file_is_queried(tmp_path: Path) -> None:
    answer, asked = resolved(
        tmp_path, "web.", lambda name: plain(f"{name} 60 A 192.0.2.1"), "V4_ONLY", "2001:db8::7 web\n"
    )
    assert (answer.addresses, asked) == (("192.0.2.1",), ["web."])


def test_changed_hosts_file_is_reloaded(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    resolver = Resolver(hosts, tmp_path / "none")
    for address in ("192.0.2.7", "192.0.2.88"):
        hosts.write_text(f"{address} web\n")
        assert asyncio.run(resolver.resolve("web", "V4_ONLY")).addresses == (address,)


def test_lines_of_a_hosts_file() -> None:
    assert addresses_in("") == {}
    assert addresses_in("# all\n\n127.0.0.1\n::1 a b\n127.0.0.1 a a\n") == {
        "a": ("::1", "127.0.0.1"),
        "b": ("::1",),
    }


@pytest.mark.parametrize(
    ("behave", "absent"),
    [
        (fails(dns.rcode.NXDOMAIN), True),
        (plain(), True),
        (fails(dns.rcode.SERVFAIL), False),
        (fails(dns.rcode.REFUSED), False),
        (silent, False),
    ],
    ids=["NXDOMAIN", "no records", "SERVFAIL", "REFUSED", "silence"],
)
@pytest.mark.parametrize("family", ["V4_ONLY", "AUTO"])
def test_name_is_absent_only_after_a_negative_answer(
    tmp_path: Path, behave: Behaviour, absent: bool, family: str
) -> None:
    with pytest.raises(ResolveFailed) as caught:
        resolved(tmp_path, "web.", lambda _: behave, family)
    assert caught.value.absent is absent
