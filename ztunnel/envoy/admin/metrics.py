"""The scrape port: ``/metrics`` and ``/stats/prometheus``, in the format the scraper asks for."""

from ztunnel.envoy.telemetry import prometheus
from ztunnel.envoy.telemetry.stats import Stats
from ztunnel.http.page import PLAIN, Page, PageRequest, text


def page(stats: Stats, request: PageRequest) -> Page:
    """Answer of the metrics server."""
    if request.path not in ("/metrics", "/stats/prometheus"):
        return text("", 404, PLAIN)
    content_type, pieces = prometheus.negotiated(stats, request.accept)
    return Page(content_type=content_type, body=pieces)
