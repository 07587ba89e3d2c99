"""A store of the shape that Calico measured in a production cluster, for benches and tests of evaluation.

294 policies for all endpoints with 68 rules each, nearly all ``Pass``; 3,708 IP sets with 256,000 members
together: most are small, and one has 54,566. A quarter of the rules names a set. No rule matches the evaluated
flow.
"""

import random
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network

from xds.model import calico as c

POLICIES = 294
RULES = 68
#: Number of sets, and the range of their sizes.
SET_SIZES = ((3035, 1, 9), (446, 10, 99), (64, 100, 999), (158, 1_000, 2_000), (1, 54_566, 54_566))
WITH_SET = 0.242
ENDPOINT = c.EndpointId("k8s", "shop/web-0", "eth0")
#: An address that no IP set and no rule's network contains.
FLOW = c.Flow(
    source_ip="192.0.2.7",
    destination_ip="10.9.0.1",
    source_port=40_000,
    destination_port=8_443,
    source_principal="spiffe://cluster.local/ns/shop/sa/web",
)


def updates(seed: int = 1) -> Iterator[c.Update]:
    """Yield the updates of a snapshot, in Felix's order."""
    draw = random.Random(seed)
    ids: list[str] = []
    for count, least, most in SET_SIZES:
        for _ in range(count):
            ids.append(f"s:{len(ids)}")
            members = (
                f"{IPv4Address(0x0A000000 | draw.randrange(1 << 24))}/32" for _ in range(draw.randint(least, most))
            )
            yield c.IpSetUpdate(ids[-1], c.IpSetType.NET, tuple(members))
    policies = [c.PolicyId("GlobalNetworkPolicy", "", f"policy-{number}") for number in range(POLICIES)]
    for policy in policies:
        yield c.PolicyUpdate(policy, c.Policy("", tuple(_rule(draw, ids) for _ in range(RULES))))
    tier = c.Tier("default", tuple(policies))
    yield c.EndpointUpdate(ENDPOINT, c.Endpoint("cali1", (IPv4Network("10.9.0.1/32"),), (tier,), ("kns.shop",)))
    yield c.ProfileUpdate("kns.shop", c.Policy("", (c.Rule(c.Action.ALLOW),), (c.Rule(c.Action.ALLOW),)))
    yield c.InSync()


def _rule(draw: random.Random, ids: list[str]) -> c.Rule:
    source = c.PeerMatch()
    if draw.random() < WITH_SET:
        source = c.PeerMatch(ip_sets=(draw.choice(ids),), selector="app == 'x'")
    else:
        network = IPv4Network((0x0A000000 | draw.randrange(1 << 16) << 8, 24))
        source = c.PeerMatch(nets=(network,))
    ports = ((draw.randrange(1, 8_000), 0),)
    destination = c.PeerMatch(ports=((ports[0][0], ports[0][0]),))
    return c.Rule(c.Action.PASS, source, destination, "tcp")
