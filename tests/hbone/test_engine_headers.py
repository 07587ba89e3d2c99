"""Header blocks of an engine: the table size of the peer, and heads over the limit."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder

from hbone import frames
from hbone.errors import ErrorCode
from hbone.events import RequestReceived
from hbone.frames import frame
from tests.hbone.wire import CONNECT, OPENING, block, client, failure, opened, plain, request, server, split, take


def test_recurring_header_blocks_decode_alike() -> None:
    engine, encoder = opened(max_concurrent_streams=None), Encoder()
    seen = set()
    for number in range(30):
        extra = (b"x", b"%d" % (number // 10))  # changes the dynamic table now and then
        wire = frame(1, 4, 2 * number + 1, encoder.encode([*CONNECT, extra]))
        (event,) = engine.receive_data(wire)
        assert isinstance(event, RequestReceived)
        assert event.head.headers == (extra,)
        seen.add(wire[9:])
    assert len(seen) < 10


def lowered(*sizes: int) -> bytes:
    """SETTINGS frames of a peer that changes its header table, one after the other."""
    setting = int(frames.Setting.HEADER_TABLE_SIZE)
    return b"".join(frame(frames.SETTINGS, 0, 0, frames.SETTING.pack(setting, size)) for size in sizes)


@pytest.mark.parametrize("sizes", [(0,), (100,), (4095,), (100, 50), (0, 4096), (4096, 0), (65_536, 10)])
def test_the_first_block_after_a_lowered_table_begins_with_the_update(sizes: tuple[int, ...]) -> None:
    """RFC 7541, 4.2; the decoder of the library refuses a block that lacks it, as Envoy does."""
    engine, decoder = client(), Decoder()
    take(engine)
    engine.receive_data(lowered(*sizes))
    take(engine)
    decoder.max_allowed_table_size = min(sizes)
    blocks = []
    for _ in range(3):  # from the second on the whole block comes from the cache
        engine.open_stream(CONNECT)
        [(kind, _, _, payload)] = split(take(engine))
        assert kind == frames.HEADERS
        assert decoder.decode(payload, raw=True) == list(CONNECT)
        blocks.append(payload)
    assert blocks[0] == b"\x20" + blocks[1]
    assert blocks[1] == blocks[2]


@pytest.mark.parametrize("sizes", [(), (4096,), (65_536,), (65_536, 4096)])
def test_a_table_that_was_not_lowered_needs_no_update(sizes: tuple[int, ...]) -> None:
    engine = client()
    engine.receive_data(lowered(*sizes))
    take(engine)
    engine.open_stream(CONNECT)
    [(_, _, _, payload)] = split(take(engine))
    assert Decoder().decode(payload, raw=True) == list(CONNECT)
    assert payload[0] & 0xE0 != 0x20


def test_the_update_is_sent_once_per_connection_and_by_servers_too() -> None:
    one, other = opened(), opened()
    for engine in (one, other):
        engine.receive_data(request(1) + request(3))
    one.receive_data(lowered(0))
    take(one)
    for engine, prefixes in ((one, [b"\x20", b""]), (other, [b"", b""])):
        for stream_id, prefix in zip((1, 3), prefixes, strict=True):
            engine.respond(stream_id, 200)
            assert split(take(engine))[-1][3] == prefix + b"\x88"
    one.receive_data(lowered(4096, 0) + request(5))
    take(one)
    one.respond(5, 200)
    assert split(take(one))[-1][3] == b"\x88"  # its table has had no room since


def oversized(stream_id: int, *first: tuple[bytes, bytes]) -> bytes:
    """A head of 70 KB, in frames of the usual size."""
    encoded = block(*first, *[(b"x-%d" % number, b"y" * 1000) for number in range(70)])
    pieces = [encoded[start : start + 16_000] for start in range(0, len(encoded), 16_000)]
    wire = frame(frames.HEADERS, 0, stream_id, pieces[0])
    for piece in pieces[1:-1]:
        wire += frame(frames.CONTINUATION, 0, stream_id, piece)
    return wire + frame(frames.CONTINUATION, frames.END_HEADERS, stream_id, pieces[-1])


def test_a_request_with_too_long_a_head_is_reset_alone() -> None:
    engine = server()
    engine.receive_data(OPENING + frame(frames.HEADERS, frames.END_HEADERS, 1, block(*CONNECT)))
    take(engine)
    assert engine.receive_data(oversized(3, *CONNECT)) == []
    assert take(engine) == frame(frames.RST_STREAM, 0, 3, frames.U32.pack(ErrorCode.PROTOCOL_ERROR))
    assert plain(engine.receive_data(frame(frames.DATA, 0, 1, b"hi"))) == [(1, b"hi")]


def test_an_answer_with_too_long_a_head_ends_its_stream_alone() -> None:
    engine = client()
    first, second = engine.open_stream(CONNECT), engine.open_stream(CONNECT)
    take(engine)
    assert failure(engine.receive_data(oversized(first, (b":status", b"200")))) is None
    answered = engine.receive_data(frame(frames.HEADERS, frames.END_HEADERS, second, block((b":status", b"200"))))
    assert [type(event).__name__ for event in answered] == ["ResponseReceived"]
