"""The ring of samples behind the curves of the live page."""

from hypothesis import given
from hypothesis import strategies as st

from ztunnel.proxy.flows.history import STEP_S, STEPS, History, Steps, Totals


def grown(history: History) -> list[int]:
    """Return connections by step."""
    return [row[0] for row in history.steps().rows]


def sampled(*samples: tuple[float, int]) -> History:
    history = History()
    for now_s, connections in samples:
        history.sample(now_s, Totals(connections=connections))
    return history


def test_a_step_has_the_growth_since_the_sample_before() -> None:
    history = sampled((100.0, 7), (110.0, 10), (120.0, 10), (130.1, 15))
    assert history.steps().first == 10
    assert grown(history) == [3, 0, 5]
    shown = history.shown(135.0, 1_000_135.0)
    assert shown["step_s"] == STEP_S
    assert shown["ended_s"] == 1_000_130.0
    assert shown["connections"] == [3, 0, 5]
    assert shown["moved"] == [0, 0, 0]


def test_a_sample_is_due_once_per_step() -> None:
    history = History()
    assert history.is_due(105.0)
    history.sample(105.0, Totals())
    assert [history.is_due(now_s) for now_s in (105.0, 109.9, 110.0)] == [False, False, True]
    history.sample(109.0, Totals(connections=9))  # too early: it changes nothing
    history.sample(110.0, Totals(connections=9))
    assert grown(history) == [9]


def test_growth_of_a_process_that_was_stopped_is_spread() -> None:
    assert grown(sampled((100.0, 0), (140.0, 10))) == [2, 3, 2, 3]
    long = sampled((0.0, 0), (2 * STEPS * STEP_S, 2 * STEPS))
    assert grown(long) == [1] * STEPS


def test_a_total_that_falls_counts_as_unchanged() -> None:
    assert grown(sampled((0.0, 9), (10.0, 4), (20.0, 6))) == [0, 2]


def test_processes_add_up_by_step() -> None:
    page = History()
    page.add(sampled((100.0, 0), (110.0, 1), (120.0, 3)).steps())
    page.add(sampled((110.0, 0), (120.0, 10), (130.0, 30)).steps())  # a worker that began later, and is ahead
    assert page.steps().first == 10
    assert grown(page) == [1, 12]


def test_numbers_of_a_worker_cannot_break_the_ring() -> None:
    page = sampled((100.0, 0), (110.0, 1))
    for steps in (
        Steps(10, ((1 << 200, -5, 3, 4, 5, 6), (1, 1, 1, 1))),
        Steps(1 << 60, ((1,),)),
        Steps(10, ((),)),
    ):
        page.add(steps)
    ((connections, failures, denials, _),) = page.steps().rows
    assert connections > 1 << 50
    assert (failures, denials) == (0, 3)


@given(st.lists(st.tuples(st.floats(0.1, 500.0), st.integers(0, 1000)), min_size=1, max_size=60))
def test_nothing_is_lost_or_counted_twice_within_the_window(waits: list[tuple[float, int]]) -> None:
    history, now_s, total, last = History(), 0.0, 0, 0
    history.sample(now_s, Totals())
    at: list[tuple[int, int]] = []
    for wait_s, growth in waits:
        now_s += wait_s
        total += growth
        if history.is_due(now_s):
            history.sample(now_s, Totals(connections=total))
            at.append((int(now_s // STEP_S), total))
            last = total
    rows = grown(history)
    assert len(rows) == min(STEPS, at[-1][0] if at else 0)
    if len(rows) < STEPS:
        assert sum(rows) == last
    else:
        known = [step for step, _ in at if step <= at[-1][0] - STEPS]
        before = max((found for step, found in at if step in known), default=0)
        assert sum(rows) <= last - before
