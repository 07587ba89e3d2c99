"""Evaluates an nftables table for a packet like the kernel: chains, rules, sets and maps. It does no I/O.

It is used to explain decisions without sending packets, and to evaluate recorded connections again. A test uses it
to compare tables with policies, thousands of times a second. Other tests compare its verdicts with the kernel's.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tproxy.expressions import (
    CT_NEW,
    SYN,
    TCP,
    VERDICT_REGISTER,
    Base,
    Bitwise,
    Compare,
    Counter,
    Ct,
    CtKey,
    Expression,
    Family,
    Immediate,
    IpAddress,
    Lookup,
    Meta,
    MetaKey,
    Payload,
    Test,
    Verdict,
    VerdictCode,
    family_of,
    host_u32,
)
from tproxy.resources import Chain, Element, HookPoint, Rule, Set, Table

_WITH_PORTS: Final = frozenset({6, 17, 33, 132, 136})


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """A forwarded packet. To evaluate a conntrack flow, use the addresses and ports of its first packet.

    Attributes:
        state: the state of the packet's connection, ``CT_*``.
        tcp_flags: the flags of a TCP packet.
        icmp_type, icmp_code: type and code of an ICMP or ICMPv6 packet.
    """

    source: IpAddress
    destination: IpAddress
    protocol: int = TCP
    source_port: int = 0
    destination_port: int = 0
    state: int = CT_NEW
    tcp_flags: int = SYN
    icmp_type: int = 0
    icmp_code: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A rule that matched a packet. The last step decided, by the rule's verdict or by the verdict in a map
    element.
    """

    chain: str
    rule: Rule


@dataclass(slots=True)
class Decision:
    """The result for a packet: whether it passes all base chains, and which rules matched."""

    accepted: bool = True
    steps: list[Step] = field(default_factory=list)


class Unreadable(Exception):
    """A rule has an expression that this module does not evaluate; the expression is in ``args``."""


class Interpreter:
    """Evaluates the base chains of one nftables table at one hook. Each set is indexed when it is first used."""

    def __init__(self, table: Table, point: HookPoint = HookPoint.FORWARD) -> None:
        self._chains = {chain.name: chain for chain in table.chains}
        self._sets = {item.name: item for item in table.sets}
        self._indexes: dict[str, _Index] = {}
        hooked = [
            (chain.hook.priority, chain) for chain in table.chains if chain.hook and chain.hook.point == point
        ]
        self._base = [chain for _, chain in sorted(hooked, key=lambda pair: pair[0])]

    @property
    def reads_source_ports(self) -> bool:
        """Whether a decision can depend on a packet's source port. If not, flows that differ only in it are alike.

        A rule about the type and code of ICMP reads the same two octets, and counts.
        """
        return any(
            isinstance(each, Payload) and each.base == Base.TRANSPORT and each.offset < 2 <= each.length
            for chain in self._chains.values()
            for rule in chain.rules
            for each in rule.phrase
        )

    def judge(self, packet: Packet) -> Decision:
        """Return the table's decision about a packet.

        Raises:
            Unreadable: the packet reaches a rule with an expression that this module does not evaluate.
        """
        decision = Decision()
        for chain in self._base:
            verdict = self._chain(chain, packet, decision.steps, 0)
            if verdict is None:
                continue
            if verdict.code == VerdictCode.DROP:
                decision.accepted = False
                break
        return decision

    def _chain(self, chain: Chain, packet: Packet, steps: list[Step], depth: int) -> Verdict | None:
        """Return the verdict of a chain, ACCEPT or DROP. None if the chain ends without one."""
        if depth > 16:  # NFT_JUMP_STACK_SIZE; the kernel refuses such a table
            raise Unreadable(chain.name)
        for rule in chain.rules:
            verdict = self._rule(rule, packet)
            if verdict is None:
                continue
            steps.append(Step(chain.name, rule))
            match verdict.code:
                case VerdictCode.ACCEPT | VerdictCode.DROP:
                    return verdict
                case VerdictCode.RETURN:
                    return None
                case VerdictCode.GOTO:
                    return self._chain(self._chains[verdict.chain], packet, steps, depth + 1)
                case VerdictCode.JUMP:
                    found = self._chain(self._chains[verdict.chain], packet, steps, depth + 1)
                    if found is not None:
                        return found
                case code:
                    raise Unreadable(code)
        return None

    def _rule(self, rule: Rule, packet: Packet) -> Verdict | None:
        """Return the verdict of a rule. None if the rule does not match, or has no verdict."""
        registers = bytearray(80)
        for expression in rule.phrase:
            match expression:
                case Verdict():
                    return expression
                case Lookup(name, source, flags, target):
                    index = self._index(name)
                    at = _offset(source)
                    found = index.find(bytes(registers[at : at + index.octets]))
                    if (found is None) is not bool(flags):
                        return None
                    if target is not None and found is not None:
                        if target != VERDICT_REGISTER or found.verdict is None:
                            raise Unreadable(expression)
                        return found.verdict
                case _:
                    if not _step(expression, registers, packet):
                        return None
        return None

    def _index(self, name: str) -> "_Index":
        index = self._indexes.get(name)
        if index is None:
            index = self._indexes[name] = _Index(self._sets[name])
        return index


