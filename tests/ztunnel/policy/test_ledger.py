"""The ledger: decisions by policy and denials by pair, bounded, added up over processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.policy import ledger
from ztunnel.policy.ledger import MOST_PAIRS, Denial, Denials, Ledger, PolicyUse, Tally, TierPolicy, Use, Uses
from ztunnel.proxy.istio.accounting.denials import Pair


def pair(number: int) -> Pair:
    return Pair("inbound", f"client-{number}.shop", "spiffe://td/ns/shop/sa/c", "cart.shop:80", "denied by shop/p")


def test_a_pair_is_counted_and_the_last_is_first() -> None:
    denials = Denials[Pair]()
    for number, address in ((1, "10.0.0.1:1"), (2, "10.0.0.2:1"), (1, "10.0.0.1:2")):
        denials.note(pair(number), address, 10.0 + len(denials))
    assert list(denials) == [
        Denial(pair(1), 2, 12.0, "10.0.0.1:2"),
        Denial(pair(2), 1, 11.0, "10.0.0.2:1"),
    ]


def test_the_pair_that_was_denied_longest_ago_makes_room() -> None:
    denials = Denials[Pair]()
    for number in range(MOST_PAIRS):
        denials.note(pair(number), "a", float(number))
    denials.note(pair(0), "a", 1e6)
    denials.note(pair(-1), "a", 1e6 + 1)
    kept = [denial.pair for denial in denials]
    assert len(kept) == MOST_PAIRS
    assert kept[:2] == [pair(-1), pair(0)]
    assert pair(1) not in kept


def test_each_use_is_counted_and_the_last_time_kept() -> None:
    uses = Uses[str]()
    for time, use in enumerate(each for each in Use for _ in range(each + 1)):
        uses.note("shop/p", use, float(time))
    (found,) = uses
    assert found == PolicyUse("shop/p", Tally(1, 2, 3, 4, 5, 6, 7), 27.0) == uses.get("shop/p")
    assert uses.get("shop/q") is None


SMALL = 3


@contextmanager
def small_bound() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ledger, "MOST_POLICIES", SMALL)
        yield


#: Process, policy and use of each decision; its place is its time.
DECISIONS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from(Use)), max_size=60)


@given(DECISIONS)
@small_bound()
def test_the_newest_policies_stay_and_no_decision_is_lost(decisions: list[tuple[int, int, Use]]) -> None:
    uses, order = Uses[str](), list[str]()
    for time, (_, policy, use) in enumerate(decisions):
        uses.note(str(policy), use, float(time))
        order = [each for each in order if each != str(policy)] + [str(policy)]
        assert [each.policy for each in uses] == order[-SMALL:]
    tallies = [each.tally for each in (*uses, uses.others)]
    for use in Use:
        assert sum(tally[use] for tally in tallies) == sum(each[2] is use for each in decisions)


@given(DECISIONS)
@small_bound()
def test_a_sum_of_ledgers_stays_bounded_by_its_newest(decisions: list[tuple[int, int, Use]]) -> None:
    each, last = [Ledger[Pair]() for _ in range(3)], dict[str, int]()
    for time, (process, policy, use) in enumerate(decisions):
        each[process].own.note(str(policy), use, float(time))
        last[str(policy)] = time
    summed = Ledger[Pair]()
    for one in each:
        summed.add(one.copy())
    assert [use.policy for use in summed.own] == sorted(last, key=last.__getitem__)[-SMALL:]
    assert sum(sum(use.tally) for use in (*summed.own, summed.own.others)) == len(decisions)


@given(DECISIONS)
def test_the_sum_of_ledgers_is_what_one_would_have_counted(decisions: list[tuple[int, int, Use]]) -> None:
    one, each = Ledger[Pair](), [Ledger[Pair]() for _ in range(3)]
    for time, (process, policy, use) in enumerate(decisions):
        for noted in (one, each[process]):
            noted.own.note(str(policy), use, float(time))
            noted.calico.note(TierPolicy("default", str(policy)), use, float(time))
            noted.early.note("inbound", use, float(time))
            noted.denials.note(pair(policy), f"10.0.0.1:{time}", float(time))
    summed = Ledger[Pair]()
    for noted in each:
        summed.add(noted.copy())
    assert summed.copy() == one.copy()
