"""Operations -> netlink messages. The layouts are those of ``linux/{rtnetlink,if_link,fib_rules}.h`` and
``linux/netfilter/nf_tables.h``; numbers without a name here are the attribute numbers of those headers.

What only the running kernel knows, device indexes and namespace descriptors, arrives as an argument.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from tproxy.render.expressions import DATA_VALUE, LIST_ELEMENT, encode
from tproxy.resources import Address, Element, IpRule, Route, Set, SetKey, SysctlKey, VethPair
from tproxy.wire import Message, attribute, be32, nest, text, u8, u32

REQUEST, ACK, DUMP = 0x1, 0x4, 0x300
REPLACE, EXCL, CREATE, APPEND = 0x100, 0x200, 0x400, 0x800

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK = 16, 17, 18, 19
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWRULE, RTM_DELRULE, RTM_GETRULE = 32, 33, 34

NFT_SUBSYSTEM = 10
NFT_NEWTABLE, NFT_GETTABLE, NFT_DELTABLE = 0, 1, 2
NFT_NEWCHAIN, NFT_GETCHAIN, NFT_DELCHAIN = 3, 4, 5
NFT_NEWRULE, NFT_GETRULE, NFT_DELRULE = 6, 7, 8
NFT_NEWSET, NFT_GETSET, NFT_DELSET = 9, 10, 11
NFT_NEWSETELEM, NFT_GETSETELEM, NFT_DELSETELEM = 12, 13, 14
BATCH_BEGIN, BATCH_END = 16, 17

AF_INET, AF_INET6 = 2, 10
IFF_UP = 1
IFA_F_NODAD = 0x2
RTNH_F_ONLINK = 4
UNICAST, LOCAL = 1, 2
SCOPE_UNIVERSE, SCOPE_LINK, SCOPE_HOST, SCOPE_NOWHERE = 0, 253, 254, 255
TO_TABLE, GOTO = 1, 2

# An attribute's length is 16 bits; an element with a full comment takes under 180 bytes.
ELEMENTS_PER_MESSAGE = 256
_COMMENT_BYTES = 120

Index = Callable[[str], int]


def _family(version: int) -> int:
    return AF_INET if version == 4 else AF_INET6


def link_message(kind: int, flags: int, *attributes: bytes, index: int = 0, up: bool = False) -> Message:
    """An ``ifinfomsg`` with attributes."""
    header = struct.pack("=BxHiII", 0, 0, index, IFF_UP if up else 0, IFF_UP if up else 0)
    return Message(kind, flags | REQUEST, header + b"".join(attributes))


def create_pair(pair: VethPair, peer_namespace_fd: int, *, peer_index: int = 0) -> Message:
    """Make a veth pair, the left end in the namespace of the socket, the right one where the fd says.

    ``peer_index`` is the right end's interface number, if it matters: ends with different numbers are
    running at once, ends that happen to have the same one may take a second (net/core/link_watch.c).
    """
    if pair.right is None:
        raise ValueError("a veth pair has two ends")
    peer = struct.pack("=BxHiII", 0, 0, peer_index, 0, 0) + text(3, pair.right.device) + u32(28, peer_namespace_fd)
    return link_message(
        RTM_NEWLINK,
        CREATE | EXCL,
        text(3, pair.left.device),
        nest(18, text(1, "veth"), nest(2, attribute(1, peer))),
    )


def delete_link(index: int) -> Message:
    """Remove a device, a veth's other end with it."""
    return link_message(RTM_DELLINK, 0, index=index)


def set_up(index: int) -> Message:
    """Bring a device up."""
    return link_message(RTM_SETLINK, 0, index=index, up=True)


def address_message(kind: int, address: Address, index: int) -> Message:
    """RTM_NEWADDR or RTM_DELADDR."""
    interface = address.interface
    header = struct.pack("=BBBBi", _family(interface.version), interface.network.prefixlen, 0, 0, index)
    body = attribute(1, interface.ip.packed) + attribute(2, interface.ip.packed)
    if interface.version == 6:
        body += u32(8, IFA_F_NODAD)
    flags = REQUEST | (CREATE | EXCL if kind == RTM_NEWADDR else 0)
    return Message(kind, flags, header + body)


