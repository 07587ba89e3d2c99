"""Answers the scrape port: ``/metrics`` and ``/stats/prometheus``, in the format that the scraper requests."""

from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.runtime.http.page import Page, PageRequest, not_found

_PATHS = ("/metrics", "/stats/prometheus")


def page(stats: Stats, request: PageRequest) -> Page:
    """Return the answer of the metrics server."""
    if request.path not in _PATHS:
        return not_found(_PATHS)
    from ztunnel.proxy.envoy.stats.prometheus import scraped  # with the first scrape: see exposition
    from ztunnel.runtime.http import exposition

    return exposition.page(scraped(stats), request)
