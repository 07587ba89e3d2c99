"""The engine by bytes: boundaries, life cycles, limits."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hpack import Decoder, Encoder

from hbone import frames
from hbone.engine import Engine
from hbone.errors import ErrorCode, LocalProtocolError
from hbone.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    GoawayReceived,
    PingAcknowledged,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowOpened,
)
from hbone.frames import frame
from hbone.limits import Limits
from hbone.settings import Http2Settings, Role, client_settings, server_settings

CONNECT = ((b":method", b"CONNECT"), (b":authority", b"10.0.0.2:8080"))
OPENING = frames.PREFACE + frame(frames.SETTINGS, 0, 0)


def block(*headers: tuple[bytes, bytes]) -> bytes:
    return Encoder().encode(headers, huffman=False)


def request(stream_id: int, *headers: tuple[bytes, bytes], flags: int = frames.END_HEADERS) -> bytes:
    return frame(frames.HEADERS, flags, stream_id, block(*(headers or CONNECT)))


def take(engine: Engine) -> bytes:
    data = b"".join(engine.output.views())
    engine.output.taken()
    return data


def split(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of whole frames."""
    out, position = [], 0
    while position < len(data):
        high, low, kind, flags, stream = struct.unpack_from(">HBBBL", data, position)
        size = high << 8 | low
        out.append((kind, flags, stream, data[position + 9 : position + 9 + size]))
        position += 9 + size
    return out


def plain(events: Iterable[Event]) -> list[object]:
    """Events with payload as bytes, neighbours merged: what must not depend on how bytes were cut."""
    out: list[object] = []
    for event in events:
        if isinstance(event, DataReceived):
            data = b"".join(event.chunks)
            assert len(data) == event.size
            if out and isinstance(out[-1], tuple) and out[-1][0] == event.stream_id:
                out[-1] = (event.stream_id, out[-1][1] + data)
            else:
                out.append((event.stream_id, data))
        else:
            out.append(event)
    return out


def server(**settings: object) -> Engine:
    engine = Engine(Role.SERVER, Http2Settings(**settings))  # type: ignore[arg-type]
    engine.start()
    take(engine)
    return engine


def opened(**settings: object) -> Engine:
    engine = server(**settings)
    engine.receive_data(OPENING)
    take(engine)
    return engine


def client() -> Engine:
    engine = Engine(Role.CLIENT, client_settings())
    engine.start()
    engine.receive_data(frame(frames.SETTINGS, 0, 0))
    return engine


def failure(events: list[Event]) -> int | None:
    return events[-1].code if events and isinstance(events[-1], ConnectionFailed) else None


WIRE = (
    OPENING
    + frame(frames.WINDOW_UPDATE, 0, 0, frames.U32.pack(1000))
    + frame(frames.HEADERS, 0, 1, block(*CONNECT)[:7])
    + frame(frames.CONTINUATION, frames.END_HEADERS, 1, block(*CONNECT)[7:])
    + frame(frames.DATA, 0, 1, b"hi")
    + frame(0x77, 0, 0, b"unknown and ignored")
    + frame(frames.DATA, frames.PADDED, 1, b"\x03 there...")
    + frame(frames.PING, 0, 0, b"12345678")
    + frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\x02..")
    + frame(frames.HEADERS, frames.END_HEADERS | frames.PRIORITY_FLAG, 3, b"\0\0\0\0\1" + block(*CONNECT))
    + frame(frames.RST_STREAM, 0, 3, frames.U32.pack(8))
    + frame(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(0, 0) + b"bye")
)


def fed(pieces: Iterable[bytes]) -> tuple[list[object], bytes]:
    engine = server()
    events: list[object] = []
    for piece in pieces:
        events += plain(engine.receive_data(piece))  # views must be used before the next call
    merged: list[object] = []
    for event in events:
        if isinstance(event, tuple) and merged and isinstance(merged[-1], tuple) and merged[-1][0] == event[0]:
            merged[-1] = (event[0], merged[-1][1] + event[1])
        else:
            merged.append(event)
    return merged, take(engine)


