"""The table of a connection's life is complete, keeps its rule, and is the one in the documentation."""

from pathlib import Path

import pytest

from ztunnel.proxy.dataplane.life_table import TABLE, Action, Event, State, markdown

ROOT = Path(__file__).parents[4]
#: Events after which something may be allowed or denied that was not before.
CHANGES = (Event.POLICIES, Event.REVOCATIONS, Event.CONFIGURATION, Event.WORKLOAD_RESTORED)


def test_table_has_an_action_for_each_state_and_event() -> None:
    assert TABLE.keys() == {(state, event) for state in State for event in Event}


@pytest.mark.parametrize("event", CHANGES)
@pytest.mark.parametrize("state", [state for state in State if state is not State.CLOSED])
def test_a_change_is_judged_now_or_when_the_facts_are_complete(state: State, event: Event) -> None:
    assert TABLE[state, event] in (Action.JUDGE, Action.AWAIT_FACTS)


@pytest.mark.parametrize("state", [State.DIALING, State.OPEN, State.JOINED, State.DRAINING])
def test_allowed_states_never_await_facts(state: State) -> None:
    assert Action.AWAIT_FACTS not in {TABLE[state, event] for event in Event}


@pytest.mark.parametrize("state", [State.OPEN, State.JOINED, State.DRAINING])
def test_open_states_finish_gracefully_at_the_deadline(state: State) -> None:
    assert TABLE[state, Event.DEADLINE] is Action.FINISH


def test_new_certificate_keeps_every_life() -> None:
    assert {TABLE[state, Event.CERTIFICATE] for state in State} == {Action.KEEP}


def test_documentation_prints_the_life_table() -> None:
    assert markdown() in (ROOT / "docs" / "life.md").read_text()
