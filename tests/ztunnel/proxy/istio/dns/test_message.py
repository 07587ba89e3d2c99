"""DNS messages as bytes: dnspython can read ours, and forwarded ones are unchanged."""

import ipaddress
from typing import Any

import dns.edns
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rrset
import dns.tsigkeyring
import dns.update
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.proxy.istio.dns.message import (
    Malformed,
    Query,
    address_query,
    answer_count,
    bad_version,
    first_address,
    fitting,
    is_answer_to,
    keep,
    local_answer,
    passed_on,
    read_query,
    server_failure,
    with_id,
)

V4 = [ipaddress.IPv4Address("10.9.0.1") + n for n in range(256)]
V6 = [ipaddress.IPv6Address("fd00::1") + n for n in range(256)]


def query(name: str = "Cart.shop", kind: str = "A", **options: Any) -> Query:
    return read_query(dns.message.make_query(name, kind, id=4711, **options).to_wire())


def parsed(wire: bytes) -> dns.message.Message:
    return dns.message.from_wire(wire)


def test_query_fields_are_parsed() -> None:
    found = query()
    assert (found.id, found.name, found.type_name, found.rdclass, found.udp_bytes) == (
        4711,
        "Cart.shop.",
        "A",
        1,
        512,
    )
    assert found.wants_address
    assert not query(kind="SRV").wants_address
    assert not query(rdclass="CH").wants_address
    assert query(kind="TYPE65280").type_name == "UNKNOWN"
    with_edns = query(use_edns=0, payload=1232, want_dnssec=True)
    assert (with_edns.udp_bytes, with_edns.edns, with_edns.edns_flags, with_edns.edns_options) == (
        1232,
        True,
        0x8000,
        False,
    )
    assert query(use_edns=0, payload=100).udp_bytes == 512
    cookie = dns.edns.GenericOption(10, b"12345678")
    assert query(use_edns=0, options=[cookie]).cache_key is None
    update = dns.update.UpdateMessage("example.com")
    assert not read_query(update.to_wire()).is_question


def test_malformed_query_gets_formerr_if_possible() -> None:
    wire = query().wire
    for bad in (
        wire[:12] + b"\x40",
        wire[:-1],
        wire[:4] + b"\x00\x02" + wire[6:],
        wire[:4] + b"\x00\x00" + wire[6:],
    ):
        with pytest.raises(Malformed) as caught:
            read_query(bad)
        assert caught.value.response is not None
        error = parsed(caught.value.response)
        assert (error.id, error.rcode()) == (4711, dns.rcode.FORMERR)
        assert error.flags & dns.flags.QR
    for size in range(12, len(wire) + 1):  # whole or not: an answer to an answer may never end
        with pytest.raises(Malformed) as caught:
            read_query(dns.message.make_response(dns.message.from_wire(wire)).to_wire()[:size])
        assert caught.value.response is None
    with pytest.raises(Malformed) as caught:
        read_query(wire[:11])
    assert caught.value.response is None


@pytest.mark.parametrize("cut", range(len(query(use_edns=0).wire)))
def test_truncated_query_is_malformed(cut: int) -> None:
    with pytest.raises(Malformed):
        read_query(query(use_edns=0).wire[:cut])


def assert_read_or_refused(data: bytes) -> None:
    try:
        found = read_query(data)
    except Malformed:
        return
    if found.is_question:
        dns.message.from_wire(server_failure(found))
        local_answer(found, [], None, 30, 512)


@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    assert_read_or_refused(data)


@given(st.integers(0, 60), st.integers(0, 255))
def test_a_query_with_one_byte_changed_is_read_or_refused(position: int, value: int) -> None:
    wire = bytearray(query("a.example.com", "AAAA", use_edns=0).wire)
    wire[position % len(wire)] = value
    assert_read_or_refused(bytes(wire))