def test_whole_conversation() -> None:
    events, output = fed([WIRE])
    kinds = [type(event).__name__ for event in events]
    assert kinds == [
        "SettingsReceived",
        "RequestReceived",
        "tuple",
        "StreamEnded",
        "RequestReceived",
        "StreamReset",
        "GoawayReceived",
    ]
    assert events[2] == (1, b"hi there")
    assert events[5] == StreamReset(3, 8)
    assert events[6] == GoawayReceived(0, 0, b"bye")
    assert (frames.PING, frames.ACK, 0, b"12345678") in split(output)


@pytest.mark.parametrize("cut", range(len(WIRE) + 1))
def test_nothing_depends_on_packet_boundaries(cut: int) -> None:
    assert fed([WIRE[:cut], WIRE[cut:]]) == fed([WIRE])


def test_byte_by_byte() -> None:
    assert fed([WIRE[i : i + 1] for i in range(len(WIRE))]) == fed([WIRE])


@pytest.mark.parametrize("end", range(1, len(frames.PREFACE)))
def test_wrong_preface_is_refused_at_once(end: int) -> None:
    engine = server()
    assert failure(engine.receive_data(frames.PREFACE[:end] + b"\x00")) == ErrorCode.PROTOCOL_ERROR


def test_client_opens_without_waiting_for_settings() -> None:
    engine = Engine(Role.CLIENT, client_settings())
    engine.start()
    engine.open_stream(CONNECT)
    data = take(engine)
    assert data.startswith(frames.PREFACE)
    kinds = split(data[len(frames.PREFACE) :])
    assert [kind for kind, *_ in kinds] == [frames.SETTINGS, frames.WINDOW_UPDATE, frames.HEADERS]
    assert dict(frames.SETTING.iter_unpack(kinds[0][3])) == {2: 0, 4: 16_384, 5: 1_048_576, 6: 16_384}
    assert kinds[1][3] == frames.U32.pack((1 << 20) - 65_535)
    assert kinds[2][1] == frames.END_HEADERS


def test_server_opening() -> None:
    engine = Engine(Role.SERVER, server_settings())
    engine.start()
    kinds = split(take(engine))
    assert list(frames.SETTING.iter_unpack(kinds[0][3])) == [(3, 200), (4, 16_384), (5, 1_048_576), (6, 65_536)]
    assert kinds[1] == (frames.WINDOW_UPDATE, 0, 0, frames.U32.pack((1 << 20) - 65_535))


def test_a_server_that_holds_early_bytes_says_so_and_a_client_that_sends_some_hears_it() -> None:
    server_says = Engine(Role.SERVER, replace(server_settings(), early_data=True, early_bytes=100))
    server_says.start()
    opening = take(server_says)
    assert (0xF0EB, 100) in frames.SETTING.iter_unpack(split(opening)[0][3])
    for early_data, heard in ((True, 100), (False, 0)):
        engine = Engine(Role.CLIENT, replace(client_settings(), early_data=early_data))
        engine.start()
        engine.receive_data(opening)
        assert engine.peer_early_bytes == heard
        engine.receive_data(frames.settings_frame({0xF0EB: 0}))
        assert engine.peer_early_bytes == 0
    # A client has no answer to give, and says nothing.
    says_nothing = Engine(Role.CLIENT, replace(client_settings(), early_data=True))
    says_nothing.start()
    wire = take(says_nothing)
    assert 0xF0EB not in dict(frames.SETTING.iter_unpack(split(wire[len(frames.PREFACE) :])[0][3]))
    server_says.receive_data(frames.PREFACE + frames.settings_frame({0xF0EB: 7}))
    assert server_says.peer_early_bytes == 0


def test_envoy_client_opening_is_understood() -> None:
    engine = server()
    values = {2: 0, 1: 4096, 8: 1, 3: 1024, 4: 16_777_216}
    wire = frames.PREFACE + frames.settings_frame(values)
    wire += frame(frames.WINDOW_UPDATE, 0, 0, frames.U32.pack(25_100_289)) + request(1)
    events = engine.receive_data(wire)
    assert failure(events) is None
    assert engine.peer_max_streams == 1024
    engine.respond(1, 200)
    assert engine.send_data(1, bytes(300_000)) > 200_000  # more than 65,535: the peer's windows count


