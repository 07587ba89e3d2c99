"""Encodes and decodes expressions as ``NFTA_EXPR_*`` attributes, with one table for both directions.

An expression with attributes missing from the table is decoded as :class:`~tproxy.expressions.Opaque`, so that a
rule changed by another program is never mistaken for ours. Attributes added by the kernel are ignored: zeros
(NFTA_BITWISE_OP), and the two range flags that it derives from the registers.
"""

from dataclasses import fields
from typing import Any, NamedTuple

from tproxy.expressions import (
    VERDICT_REGISTER,
    Bitwise,
    Compare,
    Counter,
    Ct,
    Expression,
    Fib,
    Immediate,
    Lookup,
    Meta,
    Nat,
    Opaque,
    Payload,
    Phrase,
    Redirect,
    SocketLookup,
    Tproxy,
    Verdict,
)
from tproxy.render import nf_tables as nf
from tproxy.wire import MalformedDump, attribute, attribute_map, attributes, be32, nest, read_be32, read_text, text


class _Layout(NamedTuple):
    """How the kernel encodes a kind of expression: its name, the attribute numbers of its fields, and an attribute
    to ignore, if any.
    """

    name: str
    numbers: dict[str, int]
    derived_flags: int | None = None


_LAYOUTS: dict[type[Any], _Layout] = {
    Meta: _Layout("meta", {"dreg": nf.NFTA_META_DREG, "key": nf.NFTA_META_KEY, "sreg": nf.NFTA_META_SREG}),
    Ct: _Layout("ct", {"dreg": nf.NFTA_CT_DREG, "key": nf.NFTA_CT_KEY, "sreg": nf.NFTA_CT_SREG}),
    Payload: _Layout(
        "payload",
        {
            "dreg": nf.NFTA_PAYLOAD_DREG,
            "base": nf.NFTA_PAYLOAD_BASE,
            "offset": nf.NFTA_PAYLOAD_OFFSET,
            "length": nf.NFTA_PAYLOAD_LEN,
        },
    ),
    Bitwise: _Layout(
        "bitwise",
        {
            "sreg": nf.NFTA_BITWISE_SREG,
            "dreg": nf.NFTA_BITWISE_DREG,
            "length": nf.NFTA_BITWISE_LEN,
            "mask": nf.NFTA_BITWISE_MASK,
            "xor": nf.NFTA_BITWISE_XOR,
        },
    ),
    Compare: _Layout("cmp", {"sreg": nf.NFTA_CMP_SREG, "op": nf.NFTA_CMP_OP, "data": nf.NFTA_CMP_DATA}),
    Lookup: _Layout(
        "lookup",
        {
            "set_name": nf.NFTA_LOOKUP_SET,
            "sreg": nf.NFTA_LOOKUP_SREG,
            "flags": nf.NFTA_LOOKUP_FLAGS,
            "dreg": nf.NFTA_LOOKUP_DREG,
        },
    ),
    Immediate: _Layout("immediate", {"dreg": nf.NFTA_IMMEDIATE_DREG, "data": nf.NFTA_IMMEDIATE_DATA}),
    Tproxy: _Layout(
        "tproxy",
        {
            "family": nf.NFTA_TPROXY_FAMILY,
            "reg_addr": nf.NFTA_TPROXY_REG_ADDR,
            "reg_port": nf.NFTA_TPROXY_REG_PORT,
        },
    ),
    Nat: _Layout(
        "nat",
        {
            "kind": nf.NFTA_NAT_TYPE,
            "family": nf.NFTA_NAT_FAMILY,
            "reg_addr_min": nf.NFTA_NAT_REG_ADDR_MIN,
            "reg_addr_max": nf.NFTA_NAT_REG_ADDR_MAX,
            "reg_proto_min": nf.NFTA_NAT_REG_PROTO_MIN,
            "reg_proto_max": nf.NFTA_NAT_REG_PROTO_MAX,
        },
        derived_flags=nf.NFTA_NAT_FLAGS,
    ),
    Redirect: _Layout(
        "redir",
        {"reg_proto_min": nf.NFTA_REDIR_REG_PROTO_MIN, "reg_proto_max": nf.NFTA_REDIR_REG_PROTO_MAX},
        derived_flags=nf.NFTA_REDIR_FLAGS,
    ),
    Fib: _Layout("fib", {"dreg": nf.NFTA_FIB_DREG, "result": nf.NFTA_FIB_RESULT, "flags": nf.NFTA_FIB_FLAGS}),
    SocketLookup: _Layout("socket", {"key": nf.NFTA_SOCKET_KEY, "dreg": nf.NFTA_SOCKET_DREG}),
}
_BY_NAME = {layout.name: (cls, layout) for cls, layout in _LAYOUTS.items()}
_BYTES = {"mask", "xor", "data"}
_TEXT = {"set_name"}
_DERIVED = 0b11  # NF_NAT_RANGE_MAP_IPS, NF_NAT_RANGE_PROTO_SPECIFIED


