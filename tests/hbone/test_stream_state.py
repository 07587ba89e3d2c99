"""The legality of frames: the tables against the engine, and against the documentation."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from hbone import frames
from hbone.engine import Engine
from hbone.errors import ErrorCode, LocalProtocolError
from hbone.events import ConnectionFailed
from hbone.frames import frame
from hbone.hpack_cache import BlockEncoder
from hbone.settings import Http2Settings, Role
from hbone.stream_state import RECEIVED, SENT, Ignored, Scope, StreamFrame, StreamState, Verdict, Violation

ROOT = Path(__file__).parents[2]
POST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a"))
RESPONSE = ((b":status", b"200"),)
TRAILERS = ((b"x", b"y"),)


def taken(engine: Engine) -> bytes:
    data = b"".join(engine.output.views())
    engine.output.taken()
    return data


def header_block(headers: tuple[tuple[bytes, bytes], ...], *, ended: bool) -> bytes:
    flags = frames.END_HEADERS | (frames.END_STREAM if ended else 0)
    return frame(frames.HEADERS, flags, 1, BlockEncoder().encode(headers))


def wire(kind: StreamFrame, role: Role, state: StreamState) -> bytes:
    """A frame of the peer of ``role`` on stream 1, right in everything but perhaps its time."""
    match kind:
        case StreamFrame.HEADERS | StreamFrame.HEADERS_END:
            if role is Role.CLIENT:
                headers = RESPONSE
            else:
                headers = POST if state is StreamState.IDLE else TRAILERS
            return header_block(headers, ended=kind is StreamFrame.HEADERS_END)
        case StreamFrame.DATA:
            return frame(frames.DATA, 0, 1, b"data")
        case StreamFrame.DATA_END:
            return frame(frames.DATA, frames.END_STREAM, 1, b"data")
        case StreamFrame.RST_STREAM:
            return frame(frames.RST_STREAM, 0, 1, frames.U32.pack(ErrorCode.CANCEL))
        case StreamFrame.WINDOW_UPDATE:
            return frame(frames.WINDOW_UPDATE, 0, 1, frames.U32.pack(1))


def in_state(role: Role, state: StreamState, *, answered: bool = True) -> Engine:
    """An engine whose stream 1 is in ``state``; ``answered``: with both heads exchanged, where that can be."""
    engine = Engine(role, Http2Settings())
    engine.start()
    engine.receive_data((frames.PREFACE if role is Role.SERVER else b"") + frame(frames.SETTINGS, 0, 0))
    if state is not StreamState.IDLE:
        ended_here = state in (StreamState.HALF_CLOSED_LOCAL, StreamState.CLOSED)
        ended_there = state in (StreamState.HALF_CLOSED_REMOTE, StreamState.CLOSED)
        if role is Role.SERVER:
            engine.receive_data(header_block(POST, ended=False))
            if answered or ended_here:
                engine.respond(1, 200)
        else:
            engine.open_stream(POST, tunnel=False)
            if answered or ended_there:
                engine.receive_data(header_block(RESPONSE, ended=False))
        if ended_here:
            engine.end_stream(1)
        if ended_there:
            engine.receive_data(frame(frames.DATA, frames.END_STREAM, 1))
        if state is StreamState.RESET:
            engine.reset_stream(1, ErrorCode.CANCEL)
    assert engine.stream_state(1) is state
    taken(engine)
    return engine


def outcome(engine: Engine, data: bytes) -> Verdict:
    """Return the effect of a peer's frame, in the words of the table."""
    before = engine.stream_state(1)
    events = engine.receive_data(data)
    if events and isinstance(events[-1], ConnectionFailed):
        return Violation(Scope.CONNECTION, ErrorCode(events[-1].code))
    sent = taken(engine)
    if sent[3:4] == bytes((frames.RST_STREAM,)):
        return Violation(Scope.STREAM, ErrorCode(frames.U32.unpack(sent[9:])[0]))
    after = engine.stream_state(1)
    return Ignored.IGNORED if after is before and after in (StreamState.CLOSED, StreamState.RESET) else after


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", StreamState, ids=str)
@pytest.mark.parametrize("kind", StreamFrame, ids=str)
def test_frames_of_the_peer_do_what_the_table_says(kind: StreamFrame, state: StreamState, role: Role) -> None:
    # A client's first HEADERS are the response, and only later ones trailers, whose rules are not the table's.
    engine = in_state(role, state, answered=role is Role.SERVER)
    if role is Role.CLIENT and kind in (StreamFrame.DATA, StreamFrame.DATA_END):
        engine = in_state(role, state)
    assert outcome(engine, wire(kind, role, state)) == RECEIVED[role][state][kind]


