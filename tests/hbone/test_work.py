"""The cost that a peer is charged for its work: slices, pauses, the end of the connection; and that honest peers
are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hpack import Encoder

from hbone import frame_costs, frames
from hbone.engine import Engine
from hbone.errors import ErrorCode
from hbone.events import ConnectionFailed, DataReceived, RequestReceived, StreamEnded, StreamReset
from hbone.flow import PeerQuota, PeerQuotas
from hbone.frames import frame
from hbone.limits import Limits
from hbone.settings import Http2Settings, Role
from tests.hbone.wire import OPENING, plain, request, server, split, take

SMALL = frame(frames.DATA, 0, 1, b"x")
SLICE = Limits().slice_units


def opened(**changes: float) -> Engine:
    """A server with stream 1 as a tunnel, and other limits."""
    engine = server(limits=Limits(**changes))  # type: ignore[arg-type]
    engine.receive_data(OPENING + request(1))
    engine.respond(1, 200)
    take(engine)
    return engine


def failure(events: list[object]) -> ConnectionFailed | None:
    return next((event for event in events if isinstance(event, ConnectionFailed)), None)


# Slices


def test_a_read_is_worked_off_in_slices() -> None:
    engine = opened()
    events: list[object] = list(engine.receive_data(SMALL * 2500, 0.0, SLICE))
    sizes = [sum(event.size for event in events if isinstance(event, DataReceived))]
    while engine.unparsed:
        more = engine.receive_data(b"", 0.0, SLICE)
        sizes.append(sum(event.size for event in more if isinstance(event, DataReceived)))
    assert sizes == [SLICE + 1, SLICE + 1, 2500 - 2 * (SLICE + 1)]


def test_bulk_is_not_cut_into_slices() -> None:
    engine = server(initial_window_bytes=1 << 20)
    engine.receive_data(OPENING + request(1))
    engine.respond(1, 200)
    engine.receive_data(frame(frames.DATA, 0, 1, bytes(16_384)) * 16, 0.0, 1)
    assert not engine.unparsed


@pytest.mark.parametrize("units", [0, 1, 7, 50])
def test_events_do_not_depend_on_slices(units: int) -> None:
    wire = (
        SMALL * 3
        + request(3)
        + frame(frames.DATA, frames.PADDED, 1, b"\x02xx\0\0")
        + frame(frames.PING, 0, 0, bytes(8))
        + frame(frames.RST_STREAM, 0, 3, bytes(4))
        + frame(frames.DATA, frames.END_STREAM, 1, b"end")
    )
    whole = plain(opened().receive_data(wire))
    engine = opened()
    sliced = []
    buffer = bytearray(wire)
    sliced += engine.receive_data(buffer[: len(wire) // 2], 0.0, units)
    sliced += engine.receive_data(buffer[len(wire) // 2 :], 0.0, units)
    while engine.unparsed:
        sliced += engine.receive_data(b"", 0.0, units)
    assert plain(sliced) == whole


@pytest.mark.parametrize("units", [0, 100, SLICE])
def test_a_long_header_block_is_decoded_in_slices(units: int) -> None:
    """1,700 table insertions took seven milliseconds in one call. Later frames wait for the rest of the block."""
    block = Encoder().encode([(b":method", b"CONNECT"), (b":authority", b"a:1")]) + b"\x40\x01a\x00" * 1700
    wire = frame(frames.HEADERS, frames.END_HEADERS, 3, block) + frame(frames.PING, 0, 0, bytes(8)) + SMALL
    whole = opened().receive_data(wire)
    engine = opened()
    sliced, calls = engine.receive_data(bytearray(wire), 0.0, units), 1
    while engine.unparsed:
        assert not any(isinstance(event, DataReceived) for event in sliced)
        sliced += engine.receive_data(b"", 0.0, units)
        calls += 1
    assert calls >= 1700 * 5 // max(SLICE, units) / 2
    assert [type(event) for event in sliced] == [type(event) for event in whole]
    assert isinstance(sliced[0], RequestReceived)
    assert sliced[0].head == whole[0].head  # type: ignore[union-attr]


def test_a_connection_that_ends_meanwhile_forgets_the_header_block() -> None:
    engine = opened()
    wrong = b"\x40\x01a\x00" * 400 + b"\xff\xff\xff"
    events = engine.receive_data(frame(frames.HEADERS, frames.END_HEADERS, 3, wrong), 0.0, 100)
    while engine.unparsed:
        events += engine.receive_data(b"", 0.0, 100)
    end = failure(list(events))
    assert end is not None
    assert end.code == ErrorCode.COMPRESSION_ERROR
    assert not engine.unparsed


def test_unparsed_bytes_are_a_copy_of_the_callers_buffer() -> None:
    engine = opened()
    buffer = bytearray(SMALL * 4)
    assert len(plain(engine.receive_data(buffer, 0.0, 0))) == 1
    buffer[:] = bytes(len(buffer))
    rest = []
    while engine.unparsed:
        rest += engine.receive_data(b"", 0.0, 0)
    assert plain(rest) == [(1, b"xxx")]


def test_a_failed_connection_keeps_nothing() -> None:
    engine = opened()
    engine.receive_data(frame(frames.PING, 0, 0, bytes(7)) + SMALL * 10, 0.0, 0)
    assert engine.failed
    assert not engine.unparsed


# Pauses


def test_overdrawn_work_pauses_until_it_is_balanced() -> None:
    engine = opened(work_burst=100, work_rate=1000.0)
    engine.receive_data(b"", 0.0)
    engine.receive_data(SMALL * 50, 1.0)
    assert engine.pause_s == 0.0
    engine.receive_data(SMALL * 150, 1.0)
    assert engine.pause_s == pytest.approx(0.1)
    engine.receive_data(SMALL, 1.2)
    assert engine.pause_s == 0.0


def test_a_peer_that_never_stops_is_told_to_calm_down() -> None:
    engine = opened(work_burst=100, work_rate=1000.0, stall_burst_s=1.0, stall_rate=0.0)
    now_s, events = 0.0, []
    for _ in range(100):
        events = engine.receive_data(SMALL * 100, now_s)
        if engine.failed:
            break
        now_s += engine.pause_s
    assert 0.7 <= now_s <= 1.1
    assert isinstance(events[-1], ConnectionFailed)
    assert events[-1].code == ErrorCode.ENHANCE_YOUR_CALM


def test_connections_of_one_peer_share_its_work() -> None:
    share = PeerQuota(Limits(peer_work_burst=100, peer_work_rate=100.0))
    first, second = opened(), opened()
    first.share(share)
    second.share(share)
    first.receive_data(SMALL * 100, 1.0)
    assert first.pause_s == 0.0
    second.receive_data(SMALL * 100, 1.0)
    assert second.pause_s == pytest.approx(1.0)


def test_a_peer_that_connects_again_finds_its_debt() -> None:
    shares, most = PeerQuotas(), Limits(peer_work_burst=1)
    share = shares.join("spiffe://td/ns/a/sa/b", most)
    share.work.spend(0.0, 100)
    shares.leave(share)
    assert shares.join("spiffe://td/ns/a/sa/b", most) is share
    assert shares.join("spiffe://td/ns/a/sa/other", most) is not share


def test_shares_are_bounded_but_those_in_use_stay() -> None:
    shares, most = PeerQuotas(), Limits()
    used = shares.join("used", most)
    for number in range(5000):
        shares.leave(shares.join(f"peer {number}", most))
    assert len(shares) == 4096
    assert shares.join("used", most) is used


# What is dear, each for a simulated minute


def inserts() -> Iterator[bytes]:
    block = Encoder().encode([(b":method", b"CONNECT"), (b":authority", b"a:1")]) + b"\x40\x01a\x00" * 1700
    for stream_id in count(3, 2):
        yield frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream_id, block)


def huffman() -> Iterator[bytes]:
    fields = [(b":method", b"CONNECT"), (b":authority", b"a:1")]
    for stream_id in count(3, 2):
        block = Encoder().encode([*fields, (b"x%d" % stream_id, b"0" * 60_000)])
        yield frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream_id, block)


def small_data() -> Iterator[bytes]:
    while True:
        yield SMALL * 1000


def padded_data() -> Iterator[bytes]:
    while True:
        yield frame(frames.DATA, frames.PADDED, 1, b"\x05x" + bytes(5)) * 1000


def reset_data() -> Iterator[bytes]:
    while True:
        yield frame(frames.DATA, 0, 3, b"x") * 1000


def refused() -> Iterator[bytes]:
    for stream_id in count(5, 2):
        yield request(stream_id, flags=frames.END_HEADERS | frames.END_STREAM)


def opened_and_reset() -> Iterator[bytes]:
    for stream_id in count(5, 2):
        yield request(stream_id)
        yield frame(frames.RST_STREAM, 0, stream_id, bytes(4))


@pytest.mark.parametrize(
    "attack", [inserts, huffman, small_data, padded_data, reset_data, refused, opened_and_reset]
)
def test_expensive_peers_are_paused_then_disconnected(attack: Callable[[], Iterator[bytes]]) -> None:
    """A peer without limit of its own is held to its rate for as long as the pauses may last, and then ended."""
    most = Limits()
    engine = opened()
    engine.receive_data(request(3), 0.0)
    engine.reset_stream(3, ErrorCode.CANCEL)
    now_s = 0.0
    for piece in attack():
        events = engine.receive_data(piece, now_s)
        end = failure(list(events))
        if end is not None:
            assert end.code == ErrorCode.ENHANCE_YOUR_CALM, end
            assert end.detail == "too much work for its payload"
            break
        for event in events:
            if isinstance(event, RequestReceived):
                if attack is opened_and_reset:
                    engine.respond(event.stream_id, 200)
                else:
                    engine.respond(event.stream_id, 503, ended=True)
            elif isinstance(event, DataReceived):
                engine.acknowledge(event.stream_id, event.size)
        take(engine)
        now_s += engine.pause_s
        assert now_s < 60.0
    # The work of an attack is bounded by the burst, and the rate for the time that it was allowed to continue. In
    # this test time passes only during pauses, so an attack that is never slowed down would never end. During the
    # burst, expensive blocks are followed by a break that is not charged as a pause.
    assert 0.9 * most.stall_burst_s <= now_s <= 1.1 * most.stall_burst_s + 1.0


# What honest peers do


def honest(engine: Engine, wire: Iterator[bytes], *, per_second: int, seconds: int, batch: int = 100) -> None:
    """Feed ``per_second`` pieces. The engine must never request a pause."""
    for number, piece in enumerate(wire):
        now_s = number // batch * batch / per_second
        if now_s >= seconds:
            return
        for event in engine.receive_data(piece, now_s):
            assert not isinstance(event, ConnectionFailed | StreamReset), event
            if isinstance(event, RequestReceived):
                engine.respond(event.stream_id, 200)
            elif isinstance(event, DataReceived):
                engine.acknowledge(event.stream_id, event.size)
            elif isinstance(event, StreamEnded):
                engine.end_stream(event.stream_id)
        assert engine.pause_s == 0.0
        take(engine)


def test_ten_thousand_requests_a_second_are_fine() -> None:
    def wire() -> Iterator[bytes]:
        while True:
            yield frame(frames.DATA, 0, 1, bytes(100))

    honest(opened(), wire(), per_second=10_000, seconds=10)


def test_two_and_a_half_thousand_tunnels_a_second_are_fine() -> None:
    def wire() -> Iterator[bytes]:
        encoder = Encoder()
        for stream_id in count(3, 2):
            fields = [
                (b":method", b"CONNECT"),
                (b":authority", b"10.0.0.2:8080"),
                (b"baggage", b"k8s.cluster.name=Kubernetes,k8s.namespace.name=default,k8s.pod.name=client" * 2),
                (b"traceparent", b"00-%032x-%016x-01" % (stream_id, stream_id)),
            ]
            head = frame(frames.HEADERS, frames.END_HEADERS, stream_id, encoder.encode(fields))
            data = frame(frames.DATA, frames.END_STREAM, stream_id, b"x" * 200)
            yield head + data

    # Each is answered within the read that brought it, so its 200 comes after its work was paid for.
    honest(opened(), wire(), per_second=2500, seconds=5)


def test_a_thousand_tunnels_without_bytes_a_second_are_fine() -> None:
    def wire() -> Iterator[bytes]:
        for stream_id in count(3, 2):
            yield request(stream_id)
            yield frame(frames.DATA, frames.END_STREAM, stream_id)

    engine = Engine(Role.SERVER, Http2Settings(limits=Limits(control_rate=10_000.0)))
    engine.receive_data(OPENING)
    take(engine)
    honest(engine, wire(), per_second=2000, seconds=5)


# Single costs


def test_settings_move_the_windows_of_streams_once() -> None:
    engine = server()
    engine.receive_data(OPENING + b"".join(request(stream_id) for stream_id in range(1, 200, 2)))
    for stream_id in range(1, 200, 2):
        engine.respond(stream_id, 200)
    entries = b"".join(frames.SETTING.pack(4, value) for value in range(10_000, 10_682))
    engine.receive_data(frame(frames.SETTINGS, 0, 0, entries))
    room = engine.reserve(1, 1 << 20)
    assert room is not None
    assert len(room) == 10_681


def test_an_answer_of_200_returns_what_the_request_cost() -> None:
    engine = opened(work_burst=1000, work_rate=1.0)
    for stream_id in range(3, 403, 2):
        engine.receive_data(request(stream_id) + frame(frames.DATA, frames.END_STREAM, stream_id, bytes(1024)))
        engine.respond(stream_id, 200)
        engine.end_stream(stream_id)
        engine.acknowledge(stream_id, 1024)
        take(engine)
    assert engine.pause_s <= 200 * frame_costs.FRAME_UNITS  # far from 200 requests


def test_records_of_a_few_bytes_are_paid_for() -> None:
    engine = opened(work_burst=100, work_rate=1000.0)
    engine.receive_data(b"", 1.0)
    engine.charge_records(200 * frame_costs.RECORD_BYTES)
    engine.receive_data(b"", 1.0)
    assert engine.pause_s == pytest.approx(0.1)


def test_an_answer_of_200_ends_the_pause_for_its_request() -> None:
    engine = opened(work_burst=100, work_rate=100.0)
    engine.receive_data(request(3), 1.0)
    assert engine.pause_s > 1.0
    engine.respond(3, 200)
    assert engine.overdrawn_s(1.0) == 0.0


def test_tunnels_dropped_with_their_connection_are_paid_by_the_peer() -> None:
    share = PeerQuota(Limits(peer_work_burst=100 * frame_costs.IDLE_STREAM_UNITS, peer_work_rate=100.0))
    for _ in range(3):
        engine = server()
        engine.share(share)
        engine.receive_data(OPENING + b"".join(request(stream_id) for stream_id in range(1, 100, 2)), 1.0)
        for stream_id in range(1, 100, 2):
            engine.respond(stream_id, 200)
            take(engine)
        engine.leave_share()
        engine.leave_share()
    assert (
        40 * frame_costs.IDLE_STREAM_UNITS <= share.work.overdrawn_s * 100.0 <= 60 * frame_costs.IDLE_STREAM_UNITS
    )


def test_work_that_ends_a_connection_is_paid_by_the_peer() -> None:
    share = PeerQuota(Limits(peer_work_burst=1000, peer_work_rate=1000.0))
    engine = opened()
    engine.share(share)
    engine.receive_data(SMALL * 3000 + frame(frames.PING, 0, 0, bytes(7)), 1.0)
    assert engine.failed
    assert share.work.overdrawn_s >= 2.0


def test_goaway_of_an_overdrawn_peer_is_on_the_wire() -> None:
    engine = opened(work_burst=1000, work_rate=1.0, stall_burst_s=0.0, stall_rate=0.0)
    engine.receive_data(SMALL * 2000, 1.0)
    kinds = [(kind, payload[4:8]) for kind, _, _, payload in split(take(engine)) if kind == frames.GOAWAY]
    assert kinds == [(frames.GOAWAY, (ErrorCode.ENHANCE_YOUR_CALM).to_bytes(4))]
