"""Creates the metrics of hand-overs, for the metrics pages of both dialects (Istio and Envoy)."""

from collections.abc import Iterator
from typing import Final

from ztunnel.proxy.dataplane.handover.counts import HandoverCounts
from ztunnel.runtime.http.exposition import Family, family
from ztunnel.runtime.http.prometheus import Metric, Sample

_PAUSE: Final = "ztunnel_handover_pause_seconds"
_CONNECTIONS: Final = "Connections that moved or did not, to a successor or from a predecessor (unstable)"


def handover_families(counts: HandoverCounts) -> Iterator[Family]:
    """Yield the counter of hand-over results and, once there was an offer, the histogram of pauses."""
    results = list(counts.connections.items())
    yield family("ztunnel_handover_connections", "counter", _CONNECTIONS, results, ("result", "reason"))
    if counts.offers:
        pauses = Metric(_PAUSE, "Pauses of the connections that moved (unstable).", "histogram", "seconds")
        yield Family(pauses, _pauses(counts))


def _pauses(counts: HandoverCounts) -> Iterator[Sample]:
    for bound, count in counts.cumulative():
        yield Sample(f"{_PAUSE}_bucket", {"le": bound}, count)
    yield Sample(f"{_PAUSE}_count", {}, counts.offers)
    yield Sample(f"{_PAUSE}_sum", {}, counts.paused_s)