def encode(expression: Expression) -> bytes:
    """Encode an expression as a list element of NFTA_RULE_EXPRESSIONS.

    Raises:
        ValueError: the expression is an :class:`Opaque`, which is only ever read.
    """
    match expression:
        case Opaque(name, _):
            raise ValueError(f"cannot write an unknown expression {name!r}")
        case Verdict():
            data = [
                be32(nf.NFTA_IMMEDIATE_DREG, VERDICT_REGISTER),
                nest(nf.NFTA_IMMEDIATE_DATA, verdict_data(expression)),
            ]
            return nest(nf.NFTA_LIST_ELEM, text(nf.NFTA_EXPR_NAME, "immediate"), nest(nf.NFTA_EXPR_DATA, *data))
        case Counter():
            # A counter needs a nested attribute, even an empty one. The kernel then starts counting at zero
            # (nft_counter_do_init).
            return nest(nf.NFTA_LIST_ELEM, text(nf.NFTA_EXPR_NAME, "counter"), nest(nf.NFTA_EXPR_DATA))
        case _:
            layout = _LAYOUTS[type(expression)]
            data = []
            for name, number in layout.numbers.items():
                value = getattr(expression, name)
                if value is None:
                    continue
                if name in _BYTES:
                    data.append(nest(number, attribute(nf.NFTA_DATA_VALUE, value)))
                elif name in _TEXT:
                    data.append(text(number, value))
                else:
                    data.append(be32(number, value))
            return nest(nf.NFTA_LIST_ELEM, text(nf.NFTA_EXPR_NAME, layout.name), nest(nf.NFTA_EXPR_DATA, *data))


def decode_list(payload: bytes) -> Phrase:
    """Decode NFTA_RULE_EXPRESSIONS.

    Raises:
        MalformedDump: an attribute's length contradicts its content.
    """
    return tuple(_decode(element) for _, element in attributes(payload))


def _decode(element: bytes) -> Expression:
    parts = attribute_map(element)
    name = read_text(parts.get(nf.NFTA_EXPR_NAME, b""))
    data = parts.get(nf.NFTA_EXPR_DATA, b"")
    if name == "counter":
        counted = attribute_map(data)
        packets, octets = (counted.get(number, b"") for number in (nf.NFTA_COUNTER_PACKETS, nf.NFTA_COUNTER_BYTES))
        return Counter(int.from_bytes(packets, "big"), int.from_bytes(octets, "big"))
    known = _BY_NAME.get(name)
    if known is None:
        return Opaque(name, data)
    found = attribute_map(data)
    if name == "immediate" and (verdict := _verdict(found)) is not None:
        return verdict
    cls, layout = known
    values: dict[str, Any] = {}
    for field_name, number in layout.numbers.items():
        payload = found.pop(number, None)
        if payload is None:
            continue
        if field_name in _BYTES:
            inner = attribute_map(payload)
            if set(inner) != {nf.NFTA_DATA_VALUE}:
                return Opaque(name, data)
            values[field_name] = inner[nf.NFTA_DATA_VALUE]
        elif field_name in _TEXT:
            values[field_name] = read_text(payload)
        else:
            values[field_name] = read_be32(payload)
    for number, payload in found.items():
        if number == layout.derived_flags and not read_be32(payload) & ~_DERIVED:
            continue
        if any(payload):
            return Opaque(name, data)
    if cls is Lookup and values.get("flags") == 0:
        del values["flags"]
    try:
        return _checked(cls, values)
    except TypeError:
        return Opaque(name, data)


def _checked(cls: type[Any], values: dict[str, Any]) -> Expression:
    missing = [item.name for item in fields(cls) if item.name not in values]
    # When decoding, no default values are used for missing attributes. For example, a dumped comparison without a
    # register cannot come from our rule.
    optional = {"flags", "dreg", "sreg", "reg_port", "reg_addr", "reg_addr_min", "reg_addr_max"}
    optional |= {"reg_proto_min", "reg_proto_max"}
    if any(name not in optional for name in missing):
        raise TypeError(missing)
    expression: Expression = cls(**values)
    return expression


def verdict_data(verdict: Verdict) -> bytes:
    """Encode a verdict as the attribute that rules and map elements use."""
    parts = [be32(nf.NFTA_VERDICT_CODE, verdict.code)]
    if verdict.chain:
        parts.append(text(nf.NFTA_VERDICT_CHAIN, verdict.chain))
    return nest(nf.NFTA_DATA_VERDICT, *parts)


def _verdict(found: dict[int, bytes]) -> Verdict | None:
    return read_verdict(found.get(nf.NFTA_IMMEDIATE_DATA, b""))


def read_verdict(payload: bytes) -> Verdict | None:
    """Decode the verdict in a data attribute. Return None if the attribute contains a value instead.

    Raises:
        MalformedDump: the verdict has no code.
    """
    inner = attribute_map(payload)
    if nf.NFTA_DATA_VERDICT not in inner:
        return None
    return verdict_of(inner[nf.NFTA_DATA_VERDICT])


def verdict_of(payload: bytes) -> Verdict:
    """Decode a verdict from its attributes, the form in trace events.

    Raises:
        MalformedDump: the verdict has no code.
    """
    verdict = attribute_map(payload)
    if nf.NFTA_VERDICT_CODE not in verdict:
        raise MalformedDump(payload)
    code = read_be32(verdict[nf.NFTA_VERDICT_CODE])
    return Verdict(code - (1 << 32) if code >> 31 else code, read_text(verdict.get(nf.NFTA_VERDICT_CHAIN, b"")))
