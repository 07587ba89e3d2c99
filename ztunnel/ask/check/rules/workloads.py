"""Finds objects that are outside the mesh although their labels suggest otherwise, and unused settings. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ztunnel.ask.check.rules import objects as o
from ztunnel.ask.check.rules.model import Check, Facts, Finding, NotGathered, error, warning

WAYPOINT_CLASS: Final = "istio-waypoint"
GATEWAY_NAME: Final = "gateway.networking.k8s.io/gateway-name"


def waypoints(facts: Facts) -> Iterator[Finding]:
    """Find waypoints that are unused, and used waypoints without a ready pod."""
    gateways = [item for item in facts.listed("Gateway") if o.spec(item).get("gatewayClassName") == WAYPOINT_CLASS]
    if not gateways:
        raise NotGathered("there is no waypoint")
    bound: set[tuple[str, str]] = set()
    for kind in ("Namespace", "Service", "Pod", "ServiceEntry"):
        for item in facts.listed(kind):
            name = o.labels(item).get(o.USE_WAYPOINT)
            if name:
                own = o.key(item)[1] if kind == "Namespace" else o.key(item)[0]
                bound.add((o.labels(item).get(o.USE_WAYPOINT_NAMESPACE) or own, name))
    pods = facts.listed("Pod")
    for item in gateways:
        namespace, name = o.key(item)
        about = f"gateway {namespace}/{name}"
        if (namespace, name) not in bound:
            yield warning("no namespace, service, service entry or pod is labelled to use this waypoint", about)
        elif not any(
            o.key(pod)[0] == namespace and o.labels(pod).get(GATEWAY_NAME) == name and o.is_ready(pod)
            for pod in pods
        ):
            yield error("it is used, and none of its pods is ready", about)


def outside(facts: Facts) -> Iterator[Finding]:
    """Find pods of ambient namespaces that are not in the mesh, grouped by namespace and reason."""
    ambient = o.ambient_namespaces(facts)
    found: dict[tuple[str, str], list[str]] = {}
    for pod in facts.listed("Pod"):
        namespace, name = o.key(pod)
        if namespace not in ambient or not o.is_running(pod):
            continue
        if o.spec(pod).get("hostNetwork"):
            reason = "use the host's network"
        elif o.needs_other_system(pod):
            reason = "do not run on Linux"
        elif o.is_injected(pod):
            reason = "have a proxy of their own"
        elif o.labels(pod).get(o.MODE) == "none":
            reason = "are opted out by their label"
        else:
            continue
        found.setdefault((namespace, reason), []).append(name)
    for (namespace, reason), names in found.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield warning(f"{', '.join(names[:3])}{more} {reason}: not in the mesh", f"namespace {namespace}")
    for item in facts.listed("Service"):
        if (
            o.key(item)[0] in ambient
            and o.spec(item).get("clusterIP") == "None"
            and not o.spec(item).get("selector")
        ):
            yield warning(
                "it is headless and selects no pods: its traffic is not redirected by name",
                o.named(item, "service"),
            )


def ports(facts: Facts) -> Iterator[Finding]:
    """Check the ports of services in ambient namespaces."""
    ambient = o.ambient_namespaces(facts)
    behind = {o.key(item)[1] for item in facts.listed("Namespace") if o.labels(item).get(o.USE_WAYPOINT)}
    pods = [pod for pod in facts.listed("Pod") if o.key(pod)[0] in ambient and o.is_running(pod)]
    for item in facts.listed("Service"):
        namespace, _ = o.key(item)
        if namespace not in ambient:
            continue
        about = o.named(item, "service")
        selector = o.spec(item).get("selector") or {}
        chosen = [
            pod
            for pod in pods
            if o.key(pod)[0] == namespace and selector and o.selects({"matchLabels": selector}, o.labels(pod))
        ]
        for port in o.spec(item).get("ports") or ():
            yield from _port(
                port, chosen, about, waypoint=namespace in behind or bool(o.labels(item).get(o.USE_WAYPOINT))
            )


def _port(port: Any, chosen: list[Any], about: str, *, waypoint: bool) -> Iterator[Finding]:
    number, target = port.get("port"), port.get("targetPort")
    if port.get("protocol") == "UDP":
        yield warning(f"port {number} is UDP, which is not encrypted", about)
        return
    declared = [o.ports_of(pod) for pod in chosen]
    wanted = target if isinstance(target, int) else number if target is None else None
    if wanted is not None and declared and all(declared) and not any(wanted in each for each in declared):
        yield warning(f"no selected pod declares target port {wanted} of port {number}", about)
    if (
        waypoint
        and not port.get("appProtocol")
        and str(port.get("name") or "").partition("-")[0] not in _PROTOCOLS
    ):
        yield warning(f"port {number} is behind a waypoint and has no appProtocol: it is taken for TCP", about)


_PROTOCOLS: Final = ("http", "http2", "grpc", "https", "tls", "tcp", "mongo", "mysql", "redis")


def ignored(facts: Facts) -> Iterator[Finding]:
    """Find sidecar settings on pods of the mesh, where they have no effect."""
    ambient = o.ambient_namespaces(facts)
    for kind in ("Sidecar", "EnvoyFilter", "Telemetry"):
        for item in facts.listed(kind):
            if o.key(item)[0] in ambient and not o.spec(item).get("targetRefs"):
                yield warning("node proxies do not read it", o.named(item, kind.lower()))


CHECKS: Final = (
    Check(
        id="OBJ1", asks="waypoints are used and ready", judge=waypoints,
        remedy="Label the service or delete the waypoint; see its pods.",
    ),
    Check(
        id="OBJ2", before=True, asks="pods of ambient namespaces are in the mesh", judge=outside,
        remedy="Mark intended exceptions by a label; give the service an address.",
    ),
    Check(
        id="OBJ3", before=True, asks="ports of services in ambient namespaces", judge=ports,
        remedy="Listen on the port; name the protocol.",
    ),
    Check(
        id="OBJ4", before=True, asks="settings of sidecars in ambient namespaces", judge=ignored,
        remedy="Move it to the waypoint (targetRefs).",
    ),
)  # fmt: skip
