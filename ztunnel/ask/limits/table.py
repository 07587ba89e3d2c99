"""Every limit of an Istio mesh's proxy, read from its place of use. Pure.

``docs/reliability.md`` has this table with the values of an empty environment, and a test holds it to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.socket import CROWD_SOCKETS, CROWDED_UNSENT_BYTES
from hbone.hpack_cache import TOLERATED_LIST_BYTES
from hbone.limits import Limits
from hbone.settings import Http2Settings
from ztunnel.policy import ledger
from ztunnel.policy.calico import evaluator, follower, live
from ztunnel.proxy.dataplane.half_open import HalfOpenLimits
from ztunnel.proxy.istio.accounting import baggage_labels
from ztunnel.proxy.istio.dns import forwarder, server
from ztunnel.proxy.istio.path import socks5
from ztunnel.proxy.istio.path.node import DNS_QUERIES
from ztunnel.proxy.istio.settings.config import IstioConfig
from ztunnel.proxy.otlp import exporter
from ztunnel.proxy.otlp.settings import OtlpSettings
from ztunnel.runtime import line_limit, log_writer
from ztunnel.runtime.descriptors import reserve_of
from ztunnel.runtime.http import server as pages
from ztunnel.runtime.memory import waiting_bytes

COLUMNS: Final = ("limit", "value", "unit", "variable", "metric", "beyond it", "the peer is told")
_CALM: Final = "ENHANCE_YOUR_CALM"
_CALMED: Final = "ztunnel_calmed_connections"
_TURNED_AWAY: Final = "ztunnel_half_open_turned_away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit.

    Attributes:
        name: the bounded quantity.
        value: the current value. Two values are a burst and a rate per second.
        unit: the value's unit.
        variable: the environment variable that sets it. Empty if there is none.
        metric: the counter of refusals by this limit. Empty if there is none.
        beyond: what happens, and what the log says.
        told: the message that the peer gets.
    """

    name: str
    value: tuple[float, ...]
    unit: str
    variable: str = ""
    metric: str = ""
    beyond: str = ""
    told: str = "nothing"

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of :data:`COLUMNS` as text."""
        value = "; ".join(f"{each:,.10g}" for each in self.value)
        return (self.name, value, self.unit, self.variable or "-", self.metric or "-", self.beyond, self.told)


def limits(config: IstioConfig, *, descriptors: int, memory_bytes: int) -> Iterator[Limit]:
    """Yield every limit of a proxy.

    Args:
        config: its settings.
        descriptors: the limit of the process.
        memory_bytes: how much memory.
    """
    yield from _before_the_handshake(config, descriptors)
    yield from _protocol(Limits())
    yield from _windows(config, memory_bytes)
    yield from _times(config)
    yield from _names()
    yield from _pages_and_logs(config)


def _before_the_handshake(config: IstioConfig, descriptors: int) -> Iterator[Limit]:
    half = HalfOpenLimits.of_descriptors(descriptors, timeout_s=config.handshake_timeout_s)
    closed = "the oldest is closed; tls handshake error: too many half-open connections"
    queued = "waits for its handshake"
    for name, value, unit, beyond in (
        ("half-open connections of a source", half.per_source, "connections to a pod", f"{closed} of this source"),
        ("half-open connections to a pod", half.per_pod, "connections", f"{closed} to this pod"),
        ("half-open connections", half.in_all, "connections", f"{closed}, of the pod with most"),
    ):
        yield Limit(name=name, value=(value,), unit=unit, metric=_TURNED_AWAY, beyond=beyond)
    yield Limit(
        name="ClientHello", value=(half.hello_bytes,), unit="octets", metric=_TURNED_AWAY,
        beyond="closed; tls handshake error: ClientHello is too long",
    )  # fmt: skip
    for name, value in (
        ("handshakes of a source", half.handshakes_per_source),
        ("handshakes of a pod", half.handshakes_per_pod),
        ("handshakes", half.handshakes),
    ):
        yield Limit(name=name, value=(value,), unit="at once", beyond=f"{queued}; see the next row")
    yield Limit(
        name="handshake that stands still while others wait", value=(half.patience_s,), unit="seconds",
        metric=_TURNED_AWAY, beyond="closed; tls handshake error: handshake stands still while others wait",
    )  # fmt: skip
    for name, pair in (
        ("unfinished handshakes of a source", half.unfinished_of_source),
        ("unfinished handshakes of a pod", half.unfinished_of_pod),
        ("unfinished handshakes", half.unfinished),
    ):
        yield Limit(name=name, value=pair, unit="at once; per second", beyond=queued)
    yield Limit(
        name="descriptors kept back", value=(reserve_of(descriptors),), unit=f"of {descriptors:,}",
        variable="ulimit -n", metric="ztunnel_accepts_paused",
        beyond="pods above an equal share accept nothing; readiness: pending descriptors",
    )  # fmt: skip


def _protocol(wire: Limits) -> Iterator[Limit]:
    http2 = Http2Settings()

    def ends(name: str, *value: float, unit: str, beyond: str = "connection ends") -> Limit:
        return Limit(name=name, value=value, unit=unit, metric=_CALMED, beyond=beyond, told=_CALM)

    waits = "it is not read from"
    yield Limit(
        name="`work_burst`, `work_rate`", value=(wire.work_burst, wire.work_rate),
        unit="units of a connection at once; per second", beyond=waits,
    )  # fmt: skip
    yield Limit(
        name="`peer_work_burst`, `peer_work_rate`", value=(wire.peer_work_burst, wire.peer_work_rate),
        unit="units of all connections of a peer", beyond=waits,
    )  # fmt: skip
    yield ends(
        "`stall_burst_s`, `stall_rate`",
        wire.stall_burst_s,
        wire.stall_rate,
        unit="seconds of such pauses; per second",
    )
    yield Limit(
        name="`slice_units`, `slice_s`", value=(wire.slice_units, wire.slice_s),
        unit="units; seconds of a turn", beyond="waits in line",
    )  # fmt: skip
    yield ends(
        "`control_burst`, `control_rate`", wire.control_burst, wire.control_rate,
        unit="SETTINGS, PING, PRIORITY, empty DATA, unearned WINDOW_UPDATE, unknown frames",
    )  # fmt: skip
    yield ends(
        "`reset_burst`, `reset_rate`", wire.reset_burst, wire.reset_rate,
        unit="streams abandoned before our answer, or that we must reset",
    )  # fmt: skip
    yield ends("`unsent_frames`", wire.unsent_frames, unit="control frames that the peer does not read")
    yield ends("`continuation_frames`", wire.continuation_frames, unit="frames of one header block")
    yield ends("`header_block_bytes`", wire.header_block_bytes, unit="encoded octets of a header block")
    yield ends("`settings_bytes`", wire.settings_bytes, unit="octets of a SETTINGS")
    yield ends("`goaway_bytes`", wire.goaway_bytes, unit="octets of a GOAWAY")
    octets = "octets, 32 per field included"
    yield Limit(
        name="decoded header list", value=(http2.max_header_list_bytes,), unit=octets,
        beyond="stream is reset", told="PROTOCOL_ERROR",
    )  # fmt: skip
    yield ends("decoded header list, to be read to its end", TOLERATED_LIST_BYTES, unit=octets)
    assert http2.max_concurrent_streams is not None
    yield Limit(
        name="streams", value=(http2.max_concurrent_streams,), unit="of a connection at once",
        beyond="stream is refused", told="REFUSED_STREAM",
    )  # fmt: skip
    yield Limit(
        name="early data", value=(http2.early_bytes,), unit="octets of a stream before its answer",
        beyond="stream is reset", told=_CALM,
    )  # fmt: skip


def _windows(config: IstioConfig, memory_bytes: int) -> Iterator[Limit]:
    in_all, of_pod = waiting_bytes(memory_bytes // max(1, config.worker_threads))
    stays = "nothing grows"
    for name, value, variable in (
        ("bytes that wait, of a stream", config.stream_window, "HTTP2_STREAM_WINDOW_SIZE"),
        ("bytes that wait, of a connection", config.connection_window, "HTTP2_CONNECTION_WINDOW_SIZE"),
        ("`peer_window_bytes`", Limits().peer_window_bytes, ""),
        ("bytes that wait, of a pod", of_pod, "memory limit"),
        ("bytes that wait, of a process", in_all, "memory limit"),
    ):
        yield Limit(name=name, value=(value,), unit="bytes", variable=variable, beyond=stays)
    yield Limit(
        name=f"unsent bytes in the kernel, from {CROWD_SOCKETS} sockets on", value=(CROWDED_UNSENT_BYTES,),
        unit="bytes of a socket", beyond="its flow waits",
    )  # fmt: skip


def _times(config: IstioConfig) -> Iterator[Limit]:
    settings = ConnectionSettings()
    ends = "connection ends"
    yield Limit(
        name="handshake", value=(config.handshake_timeout_s,), unit="seconds",
        variable="ZTUNNEL_HANDSHAKE_TIMEOUT", beyond=f"{ends}; tls handshake error: TLS handshake timed out",
    )  # fmt: skip
    assert settings.first_request_timeout_s is not None
    yield Limit(
        name="first request",
        value=(settings.first_request_timeout_s,),
        unit="seconds",
        beyond=ends,
        told="NO_ERROR",
    )
    yield Limit(name="PONG", value=(settings.ping_timeout_s,), unit="seconds", beyond=ends, told="NO_ERROR")
    yield Limit(
        name="SOCKS request", value=(socks5.MOST_BYTES,), unit="octets", beyond=ends, told="general failure"
    )
    yield Limit(
        name="tunnels of a pool connection", value=(config.pool_max_streams,), unit="at once",
        variable="POOL_MAX_STREAMS_PER_CONNECTION", beyond="another connection",
    )  # fmt: skip


def _names() -> Iterator[Limit]:
    dropped = "ztunnel_dns_dropped"
    yield Limit(
        name="queries of a pod", value=(server.QUERY_BURST, server.QUERY_RATE), unit="at once; per second",
        metric=dropped, beyond="not read; the kernel drops",
    )  # fmt: skip
    yield Limit(
        name="queries of a pod by UDP", value=(server.QUERIES,), unit="under way", metric=dropped, beyond="dropped"
    )
    yield Limit(name="queries of a pod by TCP", value=(server.CONNECTIONS,), unit="connections", beyond="closed")
    for name, value in (("forwarded queries of a pod", forwarder.POD_QUERIES), ("forwarded queries", DNS_QUERIES)):
        yield Limit(name=name, value=(value,), unit="under way", beyond="wait; server failure in the end")


def _pages_and_logs(config: IstioConfig) -> Iterator[Limit]:
    yield Limit(
        name="connections of each page server", value=(pages.CONNECTIONS,), unit="at once",
        beyond="one of the address with most is closed",
    )  # fmt: skip
    yield Limit(
        name="body of a page's request", value=(pages.MAX_BODY,), unit="octets", beyond="refused", told="413"
    )
    yield Limit(
        name="label sets of a peer's baggage", value=(baggage_labels.SETS_PER_PEER,), unit="of a principal",
        metric="ztunnel_baggage_refused", beyond="counted by its principal alone",
    )  # fmt: skip
    yield Limit(
        name="metric series", value=(config.metric_series,), unit="label sets", variable="ZTUNNEL_METRIC_SERIES",
        metric="ztunnel_metric_series_over_budget", beyond="counted with unknown workloads",
    )  # fmt: skip
    yield Limit(
        name="lines about connections denied before their handshake; by policies, without access lines",
        value=(line_limit.BURST, line_limit.RATE),
        unit="of a pod at once; per second", beyond="counted in one line: have no line left_out=N",
    )  # fmt: skip
    yield Limit(
        name="denials that `/denials` lists", value=(ledger.MOST_PAIRS,), unit="pairs of workloads",
        beyond="the pair that was denied longest ago is left out",
    )  # fmt: skip
    yield Limit(
        name="policies that are counted", value=(ledger.MOST_POLICIES,), unit="policies of a kind",
        beyond="the one that decided longest ago is left out",
    )  # fmt: skip
    yield Limit(
        name="log lines that cannot be written", value=(log_writer.MAX_PENDING,), unit="bytes",
        metric="ztunnel_log_lines_dropped", beyond="dropped and counted",
    )  # fmt: skip
    otlp = config.otlp or OtlpSettings()
    yield Limit(
        name="access lines that an OpenTelemetry collector has not taken; its requests of metrics",
        value=(otlp.lines.queue, exporter.REQUESTS), unit="lines; requests",
        variable="OTEL_BLRP_MAX_QUEUE_SIZE", metric="ztunnel_otlp_dropped",
        beyond="the oldest are dropped and counted",
    )  # fmt: skip
    yield Limit(
        name="spans that an OpenTelemetry collector has not taken",
        value=(otlp.spans.queue,), unit="spans",
        variable="OTEL_BSP_MAX_QUEUE_SIZE", metric="ztunnel_otlp_dropped",
        beyond="the oldest are dropped and counted",
    )  # fmt: skip
    yield from _policies()


def _policies() -> Iterator[Limit]:
    """Yield the limits of Calico's policies, in the proxy and in policy servers."""
    yield Limit(
        name="policies of a PolicySync server", value=(follower.OBJECTS,),
        unit="members of IP sets, or what takes as much memory",
        beyond="the stream ends; the last complete policies hold; the server has sent more than N objects",
    )  # fmt: skip
    yield Limit(
        name="message of a PolicySync server", value=(follower.MESSAGE_BYTES,), unit="bytes",
        beyond="the stream ends; the last complete policies hold", told="RESOURCE_EXHAUSTED",
    )  # fmt: skip
    yield Limit(
        name="unreadable messages of a PolicySync server", value=(follower.FAULTS,), unit="of a stream",
        beyond="the stream ends; the last complete policies hold; N messages cannot be read",
    )  # fmt: skip
    yield Limit(
        name="wait for a pod's policies", value=(live.GRACE_S,), unit="seconds of a connection",
        variable="CALICO_UNKNOWN_PODS", metric="ztunnel_policy_decisions",
        beyond="denied; the policies know no pod with the address", told="401",
    )  # fmt: skip
    yield Limit(
        name="answers of policies that are kept", value=(evaluator.CACHED_VERDICTS,), unit="answers",
        beyond="all are dropped and made again",
    )  # fmt: skip