def test_half_close_each_way() -> None:
    engine = opened()
    engine.receive_data(request(1))
    engine.respond(1, 200)
    assert engine.receive_data(frame(frames.DATA, frames.END_STREAM, 1)) == [StreamEnded(1)]
    assert engine.send_data(1, b"more") == 4
    assert engine.open_streams == 1
    engine.end_stream(1)
    assert engine.open_streams == 0
    assert [(kind, flags) for kind, flags, *_ in split(take(engine))] == [(1, 4), (0, 0), (0, 1)]


POST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), (b":authority", b"a"))
TRAILER = (b"grpc-status", b"0")


def test_trailers_end_calls_each_way() -> None:
    engine = opened()
    engine.receive_data(request(1, *POST))
    ends = request(1, TRAILER, flags=frames.END_HEADERS | frames.END_STREAM)
    assert engine.receive_data(ends) == [StreamEnded(1, (TRAILER,))]
    engine.respond(1, 200)
    engine.send_data(1, b"x")
    engine.end_stream(1, (TRAILER,))
    assert engine.open_streams == 0
    heads = split(take(engine))
    assert [(kind, flags) for kind, flags, *_ in heads] == [(1, 4), (0, 0), (1, 5)]
    calling = client()
    calling.open_stream(POST, tunnel=False)
    calling.receive_data(frame(1, 4, 1, b"\x88"))
    assert calling.receive_data(ends) == [StreamEnded(1, (TRAILER,))]
    calling.end_stream(1)
    assert calling.open_streams == 0


@pytest.mark.parametrize("flags", [frames.END_HEADERS, frames.END_HEADERS | frames.END_STREAM])
def test_tunnels_have_no_trailers_and_calls_no_second_head(flags: int) -> None:
    for fields, tunnel, refused in (
        (CONNECT, True, True),
        (POST, False, not flags & frames.END_STREAM),
    ):
        engine = client()
        engine.open_stream(fields, tunnel=tunnel)
        engine.receive_data(frame(1, 4, 1, b"\x88"))
        events = engine.receive_data(request(1, TRAILER, flags=flags))
        reset = [StreamReset(1, ErrorCode.PROTOCOL_ERROR, by_peer=False)]
        assert events == (reset if refused else [StreamEnded(1, (TRAILER,))])


def test_refusals_of_rust_and_of_envoy() -> None:
    engine = opened()
    engine.receive_data(request(1) + request(3))
    engine.respond(1, 401, ended=True, reset_code=ErrorCode.NO_ERROR)
    body = b"x" * 98
    engine.respond(3, 503, [(b"content-length", b"98")], body=body, reset_code=ErrorCode.CONNECT_ERROR)
    got = split(take(engine))
    assert [(kind, flags, stream) for kind, flags, stream, _ in got] == [
        (frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1),
        (frames.RST_STREAM, 0, 1),
        (frames.HEADERS, frames.END_HEADERS, 3),
        (frames.DATA, frames.END_STREAM, 3),
        (frames.RST_STREAM, 0, 3),
    ]
    assert [got[1][3], got[3][3], got[4][3]] == [b"\0\0\0\0", body, b"\0\0\0\x0a"]
    assert engine.open_streams == 0


