"""The expressions of an nftables rule, in exactly the form that the kernel executes and dumps.

A rule is a tuple of these values. A dump is parsed into the same values, so comparing a found rule with the
desired one is ``==``, without interpreting text. The kernel's definitions are in
``include/uapi/linux/netfilter/nf_tables.h``. A load expression writes a register, and later expressions test or
store its value. A failed test ends the rule. The functions at the end build common sequences
(``source_in(Family.IPV4, "mesh_pods4")``). ``render/text.py`` prints the tuples in nft's language.

Marks are in host byte order; ports, addresses and protocol numbers are in network byte order. Interface names have
16 bytes, padded with zeros.
"""

import sys
from dataclasses import dataclass, field
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Literal, TypeAlias

IpAddress: TypeAlias = IPv4Address | IPv6Address

TCP = 6
UDP = 17
ICMPV6 = 58
SCTP = 132
FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10
ALL_BITS = 0xFFFFFFFF


class Family(IntEnum):
    """The address family of a table, a NAT expression or a TPROXY expression (``NFPROTO_*``)."""

    INET = 1
    IPV4 = 2
    IPV6 = 10


class MetaKey(IntEnum):
    """The packet properties that :class:`Meta` loads or stores here (``NFT_META_*``)."""

    MARK = 3
    IIFNAME = 6
    OIFNAME = 7
    SKUID = 10
    SKGID = 11
    NFTRACE = 12
    NFPROTO = 15
    L4PROTO = 16


class CtKey(IntEnum):
    """The connection properties used here (``NFT_CT_*``)."""

    STATE = 0
    MARK = 3
    ZONE = 17


class Base(IntEnum):
    """The header at which an offset starts (``NFT_PAYLOAD_*_HEADER``)."""

    NETWORK = 1
    TRANSPORT = 2


class Test(IntEnum):
    """The comparisons used here (``NFT_CMP_*``)."""

    EQUAL = 0
    NOT_EQUAL = 1
    AT_MOST = 3
    AT_LEAST = 5


class VerdictCode(IntEnum):
    """The verdicts (``NF_*`` and ``NFT_*``)."""

    DROP = 0
    ACCEPT = 1
    JUMP = -3
    GOTO = -4
    RETURN = -5


class NatKind(IntEnum):
    """Which address a NAT expression changes: source or destination (``NFT_NAT_*``)."""

    SOURCE = 0
    DESTINATION = 1


@dataclass(frozen=True, slots=True)
class Meta:
    """Load a packet property into ``dreg``, or store ``sreg`` into it."""

    key: int
    dreg: int | None = None
    sreg: int | None = None


@dataclass(frozen=True, slots=True)
class Ct:
    """Load a connection property into ``dreg``, or store ``sreg`` into it."""

    key: int
    dreg: int | None = None
    sreg: int | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    """Load ``length`` bytes of a packet's header into ``dreg``."""

    base: int
    offset: int
    length: int
    dreg: int = 1


@dataclass(frozen=True, slots=True)
class Bitwise:
    """Compute a register bitwise: ``dreg = (sreg & mask) ^ xor``."""

    mask: bytes
    xor: bytes
    length: int = 4
    sreg: int = 1
    dreg: int = 1


@dataclass(frozen=True, slots=True)
class Compare:
    """End the rule unless the register equals (or differs from) ``data``."""

    data: bytes
    op: int = Test.EQUAL
    sreg: int = 1


@dataclass(frozen=True, slots=True)
class Lookup:
    """End the rule unless the register is an element of the set. ``flags`` 1 inverts this.

    With ``dreg``, the set is a map, and the found value is stored in this register. Register 0 takes verdicts.
    """

    set_name: str
    sreg: int = 1
    flags: int | None = None
    dreg: int | None = None


@dataclass(frozen=True, slots=True)
class Counter:
    """Count the packets that reach this point of the rule. Comparisons ignore the counts of found rules."""

    packets: int = field(default=0, compare=False)
    octets: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Immediate:
    """Load constant bytes into a register."""

    data: bytes
    dreg: int = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """End the rule with a verdict, for example accept, or a jump to another chain."""

    code: int
    chain: str = ""