class _Index:
    """An index of a set's elements, which finds the element that matches a key."""

    def __init__(self, item: Set) -> None:
        self.octets = item.key.octets
        self._starts: list[bytes] | None = None
        self._sorted: list[Element] = []
        self._exact: Mapping[bytes, Element] = {}
        if item.interval:
            self._sorted = sorted(item.elements, key=lambda element: element.key)
            self._starts = [element.key for element in self._sorted]
        else:
            self._exact = {element.key: element for element in item.elements}

    def find(self, key: bytes) -> Element | None:
        if self._starts is None:
            return self._exact.get(key)
        at = bisect_right(self._starts, key)
        found = self._sorted[at - 1] if at else None
        return found if found is not None and key <= found.last else None


def _offset(register: int) -> int:
    """Return the offset of a register. Registers 1 to 4 have 16 bytes, and registers from 8 on have 4
    (``nft_parse_register``).
    """
    return (register - 8) * 4 if register >= 8 else (register - 1) * 16


def _put(registers: bytearray, register: int | None, value: bytes) -> None:
    at = _offset(register or 1)
    padded = value + bytes(-len(value) % 4)
    registers[at : at + len(padded)] = padded


def _step(expression: Expression, registers: bytearray, packet: Packet) -> bool:
    """Run one expression other than a verdict or a lookup. Return False if it ends the rule."""
    match expression:
        case Meta(MetaKey.NFPROTO, dreg=int(register)):
            _put(registers, register, bytes((family_of(packet.source),)))
        case Meta(MetaKey.L4PROTO, dreg=int(register)):
            _put(registers, register, bytes((packet.protocol,)))
        case Ct(CtKey.STATE, dreg=int(register)):
            _put(registers, register, host_u32(packet.state))
        case Payload(base, offset, length, register):
            value = _header(packet, base, offset, length)
            if value is None:
                return False
            _put(registers, register, value)
        case Bitwise(mask, xor, length, source, target):
            at = _offset(source)
            word = registers[at : at + length]
            _put(registers, target, bytes((a & b) ^ c for a, b, c in zip(word, mask, xor, strict=True)))
        case Compare(data, op, source):
            at = _offset(source)
            return _holds(bytes(registers[at : at + len(data)]), op, data)
        case Immediate(data, register):
            _put(registers, register, data)
        case Counter():
            pass
        case _:
            raise Unreadable(expression)
    return True


def _header(packet: Packet, base: int, offset: int, length: int) -> bytes | None:
    """Return the requested bytes of a packet header, or None if the packet does not have this header."""
    family = family_of(packet.source)
    if base == Base.NETWORK:
        places = {
            (Family.IPV4, 12, 4): packet.source,
            (Family.IPV4, 16, 4): packet.destination,
            (Family.IPV6, 8, 16): packet.source,
            (Family.IPV6, 24, 16): packet.destination,
        }
        found = places.get((family, offset, length))
        if found is None:
            raise Unreadable(base, offset, length)
        return found.packed
    if base != Base.TRANSPORT:
        raise Unreadable(base)
    if packet.protocol in _WITH_PORTS:
        header = packet.source_port.to_bytes(2, "big") + packet.destination_port.to_bytes(2, "big") + bytes(9)
        if packet.protocol == TCP:
            header += bytes((packet.tcp_flags,))
    else:
        header = bytes((packet.icmp_type, packet.icmp_code)) + bytes(6)
    return header[offset : offset + length] if offset + length <= len(header) else None


def _holds(value: bytes, op: int, data: bytes) -> bool:
    match op:
        case Test.EQUAL:
            return value == data
        case Test.NOT_EQUAL:
            return value != data
        case Test.AT_MOST:
            return value <= data
        case Test.AT_LEAST:
            return value >= data
        case _:
            raise Unreadable(op)


def counters(table: Table) -> Iterator[tuple[str, Rule, Counter]]:
    """Yield every counter of a table that was read, with its chain and rule."""
    for chain in table.chains:
        for rule in chain.rules:
            for expression in rule.phrase:
                if isinstance(expression, Counter):
                    yield chain.name, rule, expression
