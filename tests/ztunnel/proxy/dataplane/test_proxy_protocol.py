"""PROXY headers of both versions, cut at every offset."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.model.address import SocketAddress
from ztunnel.proxy.dataplane.proxy_protocol import (
    SIGNATURE_2,
    BadHeader,
    NeedMore,
    NoHeader,
    ProxyHeader,
    encode_header,
    parse_header,
)

SOURCE, DESTINATION = SocketAddress("10.0.0.1", 40000), SocketAddress("10.0.0.2", 80)
SOURCE_6, DESTINATION_6 = SocketAddress("fd00::1", 40000), SocketAddress("fd00::2", 80)


def version_2(source: SocketAddress, destination: SocketAddress, *, tlvs: bytes = b"", command: int = 1) -> bytes:
    hosts = [ipaddress.ip_address(address.host).packed for address in (source, destination)]
    ports = [address.port.to_bytes(2, "big") for address in (source, destination)]
    body = b"".join((*hosts, *ports, tlvs))
    family = 0x11 if len(hosts[0]) == 4 else 0x21
    return SIGNATURE_2 + bytes([0x20 | command, family]) + len(body).to_bytes(2, "big") + body


HEADERS = {
    b"PROXY TCP4 10.0.0.1 10.0.0.2 40000 80\r\n": (1, SOURCE, DESTINATION),
    b"PROXY TCP6 fd00::1 fd00::2 40000 80\r\n": (1, SOURCE_6, DESTINATION_6),
    b"PROXY UNKNOWN whatever\r\n": (1, None, None),
    b"PROXY UNKNOWN\r\n": (1, None, None),
    version_2(SOURCE, DESTINATION): (2, SOURCE, DESTINATION),
    version_2(SOURCE_6, DESTINATION_6, tlvs=b"\xd0\x00\x03abc"): (2, SOURCE_6, DESTINATION_6),
    version_2(SOURCE, DESTINATION, command=0): (2, None, None),
    SIGNATURE_2 + b"\x21\x00\x00\x00": (2, None, None),
}


@pytest.mark.parametrize("wire", HEADERS)
def test_header_is_parsed_and_the_payload_left(wire: bytes) -> None:
    version, source, destination = HEADERS[wire]
    assert parse_header(wire + b"payload") == ProxyHeader(version, len(wire), source, destination)
    for cut in range(len(wire)):
        with pytest.raises(NeedMore):
            parse_header(wire[:cut])


def test_a_line_of_107_bytes_is_the_longest() -> None:
    """Its CRLF included, as the specification says of version 1."""
    for size, more in ((107, b""), (107, b"payload"), (106, b"\r\n")):
        line = b"PROXY UNKNOWN ".ljust(size - 2, b"x") + b"\r\n"
        assert len(line) == size
        assert parse_header(line + more) == ProxyHeader(1, size)
    with pytest.raises(BadHeader, match="no line end within 107 bytes"):
        parse_header(b"PROXY UNKNOWN ".ljust(106, b"x") + b"\r\n")


def test_header_line_without_crlf_is_refused_at_107_bytes() -> None:
    begun = b"PROXY UNKNOWN ".ljust(105, b"x")
    with pytest.raises(NeedMore):
        parse_header(begun + b"\r")
    with pytest.raises(BadHeader):
        parse_header(begun + b"\rx")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"PROXX", b"\r\n\r\nx"])
def test_bytes_without_a_header_are_detected_at_once(data: bytes) -> None:
    with pytest.raises(NoHeader):
        parse_header(data)


@pytest.mark.parametrize(
    "data",
    [
        b"PROXY TCP4 10.0.0.1 10.0.0.2 40000\r\n",
        b"PROXY TCP4 10.0.0.1 nowhere 40000 80\r\n",
        b"PROXY TCP4 fd00::1 fd00::2 40000 80\r\n",
        b"PROXY TCP4 10.0.0.1 10.0.0.2 40000 70000\r\n",
        b"PROXY TCP4 10.0.0.1 10.0.0.2 -1 80\r\n",
        b"PROXY SCTP 10.0.0.1 10.0.0.2 1 2\r\n",
        b"PROXY " + b"x" * 200,
        SIGNATURE_2 + b"\x11\x11\x00\x0c" + b"x" * 12,
        SIGNATURE_2 + b"\x22\x11\x00\x0c" + b"x" * 12,
        SIGNATURE_2 + b"\x21\x11\x00\x04" + b"x" * 4,
        SIGNATURE_2 + b"\x21\x11\xff\xff",
    ],
)
def test_bad_headers_are_refused(data: bytes) -> None:
    with pytest.raises(BadHeader):
        parse_header(data)


@given(st.binary(max_size=64))
def test_any_input_is_answered_with_a_documented_error(data: bytes) -> None:
    for attempt in (data, b"PROXY " + data, SIGNATURE_2 + data):
        try:
            parse_header(attempt)
        except (NeedMore, NoHeader, BadHeader):
            pass


@pytest.mark.parametrize(
    ("hosts", "family", "addresses"),
    [
        (("10.0.0.1", "10.0.0.2"), 0x11, "0a0000010a00000204d20050"),
        (("fd00::1", "fd00::2"), 0x21, "fd" + "00" * 14 + "01fd" + "00" * 14 + "0204d20050"),
        (("10.0.0.1", "fd00::2"), 0x01, ""),
    ],
)
@pytest.mark.parametrize("identity", [None, "spiffe://td/ns/a/sa/b"])
def test_the_header_of_a_sandwich_byte_by_byte(
    hosts: tuple[str, str], family: int, addresses: str, identity: str | None
) -> None:
    body = bytes.fromhex(addresses)
    if identity is not None:
        body += b"\xd0" + len(identity).to_bytes(2, "big") + identity.encode()
    wire = encode_header(SocketAddress(hosts[0], 1234), SocketAddress(hosts[1], 80), identity)
    assert wire == b"\r\n\r\n\0\r\nQUIT\n" + bytes((0x21, family)) + len(body).to_bytes(2, "big") + body
    parsed = parse_header(wire)
    assert parsed.size == len(wire)
    if family != 0x01:
        assert (parsed.source, parsed.destination) == (
            SocketAddress(hosts[0], 1234),
            SocketAddress(hosts[1], 80),
        )
