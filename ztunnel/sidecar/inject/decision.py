"""Decides whether a pod is injected: the first row of a table that matches decides. Pure.

The API server has already applied the webhook's selectors. The rows are those of Istio's injector, with the same
labels and the same configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ztunnel.kube.objects import Object
from ztunnel.sidecar.inject.selector import Selector

#: The label, or the annotation if there is no such label, of a pod that requests or refuses injection.
INJECT: Final = "sidecar.istio.io/inject"
IGNORED_NAMESPACES: Final = frozenset({"kube-system", "kube-public", "kube-node-lease", "local-path-storage"})


class Reason(StrEnum):
    """The row that decided. Used as a label of metrics and in logs."""

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
    """The configured part of the table.

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
    """The verdict, the row that decided, and warnings for the author of the pod."""

    inject: bool
    reason: Reason
    warning: str = ""


def decide(pod: Object, namespace: str, rules: Rules) -> Decision:
    """Decide whether a pod that is created in a namespace is injected.

    Args:
        pod: as the API server sent it.
        namespace: the request's. A pod's own can be empty.
        rules: the configuration.
    """
    spec = mapping(pod, "spec")
    metadata = mapping(pod, "metadata")
    labels, annotations = mapping(metadata, "labels"), mapping(metadata, "annotations")
    if spec.get("hostNetwork") is True:
        # Its traffic is the node's, and no proxy listens for a pod in the node's namespace.
        return Decision(False, Reason.HOST_NETWORK)
    if _system(spec) not in ("", "linux"):
        # The added containers are for Linux. The API server refuses their security context in a Windows pod.
        return Decision(False, Reason.OTHER_OS)
    if namespace in IGNORED_NAMESPACES:
        return Decision(False, Reason.IGNORED_NAMESPACE)
    asked = labels.get(INJECT, annotations.get(INJECT))
    # Only these two strings count, like in Istio. "True" or "yes" is ignored.
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
    """Return the operating system that a pod requires, by its ``os`` or its node selector. Empty for any."""
    named = mapping(spec, "os").get("name") or mapping(spec, "nodeSelector").get("kubernetes.io/os")
    return named if isinstance(named, str) else ""


def mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping inside an object. An absent or malformed one counts as empty, because the API server
    refuses it itself.
    """
    inner = value.get(name)
    return inner if isinstance(inner, Mapping) else {}
