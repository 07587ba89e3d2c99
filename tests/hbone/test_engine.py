"""The engine by bytes: packet boundaries, streams, windows, drain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from hbone import frames
from hbone.engine import Engine
from hbone.errors import ErrorCode, LocalProtocolError
from hbone.events import (
    GoawayReceived,
    PingAcknowledged,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowOpened,
)
from hbone.frames import frame
from hbone.settings import Role, client_settings, server_settings
from tests.hbone.wire import CONNECT, OPENING, block, client, failure, opened, plain, request, server, split, take

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


def test_tunnels_open_carry_data_and_end_in_both_roles() -> None:
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
def test_events_do_not_depend_on_packet_boundaries(cut: int) -> None:
    assert fed([WIRE[:cut], WIRE[cut:]]) == fed([WIRE])


def test_events_of_single_bytes_are_those_of_the_whole() -> None:
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


def test_server_opens_with_settings_and_window_update() -> None:
    engine = Engine(Role.SERVER, server_settings())
    engine.start()
    kinds = split(take(engine))
    assert list(frames.SETTING.iter_unpack(kinds[0][3])) == [(3, 200), (4, 16_384), (5, 1_048_576), (6, 65_536)]
    assert kinds[1] == (frames.WINDOW_UPDATE, 0, 0, frames.U32.pack((1 << 20) - 65_535))


def test_early_bytes_setting_is_announced_by_the_server_and_read_by_the_client() -> None:
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
    # A client does not announce it, because it has no answer to give.
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


def test_each_side_can_end_first() -> None:
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


def test_error_responses_of_rust_ztunnel_and_of_envoy_are_sent_and_understood() -> None:
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
    engine.receive_data(frame(frames.SETTINGS, frames.ACK, 0) + request(1))
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


def test_bytes_sent_before_our_smaller_window_has_arrived_are_accepted() -> None:
    """RFC 9113, 6.9.3. A Go client sends the body of a request at once, up to the default window."""
    sent = (frame(frames.DATA, 0, 1, bytes(size)) for size in (16_384, 16_384, 16_384, 16_383))
    engine = server()
    events = engine.receive_data(OPENING + request(1) + b"".join(sent))
    assert plain(events)[-1] == (1, bytes(65_535))
    take(engine)
    engine.acknowledge(1, 65_535)
    granted = sum(
        frames.U32.unpack(payload)[0]
        for kind, _, stream_id, payload in split(take(engine))
        if (kind, stream_id) == (frames.WINDOW_UPDATE, 1)
    )
    # The client's window falls to 16,384 - 65,535 with our SETTINGS. These grants raise it to its size.
    assert granted >= 65_535


@pytest.mark.parametrize("acknowledged", [False, True])
def test_bytes_beyond_the_window_that_the_client_knows_reset_the_stream(acknowledged: bool) -> None:
    engine = server()
    most = 16_384 if acknowledged else 65_535
    engine.receive_data(OPENING + (frame(frames.SETTINGS, frames.ACK, 0) if acknowledged else b"") + request(1))
    take(engine)
    data = b"".join(frame(frames.DATA, 0, 1, bytes(min(16_384, most - at))) for at in range(0, most, 16_384))
    assert plain(engine.receive_data(data)) == [(1, bytes(most))]
    events = engine.receive_data(frame(frames.DATA, 0, 1, b"x"))
    assert events == [StreamReset(1, ErrorCode.FLOW_CONTROL_ERROR, by_peer=False)]


def test_sending_stops_at_either_window_and_window_opened_reports_new_credit() -> None:
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


def test_payload_is_written_into_the_output_without_a_copy() -> None:
    engine = client()
    sid = engine.open_stream(CONNECT)
    take(engine)
    room = engine.reserve(sid, 1000)
    assert room is not None
    room[:5] = b"hello"
    engine.commit(sid, 5)
    assert take(engine) == frame(frames.DATA, 0, sid, b"hello")


def test_one_read_fills_several_small_frames() -> None:
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
    # A request that the peer's other threads had already sent is still accepted. The caller decides when to stop.
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


def test_informational_responses_are_ignored() -> None:
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


def test_idle_engine_borrows_no_buffer() -> None:
    engine = client()
    take(engine)
    assert not engine.output.borrows
    sid = engine.open_stream(CONNECT)
    take(engine)
    assert engine.reserve(sid, 100) is not None
    take(engine)
    assert not engine.output.borrows
