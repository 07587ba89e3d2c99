"""Converts objects of an API server to changes of policy resources, with a fallback for faulty objects. Pure.

Only the unusable part of an object is left out (see :mod:`ztunnel.policy.calico.kubernetes`). If that is
impossible, the object's last good form stays. A policy without a good form denies the traffic of the pods that it
selects, or of all pods of its namespace if its selector is also unreadable. A policy outside of namespaces denies
it for all pods.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeAlias

from xds.model import calico as c
from ztunnel.kube.objects import Object, ObjectKey
from ztunnel.policy.calico.read import CALICO_GROUPS, read_object
from ztunnel.policy.calico.resources import ApiPolicy, ApiRule, Resources

#: A change: the name of a table of :class:`~ztunnel.policy.calico.resources.Resources`, a key, and the value. None
#: removes the entry.
ResourceChange: TypeAlias = tuple[str, Any, Any]

#: The kinds that :class:`PolicyObjects` reads.
KINDS: Final = (
    "Pod", "Namespace", "ServiceAccount", "Service", "NetworkPolicy", "GlobalNetworkPolicy", "NetworkSet",
    "GlobalNetworkSet", "Tier", "Profile", "StagedNetworkPolicy", "StagedGlobalNetworkPolicy",
    "StagedKubernetesNetworkPolicy", "AdminNetworkPolicy", "BaselineAdminNetworkPolicy", "ClusterNetworkPolicy",
    "Node", "HostEndpoint",
)  # fmt: skip
_POLICY_KINDS: Final = frozenset(
    {
        "NetworkPolicy",
        "GlobalNetworkPolicy",
        "AdminNetworkPolicy",
        "BaselineAdminNetworkPolicy",
        "ClusterNetworkPolicy",
    }
)
_STRICTER: Final = "the rest of it is in force"
#: The most faults of one object that are reported one by one. A network set can have thousands.
_TOLD: Final = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of an object.

    Attributes:
        consequence: how the faulty part is treated.
    """

    key: ObjectKey
    faults: tuple[str, ...]
    consequence: str

    def __str__(self) -> str:
        more = len(self.faults) - _TOLD
        told = "; ".join(self.faults[:_TOLD]) + (f"; and {more} more" if more > 0 else "")
        return f"{told} ({self.consequence})"


@dataclass(slots=True)
class PolicyObjects:
    """Remembers which resource each object became.

    Attributes:
        nodes: whether Node objects are among the changes. If not, rules about nodes fail closed.
        problems: the problems of objects that are faulty now, by object.
    """

    nodes: bool = True
    problems: dict[ObjectKey, Problem] = field(default_factory=dict)
    _made: dict[ObjectKey, tuple[str, Any]] = field(default_factory=dict)
    _uids: dict[ObjectKey, str] = field(default_factory=dict)
    #: Policies without a good form. Each is replaced by a policy that denies its pods' traffic.
    _closed: set[ObjectKey] = field(default_factory=set)

    def known(self) -> set[ObjectKey]:
        """Return the keys of the objects that resources were made from."""
        return set(self._made)

    def changes(self, objects: Mapping[ObjectKey, Object | None]) -> list[ResourceChange]:
        return [change for key, value in objects.items() for change in self._change(key, value)]

    def _change(self, key: ObjectKey, value: Object | None) -> Iterator[ResourceChange]:
        before = self._made.get(key)
        self.problems.pop(key, None)
        closed = key in self._closed
        self._closed.discard(key)
        if value is None:
            self._uids.pop(key, None)
            if before is not None:
                del self._made[key]
                yield (*before, None)
            return
        # A source can skip the removal of an object that was created again. The good form was the former object's.
        uid = _uid_of(value)
        is_same = self._uids.get(key, uid) == uid
        self._uids[key] = uid
        read = read_object(value)
        made = next(_entries(read.found), None)
        if read.faults and before is not None and is_same and not closed:
            self.problems[key] = Problem(key, read.faults, "its last good form stays active")
            return
        if read.faults and key.kind.partition(".")[0] not in _POLICY_KINDS:
            self.problems[key] = Problem(key, read.faults, "not in force")
            if before is not None:
                del self._made[key]
                yield (*before, None)
            return
        if read.faults:
            policy = _closing(key, value, read.found)
            if before is not None and before != ("policies", policy.id):
                yield (*before, None)
            self._made[key] = ("policies", policy.id)
            self._closed.add(key)
            self.problems[key] = Problem(key, read.faults, f"closed meanwhile: {_closed(policy)}")
            yield "policies", policy.id, policy
            return
        if before is not None and (made is None or made[:2] != before):
            del self._made[key]
            yield (*before, None)
        stricter = tuple(map(str, read.flaws))
        if made is not None:
            if isinstance(made[2], ApiPolicy):
                policy = made[2] if self.nodes else _without_nodes(made[2])
                stricter = (*policy.notes, *stricter)
                made = (*made[:2], policy)
            self._made[key] = made[:2]
            yield made
        if stricter:
            self.problems[key] = Problem(key, stricter, _STRICTER if made is not None else "not in force")


