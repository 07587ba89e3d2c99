"""An endpoint, a flow and policies for tests of the evaluator, and short ways to combine them."""

from dataclasses import replace
from typing import Any

from xds.model import calico as c
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import Identity, identity_of

POD = c.EndpointId("k8s", "shop/web-0", "eth0")


def identities(flow: c.Flow) -> tuple[Identity, Identity]:
    found = [
        identity_of(principal, frozenset()) for principal in (flow.source_principal, flow.destination_principal)
    ]
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


WEB = "spiffe://cluster.local/ns/shop/sa/web"
ONE = c.PolicyId("GlobalNetworkPolicy", "", "one")
TWO = c.PolicyId("NetworkPolicy", "shop", "two")
STAGED = c.PolicyId("StagedGlobalNetworkPolicy", "", "staged")
ALLOW, DENY, PASS, LOG = c.Rule(c.Action.ALLOW), c.Rule(c.Action.DENY), c.Rule(c.Action.PASS), c.Rule(c.Action.LOG)
FLOW = c.Flow(
    source_ip="10.0.0.1",
    destination_ip="10.0.0.2",
    destination_port=80,
    source_principal=WEB,
    method="GET",
    path="/a",
)
NET_SET = c.IpSetUpdate("s:a", c.IpSetType.NET, ("10.0.0.0/24",))
PORT_SET = c.IpSetUpdate("n:http", c.IpSetType.IP_AND_PORT, ("10.0.0.2,tcp:80", "10.0.0.2,sctp:81"))


def evaluator(*updates: c.Update, tiers: tuple[c.Tier, ...] = (), profiles: tuple[str, ...] = ()) -> Evaluator:
    found = Evaluator(Store())
    for update in (*updates, c.EndpointUpdate(POD, c.Endpoint("", (), tiers, profiles)), c.InSync()):
        found.apply(update)
    return found


def policy(policy_id: c.PolicyId, *rules: c.Rule) -> c.Update:
    return c.PolicyUpdate(policy_id, c.Policy(policy_id.namespace, rules))


def tier(*policies: c.PolicyId, name: str = "default", passes: bool = False) -> c.Tier:
    return c.Tier(name, policies, (), passes)


def with_rule(*rules: c.Rule, of: c.PolicyId = ONE) -> Evaluator:
    return evaluator(policy(of, *rules), tiers=(tier(of),))


def matches(rule: dict[str, Any], flow: c.Flow = FLOW, *updates: c.Update, of: c.PolicyId = ONE) -> bool:
    """Return whether an allowing rule matches, as the only rule of its policy."""
    found = evaluator(*updates, policy(of, c.Rule(c.Action.ALLOW, **rule)), tiers=(tier(of),))
    return found.check(POD, flow).allowed


def source(**clauses: Any) -> dict[str, Any]:
    return {"source": c.PeerMatch(**clauses)}


def destination(**clauses: Any) -> dict[str, Any]:
    return {"destination": c.PeerMatch(**clauses)}


def flow(**changes: Any) -> c.Flow:
    return replace(FLOW, **changes)
