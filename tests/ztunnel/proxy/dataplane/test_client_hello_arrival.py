"""First bytes of a connection, whole, cut at each offset, and spread over records."""

import ssl
from contextlib import suppress

import pytest

from ztunnel.proxy.dataplane.client_hello_arrival import FirstBytes, first_bytes

MOST = 16_384


def client_hello() -> bytes:
    """Return the first bytes that an OpenSSL client sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    session = context.wrap_bio(ssl.MemoryBIO(), outgoing)
    with suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


HELLO = client_hello()


def in_records(message: bytes, size: int) -> bytes:
    parts = [message[start : start + size] for start in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2) + part for part in parts)


def test_client_hello_is_whole_with_its_last_byte() -> None:
    for cut in range(len(HELLO)):
        assert first_bytes(HELLO[:cut], MOST) is FirstBytes.PART
    assert first_bytes(HELLO, MOST) is FirstBytes.WHOLE
    assert first_bytes(memoryview(HELLO + b"more"), MOST) is FirstBytes.WHOLE


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100])
def test_client_hello_can_span_records(size: int) -> None:
    data = in_records(HELLO[5:], size)
    assert {first_bytes(data[:cut], MOST) for cut in range(len(data))} == {FirstBytes.PART}
    assert first_bytes(data, MOST) is FirstBytes.WHOLE


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"PRI * HTTP/2.0",
        b"\x15\x03\x01\0\2\1\0",
        b"\x16\x03\x01\0\1\2",
        b"\x16\x03\x01\0\0",
    ],
    ids=["HTTP", "HTTP/2", "alert", "ServerHello", "empty record"],
)
def test_other_first_bytes_are_no_client_hello(data: bytes) -> None:
    assert first_bytes(data, MOST) is FirstBytes.OTHER


def test_client_hello_with_a_too_long_header_is_too_long() -> None:
    head = b"\x16\x03\x01\x40\x00\x01" + (MOST - 3).to_bytes(3)
    assert first_bytes(head, MOST) is FirstBytes.TOO_LONG
    assert first_bytes(b"\x16\x03\x01\x40\x00\x01" + (MOST - 4).to_bytes(3), MOST) is FirstBytes.PART