@dataclass(frozen=True, slots=True)
class Tproxy:
    """Assign the packet to a transparent socket (``tproxy``). Without an address register, the socket is on the
    primary local address.
    """

    family: int
    reg_port: int | None = None
    reg_addr: int | None = None


@dataclass(frozen=True, slots=True)
class Nat:
    """Translate the source or the destination (NAT). If the new address is not a range, the kernel reports ``max``
    equal to ``min``.
    """

    kind: int
    family: int
    reg_addr_min: int | None = None
    reg_addr_max: int | None = None
    reg_proto_min: int | None = None
    reg_proto_max: int | None = None


@dataclass(frozen=True, slots=True)
class Redirect:
    """Translate the destination to this host (REDIRECT), to the port in a register."""

    reg_proto_min: int | None = None
    reg_proto_max: int | None = None


@dataclass(frozen=True, slots=True)
class Fib:
    """Look up the routing table (``fib``). ``result`` 3 returns the address type, and ``flags`` 2 looks up the
    destination address.
    """

    result: int
    flags: int
    dreg: int = 1


@dataclass(frozen=True, slots=True)
class SocketLookup:
    """Find the packet's socket. Key 0 loads whether the socket is transparent (1 byte)."""

    key: int
    dreg: int = 1


@dataclass(frozen=True, slots=True)
class Opaque:
    """A dumped expression that this module does not define. It never equals a desired expression."""

    name: str
    data: bytes


Expression: TypeAlias = (
    Meta
    | Ct
    | Payload
    | Bitwise
    | Compare
    | Lookup
    | Counter
    | Immediate
    | Verdict
    | Tproxy
    | Nat
    | Redirect
    | Fib
    | SocketLookup
    | Opaque
)
Phrase: TypeAlias = tuple[Expression, ...]

#: Connection states: the bits of the register that CtKey.STATE loads (``NF_CT_STATE_BIT``).
CT_INVALID, CT_ESTABLISHED, CT_RELATED, CT_NEW = 0x1, 0x2, 0x4, 0x8
#: The register that takes a verdict (``NFT_REG_VERDICT``).
VERDICT_REGISTER = 0
_ORDER: Literal["little", "big"] = sys.byteorder


def host_u32(value: int) -> bytes:
    """Return a value such as a mark or a uid in the form that the kernel has in a register."""
    return value.to_bytes(4, _ORDER)


def host_u16(value: int) -> bytes:
    """Return a conntrack zone in the form that the kernel has in a register."""
    return value.to_bytes(2, _ORDER)


def interface_bytes(name: str) -> bytes:
    """Return an interface name in the form that the kernel has in a register."""
    return name.encode().ljust(16, b"\0")


def _test(*, negate: bool) -> Test:
    return Test.NOT_EQUAL if negate else Test.EQUAL


def input_interface(name: str, *, negate: bool = False) -> Phrase:
    """Match the input device: ``iifname [!=] "name"``."""
    return (Meta(MetaKey.IIFNAME, dreg=1), Compare(interface_bytes(name), _test(negate=negate)))


def output_interface(name: str, *, negate: bool = False) -> Phrase:
    """Match the output device: ``oifname [!=] "name"``."""
    return (Meta(MetaKey.OIFNAME, dreg=1), Compare(interface_bytes(name), _test(negate=negate)))


def input_interface_like(pattern: str) -> Phrase:
    """Match the input device like ``iptables -i``: a name, or a prefix followed by ``+``."""
    return (Meta(MetaKey.IIFNAME, dreg=1), Compare(_name_or_prefix(pattern)))


def output_interface_like(pattern: str) -> Phrase:
    """Match the output device like ``iptables -o``, see :func:`input_interface_like`."""
    return (Meta(MetaKey.OIFNAME, dreg=1), Compare(_name_or_prefix(pattern)))


def _name_or_prefix(pattern: str) -> bytes:
    # For a prefix, return only its bytes: a comparison with fewer bytes than the register has ignores the rest.
    prefix = pattern.removesuffix("+")
    return prefix.encode() if prefix and prefix != pattern else interface_bytes(pattern)