def test_local_answer_has_the_addresses() -> None:
    for asked in (query(), query(use_edns=0, payload=1232, want_dnssec=True)):
        answer = parsed(local_answer(asked, V4[:2], None, 30, 512))
        assert answer.id == 4711
        assert answer.flags == dns.flags.QR | dns.flags.AA | dns.flags.RD | dns.flags.RA
        assert answer.question[0].name.to_text() == "Cart.shop."
        (records,) = answer.answer
        assert (records.name.to_text(), records.ttl) == ("Cart.shop.", 30)
        assert {record.address for record in records} == {"10.9.0.1", "10.9.0.2"}
        assert answer.edns == (0 if asked.edns else -1)
        if asked.edns:
            assert (answer.payload, answer.ednsflags) == (1232, dns.flags.DO)
    empty = parsed(local_answer(query(kind="AAAA"), [], None, 30, 512))
    assert (empty.rcode(), empty.answer) == (dns.rcode.NOERROR, [])
    (soa,) = empty.authority
    assert soa.to_text().startswith("Cart.shop. 30 IN SOA ")
    assert soa[0].minimum == 30, "for so long resolvers may remember that there is none"


def test_alias_without_addresses_has_an_soa() -> None:
    asked = query("api.example.com.shop.svc.cluster.local", "AAAA", use_edns=0)
    answer = parsed(local_answer(asked, [], "api.example.com", 30, 512))
    assert [records.to_text() for records in answer.answer] == [
        "api.example.com.shop.svc.cluster.local. 30 IN CNAME api.example.com."
    ]
    assert answer.authority[0].name.to_text() == "api.example.com."
    assert answer.edns == 0


@pytest.mark.parametrize("version", [1, 2, 255])
def test_unknown_edns_version_gets_badvers(version: int) -> None:
    answer = parsed(bad_version(query(use_edns=version, payload=1232, want_dnssec=True)))
    assert answer.rcode() == dns.rcode.BADVERS
    assert (answer.edns, answer.payload, answer.ednsflags & dns.flags.DO) == (0, 1232, dns.flags.DO)
    assert answer.question[0].name.to_text() == "Cart.shop."


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_a_forwarded_answer_has_an_opt_record_if_the_query_has_one(*, asks: bool, keyed: bool) -> None:
    """This includes servers without EDNS. A signature stays the last record and valid."""
    asked = query("www.example.com", **({"use_edns": 0, "payload": 1232} if asks else {}))
    plain = dns.message.make_response(dns.message.make_query("www.example.com", "A", id=4711))
    plain.answer.append(dns.rrset.from_text("www.example.com.", 60, "IN", "A", "192.0.2.1"))
    if keyed:
        plain.use_tsig(dns.tsigkeyring.from_text({"key.": "c2VjcmV0"}), keyname="key.")
        plain.request_mac = b""
    wire = plain.to_wire()
    answer = passed_on(asked, wire)
    assert answer_count(answer) == 1
    if keyed:
        assert answer[10:12] == wire[10:12]
    else:
        assert parsed(answer).edns == (0 if asks else -1)
        assert parsed(answer).answer == plain.answer
    assert passed_on(asked, answer) == answer, "twice adds nothing"


def test_answer_with_a_cname_has_addresses_under_the_canonical_name() -> None:
    asked = query("api.example.com.shop.svc.cluster.local")
    answer = parsed(local_answer(asked, V4[:1], "api.example.com", 30, 512))
    alias, records = answer.answer
    assert alias.to_text() == "api.example.com.shop.svc.cluster.local. 30 IN CNAME api.example.com."
    assert records.to_text() == "api.example.com. 30 IN A 10.9.0.1"


@pytest.mark.parametrize("payload", [None, 512, 1232, 4096])
@pytest.mark.parametrize("kind", ["A", "AAAA"])
@pytest.mark.parametrize("canonical", [None, "other.example.com"])
def test_long_local_answer_is_truncated_to_fitting_addresses(
    payload: int | None, kind: str, canonical: str | None
) -> None:
    options = {} if payload is None else {"use_edns": 0, "payload": payload}
    asked = query(kind=kind, **options)
    addresses = V4 if kind == "A" else V6
    limit = payload or 512
    whole = parsed(local_answer(asked, addresses, canonical, 30, 65535))
    assert len(whole.answer[-1]) == 256
    wire = local_answer(asked, addresses, canonical, 30, limit)
    assert len(wire) <= limit
    cut = parsed(wire)
    if len(local_answer(asked, addresses, canonical, 30, 65535)) > limit:
        assert cut.flags & dns.flags.TC
        assert len(wire) > limit - 60, "no room is left for two more"


def upstream(asked: Query, *texts: str, authority: str = "", code: int = 0, number: int = 4711) -> bytes:
    response = dns.message.make_response(dns.message.from_wire(with_id(asked.wire, number)))
    response.flags |= dns.flags.AA
    response.flags &= ~dns.flags.RA
    for text in texts:
        name, ttl, kind, data = text.split(" ", 3)
        response.answer.append(dns.rrset.from_text(name, int(ttl), "IN", kind, data))
    if authority:
        response.authority.append(dns.rrset.from_text("example.com.", 900, "IN", "SOA", authority))
    response.set_rcode(code)
    return response.to_wire(max_size=65535)


