"""Metrics of the policy server: counts of its answers, and the age of its policies."""

from collections.abc import Iterator

from ztunnel.policy.authz.server import PolicyServer
from ztunnel.policy.calico.follower import Follower
from ztunnel.policy.calico.guard import results
from ztunnel.runtime.http.exposition import Family, family, process_families


def families(server: PolicyServer, follower: Follower) -> Iterator[Family]:
    """Yield the policy server's metric families for one scrape."""
    store, counts = follower.evaluator.store, follower.counts
    answers = [((code.name,), float(count)) for code, count in sorted(server.answers.items())]
    yield family("authz_checks", "counter", "Checks answered, by gRPC code", answers, ("code",))
    decided = [(labels, float(number)) for labels, number in results(server.uses)]
    yield family("authz_policy_decisions", "counter", "Checks by policy", decided, ("tier", "policy", "result"))
    plain: tuple[tuple[str, str, str, float], ...] = (
        ("authz_policysync_in_sync", "gauge", "1 while the policies are known to be current", follower.in_sync),
        ("authz_policysync_age_seconds", "gauge", "Seconds since they were, 0 while they are", follower.age_s),
        ("authz_policysync_streams", "counter", "Streams begun", counts.streams),
        ("authz_policysync_updates", "counter", "Updates applied", counts.updates),
        ("authz_policysync_faults", "counter", "Messages that could not be read", counts.faults),
        ("authz_policysync_ignored", "counter", "Payloads that policy does not need", counts.ignored),
        ("authz_policysync_unknown_sets", "counter", "Changes of IP sets that do not exist", store.ignored),
        ("authz_policies", "gauge", "Policies that answers are made by", len(store.policies)),
        ("authz_ip_sets", "gauge", "IP sets in use", len(store.ip_sets)),
        ("authz_ip_sets_unreadable", "gauge", "IP sets with a member that cannot be read", store.ip_sets.unusable),
        ("authz_ip_set_members", "gauge", "Members of all IP sets", store.ip_sets.members),
    )
    for name, kind, text, value in plain:
        yield family(name, kind, text, [((), float(value))], ())
    yield from process_families()
