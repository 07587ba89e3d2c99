"""A worker's answers stay within the limit of the main process, whatever texts peers choose."""

from typing import Any
from unittest import mock

from ztunnel.proxy.istio.accounting.metrics import TRAFFIC_LABELS, Counts, Metrics, TrafficCounts
from ztunnel.proxy.istio.workers.messages import MAX_WORKER_BYTES, ConnectionsPart, CountsPart, Response, encode
from ztunnel.proxy.istio.workers.worker import _connections

#: A request's header list has at most 64 KiB.
LONG = 60_000


def frame_bytes(value: ConnectionsPart | CountsPart) -> int:
    return len(encode(Response(number=1, value=value, more=True)))


def test_connections_whose_peers_sent_long_service_names_are_split() -> None:
    shown = [{"originalDst": f"{number}{'x' * LONG}", "src": "10.0.0.1:1"} for number in range(500)]
    pods: Any = {7: mock.Mock(**{"proxy.dump.return_value": {"inbound": shown, "outbound": []}})}
    parts = list(_connections(pods))
    assert [each for part in parts for each in part.entries] == shown
    assert all(frame_bytes(part) < MAX_WORKER_BYTES for part in parts)


def test_counts_of_series_with_many_workloads_are_split() -> None:
    metrics = Metrics("v", 100)
    for number in range(60):
        metrics.add(Counts(traffic=(_series(str(number), 2000),)), lost=True)
    parts = list(metrics.counts())
    assert sorted(series.labels for part in parts for series in part.traffic) == sorted(
        (str(number),) * len(TRAFFIC_LABELS) for number in range(60)
    )
    assert all(frame_bytes(CountsPart(part)) < MAX_WORKER_BYTES for part in parts)


def _series(label: str, workloads: int) -> TrafficCounts:
    uids = tuple(f"Kubernetes//Pod/{'n' * 63}/{'d' * 40}-{number}" for number in range(workloads))
    return TrafficCounts((label,) * len(TRAFFIC_LABELS), 1, (), 0, 0, uids, 0, 0, False)