def route_message(kind: int, route: Route, protocol: int, index: Index, *, replace: bool = False) -> Message:
    """RTM_NEWROUTE or RTM_DELROUTE."""
    if kind == RTM_DELROUTE and route.version == 4:
        scope = SCOPE_NOWHERE
    elif route.version == 6 or route.gateway is not None:
        scope = SCOPE_UNIVERSE
    else:
        scope = SCOPE_HOST if route.local else SCOPE_LINK
    header = struct.pack(
        "=BBBBBBBBI",
        _family(route.version),
        route.destination.prefixlen,
        0,
        0,
        route.table if route.table < 256 else 0,
        protocol,
        scope,
        LOCAL if route.local else UNICAST,
        RTNH_F_ONLINK if route.onlink else 0,
    )
    body = u32(15, route.table)
    if route.destination.prefixlen:
        body += attribute(1, route.destination.network_address.packed)
    if route.gateway is not None:
        body += attribute(5, route.gateway.packed)
    if route.source is not None:
        body += attribute(7, route.source.packed)
    body += u32(4, index(route.device))
    flags = REQUEST
    if kind == RTM_NEWROUTE:
        flags |= CREATE | (REPLACE if replace else EXCL)
    return Message(kind, flags, header + body)


def rule_message(kind: int, rule: IpRule, protocol: int) -> Message:
    """RTM_NEWRULE or RTM_DELRULE."""
    table = rule.table or 0
    action = TO_TABLE if rule.goto is None else GOTO
    header = struct.pack(
        "=BBBBBBBBI", _family(rule.version), 0, 0, 0, table if table < 256 else 0, 0, 0, action, 0
    )
    body = u32(6, rule.priority) + u8(21, protocol)
    if rule.table is not None:
        body += u32(15, rule.table)
    if rule.goto is not None:
        body += u32(4, rule.goto)
    if rule.mark is not None:
        body += u32(10, rule.mark)
    if rule.mask is not None:
        body += u32(16, rule.mask)
    flags = REQUEST | (CREATE | EXCL if kind == RTM_NEWRULE else 0)
    return Message(kind, flags, header + body)


def rtnetlink_dump(kind: int, family: int = 0) -> Message:
    """Ask for all links, addresses, routes or rules."""
    if kind == RTM_GETLINK:
        header = struct.pack("=BxHiII", family, 0, 0, 0, 0)
    elif kind == RTM_GETADDR:
        header = struct.pack("=BBBBi", family, 0, 0, 0, 0)
    else:
        header = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 0, 0, 0, 0, 0)
    return Message(kind, REQUEST | DUMP, header)


def nft_message(kind: int, family: Family | int, flags: int, *attributes: bytes, about: str = "") -> Message:
    """An ``nfgenmsg`` with attributes."""
    header = struct.pack("!BBH", family, 0, 0)
    return Message((NFT_SUBSYSTEM << 8) | kind, flags | REQUEST, header + b"".join(attributes), about)


def nft_batch(steps: Iterable[NftStep]) -> Sequence[Message]:
    """One transaction: begin, the steps, end; the kernel takes all of it or none."""
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
            yield nft_message(NFT_NEWTABLE, family, CREATE, text(1, table), about=f"table {table}")
        case DeleteTable():
            yield nft_message(NFT_DELTABLE, family, 0, text(1, table), about=f"delete table {table}")
        case AddChain(chain=chain):
            body = [text(1, table), text(3, chain.name)]
            if chain.hook is not None:
                body.append(nest(4, be32(1, chain.hook.point), be32(2, chain.hook.priority)))
                body += [be32(5, 0 if chain.hook.drop else 1), text(7, chain.hook.kind)]
            yield nft_message(NFT_NEWCHAIN, family, CREATE, *body, about=f"chain {table} {chain.name}")
        case FlushChain(chain=name):
            yield nft_message(
                NFT_DELRULE, family, 0, text(1, table), text(2, name), about=f"flush chain {table} {name}"
            )
        case DeleteChain(chain=name):
            yield nft_message(
                NFT_DELCHAIN, family, 0, text(1, table), text(3, name), about=f"delete chain {table} {name}"
            )
        case AppendRule(chain=name, rule=rule):
            body = [text(1, table), text(2, name), nest(4, *map(encode, rule.phrase))]
            if rule.comment:
                body.append(attribute(7, _comment(rule.comment)))
            about = f"rule in {table} {name}: {rule.comment or rule.phrase}"
            yield nft_message(NFT_NEWRULE, family, CREATE | APPEND, *body, about=about)
        case AddSet(set=item):
            yield _add_set(family, table, item, next(set_ids))
        case DeleteSet(set_name=name):
            yield nft_message(
                NFT_DELSET, family, 0, text(1, table), text(2, name), about=f"delete set {table} {name}"
            )
        case AddElements(set_name=name, elements=elements):
            about = f"elements of set {table} {name}"
            for chunk in _chunks(elements):
                items = nest(3, *(_element(item, with_comment=True) for item in chunk))
                yield nft_message(
                    NFT_NEWSETELEM, family, CREATE, text(1, table), text(2, name), items, about=about
                )
        case DeleteElements(set_name=name, elements=elements):
            about = f"delete elements of set {table} {name}"
            for chunk in _chunks(elements):
                items = nest(3, *(_element(item, with_comment=False) for item in chunk))
                yield nft_message(NFT_DELSETELEM, family, 0, text(1, table), text(2, name), items, about=about)
        case _:
            assert_never(step)


