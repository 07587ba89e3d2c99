"""The table of denials: counted by pair, bounded, added up over processes."""

from hypothesis import given
from hypothesis import strategies as st

from ztunnel.policy.denials import MOST_PAIRS, Denial, Denials
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


#: Process and pair of each denial; its place is its time.
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40)


@given(EVENTS)
def test_the_sum_of_processes_is_what_one_would_have_counted(events: list[tuple[int, int]]) -> None:
    one, each = Denials[Pair](), [Denials[Pair]() for _ in range(3)]
    for time, (process, number) in enumerate(events):
        for denials in (one, each[process]):
            denials.note(pair(number), f"10.0.0.1:{time}", float(time))
    summed = Denials[Pair]()
    for denials in each:
        summed.add(denials)
    assert list(summed) == list(one)
