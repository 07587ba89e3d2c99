"""Netlink dumps -> resources, the way back of ``netlink.py``; what is not ours is left out here."""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface, ip_network
from typing import Literal, cast

from tproxy.expressions import Family
from tproxy.render.expressions import DATA_VALUE, decode_list
from tproxy.render.netlink import (
    AF_INET,
    AF_INET6,
    IFF_UP,
    LOCAL,
    RTNH_F_ONLINK,
    TO_TABLE,
    UNICAST,
    read_comment,
)
from tproxy.resources import (
    Address,
    Chain,
    ChainKind,
    Element,
    Hook,
    HookPoint,
    IpRule,
    Ownership,
    Route,
    Rule,
    Set,
    SetKey,
    SysctlKey,
    Table,
)
from tproxy.wire import MalformedDump, attribute_map, attributes, read_be32, read_text, read_u32

_RTM_F_CLONED = 0x200
_IF_OPER_UP = 6


@dataclass(frozen=True, slots=True)
class Link:
    """A device as RTM_GETLINK shows it.

    ``peer_index`` is the other end's number in its own namespace. ``running`` says that packets pass: the
    kernel gets there up to a second after ``up``, on a delayed work queue, and drops them until then.
    """

    index: int
    name: str
    up: bool
    running: bool
    kind: str
    peer_index: int | None


def read_link(body: bytes) -> Link:
    """One ``ifinfomsg``."""
    _, _, index, flags, _ = struct.unpack_from("=BxHiII", body)
    parts = attribute_map(body[16:])
    info = attribute_map(parts.get(18, b""))
    return Link(
        index=index,
        name=read_text(parts.get(3, b"")),
        up=bool(flags & IFF_UP),
        running=parts.get(16) == bytes((_IF_OPER_UP,)),
        kind=read_text(info.get(1, b"")),
        peer_index=read_u32(parts[5]) if 5 in parts else None,
    )


def read_address(body: bytes, names: Mapping[int, str]) -> Address | None:
    """One ``ifaddrmsg``; None for link-local IPv6 addresses, which the kernel makes by itself."""
    _, prefix, _, _, index = struct.unpack_from("=BBBBi", body)
    parts = attribute_map(body[8:])
    packed = parts.get(2, parts.get(1))
    if packed is None or index not in names:
        return None
    interface = ip_interface((packed, prefix))
    return None if interface.ip.is_link_local else Address(names[index], interface)


def read_route(body: bytes, protocol: int, names: Mapping[int, str]) -> Route | None:
    """One ``rtmsg``; None for routes that carry another protocol number."""
    family, prefix, _, _, table, found, _, kind, flags = struct.unpack_from("=BBBBBBBBI", body)
    if found != protocol or flags & _RTM_F_CLONED or kind not in (UNICAST, LOCAL):
        return None
    parts = attribute_map(body[12:])
    zero = bytes(4 if family == AF_INET else 16)
    return Route(
        table=read_u32(parts[15]) if 15 in parts else table,
        destination=ip_network((parts.get(1, zero), prefix)),
        device=names.get(read_u32(parts[4]), "") if 4 in parts else "",
        gateway=ip_address(parts[5]) if 5 in parts else None,
        source=ip_address(parts[7]) if 7 in parts else None,
        local=kind == LOCAL,
        onlink=bool(flags & RTNH_F_ONLINK),
    )


def read_rule(body: bytes, protocol: int) -> IpRule | None:
    """One ``fib_rule_hdr``; None for rules that carry another protocol number."""
    family, _, _, _, table, _, _, action, _ = struct.unpack_from("=BBBBBBBBI", body)
    parts = attribute_map(body[12:])
    if family not in (AF_INET, AF_INET6) or parts.get(21) != bytes((protocol,)):
        return None
    number = read_u32(parts[15]) if 15 in parts else table
    return IpRule(
        version=4 if family == AF_INET else 6,
        priority=read_u32(parts[6]) if 6 in parts else 0,
        table=number if action == TO_TABLE else None,
        goto=read_u32(parts[4]) if 4 in parts else None,
        mark=read_u32(parts[10]) if 10 in parts else None,
        mask=read_u32(parts[16]) if 16 in parts and 10 in parts else None,
    )


