"""The half-close matrix: every state and event, what can be reached, and that the documentation prints it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from hbone.end_state import TRANSITIONS, EndAction, EndEvent, SinkState, SourceState, Transition

ROOT = Path(__file__).parents[2]
START = (SourceState.OPEN, SinkState.OPEN)
GONE = (SinkState.BROKEN, SinkState.RESET_SENT)
#: States of a sink in the order in which it may pass through them.
RANK = {
    SinkState.OPEN: 0,
    SinkState.EOF_PENDING: 1,
    SinkState.EOF_SENT: 2,
    SinkState.RESET_PENDING: 3,
    SinkState.BROKEN: 3,
    SinkState.RESET_SENT: 4,
}
Pair = tuple[SourceState, SinkState]
Walk = tuple[list[EndEvent], list[EndAction]]


def reachable() -> set[Pair]:
    found, new = {START}, [START]
    while new:
        pair = new.pop()
        for event in EndEvent:
            after = TRANSITIONS[*pair, event]
            if (after.source, after.sink) not in found:
                found.add((after.source, after.sink))
                new.append((after.source, after.sink))
    return found


def rows() -> Iterator[str]:
    """Return the table as the documentation prints it: unchanged states are empty, and unreachable rows are left
    out.
    """
    yield "| source | sink | " + " | ".join(event.value for event in EndEvent) + " |"
    yield "|---" * (2 + len(EndEvent)) + "|"
    for source, sink in product(SourceState, SinkState):
        if (source, sink) in reachable():
            cells = (cell(source, sink, TRANSITIONS[source, sink, event]) for event in EndEvent)
            yield f"| {source.value} | {sink.value} | " + " | ".join(cells) + " |"


def cell(source: SourceState, sink: SinkState, after: Transition) -> str:
    states = [
        f"**{state.value}**"
        for state, before in ((after.source, source), (after.sink, sink))
        if state is not before
    ]
    text = ", ".join(states)
    if after.actions:
        text += (": " if text else "") + ", ".join(action.value for action in after.actions)
    return text


def test_the_documentation_prints_the_table() -> None:
    assert "\n".join(rows()) in (ROOT / "docs" / "relay.md").read_text()


def test_the_documentation_names_every_action() -> None:
    text = (ROOT / "docs" / "relay.md").read_text()
    assert [action.value for action in EndAction if f"- *{action.value}*: " not in text] == []


def test_every_event_has_an_answer_in_every_state() -> None:
    assert set(TRANSITIONS) == set(product(SourceState, SinkState, EndEvent))


def test_a_cut_source_is_reachable_only_with_an_ended_sink() -> None:
    assert reachable() == {
        (source, sink)
        for source, sink in product(SourceState, SinkState)
        # A reset ends both directions of a network.
        if source is not SourceState.CUT or sink in GONE
    }


@pytest.mark.parametrize(
    "pair", sorted(reachable(), key=str), ids=lambda pair: f"{pair[0].value}, {pair[1].value}"
)
def test_states_move_in_one_direction(pair: Pair) -> None:
    source, sink = pair
    for event in EndEvent:
        after = TRANSITIONS[source, sink, event]
        assert after.source is source or source is SourceState.OPEN
        assert after.sink is sink or RANK[after.sink] > RANK[sink]
        assert (
            after.actions
            or (after.source, after.sink) == pair
            or event
            in (
                EndEvent.WRITE_EOF,
                EndEvent.WRITE_RESET,
            )
        )  # only what waits for DRAINED changes a state in silence


@pytest.mark.parametrize("event", EndEvent)
def test_an_event_that_comes_again_changes_nothing(event: EndEvent) -> None:
    for source, sink in product(SourceState, SinkState):
        once = TRANSITIONS[source, sink, event]
        twice = TRANSITIONS[once.source, once.sink, event]
        if event is EndEvent.READ_RESET and source is not SourceState.OPEN and sink is SinkState.RESET_PENDING:
            assert once.sink is SinkState.RESET_SENT
        assert (twice.source, twice.sink) == (once.source, once.sink)
        # A sink that is broken reports again that it has been written; the relay takes that once.
        assert twice.actions in ((), (EndAction.REPORT_WRITTEN,))


def test_only_two_states_ignore_every_event() -> None:
    terminal = {
        pair
        for pair in reachable()
        if all(TRANSITIONS[*pair, event] == Transition(*pair, ()) for event in EndEvent)
    }
    assert terminal == {(SourceState.ENDED, SinkState.RESET_SENT), (SourceState.CUT, SinkState.RESET_SENT)}


def walks() -> Iterator[Walk]:
    """Every sequence of events that changes a state with each of them, and all its actions."""

    def onward(pair: Pair, events: list[EndEvent], actions: list[EndAction]) -> Iterator[Walk]:
        yield events, actions
        for event in EndEvent:
            after = TRANSITIONS[*pair, event]
            if (after.source, after.sink) != pair:
                yield from onward((after.source, after.sink), [*events, event], [*actions, *after.actions])

    return onward(START, [], [])


def test_any_events_notify_each_network_once_and_the_peer_of_one_end() -> None:
    count = 0
    for events, actions in walks():
        count += 1
        assert actions.count(EndAction.SEND_EOF) <= 1, events
        assert actions.count(EndAction.SEND_RESET) <= 1, events
        assert actions.count(EndAction.DISCARD) <= 1, events
        assert actions.count(EndAction.PASS_EOF) + actions.count(EndAction.PASS_RESET) <= 1, events
        ended = EndEvent.READ_EOF in events or EndEvent.READ_RESET in events
        assert actions.count(EndAction.REPORT_READ) == (
            EndAction.PASS_EOF in actions or EndAction.PASS_RESET in actions
        )
        assert (EndAction.REPORT_READ in actions) == ended, events
        if EndAction.DISCARD in actions:
            assert EndAction.SEND_EOF not in actions[actions.index(EndAction.DISCARD) :], events
        if EndAction.PASS_RESET in actions:  # never after a complete answer
            assert EndEvent.READ_EOF not in events, events
    assert count > 100


def test_an_end_in_order_ends_in_order() -> None:
    source, sink = START
    actions: list[EndAction] = []
    for event in (EndEvent.WRITE_EOF, EndEvent.READ_EOF, EndEvent.DRAINED):
        after = TRANSITIONS[source, sink, event]
        source, sink = after.source, after.sink
        actions += after.actions
    assert (source, sink) == (SourceState.ENDED, SinkState.EOF_SENT)
    assert actions == [EndAction.REPORT_READ, EndAction.PASS_EOF, EndAction.SEND_EOF]
