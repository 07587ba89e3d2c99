"""Exemplars of connection times on the metrics pages: in OpenMetrics only."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Exemplar, Sample, Timestamp

from ztunnel.proxy.flows.families import time_families
from ztunnel.proxy.flows.times import ConnectionTimes
from ztunnel.runtime.http.exposition import page
from ztunnel.runtime.http.page import PageRequest

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACE = f"00-{TRACE_ID}-b7ad6b7169203331-01".encode()
#: What Prometheus asks for.
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def text_of(times: ConnectionTimes, accept: str) -> str:
    answer = page(time_families(times), PageRequest(method="GET", path="/metrics", accept=accept))
    return b"".join(piece for piece in answer.body if isinstance(piece, bytes)).decode()


def buckets(text: str, name: str) -> dict[str, Sample]:
    """Return the buckets of the only histogram of a family, by their upper bounds."""
    (family,) = (each for each in parse_openmetrics(text) if each.name == name)
    return {sample.labels["le"]: sample for sample in family.samples if sample.name.endswith("_bucket")}


def test_buckets_have_the_trace_of_a_connection_in_openmetrics() -> None:
    times = ConnectionTimes()
    times.connects["hbone", "ok"].observe(0.002, TRACE, 1_700_000_000.1234)
    times.connects["hbone", "ok"].observe(0.2)
    found = buckets(text_of(times, OPENMETRICS), "ztunnel_connect_seconds")
    exemplars = {bound: sample.exemplar for bound, sample in found.items() if sample.exemplar is not None}
    assert exemplars == {"0.0025": Exemplar({"trace_id": TRACE_ID}, 0.002, Timestamp(1_700_000_000, 123_000_000))}
    assert found["+Inf"].value == 2


def test_text_format_has_no_exemplars() -> None:
    times = ConnectionTimes()
    times.connects["hbone", "ok"].observe(0.002, TRACE, 1_700_000_000.0)
    text = text_of(times, "text/plain")
    assert TRACE_ID not in text
    (family,) = (each for each in parse_text(text) if each.name == "ztunnel_connect_seconds")
    assert all(sample.exemplar is None for sample in family.samples)


@pytest.mark.parametrize("trace", [b"x" * 60, b"00-" + b"0" * 32 + TRACE[35:], b'00-"\\\n' + TRACE[6:]])
def test_a_peers_invalid_trace_is_left_out(trace: bytes) -> None:
    times = ConnectionTimes()
    times.lengths["destination", "hbone"].observe(0.002, trace, 1_700_000_000.0)
    found = buckets(text_of(times, OPENMETRICS), "ztunnel_connection_seconds")
    assert [sample.exemplar for sample in found.values()] == [None] * 13
