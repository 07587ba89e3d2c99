"""Errors of the peer, floods and budgets: which end a stream, and which the connection."""

from __future__ import annotations

import pytest

from hbone import frames
from hbone.engine import Engine
from hbone.errors import ErrorCode
from hbone.events import ConnectionFailed, RequestReceived, StreamReset
from hbone.frames import frame
from hbone.limits import Limits
from tests.hbone.wire import OPENING, failure, opened, request, server, split, take

FAILURES = {
    "data on stream 0": (frame(frames.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "data on an idle stream": (frame(frames.DATA, 0, 9, b"x"), ErrorCode.PROTOCOL_ERROR),
    "even stream": (request(2), ErrorCode.PROTOCOL_ERROR),
    "stream id reused": (
        request(5) + frame(frames.RST_STREAM, 0, 5, bytes(4)) + request(3),
        ErrorCode.STREAM_CLOSED,
    ),
    "interrupted header section": (
        request(1, flags=0) + frame(frames.PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "data inside a header section": (
        request(1, flags=0) + frame(frames.DATA, 0, 1, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "continuation alone": (frame(frames.CONTINUATION, 4, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "push": (frame(frames.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "ping on a stream": (frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "ping of 7 bytes": (frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "reset of 5 bytes": (frame(frames.RST_STREAM, 0, 1, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
    "reset of an idle stream": (frame(frames.RST_STREAM, 0, 7, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "settings of 5 bytes": (frame(frames.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
    "settings ack with payload": (frame(frames.SETTINGS, 1, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
    "window of 2^31": (frames.settings_frame({4: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
    "frame size of 100": (frames.settings_frame({5: 100}), ErrorCode.PROTOCOL_ERROR),
    "push setting of 2": (frames.settings_frame({2: 2}), ErrorCode.PROTOCOL_ERROR),
    "window update of 0": (frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "window over the top": (
        frame(frames.WINDOW_UPDATE, 0, 0, frames.U32.pack(2**31 - 1)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "too long": (frame(frames.DATA, 0, 1, b"")[:0] + b"\x20\0\0\0\0\0\0\0\1", ErrorCode.FRAME_SIZE_ERROR),
    "padding too long": (request(1) + frame(frames.DATA, frames.PADDED, 1, b"\x09x"), ErrorCode.PROTOCOL_ERROR),
    "padding missing": (request(1) + frame(frames.DATA, frames.PADDED, 1, b""), ErrorCode.FRAME_SIZE_ERROR),
    "self dependency": (frame(frames.PRIORITY, 0, 1, b"\0\0\0\1\0"), ErrorCode.PROTOCOL_ERROR),
    "bad header block": (frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
    "short goaway": (frame(frames.GOAWAY, 0, 0, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
}


@pytest.mark.parametrize("name", FAILURES)
def test_connection_errors_send_goaway_with_their_code(name: str) -> None:
    wire, code = FAILURES[name]
    engine = opened()
    assert failure(engine.receive_data(wire)) == code
    kind, _, _, payload = split(take(engine))[-1]
    assert kind == frames.GOAWAY
    assert frames.TWO_U32.unpack(payload)[1] == code
    assert engine.receive_data(request(99)) == []


def test_first_frame_must_be_settings() -> None:
    engine = server()
    assert failure(engine.receive_data(frames.PREFACE + frame(frames.PING, 0, 0, bytes(8)))) == 1


SID1 = request(1) + frame(frames.DATA, frames.END_STREAM, 1)


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (SID1 + frame(frames.DATA, 0, 1, b"x"), ErrorCode.STREAM_CLOSED),
        (SID1 + request(1), ErrorCode.STREAM_CLOSED),
        (request(1) + request(1), ErrorCode.PROTOCOL_ERROR),
        (request(1) + frame(frames.WINDOW_UPDATE, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (
            request(1) + frame(frames.WINDOW_UPDATE, 0, 1, frames.U32.pack(2**31 - 1)),
            ErrorCode.FLOW_CONTROL_ERROR,
        ),
    ],
)
def test_stream_errors_reset_their_stream_alone(wire: bytes, code: ErrorCode) -> None:
    engine = opened()
    events = engine.receive_data(wire)
    assert events[-1] == StreamReset(1, code, by_peer=False)
    assert split(take(engine))[-1] == (frames.RST_STREAM, 0, 1, frames.U32.pack(code))
    assert not engine.failed


def flood(engine: Engine, piece: bytes, most: int, now_s: float = 0.0) -> int:
    """Return how many of ``piece`` are accepted before ENHANCE_YOUR_CALM."""
    for count in range(1, most + 1):
        events = engine.receive_data(piece, now_s)
        if failure(events) is not None:
            assert failure(events) == ErrorCode.ENHANCE_YOUR_CALM
            return count
    pytest.fail("never ended")


@pytest.mark.parametrize(
    "piece",
    [
        frame(frames.SETTINGS, 0, 0),
        frame(frames.SETTINGS, 0, 0, frames.SETTING.pack(99, 1) * 600),
        frame(frames.SETTINGS, frames.ACK, 0),
        frame(frames.PING, 0, 0, bytes(8)),
        frame(frames.PING, frames.ACK, 0, bytes(8)),
        frame(frames.PRIORITY, 0, 9, b"\0\0\0\0\1"),
        frame(frames.DATA, 0, 1),
        frame(frames.DATA, frames.PADDED, 1, b"\0"),
        frame(frames.WINDOW_UPDATE, 0, 1, frames.U32.pack(1)),
        frame(frames.WINDOW_UPDATE, 0, 0, frames.U32.pack(1)),
        frame(0xEE, 0, 0, b"?"),
        frame(frames.RST_STREAM, 0, 3, bytes(4)),
    ],
)
@pytest.mark.parametrize("drained", [True, False])
def test_floods_end_the_connection(piece: bytes, drained: bool) -> None:
    engine = opened()
    engine.receive_data(request(1) + request(3) + frame(frames.RST_STREAM, 0, 3, bytes(4)))
    engine.respond(1, 200)
    for _ in range(1100):
        events = engine.receive_data(piece)
        if drained:
            take(engine)
        if events and isinstance(events[-1], ConnectionFailed):
            assert events[-1].code == ErrorCode.ENHANCE_YOUR_CALM
            break
    else:
        pytest.fail("never ended")
    assert engine.output.frames <= 1010


def test_control_frames_at_an_ordinary_rate_are_not_a_flood() -> None:
    engine = opened()
    for second in range(100):
        for _ in range(100):
            assert failure(engine.receive_data(frame(frames.PING, 0, 0, bytes(8)), float(second))) is None
        take(engine)


def test_window_updates_are_earned_by_what_we_send() -> None:
    engine = opened()
    engine.receive_data(request(1) + frames.settings_frame({4: 2**30}))
    engine.respond(1, 200)
    for _ in range(20_000):  # a peer that returns credit for each 16 KiB, at no particular speed
        assert engine.send_data(1, bytes(16_384)) == 16_384
        take(engine)
        update = frame(frames.WINDOW_UPDATE, 0, 0, frames.U32.pack(16_384))
        assert failure(engine.receive_data(update + update[:5] + b"\0\0\0\1" + update[9:])) is None


def test_rapid_reset_ends_the_connection() -> None:
    engine = opened()
    for stream_id in range(1, 2000, 2):
        reset = frame(frames.RST_STREAM, 0, stream_id, frames.U32.pack(8))
        if failure(engine.receive_data(request(stream_id) + reset)) == ErrorCode.ENHANCE_YOUR_CALM:
            break
        take(engine)
    assert stream_id // 2 == 200


def test_streams_over_the_limit_are_no_offence_before_our_settings_have_arrived() -> None:
    """Envoy opens all tunnels that wait for a connection at once, and knows no limit then."""
    engine = server()
    events = engine.receive_data(OPENING + b"".join(map(request, range(1, 1200, 2))))
    assert failure(events) is None
    assert sum(type(event) is RequestReceived for event in events) == 200
    refused = [stream for kind, _, stream, _ in split(take(engine)) if kind == frames.RST_STREAM]
    assert refused == list(range(401, 1200, 2))
    acknowledged = frame(frames.SETTINGS, frames.ACK, 0)
    more = engine.receive_data(acknowledged + b"".join(map(request, range(1201, 1800, 2))))
    assert failure(more) == ErrorCode.ENHANCE_YOUR_CALM  # now the client knows the limit


def test_streams_over_the_limit_are_limited_without_an_acknowledgement() -> None:
    engine = server()
    stream_id = 1
    while failure(engine.receive_data((OPENING if stream_id == 1 else b"") + request(stream_id))) is None:
        take(engine)
        stream_id += 2
        assert stream_id < 4000
    assert stream_id // 2 == 1199  # 200 open streams, and a budget of 1000 that also paid for the SETTINGS


@pytest.mark.parametrize("primitive", ["overflow", "zero", "data after end", "headers after end", "bad request"])
def test_made_you_reset_ends_the_connection(primitive: str) -> None:
    engine = opened()
    for stream_id in range(1, 2000, 2):
        end = request(stream_id, flags=frames.END_HEADERS | frames.END_STREAM)
        wire = {
            "overflow": request(stream_id) + frame(8, 0, stream_id, frames.U32.pack(2**31 - 1)),
            "zero": request(stream_id) + frame(8, 0, stream_id, bytes(4)),
            "data after end": end + frame(frames.DATA, 0, stream_id, b"x"),
            "headers after end": end + request(stream_id),
            "bad request": request(stream_id, (b":method", b"CONNECT"), (b":path", b"/")),
        }[primitive]
        code = failure(engine.receive_data(wire))
        take(engine)
        if code is not None:
            assert code == ErrorCode.ENHANCE_YOUR_CALM
            break
    assert stream_id // 2 == 200


def test_continuation_flood_ends_the_connection() -> None:
    engine = opened()
    engine.receive_data(request(1, flags=0))
    assert flood(engine, frame(frames.CONTINUATION, 0, 1), 100) == 65
    engine = opened()
    engine.receive_data(request(1, flags=0))
    assert flood(engine, frame(frames.CONTINUATION, 0, 1, bytes(10_000)), 20) <= 14
    assert failure(opened().receive_data(b"\x0f\0\0\1\4\0\0\0\1")) == ErrorCode.ENHANCE_YOUR_CALM  # by its header


def test_hpack_bomb_ends_the_connection() -> None:
    engine = opened()
    big = b"\x40\x01a" + b"\x7f\x81\x1e" + b"b" * 3968  # one entry fills the table, then is referenced
    bomb = b"\x02\x07CONNECT" + big + b"\xbe" * 50
    assert failure(engine.receive_data(frame(frames.HEADERS, 4, 1, bomb))) == ErrorCode.ENHANCE_YOUR_CALM


def test_settings_frame_with_hundreds_of_entries_ends_the_connection() -> None:
    assert flood(opened(), frame(frames.SETTINGS, 0, 0, bytes(6 * 800)), 1) == 1


def test_limits_can_be_configured() -> None:
    engine = opened(limits=Limits(control_burst=5, control_rate=0))
    assert flood(engine, frame(frames.PING, 0, 0, bytes(8)), 10) <= 6


@pytest.mark.parametrize(("entries", "cost"), [(0, 1), (10, 1), (11, 2), (21, 2), (22, 3), (600, 57)])
def test_settings_are_charged_by_their_number_of_entries(entries: int, cost: int) -> None:
    """One token, and one for each 64 bytes: 682 settings fit into a frame, each applied to every stream."""
    most = 3
    engine = server(limits=Limits(control_burst=1 + most * cost, control_rate=0))
    engine.receive_data(OPENING)  # whose SETTINGS cost 1
    frame_ = frame(frames.SETTINGS, 0, 0, frames.SETTING.pack(99, 1) * entries)
    assert flood(engine, frame_, 10) == most + 1
    one_less = server(limits=Limits(control_burst=most * cost, control_rate=0))
    one_less.receive_data(OPENING)
    assert flood(one_less, frame_, 10) == most


@pytest.mark.parametrize("kind", ["PING", "SETTINGS", "bad request"])
def test_answers_that_a_peer_does_not_read_are_limited(kind: str) -> None:
    """At a rate that no budget minds: the answers wait here, and their number is the limit."""

    def piece(number: int) -> bytes:
        return {
            "PING": frame(frames.PING, 0, 0, bytes(8)),
            "SETTINGS": frame(frames.SETTINGS, 0, 0),
            "bad request": request(2 * number + 1, (b":method", b"CONNECT"), (b":path", b"/")),
        }[kind]

    engine = opened(limits=Limits(unsent_frames=20))
    for number in range(60):
        assert failure(engine.receive_data(piece(number), float(number))) is None
        if number % 20 == 19:
            take(engine)  # it reads now and then
    for number in range(60, 81):  # 20 answers may wait, and one that is written while 20 do
        assert failure(engine.receive_data(piece(number), float(number))) is None
    assert engine.output.frames == 21
    assert failure(engine.receive_data(piece(81), 81.0)) == ErrorCode.ENHANCE_YOUR_CALM
    assert engine.output.frames == 22  # no answer, but the GOAWAY