@pytest.mark.parametrize(
    "headers",
    [
        ((b":method", b"CONNECT"), (b":authority", b"a:1"), (b":path", b"/")),
        ((b":method", b"CONNECT"), (b":authority", b"a:1"), (b":scheme", b"https")),
        ((b":method", b"GET"), (b":authority", b"a"), (b":scheme", b"https")),
        ((b":method", b"CONNECT"), (b":method", b"CONNECT"), (b":authority", b"a:1")),
        ((b":authority", b"a:1"), (b"x", b"y")),
        ((b":method", b"CONNECT"), (b"x", b"y"), (b":authority", b"a:1")),
        ((b":method", b"CONNECT"), (b":authority", b"a:1"), (b"X-Upper", b"y")),
        ((b":method", b"CONNECT"), (b":authority", b"a:1"), (b"x", b"y\r\nz: 1")),
        ((b":method", b"CONNECT"), (b":authority", b"a:1"), (b"x", b" y")),
        ((b":method", b"CONNECT"), (b":authority", b"a:1"), (b"connection", b"close")),
        ((b":method", b"CONNECT"), (b":authority", b"a:1"), (b"te", b"gzip")),
        ((b":method", b"CONNECT"), (b":status", b"200")),
    ],
)
def test_malformed_requests_are_reset(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    engine = opened()
    assert engine.receive_data(request(1, *headers)) == []
    assert split(take(engine)) == [(frames.RST_STREAM, 0, 1, b"\0\0\0\x01")]
    assert any(isinstance(event, RequestReceived) for event in engine.receive_data(request(3)))


@pytest.mark.parametrize(
    ("headers", "tunnel"),
    [
        (((b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/"), (b":authority", b"a")), False),
        (
            (
                (b":method", b"CONNECT"),
                (b":protocol", b"connect-tcp"),
                (b":scheme", b"https"),
                (b":path", b"/"),
                (b":authority", b"a"),
            ),
            False,
        ),
        (((b":method", b"CONNECT"),), True),
    ],
)
def test_other_requests_reach_the_application(headers: tuple[tuple[bytes, bytes], ...], tunnel: bool) -> None:
    (event,) = opened().receive_data(request(1, *headers))
    assert isinstance(event, RequestReceived)
    assert event.head.is_tunnel is tunnel


def test_credit_returns_in_half_windows() -> None:
    engine = opened(stream_window_bytes=1000, connection_window_bytes=65_535)
    engine.receive_data(request(1))
    engine.respond(1, 200)
    engine.receive_data(frame(frames.DATA, 0, 1, bytes(900)))
    take(engine)
    engine.acknowledge(1, 499)
    assert take(engine) == b""
    engine.acknowledge(1, 1)
    assert split(take(engine)) == [(frames.WINDOW_UPDATE, 0, 1, frames.U32.pack(500))]
    assert failure(engine.receive_data(frame(frames.DATA, 0, 1, bytes(600)))) is None
    events = engine.receive_data(frame(frames.DATA, 0, 1, bytes(1)))
    assert events == [StreamReset(1, ErrorCode.FLOW_CONTROL_ERROR, by_peer=False)]


def test_connection_window_is_enforced_and_returned_for_streams_that_are_gone() -> None:
    engine = opened(connection_window_bytes=65_535, initial_window_bytes=1 << 20)
    engine.receive_data(request(1))
    engine.reset_stream(1, ErrorCode.CANCEL)
    take(engine)
    for _ in range(8):  # eight times what the window holds half of: credit comes back by itself
        assert engine.receive_data(frame(frames.DATA, 0, 1, bytes(32_768))) == []
        assert (frames.WINDOW_UPDATE, 0, 0, frames.U32.pack(32_768)) in split(take(engine))
    engine.receive_data(request(3))
    engine.receive_data(frame(frames.DATA, 0, 3, bytes(65_535)))
    assert failure(engine.receive_data(frame(frames.DATA, 0, 3, b"x"))) == ErrorCode.FLOW_CONTROL_ERROR


def test_sending_stops_at_either_window_and_says_when_it_goes_on() -> None:
    engine = client()
    one, two = engine.open_stream(CONNECT), engine.open_stream(CONNECT)
    engine.receive_data(b"".join(frame(1, 4, sid, b"\x88") for sid in (one, two)))
    take(engine)
    sent = 0
    while count := engine.send_data(one, bytes(100_000)):
        sent += count
        take(engine)
    assert sent == 65_535
    assert engine.reserve(two, 10) is None
    grow = frame(frames.WINDOW_UPDATE, 0, 0, frames.U32.pack(5))
    assert engine.receive_data(grow) == [WindowOpened(0)]
    assert engine.reserve(one, 10) is None  # its own window is still shut
    room = engine.reserve(two, 10)
    assert room is not None
    assert len(room) == 5
    assert engine.receive_data(frame(frames.WINDOW_UPDATE, 0, one, frames.U32.pack(1))) == [WindowOpened(one)]


def test_settings_change_the_windows_of_open_streams() -> None:
    engine = client()
    sid = engine.open_stream(CONNECT)
    engine.receive_data(frames.settings_frame({4: 10}))
    room = engine.reserve(sid, 100)
    assert room is not None
    assert len(room) == 10
    room[:] = b"0123456789"
    engine.commit(sid, 10)
    engine.receive_data(frames.settings_frame({4: 5}))
    assert engine.reserve(sid, 100) is None
    assert WindowOpened(sid) in engine.receive_data(frames.settings_frame({4: 20}))


def test_payload_is_written_in_place() -> None:
    engine = client()
    sid = engine.open_stream(CONNECT)
    take(engine)
    room = engine.reserve(sid, 1000)
    assert room is not None
    room[:5] = b"hello"
    engine.commit(sid, 5)
    assert take(engine) == frame(frames.DATA, 0, sid, b"hello")


def test_one_read_over_many_small_frames() -> None:
    engine = client()
    sid = engine.open_stream(CONNECT)
    take(engine)
    data = bytes(range(256)) * 200
    rooms = engine.reserve_many(sid, len(data))
    assert rooms is not None
    assert [len(room) for room in rooms] == [16_384, 16_384, 16_384, 2048]
    position = 0
    for room in rooms:
        room[:] = data[position : position + len(room)]
        position += len(room)
    engine.commit(sid, 40_000)
    got = split(take(engine))
    assert [len(payload) for *_, payload in got] == [16_384, 16_384, 7232]
    assert b"".join(payload for *_, payload in got) == data[:40_000]


def test_graceful_drain_in_two_steps() -> None:
    engine = opened()
    engine.receive_data(request(1))
    engine.drain()
    goaway, ping = split(take(engine))
    assert goaway == (frames.GOAWAY, 0, 0, frames.TWO_U32.pack(2**31 - 1, 0))
    assert any(isinstance(event, RequestReceived) for event in engine.receive_data(request(3)))
    events = engine.receive_data(frame(frames.PING, frames.ACK, 0, ping[3]))
    assert events == [PingAcknowledged(ping[3])]
    assert engine.drain_seen
    assert take(engine) == b""
    # A request that the peer's other threads had under way is still taken; when to stop is up to the caller.
    assert any(isinstance(event, RequestReceived) for event in engine.receive_data(request(5)))
    engine.goaway()
    assert split(take(engine)) == [(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(5, 0))]
    assert engine.receive_data(request(7) + frame(frames.DATA, 0, 7, b"late")) == []
    assert take(engine) == b""
    engine.respond(1, 200)


def test_goaway_separates_processed_from_unprocessed() -> None:
    engine = client()
    ids = [engine.open_stream(CONNECT) for _ in range(3)]
    events = engine.receive_data(frame(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(ids[0], 0)))
    assert events == [
        StreamReset(ids[1], ErrorCode.REFUSED_STREAM, unprocessed=True),
        StreamReset(ids[2], ErrorCode.REFUSED_STREAM, unprocessed=True),
        GoawayReceived(ids[0], 0),
    ]
    assert not engine.accepts_streams
    with pytest.raises(LocalProtocolError):
        engine.open_stream(CONNECT)
    assert engine.receive_data(frame(1, 4, ids[0], b"\x88")) == [ResponseReceived(ids[0], 200)]


def test_refused_stream_after_the_answer_is_not_unprocessed() -> None:
    engine = client()
    sid = engine.open_stream(CONNECT)
    engine.receive_data(frame(1, 4, sid, b"\x88"))
    reset = frame(frames.RST_STREAM, 0, sid, frames.U32.pack(ErrorCode.REFUSED_STREAM))
    assert engine.receive_data(reset) == [StreamReset(sid, ErrorCode.REFUSED_STREAM)]


def test_streams_beyond_the_limit_are_refused() -> None:
    engine = opened(max_concurrent_streams=1)
    engine.receive_data(request(1) + request(3))
    assert split(take(engine)) == [(frames.RST_STREAM, 0, 3, frames.U32.pack(ErrorCode.REFUSED_STREAM))]


def test_informational_answers_are_passed_over() -> None:
    engine = client()
    sid = engine.open_stream(CONNECT)
    early = frame(1, 4, sid, block((b":status", b"103"), (b"link", b"x")))
    assert engine.receive_data(early) == []
    assert engine.receive_data(frame(1, 4, sid, b"\x88")) == [ResponseReceived(sid, 200)]


def test_data_before_the_answer_is_an_error_for_clients() -> None:
    engine = client()
    sid = engine.open_stream(CONNECT)
    events = engine.receive_data(frame(frames.DATA, 0, sid, b"too early"))
    assert events == [StreamReset(sid, ErrorCode.PROTOCOL_ERROR, by_peer=False)]


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
def test_connection_errors(name: str) -> None:
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
def test_stream_errors(wire: bytes, code: ErrorCode) -> None:
    engine = opened()
    events = engine.receive_data(wire)
    assert events[-1] == StreamReset(1, code, by_peer=False)
    assert split(take(engine))[-1] == (frames.RST_STREAM, 0, 1, frames.U32.pack(code))
    assert not engine.failed


def flood(engine: Engine, piece: bytes, most: int, now_s: float = 0.0) -> int:
    """How many of ``piece`` it takes before ENHANCE_YOUR_CALM."""
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


def test_honest_rates_are_not_floods() -> None:
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


def test_rapid_reset() -> None:
    engine = opened()
    for stream_id in range(1, 2000, 2):
        reset = frame(frames.RST_STREAM, 0, stream_id, frames.U32.pack(8))
        if failure(engine.receive_data(request(stream_id) + reset)) == ErrorCode.ENHANCE_YOUR_CALM:
            break
        take(engine)
    assert stream_id // 2 == 200


@pytest.mark.parametrize("primitive", ["overflow", "zero", "data after end", "headers after end", "bad request"])
def test_made_you_reset(primitive: str) -> None:
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


def test_continuation_flood() -> None:
    engine = opened()
    engine.receive_data(request(1, flags=0))
    assert flood(engine, frame(frames.CONTINUATION, 0, 1), 100) == 65
    engine = opened()
    engine.receive_data(request(1, flags=0))
    assert flood(engine, frame(frames.CONTINUATION, 0, 1, bytes(10_000)), 20) <= 14
    assert failure(opened().receive_data(b"\x0f\0\0\1\4\0\0\0\1")) == ErrorCode.ENHANCE_YOUR_CALM  # by its header


def test_hpack_bomb() -> None:
    engine = opened()
    big = b"\x40\x01a" + b"\x7f\x81\x1e" + b"b" * 3968  # one entry fills the table, then is referenced
    bomb = b"\x02\x07CONNECT" + big + b"\xbe" * 50
    assert failure(engine.receive_data(frame(frames.HEADERS, 4, 1, bomb))) == ErrorCode.ENHANCE_YOUR_CALM


def test_settings_may_not_be_endless() -> None:
    assert flood(opened(), frame(frames.SETTINGS, 0, 0, bytes(6 * 800)), 1) == 1


def test_limits_are_settings() -> None:
    engine = opened(limits=Limits(control_burst=5, control_rate=0))
    assert flood(engine, frame(frames.PING, 0, 0, bytes(8)), 10) <= 6


@pytest.mark.parametrize(("entries", "cost"), [(0, 1), (10, 1), (11, 2), (21, 2), (22, 3), (600, 57)])
def test_settings_cost_what_they_make_us_do(entries: int, cost: int) -> None:
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


def test_idle_engine_borrows_no_buffer() -> None:
    engine = client()
    take(engine)
    assert not engine.output.borrows
    sid = engine.open_stream(CONNECT)
    take(engine)
    assert engine.reserve(sid, 100) is not None
    take(engine)
    assert not engine.output.borrows


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
