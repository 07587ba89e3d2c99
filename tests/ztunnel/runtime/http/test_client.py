"""The client, fed by bytes."""

import asyncio

import pytest

from ztunnel.runtime.http.client import BadAnswer, ask

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


def answered(wire: bytes, piece: int, *, most_bytes: int = 5) -> tuple[int, bytes, bytes]:
    """The status and body of an answer which arrives in such pieces, and the request."""
    sent, position = bytearray(), 0

    async def read(most: int) -> bytes:
        nonlocal position
        found = wire[position : position + min(piece, most)]
        position += len(found)
        return found

    got = asyncio.run(ask(sent.extend, read, "GET", "/x", [("host", "h")], most_bytes=most_bytes))
    return *got, bytes(sent)


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize(
    "wire",
    [
        CHUNKED,
        b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED,
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabcde",
        b"HTTP/1.0 200 OK\r\n\r\nabcde",
    ],
)
def test_the_final_answer_is_read_whole_however_it_is_framed_and_cut(wire: bytes, piece: int) -> None:
    assert answered(wire, piece) == (200, b"abcde", b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n")


def test_the_status_alone_needs_no_body() -> None:
    assert answered(b"HTTP/1.1 503 No\r\ncontent-length: 9\r\n\r\n", 1000, most_bytes=0)[:2] == (503, b"")


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (b"", "without an answer"),
        (b"SSH-2.0-x\r\n\r\n", "illegal"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", "closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nabcdef", "/x is longer than 5 bytes"),
    ],
)
def test_another_answer_says_what_is_wrong(wire: bytes, reason: str) -> None:
    with pytest.raises(BadAnswer, match=reason):
        answered(wire, 1000)