def mark_is(value: int, mask: int | None = None, *, negate: bool = False) -> Phrase:
    """Match bits of the packet mark: ``meta mark & mask [!=] value``. ``mask`` defaults to ``value``."""
    return (Meta(MetaKey.MARK, dreg=1), *_masked(value, mask, negate=negate))


def ct_mark_is(value: int, mask: int | None = None, *, negate: bool = False) -> Phrase:
    """Match bits of the connection mark: ``ct mark & mask [!=] value``. ``mask`` defaults to ``value``."""
    return (Ct(CtKey.MARK, dreg=1), *_masked(value, mask, negate=negate))


def _masked(value: int, mask: int | None, *, negate: bool) -> Phrase:
    bits = value if mask is None else mask
    return (Bitwise(host_u32(bits), host_u32(0)), Compare(host_u32(value), _test(negate=negate)))


def set_mark(value: int, mask: int | None = None) -> Phrase:
    """Set the packet mark's bits in ``mask`` (default: ``value``) to ``value`` (``meta mark set``). Other bits
    stay unchanged.
    """
    if mask == ALL_BITS:
        return (Immediate(host_u32(value)), Meta(MetaKey.MARK, sreg=1))
    return (Meta(MetaKey.MARK, dreg=1), _replace_bits(value, mask), Meta(MetaKey.MARK, sreg=1))


def set_ct_mark(value: int, mask: int | None = None) -> Phrase:
    """Set bits of the connection mark (``ct mark set``), like :func:`set_mark`."""
    return (Ct(CtKey.MARK, dreg=1), _replace_bits(value, mask), Ct(CtKey.MARK, sreg=1))


def _replace_bits(value: int, mask: int | None) -> Bitwise:
    bits = value if mask is None else mask
    return Bitwise(host_u32(~bits & ALL_BITS), host_u32(value))


def copy_ct_mark_to_mark() -> Phrase:
    """Copy the connection mark to the packet mark: ``meta mark set ct mark``."""
    return (Ct(CtKey.MARK, dreg=1), Meta(MetaKey.MARK, sreg=1))


def set_ct_zone(zone: int) -> Phrase:
    """Set the conntrack zone (``ct zone set``). Valid only in raw chains, before connections are tracked."""
    return (Immediate(host_u16(zone)), Ct(CtKey.ZONE, sreg=1))


def family_is(family: Family) -> Phrase:
    """Match the IP version: ``meta nfproto ipv4|ipv6``. In an inet table, this must precede tests of addresses."""
    return (Meta(MetaKey.NFPROTO, dreg=1), Compare(bytes((family,))))


def protocol_is(protocol: int, *, negate: bool = False) -> Phrase:
    """Match the transport protocol, even behind IPv6 extension headers: ``meta l4proto [!=] tcp``."""
    return (Meta(MetaKey.L4PROTO, dreg=1), Compare(bytes((protocol,)), _test(negate=negate)))


def destination_port(protocol: int, port: int, *, negate: bool = False) -> Phrase:
    """Match the destination port: ``tcp dport [!=] port``."""
    return (
        *protocol_is(protocol),
        Payload(Base.TRANSPORT, 2, 2),
        Compare(port.to_bytes(2, "big"), _test(negate=negate)),
    )


def opens_connection() -> Phrase:
    """Match only the first packet of a connection: ``tcp flags & (fin|syn|rst|ack) == syn``."""
    return (
        *protocol_is(TCP),
        Payload(Base.TRANSPORT, 13, 1),
        Bitwise(bytes((FIN | SYN | RST | ACK,)), bytes(1), length=1),
        Compare(bytes((SYN,))),
    )


def connection_state(bits: int) -> Phrase:
    """Match packets of connections in one of these states (``CT_*``): ``ct state & bits != 0``."""
    return (
        Ct(CtKey.STATE, dreg=1),
        Bitwise(host_u32(bits), host_u32(0)),
        Compare(host_u32(0), Test.NOT_EQUAL),
    )


def continues_unknown_connection() -> Phrase:
    """Match a TCP packet that opens no connection: ``tcp flags & (fin|syn|rst|ack) != syn``."""
    opens = opens_connection()
    return (*opens[:-1], Compare(bytes((SYN,)), Test.NOT_EQUAL))


