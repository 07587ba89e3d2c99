"""The client's connection by bytes and values: h2 is the server, the network is a list of cuts."""

import struct

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamReset, WindowUpdated
from h2.settings import SettingCodes, Settings
from hypothesis import given
from hypothesis import strategies as st

from xds.grpc.connection import (
    CONNECTION_WINDOW_BYTES,
    MAX_FRAME_BYTES,
    STREAM_WINDOW_BYTES,
    CallEnded,
    CallEvent,
    CallsPossible,
    ClientConnection,
    FrameCutter,
    Goaway,
    MessageReceived,
    Opened,
    State,
    WritePossible,
)
from xds.grpc.heads import request_fields
from xds.grpc.messages import prefix
from xds.grpc.status import RpcFailed, Status

FIELDS = request_fields("/a.B/C", "host:1", secure=False)
HEAD = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0")]


def framed(*messages: bytes) -> bytes:
    return b"".join(prefix(message) + message for message in messages)


def goaway(last_stream_id: int, words: bytes = b"", code: int = 0) -> bytes:
    return struct.pack(">HBBBLLL", 0, 8 + len(words), 7, 0, 0, last_stream_id, code) + words


class Pair:
    """A client and the server that h2 plays, joined by hand."""

    def __init__(self, **settings: int) -> None:
        self.client = ClientConnection()
        self.server = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        values = {getattr(SettingCodes, name.upper()): value for name, value in settings.items()}
        self.server.local_settings = Settings(client=False, initial_values=values)
        self.server.initiate_connection()
        self.client.start()

    def up(self) -> list[object]:
        """Carry the client's bytes."""
        return list(self.server.receive_data(self.client.data_to_send()))

    def down(self, more: bytes = b"") -> list[CallEvent]:
        """Carry the server's bytes, in one read, and then ``more``."""
        return self.client.receive_data(self.server.data_to_send() + more)

    def settle(self) -> list[CallEvent]:
        """Carry both ways until both are quiet."""
        events: list[CallEvent] = []
        while True:
            up, down = self.client.data_to_send(), self.server.data_to_send()
            if not up and not down:
                return events
            events += self.client.receive_data(down)
            self.server.receive_data(up)

    def call(self, limit_bytes: int | None = None) -> int:
        call_id = self.client.open_call(FIELDS, limit_bytes)
        self.up()
        return call_id


def opened(**settings: int) -> Pair:
    pair = Pair(**settings)
    pair.settle()
    return pair


def calls(events: list[CallEvent]) -> list[object]:
    """The events of calls, with failures as their text."""
    found: list[object] = []
    for event in events:
        if isinstance(event, MessageReceived):
            found.append(event.message)
        elif isinstance(event, CallEnded):
            found.append((event.call_id, None if event.failure is None else str(event.failure)))
    return found


def test_no_calls_before_the_servers_settings() -> None:
    pair = Pair()
    assert (pair.client.state, pair.client.calls_possible) == (State.OPENING, 0)
    with pytest.raises(RpcFailed, match="UNAVAILABLE"):
        pair.client.open_call(FIELDS, None)
    assert Opened() in pair.down()
    assert pair.client.state is State.OPEN
    assert pair.client.calls_possible > 0


def test_windows_and_frames_that_the_server_may_use() -> None:
    pair = opened()
    assert pair.server.outbound_flow_control_window == CONNECTION_WINDOW_BYTES
    assert pair.server.max_outbound_frame_size == MAX_FRAME_BYTES
    assert pair.server.local_flow_control_window(pair.call()) == STREAM_WINDOW_BYTES


def answers(pair: Pair, call_id: int) -> bytes:
    """An answer of three messages, written down."""
    pair.server.send_headers(call_id, [(":status", "103")])
    pair.server.send_headers(call_id, HEAD)
    pair.server.send_data(call_id, framed(b"one", b"")[:6], pad_length=3)
    pair.server.ping(b"8 bytes.")
    pair.server.send_data(call_id, framed(b"one", b"", b"three")[6:])
    pair.server.send_headers(call_id, [*OK, ("x", "y")], end_stream=True)
    return pair.server.data_to_send()


def test_events_do_not_depend_on_how_the_network_cuts() -> None:
    wire = answers(pair := opened(), pair.call()) + goaway(1, b"bye")
    expected = [b"one", b"", b"three", (1, None)]
    for cut in range(len(wire) + 1):
        pair = opened()
        answers(pair, pair.call())
        events = pair.client.receive_data(wire[:cut]) + pair.client.receive_data(wire[cut:])
        assert calls(events) == expected, cut
        assert (pair.client.state, pair.client.reason) == (State.DRAINING, "GOAWAY NO_ERROR bye")
    pair = opened()
    answers(pair, pair.call())
    assert calls([event for byte in wire for event in pair.client.receive_data(bytes([byte]))]) == expected


