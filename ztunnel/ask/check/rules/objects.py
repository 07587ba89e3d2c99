"""Reads fields of cluster objects for several checks; any field can be missing. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from ztunnel.ask.check.rules.model import Facts, Object

#: Labels and annotations of ambient mode on namespaces and pods.
MODE: Final = "istio.io/dataplane-mode"
REDIRECTION: Final = "ambient.istio.io/redirection"
#: The label of a node's operating system, which a pod's node selector can require.
SYSTEM: Final = "kubernetes.io/os"
USE_WAYPOINT: Final = "istio.io/use-waypoint"
USE_WAYPOINT_NAMESPACE: Final = "istio.io/use-waypoint-namespace"
PROXY: Final = "ztunnel"
AGENT: Final = "ztunnel-agent"
ISTIO_CNI: Final = "istio-cni-node"


def metadata(item: Object) -> Mapping[str, Any]:
    """Return the metadata of an object."""
    return item.get("metadata") or {}


def labels(item: Object) -> Mapping[str, str]:
    """Return the labels of an object."""
    return metadata(item).get("labels") or {}


def annotated(item: Object) -> Mapping[str, str]:
    """Return the annotations of an object."""
    return metadata(item).get("annotations") or {}


def key(item: Object) -> tuple[str, str]:
    """Return an object's namespace and name."""
    return str(metadata(item).get("namespace") or ""), str(metadata(item).get("name") or "")


def named(item: Object, kind: str) -> str:
    """Return kind, namespace and name for a finding."""
    namespace, name = key(item)
    return f"{kind} {namespace}/{name}" if namespace else f"{kind} {name}"


def spec(item: Object) -> Mapping[str, Any]:
    """Return the spec of an object."""
    return item.get("spec") or {}


def status(item: Object) -> Mapping[str, Any]:
    """Return the status of an object."""
    return item.get("status") or {}


def seconds_of(time: object) -> float | None:
    """Return a text in RFC 3339 as Unix time, or ``None`` if it has another form."""
    try:
        return datetime.fromisoformat(str(time)).timestamp()
    except ValueError:
        return None


def is_ready(pod: Object) -> bool:
    """Return whether a pod has the condition Ready."""
    conditions = status(pod).get("conditions") or []
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def is_running(pod: Object) -> bool:
    """Return whether a pod is running."""
    return bool(status(pod).get("phase") == "Running")


def of_app(facts: Facts, app: str) -> list[Object]:
    """Return the running pods of our DaemonSet or Istio's, by the label ``app`` or ``k8s-app``."""
    return [
        pod
        for pod in facts.listed("Pod")
        if app in (labels(pod).get("app"), labels(pod).get("k8s-app")) and is_running(pod)
    ]


def ambient_namespaces(facts: Facts) -> set[str]:
    """Return the namespaces whose label puts their pods into the mesh."""
    return {key(item)[1] for item in facts.listed("Namespace") if labels(item).get(MODE) == "ambient"}


def root_namespaces(facts: Facts) -> set[str]:
    """Return the namespaces that can be the mesh's root namespace: istiod's own, which is the default, and
    ``istio-system``.

    A selector of a policy there selects workloads of all namespaces (AuthorizationPolicy and PeerAuthentication,
    ``selector``).
    """
    return {"istio-system", *(key(pod)[0] for pod in of_app(facts, "istiod"))}


def captured(facts: Facts) -> Iterator[Object]:
    """Yield the running pods that a label puts into the mesh: the pod's own label, or its namespace's label."""
    ambient = ambient_namespaces(facts)
    for pod in facts.listed("Pod"):
        mode = labels(pod).get(MODE)
        wanted = mode == "ambient" or (mode is None and key(pod)[0] in ambient)
        outside = spec(pod).get("hostNetwork") or needs_other_system(pod) or is_injected(pod)
        if wanted and is_running(pod) and not outside:
            yield pod


def needs_other_system(pod: Object) -> bool:
    """Return whether a pod requires an operating system other than Linux, by its ``os`` or its node selector."""
    named = (spec(pod).get("os") or {}).get("name") or (spec(pod).get("nodeSelector") or {}).get(SYSTEM)
    return named not in (None, "", "linux")


def is_injected(pod: Object) -> bool:
    """Return whether a pod has a sidecar proxy."""
    containers = [*(spec(pod).get("containers") or []), *(spec(pod).get("initContainers") or [])]
    return any(each.get("name") == "istio-proxy" for each in containers)


def selects(selector: Mapping[str, Any] | None, has: Mapping[str, str]) -> bool:
    """Return whether a label selector selects an object with these labels. ``None`` and an empty selector select
    all.
    """
    if not selector:
        return True
    if any(has.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()):
        return False
    for each in selector.get("matchExpressions") or ():
        name, values = each.get("key"), each.get("values") or ()
        match each.get("operator"):
            case "In":
                holds = has.get(name) in values
            case "NotIn":
                holds = has.get(name) not in values
            case "Exists":
                holds = name in has
            case "DoesNotExist":
                holds = name not in has
            case _:
                holds = False
        if not holds:
            return False
    return True


def ports_of(pod: Object) -> set[int]:
    """Return the ports that a pod's containers declare, including its native sidecars.

    A native sidecar is an init container with ``restartPolicy: Always`` (since Kubernetes 1.28).
    """
    found: set[int] = set()
    containers: Sequence[Mapping[str, Any]] = spec(pod).get("containers") or ()
    starting: Sequence[Mapping[str, Any]] = spec(pod).get("initContainers") or ()
    for container in (*containers, *(each for each in starting if each.get("restartPolicy") == "Always")):
        found.update(
            int(port["containerPort"]) for port in container.get("ports") or () if "containerPort" in port
        )
    return found
