"""Checks daily operation: restarts, the next upgrade, metrics and alerts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from ztunnel.ask.check.rules import objects as o
from ztunnel.ask.check.rules.model import Check, Facts, Finding, NotGathered, warning

_RECENT_S: Final = 900.0


def restarts(facts: Facts) -> Iterator[Finding]:
    """Check restarts of proxies and agents in the last 15 minutes."""
    for app in (o.PROXY, o.AGENT):
        for pod in o.of_app(facts, app):
            for each in o.status(pod).get("containerStatuses") or ():
                ended = (each.get("lastState") or {}).get("terminated") or {}
                at_s = o.seconds_of(ended.get("finishedAt"))
                if at_s is not None and facts.now_s - at_s < _RECENT_S:
                    yield warning(
                        f"container {each.get('name')} restarted {int((facts.now_s - at_s) / 60)} minutes ago: "
                        f"{ended.get('reason') or 'unknown'}, exit status {ended.get('exitCode')}",
                        o.named(pod, "pod"),
                        str(o.spec(pod).get("nodeName") or ""),
                    )


def upgrades(facts: Facts) -> Iterator[Finding]:
    """Find connections that a proxy's next restart would cut, because they are older than its grace period."""
    found = False
    for node, dump in facts.dumps():
        check = facts.nodes[node].check
        if check is None:
            continue
        found = True
        grace_s = float(check.get("drainSeconds") or 0)
        cut: Counter[str] = Counter()
        for state in (dump.get("workloadState") or {}).values():
            info = state.get("info") or {}
            for entries in (state.get("connections") or {}).values():
                for each in entries:
                    if float(each.get("ageSeconds") or 0) > grace_s:
                        cut[f"{info.get('namespace')}/{info.get('name')}"] += 1
        if cut:
            most = ", ".join(f"{number} of {name}" for name, number in cut.most_common(3))
            yield warning(
                f"the next upgrade can cut {cut.total()} connections, which are older than its grace period of "
                f"{grace_s:g} s: {most}",
                node=node,
            )
    if not found:
        raise NotGathered(facts.no_nodes or "no proxy of this project has answered")


def observed(facts: Facts) -> Iterator[Finding]:
    """Check whether metrics are scraped and alerts exist."""
    pods = o.of_app(facts, o.PROXY)
    if not pods:
        raise NotGathered("no proxy runs")
    scraped = [pod for pod in pods if o.annotated(pod).get("prometheus.io/scrape") == "true"]
    if not scraped and not any(_is_ours(item) for item in facts.listed("PodMonitor")):
        yield warning("no annotation prometheus.io/scrape and no PodMonitor: nothing reads the proxies' metrics")
    if not any("ztunnel" in str(o.spec(item)) for item in facts.listed("PrometheusRule")):
        yield warning("no PrometheusRule names ztunnel: no alert reports a failing proxy")


def _is_ours(monitor: object) -> bool:
    return "ztunnel" in str(monitor)


CHECKS: Final = (
    Check(
        id="OPS1", asks="restarts in the last 15 minutes", judge=restarts,
        remedy="See the log before the restart (kubectl logs --previous); `docs/reliability.md` has each limit.",
    ),
    Check(
        id="OPS2", asks="whom the next upgrade would cut", judge=upgrades,
        remedy="Lengthen the grace period, or upgrade drained nodes.",
    ),
    Check(
        id="OPS3", asks="metrics are scraped and alerts exist", judge=observed,
        remedy="Enable them in the chart (podMonitor, prometheusRule).",
    ),
)  # fmt: skip
