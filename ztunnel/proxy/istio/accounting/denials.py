"""What a denied connection is counted under in an Istio mesh; :mod:`ztunnel.policy.ledger` counts."""

from typing import NamedTuple


class Pair(NamedTuple):
    """Who was denied what.

    Attributes:
        direction: ``inbound`` or ``outbound``.
        source: ``NAME.NAMESPACE`` of the workload, its address where it is unknown.
        identity: the proven SPIFFE id of the source; empty for plain text.
        destination: ``NAME.NAMESPACE:PORT``, with the address where the workload is unknown.
        reason: as the access line has it; it names the policy, unless none allowed.
    """

    direction: str
    source: str
    identity: str
    destination: str
    reason: str
