"""What a peer may say of itself, and how often."""

from dataclasses import replace

from hbone.tunnel_headers import Baggage
from xds.model.identity import SpiffeId
from ztunnel.proxy.istio.accounting.metrics import EXPIRY_S, PeerLabels
from ztunnel.proxy.istio.accounting.peer_baggage_labels import (
    PEERS,
    SETS_PER_PEER,
    VALUE_CHARACTERS,
    BaggageLabels,
)

WEB, CART = SpiffeId("td", "shop", "web"), SpiffeId("td", "shop", "cart")
SAID = Baggage(namespace="elsewhere", workload_name="said", service_name="s")
ALONE = PeerLabels(principal=str(WEB), namespace="shop")


def said(number: int) -> Baggage:
    return replace(SAID, workload_name=f"said-{number}")


def test_peer_baggage_sets_the_workload_but_not_the_namespace() -> None:
    labels = BaggageLabels().labels(SAID, WEB, 0.0)
    assert (labels.workload, labels.principal, labels.namespace) == ("said", str(WEB), "shop")
    assert labels.known
    assert BaggageLabels().labels(SAID, None, 0.0).namespace == "elsewhere"
    assert BaggageLabels().labels(Baggage(), WEB, 0.0) == PeerLabels(principal=str(WEB))


def test_label_budget_is_per_peer() -> None:
    budget = BaggageLabels()
    for number in range(SETS_PER_PEER):
        assert budget.labels(said(number), WEB, 0.0).known
    for number in range(SETS_PER_PEER, 20_000):
        assert budget.labels(said(number), WEB, 1.0) == ALONE
    assert budget.refused == 20_000 - SETS_PER_PEER
    assert budget.labels(said(0), WEB, 1.0).known
    assert budget.labels(said(SETS_PER_PEER), CART, 1.0).known


def test_unused_label_sets_expire() -> None:
    budget = BaggageLabels()
    for number in range(SETS_PER_PEER):
        budget.labels(said(number), WEB, 0.0)
    budget.labels(said(0), WEB, 1.0)
    assert budget.labels(said(-1), WEB, EXPIRY_S) == ALONE
    assert budget.labels(said(-1), WEB, EXPIRY_S + 0.5).known
    assert budget.labels(said(0), WEB, EXPIRY_S + 0.5).known


def test_too_long_baggage_values_are_ignored() -> None:
    budget = BaggageLabels()
    assert budget.labels(replace(SAID, zone="z" * VALUE_CHARACTERS), WEB, 0.0).known
    assert budget.labels(replace(SAID, zone="z" * (VALUE_CHARACTERS + 1)), WEB, 0.0) == ALONE


def test_number_of_remembered_peers_is_bounded() -> None:
    budget = BaggageLabels()
    for number in range(PEERS + 10):
        budget.labels(SAID, SpiffeId("td", "shop", f"w{number}"), 0.0)
    assert len(budget._by_peer) == PEERS
