"""The table of policies' decisions: counted, bounded, added up over processes."""

from hypothesis import given
from hypothesis import strategies as st

from ztunnel.proxy.istio.accounting.policy_uses import (
    MOST_POLICIES,
    PolicyUse,
    PolicyUses,
    Use,
)


def test_each_use_is_counted_and_the_last_time_kept() -> None:
    uses = PolicyUses()
    for time, use in enumerate((Use.ALLOWED, Use.DENIED, Use.DENIED, Use.ENDED, Use.ENDED, Use.ENDED)):
        uses.note("shop/p", use, float(time))
    (found,) = uses
    assert found == PolicyUse("shop/p", allowed=1, denied=2, ended=3, last_s=5.0)
    assert [found.number(use) for use in Use] == [1, 2, 3]


def test_the_policy_that_decided_longest_ago_makes_room() -> None:
    uses = PolicyUses()
    for number in range(MOST_POLICIES):
        uses.note(str(number), Use.DENIED, float(number))
    uses.note("0", Use.DENIED, 1e6)
    uses.note("new", Use.DENIED, 1e6 + 1)
    kept = {use.policy: use.denied for use in uses}
    assert len(kept) == MOST_POLICIES
    assert (kept["0"], kept["new"]) == (2, 1)
    assert "1" not in kept


#: Process, policy and use of each decision; its place is its time.
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from(Use)), max_size=40)


@given(EVENTS)
def test_the_sum_of_processes_is_what_one_would_have_counted(events: list[tuple[int, int, Use]]) -> None:
    one, each = PolicyUses(), [PolicyUses(), PolicyUses(), PolicyUses()]
    for time, (process, policy, use) in enumerate(events):
        for uses in (one, each[process]):
            uses.note(str(policy), use, float(time))
    summed = PolicyUses()
    for uses in each:
        summed.add(uses)
    assert list(summed) == list(one)
