"""The statistics of a cluster, and the resources in use that its circuit breakers compare with their limits."""

from functools import partial
from operator import attrgetter
from typing import Any

from hbone.errors import TlsError, TlsReason
from hbone.tls import PeerFacts
from xds.model.cluster import Cluster
from ztunnel.proxy.envoy.stats.stats import (
    Counter,
    Declared,
    Gauge,
    Histogram,
    OnTouch,
    Stats,
    cluster_scope,
    count_parameters,
    declared_in,
)


class ClusterStats:
    """Counters of one cluster, each created on first use, because most clusters of a big mesh never
    carry bytes.
    """

    __slots__ = ("__dict__", "scope")

    cx_total = OnTouch(Counter, "upstream_cx_total")
    cx_active = OnTouch(Gauge, "upstream_cx_active")
    cx_destroy = OnTouch(Counter, "upstream_cx_destroy")
    cx_destroy_local = OnTouch(Counter, "upstream_cx_destroy_local")
    cx_destroy_remote = OnTouch(Counter, "upstream_cx_destroy_remote")
    cx_destroy_active = OnTouch(Counter, "upstream_cx_destroy_with_active_rq")
    cx_destroy_local_active = OnTouch(Counter, "upstream_cx_destroy_local_with_active_rq")
    cx_destroy_remote_active = OnTouch(Counter, "upstream_cx_destroy_remote_with_active_rq")
    cx_connect_ms = OnTouch(Histogram, "upstream_cx_connect_ms")
    cx_length_ms = OnTouch(Histogram, "upstream_cx_length_ms")
    cx_http2 = OnTouch(Counter, "upstream_cx_http2_total")
    cx_connect_fail = OnTouch(Counter, "upstream_cx_connect_fail")
    cx_attempts_exceeded = OnTouch(Counter, "upstream_cx_connect_attempts_exceeded")
    cx_connect_timeout = OnTouch(Counter, "upstream_cx_connect_timeout")
    cx_overflow = OnTouch(Counter, "upstream_cx_overflow")
    cx_none_healthy = OnTouch(Counter, "upstream_cx_none_healthy")
    cx_rx_bytes = OnTouch(Counter, "upstream_cx_rx_bytes_total")
    cx_tx_bytes = OnTouch(Counter, "upstream_cx_tx_bytes_total")
    rq_total = OnTouch(Counter, "upstream_rq_total")
    rq_active = OnTouch(Gauge, "upstream_rq_active")
    rq_pending_overflow = OnTouch(Counter, "upstream_rq_pending_overflow")
    rq_timeout = OnTouch(Counter, "upstream_rq_timeout")
    retry_overflow = OnTouch(Counter, "upstream_rq_retry_overflow")
    original_dst_host_invalid = OnTouch(Counter, "original_dst_host_invalid")
    secrets_not_ready = OnTouch(Counter, "client_ssl_socket_factory.upstream_context_secrets_not_ready")
    sds_updates = OnTouch(Counter, "client_ssl_socket_factory.ssl_context_update_by_sds")
    handshakes = OnTouch(Counter, "ssl.handshake")
    ssl_errors = OnTouch(Counter, "ssl.connection_error")
    ssl_fail_verify = OnTouch(Counter, "ssl.fail_verify_error")
    ssl_fail_verify_san = OnTouch(Counter, "ssl.fail_verify_san")
    drop_overload = OnTouch(Counter, "upstream_rq_drop_overload")
    bind_errors = OnTouch(Counter, "bind_errors")
    lb_healthy_panic = OnTouch(Counter, "lb_healthy_panic")

    def __init__(self, stats: Stats, model: Cluster) -> None:
        self.scope = cluster_scope(stats, model.alt_stat_name or model.name)

    def negotiated(self, facts: PeerFacts) -> None:
        """Count a finished TLS handshake by its negotiated parameters."""
        self.handshakes.value += 1
        count_parameters(self.scope.scope("ssl"), facts.version, facts.cipher, facts.group)

    def ssl_failed(self, error: TlsError) -> None:
        """Count a failed TLS handshake by the reason of the failure."""
        if error.by_peer:
            self.ssl_errors.value += 1
        elif error.reason is TlsReason.SAN:
            self.ssl_fail_verify_san.value += 1
        elif error.reason in (TlsReason.CHAIN, TlsReason.EXPIRED, TlsReason.REVOKED):
            self.ssl_fail_verify.value += 1
        else:
            self.ssl_errors.value += 1

    def declare(self) -> None:
        """Show the counters on pages before they are created."""
        self.scope.declare(_COUNTED, None)


