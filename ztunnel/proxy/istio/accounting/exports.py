"""Sends one process's telemetry to an OpenTelemetry collector, for a node proxy in an Istio mesh.

The main process exports the metrics of all processes; each process exports its own access log lines and spans.
"""

import random
from collections.abc import Awaitable, Callable, Iterable, Mapping

from ztunnel import __version__
from ztunnel.proxy.istio.accounting.logs import LogStream
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.settings.config import IstioConfig
from ztunnel.proxy.otlp.exporter import AccessExport, MetricExport
from ztunnel.proxy.otlp.settings import OtlpSettings
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.http.exposition import Family
from ztunnel.runtime.tasks import Tasks


class Exports:
    """Exports logs, metrics and spans from construction until :meth:`close`, which must precede closing the log
    writer.

    Args:
        settings: the destinations.
        config: the configuration that describes this proxy.
        logs: the stream whose access lines are exported.
        metrics: this process's metrics, which also count items that the export has dropped.
        page: returns the metrics of all processes.
        clock: the clock of data points.
    """

    def __init__(
        self,
        settings: OtlpSettings,
        config: IstioConfig,
        logs: LogStream,
        metrics: Metrics,
        page: Callable[[], Awaitable[Metrics]],
        clock: Clock,
    ) -> None:
        attributes = resource_attributes(config)
        self._logs = logs
        self._tasks = Tasks("otlp")
        self._page = page
        tells = settings.logs or settings.traces
        self._access = AccessExport(settings, attributes, random.Random()) if tells else None
        self._metrics = MetricExport(settings, attributes, self._families, clock) if settings.metrics else None
        metrics.dropped_here = self._dropped
        if self._access is not None:
            logs.export = self._access.write
        if self._metrics is not None:
            self._tasks.keep(self._metrics.run, "metrics export")

    async def close(self) -> None:
        """Send queued data within a time limit, and stop exporting. Idempotent."""
        self._logs.export = None
        await self._tasks.close()
        if self._access is not None:
            await self._access.close()
        if self._metrics is not None:
            await self._metrics.close()

    def _dropped(self) -> Mapping[str, int]:
        found = dict(self._access.dropped) if self._access is not None else {}
        return found | ({"metrics": self._metrics.dropped} if self._metrics is not None else {})

    async def _families(self) -> Iterable[Family]:
        from ztunnel.proxy.istio.accounting.families import (
            families,  # imported only when needed: see ztunnel.runtime.http.exposition
        )

        return families(await self._page())


def resource_attributes(config: IstioConfig) -> Mapping[str, str]:
    """Return this proxy's resource attributes, with OpenTelemetry's names. Unknown attributes are omitted."""
    found = {
        "service.name": "ztunnel",
        "service.version": __version__,
        "service.instance.id": config.pod_name or config.node,
        "service.namespace": config.pod_namespace,
        "k8s.cluster.name": config.cluster_id,
        "k8s.node.name": config.node,
        "k8s.namespace.name": config.pod_namespace,
        "k8s.pod.name": config.pod_name,
    }
    return {name: value for name, value in found.items() if value}
