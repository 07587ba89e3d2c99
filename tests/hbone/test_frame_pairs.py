"""Every pair of frames in one read: the same events, output and states as in two reads, or byte by byte."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hbone import frames
from hbone.engine import Engine
from hbone.errors import ErrorCode
from hbone.events import ConnectionFailed, DataReceived, Event
from hbone.frames import frame
from hbone.hpack_cache import BlockEncoder
from hbone.settings import Http2Settings, Role
from hbone.stream_state import StreamState

CONNECT = ((b":method", b"CONNECT"), (b":authority", b"10.0.0.2:8080"))
POST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a"))
END = frames.END_STREAM
ALL = frames.END_HEADERS


def headers(stream_id: int, fields: tuple[tuple[bytes, bytes], ...], flags: int = ALL) -> bytes:
    return frame(frames.HEADERS, flags, stream_id, BlockEncoder().encode(fields))


def setting(key: int, value: int) -> bytes:
    return frame(frames.SETTINGS, 0, 0, frames.SETTING.pack(key, value))


def window_update(stream_id: int, size: int) -> bytes:
    return frame(frames.WINDOW_UPDATE, 0, stream_id, frames.U32.pack(size))


def reset(stream_id: int, code: int = ErrorCode.CANCEL) -> bytes:
    return frame(frames.RST_STREAM, 0, stream_id, frames.U32.pack(code))


#: For both roles. Stream 1 is an answered tunnel, 3 waits for its answer, 5 is a call that the engine under test
#: has ended, 7 and those above are idle. A client has reset 9, and 7 before it was answered.
COMMON = {
    **{f"DATA {n}": frame(frames.DATA, 0, n, b"data") for n in (1, 3, 5, 7, 9)},
    **{f"DATA END {n}": frame(frames.DATA, END, n, b"data") for n in (1, 3, 5, 9)},
    "DATA empty": frame(frames.DATA, 0, 1),
    "DATA END empty": frame(frames.DATA, END, 1),
    "DATA padded": frame(frames.DATA, frames.PADDED, 1, b"\x03data..."),
    "DATA END padded": frame(frames.DATA, END | frames.PADDED, 1, b"\x03data..."),
    "DATA only padding": frame(frames.DATA, frames.PADDED, 1, b"\x03..."),
    "DATA too much padding": frame(frames.DATA, frames.PADDED, 1, b"\x09..."),
    **{f"RST_STREAM {n}": reset(n) for n in (1, 3, 5, 7, 9)},
    "RST_STREAM refused": reset(3, ErrorCode.REFUSED_STREAM),
    **{f"WINDOW_UPDATE {n}": window_update(n, 1000) for n in (0, 1, 5, 7, 9)},
    "WINDOW_UPDATE 1 by 0": window_update(1, 0),
    "WINDOW_UPDATE 1 over": window_update(1, frames.MAX_WINDOW),
    "WINDOW_UPDATE 0 over": window_update(0, frames.MAX_WINDOW),
    "SETTINGS": frame(frames.SETTINGS, 0, 0),
    "SETTINGS ACK": frame(frames.SETTINGS, frames.ACK, 0),
    "SETTINGS window": setting(frames.Setting.INITIAL_WINDOW_SIZE, 70_000),
    "SETTINGS window shut": setting(frames.Setting.INITIAL_WINDOW_SIZE, 0),
    "SETTINGS frame": setting(frames.Setting.MAX_FRAME_SIZE, 20_000),
    "SETTINGS streams": setting(frames.Setting.MAX_CONCURRENT_STREAMS, 0),
    "SETTINGS table": setting(frames.Setting.HEADER_TABLE_SIZE, 0),
    "SETTINGS wrong": setting(frames.Setting.MAX_FRAME_SIZE, 1),
    "PING": frame(frames.PING, 0, 0, b"12345678"),
    "PING ACK": frame(frames.PING, frames.ACK, 0, b"12345678"),
    "PRIORITY": frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\1"),
    "PRIORITY of itself": frame(frames.PRIORITY, 0, 1, b"\0\0\0\1\1"),
    "GOAWAY": frame(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(1, 0)),
    "GOAWAY all": frame(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(frames.MAX_STREAM_ID, 0)),
    "PUSH_PROMISE": frame(frames.PUSH_PROMISE, ALL, 1, b"\0\0\0\2"),
    "CONTINUATION": frame(frames.CONTINUATION, ALL, 7, BlockEncoder().encode(CONNECT)[7:]),
    "unknown": frame(0x77, 0, 1, b"unknown"),
    "too long": frames.HEADER.pack(0xFFFF, 0xFF, frames.DATA, 0, 1),
}
FRAMES: dict[Role, dict[str, bytes]] = {
    Role.SERVER: {
        **COMMON,
        "HEADERS 7": headers(7, CONNECT),
        "HEADERS END 7": headers(7, CONNECT, ALL | END),
        "HEADERS cut 7": frame(frames.HEADERS, 0, 7, BlockEncoder().encode(CONNECT)[:7]),
        "HEADERS 11": headers(11, POST),
        "HEADERS malformed 7": headers(7, ((b":method", b"CONNECT"), (b":path", b"/"))),
        "HEADERS undecodable 7": frame(frames.HEADERS, ALL, 7, b"\xff\xff\xff\xff\xff\xff"),
        "HEADERS priority 7": frame(
            frames.HEADERS, ALL | frames.PRIORITY_FLAG, 7, b"\0\0\0\0\1" + BlockEncoder().encode(CONNECT)
        ),
        **{f"trailers {n}": headers(n, ((b"x", b"y"),), ALL | END) for n in (1, 5, 9)},
        "HEADERS 1": headers(1, CONNECT),
        "HEADERS even": headers(2, CONNECT),
    },
    Role.CLIENT: {
        **COMMON,
        **{f"200 {n}": headers(n, ((b":status", b"200"),)) for n in (1, 3, 7, 9)},
        "200 END 3": headers(3, ((b":status", b"200"),), ALL | END),
        "503 3": headers(3, ((b":status", b"503"),)),
        "503 END 3": headers(3, ((b":status", b"503"),), ALL | END),
        "100 3": headers(3, ((b":status", b"100"),)),
        "101 3": headers(3, ((b":status", b"101"),)),
        "no status 3": headers(3, ((b"x", b"y"),)),
        **{f"trailers {n}": headers(n, ((b"x", b"y"),), ALL | END) for n in (1, 5, 9)},
    },
}


class Lent:
    """Lends output buffers, and counts those that were not returned."""

    def __init__(self) -> None:
        self.out = 0

    def acquire(self) -> memoryview:
        self.out += 1
        return memoryview(bytearray(64 * 1024))

    def release(self, buffer: memoryview) -> None:
        self.out -= 1


def prepared(role: Role) -> tuple[Engine, Lent]:
    """An engine with streams in various states, see ``COMMON``."""
    lent = Lent()
    engine = Engine(role, Http2Settings(), lent)
    engine.start()
    if role is Role.SERVER:
        opening = frames.PREFACE + frame(frames.SETTINGS, 0, 0)
        engine.receive_data(opening + headers(1, CONNECT) + headers(3, CONNECT) + headers(5, POST))
        engine.respond(1, 200)
        engine.respond(5, 200, ended=True)
    else:
        engine.receive_data(frame(frames.SETTINGS, 0, 0))
        for fields in (CONNECT, CONNECT, POST, CONNECT, CONNECT):
            engine.open_stream(fields, tunnel=fields is CONNECT)
        for stream_id in (7, 9):
            engine.reset_stream(stream_id, ErrorCode.CANCEL)
        engine.receive_data(headers(1, ((b":status", b"200"),)) + headers(5, ((b":status", b"200"),)))
        engine.end_stream(5)
    engine.output.taken()
    return engine, lent


def comparable(events: Iterable[Event]) -> list[object]:
    """Return the events in a form for comparisons: payload as (stream, bytes)."""
    found: list[object] = []
    for event in events:
        if isinstance(event, DataReceived):
            data = b"".join(event.chunks)
            assert len(data) == event.size
            found.append((event.stream_id, data))
        else:
            found.append(event)
    return found


def merged(events: list[object]) -> list[object]:
    """Neighbouring payload of a stream as one, as a read has it."""
    found: list[object] = []
    for event in events:
        before = found[-1] if found else None
        if isinstance(event, tuple) and isinstance(before, tuple) and before[0] == event[0]:
            found[-1] = (event[0], before[1] + event[1])
        else:
            found.append(event)
    return found


def fed(role: Role, reads: Iterable[bytes], *, taking: bool = False) -> tuple[object, ...]:
    """All that can be seen of an engine after ``reads``; ``taking``: its output is sent after each."""
    engine, lent = prepared(role)
    seen: list[object] = []
    output = b""
    for read in reads:
        seen = merged([*seen, *comparable(engine.receive_data(read))])
        if taking:
            output += b"".join(engine.output.views())
            engine.output.taken()
    output += b"".join(engine.output.views())
    engine.output.taken()
    states = tuple(engine.stream_state(stream_id) for stream_id in range(1, 13, 2))
    # Ended streams leave no state, and an idle engine has no buffer.
    live = [state for state in states if state not in (StreamState.IDLE, StreamState.CLOSED, StreamState.RESET)]
    assert engine.open_streams == len(live)
    for stream_id in range(1, 13, 2):
        engine.reset_stream(stream_id, ErrorCode.CANCEL)
    engine.output.taken()
    assert engine.open_streams == 0
    assert lent.out == 0
    return (
        seen,
        output,
        states,
        engine.failed,
        engine.going_away,
        engine.accepts_streams,
        engine.peer_max_frame_bytes,
    )


@pytest.mark.parametrize(
    ("role", "first"), [(role, first) for role in Role for first in FRAMES[role]], ids=lambda value: str(value)
)
def test_frame_pairs_have_one_result_however_they_are_cut(role: Role, first: str) -> None:
    for second in FRAMES[role]:
        one, two = FRAMES[role][first], FRAMES[role][second]
        together = fed(role, [one + two])
        assert fed(role, [one, two]) == together, second
        assert fed(role, [one, two], taking=True) == together, second
        assert fed(role, (bytes((byte,)) for byte in one + two)) == together, second


@pytest.mark.parametrize("role", Role)
def test_frames_cause_every_kind_of_event_and_error(role: Role) -> None:
    """The table of frames is worth its name only while it brings about each kind of result."""
    kinds = set()
    for data in FRAMES[role].values():
        seen, *_ = fed(role, [data])
        assert isinstance(seen, list)
        kinds |= {type(event).__name__ for event in seen}
        kinds |= {event.code for event in seen if isinstance(event, ConnectionFailed)}
    expected = {"tuple", "StreamEnded", "StreamReset", "SettingsReceived", "PingAcknowledged", "GoawayReceived"}
    expected |= {ErrorCode.PROTOCOL_ERROR, ErrorCode.FLOW_CONTROL_ERROR, ErrorCode.FRAME_SIZE_ERROR}
    expected |= {"RequestReceived", ErrorCode.COMPRESSION_ERROR} if role is Role.SERVER else {"ResponseReceived"}
    assert expected <= kinds
