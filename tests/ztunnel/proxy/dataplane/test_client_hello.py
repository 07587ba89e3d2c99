"""ClientHello parsing, over hellos that real TLS libraries wrote, cut at every offset."""

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.proxy.dataplane.client_hello import ClientHello, NeedMore, NotTls, parse_client_hello


def hello(name: str | None, alpn: list[str]) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(alpn)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


WIRE = hello("Reviews.Default.svc", ["h2", "http/1.1"])
EXPECTED = ClientHello("reviews.default.svc", ("h2", "http/1.1"))


def test_name_and_protocols() -> None:
    assert parse_client_hello(WIRE) == EXPECTED
    assert parse_client_hello(hello(None, [])) == ClientHello()


@pytest.mark.parametrize("cut", range(len(WIRE)))
def test_partial_client_hello_needs_more_bytes(cut: int) -> None:
    with pytest.raises(NeedMore):
        parse_client_hello(WIRE[:cut])


@pytest.mark.parametrize("size", [1, 3, 4, 5, 100])
def test_a_hello_in_many_records(size: int) -> None:
    message = WIRE[5:]
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    records = b"".join(b"\x16\x03\x01" + len(piece).to_bytes(2, "big") + piece for piece in pieces)
    assert parse_client_hello(records + b"trailing") == EXPECTED


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0",
        b"\x16\x02\x00",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x00\x01\x02",
        b"\x00",
    ],
)
def test_other_protocols_are_detected_at_once(data: bytes) -> None:
    with pytest.raises(NotTls):
        parse_client_hello(data)


def test_an_endless_hello_is_refused() -> None:
    with pytest.raises(NotTls):
        parse_client_hello(b"\x16\x03\x01\x00\x10\x01\xff\xff\xff" + b"x" * 12)


@given(st.binary(max_size=200), st.integers(0, len(WIRE) - 1), st.binary(max_size=3))
def test_any_input_is_answered_with_a_documented_error(data: bytes, at: int, change: bytes) -> None:
    for attempt in (data, b"\x16\x03\x01" + data, WIRE[:at] + change + WIRE[at + len(change) :]):
        try:
            parse_client_hello(attempt)
        except (NeedMore, NotTls):
            pass
