"""Writes the same rules into a pod as istio-cni, in both of its forms, so that our agent finds them.

The rules themselves are those of our table, which follows istio-cni's. Tables, chains and jumps have the names of
its release 1.24 and later.
"""

import subprocess
from collections.abc import Iterable

from tests.programs import needed
from tproxy.aio.netlink import NETLINK_NETFILTER, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.expressions import Family, jump
from tproxy.inpod import POD, Capture, pod
from tproxy.operations import AddChain, AddTable, AppendRule, NftStep
from tproxy.render import nftables
from tproxy.resources import Chain, Rule

#: Names of the base chain and of istio-cni's own, by the last word of our chain's name.
_IPTABLES = {"prerouting": ("PREROUTING", "ISTIO_PRERT"), "output": ("OUTPUT", "ISTIO_OUTPUT")}
_NFT = {"prerouting": ("prerouting", "istio-prerouting"), "output": ("output", "istio-output")}
FORMS = ("iptables", "nft")


def write_rules(netns: Netns, form: str) -> None:
    """Write istio-cni's rules, routes and policy rules."""
    [table] = pod(Capture()).namespaces[POD].tables
    steps: list[NftStep] = []
    for family in (Family.IPV4, Family.IPV6) if form == "iptables" else (Family.INET,):
        made = set()
        for chain in table.chains:
            kind, _, point = chain.name.partition("_")
            name = kind if form == "iptables" else f"istio-ambient-{kind}"
            base, own = (_IPTABLES if form == "iptables" else _NFT)[point]
            if name not in made:
                steps.append(AddTable(family, name))
                made.add(name)
            steps += [
                AddChain(family, name, Chain(own)),
                AddChain(family, name, Chain(base, hook=chain.hook)),
                AppendRule(family, name, base, Rule(jump(own))),
            ]
            steps += _rules(family, name, own, chain.rules)
    with NetlinkSocket(NETLINK_NETFILTER, netns) as link:
        link.batch(nftables.nft_batch(steps))
    write_routing(netns)


def _rules(family: Family, table: str, chain: str, rules: Iterable[Rule]) -> list[NftStep]:
    return [AppendRule(family, table, chain, Rule(rule.phrase)) for rule in rules]


def write_routing(netns: Netns) -> None:
    """Write the route and the policy rule of each IP version. An existing route is replaced, and an existing rule
    is kept.
    """
    for version, everything in (("-4", "0.0.0.0/0"), ("-6", "::/0")):
        ip(netns, version, "route", "replace", "local", everything, "dev", "lo", "table", "100")
        ip(netns, version, "rule", "add", "fwmark", "0x111/0xfff", "pref", "32764", "lookup", "100", check=False)


def routing(netns: Netns) -> list[str]:
    """Return the policy rules of priority 32764 and the routes of table 100, in words."""
    found = []
    for version in ("-4", "-6"):
        rules = ip(netns, version, "rule", "show").splitlines()
        found += [line for line in rules if "0x111" in line]
        found += ip(netns, version, "route", "show", "table", "100", "type", "local").splitlines()
    return found


def ip(netns: Netns, *arguments: str, check: bool = True) -> str:
    """Run ip(8) in a namespace that has a name."""
    done = subprocess.run(
        [needed("ip"), "-n", str(netns.name), *arguments], check=check, capture_output=True, text=True
    )
    return done.stdout