def neighbour_discovery() -> Phrase:
    """Match ICMPv6 types 133 to 137, IPv6's neighbor discovery (RFC 4861)."""
    return (
        *protocol_is(ICMPV6),
        Payload(Base.TRANSPORT, 0, 1),
        Compare(bytes((133,)), Test.AT_LEAST),
        Compare(bytes((137,)), Test.AT_MOST),
    )


def icmp_is(kind: int, code: int | None = None, *, negate: bool = False) -> Phrase:
    """Match the ICMP or ICMPv6 type, or type and code as one value. A test of the protocol must precede it."""
    value = bytes((kind,)) if code is None else bytes((kind, code))
    return (Payload(Base.TRANSPORT, 0, len(value)), Compare(value, _test(negate=negate)))


def ports_between(offset: int, first: int, last: int) -> Phrase:
    """Match ports in a range. ``offset`` is 0 for source ports and 2 for destination ports. A test of the protocol
    must precede this.
    """
    load = Payload(Base.TRANSPORT, offset, 2)
    if first == last:
        return (load, Compare(first.to_bytes(2, "big")))
    return (
        load,
        Compare(first.to_bytes(2, "big"), Test.AT_LEAST),
        Compare(last.to_bytes(2, "big"), Test.AT_MOST),
    )


def port_in(offset: int, set_name: str, *, negate: bool = False) -> Phrase:
    """Match ports of a set. ``offset`` has the meaning of :func:`ports_between`."""
    return (Payload(Base.TRANSPORT, offset, 2), Lookup(set_name, flags=1 if negate else None))


def address_in(family: Family, set_name: str, *, source: bool, negate: bool = False) -> Phrase:
    """Match one of the addresses in a set: ``ip saddr @set``, or ``ip daddr != @set``."""
    load = _load_source(family) if source else _load_destination(family)
    return (*family_is(family), load, Lookup(set_name, flags=1 if negate else None))


def verdict_by_address(family: Family, map_name: str, *, source: bool) -> Phrase:
    """Look up the source or destination address in a map, and apply the found verdict, if any: ``ip saddr vmap
    @map``.
    """
    load = _load_source(family) if source else _load_destination(family)
    return (*family_is(family), load, Lookup(map_name, dreg=VERDICT_REGISTER))


# Register numbers of concatenations, which fill consecutive 32-bit registers. The kernel numbers a 32-bit register
# as 8 plus its position, so 9 is the second. If it is the first in a 128-bit register, the kernel reports the
# 128-bit register's number, such as 1 or 2 (nft_dump_register).


def address_and_port_in(family: Family, set_name: str, *, source: bool, negate: bool = False) -> Phrase:
    """Match address, protocol and port of one side: ``ip daddr . meta l4proto . th dport @set``."""
    load = _load_source(family) if source else _load_destination(family)
    protocol, port = (9, 10) if family is Family.IPV4 else (2, 13)
    return (
        *family_is(family),
        load,
        Meta(MetaKey.L4PROTO, dreg=protocol),
        Payload(Base.TRANSPORT, 0 if source else 2, 2, dreg=port),
        Lookup(set_name, flags=1 if negate else None),
    )


def addresses_in(family: Family, set_name: str) -> Phrase:
    """Match both addresses: ``ip saddr . ip daddr @set``."""
    source, destination = _load_source(family), _load_destination(family)
    second = Payload(destination.base, destination.offset, destination.length, 9 if family is Family.IPV4 else 2)
    return (*family_is(family), source, second, Lookup(set_name))


def port_key(address: IpAddress, protocol: int, port: int) -> bytes:
    """Return a key for the sets of :func:`address_and_port_in`. Each field is padded to four bytes."""
    return address.packed + bytes((protocol, 0, 0, 0)) + port.to_bytes(2, "big") + bytes(2)


def source_port(protocol: int, port: int) -> Phrase:
    """Match the source port: ``udp sport port``."""
    return (*protocol_is(protocol), Payload(Base.TRANSPORT, 0, 2), Compare(port.to_bytes(2, "big")))


def family_of(address: IpAddress) -> Family:
    """Return the family of an address: IPv4 or IPv6."""
    return Family.IPV4 if address.version == 4 else Family.IPV6


