"""Defines how the ends of a relay close: the next state and the actions for each state and event, in one table.

An end is a source (its network sends to us) and a sink (we send to its network). The two halves close separately,
in order or by a reset, and the network can stop accepting our bytes at any time. For each pair of states and each
event, :data:`TRANSITIONS` has the next pair and the actions, in order. Plain sockets, TLS sockets and tunnels
(:mod:`hbone.aio.end`) share this table, and differ only in the effect of the actions on their networks.
``docs/relay.md`` prints the table.

Some pairs cannot occur, for example a reset source with an open sink, because a reset ends both directions of TCP
and of a stream. The table has these pairs nevertheless, so that each event has a result in each state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from hbone.enums import Key


class SourceState(Key):
    """The receiving half of an end: whether its network still sends."""

    OPEN = "open"
    ENDED = "ended"
    """The network has ended its direction in order, by FIN, close_notify, END_STREAM, or a reset with NO_ERROR or
    CANCEL.
    """
    CUT = "cut"
    """The network's direction was cut short by a RST, a failed TLS session, or a stream reset with an error."""


class SinkState(Key):
    """The sending half of an end: whether its network still accepts bytes, and what was sent last."""

    OPEN = "open"
    EOF_PENDING = "eof pending"
    """An EOF was requested. It is sent after the bytes that still wait for the network."""
    EOF_SENT = "eof"
    RESET_PENDING = "reset pending"
    """An abortive close was requested. The reset is also sent after the bytes that still wait for the network."""
    RESET_SENT = "reset"
    BROKEN = "broken"
    """The network accepts no more bytes. Bytes from the peer are discarded."""


class EndEvent(Key):
    """The events of an end."""

    READ_EOF = "read eof"
    """The network ended its direction in order."""
    READ_RESET = "read reset"
    """The network ended its direction with an error or a reset."""
    WRITE_EOF = "write eof"
    """The peer's source has ended in order, and passes an EOF to this end."""
    WRITE_RESET = "write reset"
    """The peer's source was cut short, and passes a reset to this end."""
    DRAINED = "drained"
    """The network has accepted the last pending byte."""
    BREAK = "break"
    """The network accepts no more bytes."""


class EndAction(Enum):
    """The actions that an end can run after an event."""

    REPORT_READ = "report read"
    """Report to the relay that the source has no more bytes."""
    PASS_EOF = "pass eof"
    """Write an EOF to the peer."""
    PASS_RESET = "pass reset"
    """Write a reset to the peer."""
    DISCARD = "discard"
    """Drop pending bytes, return their credit, report the broken sink, and discard what the peer writes later."""
    SEND_EOF = "send eof"
    """Send FIN, close_notify or END_STREAM; then report the sink as done."""
    SEND_RESET = "send reset"
    """Send RST or RST_STREAM; the relay ends."""
    REPORT_WRITTEN = "report written"
    """Report that all output for this network, including its EOF, was sent or discarded."""
    BOTH_OVER = "both over"
    """Report that no more bytes can be sent to or received from this network: the source is over and the sink is
    broken.
    """


@dataclass(frozen=True, slots=True)
class Transition:
    """An end's states after an event, and the actions to run, in order."""

    source: SourceState
    sink: SinkState
    actions: tuple[EndAction, ...] = ()


#: Aliases for use on the data path, where a global variable is faster than a look-up in the enumeration.
SOURCE_OPEN: Final = SourceState.OPEN
SINK_OPEN: Final = SinkState.OPEN
SINK_BROKEN: Final = SinkState.BROKEN


def _transition(source: SourceState, sink: SinkState, event: EndEvent) -> Transition:
    match event:
        case EndEvent.READ_EOF:
            return _read_eof(source, sink)
        case EndEvent.READ_RESET:
            return _read_reset(source, sink)
        case EndEvent.WRITE_EOF:
            return _write_eof(source, sink)
        case EndEvent.WRITE_RESET:
            return _write_reset(source, sink)
        case EndEvent.DRAINED:
            return _drained(source, sink)
        case EndEvent.BREAK:
            return _break(source, sink)


def _read_eof(source: SourceState, sink: SinkState) -> Transition:
    if source is not SourceState.OPEN:
        return Transition(source, sink)
    actions = (EndAction.REPORT_READ, EndAction.PASS_EOF)
    if sink is SinkState.BROKEN:
        return Transition(SourceState.ENDED, sink, (*actions, EndAction.BOTH_OVER))
    return Transition(SourceState.ENDED, sink, actions)


def _read_reset(source: SourceState, sink: SinkState) -> Transition:
    # The reset ends both directions. But if the source had already ended in order, the peer has all of its bytes,
    # and a reset would make the complete stream look truncated. Then only the sink breaks.
    if source is not SourceState.OPEN:
        return _break(source, sink)
    broken = _break(SourceState.CUT, sink)
    return Transition(SourceState.CUT, broken.sink, (EndAction.REPORT_READ, *broken.actions, EndAction.PASS_RESET))


def _write_eof(source: SourceState, sink: SinkState) -> Transition:
    if sink is SinkState.OPEN:
        return Transition(source, SinkState.EOF_PENDING)
    if sink is SinkState.BROKEN:
        return Transition(source, sink, (EndAction.REPORT_WRITTEN,))
    return Transition(source, sink)


def _write_reset(source: SourceState, sink: SinkState) -> Transition:
    if sink is SinkState.BROKEN:
        return Transition(source, SinkState.RESET_SENT, (EndAction.SEND_RESET,))
    if sink in (SinkState.RESET_PENDING, SinkState.RESET_SENT):
        return Transition(source, sink)
    return Transition(source, SinkState.RESET_PENDING)


def _drained(source: SourceState, sink: SinkState) -> Transition:
    if sink is SinkState.EOF_PENDING:
        return Transition(source, SinkState.EOF_SENT, (EndAction.SEND_EOF,))
    if sink is SinkState.RESET_PENDING:
        return Transition(source, SinkState.RESET_SENT, (EndAction.SEND_RESET,))
    return Transition(source, sink)


def _break(source: SourceState, sink: SinkState) -> Transition:
    match sink:
        case SinkState.BROKEN | SinkState.RESET_SENT:
            return Transition(source, sink)
        case SinkState.RESET_PENDING:  # no bytes are pending before the reset
            return Transition(source, SinkState.RESET_SENT, (EndAction.SEND_RESET,))
        case SinkState.EOF_PENDING:
            return Transition(source, SinkState.BROKEN, (EndAction.DISCARD, EndAction.REPORT_WRITTEN))
        case SinkState.OPEN | SinkState.EOF_SENT:
            over = () if source is SourceState.OPEN else (EndAction.BOTH_OVER,)
            return Transition(source, SinkState.BROKEN, (EndAction.DISCARD, *over))


TRANSITIONS: Final[dict[tuple[SourceState, SinkState, EndEvent], Transition]] = {
    (source, sink, event): _transition(source, sink, event)
    for source in SourceState
    for sink in SinkState
    for event in EndEvent
}
"""The transition for every event in every state. A connection has only a few events, and each event takes one
look-up.
"""
