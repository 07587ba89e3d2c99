"""Defines the key under which denied connections of an Istio mesh are counted, by :mod:`ztunnel.policy.ledger`."""

from typing import NamedTuple


class Pair(NamedTuple):
    """The source and the destination of a denied connection.

    Attributes:
        direction: ``inbound`` or ``outbound``.
        source: ``NAME.NAMESPACE`` of the workload, or its address if the workload is unknown.
        identity: the proven SPIFFE id of the source. Empty for plain text.
        destination: ``NAME.NAMESPACE:PORT``, with the address if the workload is unknown.
        reason: the reason for the denial, as in the access line. It names the denying policy, if there is one.
    """

    direction: str
    source: str
    identity: str
    destination: str
    reason: str
