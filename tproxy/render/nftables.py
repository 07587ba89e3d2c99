"""Encodes operations as nfnetlink messages (``linux/netfilter/nf_tables.h``)."""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import assert_never

from tproxy.expressions import Family
from tproxy.operations import (
    AddChain,
    AddElements,
    AddSet,
    AddTable,
    AppendRule,
    DeleteChain,
    DeleteElements,
    DeleteSet,
    DeleteTable,
    FlushChain,
    NftStep,
)
from tproxy.render import nf_tables as nf
from tproxy.render.expressions import encode, verdict_data
from tproxy.resources import Element, Set, SetKey, SysctlKey
from tproxy.wire import Message, attribute, be32, nest, text

REQUEST, ACK, DUMP = 0x1, 0x4, 0x300
REPLACE, EXCL, CREATE, APPEND = 0x100, 0x200, 0x400, 0x800

NFT_SUBSYSTEM = 10
NFT_NEWTABLE, NFT_GETTABLE, NFT_DELTABLE = 0, 1, 2
NFT_NEWCHAIN, NFT_GETCHAIN, NFT_DELCHAIN = 3, 4, 5
NFT_NEWRULE, NFT_GETRULE, NFT_DELRULE = 6, 7, 8
NFT_NEWSET, NFT_GETSET, NFT_DELSET = 9, 10, 11
NFT_NEWSETELEM, NFT_GETSETELEM, NFT_DELSETELEM = 12, 13, 14
BATCH_BEGIN, BATCH_END = 16, 17
NF_DROP, NF_ACCEPT = 0, 1

# The number of elements per message. An attribute's length has 16 bits, and an element with a full comment and a
# verdict takes under 250 bytes.
ELEMENTS_PER_MESSAGE = 256
_COMMENT_BYTES = 120


def nft_message(kind: int, family: Family | int, flags: int, *attributes: bytes, about: str = "") -> Message:
    """Return a message of the nf_tables subsystem: an ``nfgenmsg`` header and attributes."""
    header = struct.pack("!BBH", family, 0, 0)
    return Message((NFT_SUBSYSTEM << 8) | kind, flags | REQUEST, header + b"".join(attributes), about)


def nft_batch(steps: Iterable[NftStep]) -> Sequence[Message]:
    """Return the messages of one transaction, including begin and end. The kernel applies either the whole
    transaction or no step.
    """
    header = struct.pack("!BBH", 0, 0, NFT_SUBSYSTEM)
    set_ids = count(1)
    messages = [Message(BATCH_BEGIN, REQUEST, header)]
    for step in steps:
        messages += _step(step, set_ids)
    messages.append(Message(BATCH_END, REQUEST, header))
    return messages


def _step(step: NftStep, set_ids: Iterator[int]) -> Iterator[Message]:
    family, table = step.family, step.table
    match step:
        case AddTable():
            yield nft_message(
                NFT_NEWTABLE, family, CREATE, text(nf.NFTA_TABLE_NAME, table), about=f"table {table}"
            )
        case DeleteTable():
            yield nft_message(
                NFT_DELTABLE, family, 0, text(nf.NFTA_TABLE_NAME, table), about=f"delete table {table}"
            )
        case AddChain(chain=chain):
            body = [text(nf.NFTA_CHAIN_TABLE, table), text(nf.NFTA_CHAIN_NAME, chain.name)]
            hook = chain.hook
            if hook is not None:
                numbers = be32(nf.NFTA_HOOK_HOOKNUM, hook.point), be32(nf.NFTA_HOOK_PRIORITY, hook.priority)
                body.append(nest(nf.NFTA_CHAIN_HOOK, *numbers))
                body.append(be32(nf.NFTA_CHAIN_POLICY, NF_DROP if hook.drop else NF_ACCEPT))
                body.append(text(nf.NFTA_CHAIN_TYPE, hook.kind))
            yield nft_message(NFT_NEWCHAIN, family, CREATE, *body, about=f"chain {table} {chain.name}")
        case FlushChain(chain=name):
            yield nft_message(
                NFT_DELRULE,
                family,
                0,
                text(nf.NFTA_RULE_TABLE, table),
                text(nf.NFTA_RULE_CHAIN, name),
                about=f"flush chain {table} {name}",
            )
        case DeleteChain(chain=name):
            yield nft_message(
                NFT_DELCHAIN,
                family,
                0,
                text(nf.NFTA_CHAIN_TABLE, table),
                text(nf.NFTA_CHAIN_NAME, name),
                about=f"delete chain {table} {name}",
            )
        case AppendRule(chain=name, rule=rule):
            body = [
                text(nf.NFTA_RULE_TABLE, table),
                text(nf.NFTA_RULE_CHAIN, name),
                nest(nf.NFTA_RULE_EXPRESSIONS, *map(encode, rule.phrase)),
            ]
            if rule.comment:
                body.append(attribute(nf.NFTA_RULE_USERDATA, _comment(rule.comment)))
            about = f"rule in {table} {name}: {rule.comment or rule.phrase}"
            yield nft_message(NFT_NEWRULE, family, CREATE | APPEND, *body, about=about)
        case AddSet(set=item):
            yield _add_set(family, table, item, next(set_ids))
        case DeleteSet(set_name=name):
            yield nft_message(
                NFT_DELSET,
                family,
                0,
                text(nf.NFTA_SET_TABLE, table),
                text(nf.NFTA_SET_NAME, name),
                about=f"delete set {table} {name}",
            )
        case AddElements(set_name=name, elements=elements):
            about = f"elements of set {table} {name}"
            for chunk in _chunks(elements):
                items = _elements(table, name, (part for item in chunk for part in _element(item, whole=True)))
                yield nft_message(NFT_NEWSETELEM, family, CREATE, *items, about=about)
        case DeleteElements(set_name=name, elements=elements):
            about = f"delete elements of set {table} {name}"
            for chunk in _chunks(elements):
                items = _elements(table, name, (part for item in chunk for part in _element(item, whole=False)))
                yield nft_message(NFT_DELSETELEM, family, 0, *items, about=about)
        case _:
            assert_never(step)


