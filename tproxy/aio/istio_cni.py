"""Takes over what istio-cni wrote into a pod's network namespace, without a moment in which connections break.

istio-cni's routes and policy rules are those of :mod:`tproxy.inpod` under another protocol number. A route is
replaced in one request. A policy rule cannot be: a rule of ours beside it holds its place meanwhile.

Its nftables tables, or its chains in the tables of ``iptables-nft``, are removed once our table is there. Open
connections live on: conntrack has their translation and their mark, and translates as long as any nat chain is
registered (nf_nat_inet_fn in net/netfilter/nf_nat_core.c). Chains of ``iptables-legacy`` are not in nftables, and
stay; beside ours they do the same.
"""

import contextlib
from dataclasses import replace

from tproxy.aio import rtnetlink
from tproxy.aio.netlink import NETLINK_NETFILTER, NETLINK_ROUTE, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.errors import KernelRefused
from tproxy.expressions import Family
from tproxy.operations import DeleteChain, DeleteTable, FlushChain, NftStep
from tproxy.render import nf_tables as nf
from tproxy.render import nftables
from tproxy.render.nftables_dump import nft_parts
from tproxy.resources import IpRule, Namespace
from tproxy.wire import Message, attribute, read_text, text

_TABLES, _CHAINS = "istio-ambient-", "ISTIO_"
_FAMILIES = {int(family): family for family in Family}


def take_over_routing(netns: Netns, wanted: Namespace, protocol: int) -> int:
    """Make routes and policy rules ours that are as wanted but for their protocol number; idempotent.

    Args:
        netns: the pod's namespace.
        wanted: its resources.
        protocol: our number.

    Returns:
        The number of routes and rules that were taken over.

    Raises:
        TproxyError: the kernel refused to list or to change them.
    """
    taken = 0
    with NetlinkSocket(NETLINK_ROUTE, netns) as route:
        links = map(rtnetlink.read_link, route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK)))
        names = {link.index: link.name for link in links}
        indexes = {name: index for index, name in names.items()}
        for body in route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETROUTE)):
            other = rtnetlink.route_protocol(body)
            found = rtnetlink.read_route(body, other, names) if other != protocol else None
            if found is not None and found in wanted.routes:
                message = rtnetlink.route_message(
                    rtnetlink.RTM_NEWROUTE, found, protocol, indexes.__getitem__, replace=True
                )
                route.request(message)
                taken += 1
        foreign = set()
        for body in route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETRULE)):
            other = rtnetlink.rule_protocol(body)
            rule = rtnetlink.read_rule(body, other) if other != protocol else None
            if rule is not None and rule in wanted.rules:
                foreign.add(rule)
        for rule in foreign:
            _take_over_rule(route, rule, protocol)
    return taken + len(foreign)


def _take_over_rule(route: NetlinkSocket, rule: IpRule, protocol: int) -> None:
    beside = replace(rule, priority=rule.priority - 1)
    route.request(rtnetlink.rule_message(rtnetlink.RTM_NEWRULE, beside, protocol))
    # istio-cni's has no protocol number, and a deletion without one takes any: one of ours, if it is there too.
    with contextlib.suppress(KernelRefused):
        while True:
            route.request(rtnetlink.rule_message(rtnetlink.RTM_DELRULE, rule, 0))
    route.request(rtnetlink.rule_message(rtnetlink.RTM_NEWRULE, rule, protocol))
    route.request(rtnetlink.rule_message(rtnetlink.RTM_DELRULE, beside, protocol))


def foreign_chains(netns: Netns) -> set[str]:
    """Return istio-cni's chains in the namespace, each with its table, written by nft or iptables-nft.

    Raises:
        TproxyError: the kernel refused to list them.
    """
    with NetlinkSocket(NETLINK_NETFILTER, netns) as link:
        return {f"{table} {chain}" for _, table, chain in _chains(link)}


def remove_chains(netns: Netns) -> set[str]:
    """Remove istio-cni's tables, or its chains and the jumps to them, in one transaction; idempotent.

    Returns:
        The chains that were there.

    Raises:
        TproxyError: the kernel refused; nothing has changed then.
    """
    with NetlinkSocket(NETLINK_NETFILTER, netns) as link:
        chains = _chains(link)
        steps: list[NftStep] = []
        jumps: list[Message] = []
        for family, table in sorted({(family, table) for family, table, _ in chains}):
            if table.startswith(_TABLES):
                steps.append(DeleteTable(_FAMILIES[family], table))
                continue
            own = sorted(chain for of, name, chain in chains if (of, name) == (family, table))
            jumps += _jumps(link, family, table, own)
            steps += [FlushChain(_FAMILIES[family], table, chain) for chain in own]
            steps += [DeleteChain(_FAMILIES[family], table, chain) for chain in own]
        if chains:
            begin, *rest = nftables.nft_batch(steps)
            link.batch([begin, *jumps, *rest])
    return {f"{table} {chain}" for _, table, chain in chains}


def _chains(link: NetlinkSocket) -> set[tuple[int, str, str]]:
    message = nftables.nft_message(nftables.NFT_GETCHAIN, 0, nftables.DUMP, about="list chains")
    found = set()
    for body in link.dump(message):
        family, parts = nft_parts(body)
        table = read_text(parts.get(nf.NFTA_CHAIN_TABLE, b""))
        chain = read_text(parts.get(nf.NFTA_CHAIN_NAME, b""))
        if family in _FAMILIES and (table.startswith(_TABLES) or chain.startswith(_CHAINS)):
            found.add((family, table, chain))
    return found


def _jumps(link: NetlinkSocket, family: int, table: str, chains: list[str]) -> list[Message]:
    """Return the requests that delete the rules of other chains which name one of these chains."""
    message = nftables.nft_message(
        nftables.NFT_GETRULE, family, nftables.DUMP, text(nf.NFTA_RULE_TABLE, table), about="list rules"
    )
    found = []
    for body in link.dump(message):
        _, parts = nft_parts(body)
        of = read_text(parts.get(nf.NFTA_RULE_CHAIN, b""))
        expressions = parts.get(nf.NFTA_RULE_EXPRESSIONS, b"")
        # The kernel does not filter dumps by their table in every release.
        if read_text(parts.get(nf.NFTA_RULE_TABLE, b"")) != table or of.startswith(_CHAINS):
            continue
        if any(text(nf.NFTA_VERDICT_CHAIN, chain) in expressions for chain in chains):
            found.append(
                nftables.nft_message(
                    nftables.NFT_DELRULE,
                    family,
                    0,
                    text(nf.NFTA_RULE_TABLE, table),
                    text(nf.NFTA_RULE_CHAIN, of),
                    attribute(nf.NFTA_RULE_HANDLE, parts[nf.NFTA_RULE_HANDLE]),
                    about=f"delete a jump of {table} {of}",
                )
            )
    return found