SOA = "ns.example.com. admin.example.com. 1 7200 900 1209600 60"


def test_answer_must_match_id_and_question() -> None:
    asked = query("a.example.com", "TXT")
    right = upstream(asked, 'a.example.com. 60 TXT "x"', number=99)
    assert is_answer_to(asked, 99, right)
    assert not is_answer_to(asked, 98, right)
    assert not is_answer_to(asked, 99, with_id(asked.wire, 99)), "a query is no answer"
    assert not is_answer_to(query("b.example.com", "TXT"), 99, right)
    assert not is_answer_to(query("a.example.com", "MX"), 99, right)
    assert is_answer_to(query("A.example.COM", "TXT"), 99, right), "a server that spells its own way"
    assert not is_answer_to(asked, 99, right[:11])
    assert not is_answer_to(asked, 99, right[:20])
    bare = right[:2] + b"\x80\x02" + bytes(8)
    assert is_answer_to(asked, 99, bare), "SERVFAIL without its question"
    assert not is_answer_to(asked, 99, right[:2] + b"\x80\x00" + bytes(8)), "NOERROR without its question"


def test_forwarded_answer_keeps_its_sections() -> None:
    asked = query("A.Example.com", "SRV")
    response = upstream(asked, "a.example.com. 60 SRV 1 2 80 x.example.com.", authority=SOA, number=99)
    passed = parsed(passed_on(asked, response))
    assert passed.id == 4711
    assert passed.question[0].name.to_text() == "A.Example.com."
    assert passed.flags == dns.flags.QR | dns.flags.RD | dns.flags.RA
    assert (len(passed.answer), len(passed.authority)) == (1, 1)


@pytest.mark.parametrize("options", [{}, {"use_edns": 0, "payload": 512}], ids=["plain", "edns"])
def test_long_forwarded_answer_keeps_the_answers_that_fit(options: dict[str, Any]) -> None:
    """Clients that never retry over TCP use them: the C library of older Alpine images."""
    asked = query("A.example.com", "A", **options)
    addresses = [f"b.example.com. 60 A 10.0.0.{number}" for number in range(100)]
    response = passed_on(
        asked, upstream(asked, "a.example.com. 60 CNAME b.example.com.", *addresses, authority=SOA)
    )
    wire = fitting(asked, response, 512)
    assert 512 - 16 < len(wire) <= 512, "no room is left for another one"
    cut = parsed(wire)
    assert cut.flags & dns.flags.TC
    assert cut.authority == []
    assert cut.edns == (0 if asked.edns else -1)
    alias, *found = cut.answer
    assert alias.to_text() == "A.example.com. 60 IN CNAME b.example.com."
    assert [record.address for each in found for record in each] == [f"10.0.0.{n}" for n in range(len(found[0]))]
    broken = bytearray(response)
    broken[-200] = 0xFF
    for end in range(
        len(response) - 300, len(response)
    ):  # whatever the server sends, the client can read the rest
        parsed(fitting(asked, response[:end], 512))
    assert len(fitting(asked, bytes(broken), 512)) <= 512


def test_long_forwarded_answer_is_truncated_to_its_question() -> None:
    for asked in (query("a.example.com", "TXT"), query("a.example.com", "TXT", use_edns=0, payload=512)):
        response = upstream(asked, f'a.example.com. 60 TXT "{"x" * 250}" "{"y" * 250}" "{"z" * 250}"')
        assert fitting(asked, response, 65535) == response
        cut = parsed(fitting(asked, response, 512))
        assert cut.flags & dns.flags.TC
        assert (cut.answer, cut.question[0].name.to_text(), cut.edns) == (
            [],
            "a.example.com.",
            0 if asked.edns else -1,
        )


