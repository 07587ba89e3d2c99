"""Budgets and the quotas of peers in isolation: the cost of each call, and the number at which it is refused."""

from dataclasses import replace

from hbone.flow import Budget, PeerQuotas
from hbone.limits import Limits


def test_a_spend_over_the_budget_is_refused_and_not_charged() -> None:
    budget = Budget(burst=2.0, rate=1.0)
    assert budget.affords(0.0, 2.0)
    assert not budget.affords(0.0, 0.5)
    assert budget.overdrawn_s == 0.0
    assert budget.affords(0.5, 0.5)  # a refused cost was not charged
    assert not budget.affords(0.5, 0.5)


def test_spending_overdraws_and_time_pays_back() -> None:
    budget = Budget(burst=2.0, rate=0.5)
    assert budget.spend(10.0, 2.0)  # to nothing is not beyond
    assert not budget.spend(10.0, 1.0)
    assert budget.overdrawn_s == 2.0
    assert budget.spend(12.0, 0.0)
    assert budget.overdrawn_s == 0.0
    assert not budget.spend(9.0, 0.5)  # a clock that went back adds nothing to the budget


def test_no_budget_grows_beyond_its_burst() -> None:
    budget = Budget(burst=2.0, rate=1.0)
    assert budget.spend(0.0)
    budget.refund(50.0)
    assert budget.spend(1000.0, 2.0)
    assert not budget.spend(1000.0, 0.1)


def test_without_a_rate_a_debt_has_no_end_in_time() -> None:
    budget = Budget(burst=1.0, rate=0.0)
    budget.spend(0.0, 5.0)
    assert budget.overdrawn_s == 0.0
    assert not budget.spend(1e9, 0.0)


def test_windows_of_a_peer_grow_up_to_its_share() -> None:
    shares = PeerQuotas()
    share = shares.join("a", replace(Limits(), peer_window_bytes=10))
    assert share.take_window(10)
    assert not share.take_window(1)
    share.return_window(1)
    assert share.take_window(1)
    assert shares.join("a", Limits()) is share
    assert share.connections == 2
    shares.leave(share)
    assert share.connections == 1
    assert len(shares) == 1
