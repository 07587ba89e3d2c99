"""The authorization policies of a mesh by scope, and the policies of each workload, compiled for the engine.

A workload's compiled policies depend on its namespace and on the policies that it names. They are cached until one
of these policies changes, and shared by all workloads with the same namespace and policies.

A policy named by a workload but not yet received denies every connection that it could deny. istiod names some
policies without ever sending them: it makes a policy of each PeerAuthentication with a selector and port levels,
but not again when the mode of the namespace or of the mesh changes. Such a policy can only deny connections
without an identity. It is known by its name, which no object of a cluster can have.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.facts import ConnectionFacts
from xds.model.mesh_index import Key
from xds.model.policy import Always, Not, PeerPrincipal, Policy, PolicyList, Tier, Verdict
from xds.model.workload import PolicyKey, Workload

#: The largest number of cached (namespace, selected policies) pairs. The workloads of one node have a few hundred
#: pairs. The limit bounds the memory if a mesh keeps renaming its policies.
_REMEMBERED_POLICIES = 4096

#: The prefix in the names of policies that istiod makes of PeerAuthentications.
_PEER_AUTHENTICATION = "converted_peer_authentication_"


@dataclass(frozen=True, slots=True)
class WorkloadPolicies:
    """The policies that decide about connections to one workload.

    Attributes:
        enforced: deny policies, then allow policies, in Istio's order. A missing policy is replaced by a rule with
            its name, which denies every connection that the policy could deny.
        dry_run_deny, dry_run_allow: policies that are only reported.
        missing: policies named by the workload but not yet received; see :meth:`missing_for`.
    """

    enforced: PolicyList
    dry_run_deny: tuple[AuthorizationPolicy, ...] = ()
    dry_run_allow: tuple[AuthorizationPolicy, ...] = ()
    missing: tuple[PolicyKey, ...] = ()

    def missing_for(self, facts: ConnectionFacts) -> tuple[PolicyKey, ...]:
        """Return the missing policies that could deny a connection. Until they arrive, it is not allowed."""
        if not self.missing or facts.peer is None or facts.peer.identity is None:
            return self.missing
        return tuple(key for key in self.missing if not _is_about_plain_text(key))

    @property
    def arrived(self) -> PolicyList:
        """``enforced`` without the rules that deny because a policy is missing.

        A DENY of a received policy is final even if another policy is missing. The final verdict of the list is
        not.
        """
        if not self.missing:
            return self.enforced
        return PolicyList(self.enforced.tiers[1:], self.enforced.end)


#: A workload's namespace and the policies that it names. Together they determine which policies apply to the
#: workload.
_Pair = tuple[str, tuple[PolicyKey, ...]]


class Authorization:
    """All authorization policies by scope, and the compiled policies of each workload."""

    def __init__(self) -> None:
        self.policies: dict[PolicyKey, AuthorizationPolicy] = {}
        self._judged: dict[PolicyKey, Policy] = {}
        self._by_scope: dict[str | None, dict[PolicyKey, AuthorizationPolicy]] = {}
        self._shared: dict[str | None, tuple[Tier, Tier]] = {}
        self._remembered: dict[_Pair, WorkloadPolicies] = {}
        self._by_namespace: dict[str, set[_Pair]] = {}
        self._by_name: dict[PolicyKey, set[_Pair]] = {}

    def put(self, policy: AuthorizationPolicy) -> bool:
        key = policy.key
        before = self.policies.get(key)
        if before == policy:
            return False
        if before is not None:
            self._forget(before)
            if (before.scope, _reach(before)) != (policy.scope, _reach(policy)):
                self._leave(before)
        self.policies[key] = policy
        if policy.scope is not PolicyScope.WORKLOAD_SELECTOR:
            self._by_scope.setdefault(_reach(policy), {})[key] = policy
        verdict = Verdict.DENY if policy.action is Action.DENY else Verdict.ALLOW
        self._judged[key] = Policy(key, verdict, policy.condition)
        self._forget(policy)
        return True

    def remove(self, key: PolicyKey) -> bool:
        policy = self.policies.pop(key, None)
        if policy is None:
            return False
        del self._judged[key]
        self._leave(policy)
        self._forget(policy)
        return True

    def _leave(self, policy: AuthorizationPolicy) -> None:
        reach = _reach(policy)
        if policy.scope is not PolicyScope.WORKLOAD_SELECTOR:
            del self._by_scope[reach][policy.key]
            if not self._by_scope[reach]:
                del self._by_scope[reach]

    def _forget(self, policy: AuthorizationPolicy) -> None:
        """Drop the cached values that were compiled from a policy."""
        reach = _reach(policy)
        if policy.scope is not PolicyScope.WORKLOAD_SELECTOR and reach is None:
            self._shared.pop(reach, None)
            self._forget_all()
            return
        gone = set(self._by_name.get(policy.key, ()))
        if policy.scope is PolicyScope.NAMESPACE:
            self._shared.pop(reach, None)
            gone |= self._by_namespace.get(policy.namespace, set())
        for pair in gone:
            del self._remembered[pair]
            _discard(self._by_namespace, pair[0], pair)
            for name in set(pair[1]):
                _discard(self._by_name, name, pair)

    def _forget_all(self) -> None:
        self._remembered.clear()
        self._by_namespace.clear()
        self._by_name.clear()

    def policies_for(self, workload: Workload) -> WorkloadPolicies:
        pair = (workload.namespace, workload.authorization_policies)
        found = self._remembered.get(pair)
        if found is None:
            if len(self._remembered) >= _REMEMBERED_POLICIES:
                self._forget_all()
            found = self._remembered[pair] = self._collect(*pair)
            self._by_namespace.setdefault(pair[0], set()).add(pair)
            for name in pair[1]:
                self._by_name.setdefault(name, set()).add(pair)
        return found

    def _collect(self, namespace: str, names: tuple[PolicyKey, ...]) -> WorkloadPolicies:
        scopes = (None, namespace)
        everywhere = [self._by_scope.get(scope, {}) for scope in scopes]
        named: dict[PolicyKey, AuthorizationPolicy] = {}
        missing = []
        for name in dict.fromkeys(names):
            policy = self.policies.get(name)
            if policy is None:
                missing.append(name)
            elif not any(name in policies for policies in everywhere):
                named[name] = policy
        tiers = [self._tiers(scope) for scope in scopes] + [self._made(named.values())]
        closed = Tier(
            tuple(
                Policy(name, Verdict.DENY, Not(PeerPrincipal()) if _is_about_plain_text(name) else Always())
                for name in missing
            )
        )
        chosen = [closed, *(deny for deny, _ in tiers), *(allow for _, allow in tiers)]
        allows = any(allow.policies for _, allow in tiers)
        all_policies = [policy for group in (*everywhere, named) for policy in group.values() if policy.dry_run]
        return WorkloadPolicies(
            enforced=PolicyList(
                tuple(tier for tier in chosen if tier.policies), Verdict.DENY if allows else Verdict.ALLOW
            ),
            dry_run_deny=tuple(policy for policy in all_policies if policy.action is Action.DENY),
            dry_run_allow=tuple(policy for policy in all_policies if policy.action is Action.ALLOW),
            missing=tuple(missing),
        )

    def _tiers(self, scope: str | None) -> tuple[Tier, Tier]:
        """Return the deny tier and the allow tier of a scope. All workloads in the scope share these objects."""
        found = self._shared.get(scope)
        if found is None:
            policies = self._by_scope.get(scope)
            found = self._made(policies.values() if policies is not None else ())
            if policies is not None:
                self._shared[scope] = found
        return found

    def _made(self, policies: Iterable[AuthorizationPolicy]) -> tuple[Tier, Tier]:
        enforced = [policy for policy in policies if not policy.dry_run]
        deny = tuple(self._judged[policy.key] for policy in enforced if policy.action is Action.DENY)
        allow = tuple(self._judged[policy.key] for policy in enforced if policy.action is Action.ALLOW)
        return Tier(deny), Tier(allow)


def _is_about_plain_text(key: PolicyKey) -> bool:
    return key.partition("/")[2].startswith(_PEER_AUTHENTICATION)


def _discard(index: dict[Key, set[_Pair]], key: Key, pair: _Pair) -> None:
    index[key].discard(pair)
    if not index[key]:
        del index[key]


def _reach(policy: AuthorizationPolicy) -> str | None:
    """Return the namespace whose workloads the policy applies to. None means all workloads. An empty namespace
    also gives None, like in the Rust ztunnel.
    """
    return None if policy.scope is PolicyScope.GLOBAL else policy.namespace or None
