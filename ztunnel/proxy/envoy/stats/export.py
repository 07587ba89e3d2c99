"""Sends the statistics to an OpenTelemetry collector. (The destinations of access logs are configured by the
listeners' access loggers.)
"""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from xds.proto.envoy.config.core.v3.core_pb2 import Node
from ztunnel import __version__
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.otlp.exporter import MetricExport
from ztunnel.proxy.otlp.settings import OtlpSettings
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.http.exposition import Family
from ztunnel.runtime.tasks import Tasks


@asynccontextmanager
async def exported(
    settings: OtlpSettings, node: Node, families: Callable[[], Iterable[Family]], stats: Stats, clock: Clock
) -> AsyncIterator[None]:
    """An async context manager that exports the metrics page periodically. On exit, it exports the changes since
    the last interval.

    Args:
        settings, node: the destination, and the proxy's name at the destination.
        families: makes the families of the page.
        stats: receives the counter of lost requests.
        clock: the clock of the interval.
    """
    described = {
        "service.name": "ztunnel",
        "service.version": __version__,
        "service.instance.id": node.id,
        "service.namespace": node.cluster,
    }

    async def made() -> Iterable[Family]:
        return families()

    export = MetricExport(settings, {name: value for name, value in described.items() if value}, made, clock)
    stats.scope("otlp").gauge("metrics_dropped", lambda: export.dropped)
    tasks = Tasks("otlp")
    tasks.keep(export.run, "metrics export")
    try:
        yield
    finally:
        await tasks.close()
        await export.close()
