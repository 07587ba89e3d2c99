"""Makes the metric families of the scrape port: Envoy's metrics, and metrics with equal names in both dialects.

Import this module only at the first scrape: see :mod:`ztunnel.runtime.http.exposition`.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator

import hbone
from ztunnel import __version__
from ztunnel.proxy.dataplane.gauges import Gauge, configuration_gauges, process_gauges
from ztunnel.proxy.dataplane.handover.families import handover_families
from ztunnel.proxy.envoy.admin.certs import certificates_in_use, uri_names
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.proxy.envoy.stats.prometheus import scraped
from ztunnel.runtime.http.exposition import Family, LabelledValue, family


def families(proxy: InspectedProxy) -> Iterator[Family]:
    """Yield every metric family of a proxy, including the families of addons and hand-overs, if there are any."""
    yield from scraped(proxy.stats, proxy.account.times)
    build = (__version__, hbone.build(), platform.python_version())
    text = "What runs: a pure or a compiled tunnel engine (unstable)"
    yield family("ztunnel_build", "gauge", text, [(build, 1.0)], ("version", "build", "python"))
    for name, gauge in _gauges(proxy).items():
        yield family(name, gauge.kind, gauge.help, [((), gauge.read())], ())
    yield from _configuration(proxy)
    yield from _certificates(proxy)
    if proxy.addons is not None:
        from ztunnel.proxy.addons.families import addon_families

        yield from addon_families(proxy.addons.host.report())
    if proxy.handover is not None:
        yield from handover_families(proxy.handover.statistics)


def _gauges(proxy: InspectedProxy) -> dict[str, Gauge]:
    found = process_gauges(proxy.half_open, proxy.descriptors, proxy.logs.writer, proxy.handover)
    found["ztunnel_loop_stalls"] = Gauge(
        "counter",
        "Times that the event loop stood still for more than a second (unstable)",
        lambda: proxy.delays.stalls.value,
    )
    found["ztunnel_loop_late_seconds"] = Gauge(
        "counter",
        "Seconds that a timer of two beats a second was late, in all (unstable)",
        lambda: round(proxy.delays.late_s, 6),
    )
    ads = proxy.ads
    if ads is None:
        return found
    stats, now_s = ads.stats, asyncio.get_running_loop().time()

    def staleness_s() -> float:
        if stats.connected_state:
            return 0.0
        return now_s - (proxy.started if stats.lost_at_s is None else stats.lost_at_s)

    def updated_ago_s() -> float | None:
        return None if stats.received_at_s is None else now_s - stats.received_at_s

    return found | configuration_gauges(proxy.clock, staleness_s, updated_ago_s)


def _configuration(proxy: InspectedProxy) -> Iterator[Family]:
    clusters, listeners, secrets = proxy.clusters, proxy.listeners, proxy.secrets.dynamic
    objects = {
        "cluster": len(clusters.active),
        "endpoint": sum(cluster.host_count for cluster in clusters.active),
        "extension": len(listeners.extensions),
        "listener": len(listeners.active),
        "route": len(listeners.route_tables),
        "secret": len(secrets),
    }
    yield _by_kind("ztunnel_mesh_objects", "Resources of the configuration in use", objects)
    refused = {
        "cluster": len(clusters.failures),
        "extension": sum(each.failure is not None for each in listeners.extensions.values()),
        "listener": len(listeners.failures),
        "route": sum(each.failure is not None for each in listeners.route_tables.values()),
        "secret": sum(each.error is not None for each in secrets),
    }
    text = "Resources that could not be used and have no later version"
    yield _by_kind("ztunnel_xds_refused_resources", text, refused)


def _by_kind(name: str, text: str, numbers: dict[str, int]) -> Family:
    samples: list[LabelledValue] = [((kind,), number) for kind, number in numbers.items()]
    return family(name, "gauge", f"{text} (unstable)", samples, ("kind",))


def _certificates(proxy: InspectedProxy) -> Iterator[Family]:
    own, roots = certificates_in_use(proxy)
    ends: dict[str, float] = {}
    for certificate in own:
        end_s = certificate.not_valid_after_utc.timestamp()
        for name in uri_names(certificate)[:1]:
            ends[name] = min(end_s, ends.get(name, end_s))
    text = "When the certificate of an identity ends, in Unix seconds (unstable)"
    found: list[LabelledValue] = [((name,), end_s) for name, end_s in ends.items()]
    yield family("istio_cert_expiry_seconds", "gauge", text, found, ("identity",), "seconds")
    text = "When the first root of the mesh ends, in Unix seconds (unstable)"
    root_ends = [root.not_valid_after_utc.timestamp() for root in roots]
    first: list[LabelledValue] = [((), min(root_ends))] if root_ends else []
    yield family("ztunnel_root_expiry_seconds", "gauge", text, first, (), "seconds")
