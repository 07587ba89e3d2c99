"""Prints resources for operators: tables in the form of nft, rules and routes in the form of ip.

Rules are register programs. They are translated back to nft's language by tracking the content of each register,
and the result is valid input for ``nft -f``. A rule that nft's language cannot express is printed like nft's debug
output, in brackets.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Literal, assert_never

from tproxy.expressions import (
    ACK,
    ALL_BITS,
    FIN,
    RST,
    SYN,
    VERDICT_REGISTER,
    Base,
    Bitwise,
    Compare,
    Counter,
    Ct,
    CtKey,
    Expression,
    Family,
    Fib,
    Immediate,
    Lookup,
    Meta,
    MetaKey,
    Nat,
    NatKind,
    Opaque,
    Payload,
    Phrase,
    Redirect,
    SocketLookup,
    Test,
    Tproxy,
    Verdict,
    VerdictCode,
    host_u16,
    host_u32,
)
from tproxy.operations import (
    AddAddress,
    AddChain,
    AddElements,
    AddIpRule,
    AddRoute,
    AddSet,
    AddTable,
    AppendRule,
    CreatePair,
    DeleteAddress,
    DeleteChain,
    DeleteElements,
    DeleteIpRule,
    DeletePair,
    DeleteRoute,
    DeleteSet,
    DeleteTable,
    FlushChain,
    Forget,
    NftStep,
    NftTransaction,
    Operation,
    Remember,
    SetSysctl,
    SetUp,
)
from tproxy.resources import (
    Chain,
    Element,
    HookPoint,
    IpRule,
    Namespace,
    Route,
    Set,
    SetKey,
    State,
    SysctlKey,
    Table,
)

_Kind = Literal["number", "name", "address", "port", "family", "protocol", "type", "flag", "flags", "hex"]
_FAMILIES = {Family.INET: "inet", Family.IPV4: "ip", Family.IPV6: "ip6"}
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "ipv6-icmp", 132: "sctp", 136: "udplite"}
_SIGNS: dict[int, str] = {Test.EQUAL: "", Test.NOT_EQUAL: "!= ", Test.AT_MOST: "<= ", Test.AT_LEAST: ">= "}
_META: dict[int, tuple[str, _Kind]] = {
    MetaKey.MARK: ("meta mark", "number"),
    MetaKey.IIFNAME: ("iifname", "name"),
    MetaKey.OIFNAME: ("oifname", "name"),
    MetaKey.SKUID: ("meta skuid", "number"),
    MetaKey.SKGID: ("meta skgid", "number"),
    MetaKey.NFPROTO: ("meta nfproto", "family"),
    MetaKey.L4PROTO: ("meta l4proto", "protocol"),
    MetaKey.NFTRACE: ("meta nftrace", "flag"),
}
_CT: dict[int, tuple[str, _Kind]] = {
    CtKey.STATE: ("ct state", "number"),
    CtKey.MARK: ("ct mark", "number"),
    CtKey.ZONE: ("ct zone", "number"),
}
_ADDRESSES = {
    (12, 4): "ip saddr",
    (16, 4): "ip daddr",
    (8, 16): "ip6 saddr",
    (24, 16): "ip6 daddr",
}
_PORTS = {0: "sport", 2: "dport"}
_ICMP = {"icmp": "icmp", "ipv6-icmp": "icmpv6"}
_TCP_FLAGS = {"fin": FIN, "syn": SYN, "rst": RST, "ack": ACK}
_PRIORITIES = {-300: "raw", -150: "mangle", 0: "filter"}
# nft accepts each of these priority names only at one hook.
_NAT_PRIORITIES = {(HookPoint.PREROUTING, -100): "dstnat", (HookPoint.POSTROUTING, 100): "srcnat"}
_SET_TYPES = {
    SetKey.IPV4_ADDRESS: "ipv4_addr",
    SetKey.IPV6_ADDRESS: "ipv6_addr",
    SetKey.PORT: "inet_service",
    SetKey.INTERFACE: "ifname",
    SetKey.IPV4_PAIR: "ipv4_addr . ipv4_addr",
    SetKey.IPV6_PAIR: "ipv6_addr . ipv6_addr",
    SetKey.IPV4_PORT: "ipv4_addr . inet_proto . inet_service",
    SetKey.IPV6_PORT: "ipv6_addr . inet_proto . inet_service",
}


@dataclass(frozen=True, slots=True)
class _Value:
    """The known content of a register: a packet property, possibly masked, or a constant."""

    text: str
    kind: _Kind
    mask: int = ALL_BITS
    xor: int = 0
    constant: bytes | None = None


class _Untranslatable(Exception):
    """A rule cannot be expressed in nft's language."""


