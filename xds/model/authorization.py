"""Istio's authorization policies: the original form for dumps, and the compiled condition."""

from dataclasses import dataclass
from enum import StrEnum

from xds.model.policy import Condition
from xds.model.workload import PolicyKey


class PolicyScope(StrEnum):
    """The scope of a policy: the workloads that it applies to."""

    GLOBAL = "Global"
    NAMESPACE = "Namespace"
    WORKLOAD_SELECTOR = "WorkloadSelector"


class Action(StrEnum):
    """The effect of a policy on the connections that it matches."""

    ALLOW = "Allow"
    DENY = "Deny"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorizationPolicy:
    """One policy.

    Attributes:
        condition: the compiled rules. :class:`~xds.model.policy.Never` in an allow policy, and
            :class:`~xds.model.policy.Always` in a deny policy, replace parts that could not be understood.
        rules: the rules as ``/config_dump`` shows them, JSON-ready.
        faults: the parts that could not be understood, each with its field path. Empty if all were understood.
    """

    name: str
    namespace: str
    scope: PolicyScope
    action: Action
    condition: Condition
    dry_run: bool = False
    rules: tuple[object, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def key(self) -> PolicyKey:
        """``namespace/name``, the resource's name."""
        return PolicyKey(f"{self.namespace}/{self.name}")
