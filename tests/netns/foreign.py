"""Tables that others keep on a node, in the shape that they give them: kube-proxy's two modes, and Docker's."""

from tproxy import expressions as e
from tproxy.aio.netlink import NETLINK_NETFILTER, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.expressions import Family, Verdict, VerdictCode
from tproxy.operations import AddChain, AddElements, AddSet, AddTable, AppendRule, NftStep
from tproxy.render import nftables
from tproxy.resources import Chain, Element, Hook, HookPoint, Rule, Set, SetKey

_SERVICES = {
    Family.IPV4: (SetKey.IPV4_ADDRESS, bytes((10, 96, 0, 1))),
    Family.IPV6: (SetKey.IPV6_ADDRESS, bytes((0xFD,)) + bytes(14) + b"\1"),
}


def foreign_tables(netns: Netns) -> None:
    """Add them to a namespace."""
    steps: list[NftStep] = []
    for family, (key, address) in _SERVICES.items():
        # kube-proxy --proxy-mode=nftables: a table of its own, a verdict map from services to their chains.
        steps += [
            AddTable(family, "kube-proxy"),
            AddSet(family, "kube-proxy", Set("cluster-ips", key)),
            AddElements(family, "kube-proxy", "cluster-ips", (Element(address),)),
            AddChain(family, "kube-proxy", Chain("service-x")),
            AddSet(family, "kube-proxy", Set("service-ips", key, verdicts=True)),
            AddElements(
                family,
                "kube-proxy",
                "service-ips",
                (Element(address, verdict=Verdict(VerdictCode.GOTO, "service-x")),),
            ),
            AddChain(family, "kube-proxy", Chain("nat-prerouting", hook=_hook("nat", HookPoint.PREROUTING, -100))),
            AppendRule(
                family,
                "kube-proxy",
                "nat-prerouting",
                Rule(e.verdict_by_address(family, "service-ips", source=False), "theirs"),
            ),
        ]
        # Its iptables mode, and Docker's: tables that iptables-nft shares out, with chains of many owners.
        for table, hook, chains in (
            ("filter", _hook("filter", HookPoint.FORWARD, 0), ("KUBE-FORWARD", "DOCKER-USER", "DOCKER")),
            ("nat", _hook("nat", HookPoint.PREROUTING, -100), ("KUBE-SERVICES", "DOCKER")),
        ):
            base = "FORWARD" if table == "filter" else "PREROUTING"
            steps += [AddTable(family, table), AddChain(family, table, Chain(base, hook=hook))]
            for chain in chains:
                steps += [
                    AddChain(family, table, Chain(chain)),
                    AppendRule(family, table, base, Rule(e.jump(chain), "theirs")),
                ]
    with NetlinkSocket(NETLINK_NETFILTER, netns) as nft:
        nft.batch(nftables.nft_batch(steps))


def _hook(kind: str, point: HookPoint, priority: int) -> Hook:
    return Hook(kind=kind, point=point, priority=priority)