def rule_text(phrase: Phrase) -> str:
    """Return a rule in nft's language without its comment, or as raw expressions if nft's language cannot express
    it.
    """
    try:
        return " ".join(_tidy(_clauses(phrase)))
    except (_Untranslatable, KeyError, ValueError):
        return " ".join(_raw(expression) for expression in phrase)


def _raw(expression: Expression) -> str:
    if isinstance(expression, Opaque):
        return f"[ {expression.name} {expression.data.hex()} ]"
    return f"[ {expression} ]"


def _clauses(phrase: Phrase) -> Iterator[str]:
    registers: dict[int, _Value] = {}
    protocol: str | None = None
    #: The loaded values that no expression has used yet, in order. If there are several, they form a
    #: concatenation.
    loaded: list[str] = []
    for expression in phrase:
        if isinstance(expression, Compare | Immediate):
            loaded.clear()
        match expression:
            case Meta(key, dreg=int(register)):
                registers[register] = _Value(*_META[key])
                loaded.append(registers[register].text)
            case Ct(key, dreg=int(register)):
                registers[register] = _Value(*_CT[key])
            case Payload(Base.NETWORK, offset, length, register):
                registers[register] = _Value(_ADDRESSES[offset, length], "address")
                loaded.append(registers[register].text)
            case Payload(Base.TRANSPORT, 0, 2, register) if protocol in _ICMP:
                # nft's language has no name for ICMP type and code as a single value.
                registers[register] = _Value("@th,0,16", "hex")
            case Payload(Base.TRANSPORT, offset, 2, register):
                registers[register] = _Value(f"{protocol or 'th'} {_PORTS[offset]}", "port")
                loaded.append(registers[register].text)
            case Payload(Base.TRANSPORT, 0, 1, register) if protocol is not None and protocol in _ICMP:
                registers[register] = _Value(f"{_ICMP[protocol]} type", "flag")
            case Payload(Base.TRANSPORT, 13, 1, register) if protocol == "tcp":
                registers[register] = _Value("tcp flags", "flags")
            case Fib(3, 2, register):
                registers[register] = _Value("fib daddr type", "type")
            case SocketLookup(0, register):
                registers[register] = _Value("socket transparent", "flag")
            case Immediate(data, register):
                registers[register] = _Value("", "number", constant=data)
            case Bitwise(mask, xor, 4, source, target):
                value = registers[source]
                registers[target] = replace(value, mask=_number(mask), xor=_number(xor))
            case Bitwise(mask, b"\0", 1, source, target):
                registers[target] = replace(registers[source], mask=mask[0])
            case Compare(data, op, register):
                value = registers[register]
                yield _comparison(value, data, op)
                if value.kind == "protocol" and op == Test.EQUAL:
                    protocol = _PROTOCOLS.get(data[0])
            case Lookup(name, register, flags, target):
                sign = "vmap " if target == VERDICT_REGISTER else "!= " if flags else ""
                yield f"{' . '.join(loaded) or registers[register].text} {sign}@{name}"
                loaded.clear()
            case Counter(packets, octets):
                yield f"counter packets {packets} bytes {octets}" if packets else "counter"
            case Meta(key, sreg=int(register)):
                yield f"{_META[key][0]} set {_assigned(registers[register])}"
            case Ct(key, sreg=int(register)):
                yield f"{_CT[key][0]} set {_assigned(registers[register])}"
            case Tproxy(family, port, address):
                yield f"tproxy {_FAMILIES[Family(family)]} to {_target(registers, address, port)}"
            case Nat(kind, family, address, _, port, _):
                verb = "snat" if kind == NatKind.SOURCE else "dnat"
                yield f"{verb} {_FAMILIES[Family(family)]} to {_target(registers, address, port)}"
            case Redirect(port, _):
                yield f"redirect to {_target(registers, None, port)}"
            case Verdict(code, chain):
                yield f"{VerdictCode(code).name.lower()} {chain}".strip()
            case _:
                raise _Untranslatable(expression)


