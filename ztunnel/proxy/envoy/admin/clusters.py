"""Makes ``/clusters``: every host of every active cluster with its state, as lines or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from xds.model.cluster import CircuitBreakers
from xds.proto.dump import format_json, to_dict
from xds.proto.envoy.admin.v3 import admin_pb2 as admin
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from ztunnel.proxy.envoy.admin.dump import address_message, health_of
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster
from ztunnel.proxy.envoy.upstream.host import Host
from ztunnel.runtime.http.page import Piece, printable

Shown = Callable[[str], bool]

#: The counts of a host, in the order of the text page. Request errors, timeouts and pending requests are always 0,
#: as with Envoy's TCP proxy, because only Envoy's HTTP router counts these.
_COUNTS = (
    *("cx_active", "cx_connect_fail", "cx_total", "rq_active", "rq_error", "rq_pending_active"),
    *("rq_success", "rq_timeout", "rq_total"),
)
_GAUGES = ("cx_active", "rq_active", "rq_pending_active")
_LIMITS = ("max_connections", "max_pending_requests", "max_requests", "max_retries")


def _shown(proxy: InspectedProxy, shown: Shown) -> Iterator[LiveCluster]:
    return (cluster for cluster in proxy.clusters.active if shown(cluster.model.name))


def _count(host: Host, name: str) -> int:
    return int(getattr(host, name, 0))


# Lines


def text_pieces(proxy: InspectedProxy, shown: Shown) -> Iterator[Piece]:
    """Yield the lines of the text page (``<cluster>::...``) in pieces: one for each cluster and each host."""
    for cluster in _shown(proxy, shown):
        name = printable(cluster.model.name)
        yield "".join(f"{name}::{line}\n" for line in _cluster_lines(cluster))
        for host, priority in hosts_of(cluster):
            address = printable(str(host.endpoint.address))
            yield "".join(f"{name}::{address}::{line}\n" for line in _host_lines(host, priority))


def _cluster_lines(cluster: LiveCluster) -> Iterator[str]:
    model = cluster.model
    yield f"observability_name::{printable(model.alt_stat_name or model.name)}"
    for kind, limits in zip(("default", "high"), model.breakers, strict=True):
        for name in _LIMITS:
            yield f"{kind}_priority::{name}::{getattr(limits, name)}"
    yield f"added_via_api::{'true' if cluster.added_via_api else 'false'}"
    if _service_name(cluster):
        yield f"eds_service_name::{printable(_service_name(cluster))}"


def _host_lines(host: Host, priority: int) -> Iterator[str]:
    for name in _COUNTS:
        yield f"{name}::{_count(host, name)}"
    endpoint = host.endpoint
    locality = endpoint.locality
    canary = endpoint.metadata.get("envoy.lb", {}).get("canary") is True
    yield f"hostname::{printable(endpoint.hostname)}"
    yield f"health_flags::{host.flags}"
    yield f"weight::{endpoint.weight}"
    yield f"region::{printable(locality.region)}"
    yield f"zone::{printable(locality.zone)}"
    yield f"sub_zone::{printable(locality.sub_zone)}"
    yield f"canary::{'true' if canary else 'false'}"
    yield f"priority::{priority}"
    yield "success_rate::-1"
    yield "local_origin_success_rate::-1"


def hosts_of(cluster: LiveCluster) -> Iterator[tuple[Host, int]]:
    """Yield each host of a cluster with its priority. ORIGINAL_DST hosts (priority 0) come last."""
    hosts = cluster.hosts_shown
    for priority, level in enumerate(hosts.levels):
        for group in level.groups:
            yield from ((host, priority) for host in group.hosts)
    for host in cluster.original:
        if hosts.get(host.endpoint.address) is None:
            yield host, 0


def _service_name(cluster: LiveCluster) -> str:
    """Return the EDS service name of a cluster, if it differs from the cluster's name."""
    return cluster.model.eds_name if cluster.model.eds_name != cluster.model.name else ""


# JSON


def json_pieces(proxy: InspectedProxy, shown: Shown) -> Iterator[Piece]:
    """Yield the JSON page ``{"cluster_statuses": [...]}`` in pieces, one per cluster. Without clusters, it is
    ``{}``.
    """
    before = '{\n "cluster_statuses": [\n  '
    for cluster in _shown(proxy, shown):
        yield before
        yield format_json(to_dict(status(cluster))).rstrip("\n").replace("\n", "\n  ")
        before = ",\n  "
    yield "\n ]\n}\n" if before.startswith(",") else "{}\n"


def status(cluster: LiveCluster) -> admin.ClusterStatus:
    """Return a cluster's element in the list ``cluster_statuses``."""
    model = cluster.model
    message = admin.ClusterStatus(
        name=model.name,
        added_via_api=cluster.added_via_api,
        observability_name=model.alt_stat_name or model.name,
        eds_service_name=_service_name(cluster),
    )
    for priority, limits in zip((core.DEFAULT, core.HIGH), model.breakers, strict=True):
        _threshold(message, priority, limits)
    for host, level in hosts_of(cluster):
        _host_status(message.host_statuses.add(), host, level)
    return message


def _threshold(
    message: admin.ClusterStatus, priority: core.RoutingPriority.ValueType, limits: CircuitBreakers
) -> None:
    threshold = message.circuit_breakers.thresholds.add(priority=priority)
    for name in _LIMITS:
        getattr(threshold, name).value = getattr(limits, name)


def _host_status(entry: admin.HostStatus, host: Host, priority: int) -> None:
    endpoint = host.endpoint
    address_message(entry.address, endpoint.address)
    for name in sorted(_COUNTS, key=lambda name: (name in _GAUGES, name)):
        kind = admin.SimpleMetric.GAUGE if name in _GAUGES else admin.SimpleMetric.COUNTER
        entry.stats.add(type=kind, name=name, value=_count(host, name))
    entry.health_status.eds_health_status = health_of(endpoint, None)
    entry.health_status.failed_outlier_check = host.ejected
    entry.weight = endpoint.weight
    entry.hostname = endpoint.hostname
    entry.priority = priority
    locality = endpoint.locality
    entry.locality.SetInParent()
    for name in ("region", "zone", "sub_zone"):
        setattr(entry.locality, name, getattr(locality, name))
