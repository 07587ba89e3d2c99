"""Answers the scrape port: ``/metrics`` and ``/stats/prometheus``, in the format that the scraper requests."""

from __future__ import annotations

from itertools import chain

from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.runtime.http.page import Page, PageRequest, not_found

_PATHS = ("/metrics", "/stats/prometheus")


def page(proxy: InspectedProxy, request: PageRequest) -> Page:
    """Return the answer of the metrics server, with the metrics of addons and of hand-overs if there are any."""
    if request.path not in _PATHS:
        return not_found(_PATHS)
    from ztunnel.proxy.envoy.stats.prometheus import scraped  # with the first scrape: see exposition
    from ztunnel.runtime.http import exposition

    families = scraped(proxy.stats, proxy.account.times)
    if proxy.addons is not None:
        from ztunnel.proxy.addons.families import addon_families

        families = chain(families, addon_families(proxy.addons.host.report()))
    if proxy.handover is not None:
        from ztunnel.proxy.dataplane.handover.families import handover_families

        families = chain(families, handover_families(proxy.handover.statistics))
    return exposition.page(families, request)
