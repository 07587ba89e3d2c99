"""Cuts a front end's data to an event of bounded size, and adds rates. Pure.

An event contains the most active entries and counts all further entries as ``left_out``, so that it is no longer
with 200,000 workloads than with 200.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from ztunnel.proxy.ui.seen import Flow, Seen

#: No rate is computed from an older sample, because no client was connected in between, and a mean over an hour is
#: not a current rate.
_OLDEST_SAMPLE_S: Final = 60.0
#: The longest text of an event, in characters. Real SPIFFE ids have about a hundred.
LONGEST_TEXT: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most entries of each kind in an event: a guess of what a person can read."""

    workloads: int = 60
    flows: int = 120
    connections: int = 200
    others: int = 200


class Rates:
    """Stores the counts of the previous event, to compute rates."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, ...], Flow] = {}
        self._at_s: float | None = None

    def of(self, flows: Iterable[Flow], now_s: float, most: int) -> list[dict[str, Any]]:
        """Return entries for the most active flows, in that order, and remember all for the next call.

        Args:
            flows: flows with different keys.
            now_s: monotonic seconds.
            most: the largest number of entries.

        Returns:
            The attributes of each flow, with ``connections_per_s``, ``failures_per_s`` and ``bytes_per_s``. These
            are None if the previous sample is missing or too old, and 0 if a count decreased (the proxy
            restarted).
        """
        before, elapsed_s = self._before, now_s - self._at_s if self._at_s is not None else 0.0
        if not 0.0 < elapsed_s <= _OLDEST_SAMPLE_S:
            before, elapsed_s = {}, 0.0
        self._before = {flow.key: flow for flow in flows}
        self._at_s = now_s
        # A flow that was not in the last event began with counts of 0.
        pairs = ((flow, before.get(key)) for key, flow in self._before.items())
        active = heapq.nlargest(most, pairs, key=_activity if elapsed_s else _size)
        return [_shown(flow) | _rates(flow, old, elapsed_s) for flow, old in active]


def _size(pair: tuple[Flow, Flow | None]) -> tuple[int, int]:
    return pair[0].open, pair[0].opened


def _activity(pair: tuple[Flow, Flow | None]) -> tuple[int, ...]:
    """Return the sort key of a flow: its activity since the last event."""
    flow, old = pair
    opened, _, moved = _counts(flow)
    opened_before, _, moved_before = _counts(old)
    return opened - opened_before, moved - moved_before, flow.open, flow.opened


def _rates(flow: Flow, old: Flow | None, elapsed_s: float) -> dict[str, float | None]:
    each = zip(_RATES, _counts(flow), _counts(old), strict=True)
    return {
        name: round(max(0, count - earlier) / elapsed_s, 3) if elapsed_s else None for name, count, earlier in each
    }


_RATES: Final = ("connections_per_s", "failures_per_s", "bytes_per_s")


def _counts(flow: Flow | None) -> tuple[int, int, int]:
    """Return the counts that :data:`_RATES` are computed from."""
    return (0, 0, 0) if flow is None else (flow.opened, flow.failed, flow.bytes_sent + flow.bytes_received)


def event(seen: Seen, rates: Rates, now_s: float, wall_s: float, bounds: Bounds | None = None) -> dict[str, Any]:
    """Return an event in JSON's types. Its keys are the attributes of :class:`ztunnel.proxy.ui.seen.Seen`.

    Args:
        seen: the front end's content.
        rates: the counts of the previous event.
        now_s, wall_s: the current time, by the monotonic and the wall clock.
        bounds: the largest numbers of entries.
    """
    bounds = bounds or Bounds()
    shown_flows = rates.of(seen.flows, now_s, bounds.flows)
    named = dict.fromkeys(key for flow in shown_flows for key in (flow["source"], flow["destination"]))
    by_key = {_clipped(workload.key): workload for workload in seen.workloads}
    active = [by_key[key] for key in named if key in by_key]
    idle = heapq.nsmallest(
        bounds.workloads,
        (workload for key, workload in by_key.items() if key not in named),
        key=lambda workload: (not workload.here, workload.namespace, workload.name),
    )
    lists = {
        "workloads": _cut([*active, *idle], bounds.workloads, len(by_key)),
        "connections": _cut(seen.connections, bounds.connections, seen.connections_open),
        "policies": _cut(seen.policies, bounds.others),
        "denials": _cut(seen.denials, bounds.others),
        "certificates": _cut(seen.certificates, bounds.others),
        "sources": _cut(seen.sources, bounds.others),
        "refusals": _cut(seen.refusals, bounds.others),
    }
    drawn = {workload["key"] for workload in lists["workloads"]["shown"]}
    kept = [flow for flow in shown_flows if flow["source"] in drawn and flow["destination"] in drawn]
    return {
        "time_s": wall_s,
        "facts": _shown(seen.facts),
        "past": dict(seen.past),
        "flows": {"shown": kept, "left_out": len(seen.flows) - len(kept)},
        **lists,
    }


def _cut(items: Sequence[Any], most: int, total: int | None = None) -> dict[str, Any]:
    shown = [_shown(item) for item in items[:most]]
    return {"shown": shown, "left_out": max(0, (len(items) if total is None else total) - len(shown))}


def _shown(item: Any) -> dict[str, Any]:
    return {each.name: _clipped(getattr(item, each.name)) for each in fields(item)}


def _clipped(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 1] + "…"
    if isinstance(value, Mapping):
        return {str(key): _clipped(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_clipped(each) for each in value[:20]]
    return value