def _uid_of(value: Object) -> str:
    """Return the uid that an API server gave an object. Empty for an object of a file."""
    metadata = value.get("metadata")
    return str(metadata.get("uid", "")) if isinstance(metadata, Mapping) else ""


def _entries(found: Resources) -> Iterator[ResourceChange]:
    for item in fields(Resources):
        for key, value in getattr(found, item.name).items():
            yield item.name, key, value


def _without_nodes(policy: ApiPolicy) -> ApiPolicy:
    """Return a policy whose rules about nodes fail closed, because the nodes' addresses are not known here."""
    notes: list[str] = []
    made: list[tuple[ApiRule, ...]] = []
    for key, rules in (("ingress", policy.inbound), ("egress", policy.outbound)):
        kept: list[ApiRule] = []
        for rule in rules:
            if rule.source.nodes is None and rule.destination.nodes is None:
                kept.append(rule)
                continue
            allows = rule.action is c.Action.ALLOW
            what = "it allows nothing to nodes" if allows else "it denies everything"
            notes.append(f"{key}: a rule about nodes, which are followed with --node-peers only, so {what}")
            if not allows:
                kept.append(ApiRule(c.Action.DENY))
        made.append(tuple(kept))
    if not notes:
        return policy
    return replace(policy, inbound=made[0], outbound=made[1], notes=(*policy.notes, *dict.fromkeys(notes)))


def _closing(key: ObjectKey, value: Object, found: Resources) -> ApiPolicy:
    """Return a policy that denies the traffic of all pods selected by a faulty policy, in its directions.

    An unreadable part of a selector counts as selecting all pods, and unreadable directions as both.
    """
    made = next(iter(found.policies.values()), None)
    if made is None:
        group = str(value.get("apiVersion", "")).partition("/")[0]
        prefix = {"networking.k8s.io": "Kubernetes", "policy.networking.k8s.io": "Kubernetes"}.get(group, "")
        kind = f"{prefix}{key.kind.partition('.')[0]}"
        if not prefix and group not in CALICO_GROUPS:
            # An id of its own: a policy of a misspelt group must not replace Calico's policy of the same name.
            kind = f"Unknown{key.kind}"
        made = ApiPolicy(id=c.PolicyId(kind, key.namespace, key.name), egress=True)
    drop = (ApiRule(c.Action.DENY),)
    return replace(made, order=float("-inf"), inbound=drop, outbound=drop)


def _closed(policy: ApiPolicy) -> str:
    """Return a text about which pods a closing policy selects."""
    pods = " && ".join(filter(None, (policy.selector, policy.account_selector))) or "all pods"
    where = policy.id.namespace or policy.namespace_selector or "every namespace"
    governed = [name for name, whether in (("ingress", policy.ingress), ("egress", policy.egress)) if whether]
    return f"{' and '.join(governed)} of {pods} of {where}"