def send(engine: Engine, kind: StreamFrame) -> None:
    match kind:
        case StreamFrame.HEADERS:
            if engine.role is Role.SERVER:
                engine.respond(1, 200)
            else:
                engine.open_stream(POST, tunnel=False)
        case StreamFrame.HEADERS_END:
            if engine.unused and engine.role is Role.CLIENT:
                engine.open_stream(POST, ended=True, tunnel=False)
            else:
                engine.end_stream(1, TRAILERS)
        case StreamFrame.DATA:
            assert engine.send_data(1, b"data") == 4
        case StreamFrame.DATA_END:
            engine.end_stream(1)
        case StreamFrame.RST_STREAM:
            engine.reset_stream(1, ErrorCode.CANCEL)
        case StreamFrame.WINDOW_UPDATE:
            engine.acknowledge(1, engine.settings.first_window_bytes)


def can_send(role: Role, state: StreamState, kind: StreamFrame) -> bool:
    """Whether the role has a call for it; the rest of the table is the peer's, or follows from an error."""
    if role is Role.SERVER:
        return state is not StreamState.IDLE
    return kind is not StreamFrame.HEADERS or state is StreamState.IDLE


SENDABLE = [combination for combination in product(Role, StreamState, StreamFrame) if can_send(*combination)]


@pytest.mark.parametrize(("role", "state", "kind"), SENDABLE, ids=str)
def test_our_frames_do_what_the_table_says(role: Role, state: StreamState, kind: StreamFrame) -> None:
    engine = in_state(role, state, answered=not (role is Role.SERVER and kind is StreamFrame.HEADERS))
    quiet = kind in (StreamFrame.RST_STREAM, StreamFrame.WINDOW_UPDATE)  # on a stream that is gone they do nothing
    after = None if quiet and state is StreamState.CLOSED else SENT[state].get(kind)
    if after is not None:
        send(engine, kind)
        assert taken(engine)
        assert engine.stream_state(1) is after
    elif quiet:
        send(engine, kind)
        assert taken(engine) == b""
        assert engine.stream_state(1) is state
    else:
        with pytest.raises(LocalProtocolError):
            send(engine, kind)
        assert taken(engine) == b""


@pytest.mark.parametrize("role", Role)
def test_the_rest_of_a_cut_frame_is_dropped_once_we_have_reset_its_stream(role: Role) -> None:
    for state in (StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL):
        engine = in_state(role, state)
        data = frame(frames.DATA, frames.END_STREAM, 1, bytes(100))
        engine.receive_data(data[:50])
        engine.reset_stream(1, ErrorCode.CANCEL)
        taken(engine)
        assert engine.receive_data(data[50:]) == []
        assert engine.stream_state(1) is StreamState.RESET
        assert engine.open_streams == 0


def test_every_frame_of_the_peer_has_an_answer_in_every_state() -> None:
    for role in Role:
        assert set(RECEIVED[role]) == set(StreamState)
        assert all(set(row) == set(StreamFrame) for row in RECEIVED[role].values())
    assert set(SENT) == set(StreamState)


def tables() -> str:
    """The tables as the documentation has them."""
    lines = []
    for role in Role:
        lines += [f"### Received by a {role.value}", ""]
        lines += [
            "| | " + " | ".join(kind.value for kind in StreamFrame) + " |",
            "|---" * (1 + len(StreamFrame)) + "|",
        ]
        for state in StreamState:
            cells = (text(RECEIVED[role][state][kind]) for kind in StreamFrame)
            lines.append(f"| **{state.value}** | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["### Sent", ""]
    lines += [
        "| | " + " | ".join(kind.value for kind in StreamFrame) + " |",
        "|---" * (1 + len(StreamFrame)) + "|",
    ]
    for state in StreamState:
        cells = (text(SENT[state][kind]) if kind in SENT[state] else "not allowed" for kind in StreamFrame)
        lines.append(f"| **{state.value}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def text(verdict: Verdict) -> str:
    if isinstance(verdict, Violation):
        return f"{verdict.scope.value} {verdict.code.name}"
    return verdict.value


def test_the_documentation_prints_the_tables() -> None:
    assert tables() in (ROOT / "docs" / "streams.md").read_text()
