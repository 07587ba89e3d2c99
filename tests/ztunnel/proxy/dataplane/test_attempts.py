"""When a failed attempt is followed by another."""

import pytest

from ztunnel.proxy.dataplane.attempts import ANSWER_TIMEOUT_S, RETRY_WINDOW_S, Again, Attempts, GiveUp, Reason


def not_a_value_error(error: Exception) -> bool:
    return not isinstance(error, ValueError)


def some(retries: int = 2, until_s: float = 10.0) -> Attempts[str]:
    return Attempts(retries, not_a_value_error, until_s)


def test_retries_avoid_endpoints_that_failed_before() -> None:
    attempts = some()
    assert attempts.avoid == frozenset()
    assert attempts.failed(OSError(), 1, "a") == Again(1)
    assert attempts.avoid == {"a"}
    assert attempts.failed(OSError(), 2, "b") == Again(2)
    assert attempts.avoid == {"a", "b"}
    assert attempts.failed(OSError(), 3, "c") == GiveUp(Reason.NO_RETRIES)


def test_without_retries_the_first_failure_is_the_last() -> None:
    assert some(retries=0).failed(OSError(), 0, "a") == GiveUp(Reason.NO_RETRIES)


def test_error_that_must_not_be_repeated_ends_the_attempts() -> None:
    attempts = some()
    assert attempts.failed(ValueError(), 0, "a") == GiveUp(Reason.FINAL_ERROR)
    assert attempts.retries_left == 2


def test_destination_without_an_endpoint_is_not_retried() -> None:
    assert some().failed(OSError(), 0) == GiveUp(Reason.FINAL_ERROR)


@pytest.mark.parametrize(
    ("now_s", "expected"), [(10.0, Again(1)), (10.001, GiveUp(Reason.TIME_LIMIT))], ids=["at", "after"]
)
def test_failure_at_the_time_limit_is_still_retried(now_s: float, expected: Again | GiveUp) -> None:
    assert some(until_s=10.0).failed(OSError(), now_s, "a") == expected


def test_answer_timeout_is_not_shorter_than_the_retry_window() -> None:
    assert ANSWER_TIMEOUT_S >= RETRY_WINDOW_S
