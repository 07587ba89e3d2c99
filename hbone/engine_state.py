"""Reads the state of an HTTP/2 connection as one value, and creates an engine that resumes from this state.

:func:`engine_state` reads an :class:`hbone.engine.Engine` between two calls of its methods, and :func:`engine_of`
makes a new engine from the state, in this process or in another. The peer cannot distinguish the two engines.
Our settings are part of the state, because the peer has received them. Times are stored as ages, because clocks of
processes can differ. Caches are omitted, because they only save work.

A new field must have a default, so that different versions can read each other's states. If the meaning of a field
changes, :data:`SCHEMA` must be incremented.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from hbone.engine import Engine
from hbone.flow import Budget
from hbone.hpack_cache import BlockDecoder
from hbone.output import Buffers
from hbone.reader import FrameReader
from hbone.sender import Stream
from hbone.settings import Http2Settings, Role
from hbone.stream_state import StreamState
from hbone.windows import ConnectionWindow

SCHEMA: Final = 1
"""The version of :class:`EngineState`."""
_PIECE_BYTES: Final = 65_536


class Unfrozen(Exception):
    """The engine's state cannot be read now, because the engine has failed or is decoding a long header block."""


class BudgetState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a :class:`hbone.flow.Budget`: the tokens left, and the age of this number, or ``None`` if the
    budget was never used.
    """

    left: float
    age_s: float | None


class StreamValue(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one open stream, including its windows."""

    stream_id: int
    state: str
    send_window: int
    answered: bool
    tunnel: bool
    blocked: bool
    cost: int
    size: int
    step: int
    credit: int
    unacknowledged: int
    delivered: int
    borrowed: int
    granted_age_s: float


class WindowValue(msgspec.Struct, frozen=True, kw_only=True):
    """The receive window of the connection, and the bytes left in the pools for the growth of its streams'
    windows.
    """

    most_bytes: int
    most_stream_bytes: int
    initial: int
    first: int
    size: int
    credit: int
    unacknowledged: int
    unproven: int
    proven: int
    grown: int


