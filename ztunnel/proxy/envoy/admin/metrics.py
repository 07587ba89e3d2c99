"""Answers the scrape port: ``/metrics`` and ``/stats/prometheus``, in the format that the scraper requests."""

from __future__ import annotations

from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.runtime.http.page import Page, PageRequest, not_found

_PATHS = ("/metrics", "/stats/prometheus")


def page(proxy: InspectedProxy, request: PageRequest) -> Page:
    """Answer a request to the metrics server."""
    if request.path not in _PATHS:
        return not_found(_PATHS)
    from ztunnel.proxy.envoy.admin.families import families  # with the first scrape: see exposition
    from ztunnel.runtime.http import exposition

    return exposition.page(families(proxy), request)