_COUNTED = declared_in(ClusterStats)


class Breaker:
    """The circuit breaker of a cluster: counts resources in use, and compares the counts with the limits of
    priority DEFAULT.
    """

    __slots__ = ("connections", "limits", "pending", "requests")

    def __init__(self, model: Cluster) -> None:
        self.limits = model.breakers[0]
        self.connections = 0
        self.pending = 0
        self.requests = 0

    @property
    def connections_open(self) -> bool:
        """Whether the limit of connections is reached. (An open circuit breaker admits no further connections.)"""
        return self.connections >= self.limits.max_connections

    @property
    def pending_open(self) -> bool:
        """Whether the limit of waiting requests is reached."""
        return self.pending >= self.limits.max_pending_requests

    @property
    def requests_open(self) -> bool:
        """Whether the limit of requests is reached."""
        return self.requests >= self.limits.max_requests


#: Statistics of the version that was created last.
WARMING = (Declared("warming_state", Gauge, lambda cluster: int(not cluster.warm.is_set())),)
#: Statistics of the version in use.
STATE = (
    Declared("membership_change", Counter, lambda cluster: cluster.host_changes),
    Declared("membership_total", Gauge, lambda cluster: cluster.host_count),
    Declared("membership_healthy", Gauge, lambda cluster: cluster.healthy_count),
    Declared("membership_degraded", Gauge, lambda cluster: cluster.degraded_count),
    Declared("update_empty", Counter, lambda cluster: cluster.empty_updates),
    Declared("update_no_rebuild", Counter, lambda cluster: cluster.unchanged_updates),
    Declared("circuit_breakers.default.cx_open", Gauge, lambda cluster: int(cluster.breaker.connections_open)),
    Declared("circuit_breakers.default.rq_open", Gauge, lambda cluster: int(cluster.breaker.requests_open)),
    Declared("circuit_breakers.default.rq_pending_open", Gauge, lambda cluster: int(cluster.breaker.pending_open)),
)


def remaining(priority: str) -> tuple[Declared, ...]:
    """Return the statistics of ``track_remaining``. All connections here have the priority DEFAULT."""
    used = {"cx": "connections", "pending": "pending", "rq": "requests"}
    limits = {"cx": "max_connections", "pending": "max_pending_requests", "rq": "max_requests"}
    place = ("default", "high").index(priority)

    def left(cluster: Any, short: str) -> int:
        limit: int = getattr(cluster.model.breakers[place], limits[short])
        return max(0, limit - (getattr(cluster.breaker, used[short]) if place == 0 else 0))

    shown = [
        Declared(f"circuit_breakers.{priority}.remaining_{short}", Gauge, partial(left, short=short))
        for short in used
    ]
    retries = Declared(
        f"circuit_breakers.{priority}.remaining_retries",
        Gauge,
        lambda cluster: cluster.model.breakers[place].max_retries,
    )
    return (*shown, retries)


#: Envoy's update statistics for a cluster without an EDS subscription. In a DNS cluster, each resolution counts as
#: an update.
UPDATES = (
    *(
        Declared(name, Counter, attrgetter(f"updates.{name}"))
        for name in ("update_attempt", "update_success", "update_failure")
    ),
    Declared("version", Gauge),
)