def _tidy(clauses: Iterable[str]) -> list[str]:
    """Remove tests that the following clause implies, because nft does not print them either."""
    words: list[str] = []
    implied = {"ip ": "meta nfproto ipv4", "ip6 ": "meta nfproto ipv6"}
    for clause in clauses:
        for start, before in implied.items():
            spoken = (start, f"dnat {start}", f"snat {start}", f"tproxy {start}")
            if clause.startswith(spoken[:3]) and words and words[-1] == before:
                words.pop()
        for protocol in ("tcp", "udp", "sctp", "udplite"):
            if clause.startswith(f"{protocol} ") and words and words[-1] == f"meta l4proto {protocol}":
                words.pop()
        for protocol, name in _ICMP.items():
            if clause.startswith(f"{name} ") and words and words[-1] == f"meta l4proto {protocol}":
                words.pop()
        words.append(clause)
    return words


def _number(data: bytes) -> int:
    if len(data) == 1:
        return data[0]
    # The byte order is found by encoding a number, so that only the encoder determines it.
    write = host_u16 if len(data) == 2 else host_u32
    return next(
        value for value in (int.from_bytes(data, "little"), int.from_bytes(data, "big")) if write(value) == data
    )


def _flags(bits: int) -> str:
    return " | ".join(name for name, bit in _TCP_FLAGS.items() if bits & bit) or "0"


def _comparison(value: _Value, data: bytes, op: int) -> str:
    negated = op == Test.NOT_EQUAL
    sign = _SIGNS[op]
    match value.kind:
        case "number":
            number = _number(data)
            if value.mask != ALL_BITS:
                return f"{value.text} & {value.mask:#x} {'!=' if negated else '=='} {number:#x}"
            return f"{value.text} {sign}{number:#x}"
        case "name":
            any_rest = "*" if len(data) < SetKey.INTERFACE.octets else ""
            return f'{value.text} {sign}"{data.rstrip(bytes(1)).decode()}{any_rest}"'
        case "address":
            return f"{value.text} {sign}{ip_address(data)}"
        case "port":
            return f"{value.text} {sign}{int.from_bytes(data, 'big')}"
        case "hex":
            return f"{value.text} {sign}{int.from_bytes(data, 'big'):#x}"
        case "family":
            return f"{value.text} {sign}{'ipv4' if data[0] == Family.IPV4 else 'ipv6'}"
        case "protocol":
            return f"{value.text} {sign}{_PROTOCOLS.get(data[0], str(data[0]))}"
        case "type":
            return f"{value.text} {sign}{'local' if _number(data) == 2 else str(_number(data))}"
        case "flag":
            return f"{value.text} {sign}{data[0]}"
        case "flags":
            return f"{value.text} & ({_flags(value.mask)}) {'!=' if negated else '=='} {_flags(data[0])}"


def _assigned(value: _Value) -> str:
    if value.constant is not None:
        return f"{_number(value.constant):#x}"
    if value.mask == 0:
        return f"{value.xor:#x}"
    if value.mask == ALL_BITS and value.xor == 0:
        return value.text
    if value.mask == ~value.xor & ALL_BITS:
        return f"{value.text} | {value.xor:#x}"
    if value.mask & value.xor:
        raise _Untranslatable(value)
    return f"{value.text} & {value.mask:#x} | {value.xor:#x}"


def _target(registers: dict[int, _Value], address: int | None, port: int | None) -> str:
    text = ""
    if address is not None:
        value = registers[address]
        text = value.text if value.constant is None else str(ip_address(value.constant))
        if value.constant is not None and ":" in text and port is not None:
            text = f"[{text}]"
    if port is not None:
        constant = registers[port].constant
        if constant is None:
            raise _Untranslatable(registers[port])
        text += f":{int.from_bytes(constant[:2], 'big')}"
    return text


