"""Small stores for tests of the guard: two pods, and one tier with policies of each kind."""

from ipaddress import ip_network

from xds.model import calico as c
from xds.model.address import SocketAddress
from ztunnel.policy.calico.guard import connection

WEB, DB = c.EndpointId("k8s", "shop/web", "eth0"), c.EndpointId("k8s", "shop/db", "eth0")
WEB_HOST, DB_HOST, ELSEWHERE = "10.0.0.1", "10.0.0.2", "10.9.9.9"
ONE = c.PolicyId("GlobalNetworkPolicy", "", "one")
STAGED = c.PolicyId("StagedGlobalNetworkPolicy", "", "staged")
ALLOW, DENY = c.Rule(c.Action.ALLOW), c.Rule(c.Action.DENY)
#: From one pod to the other.
FLOW = connection(SocketAddress(WEB_HOST, 40000), SocketAddress(DB_HOST, 80), "", "")


def endpoint(key: c.EndpointId, host: str, *policies: c.PolicyId) -> c.Update:
    """A pod whose policies are for both directions."""
    return c.EndpointUpdate(key, c.Endpoint("", (ip_network(host),), (c.Tier("default", policies, policies),)))


def both(policy: c.PolicyId, *rules: c.Rule) -> c.Update:
    """A policy with the same rules in both directions."""
    return c.PolicyUpdate(policy, c.Policy("", rules, rules))


def snapshot(*rules: c.Rule, staged: tuple[c.Rule, ...] | None = None) -> tuple[c.Update, ...]:
    """Return the updates for both pods with one policy, and before it a staged one if it has rules."""
    policies = (ONE,) if staged is None else (STAGED, ONE)
    more = () if staged is None else (both(STAGED, *staged),)
    return (
        both(ONE, *rules),
        *more,
        endpoint(WEB, WEB_HOST, *policies),
        endpoint(DB, DB_HOST, *policies),
        c.InSync(),
    )