class ReaderState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the frame reader, which can be in the middle of a frame."""

    work: int
    preface: bytes
    settings_next: bool
    partial: bytes
    left: int
    skip: int
    block: bytes
    block_stream: int
    block_ended: bool
    block_frames: int


class TableState(msgspec.Struct, frozen=True, kw_only=True):
    """The dynamic table of the peer's header blocks (RFC 7541, 2.3.2), newest entry first."""

    entries: tuple[tuple[bytes, bytes], ...]
    size: int
    most: int


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an HTTP/2 connection; its fields are named as in :class:`hbone.engine.Engine`."""

    role: Role
    settings: Http2Settings
    output: bytes
    output_frames: int
    going_away: bool
    draining: bool
    drain_seen: bool
    peer_max_frame_bytes: int
    peer_max_streams: int | None
    peer_early_bytes: int
    peer_settings_seen: bool
    pause_s: float
    streams: tuple[StreamValue, ...]
    next_id: int
    last_peer_id: int
    goaway_limit: int | None
    reset_here: tuple[int, ...]
    encoder_table_bytes: int
    block_prefix: bytes
    peer_initial_window: int
    send_window: int
    send_blocked: bool
    window: WindowValue
    earned: int
    control: BudgetState
    resets: BudgetState
    work: BudgetState
    stalls: BudgetState
    unparsed: bytes | None
    table: TableState
    reader: ReaderState
    data_stream_id: int
    data_stream_open: bool
    data_ended: bool
    settings_acked: bool = True


_COPIED: Final = (
    "going_away",
    "draining",
    "drain_seen",
    "peer_max_frame_bytes",
    "peer_max_streams",
    "peer_early_bytes",
    "peer_settings_seen",
    "pause_s",
)
_COPIED_INNER: Final = (
    "next_id",
    "last_peer_id",
    "goaway_limit",
    "encoder_table_bytes",
    "block_prefix",
    "peer_initial_window",
    "send_window",
    "send_blocked",
    "earned",
    "data_stream_id",
    "data_ended",
    "settings_acked",
)
_STREAM: Final = (
    "send_window",
    "answered",
    "tunnel",
    "blocked",
    "cost",
    "size",
    "step",
    "credit",
    "unacknowledged",
    "delivered",
    "borrowed",
)
_WINDOW: Final = ("most_bytes", "most_stream_bytes", "initial", "first", "size", "credit", "unacknowledged")
_WINDOW_INNER: Final = ("unproven", "proven", "grown")
_READER_INNER: Final = ("settings_next", "left", "skip", "block_stream", "block_ended", "block_frames")
_READER_BYTES: Final = ("preface", "partial", "block")


def engine_state(engine: Engine, now_s: float) -> EngineState:
    """Return the state of an engine; the engine does not change.

    Args:
        engine: the engine to read.
        now_s: monotonic seconds, of the clock whose times the engine receives.

    Raises:
        Unfrozen: the state cannot be read now.
    """
    if engine.failed:
        raise Unfrozen("the connection has failed")
    if engine._long_block is not None:
        raise Unfrozen("within a long header block")
    unparsed = engine._unparsed
    decoder: BlockDecoder[Any] = engine._requests if engine.role is Role.SERVER else engine._responses
    copied: dict[str, Any] = {name: getattr(engine, name) for name in _COPIED}
    copied |= {name: getattr(engine, f"_{name}") for name in _COPIED_INNER}
    return EngineState(
        role=engine.role,
        settings=engine.settings,
        output=b"".join(map(bytes, engine.output.views())),
        output_frames=engine.output.frames,
        streams=tuple(_stream_value(stream_id, each, now_s) for stream_id, each in engine._streams.items()),
        reset_here=tuple(engine._reset_here),
        window=_window_value(engine._window),
        control=_budget_state(engine._control, now_s),
        resets=_budget_state(engine._resets, now_s),
        work=_budget_state(engine._costs._work, now_s),
        stalls=_budget_state(engine._costs._stalls, now_s),
        unparsed=None if unparsed is None else bytes(unparsed),
        table=_table_state(decoder),
        reader=_reader_state(engine._reader),
        data_stream_open=engine._data_stream is not None,
        **copied,
    )


def engine_of(state: EngineState, buffers: Buffers | None, now_s: float) -> Engine:
    """Return an engine that continues from a state.

    Args:
        state: the previous engine's state.
        buffers: lends output buffers.
        now_s: monotonic seconds, of the clock whose times the engine will receive.

    Raises:
        ValueError: the state contradicts itself.
    """
    engine = Engine(state.role, state.settings, buffers)
    for name in _COPIED:
        setattr(engine, name, getattr(state, name))
    for name in _COPIED_INNER:
        setattr(engine, f"_{name}", getattr(state, name))
    engine._now = now_s
    engine._reset_here = dict.fromkeys(state.reset_here)
    for each in state.streams:
        stream = Stream(StreamState(each.state), 0, 0, now_s - each.granted_age_s)
        for name in _STREAM:
            setattr(stream, name, getattr(each, name))
        engine._streams[each.stream_id] = stream
    if state.data_stream_open:
        if state.data_stream_id not in engine._streams:
            raise ValueError("the stream of the incomplete DATA frame is not open")
        engine._data_stream = engine._streams[state.data_stream_id]
    _restore_window(engine._window, state.window)
    _restore_budget(engine._control, state.control, now_s)
    _restore_budget(engine._resets, state.resets, now_s)
    _restore_budget(engine._costs._work, state.work, now_s)
    _restore_budget(engine._costs._stalls, state.stalls, now_s)
    if state.unparsed is not None:
        engine._unparsed = memoryview(state.unparsed)
    decoder: BlockDecoder[Any] = engine._requests if state.role is Role.SERVER else engine._responses
    _restore_table(decoder, state.table)
    _restore_reader(engine._reader, state.reader)
    for start in range(0, len(state.output), _PIECE_BYTES):  # an output buffer has room for several
        engine.output.append(state.output[start : start + _PIECE_BYTES])
    engine.output.frames = state.output_frames
    return engine


def _stream_value(stream_id: int, stream: Any, now_s: float) -> StreamValue:
    copied = {name: getattr(stream, name) for name in _STREAM}
    age_s = max(0.0, now_s - stream.granted_s)
    return StreamValue(stream_id=stream_id, state=stream.state.value, granted_age_s=age_s, **copied)


def _window_value(window: ConnectionWindow) -> WindowValue:
    copied = {name: getattr(window, name) for name in _WINDOW}
    return WindowValue(**copied, **{name: getattr(window, f"_{name}") for name in _WINDOW_INNER})


def _restore_window(window: ConnectionWindow, value: WindowValue) -> None:
    for name in _WINDOW:
        setattr(window, name, getattr(value, name))
    for name in _WINDOW_INNER:
        setattr(window, f"_{name}", getattr(value, name))


def _budget_state(budget: Budget, now_s: float) -> BudgetState:
    seen_s = budget._seen_s
    return BudgetState(left=budget._left, age_s=None if seen_s is None else max(0.0, now_s - seen_s))


def _restore_budget(budget: Budget, state: BudgetState, now_s: float) -> None:
    budget._left = min(state.left, budget._burst)
    budget._seen_s = None if state.age_s is None else now_s - state.age_s


def _table_state(decoder: BlockDecoder[Any]) -> TableState:
    table = decoder._table
    entries = tuple((bytes(name), bytes(value)) for name, value in table.dynamic_entries)
    return TableState(entries=entries, size=table._current_size, most=table.maxsize)


def _restore_table(decoder: BlockDecoder[Any], state: TableState) -> None:
    table = decoder._table
    if state.most > decoder._decoder.max_allowed_table_size or state.size > state.most:
        raise ValueError("a header table over its limit")
    table._maxsize = state.most
    for name, value in reversed(state.entries):
        table.add(name, value)
    if table._current_size != state.size or len(table.dynamic_entries) != len(state.entries):
        raise ValueError("a header table whose size is not that of its entries")
    table.resized = False
    decoder._forget()


def _reader_state(reader: FrameReader) -> ReaderState:
    copied: dict[str, Any] = {name: getattr(reader, f"_{name}") for name in _READER_INNER}
    copied |= {name: bytes(getattr(reader, f"_{name}")) for name in _READER_BYTES}
    return ReaderState(work=reader.work, **copied)


def _restore_reader(reader: FrameReader, state: ReaderState) -> None:
    reader.work = state.work
    for name in _READER_INNER:
        setattr(reader, f"_{name}", getattr(state, name))
    reader._preface = state.preface
    reader._partial = bytearray(state.partial)
    reader._block = bytearray(state.block)