@pytest.mark.parametrize(
    ("texts", "authority", "code", "lifetime_s"),
    [
        (["a.example.com. 60 A 10.0.0.1"], "", 0, 60),
        (["a.example.com. 300 CNAME b.example.com.", "b.example.com. 20 A 10.0.0.1"], "", 0, 20),
        (["a.example.com. 0 A 10.0.0.1"], "", 0, None),
        (["a.example.com. 999999 A 10.0.0.1"], "", 0, 86400),
        ([], SOA, 3, 60),
        ([], SOA, 0, 60),
        ([], "", 3, None),
        ([], "", 0, None),
        (["a.example.com. 10 CNAME b.example.com."], SOA, 3, 10),
        ([], SOA, 2, None),
        ([], SOA, 5, None),
    ],
)
def test_cacheable_answers_and_their_lifetime(
    texts: list[str], authority: str, code: int, lifetime_s: int | None
) -> None:
    asked = query("a.example.com")
    kept = keep(asked, upstream(asked, *texts, authority=authority, code=code))
    assert (None if kept is None else kept.lifetime_s) == lifetime_s


def test_cached_answer_has_lowered_ttls_and_the_querys_spelling() -> None:
    asked = query("a.example.com", use_edns=0)
    kept = keep(asked, upstream(asked, "a.example.com. 60 A 10.0.0.1", authority=SOA))
    assert kept is not None
    again = read_query(dns.message.make_query("A.EXAMPLE.com", "A", id=5, use_edns=0).to_wire())
    assert again.cache_key == asked.cache_key
    answer = parsed(kept.aged(again, 25.9))
    assert answer.id == 5
    assert answer.question[0].name.to_text() == "A.EXAMPLE.com."
    assert (answer.answer[0].ttl, answer.authority[0].ttl) == (35, 875)
    assert parsed(kept.aged(again, 1000)).answer[0].ttl == 0


def test_malformed_answer_is_not_cached() -> None:
    asked = query("a.example.com")
    whole = upstream(asked, "a.example.com. 60 A 10.0.0.1", authority=SOA)
    for cut in range(12, len(whole)):
        assert keep(asked, whole[:cut]) is None


def test_own_address_query_and_its_answer() -> None:
    asked = read_query(address_query("cart.shop", ipv6=True, number=7))
    assert (asked.name, asked.type_name) == ("cart.shop.", "AAAA")
    assert first_address(local_answer(asked, V6[:1], None, 30, 512)) == "fd00::1"
    assert first_address(local_answer(asked, [], None, 30, 512)) is None
    assert first_address(b"nonsense") is None
    chaos = dns.message.from_text("id 1\nopcode QUERY\nflags QR\n;QUESTION\nx. CH A\n;ANSWER\nx. 1 CH A y. 1\n")
    assert first_address(chaos.to_wire()) is None
    with pytest.raises(ValueError, match="no DNS name"):
        address_query("a..b", ipv6=False, number=7)


@given(st.lists(st.binary(min_size=1, max_size=12), max_size=6))
def test_a_name_is_shown_as_dnspython_shows_it(labels: list[bytes]) -> None:
    name = dns.name.Name([*labels, b""])
    asked = dns.message.Message(id=7)
    asked.find_rrset(asked.question, name, dns.rdataclass.IN, dns.rdatatype.A, create=True, force_unique=True)
    shown = read_query(asked.to_wire()).name
    assert shown == name.to_text()
    assert address_query(shown, ipv6=False, number=7)[12:-4] == name.to_digestable()


@pytest.mark.parametrize(
    "name", ["Cart.Shop", "cart.shop.", "m\u00fcnchen.example", "a" * 63, ".".join(["a" * 63] * 3 + ["b" * 61])]
)
def test_a_name_is_encoded_as_dnspython_encodes_it(name: str) -> None:
    asked = dns.message.from_wire(address_query(name, ipv6=False, number=7))
    assert asked.question[0].name == dns.name.from_text(name)
    assert asked.to_wire() == address_query(name, ipv6=False, number=7)


@pytest.mark.parametrize(
    "name",
    ["", "a..b", ".a", "a" * 64, ".".join(["a" * 63] * 3 + ["b" * 62]), "\ud800", "a\\", "a\\12", "a\\999"],
)
def test_invalid_dns_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no DNS name"):
        address_query(name, ipv6=False, number=7)


def test_the_first_address_of_an_answer() -> None:
    asked = query("cart.shop")
    whole = upstream(asked, "cart.shop. 60 CNAME b.shop.", "b.shop. 60 A 10.0.0.1", "b.shop. 60 A 10.0.0.2")
    assert first_address(whole) == "10.0.0.1"
    for cut in range(len(whole)):
        assert first_address(whole[:cut]) in (None, "10.0.0.1")
