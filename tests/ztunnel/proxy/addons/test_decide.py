"""The values that hooks can return, and the combination of several addons' verdicts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.addons import Cut, Delay, Deny, Metric, Prefer, Verdict
from ztunnel.proxy.addons.decide import NOTHING, Outcome, combined, cut_reason, fault_of, fault_of_metric, refusal

VERDICTS: st.SearchStrategy[Verdict] = st.one_of(
    st.builds(Deny, st.text(min_size=1).filter(str.strip)),
    st.builds(Delay, st.floats(0.001, 300)),
    st.builds(Prefer, st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy"), min_size=1)),
    st.builds(Cut, st.just("test"), st.floats(0, 10), st.none() | st.integers(0, 10)),
)


@given(st.lists(VERDICTS))
def test_later_verdict_never_relaxes_an_earlier_one(verdicts: list[Verdict]) -> None:
    outcome = NOTHING
    for number, verdict in enumerate(verdicts):
        assert not fault_of("connecting", verdict)
        before, outcome = outcome, combined(outcome, f"a{number}", verdict)
        assert outcome.delay_s >= before.delay_s
        assert outcome.prefer[: len(before.prefer)] == before.prefer
        assert bool(outcome.denied) >= bool(before.denied)
        assert _limits(outcome) <= _limits(before)
        assert outcome.addons == (*before.addons, f"a{number}")


def _limits(outcome: Outcome) -> tuple[float, float]:
    cut = outcome.cut
    if cut is None:
        return math.inf, math.inf
    seconds = math.inf if cut.after_s is None else cut.after_s
    number = math.inf if cut.after_bytes is None else cut.after_bytes
    return seconds, number


class Quiet(Deny):
    """A subclass, whose properties could run code later."""


@pytest.mark.parametrize(
    ("hook", "answer", "fault"),
    [
        ("connecting", True, "returned a value of type bool instead of Deny or Delay or Prefer or Cut or None"),
        ("accepting", Delay(1), "returned a value of type Delay instead of Deny or None"),
        ("accepting", Quiet("x"), "returned a value of type Quiet instead of Deny or None"),
        ("connecting", Deny(""), "returned a Deny without a reason"),
        ("connecting", Deny(5), "returned a Deny without a reason"),  # type: ignore[arg-type]
        ("connecting", Delay(-1), "returned a Delay that is not above 0 and at most 300 s"),
        ("connecting", Delay(math.nan), "returned a Delay that is not above 0 and at most 300 s"),
        ("connecting", Delay(3000), "returned a Delay that is not above 0 and at most 300 s"),
        ("connecting", Delay(10**400), "returned a Delay that is not above 0 and at most 300 s"),
        ("connecting", Cut("x", 10**400), "returned a Cut whose after_s is no number of seconds"),
        (
            "connecting",
            Prefer({}),
            "returned a Prefer whose labels are no mapping of text to text with an entry",
        ),
        ("connecting", Cut("x"), "returned a Cut without a limit"),
        ("connecting", Cut("x", after_bytes=-1), "returned a Cut whose after_bytes is no number of bytes"),
        ("connecting", Cut("x", after_s=math.inf), "returned a Cut whose after_s is no number of seconds"),
        ("connecting", None, ""),
        ("accepting", Deny("no"), ""),
    ],
)
def test_answer_of_a_wrong_type_or_value_is_a_fault(hook: str, answer: object, fault: str) -> None:
    assert fault_of(hook, answer) == fault


def test_the_lowest_limits_cut() -> None:
    outcome = combined(NOTHING, "a", Cut("slow", after_s=5, after_bytes=100))
    outcome = combined(outcome, "b", Cut("late", after_s=2))
    assert outcome.cut == Cut("late", 2, 100)
    outcome = combined(outcome, "c", Cut("never", after_s=9))
    assert outcome.cut == Cut("late", 2, 100)
    assert outcome.cut is not None
    assert cut_reason(outcome.addons, outcome.cut) == "connection cut by addon a,b,c: late"


def test_denial_reason_is_truncated_to_one_line() -> None:
    outcome = combined(NOTHING, "a", Deny("first\nsecond" + "x" * 500))
    assert outcome.denied.startswith("connection refused by addon a: first secondxxx")
    assert len(outcome.denied) < 250


@pytest.mark.parametrize(
    "family",
    [
        "text",
        Metric("bad-name", "x", {}),
        Metric("name", "", {}),
        Metric("name", "x", {("a",): 1.0}),
        Metric("name", "x", {("a",): math.nan}, ("label",)),
        Metric("name", "x", {("a",): "1"}, ("label",)),  # type: ignore[dict-item]
        Metric("name", "x", {(): 10**400}),
        Metric("name", "x", {("a\udcff",): 1.0}, ("label",)),
        Metric("name", "x\udcff", {}),
        Metric("name", "x", {("a",): 1.0}, ("addon",)),
        Metric("name", "x", {("a",): 1.0}, ("__name__",)),
        Metric("name", "x", {}, kind="summary"),  # type: ignore[arg-type]
    ],
)
def test_invalid_metric_families_are_faults(family: Any) -> None:
    assert fault_of_metric(family).startswith("returned")


def test_valid_metric_family_has_no_fault() -> None:
    assert fault_of_metric(Metric("denied", "Denials", {("a",): 1}, ("identity",))) == ""


def test_a_reason_becomes_one_line_that_utf8_can_encode() -> None:
    assert refusal("quota", "no\n\udcffmore") == r"connection refused by addon quota: no \udcffmore"
    assert cut_reason(["quota"], Cut("no\udcff", 1)).endswith(r"quota: no\udcff")
