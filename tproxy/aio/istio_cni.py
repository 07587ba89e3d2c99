"""Takes over istio-cni's rules and routes in a pod's network namespace without breaking connections.

istio-cni's routes and policy rules equal our own (:mod:`tproxy.inpod`) except for the protocol number. A route is
replaced in one request. A policy rule cannot be replaced, so our rule is added first.

The nftables tables of istio-cni, or its chains in the tables of ``iptables-nft``, are removed after our table was
added. Open connections survive: conntrack keeps their translation and their mark, and translates as long as any
nat chain is registered (nf_nat_inet_fn in net/netfilter/nf_nat_core.c). Chains of ``iptables-legacy`` are outside
nftables and are not removed; they have the same effect as ours. All these chains are found by name in the kernel's
dumps.
"""

import contextlib
import ctypes
import errno
import os
import re
import socket
import struct
from dataclasses import replace
from pathlib import Path

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
#: For each IP version of ``iptables-legacy``: the address family, the level of the socket options, and the file
#: that lists the tables.
_LEGACY = (
    (socket.AF_INET, socket.IPPROTO_IP, "/proc/thread-self/net/ip_tables_names"),
    (socket.AF_INET6, socket.IPPROTO_IPV6, "/proc/thread-self/net/ip6_tables_names"),
)
_LEGACY_CHAIN = re.compile(rb"ISTIO_[A-Z_]+")
#: From linux/netfilter_ipv4/ip_tables.h: IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES, XT_TABLE_MAXNAMELEN, and ``struct
#: ipt_getinfo``, whose last field is the size of the rules.
_GET_INFO, _GET_ENTRIES, _NAME_BYTES, _INFO_BYTES = 64, 65, 32, 84


def take_over_routing(netns: Netns, wanted: Namespace, protocol: int) -> int:
    """Take ownership of routes and policy rules that differ from the desired ones only in the protocol number.
    Idempotent.

    Args:
        netns: the pod's namespace.
        wanted: the pod's desired state.
        protocol: our protocol number.

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
    try:
        route.request(rtnetlink.rule_message(rtnetlink.RTM_NEWRULE, beside, protocol))
    except KernelRefused as error:
        if error.code != errno.EEXIST:  # it is there if an earlier agent was killed before the last step
            raise
    # istio-cni's rule has no protocol number. A deletion without this number matches any rule, possibly ours, so
    # delete all and then add ours again.
    with contextlib.suppress(KernelRefused):
        while True:
            route.request(rtnetlink.rule_message(rtnetlink.RTM_DELRULE, rule, 0))
    route.request(rtnetlink.rule_message(rtnetlink.RTM_NEWRULE, rule, protocol))
    route.request(rtnetlink.rule_message(rtnetlink.RTM_DELRULE, beside, protocol))


def foreign_chains(netns: Netns) -> set[str]:
    """Return istio-cni's chains in the namespace, each with its table, for all variants of iptables and nftables.

    Raises:
        TproxyError: the kernel refused to list them.
    """
    with NetlinkSocket(NETLINK_NETFILTER, netns) as link:
        return {f"{table} {chain}" for _, table, chain in _chains(link)} | _legacy_chains(netns)


def _legacy_chains(netns: Netns) -> set[str]:
    """Return istio-cni's chains in the tables of ``iptables-legacy``, if the kernel lists these tables."""
    found = set()
    with netns.entered():
        for family, level, path in _LEGACY:
            with contextlib.suppress(OSError):
                # Only listed tables are read, because a request for another table would create it.
                names = Path(path).read_text().split()
                with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                    for table in names:
                        entries = _legacy_entries(sock, level, table)
                        chains = {name.decode() for name in _LEGACY_CHAIN.findall(entries)}
                        found |= {f"{table} {chain} (iptables-legacy)" for chain in chains}
    return found


def _legacy_entries(sock: socket.socket, level: int, table: str) -> bytes:
    """Return the rules of a table in the kernel's binary form, which contains the names of its chains.

    Raises:
        OSError: the kernel refuses.
    """
    info = _getsockopt(sock, level, _GET_INFO, table.encode().ljust(_NAME_BYTES, b"\0"), _INFO_BYTES)
    (size,) = struct.unpack_from("=I", info, _INFO_BYTES - 4)
    asked = struct.pack(f"={_NAME_BYTES}sII", table.encode(), size, 0)
    return _getsockopt(sock, level, _GET_ENTRIES, asked, len(asked) + size)


def _getsockopt(sock: socket.socket, level: int, option: int, asked: bytes, size: int) -> bytes:
    """Call getsockopt(2) with an input buffer, which the module :mod:`socket` does not support."""
    buffer = ctypes.create_string_buffer(asked, size)
    length = ctypes.c_uint32(size)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getsockopt(sock.fileno(), level, option, buffer, ctypes.byref(length)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer.raw[: length.value]


def remove_chains(netns: Netns) -> set[str]:
    """Remove istio-cni's tables, or its chains and the jumps to them, in one transaction. Idempotent.

    Returns:
        The names of the removed chains.

    Raises:
        TproxyError: the kernel refused, and its state is unchanged.
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
    """Return requests that delete the jumps to the given chains from the rules of other chains."""
    message = nftables.nft_message(
        nftables.NFT_GETRULE, family, nftables.DUMP, text(nf.NFTA_RULE_TABLE, table), about="list rules"
    )
    found = []
    for body in link.dump(message):
        _, parts = nft_parts(body)
        of = read_text(parts.get(nf.NFTA_RULE_CHAIN, b""))
        expressions = parts.get(nf.NFTA_RULE_EXPRESSIONS, b"")
        # Filter the dump by table, because some kernel releases do not.
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