def test_a_connection_that_ends_anywhere_fails_its_calls_once() -> None:
    wire = answers(pair := opened(), pair.call())
    for cut in range(len(wire)):
        pair = opened()
        answers(pair, pair.call())
        events = pair.client.receive_data(wire[:cut])
        assert not [each for each in calls(events) if isinstance(each, tuple)]
        assert calls(pair.client.lost("socket closed")) == [(1, "UNAVAILABLE: socket closed")]
        assert pair.client.lost("again") == []
        assert pair.client.reason == "socket closed"


def test_head_and_reset_in_one_read() -> None:
    pair = opened()
    call_id = pair.call()
    pair.server.send_headers(call_id, HEAD)
    pair.server.send_data(call_id, framed(b"a"))
    pair.server.reset_stream(call_id, 8)
    assert calls(pair.down()) == [b"a", (1, "CANCELLED: stream reset with CANCEL")]
    # Calls that come after the end are ignored, and are no error.
    pair.client.consumed(call_id)
    pair.client.end(call_id)
    pair.client.cancel(call_id)
    assert pair.client.send(call_id, memoryview(b"x")) == 0
    assert pair.client.calls == 0


def test_a_refused_answer_and_its_rest_in_one_read() -> None:
    """Our reset of the call happens between two frames of the same read. The connection stays usable."""
    pair = opened()
    call_id = pair.call()
    pair.server.send_headers(call_id, [(":status", "200"), ("content-type", "text/html")])
    pair.server.send_data(call_id, b"<html>")
    pair.server.send_headers(call_id, OK, end_stream=True)
    other = pair.call()
    ended = calls(pair.down())
    assert ended == [(1, "UNKNOWN: the answer has content-type 'text/html': no gRPC server is there")]
    pair.settle()
    pair.server.send_headers(other, [*HEAD, *OK], end_stream=True)
    assert calls(pair.down()) == [(3, None)]


@pytest.mark.parametrize(("stop", "ends"), [(0, [1, 3]), (1, [3]), (3, [])])
def test_goaway_ends_what_it_leaves_out_and_nothing_else(stop: int, ends: list[int]) -> None:
    pair = opened()
    ids = [pair.call(), pair.call()]
    failed = calls(pair.down(goaway(stop)))
    assert failed == [(call_id, "UNAVAILABLE: stream reset with REFUSED_STREAM") for call_id in ends]
    assert pair.client.calls_possible == 0
    with pytest.raises(RpcFailed, match="GOAWAY NO_ERROR"):
        pair.client.open_call(FIELDS, None)
    pair.settle()
    for call_id in ids:
        if call_id not in ends:
            assert pair.client.send(call_id, memoryview(b"still")) == 5
            pair.up()
            pair.server.send_headers(call_id, [*HEAD, *OK], end_stream=True)
            assert calls(pair.down()) == [(call_id, None)]


def test_a_server_that_drains_twice() -> None:
    """gRPC servers send GOAWAY with the highest id first, and the real one after a round trip."""
    pair = opened()
    pair.call()
    pair.call()
    assert calls(pair.down(goaway(2**31 - 1))) == []
    assert calls(pair.down(goaway(1, b"age", 11))) == [(3, "UNAVAILABLE: stream reset with REFUSED_STREAM")]
    events = pair.client.lost("socket closed")
    assert calls(events) == [(1, "UNAVAILABLE: socket closed after GOAWAY ENHANCE_YOUR_CALM age")]


def test_goaway_in_the_first_read() -> None:
    pair = Pair()
    events = pair.down(goaway(0))
    assert Opened() in events
    assert pair.client.state is State.DRAINING


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">HBBBLLL", 0, 8, 7, 0, 1, 0, 0),  # on a stream
        struct.pack(">HBBBLL", 0, 4, 7, 0, 0, 0),  # too short
        b"\x02\0\0\0\0\0\0\0\1" + bytes(0x20000 - 9),  # DATA on a stream that was never opened
        b"\0\0\1\4\0\0\0\0\0x",  # SETTINGS of one byte
    ],
)
def test_what_breaks_http2_closes_the_connection(frame: bytes) -> None:
    pair = opened()
    pair.call()
    failed = calls(pair.down(frame + bytes(max(0, 0x20009 - len(frame)) if frame[0] else 0)))
    assert len(failed) == 1
    assert "UNAVAILABLE: the peer broke HTTP/2" in str(failed[0])
    assert pair.client.state is State.CLOSED
    # The GOAWAY, and nothing after it.
    assert pair.client.data_to_send()[3] == 7
    assert pair.client.receive_data(frame) == []
    pair.client.ping()
    assert pair.client.close("ours") == []
    assert pair.client.data_to_send() == b""