def _load_source(family: Family) -> Payload:
    return Payload(Base.NETWORK, 12, 4) if family is Family.IPV4 else Payload(Base.NETWORK, 8, 16)


def _load_destination(family: Family) -> Payload:
    return Payload(Base.NETWORK, 16, 4) if family is Family.IPV4 else Payload(Base.NETWORK, 24, 16)


def source_is(address: IpAddress, *, negate: bool = False) -> Phrase:
    """Match the source: ``ip saddr [!=] address``. Packets of the other IP version never match, even if
    negated.
    """
    family = family_of(address)
    return (*family_is(family), _load_source(family), Compare(address.packed, _test(negate=negate)))


def destination_is(address: IpAddress, *, negate: bool = False) -> Phrase:
    """Match the destination: ``ip daddr [!=] address``. Packets of the other IP version never match, even if
    negated.
    """
    family = family_of(address)
    return (*family_is(family), _load_destination(family), Compare(address.packed, _test(negate=negate)))


def source_in(family: Family, set_name: str) -> Phrase:
    """Match a source in a set: ``ip saddr @set``."""
    return (*family_is(family), _load_source(family), Lookup(set_name))


def destination_in(family: Family, set_name: str) -> Phrase:
    """Match a destination in a set: ``ip daddr @set``."""
    return (*family_is(family), _load_destination(family), Lookup(set_name))


def user_is(user: int, *, negate: bool = False) -> Phrase:
    """Match packets of local sockets that this user created: ``meta skuid [!=] user``."""
    return (Meta(MetaKey.SKUID, dreg=1), Compare(host_u32(user), _test(negate=negate)))


def group_is(group: int, *, negate: bool = False) -> Phrase:
    """Match packets of local sockets that this group created: ``meta skgid [!=] group``."""
    return (Meta(MetaKey.SKGID, dreg=1), Compare(host_u32(group), _test(negate=negate)))


def tproxy_to(family: Family, port: int, address: IpAddress | None = None) -> Phrase:
    """Assign the packet to a listening socket: ``tproxy ip to [address]:port``."""
    if address is None:
        return (Immediate(port.to_bytes(2, "big"), dreg=1), Tproxy(family, reg_port=1))
    return (
        Immediate(address.packed, dreg=1),
        Immediate(port.to_bytes(2, "big"), dreg=2),
        Tproxy(family, reg_port=2, reg_addr=1),
    )


def redirect_to(port: int) -> Phrase:
    """Translate the destination to this host: ``redirect to :port``."""
    return (Immediate(port.to_bytes(2, "big")), Redirect(reg_proto_min=1, reg_proto_max=1))


def keep_destination(family: Family) -> Phrase:
    """Translate the destination to itself (``dnat to daddr``), so that no later nat chain is evaluated."""
    return (*family_is(family), _load_destination(family), Nat(NatKind.DESTINATION, family, 1, 1))


def keep_source(family: Family) -> Phrase:
    """Translate the source to itself (``snat to saddr``), like :func:`keep_destination` for the destination."""
    return (*family_is(family), _load_source(family), Nat(NatKind.SOURCE, family, 1, 1))


def translate_source(address: IpAddress) -> Phrase:
    """Translate the source: ``snat ip to address``."""
    return (Immediate(address.packed), Nat(NatKind.SOURCE, family_of(address), 1, 1))


def accept() -> Phrase:
    """Accept the packet in this base chain. Later base chains still see it."""
    return (Verdict(VerdictCode.ACCEPT),)


def drop() -> Phrase:
    """Drop the packet, regardless of later base chains."""
    return (Verdict(VerdictCode.DROP),)


def goto(chain: str) -> Phrase:
    """Go to another chain, without returning to the remaining rules of this chain."""
    return (Verdict(VerdictCode.GOTO, chain),)


def return_() -> Phrase:
    """Return to the calling chain. In a base chain, apply the chain's policy."""
    return (Verdict(VerdictCode.RETURN),)


def jump(chain: str) -> Phrase:
    """Jump to another chain. After that chain returns, continue with the next rule."""
    return (Verdict(VerdictCode.JUMP, chain),)