def table_text(table: Table) -> str:
    """Return a table in the layout of ``nft list table``."""
    lines = [f"table {_FAMILIES[table.family]} {table.name} {{"]
    blocks = [_set_lines(item) for item in table.sets] + [_chain_lines(chain) for chain in table.chains]
    for position, block in enumerate(blocks):
        lines += [""] if position else []
        lines += [f"\t{line}" if line else "" for line in block]
    return "\n".join([*lines, "}"])


def _set_lines(item: Set) -> Iterator[str]:
    yield f"{'map' if item.verdicts else 'set'} {item.name} {{"
    yield f"\ttype {_SET_TYPES[item.key]}{' : verdict' if item.verdicts else ''}"
    if item.interval:
        yield "\tflags interval"
    if item.elements:
        members = sorted(item.elements, key=lambda element: element.key)
        shown = [_element(item.key, member) for member in members]
        yield f"\telements = {{ {', '.join(shown)} }}"
    yield "}"


def _element(kind: SetKey, element: Element) -> str:
    text = _key(kind, element.key)
    if element.last and element.last != element.key:
        text += f"-{_key(kind, element.last)}"
    text += _comment(element.comment)
    if element.verdict is not None:
        text += f" : {VerdictCode(element.verdict.code).name.lower()} {element.verdict.chain}".rstrip()
    return text


def _key(kind: SetKey, key: bytes) -> str:
    if len(key) != kind.octets:
        return key.hex()
    match kind:
        case SetKey.INTERFACE:
            return f'"{key.rstrip(bytes(1)).decode(errors="replace")}"'
        case SetKey.PORT:
            return str(int.from_bytes(key, "big"))
        case SetKey.IPV4_PAIR | SetKey.IPV6_PAIR:
            half = len(key) // 2
            return f"{ip_address(key[:half])} . {ip_address(key[half:])}"
        case SetKey.IPV4_PORT | SetKey.IPV6_PORT:
            protocol, port = key[-8], int.from_bytes(key[-4:-2], "big")
            return f"{ip_address(key[:-8])} . {_PROTOCOLS.get(protocol, protocol)} . {port}"
        case _:
            return str(ip_address(key))


def _comment(comment: str) -> str:
    return f' comment "{comment}"' if comment else ""


def _chain_lines(chain: Chain) -> Iterator[str]:
    yield f"chain {chain.name} {{"
    if chain.hook is not None:
        hook = chain.hook
        number = hook.priority
        priority = _NAT_PRIORITIES.get((hook.point, number), _PRIORITIES.get(number, str(number)))
        policy = "drop" if hook.drop else "accept"
        point = hook.point.name.lower()
        yield f"\ttype {hook.kind} hook {point} priority {priority}; policy {policy};"
    for rule in chain.rules:
        yield f"\t{rule_text(rule.phrase)}{_comment(rule.comment)}"
    yield "}"


def ip_rule_text(rule: IpRule) -> str:
    """Return a rule as arguments of ``ip rule add``, with -6 in front for IPv6."""
    words = ["-6 rule" if rule.version == 6 else "rule", f"priority {rule.priority}"]
    if rule.mark is not None:
        words.append(f"fwmark {rule.mark:#x}" + (f"/{rule.mask:#x}" if rule.mask is not None else ""))
    words.append(f"goto {rule.goto}" if rule.goto is not None else f"lookup {rule.table}")
    return " ".join(words)


def route_text(route: Route) -> str:
    """Return a route as arguments of ``ip route add``, with -6 in front for IPv6."""
    destination = str(route.destination) if route.destination.prefixlen else "default"
    words = ["-6 route" if route.version == 6 else "route", "local" if route.local else "", destination]
    if route.gateway is not None:
        words.append(f"via {route.gateway}")
    words.append(f"dev {route.device}")
    if route.source is not None:
        words.append(f"src {route.source}")
    words += ["onlink" if route.onlink else "", f"table {route.table}"]
    return " ".join(word for word in words if word)