def test_the_servers_limit_of_calls() -> None:
    pair = opened(max_concurrent_streams=0)
    assert (pair.client.state, pair.client.calls_possible) == (State.OPEN, 0)
    with pytest.raises(RpcFailed, match="the server allows no more calls"):
        pair.client.open_call(FIELDS, None)
    pair.server.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2})
    assert CallsPossible() in pair.settle()
    ids = [pair.call(), pair.call()]
    assert pair.client.calls_possible == 0
    pair.server.send_headers(ids[0], [*HEAD, *OK], end_stream=True)
    events = pair.down()
    assert CallsPossible() in events
    assert pair.client.calls_possible == 1
    pair.client.cancel(ids[1])
    assert pair.client.calls_possible == 2


def test_credit_returns_with_reading_only() -> None:
    """Bytes of an unfinished message are credited at once, of finished ones when they are read."""
    pair = opened()
    call_id = pair.call()
    pair.server.send_headers(call_id, HEAD)
    message = bytes(3 * STREAM_WINDOW_BYTES)
    left = memoryview(framed(message))
    while left:
        size = min(len(left), MAX_FRAME_BYTES, pair.server.local_flow_control_window(call_id))
        assert size > 0, "an unfinished message must not use the window up"
        pair.server.send_data(call_id, bytes(left[:size]))
        left = left[size:]
        events = pair.settle()
    assert calls(events) == [message]
    # The last frames are not read yet. More than the window cannot arrive.
    sent = 0
    while (size := min(MAX_FRAME_BYTES, pair.server.local_flow_control_window(call_id))) > 0:
        pair.server.send_data(call_id, framed(bytes(size - 5))) if size > 5 else pair.server.send_data(
            call_id, bytes(size)
        )
        sent += size
        pair.settle()
    assert 0 < sent <= STREAM_WINDOW_BYTES
    pair.client.consumed(call_id)
    pair.settle()
    assert pair.server.local_flow_control_window(call_id) > STREAM_WINDOW_BYTES // 2
    assert pair.server.outbound_flow_control_window > CONNECTION_WINDOW_BYTES // 2


