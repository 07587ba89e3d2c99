"""Reports the addon calls of one or several processes: metrics, ``status`` and ``ztunnel addons``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ztunnel.proxy.addons.budget import BOUNDS_US, HookCounts

#: The results of calls that are counted as denials, and as faults.
_DENIALS: Final = ("deny",)
_FAULTS: Final = ("fault", "timeout")


class AddonState(NamedTuple):
    """One addon in one process.

    Attributes:
        name: the addon's name.
        source: where the addon was loaded from.
        sha256: its file's digest.
        suspended: why it is not called. Empty if it is called.
        on_error: ``deny`` or ``ignore``.
        hooks: the names of its hooks.
        problem: why its changed file could not be loaded. Empty without such a failure.
    """

    name: str
    source: str
    sha256: str
    suspended: str
    on_error: str
    hooks: tuple[str, ...]
    problem: str = ""


class AddonFamily(NamedTuple):
    """One metric family returned by an addon's hook ``metrics``; see :class:`ztunnel.addons.Metric`."""

    addon: str
    name: str
    help: str
    kind: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]


@dataclass(slots=True)
class AddonReport:
    """The sums of the addons' reports from one or several processes.

    Attributes:
        hooks: counts by addon and hook.
        families: the addons' own metric families, by addon and name.
        states: the state of each addon in each process.
    """

    hooks: dict[tuple[str, str], HookCounts] = field(default_factory=dict)
    families: dict[tuple[str, str], AddonFamily] = field(default_factory=dict)
    states: list[AddonState] = field(default_factory=list)

    def add(
        self,
        hooks: Iterable[HookCounts] = (),
        families: Iterable[AddonFamily] = (),
        states: Iterable[AddonState] = (),
    ) -> None:
        """Add one process's counts."""
        for counts in hooks:
            key = counts.addon, counts.hook
            self.hooks[key] = self.hooks[key] + counts if key in self.hooks else counts
        for family in families:
            name = family.addon, family.name
            known = self.families.get(name)
            if known is not None and known.labels == family.labels:
                values = dict(known.values)
                for labels, value in family.values.items():
                    values[labels] = values.get(labels, 0) + value
                family = family._replace(values=values)
            self.families[name] = family
        self.states.extend(states)

    def copy(self) -> AddonReport:
        """Return a copy that can be changed without affecting this report."""
        return AddonReport(dict(self.hooks), dict(self.families), list(self.states))


def page(report: AddonReport) -> list[dict[str, Any]]:
    """Return the addons in their order, with sums over all processes, as ``/addons`` shows them."""
    names = dict.fromkeys(state.name for state in report.states)
    return [_entry(name, [state for state in report.states if state.name == name], report) for name in names]


def _entry(name: str, states: list[AddonState], report: AddonReport) -> dict[str, Any]:
    first = states[0]
    suspended = [state.suspended for state in states if state.suspended]
    hooks = {hook: counts for (addon, hook), counts in report.hooks.items() if addon == name}
    return {
        "name": name,
        "source": first.source,
        "sha256": first.sha256,
        "state": _state(suspended, len(states)),
        "problem": next((state.problem for state in states if state.problem), ""),
        "onError": first.on_error,
        "processes": len(states),
        "hooks": {
            hook: {
                "calls": counts.calls,
                "seconds": round(counts.total_ns / 1e9, 6),
                "overBudget": counts.over_budget,
                "results": dict(counts.results),
            }
            for hook, counts in hooks.items()
        },
        "calls": sum(counts.calls for counts in hooks.values()),
        "seconds": round(sum(counts.total_ns for counts in hooks.values()) / 1e9, 6),
        "denials": _sum(hooks.values(), _DENIALS),
        "faults": _sum(hooks.values(), _FAULTS),
    }


def _state(suspended: list[str], processes: int) -> str:
    if not suspended:
        return "active"
    where = "" if len(suspended) == processes else f" in {len(suspended)} of {processes} processes"
    return f"suspended{where}: {suspended[0]}"


def _sum(hooks: Iterable[HookCounts], results: tuple[str, ...]) -> int:
    return sum(number for counts in hooks for result, number in counts.results if result in results)


def problems(report: AddonReport) -> list[str]:
    """Return lines for ``status``: one for each addon that is suspended, or whose changed file was not loaded."""
    lines = []
    for entry in page(report):
        if entry["state"] != "active":
            lines.append(f"{entry['name']}: {entry['state']}")
        if entry["problem"]:
            lines.append(f"{entry['name']}: its changed file is not used: {entry['problem']}")
    return lines


# Samples of metrics pages: label values, and the number


def calls(report: AddonReport) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Yield the samples of ``ztunnel_addon_calls_total`` by addon, hook and result."""
    for (addon, hook), counts in report.hooks.items():
        for result, number in counts.results:
            yield (addon, hook, result), number


def over_budget(report: AddonReport) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the samples of ``ztunnel_addon_over_budget_total`` by addon and hook."""
    for key, counts in report.hooks.items():
        yield key, counts.over_budget


def suspended(report: AddonReport) -> Iterator[tuple[tuple[str], float]]:
    """Yield the samples of ``ztunnel_addon_suspended``: by addon, the number of processes that suspend it."""
    for name in dict.fromkeys(state.name for state in report.states):
        yield (name,), sum(bool(state.suspended) for state in report.states if state.name == name)


def durations(report: AddonReport) -> Iterator[tuple[tuple[str, str], list[tuple[str, int]], float]]:
    """Yield the histograms of ``ztunnel_addon_call_seconds``: by addon and hook, the cumulative buckets and the
    sum of seconds.
    """
    bounds = [*(f"{bound / 1e6:g}" for bound in BOUNDS_US), "+Inf"]
    for key, counts in report.hooks.items():
        if not any(counts.buckets):
            continue
        below, buckets = 0, []
        for bound, number in zip(bounds, counts.buckets, strict=True):
            below += number
            buckets.append((bound, below))
        yield key, buckets, counts.total_ns / 1e9


def family_name(family: AddonFamily) -> str:
    """Return the name that an addon's own metric family has on the metrics page."""
    return f"ztunnel_addon_{family.addon.replace('-', '_')}_{family.name}"
