"""Checks the configuration that proxies received, and whether pods are captured as labels require. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ztunnel.ask.check.rules import objects as o
from ztunnel.ask.check.rules.model import Check, Facts, Finding, NotGathered, error, warning

_LOST_WARN_S: Final = 60.0
_LOST_S: Final = 900.0
_KINDS: Final = ("workloads", "services", "policies")


def streams(facts: Facts) -> Iterator[Finding]:
    """Check the stream of each proxy to its control plane."""
    found = False
    for node, dump in facts.dumps():
        plane = dump.get("controlPlane")
        if not isinstance(plane, Mapping) or not plane.get("address"):
            continue  # the Rust ztunnel does not report its stream, and a proxy with a local file has none
        found = True
        away_s = float(plane.get("awaySeconds") or 0)
        if not plane.get("connected") and away_s >= _LOST_WARN_S:
            make = error if away_s >= _LOST_S else warning
            yield make(f"not connected to {plane['address']} for {int(away_s)} s", node=node)
        check = facts.nodes[node].check
        waits = (check or {}).get("pending") or ()
        if waits:
            yield error(f"not ready, waits for {', '.join(map(str, waits))}", node=node)
    if not found:
        raise NotGathered("no proxy reports whether it is connected to a control plane")


def refused(facts: Facts) -> Iterator[Finding]:
    """Find resources that proxies could not read."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for node, check in facts.checks():
        for each in (check.get("controlPlane") or {}).get("refused") or ():
            key = (str(each.get("type")), str(each.get("name")), str(each.get("reason")))
            seen.setdefault(key, []).append(node)
    for (kind, name, reason), nodes in seen.items():
        yield warning(
            f"refused by {len(nodes)} proxies: {reason}", f"{kind} {name}", nodes[0] if len(nodes) == 1 else ""
        )


def same_mesh(facts: Facts) -> Iterator[Finding]:
    """Check whether all proxies have the same mesh: by hashes if every proxy is ours, otherwise by counts in their
    dumps.
    """
    _not_on_demand(facts)
    ours = all(node.check is not None for node in facts.nodes.values() if node.dump is not None)
    for kind in _KINDS:
        seen: dict[str, list[str]] = {}
        for node, dump in facts.dumps():
            check = facts.nodes[node].check
            mesh = ((check or {}).get("mesh") or {}).get(kind) if ours else None
            if mesh is None:
                shown = str(len(dump.get(kind) or ()))
            else:
                shown = f"{mesh.get('number')} ({str(mesh.get('hash'))[:8]})"
            seen.setdefault(shown, []).append(node)
        if len(seen) > 1:
            most = max(seen, key=lambda shown: len(seen[shown]))
            for shown, nodes in seen.items():
                if shown != most:
                    yield warning(
                        f"{shown} {kind} where {len(seen[most])} nodes have {most}", node=", ".join(nodes)
                    )


def _not_on_demand(facts: Facts) -> None:
    """Raise :class:`NotGathered` if proxies load XDS resources on demand, because then each has only part of the
    mesh.
    """
    if any((dump.get("config") or {}).get("xdsOnDemand") for _, dump in facts.dumps()):
        raise NotGathered("proxies hold what they need only (XDS on demand)")


def capture(facts: Facts) -> Iterator[Finding]:
    """Check whether pods marked as captured are captured, and report the findings of the node agents."""
    claims: dict[str, set[tuple[str, str]]] = {}
    for pod in o.captured(facts):
        if o.annotated(pod).get(o.REDIRECTION) == "enabled":
            claims.setdefault(str(o.spec(pod).get("nodeName")), set()).add(o.key(pod))
    judged = False
    for node, found in facts.nodes.items():
        if found.dump is not None:
            judged = True
            up = _up(found.dump)
            for namespace, name in sorted(claims.get(node, set()) - up):
                yield error(
                    "its annotation says that it is in the mesh, and the node's proxy does not serve it",
                    f"pod {namespace}/{name}",
                    node,
                )
        for pod in (found.audit or {}).get("pods") or ():
            for each in pod.get("findings") or ():
                yield error(f"{each.get('text')} ({each.get('reason')})", f"pod {pod.get('pod')}", node)
    if not judged:
        raise NotGathered(facts.no_nodes or "no proxy has answered")


def _up(dump: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {
        (str((state.get("info") or {}).get("namespace")), str((state.get("info") or {}).get("name")))
        for state in (dump.get("workloadState") or {}).values()
        if state.get("state", "Up") == "Up"
    }


def references(facts: Facts) -> Iterator[Finding]:
    """Check in one proxy's dump whether the policies, waypoints and gateways exist that the workloads refer to."""
    _not_on_demand(facts)
    node, dump = next(iter(facts.dumps()))
    policies = {f"{each.get('namespace')}/{each.get('name')}" for each in dump.get("policies") or ()}
    services = dump.get("services") or ()
    known = {f"{each.get('namespace')}/{each.get('hostname')}" for each in services}
    known |= {str(vip).rpartition("/")[2] for each in services for vip in each.get("vips") or ()}
    known |= {str(address) for each in dump.get("workloads") or () for address in each.get("workloadIps") or ()}
    missing: dict[str, list[str]] = {}
    for kind, entries in (("workload", dump.get("workloads") or ()), ("service", services)):
        for each in entries:
            name = f"{kind} {each.get('namespace')}/{each.get('name')}"
            for policy in each.get("authorizationPolicies") or ():
                if policy not in policies:
                    missing.setdefault(f"policy {policy}", []).append(name)
            for key in ("waypoint", "networkGateway"):
                wanted = str((each.get(key) or {}).get("destination") or "")
                if wanted and wanted not in known and wanted.rpartition("/")[2] not in known:
                    missing.setdefault(f"{key} {wanted}", []).append(name)
    for what, names in missing.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield error(f"named by {', '.join(names[:3])}{more}, and not there", what, node)


CHECKS: Final = (
    Check(
        id="XDS1", asks="proxies are connected to the control plane", judge=streams,
        remedy="Check istiod and its NetworkPolicy. Meanwhile the last configuration stays in use.",
    ),
    Check(
        id="XDS2", asks="proxies understand what they get", judge=refused,
        remedy="Correct the object; see DEP3.",
    ),
    Check(
        id="XDS3", asks="all proxies have the same mesh", judge=same_mesh,
        remedy="Restart the proxy that differs; see the log of its istiod.",
    ),
    Check(
        id="XDS4", asks="pods are captured as they say", judge=capture,
        remedy="`ztunnel audit --repair`. If that does not help, delete the pod.", ), Check(
        id="XDS5", asks="named policies, waypoints and gateways are there", judge=references,
        remedy="Create the waypoint; see allowedRoutes and the traffic type. For a policy, restart istiod.",
    ),
)  # fmt: skip