_KEY_BYTES = {SetKey.IPV4_ADDRESS: 4, SetKey.IPV6_ADDRESS: 16, SetKey.INTERFACE: 16}


def _add_set(family: Family, table: str, item: Set, number: int) -> Message:
    body = [text(1, table), text(2, item.name), be32(3, 0), be32(4, item.key), be32(5, _KEY_BYTES[item.key])]
    return nft_message(NFT_NEWSET, family, CREATE, *body, be32(10, number), about=f"set {table} {item.name}")


def _chunks(elements: Sequence[Element]) -> Iterator[Sequence[Element]]:
    for start in range(0, len(elements), ELEMENTS_PER_MESSAGE):
        yield elements[start : start + ELEMENTS_PER_MESSAGE]


def _element(item: Element, *, with_comment: bool) -> bytes:
    parts = [nest(1, attribute(DATA_VALUE, item.key))]
    if with_comment and item.comment:
        parts.append(attribute(6, _comment(item.comment)))
    return nest(LIST_ELEMENT, *parts)


def _comment(value: str) -> bytes:
    """libnftnl's user data: type 0, length, text with terminator."""
    data = value.encode() + b"\0"
    if len(data) > _COMMENT_BYTES + 1:
        raise ValueError(f"comment longer than {_COMMENT_BYTES} bytes: {value!r}")
    return bytes((0, len(data))) + data


def read_comment(payload: bytes) -> str:
    """The text of user data, empty if it holds no comment."""
    offset = 0
    while offset + 2 <= len(payload):
        kind, length = payload[offset], payload[offset + 1]
        if kind == 0:
            return payload[offset + 2 : offset + 2 + length].rstrip(b"\0").decode(errors="replace")
        offset += 2 + length
    return ""


def memory_steps(table: str, values: Mapping[SysctlKey, str]) -> tuple[NftStep, ...]:
    """Write sysctl values down in the kernel: a set per sysctl, keyed by device, the value as comment."""
    steps: list[NftStep] = [AddTable(Family.INET, table)]
    for name, elements in memory_elements(values).items():
        steps.append(AddSet(Family.INET, table, Set(name, SetKey.INTERFACE)))
        steps.append(AddElements(Family.INET, table, name, elements))
    return tuple(steps)


def forget_steps(table: str, values: Mapping[SysctlKey, str], *, everything: bool) -> tuple[NftStep, ...]:
    """Undo :func:`memory_steps` for some values or all."""
    if everything:
        return (DeleteTable(Family.INET, table),)
    return tuple(
        DeleteElements(Family.INET, table, name, elements) for name, elements in memory_elements(values).items()
    )


def memory_elements(values: Mapping[SysctlKey, str]) -> dict[str, tuple[Element, ...]]:
    """Set name -> elements; ``ipv4-rp_filter`` holds the device names."""
    grouped: dict[str, list[Element]] = {}
    for key, value in values.items():
        element = Element(key.device.encode().ljust(16, b"\0"), value)
        grouped.setdefault(f"{key.family}-{key.leaf}", []).append(element)
    return {
        name: tuple(sorted(elements, key=lambda element: element.key))
        for name, elements in sorted(grouped.items())
    }
