"""Ejection and return of hosts."""

from collections.abc import Sequence

import pytest

from xds.model.address import SocketAddress
from xds.model.cluster import Endpoint, OutlierDetection
from ztunnel.proxy.envoy.upstream.host import Host
from ztunnel.proxy.envoy.upstream.outlier import OutlierDetector, Result

#: More failures in a row than these tests report.
LATE = {"consecutive_5xx": 1000, "consecutive_local_origin_failure": 1000}


def hosts(count: int) -> list[Host]:
    return [Host(Endpoint(address=SocketAddress("10.0.0.1", n + 1))) for n in range(count)]


class Watched:
    def __init__(self, count: int = 10, **settings: object) -> None:
        self.hosts: Sequence[Host] = hosts(count)
        self.changes = 0
        self.detector = OutlierDetector(
            OutlierDetection(**settings),  # type: ignore[arg-type]
            self._changed,
            lambda: 0.0,
        )

    def _changed(self) -> None:
        self.changes += 1

    def report(self, index: int, result: Result, times: int = 1, now: float = 0.0) -> None:
        for _ in range(times):
            self.detector.report(self.hosts[index], result, self.hosts, now)

    @property
    def ejected(self) -> list[int]:
        return [index for index, host in enumerate(self.hosts) if host.ejected]


def test_five_failures_in_a_row_eject() -> None:
    watched = Watched()
    watched.report(0, Result.FAILURE, 4)
    assert watched.ejected == []
    watched.report(0, Result.FAILURE)
    assert (watched.ejected, watched.changes) == ([0], 1)


def test_success_resets_consecutive_failures() -> None:
    watched = Watched()
    watched.report(0, Result.FAILURE, 4)
    watched.report(0, Result.SUCCESS)
    watched.report(0, Result.FAILURE, 4)
    assert watched.ejected == []


def test_ejection_time_grows_up_to_its_maximum() -> None:
    watched = Watched(base_ejection_time_s=30.0, max_ejection_time_s=50.0)
    watched.report(0, Result.FAILURE, 5, now=0.0)
    watched.detector.tick(watched.hosts, 29.0)
    assert watched.ejected == [0]
    watched.detector.tick(watched.hosts, 30.0)
    assert watched.ejected == []
    watched.report(0, Result.FAILURE, 5, now=31.0)
    watched.detector.tick(watched.hosts, 80.0)
    assert watched.ejected == [0]  # twice 30 s, cut to 50
    watched.detector.tick(watched.hosts, 81.0)
    assert watched.ejected == []


def test_ejections_stay_below_the_maximum_percentage() -> None:
    watched = Watched(count=10, max_ejection_percent=20)
    for index in range(5):
        watched.report(index, Result.FAILURE, 5)
    assert watched.ejected == [0, 1]
    assert watched.detector.ejections_overflow == 3


def test_one_host_of_few_is_ejected_only_if_configured() -> None:
    assert _one_of_three(always=False) == []
    assert _one_of_three(always=True) == [0]


def _one_of_three(*, always: bool) -> list[int]:
    watched = Watched(count=3, always_eject_one_host=always)
    watched.report(0, Result.FAILURE, 5)
    return watched.ejected


def test_gateway_failures_have_a_threshold_of_their_own() -> None:
    watched = Watched(consecutive_gateway_failure=2, enforcing_consecutive_gateway_failure=100)
    watched.report(0, Result.FAILURE, 2)
    assert watched.ejected == [0]


def test_local_failures_are_counted_separately_when_split() -> None:
    external = {
        "consecutive_5xx": 1,
        "consecutive_gateway_failure": 1,
        "enforcing_consecutive_gateway_failure": 100,
    }
    watched = Watched(split_external_local_origin_errors=True, consecutive_local_origin_failure=2, **external)
    watched.report(0, Result.FAILURE)
    assert watched.ejected == []
    watched.report(0, Result.FAILURE)
    assert watched.ejected == [0]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_rates_have_an_enforcement_of_their_own_when_split(split: bool, local: bool) -> None:
    enforced = {"enforcing_success_rate": 0 if local else 100, "enforcing_failure_percentage": 0 if local else 100}
    enforced |= {"enforcing_local_origin_success_rate": 100 if local else 0}
    enforced |= {"enforcing_failure_percentage_local_origin": 100 if local else 0}
    watched = Watched(
        count=5, max_ejection_percent=100, split_external_local_origin_errors=split, **enforced, **LATE
    )
    for index in range(5):
        watched.report(index, Result.SUCCESS, 100 if index else 1)
        watched.report(index, Result.FAILURE, 0 if index else 99)
    watched.detector.tick(watched.hosts, 10.0)
    assert watched.ejected == ([0] if split == local else [])


def test_host_far_below_the_mean_success_rate_is_ejected() -> None:
    watched = Watched(count=10, max_ejection_percent=50, success_rate_request_volume=10, consecutive_5xx=1000)
    for index in range(10):
        watched.report(index, Result.SUCCESS, 100 if index else 50)
        watched.report(index, Result.FAILURE, 0 if index else 50)
    watched.detector.tick(watched.hosts, 10.0)
    assert watched.ejected == [0]


def test_failure_percentage_when_enforced() -> None:
    watched = Watched(
        count=5,
        max_ejection_percent=100,
        enforcing_failure_percentage=100,
        enforcing_success_rate=0,
        failure_percentage_request_volume=10,
        consecutive_5xx=1000,
    )
    for index in range(5):
        watched.report(index, Result.SUCCESS, 10 if index else 1)
        watched.report(index, Result.FAILURE, 0 if index else 9)
    watched.detector.tick(watched.hosts, 10.0)
    assert watched.ejected == [0]


def test_a_host_that_leaves_is_forgotten() -> None:
    watched = Watched()
    watched.report(0, Result.FAILURE, 5)
    watched.detector.forget(watched.hosts[0])
    assert watched.detector.ejections_active == 0