def test_unread_messages_of_ended_calls_return_their_credit() -> None:
    pair = opened()
    for _ in range(4 * CONNECTION_WINDOW_BYTES // STREAM_WINDOW_BYTES):
        call_id = pair.call()
        pair.server.send_headers(call_id, HEAD)
        for _ in range(STREAM_WINDOW_BYTES // MAX_FRAME_BYTES):
            pair.server.send_data(call_id, framed(bytes(MAX_FRAME_BYTES - 5)))
        pair.settle()
        pair.client.cancel(call_id)
        pair.settle()
    assert pair.server.outbound_flow_control_window > CONNECTION_WINDOW_BYTES // 2


def test_data_of_a_cancelled_call_returns_its_credit() -> None:
    pair = opened()
    for _ in range(4 * CONNECTION_WINDOW_BYTES // STREAM_WINDOW_BYTES):
        call_id = pair.call()
        pair.server.send_headers(call_id, HEAD)
        pair.down()
        pair.client.cancel(call_id)
        for _ in range(STREAM_WINDOW_BYTES // MAX_FRAME_BYTES):
            pair.server.send_data(call_id, framed(bytes(MAX_FRAME_BYTES - 5)))
        assert calls(pair.down()) == []
        pair.settle()
    assert pair.server.outbound_flow_control_window > CONNECTION_WINDOW_BYTES // 2


def test_sending_stops_at_the_windows_and_resumes() -> None:
    pair = opened()
    call_id = pair.call()
    data = memoryview(bytes(100_000))
    sent = pair.client.send(call_id, data)
    assert sent == 65_535
    assert pair.client.send(call_id, data[sent:]) == 0
    received = sum(len(event.data) for event in pair.up() if isinstance(event, DataReceived))
    assert received == sent
    pair.server.increment_flow_control_window(100_000, call_id)
    assert pair.down() == [WritePossible(call_id)]
    assert pair.client.send(call_id, data[sent:]) == 0
    pair.server.increment_flow_control_window(100_000)
    assert pair.down() == [WritePossible(None)]
    assert pair.client.send(call_id, data[sent:]) == len(data) - sent
    pair.client.end(call_id)
    assert sum(len(event.data) for event in pair.up() if isinstance(event, DataReceived)) == len(data) - sent


def test_our_side_ends_without_blame_when_the_server_has_answered() -> None:
    """RFC 9113, 8.1: a server can answer before it has read the request. NO_ERROR requests no more of it."""
    pair = opened()
    call_id = pair.call()
    pair.server.send_headers(call_id, [*HEAD, *OK], end_stream=True)
    pair.down()
    resets = [event for event in pair.up() if isinstance(event, StreamReset)]
    assert [(event.stream_id, event.error_code) for event in resets] == [(call_id, 0)]
    # If both sides have ended there is nothing to reset.
    call_id = pair.call()
    pair.client.end(call_id)
    pair.up()
    pair.server.send_headers(call_id, [*HEAD, *OK], end_stream=True)
    pair.down()
    assert pair.up() == []


def test_a_message_over_the_limit_is_given_up_at_its_prefix() -> None:
    pair = opened()
    call_id = pair.call(limit_bytes=10)
    pair.server.send_headers(call_id, HEAD)
    pair.server.send_data(call_id, framed(bytes(10)) + prefix(bytes(11)))
    words = "RESOURCE_EXHAUSTED: message of 11 bytes is over the limit of 10"
    assert calls(pair.down()) == [(call_id, words)]
    resets = [event for event in pair.up() if isinstance(event, StreamReset)]
    assert [event.error_code for event in resets] == [8]


def test_closing_sends_goaway_and_fails_calls() -> None:
    pair = opened()
    pair.call()
    assert calls(pair.client.close("channel closed")) == [(1, "UNAVAILABLE: channel closed")]
    assert pair.client.data_to_send() == goaway(0)
    assert pair.client.state is State.CLOSED


def test_the_request_as_the_server_reads_it() -> None:
    pair = opened()
    pair.client.open_call(FIELDS, None)
    (request,) = [event for event in pair.up() if isinstance(event, RequestReceived)]
    assert tuple((bytes(name), bytes(value)) for name, value in request.headers) == FIELDS


def test_a_ping_is_answered() -> None:
    pair = opened()
    pair.client.ping()
    assert not [event for event in pair.up() if isinstance(event, WindowUpdated)]
    assert pair.server.data_to_send()[3] == 6


FRAMES = st.lists(
    st.one_of(
        st.tuples(st.just(7), st.just(0), st.binary(min_size=8, max_size=40)),
        st.tuples(st.sampled_from([0, 1, 4, 6, 8, 99]), st.integers(0, 9), st.binary(max_size=40)),
        st.tuples(st.just(7), st.integers(1, 9), st.binary(max_size=40)),
        st.tuples(st.just(7), st.just(0), st.binary(max_size=7)),
    ),
    max_size=8,
)


@given(FRAMES, st.lists(st.integers(1, 60), max_size=30))
def test_cutting_takes_out_goaway_and_nothing_else(frames: list[tuple[int, int, bytes]], sizes: list[int]) -> None:
    wires = [
        len(payload).to_bytes(3, "big") + bytes([kind, 0]) + stream_id.to_bytes(4, "big") + payload
        for kind, stream_id, payload in frames
    ]
    taken = [kind == 7 and stream_id == 0 and len(payload) >= 8 for kind, stream_id, payload in frames]
    left, cutter = memoryview(b"".join(wires)), FrameCutter()
    rest, goaways = b"", []
    for size in (*sizes, len(left)):
        for part in cutter.cut(left[:size]):
            if isinstance(part, Goaway):
                goaways.append(part)
            else:
                rest += part
        left = left[size:]
    assert rest == b"".join(wire for wire, out in zip(wires, taken, strict=True) if not out)
    assert [struct.pack(">LL", each.last_stream_id, each.code) + each.debug for each in goaways] == [
        bytes([payload[0] & 0x7F]) + payload[1:] for (_, _, payload), out in zip(frames, taken, strict=True) if out
    ]


def test_a_long_goaway_is_read_to_its_end_and_kept_short() -> None:
    cutter = FrameCutter()
    length = 1_000_000
    wire = length.to_bytes(3, "big") + b"\7\0\0\0\0\0" + bytes(length) + b"\0\0\0\4\0\0\0\0\0"
    parts = [part for at in range(0, len(wire), 65_536) for part in cutter.cut(memoryview(wire)[at : at + 65_536])]
    assert isinstance(parts[0], Goaway)
    assert len(parts[0].debug) < 20_000
    assert b"".join(bytes(part) for part in parts[1:] if not isinstance(part, Goaway)) == b"\0\0\0\4\0\0\0\0\0"


def test_status_is_a_number_to_h2_and_a_failure_to_us() -> None:
    pair = opened()
    call_id = pair.call()
    pair.server.send_headers(call_id, [(":status", "503")], end_stream=True)
    (ended,) = [event for event in pair.down() if isinstance(event, CallEnded)]
    assert ended.failure is not None
    assert ended.failure.status is Status.UNAVAILABLE
