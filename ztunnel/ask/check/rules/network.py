"""The path between nodes, and their clocks. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ztunnel.ask.check.rules.model import Check, Facts, Finding, NotGathered, error, warning

_SLOW_S: Final = 0.1
_SKEW_WARN_S: Final = 5.0
_SKEW_S: Final = 60.0


def tunnels_between_nodes(facts: Facts) -> Iterator[Finding]:
    """Judge the trials of port 15008 from each node to pods on others."""
    tried = 0
    for node, found in facts.nodes.items():
        for each in found.reached:
            tried += 1
            target = f"{each.get('address')}:15008 on node {each.get('node')}"
            if each.get("error"):
                yield error(f"no TLS handshake with {target}: {each['error']}", node=node)
            elif float(each.get("seconds") or 0) > _SLOW_S:
                yield warning(f"the TLS handshake with {target} took {float(each['seconds']):.3f} s", node=node)
    if not tried:
        raise NotGathered(facts.no_nodes or "no two nodes with pods of the mesh and proxies of this project")


def clocks(facts: Facts) -> Iterator[Finding]:
    """Judge the clocks of nodes against the API server's, or this machine's where that is not known."""
    known = {node: found.clock_s for node, found in facts.nodes.items() if found.clock_s is not None}
    if not known:
        raise NotGathered(facts.no_nodes or "no proxy of this project has answered")
    reference = facts.clock_s or 0.0
    against = "the API server's" if facts.clock_s is not None else "this machine's"
    for node, clock_s in known.items():
        apart = clock_s - reference
        if abs(apart) >= _SKEW_WARN_S:
            make = error if abs(apart) >= _SKEW_S else warning
            yield make(
                f"its clock is {abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} {against}", node=node
            )


CHECKS: Final = (
    Check(
        id="NET1", asks="tunnels from each node to the others", judge=tunnels_between_nodes,
        remedy="Open 15008 in NetworkPolicies and security groups.",
    ),
    Check(
        id="NET3", asks="clocks of the nodes", judge=clocks,
        remedy="Start NTP on the nodes named; certificates fail next.",
    ),
)  # fmt: skip
