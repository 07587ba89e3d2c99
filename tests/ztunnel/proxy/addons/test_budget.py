"""How the time of addons is accounted for."""

from hypothesis import given
from hypothesis import strategies as st

from ztunnel.proxy.addons.budget import BOUNDS_US, HookAccount, HookCounts, LoopShare, too_much

_MINUTE_NS = 60 * 10**9


def test_addon_exceeds_its_share_above_two_percent_of_a_minute() -> None:
    share = LoopShare(0)
    assert not share.use(1_200_000_000, 10)
    assert share.use(1, 20)
    assert too_much(share.used_ns) == "it used 1.20 s of the loop within 60 s, more than 2%"


def test_loop_share_restarts_with_a_new_minute() -> None:
    share = LoopShare(0)
    assert not share.use(1_200_000_000, 10)
    assert not share.use(1_200_000_000, _MINUTE_NS)


@given(st.lists(st.integers(0, 10**10)))
def test_each_call_counts_in_one_histogram_bucket(durations: list[int]) -> None:
    account = HookAccount()
    for took_ns in durations:
        account.took(took_ns)
    counts = account.copy("a", "connecting")
    assert sum(counts.buckets) == len(durations)
    assert counts.total_ns == sum(durations)
    for bound, below in zip(BOUNDS_US, _cumulative(counts), strict=False):
        assert below == sum(each <= bound * 1000 for each in durations)


def _cumulative(counts: HookCounts) -> list[int]:
    return [sum(counts.buckets[: place + 1]) for place in range(len(counts.buckets))]


def test_counts_of_processes_add_up() -> None:
    one = HookCounts("a", "opened", (("none", 2),), total_ns=5, over_budget=1)
    other = HookCounts("a", "opened", (("fault", 1), ("none", 3)), total_ns=7)
    both = one + other
    assert both.results == (("fault", 1), ("none", 5))
    assert (both.total_ns, both.over_budget, both.calls) == (12, 1, 6)