def _add_set(family: Family, table: str, item: Set, number: int) -> Message:
    flags = (nf.NFT_SET_INTERVAL if item.interval else 0) | (nf.NFT_SET_MAP if item.verdicts else 0)
    body = (
        text(nf.NFTA_SET_TABLE, table),
        text(nf.NFTA_SET_NAME, item.name),
        be32(nf.NFTA_SET_FLAGS, flags),
        be32(nf.NFTA_SET_KEY_TYPE, item.key),
        be32(nf.NFTA_SET_KEY_LEN, item.key.octets),
        *([be32(nf.NFTA_SET_DATA_TYPE, nf.NFT_DATA_VERDICT)] if item.verdicts else ()),
        be32(nf.NFTA_SET_ID, number),
    )
    return nft_message(NFT_NEWSET, family, CREATE, *body, about=f"set {table} {item.name}")


def _elements(table: str, name: str, items: Iterable[bytes]) -> tuple[bytes, ...]:
    return (
        text(nf.NFTA_SET_ELEM_LIST_TABLE, table),
        text(nf.NFTA_SET_ELEM_LIST_SET, name),
        nest(nf.NFTA_SET_ELEM_LIST_ELEMENTS, *items),
    )


def _chunks(elements: Sequence[Element]) -> Iterator[Sequence[Element]]:
    for start in range(0, len(elements), ELEMENTS_PER_MESSAGE):
        yield elements[start : start + ELEMENTS_PER_MESSAGE]


def _element(item: Element, *, whole: bool) -> Iterator[bytes]:
    """Yield a set element in the kernel's form. An interval consists of two kernel elements; the second element
    marks the end.
    """
    parts = [nest(nf.NFTA_SET_ELEM_KEY, attribute(nf.NFTA_DATA_VALUE, item.key))]
    if item.verdict is not None:
        parts.append(nest(nf.NFTA_SET_ELEM_DATA, verdict_data(item.verdict)))
    if whole and item.comment:
        parts.append(attribute(nf.NFTA_SET_ELEM_USERDATA, _comment(item.comment)))
    yield nest(nf.NFTA_LIST_ELEM, *parts)
    # An interval that ends at the highest key has no end mark, because no key follows. nft_rbtree leaves such an
    # interval open.
    if item.last and (after := int.from_bytes(item.last, "big") + 1) >> 8 * len(item.last) == 0:
        key = attribute(nf.NFTA_DATA_VALUE, after.to_bytes(len(item.last), "big"))
        flags = be32(nf.NFTA_SET_ELEM_FLAGS, nf.NFT_SET_ELEM_INTERVAL_END)
        yield nest(nf.NFTA_LIST_ELEM, nest(nf.NFTA_SET_ELEM_KEY, key), flags)


def _comment(value: str) -> bytes:
    """Encode a comment as libnftnl's user data: type 0, length, text with terminator."""
    data = value.encode() + b"\0"
    if len(data) > _COMMENT_BYTES + 1:
        raise ValueError(f"comment longer than {_COMMENT_BYTES} bytes: {value!r}")
    return bytes((0, len(data))) + data


def read_comment(payload: bytes) -> str:
    """Return the comment in libnftnl's user data, or an empty string."""
    offset = 0
    while offset + 2 <= len(payload):
        kind, length = payload[offset], payload[offset + 1]
        if kind == 0:
            return payload[offset + 2 : offset + 2 + length].rstrip(b"\0").decode(errors="replace")
        offset += 2 + length
    return ""


def memory_steps(table: str, values: Mapping[SysctlKey, str]) -> tuple[NftStep, ...]:
    """Return the steps that save sysctl values in the kernel.

    Each sysctl is a set with one element per device. The comment of the element is the sysctl's value.
    """
    steps: list[NftStep] = [AddTable(Family.INET, table)]
    for name, elements in memory_elements(values).items():
        steps.append(AddSet(Family.INET, table, Set(name, SetKey.INTERFACE)))
        steps.append(AddElements(Family.INET, table, name, elements))
    return tuple(steps)


def forget_steps(table: str, values: Mapping[SysctlKey, str], *, everything: bool) -> tuple[NftStep, ...]:
    """Return the steps that delete saved sysctl values, or the whole table with all saved values."""
    if everything:
        return (DeleteTable(Family.INET, table),)
    return tuple(
        DeleteElements(Family.INET, table, name, elements) for name, elements in memory_elements(values).items()
    )


def memory_elements(values: Mapping[SysctlKey, str]) -> dict[str, tuple[Element, ...]]:
    """Group sysctl values as elements by the name of their set. For example, ``ipv4-rp_filter`` has one element
    per device.
    """
    grouped: dict[str, list[Element]] = {}
    for key, value in values.items():
        element = Element(key.device.encode().ljust(16, b"\0"), value)
        grouped.setdefault(f"{key.family}-{key.leaf}", []).append(element)
    return {
        name: tuple(sorted(elements, key=lambda element: element.key))
        for name, elements in sorted(grouped.items())
    }
