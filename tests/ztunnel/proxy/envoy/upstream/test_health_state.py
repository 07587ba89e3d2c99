"""When results of checks change a host's health, and when it is asked again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.model.health_check import HealthCheck, TcpCheck
from ztunnel.proxy.envoy.upstream.health_state import CheckResult, HealthState

PASSED, NO_ANSWER, REFUSED = CheckResult.PASSED, CheckResult.NO_ANSWER, CheckResult.REFUSED
SETTINGS = HealthCheck(
    check=TcpCheck(),
    timeout_s=1,
    interval_s=10,
    unhealthy_threshold=3,
    healthy_threshold=2,
    unhealthy_interval_s=20,
    unhealthy_edge_s=30,
    healthy_edge_s=40,
    no_traffic_s=50,
    no_traffic_healthy_s=60,
    jitter_s=4,
    jitter_share=0.5,
)


def after(*results: CheckResult) -> list[bool]:
    """Return, after each result, whether the host is healthy."""
    state = HealthState()
    healthy = []
    for result in results:
        state.take(result, SETTINGS)
        healthy.append(not state.failed)
    return healthy


@pytest.mark.parametrize(
    ("results", "healthy"),
    [
        ([PASSED], [True]),
        ([NO_ANSWER, PASSED, PASSED], [False, False, True]),
        ([PASSED, NO_ANSWER, NO_ANSWER, NO_ANSWER], [True, True, True, False]),
        ([PASSED, NO_ANSWER, NO_ANSWER, PASSED, NO_ANSWER], [True] * 5),
        ([PASSED, REFUSED], [True, False]),
        ([PASSED, REFUSED, PASSED, NO_ANSWER, PASSED, PASSED], [True, False, False, False, False, True]),
    ],
)
def test_consecutive_results_decide_health(results: list[CheckResult], healthy: list[bool]) -> None:
    assert after(*results) == healthy


@given(st.lists(st.sampled_from(CheckResult), min_size=1))
def test_take_reports_changes_of_health(results: list[CheckResult]) -> None:
    state = HealthState()
    for result in results:
        before = state.failed
        assert state.take(result, SETTINGS) is (state.failed is not before)


@pytest.mark.parametrize(
    ("failed", "changed", "traffic", "wait_s"),
    [
        (False, False, True, 10),
        (True, False, True, 20),
        (True, True, True, 30),
        (False, True, True, 40),
        (True, True, False, 50),
        (False, False, False, 60),
    ],
)
def test_interval_after_each_result(failed: bool, changed: bool, traffic: bool, wait_s: float) -> None:
    state = HealthState(failed=failed)
    assert state.wait_s(SETTINGS, changed=changed, traffic=traffic, chance=lambda: 0.0) == wait_s
    longest = state.wait_s(SETTINGS, changed=changed, traffic=traffic, chance=lambda: 1.0)
    assert longest == wait_s + 4 + wait_s / 2
