"""Decides whether a pod gets an injection: one table, the first row that matches. Pure.

The API server has called by the webhook's selectors; this is the decision after them, row by row that of Istio's
injector, with the same labels and the same meaning of its configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ztunnel.kube.objects import Object
from ztunnel.sidecar.inject.selector import Selector

#: Label, or annotation where there is no such label, by which a pod asks in or out.
INJECT: Final = "sidecar.istio.io/inject"
IGNORED_NAMESPACES: Final = frozenset({"kube-system", "kube-public", "kube-node-lease", "local-path-storage"})


class Reason(StrEnum):
    """The row that decided; a label of metrics and a word in logs."""

    HOST_NETWORK = "host-network"
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
        policy: ``enabled`` or ``disabled``: what a pod gets that no row speaks of. Another word injects nothing.
        never: a pod with labels that one of these selects is left out, unless it asks in.
        always: a pod with labels that one of these selects is injected, unless it asks out.
    """

    policy: str = "enabled"
    never: tuple[Selector, ...] = ()
    always: tuple[Selector, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict, the row it comes from, and what is worth telling the author of the pod."""

    inject: bool
    reason: Reason
    warning: str = ""


def decide(pod: Object, namespace: str, rules: Rules) -> Decision:
    """Return what happens to a pod that is created in a namespace.

    Args:
        pod: as the API server sent it.
        namespace: the request's; a pod's own may be empty.
        rules: the configuration.
    """
    spec = mapping(pod, "spec")
    metadata = mapping(pod, "metadata")
    labels, annotations = mapping(metadata, "labels"), mapping(metadata, "annotations")
    if spec.get("hostNetwork") is True:
        # Its traffic is the node's, in whose namespace there is no listener for a pod.
        return Decision(False, Reason.HOST_NETWORK)
    if namespace in IGNORED_NAMESPACES:
        return Decision(False, Reason.IGNORED_NAMESPACE)
    asked = labels.get(INJECT, annotations.get(INJECT))
    # Only these two strings count, as in Istio: "True" or "yes" is no answer.
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


def mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping inside an object; an absent or misshapen one is empty: the API server refuses it itself."""
    inner = value.get(name)
    return inner if isinstance(inner, Mapping) else {}
