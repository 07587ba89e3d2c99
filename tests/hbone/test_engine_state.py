"""Engines that move as values: frozen between any two calls, continued elsewhere, and the peer notices nothing."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import msgspec
import pytest
from hpack import Encoder
from hypothesis import settings

from hbone import engine_state as states
from hbone.engine import Engine
from hbone.engine_state import EngineState, Unfrozen, engine_of, engine_state
from hbone.events import DataReceived, Event, RequestReceived, StreamEnded
from hbone.flow import PeerQuota, WindowPool
from hbone.frames import CONTINUATION, DATA, HEADERS, PREFACE, WINDOW_UPDATE, frame, settings_frame
from hbone.limits import Limits
from hbone.settings import Role, client_settings, server_settings
from tests.generated import examples
from tests.hbone.test_engine_against_h2 import Differential


def moved(engine: Engine, now_s: float = 0.0) -> Engine:
    """The same connection in another process: its state has been bytes."""
    data = msgspec.msgpack.encode(engine_state(engine, now_s))
    again = engine_of(msgspec.msgpack.decode(data, type=EngineState), None, now_s)
    assert engine_state(again, now_s) == engine_state(engine, now_s)
    return again


class MovesAlways(Differential):
    """Each call meets an engine that was made for it."""

    _engine: Engine
    _stays = False

    @property
    def engine(self) -> Engine:
        if not self._stays:
            self._engine = moved(self._engine)
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = engine

    def we_send(self, data: st.DataObject, size: int, many: bool) -> None:
        assert self.engine
        self._stays = True  # a reservation of room is not part of the state
        try:
            super().we_send(data, size, many)
        finally:
            self._stays = False

    def teardown(self) -> None:
        if hasattr(self, "_engine"):
            super().teardown()


class OursIsClient(MovesAlways):
    role = Role.CLIENT


class OursIsServer(MovesAlways):
    role = Role.SERVER


for machine in (OursIsClient, OursIsServer):
    machine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestOursIsClient = OursIsClient.TestCase
TestOursIsServer = OursIsServer.TestCase


def conversation() -> bytes:
    """What a client sends that indexes its fields (as Envoy does), pads, and cuts a header block."""
    encoder = Encoder()
    wire = PREFACE + settings_frame({4: 70_000})
    for number, stream_id in enumerate((1, 3, 5, 7)):
        fields = [
            (b":method", b"CONNECT"),
            (b":authority", b"10.0.0.%d:80" % (number % 2)),
            (b"baggage", b"k8s=%d" % number),
        ]
        block = encoder.encode(fields, huffman=bool(number & 1))
        half = len(block) // 2
        wire += frame(HEADERS, 0, stream_id, block[:half]) + frame(CONTINUATION, 4, stream_id, block[half:])
        wire += frame(DATA, 8, stream_id, bytes((3,)) + b"data %d" % number + b"\0\0\0")
        wire += frame(0xEE, 0, 0, b"unknown") + frame(DATA, stream_id == 5, stream_id, b"more")
    return wire


def summary(events: list[Event]) -> list[object]:
    """Events with the payload of each stream joined, however it was cut."""
    heads = [event for event in events if isinstance(event, RequestReceived | StreamEnded)]
    data: dict[int, bytes] = {}
    for event in events:
        if isinstance(event, DataReceived):
            data[event.stream_id] = data.get(event.stream_id, b"") + b"".join(map(bytes, event.chunks))
    return [heads, data]


def copied(events: list[Event]) -> list[Event]:
    return [
        dataclasses.replace(event, chunks=[memoryview(bytes(chunk)) for chunk in event.chunks])
        if isinstance(event, DataReceived)
        else event
        for event in events
    ]


def test_a_move_at_every_offset_of_what_the_peer_sends() -> None:
    wire = conversation()
    whole = Engine(Role.SERVER, server_settings())
    wanted = summary(copied(whole.receive_data(wire)))
    assert len(wanted[1]) == 4  # type: ignore[arg-type]
    end = engine_state(whole, 0.0)
    for cut in range(len(wire) + 1):
        engine = Engine(Role.SERVER, server_settings())
        events = copied(engine.receive_data(wire[:cut]))
        engine = moved(engine)
        events += copied(engine.receive_data(wire[cut:]))
        assert summary(events) == wanted
        state = engine_state(engine, 0.0)
        assert state.table == end.table
        assert state.output == end.output
        assert state.streams == end.streams


def test_what_a_slice_has_left_moves() -> None:
    wire = conversation()
    engine = Engine(Role.SERVER, server_settings())
    events = copied(engine.receive_data(wire, 1.0, 30))
    assert engine.unparsed
    moves = 0
    while engine.unparsed:
        engine = moved(engine, 1.0)
        moves += 1
        events += copied(engine.receive_data(b"", 1.0, 30))
    assert moves > 3
    whole = Engine(Role.SERVER, server_settings())
    assert summary(events) == summary(copied(whole.receive_data(wire)))


def test_output_that_fills_more_than_a_buffer_moves() -> None:
    engine = Engine(Role.CLIENT, client_settings())
    engine.start()
    engine.receive_data(settings_frame({4: 1_000_000}) + frame(WINDOW_UPDATE, 0, 0, (900_000).to_bytes(4)))
    stream_id = engine.open_stream([(b":method", b"CONNECT"), (b":authority", b"a:1")])
    assert engine.send_data(stream_id, b"x" * 900_000) > 250_000
    for number in range(100):
        engine.ping(number.to_bytes(8))
    output = b"".join(map(bytes, engine.output.views()))
    assert len(output) > 262_144
    again = moved(moved(engine))
    assert b"".join(map(bytes, again.output.views())) == output


def test_budgets_have_ages_so_that_clocks_need_not_agree() -> None:
    engine = Engine(Role.SERVER, server_settings())
    engine.receive_data(conversation(), 1000.0)
    state = engine_state(engine, 1002.5)
    assert state.control.age_s == 2.5
    again = engine_of(state, None, 7.0)
    assert engine_state(again, 7.0) == state


def test_a_failed_engine_and_one_within_a_long_block_do_not_move() -> None:
    engine = Engine(Role.SERVER, server_settings())
    engine.receive_data(b"GET / HTTP/1.1\r\n\r\nxxxxxxxx")
    with pytest.raises(Unfrozen, match="failed"):
        engine_state(engine, 0.0)
    engine = Engine(Role.SERVER, server_settings())
    long = Encoder().encode(
        [(b":method", b"CONNECT"), (b":authority", b"a:1"), *[(b"x-%d" % n, b"y") for n in range(900)]]
    )
    wire = PREFACE + settings_frame({}) + frame(HEADERS, 4, 1, long)
    engine.receive_data(wire, 0.0, 1)
    seen = False
    while engine.unparsed:
        try:
            engine = moved(engine)
        except Unfrozen:
            seen = True
        engine.receive_data(b"", 0.0, 200)
    assert seen
    moved(engine)


@pytest.mark.parametrize(
    "change",
    [
        {"data_stream_open": True, "data_stream_id": 99},
        {"table": states.TableState(entries=(), size=5, most=4096)},
        {"table": states.TableState(entries=(), size=0, most=1 << 20)},
        {"table": states.TableState(entries=((b"a", b"b" * 5000),), size=40, most=4096)},
    ],
)
def test_contradictions_are_refused(change: dict[str, object]) -> None:
    state = engine_state(Engine(Role.SERVER, server_settings()), 0.0)
    with pytest.raises(ValueError):
        engine_of(msgspec.structs.replace(state, **change), None, 0.0)


def test_windows_that_have_grown_are_counted_where_they_come_to() -> None:
    engine = Engine(Role.CLIENT, client_settings())
    engine.start()
    engine._window.size += 3_000_000
    again = moved(engine)
    share, pod = PeerQuota(Limits(), WindowPool(1000)), WindowPool(1000)
    again.share(share, pod)
    assert share.window_bytes == pod.used == 3_000_000
    again.leave_share()
    assert share.window_bytes == pod.used == 0


def test_a_state_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    state = msgspec.to_builtins(engine_state(Engine(Role.SERVER, server_settings()), 0.0))
    state["of_tomorrow"] = 1
    state["settings"]["limits"]["of_tomorrow"] = 2
    assert msgspec.convert(state, EngineState).role is Role.SERVER
