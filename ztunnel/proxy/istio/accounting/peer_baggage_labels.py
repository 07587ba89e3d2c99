"""Limits the labels in metrics and logs that are taken from peers' own baggage. Pure.

A peer that is unknown to the control plane, or behind a gateway, is labelled by its own baggage. Each principal
has a budget of label sets. Once it is used up, a connection is labelled by its authenticated principal alone.
Without a budget, a single peer could fill the metrics page, and later peers would count as unknown.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from hbone.tunnel_headers import Baggage
from xds.model.identity import SpiffeId
from ztunnel.proxy.istio.accounting.metrics import EXPIRY_S, PeerLabels

#: The most label sets per principal. A service account rarely needs more: it has few deployments and zones.
SETS_PER_PEER: Final = 64
PEERS: Final = 2048
#: The maximum length of a label value taken from baggage, equal to that of a name in Kubernetes.
VALUE_CHARACTERS: Final = 253


class BaggageLabels:
    """The label sets that peers sent as baggage, by principal. A set unused for :data:`EXPIRY_S` is dropped.

    Attributes:
        refused: the total number of connections labelled only by their principal, because the budget was used up.
    """

    def __init__(self) -> None:
        self.refused = 0
        self._by_peer: OrderedDict[str, OrderedDict[PeerLabels, float]] = OrderedDict()

    def labels(self, baggage: Baggage, identity: SpiffeId | None, now_s: float) -> PeerLabels:
        """Return the labels of a connection.

        Args:
            baggage: the peer's baggage.
            identity: the identity in the peer's certificate. Its namespace overrides the one in the baggage.
            now_s: monotonic seconds.
        """
        principal = str(identity) if identity is not None else ""
        alone = PeerLabels(principal=principal, namespace=identity.namespace if identity is not None else "")
        if baggage == Baggage():
            return alone._replace(namespace="")
        labels = PeerLabels.of_baggage(baggage, principal)
        if identity is not None:
            labels = labels._replace(namespace=identity.namespace)
        if any(isinstance(value, str) and len(value) > VALUE_CHARACTERS for value in labels):
            self.refused += 1
            return alone
        known = self._by_peer.get(principal)
        if known is None:
            if len(self._by_peer) >= PEERS:
                self._by_peer.popitem(last=False)
            known = self._by_peer[principal] = OrderedDict()
        self._by_peer.move_to_end(principal)
        if labels not in known:
            while known and now_s - next(iter(known.values())) > EXPIRY_S:
                known.popitem(last=False)
            if len(known) >= SETS_PER_PEER:
                self.refused += 1
                return alone
        known[labels] = now_s
        known.move_to_end(labels)
        return labels
