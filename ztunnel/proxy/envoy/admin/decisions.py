"""Makes ``/denials`` and ``/rbac``: the policies' decisions about connections."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from xds.model.policy import Verdict
from ztunnel.policy.ledger import PolicyUse, Use
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.telemetry.decisions import RESULTS
from ztunnel.runtime.http.page import JSON, Page, text


def denials_page(proxy: InspectedProxy) -> Page:
    """Return the recent denials, grouped by listener, filter chain and client. The newest come first."""
    shown = [
        {
            **denial.pair._asdict(),
            "count": denial.times,
            "lastAddress": denial.address,
            "lastTime": _moment(denial.last_s),
        }
        for denial in proxy.decisions.ledger.denials
    ]
    return text(json.dumps(shown, indent=2) + "\n", content_type=JSON)


def rbac_page(proxy: InspectedProxy) -> Page:
    """Return the policies of the active RBAC filters, and removed policies that made decisions, by name."""
    shown = {"policies": policies(proxy.listeners.active, proxy.decisions.ledger.own)}
    return text(json.dumps(shown, indent=2) + "\n", content_type=JSON)


def policies(listeners: Iterable[LiveListener], uses: Iterable[PolicyUse[str]] = ()) -> list[dict[str, Any]]:
    """Return the policies that :func:`rbac_page` shows, with their decisions.

    Args:
        listeners: the active listeners.
        uses: the recorded decisions.
    """
    found: dict[str, dict[str, Any]] = {}
    chains: set[tuple[str, int]] = set()
    for listener in listeners:
        for chain in listener.live_chains:
            for rbac in chain.rbac:
                model = rbac.model
                for rules, shadow in ((model.rules, False), (model.shadow, True)):
                    for tier in rules.tiers if rules is not None else ():
                        for policy in tier.policies:
                            entry = found.setdefault(policy.name, _entry(policy.name))
                            kind = "shadow" if shadow or model.log_only else "enforced"
                            entry["action"] = "ALLOW" if policy.verdict is Verdict.ALLOW else "DENY"
                            entry["mode"] = kind if entry["mode"] in ("", kind) else "both"
                            chains.add((policy.name, id(chain)))
    for name, _ in chains:
        found[name]["chains"] += 1
    for name, tally, last_s in uses:
        entry = found.setdefault(name, _entry(name))
        counts = {result: tally[use] for use, result in RESULTS.items() if tally[use] or use <= Use.ENDED}
        entry["decisions"] = counts | {"lastTime": _moment(last_s)}
    return [found[name] for name in sorted(found)]


def _entry(name: str) -> dict[str, Any]:
    return {"policy": name, "action": "", "mode": "", "chains": 0, "decisions": None}


def _moment(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
