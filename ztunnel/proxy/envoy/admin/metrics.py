"""Answers the scrape port: ``/metrics`` and ``/stats/prometheus``, in the format that the scraper requests."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.flows.times import ConnectionTimes
from ztunnel.runtime.http.page import Page, PageRequest, not_found

if TYPE_CHECKING:
    from ztunnel.proxy.addons.process import AddonProcess

_PATHS = ("/metrics", "/stats/prometheus")


def page(stats: Stats, times: ConnectionTimes, request: PageRequest, addons: AddonProcess | None = None) -> Page:
    """Return the answer of the metrics server, with the metrics of addons if there are any."""
    if request.path not in _PATHS:
        return not_found(_PATHS)
    from ztunnel.proxy.envoy.stats.prometheus import scraped  # with the first scrape: see exposition
    from ztunnel.runtime.http import exposition

    found = scraped(stats, times)
    if addons is not None:
        from ztunnel.proxy.addons.families import addon_families

        found = chain(found, addon_families(addons.host.report()))
    return exposition.page(found, request)
