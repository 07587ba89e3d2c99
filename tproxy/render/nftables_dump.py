"""Decodes nftables dumps to resources, the inverse of ``nftables.py``. Foreign tables are omitted."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from tproxy.expressions import Family
from tproxy.render import nf_tables as nf
from tproxy.render.expressions import decode_list, read_verdict
from tproxy.render.nftables import NF_DROP, read_comment
from tproxy.resources import (
    Chain,
    ChainKind,
    Element,
    Hook,
    HookPoint,
    Ownership,
    Rule,
    Set,
    SetKey,
    SysctlKey,
    Table,
)
from tproxy.wire import MalformedDump, attribute_map, attributes, read_be32, read_text

#: The layout of ``struct nfgenmsg``: family, version, resource id.
_HEADER_BYTES = 4


@dataclass(frozen=True, slots=True)
class NftDump:
    """The messages of the five nftables dumps, reduced to those about our tables."""

    tables: Iterable[bytes]
    chains: Iterable[bytes]
    rules: Iterable[bytes]
    sets: Iterable[bytes]
    elements: Mapping[tuple[int, str, str], Iterable[bytes]]


def nft_parts(body: bytes) -> tuple[int, dict[int, bytes]]:
    """Return the family and the attributes of an nftables message.

    Raises:
        MalformedDump: the message is shorter than its header, or its attributes are cut.
    """
    if len(body) < _HEADER_BYTES:
        raise MalformedDump(body)
    return body[0], attribute_map(body[_HEADER_BYTES:])


def _name(parts: Mapping[int, bytes], kind: int) -> str:
    """Return a text attribute that every message of this type has."""
    if kind not in parts:
        raise MalformedDump(b"".join(parts.values()))
    return read_text(parts[kind])


def set_key(body: bytes) -> tuple[int, str, str]:
    """Return family, table and name of a dumped set, which are needed to request its elements.

    Raises:
        MalformedDump: an attribute is missing.
    """
    family, parts = nft_parts(body)
    return family, _name(parts, nf.NFTA_SET_TABLE), _name(parts, nf.NFTA_SET_NAME)


def read_tables(dump: NftDump, ownership: Ownership) -> tuple[tuple[Table, ...], dict[SysctlKey, str]]:
    """Return our tables, and the sysctl values that the memory table stores.

    Raises:
        MalformedDump: a body does not have the kernel's layout, or lacks an attribute that its type always has.
    """
    rules: dict[tuple[int, str, str], list[Rule]] = {}
    for body in dump.rules:
        family, parts = nft_parts(body)
        where = (family, _name(parts, nf.NFTA_RULE_TABLE), _name(parts, nf.NFTA_RULE_CHAIN))
        rules.setdefault(where, []).append(_rule(parts))
    chains: dict[tuple[int, str], list[Chain]] = {}
    for body in dump.chains:
        family, parts = nft_parts(body)
        table, name = _name(parts, nf.NFTA_CHAIN_TABLE), _name(parts, nf.NFTA_CHAIN_NAME)
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
        name = _name(parts, nf.NFTA_TABLE_NAME)
        if name == ownership.memory_table:
            remembered.update(_remembered(sets.get((family, name), ())))
        elif name in ownership.tables and family in set(Family):
            key = (family, name)
            tables.append(Table(name, Family(family), tuple(chains.get(key, ())), tuple(sets.get(key, ()))))
    return tuple(tables), remembered


def read_rule(body: bytes) -> Rule:
    """Return a dumped rule.

    Raises:
        MalformedDump: see :func:`read_tables`.
    """
    return _rule(nft_parts(body)[1])


def _rule(parts: Mapping[int, bytes]) -> Rule:
    expressions = decode_list(parts.get(nf.NFTA_RULE_EXPRESSIONS, b""))
    return Rule(expressions, read_comment(parts.get(nf.NFTA_RULE_USERDATA, b"")))


def _hook(parts: Mapping[int, bytes]) -> Hook | None:
    if nf.NFTA_CHAIN_HOOK not in parts:
        return None
    hook = attribute_map(parts[nf.NFTA_CHAIN_HOOK])
    if not {nf.NFTA_HOOK_HOOKNUM, nf.NFTA_HOOK_PRIORITY} <= set(hook):
        raise MalformedDump(parts[nf.NFTA_CHAIN_HOOK])
    priority = read_be32(hook[nf.NFTA_HOOK_PRIORITY])
    policy = parts.get(nf.NFTA_CHAIN_POLICY)
    try:
        point = HookPoint(read_be32(hook[nf.NFTA_HOOK_HOOKNUM]))
    except ValueError as error:
        raise MalformedDump(parts[nf.NFTA_CHAIN_HOOK]) from error
    return Hook(
        kind=cast(ChainKind, read_text(parts.get(nf.NFTA_CHAIN_TYPE, b"filter"))),
        point=point,
        priority=priority - (1 << 32) if priority >> 31 else priority,
        drop=policy is not None and read_be32(policy) == NF_DROP,
    )


def _set(name: str, parts: Mapping[int, bytes], elements: Iterable[bytes]) -> Set | None:
    try:
        key = SetKey(read_be32(parts[nf.NFTA_SET_KEY_TYPE]))
    except (KeyError, ValueError):
        return None  # an anonymous set or a foreign key type: the rule that uses it is not ours either
    flags = read_be32(parts[nf.NFTA_SET_FLAGS]) if nf.NFTA_SET_FLAGS in parts else 0
    interval = bool(flags & nf.NFT_SET_INTERVAL)
    return Set(name, key, read_elements(elements, interval=interval), interval, bool(flags & nf.NFT_SET_MAP))


def read_elements(bodies: Iterable[bytes], *, interval: bool) -> frozenset[Element]:
    """Decode the members of one set from dumps of its elements.

    Raises:
        MalformedDump: see :func:`read_tables`.
    """
    found = []
    ends = set()
    for body in bodies:
        _, listing = nft_parts(body)
        for _, item in attributes(listing.get(nf.NFTA_SET_ELEM_LIST_ELEMENTS, b"")):
            inner = attribute_map(item)
            value = attribute_map(inner.get(nf.NFTA_SET_ELEM_KEY, b"")).get(nf.NFTA_DATA_VALUE, b"")
            marks = nf.NFTA_SET_ELEM_FLAGS in inner and read_be32(inner[nf.NFTA_SET_ELEM_FLAGS])
            if interval and marks and marks & nf.NFT_SET_ELEM_INTERVAL_END:
                ends.add(value)
                continue
            data = inner.get(nf.NFTA_SET_ELEM_DATA)
            verdict = read_verdict(data) if data is not None else None
            found.append(Element(value, read_comment(inner.get(nf.NFTA_SET_ELEM_USERDATA, b"")), verdict=verdict))
    return frozenset(_joined(found, ends) if interval else found)


def _joined(starts: Iterable[Element], ends: Iterable[bytes]) -> Iterator[Element]:
    """Yield the intervals of a set. Each begins at a start element and ends at the key before the next end mark,
    or without one at the highest key.
    """
    waiting = sorted(ends, reverse=True)
    for start in sorted(starts, key=lambda element: element.key):
        if not start.key:  # the catch-all element, which only another program can have added
            yield start
            continue
        while waiting and waiting[-1] <= start.key:
            waiting.pop()
        size = len(start.key)
        last = int.from_bytes(waiting[-1], "big") - 1 if waiting else (1 << 8 * size) - 1
        yield replace(start, last=last.to_bytes(size, "big"))


def _is_component(name: str) -> bool:
    """Return whether a name is a single path component, and neither ``.`` nor ``..``."""
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def _remembered(sets: Iterable[Set]) -> dict[SysctlKey, str]:
    values = {}
    for item in sets:
        family, _, leaf = item.name.partition("-")
        if family not in ("ipv4", "ipv6"):
            continue
        for element in item.elements:
            device = element.key.rstrip(b"\0").decode(errors="replace")
            # Any process with CAP_NET_ADMIN in the namespace can write this table. The names in it must not lead
            # to other files, because we write the files with our own rights.
            if not (_is_component(device) and _is_component(leaf)):
                continue
            version = cast(Literal["ipv4", "ipv6"], family)
            values[SysctlKey(version, device, leaf)] = element.comment
    return values
