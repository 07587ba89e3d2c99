"""Makes the metrics of addons for the pages of both front ends; see :mod:`ztunnel.runtime.http.exposition`."""

from collections.abc import Iterator

from ztunnel.proxy.addons.report import AddonReport, calls, durations, family_name, over_budget, suspended
from ztunnel.runtime.http.exposition import Family, family
from ztunnel.runtime.http.prometheus import Metric, Sample

_DURATION = "ztunnel_addon_call_seconds"


def addon_families(report: AddonReport) -> Iterator[Family]:
    """Yield the standard metric families of all addons, then the families that addons define. Empty without
    addons.
    """
    by_hook = ("addon", "hook")
    text = "Calls of addons' hooks; result none: no verdict (unstable)"
    yield family("ztunnel_addon_calls", "counter", text, calls(report), (*by_hook, "result"))
    text = "Calls of addons' hooks that took more than their budget (unstable)"
    yield family("ztunnel_addon_over_budget", "counter", text, over_budget(report), by_hook)
    text = "Processes in which an addon is suspended (unstable)"
    yield family("ztunnel_addon_suspended", "gauge", text, suspended(report), ("addon",))
    text = "Time of the event loop that calls of addons' hooks took (unstable)."
    yield Family(Metric(_DURATION, text, "histogram", "seconds"), _durations(report))
    for each in report.families.values():
        yield family(family_name(each), each.kind, each.help, each.values.items(), each.labels)


def _durations(report: AddonReport) -> Iterator[Sample]:
    for (addon, hook), buckets, total_s in durations(report):
        shared = {"addon": addon, "hook": hook}
        for bound, number in buckets:
            yield Sample(f"{_DURATION}_bucket", shared | {"le": bound}, number)
        yield Sample(f"{_DURATION}_sum", shared, total_s)
        yield Sample(f"{_DURATION}_count", shared, buckets[-1][1])