@dataclass(frozen=True, slots=True)
class NftDump:
    """The bodies of the five nftables dumps, our tables' only."""

    tables: Iterable[bytes]
    chains: Iterable[bytes]
    rules: Iterable[bytes]
    sets: Iterable[bytes]
    elements: Mapping[tuple[int, str, str], Iterable[bytes]]


def nft_parts(body: bytes) -> tuple[int, dict[int, bytes]]:
    """Family and attributes of an nftables message."""
    return body[0], attribute_map(body[4:])


def set_key(body: bytes) -> tuple[int, str, str]:
    """Family, table and name of a dumped set: what its elements are asked for with."""
    family, parts = nft_parts(body)
    return family, read_text(parts[1]), read_text(parts[2])


def read_tables(dump: NftDump, ownership: Ownership) -> tuple[tuple[Table, ...], dict[SysctlKey, str]]:
    """Our tables, and the values that the memory table keeps."""
    rules: dict[tuple[int, str, str], list[Rule]] = {}
    for body in dump.rules:
        family, parts = nft_parts(body)
        where = (family, read_text(parts[1]), read_text(parts[2]))
        rule = Rule(decode_list(parts.get(4, b"")), read_comment(parts.get(7, b"")))
        rules.setdefault(where, []).append(rule)
    chains: dict[tuple[int, str], list[Chain]] = {}
    for body in dump.chains:
        family, parts = nft_parts(body)
        table, name = read_text(parts[1]), read_text(parts[3])
        found = tuple(rules.get((family, table, name), ()))
        chains.setdefault((family, table), []).append(Chain(name, found, _hook(parts)))
    sets: dict[tuple[int, str], list[Set]] = {}
    for body in dump.sets:
        family, table, name = set_key(body)
        _, parts = nft_parts(body)
        item = _set(name, parts, dump.elements.get((family, table, name), ()))
        if item is not None:
            sets.setdefault((family, table), []).append(item)
    tables = []
    remembered: dict[SysctlKey, str] = {}
    for body in dump.tables:
        family, parts = nft_parts(body)
        name = read_text(parts[1])
        if name == ownership.memory_table:
            remembered.update(_remembered(sets.get((family, name), ())))
        elif name in ownership.tables and family in set(Family):
            key = (family, name)
            tables.append(Table(name, Family(family), tuple(chains.get(key, ())), tuple(sets.get(key, ()))))
    return tuple(tables), remembered


def _hook(parts: Mapping[int, bytes]) -> Hook | None:
    if 4 not in parts:
        return None
    hook = attribute_map(parts[4])
    if not {1, 2} <= set(hook):
        raise MalformedDump(parts[4])
    priority = read_be32(hook[2])
    return Hook(
        kind=cast(ChainKind, read_text(parts.get(7, b"filter"))),
        point=HookPoint(read_be32(hook[1])),
        priority=priority - (1 << 32) if priority >> 31 else priority,
        drop=5 in parts and read_be32(parts[5]) == 0,
    )


def _set(name: str, parts: Mapping[int, bytes], elements: Iterable[bytes]) -> Set | None:
    try:
        key = SetKey(read_be32(parts[4]))
    except (KeyError, ValueError):
        return None  # an anonymous or foreign set; the rule that uses it is not ours either
    found = set()
    for body in elements:
        _, listing = nft_parts(body)
        for _, item in attributes(listing.get(3, b"")):
            inner = attribute_map(item)
            value = attribute_map(inner.get(1, b"")).get(DATA_VALUE, b"")
            found.add(Element(value, read_comment(inner.get(6, b""))))
    return Set(name, key, frozenset(found))


def _remembered(sets: Iterable[Set]) -> dict[SysctlKey, str]:
    values = {}
    for item in sets:
        family, _, leaf = item.name.partition("-")
        if family not in ("ipv4", "ipv6"):
            continue
        for element in item.elements:
            device = element.key.rstrip(b"\0").decode(errors="replace")
            version = cast(Literal["ipv4", "ipv6"], family)
            values[SysctlKey(version, device, leaf)] = element.comment
    return values
