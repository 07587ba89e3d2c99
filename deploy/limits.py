"""Writes the table of limits into ``docs/reliability.md``: ``python -m deploy.limits``.

The table has every limit of a proxy in an Istio mesh. The values are read from the modules that use them, for an
empty environment. A test compares the page with this table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.socket import CROWD_SOCKETS, CROWDED_UNSENT_BYTES
from hbone.hpack_cache import TOLERATED_LIST_BYTES
from hbone.limits import Limits
from hbone.settings import Http2Settings
from ztunnel.policy import ledger
from ztunnel.policy.calico import evaluator, follower, live
from ztunnel.proxy.dataplane.handshake_limiter import HalfOpenLimits
from ztunnel.proxy.istio.accounting import peer_baggage_labels
from ztunnel.proxy.istio.dns import forwarder, server
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.path import socks5
from ztunnel.proxy.istio.path.node import DNS_QUERIES
from ztunnel.proxy.istio.settings.config import IstioConfig
from ztunnel.proxy.otlp import exporter
from ztunnel.proxy.otlp.settings import OtlpSettings
from ztunnel.runtime import line_limit, log_writer
from ztunnel.runtime.descriptors import reserve_of
from ztunnel.runtime.http import server as pages
from ztunnel.runtime.memory import waiting_bytes

PAGE: Final = Path(__file__).parents[1] / "docs" / "reliability.md"
COLUMNS: Final = ("limit", "value", "unit", "variable", "metric", "beyond it", "the peer is told")
_DESCRIPTORS: Final = 1_000_000
_MEMORY_BYTES: Final = 4 << 30
_CALM: Final = "ENHANCE_YOUR_CALM"
_CALMED: Final = "ztunnel_calmed_connections"
_REJECTED: Final = "ztunnel_half_open_turned_away"
_ENDS: Final = "connection ends"


class Limit(NamedTuple):
    """One row of the limit table. A pair of values is a burst and a rate per second."""

    name: str
    value: float | tuple[float, ...] | None
    unit: str
    beyond: str
    variable: str = "-"
    metric: str = "-"
    told: str = "nothing"

    @property
    def values(self) -> tuple[float, ...]:
        """One or two values."""
        if isinstance(self.value, tuple):
            return self.value
        assert self.value is not None
        return (self.value,)

    @property
    def row(self) -> str:
        """The row as a line of a Markdown table."""
        value = "; ".join(f"{each:,.10g}" for each in self.values)
        cells = (self.name, value, self.unit, self.variable, self.metric, self.beyond, self.told)
        return f"| {' | '.join(cells)} |"


def limits() -> Iterator[Limit]:
    """Yield every limit."""
    config = config_from({}, cpus=1, read_file=lambda path: None)
    yield from _before_the_handshake(config)
    yield from _protocol(Limits(), Http2Settings())
    yield from _windows_and_times(config, ConnectionSettings())
    yield from _names_and_pages(config, config.otlp or OtlpSettings())
    yield from _policies()


def _before_the_handshake(config: IstioConfig) -> Iterator[Limit]:
    half = HalfOpenLimits.of_descriptors(_DESCRIPTORS, timeout_s=config.handshake_timeout_s)
    error = "tls handshake error:"
    closed = f"the oldest is closed; {error} too many half-open connections"
    for name, value, unit, which in (
        ("half-open connections of a source", half.per_source, "connections to a pod", " of this source"),
        ("half-open connections to a pod", half.per_pod, "connections", " to this pod"),
        ("half-open connections", half.in_all, "connections", ", of the pod with most"),
    ):
        yield Limit(name, value, unit, f"{closed}{which}", metric=_REJECTED)
    too_long = f"closed; {error} ClientHello is too long"
    yield Limit("ClientHello", half.hello_bytes, "octets", too_long, metric=_REJECTED)
    queued = "further connections wait for their handshake"
    yield Limit("handshakes of a source", half.handshakes_per_source, "at once", queued)
    yield Limit("handshakes of a pod", half.handshakes_per_pod, "at once", queued)
    yield Limit("handshakes", half.handshakes, "at once", queued)
    stalled = "handshake that stalled while others wait"
    yield Limit(
        stalled, half.patience_s, "seconds", f"closed; {error} {stalled.replace(' that', '')}", metric=_REJECTED
    )
    unit = "at once; per second"
    yield Limit("unfinished handshakes of a source", half.unfinished_of_source, unit, queued)
    yield Limit("unfinished handshakes of a pod", half.unfinished_of_pod, unit, queued)
    yield Limit("unfinished handshakes", half.unfinished, unit, queued)
    yield Limit(
        "reserved descriptors", reserve_of(_DESCRIPTORS), f"of {_DESCRIPTORS:,}",
        "pods above an equal share accept nothing; readiness: pending descriptors",
        "ulimit -n", "ztunnel_accepts_paused",
    )  # fmt: skip


def _protocol(wire: Limits, http2: Http2Settings) -> Iterator[Limit]:
    def ends(name: str, value: float | tuple[float, ...], unit: str) -> Limit:
        return Limit(name, value, unit, _ENDS, metric=_CALMED, told=_CALM)

    waits = "the connection is not read until the budget is balanced"
    units = "units of a connection at once; per second"
    yield Limit("`work_burst`, `work_rate`", (wire.work_burst, wire.work_rate), units, waits)
    units = "units of all connections of a peer"
    yield Limit("`peer_work_burst`, `peer_work_rate`", (wire.peer_work_burst, wire.peer_work_rate), units, waits)
    stalls = (wire.stall_burst_s, wire.stall_rate)
    yield ends("`stall_burst_s`, `stall_rate`", stalls, "seconds of such pauses; per second")
    slices = (wire.slice_units, wire.slice_s)
    yield Limit(
        "`slice_units`, `slice_s`", slices, "units; seconds of an iteration", "the rest waits in the run queue"
    )
    frames = "SETTINGS, PING, PRIORITY, empty DATA, unearned WINDOW_UPDATE, unknown frames"
    yield ends("`control_burst`, `control_rate`", (wire.control_burst, wire.control_rate), frames)
    streams = "streams that the peer resets before our response, or makes us reset"
    yield ends("`reset_burst`, `reset_rate`", (wire.reset_burst, wire.reset_rate), streams)
    yield ends("`unsent_frames`", wire.unsent_frames, "control frames that the peer does not read")
    yield ends("`continuation_frames`", wire.continuation_frames, "frames of one header block")
    yield ends("`header_block_bytes`", wire.header_block_bytes, "encoded octets of a header block")
    yield ends("`settings_bytes`", wire.settings_bytes, "octets of a SETTINGS")
    yield ends("`goaway_bytes`", wire.goaway_bytes, "octets of a GOAWAY")
    octets, reset = "octets, 32 per field included", "stream is reset"
    yield Limit("decoded header list", http2.max_header_list_bytes, octets, reset, told="PROTOCOL_ERROR")
    yield ends("decoded header list, to be read to its end", TOLERATED_LIST_BYTES, octets)
    most = http2.max_concurrent_streams
    streams = (
        "of a connection at once; those refused before the peer has acknowledged our SETTINGS count as control "
        "frames, later ones as resets"
    )
    yield Limit("streams", most, streams, "stream is refused", told="REFUSED_STREAM")
    yield Limit("early data", http2.early_bytes, "octets of a stream before its response", reset, told=_CALM)


def _windows_and_times(config: IstioConfig, settings: ConnectionSettings) -> Iterator[Limit]:
    in_all, of_pod = waiting_bytes(_MEMORY_BYTES // max(1, config.worker_threads))
    for name, value, variable in (
        ("bytes that wait, of a stream", config.stream_window, "HTTP2_STREAM_WINDOW_SIZE"),
        ("bytes that wait, of a connection", config.connection_window, "HTTP2_CONNECTION_WINDOW_SIZE"),
        ("`peer_window_bytes`", Limits().peer_window_bytes, "-"),
        ("bytes that wait, of a pod", of_pod, "memory limit"),
        ("bytes that wait, of a process", in_all, "memory limit"),
    ):
        yield Limit(name, value, "bytes", "windows do not grow", variable)
    crowd = f"unsent bytes in the kernel, from {CROWD_SOCKETS} sockets on"
    yield Limit(crowd, CROWDED_UNSENT_BYTES, "bytes of a socket", "the flow waits")
    timeout = f"{_ENDS}; tls handshake error: TLS handshake timed out"
    yield Limit("handshake", config.handshake_timeout_s, "seconds", timeout, "ZTUNNEL_HANDSHAKE_TIMEOUT")
    yield Limit("first request", settings.first_request_timeout_s, "seconds", _ENDS, told="NO_ERROR")
    yield Limit("PONG", settings.ping_timeout_s, "seconds", _ENDS, told="NO_ERROR")
    yield Limit("SOCKS request", socks5.MOST_BYTES, "octets", _ENDS, told="general failure")
    variable = "POOL_MAX_STREAMS_PER_CONNECTION"
    yield Limit(
        "tunnels of a pool connection",
        config.pool_max_streams,
        "at once",
        "a further connection is opened",
        variable,
    )


def _names_and_pages(config: IstioConfig, otlp: OtlpSettings) -> Iterator[Limit]:
    dropped = "ztunnel_dns_dropped"
    queries = (server.QUERY_BURST, server.QUERY_RATE)
    yield Limit(
        "queries of a pod",
        queries,
        "at once; per second",
        "further queries are not read, and the kernel drops some",
        metric=dropped,
    )
    yield Limit("queries of a pod by UDP", server.QUERIES, "under way", "dropped", metric=dropped)
    yield Limit("queries of a pod by TCP", server.CONNECTIONS, "connections", "closed")
    failure = "further queries wait; if this takes too long, the answer is SERVFAIL"
    yield Limit("forwarded queries of a pod", forwarder.POD_QUERIES, "under way", failure)
    yield Limit("forwarded queries", DNS_QUERIES, "under way", failure)
    closed = "a connection of the address with most connections is closed"
    yield Limit("connections of each page server", pages.CONNECTIONS, "at once", closed)
    yield Limit("body of a page's request", pages.MAX_BODY, "octets", "refused", told="413")
    yield Limit(
        "label sets of a peer's baggage", peer_baggage_labels.SETS_PER_PEER, "of a principal",
        "the peer is counted by its principal alone", metric="ztunnel_baggage_refused",
    )  # fmt: skip
    yield Limit(
        "metric series", config.metric_series, "label sets", "further series are counted under unknown workloads",
        "ZTUNNEL_METRIC_SERIES", "ztunnel_metric_series_over_budget",
    )  # fmt: skip
    yield Limit(
        "log lines about connections denied before their handshake, or by policies if access lines are off",
        (line_limit.BURST, line_limit.RATE), "of a pod at once; per second",
        "the rest is counted in one line: have no line left_out=N",
    )  # fmt: skip
    denied = "the pair whose last denial is oldest is left out"
    yield Limit("denials that `/denials` lists", ledger.MOST_PAIRS, "pairs of workloads", denied)
    decided = "the policy whose last decision is oldest is left out"
    yield Limit("policies that are counted", ledger.MOST_POLICIES, "policies of a kind", decided)
    lines = "ztunnel_log_lines_dropped"
    pending = log_writer.MAX_PENDING
    yield Limit("log lines that cannot be written", pending, "bytes", "dropped and counted", metric=lines)
    oldest, metric = "the oldest are dropped and counted", "ztunnel_otlp_dropped"
    yield Limit(
        "access lines not yet accepted by an OpenTelemetry collector; requests with metrics",
        (otlp.lines.queue, exporter.REQUESTS), "lines; requests", oldest, "OTEL_BLRP_MAX_QUEUE_SIZE", metric,
    )  # fmt: skip
    spans = "spans not yet accepted by an OpenTelemetry collector"
    yield Limit(spans, otlp.spans.queue, "spans", oldest, "OTEL_BSP_MAX_QUEUE_SIZE", metric)


def _policies() -> Iterator[Limit]:
    """Yield the limits of Calico's policies, in the proxy and in policy servers."""
    hold = "the stream ends; the last complete policies stay in use"
    objects = "members of IP sets, or objects of the same total size"
    more = f"{hold}; log: the server has sent more than N objects"
    yield Limit("policies of a PolicySync server", follower.OBJECTS, objects, more)
    size = follower.MESSAGE_BYTES
    yield Limit("message of a PolicySync server", size, "bytes", hold, told="RESOURCE_EXHAUSTED")
    faults = f"{hold}; log: N messages cannot be read"
    yield Limit("unreadable messages of a PolicySync server", follower.FAULTS, "of a stream", faults)
    yield Limit(
        "wait for a pod's policies", live.GRACE_S, "seconds of a connection",
        "the connection is denied: the policies know no pod with the address",
        "CALICO_UNKNOWN_PODS", "ztunnel_policy_decisions", "401",
    )  # fmt: skip
    kept = "the cache is emptied"
    yield Limit("cached results of policies", evaluator.CACHED_VERDICTS, "results", kept)


def table() -> str:
    """Return the table in Markdown."""
    head = (f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|")
    return "\n".join((*head, *(limit.row for limit in limits()))) + "\n"


def main() -> None:
    """Replace the table of the page."""
    head = re.escape(f"| {' | '.join(COLUMNS)} |\n")
    text = PAGE.read_text()
    replaced, count = re.subn(rf"{head}(\|.*\n)+", lambda _: table(), text)
    assert count == 1, "the page has no table of limits"
    PAGE.write_text(replaced)


if __name__ == "__main__":
    main()
