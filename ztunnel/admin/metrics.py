"""The scrape port: ``/metrics`` and ``/stats/prometheus``, in the format the scraper asks for."""

from ztunnel.admin.page import PLAIN, Page, PageRequest, text
from ztunnel.telemetry import prometheus
from ztunnel.telemetry.stats import Stats


def page(stats: Stats, request: PageRequest) -> Page:
    """Answer of the metrics server."""
    if request.path not in ("/metrics", "/stats/prometheus"):
        return text("", 404, PLAIN)
    content_type, pieces = prometheus.negotiated(stats, request.accept)
    return Page(content_type=content_type, body=pieces)
