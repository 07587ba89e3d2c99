"""Failed endpoints, with a test clock; and the cost of look-ups."""

from xds.model.workload import WorkloadUid
from ztunnel.proxy.istio.path.failed_endpoints import AVOID_S, FailedEndpoints

A, B, C = (WorkloadUid(name) for name in "abc")


def test_failed_endpoint_is_avoided_for_its_time() -> None:
    failed = FailedEndpoints()
    assert not failed.current(0)
    failed.add(A, 0)
    assert A in failed.current(AVOID_S - 0.1)
    assert not failed.current(AVOID_S)


def test_second_failure_restarts_the_time() -> None:
    failed = FailedEndpoints()
    failed.add(A, 0)
    failed.add(B, 1)
    failed.add(A, 2)
    assert set(failed.current(AVOID_S + 1)) == {A}
    assert not failed.current(AVOID_S + 2)


def test_changed_workload_is_no_longer_avoided() -> None:
    failed = FailedEndpoints()
    failed.add(A, 0)
    failed.clear(A)
    failed.clear(A)
    assert not failed.current(1)


def test_connection_avoids_its_own_failures_as_well() -> None:
    failed = FailedEndpoints()
    assert set(failed.current(0, frozenset({A}))) == {A}
    failed.add(A, 0)
    failed.add(B, 0)
    both = failed.current(1, frozenset({A, C}))
    assert set(both) == {A, B, C}
    assert len(both) == 3
    assert both
    assert A in both
    assert C in both
    assert WorkloadUid("d") not in both


def test_oldest_failure_is_evicted_at_the_limit() -> None:
    failed = FailedEndpoints()
    for number in range(10_001):
        failed.add(WorkloadUid(str(number)), 0)
    assert len(failed) == 10_000
    assert WorkloadUid("0") not in failed.current(1)
    assert WorkloadUid("1") in failed.current(1)


def test_current_failures_are_returned_without_a_copy() -> None:
    """Every connection asks, and there may be 10,000 of them."""
    failed = FailedEndpoints()
    for number in range(10_000):
        failed.add(WorkloadUid(str(number)), number / 10_000)
    before = failed.current(1)
    failed.add(A, 1)
    assert A in before, "a view of what is there, no copy"
    assert not isinstance(failed.current(1, frozenset({C})), set | frozenset)
