"""When a failed attempt is followed by another."""

import pytest

from ztunnel.proxy.dataplane.attempts import (
    ANSWER_TIMEOUT_S,
    RETRY_WINDOW_S,
    Again,
    Attempts,
    GiveUp,
    Reason,
)


def not_a_value_error(error: Exception) -> bool:
    return not isinstance(error, ValueError)


def some(retries: int = 2, until_s: float = 10.0) -> Attempts[str]:
    return Attempts(retries, not_a_value_error, until_s)


def test_every_retry_avoids_what_failed_before() -> None:
    attempts = some()
    assert attempts.avoid == frozenset()
    assert attempts.failed(OSError(), 1, "a") == Again(1)
    assert attempts.avoid == {"a"}
    assert attempts.failed(OSError(), 2, "b") == Again(2)
    assert attempts.avoid == {"a", "b"}
    assert attempts.failed(OSError(), 3, "c") == GiveUp(Reason.NO_RETRIES)


def test_without_retries_the_first_failure_is_the_last() -> None:
    assert some(retries=0).failed(OSError(), 0, "a") == GiveUp(Reason.NO_RETRIES)


def test_an_error_that_must_not_be_repeated_ends_it() -> None:
    attempts = some()
    assert attempts.failed(ValueError(), 0, "a") == GiveUp(Reason.FINAL_ERROR)
    assert attempts.retries_left == 2


def test_what_is_no_endpoint_has_no_alternative() -> None:
    assert some().failed(OSError(), 0) == GiveUp(Reason.FINAL_ERROR)


@pytest.mark.parametrize(
    ("now_s", "expected"), [(10.0, Again(1)), (10.001, GiveUp(Reason.TIME_LIMIT))], ids=["at", "after"]
)
def test_the_limit_itself_is_in_time(now_s: float, expected: Again | GiveUp) -> None:
    assert some(until_s=10.0).failed(OSError(), now_s, "a") == expected


def test_one_slow_peer_has_the_time_of_a_row_of_failing_ones() -> None:
    assert ANSWER_TIMEOUT_S >= RETRY_WINDOW_S
