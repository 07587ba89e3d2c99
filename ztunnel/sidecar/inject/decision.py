"""Decides whether a pod is injected, by the first matching row of a table. Pure.

The API server has already applied the webhook's selectors. The rows, labels and configuration are the same as in
Istio's injector.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ztunnel.kube.objects import Object
from ztunnel.sidecar.inject.selector import Selector

#: The name of the label that requests or refuses injection for a pod. Without the label, an annotation of this
#: name counts.
INJECT: Final = "sidecar.istio.io/inject"
IGNORED_NAMESPACES: Final = frozenset({"kube-system", "kube-public", "kube-node-lease", "local-path-storage"})


class Reason(StrEnum):
    """The row of the decision table that matched. Used in logs, and as a label of metrics."""

    HOST_NETWORK = "host-network"
    OTHER_OS = "other-os"
    IGNORED_NAMESPACE = "ignored-namespace"
    ASKED_IN = "asked-in"
    ASKED_OUT = "asked-out"
    NEVER_SELECTOR = "never-selector"
    ALWAYS_SELECTOR = "always-selector"
    POLICY = "policy"
    BAD_POLICY = "bad-policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The configured part of the decision table.

    Attributes:
        policy: ``enabled`` or ``disabled``: the result for a pod that no row covers. Any other word injects no
            pod.
        never: a pod whose labels match one of these selectors is left out, unless it requests injection.
        always: a pod whose labels match one of these selectors is injected, unless it refuses injection.
    """

    policy: str = "enabled"
    never: tuple[Selector, ...] = ()
    always: tuple[Selector, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision, the row of the table that made it, and a warning for the author of the pod."""

    inject: bool
    reason: Reason
    warning: str = ""


def decide(pod: Object, namespace: str, rules: Rules) -> Decision:
    """Decide whether a pod that is created in a namespace is injected.

    Args:
        pod: as the API server sent it.
        namespace: the namespace in the request. The pod's own field can be empty.
        rules: the configuration.
    """
    spec = mapping(pod, "spec")
    metadata = mapping(pod, "metadata")
    labels, annotations = mapping(metadata, "labels"), mapping(metadata, "annotations")
    if spec.get("hostNetwork") is True:
        # The pod's traffic is the node's, and no proxy listens for a pod in the node's network namespace.
        return Decision(False, Reason.HOST_NETWORK)
    if _system(spec) not in ("", "linux"):
        # The added containers are for Linux only. In a Windows pod, the API server would refuse their security
        # context.
        return Decision(False, Reason.OTHER_OS)
    if namespace in IGNORED_NAMESPACES:
        return Decision(False, Reason.IGNORED_NAMESPACE)
    asked = labels.get(INJECT, annotations.get(INJECT))
    # Only the strings "true" and "false" count, like in Istio. Others, such as "yes", are ignored.
    if asked == "true":
        return Decision(True, Reason.ASKED_IN)
    if asked == "false":
        return Decision(False, Reason.ASKED_OUT)
    warning = "" if asked is None else f'{INJECT}={asked!r} is ignored: only "true" and "false" count'
    if any(selector.selects(labels) for selector in rules.never):
        return Decision(False, Reason.NEVER_SELECTOR, warning)
    if any(selector.selects(labels) for selector in rules.always):
        return Decision(True, Reason.ALWAYS_SELECTOR, warning)
    if rules.policy in ("enabled", "disabled"):
        return Decision(rules.policy == "enabled", Reason.POLICY, warning)
    return Decision(False, Reason.BAD_POLICY, f"the injector's policy is {rules.policy!r}: nothing is injected")


def _system(spec: Mapping[str, Any]) -> str:
    """Return the operating system that a pod requires, by its ``os`` or its node selector. Empty if it requires
    none.
    """
    named = mapping(spec, "os").get("name") or mapping(spec, "nodeSelector").get("kubernetes.io/os")
    return named if isinstance(named, str) else ""


def mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping inside an object. An absent one counts as empty. So does a malformed one, because the API
    server itself refuses it.
    """
    inner = value.get(name)
    return inner if isinstance(inner, Mapping) else {}