def namespace_text(namespace: Namespace) -> str:
    """Return our resources in a namespace, sorted, one per line, tables last."""
    lines = [f"up {device}" for device in sorted(namespace.up)]
    lines += sorted(f"address {item.interface} dev {item.device}" for item in namespace.addresses)
    lines += sorted(f"sysctl {_sysctl_name(key)} = {value}" for key, value in namespace.sysctls.items())
    rules = sorted(namespace.rules, key=lambda rule: (rule.version, rule.priority))
    lines += [ip_rule_text(rule) for rule in rules]
    lines += sorted(route_text(route) for route in namespace.routes)
    lines += [table_text(table) for table in namespace.tables]
    return "\n".join(lines)


def state_text(state: State) -> str:
    """Return a state as text: first the veth pairs, then each namespace under a heading."""
    parts = []
    for pair in sorted(state.pairs, key=repr):
        right = "?" if pair.right is None else f"{pair.right.namespace}/{pair.right.device}"
        parts.append(f"veth {pair.left.namespace}/{pair.left.device} <-> {right}")
    for name, namespace in state.namespaces.items():
        parts.append(f"# {name}\n{namespace_text(namespace)}".rstrip())
    return "\n".join(parts)


def operation_text(operation: Operation) -> list[str]:
    """Return an operation as text, with one line per step: ``+`` adds, ``-`` removes, ``=`` changes in place."""
    match operation:
        case NftTransaction(namespace, steps):
            return [f"{namespace}: {_step_text(step)}" for step in steps]
        case CreatePair(pair) | DeletePair(pair):
            sign = "+" if isinstance(operation, CreatePair) else "-"
            ends = " <-> ".join(f"{end.namespace}/{end.device}" for end in pair.ends)
            return [f"{pair.left.namespace}: {sign} veth {ends}"]
        case SetUp(namespace, device):
            return [f"{namespace}: = {device} up"]
        case AddAddress(namespace, address) | DeleteAddress(namespace, address):
            sign = "+" if isinstance(operation, AddAddress) else "-"
            return [f"{namespace}: {sign} address {address.interface} dev {address.device}"]
        case AddRoute(namespace, route) | DeleteRoute(namespace, route):
            sign = "+" if isinstance(operation, AddRoute) else "-"
            return [f"{namespace}: {sign} {route_text(route)}"]
        case AddIpRule(namespace, rule) | DeleteIpRule(namespace, rule):
            sign = "+" if isinstance(operation, AddIpRule) else "-"
            return [f"{namespace}: {sign} {ip_rule_text(rule)}"]
        case Remember(namespace, values):
            return [f"{namespace}: + remember {_sysctl_name(key)} = {value}" for key, value in values.items()]
        case SetSysctl(namespace, key, value):
            return [f"{namespace}: = sysctl {_sysctl_name(key)} = {value}"]
        case Forget(namespace, values):
            return [f"{namespace}: - remember {_sysctl_name(key)} = {value}" for key, value in values.items()]
        case _:
            assert_never(operation)


def _sysctl_name(key: SysctlKey) -> str:
    return key.path.replace("/", ".")


def _step_text(step: NftStep) -> str:
    match step:
        case AddTable(_, table):
            return f"+ table {table}"
        case DeleteTable(_, table):
            return f"- table {table}"
        case AddChain(_, table, chain):
            return f"+ chain {table} {chain.name}"
        case FlushChain(_, table, name):
            return f"- rules of chain {table} {name}"
        case DeleteChain(_, table, name):
            return f"- chain {table} {name}"
        case AppendRule(_, table, name, rule):
            return f"+ rule {table} {name} {rule_text(rule.phrase)}"
        case AddSet(_, table, item):
            return f"+ set {table} {item.name}"
        case DeleteSet(_, table, name):
            return f"- set {table} {name}"
        case AddElements(_, table, name, elements) | DeleteElements(_, table, name, elements):
            sign = "+" if isinstance(step, AddElements) else "-"
            shown = (
                str(ip_address(item.key)) + _comment(item.comment) if len(item.key) in (4, 16) else item.key.hex()
                for item in elements
            )
            return f"{sign} element {table} {name} {{ {', '.join(shown)} }}"
        case _:
            assert_never(step)
