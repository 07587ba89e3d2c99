"""Expressions <-> ``NFTA_EXPR_*`` attributes, one table for both directions.

A dump that says more than this table knows becomes :class:`~tproxy.expressions.Opaque`, so that a rule
somebody changed is never mistaken for ours. Two things the kernel adds by itself are not "more":
attributes that are zero (NFTA_BITWISE_OP), and the two range flags it derives from the registers.
"""

from dataclasses import fields
from typing import Any, NamedTuple

from tproxy.expressions import (
    Bitwise,
    Compare,
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
from tproxy.wire import (
    MalformedDump,
    attribute,
    attribute_map,
    attributes,
    be32,
    nest,
    read_be32,
    read_text,
    text,
)

EXPR_NAME, EXPR_DATA = 1, 2
DATA_VALUE, DATA_VERDICT = 1, 2
VERDICT_CODE, VERDICT_CHAIN = 1, 2
LIST_ELEMENT = 1


class _Layout(NamedTuple):
    """Kernel name, attribute number of each field, and the number of an attribute with derived flags."""

    name: str
    numbers: dict[str, int]
    derived_flags: int | None = None


_LAYOUTS: dict[type[Any], _Layout] = {
    Meta: _Layout("meta", {"dreg": 1, "key": 2, "sreg": 3}),
    Ct: _Layout("ct", {"dreg": 1, "key": 2, "sreg": 4}),
    Payload: _Layout("payload", {"dreg": 1, "base": 2, "offset": 3, "length": 4}),
    Bitwise: _Layout("bitwise", {"sreg": 1, "dreg": 2, "length": 3, "mask": 4, "xor": 5}),
    Compare: _Layout("cmp", {"sreg": 1, "op": 2, "data": 3}),
    Lookup: _Layout("lookup", {"set_name": 1, "sreg": 2, "flags": 5}),
    Immediate: _Layout("immediate", {"dreg": 1, "data": 2}),
    Tproxy: _Layout("tproxy", {"family": 1, "reg_addr": 2, "reg_port": 3}),
    Nat: _Layout(
        "nat",
        {
            "kind": 1,
            "family": 2,
            "reg_addr_min": 3,
            "reg_addr_max": 4,
            "reg_proto_min": 5,
            "reg_proto_max": 6,
        },
        derived_flags=7,
    ),
    Redirect: _Layout("redir", {"reg_proto_min": 1, "reg_proto_max": 2}, derived_flags=3),
    Fib: _Layout("fib", {"dreg": 1, "result": 2, "flags": 3}),
    SocketLookup: _Layout("socket", {"key": 1, "dreg": 2}),
}
_BY_NAME = {layout.name: (cls, layout) for cls, layout in _LAYOUTS.items()}
_BYTES = {"mask", "xor", "data"}
_TEXT = {"set_name"}
_DERIVED = 0b11  # NF_NAT_RANGE_MAP_IPS, NF_NAT_RANGE_PROTO_SPECIFIED


def encode(expression: Expression) -> bytes:
    """The list element for NFTA_RULE_EXPRESSIONS.

    Raises:
        ValueError: an :class:`Opaque`; those are read, never written.
    """
    match expression:
        case Opaque(name, _):
            raise ValueError(f"cannot write an unknown expression {name!r}")
        case Verdict(code, chain):
            verdict = [be32(VERDICT_CODE, code)]
            if chain:
                verdict.append(text(VERDICT_CHAIN, chain))
            data = [be32(1, 0), nest(2, nest(DATA_VERDICT, *verdict))]
            return nest(LIST_ELEMENT, text(EXPR_NAME, "immediate"), nest(EXPR_DATA, *data))
        case _:
            layout = _LAYOUTS[type(expression)]
            data = []
            for name, number in layout.numbers.items():
                value = getattr(expression, name)
                if value is None:
                    continue
                if name in _BYTES:
                    data.append(nest(number, attribute(DATA_VALUE, value)))
                elif name in _TEXT:
                    data.append(text(number, value))
                else:
                    data.append(be32(number, value))
            return nest(LIST_ELEMENT, text(EXPR_NAME, layout.name), nest(EXPR_DATA, *data))


def decode_list(payload: bytes) -> Phrase:
    """NFTA_RULE_EXPRESSIONS -> the phrase.

    Raises:
        MalformedDump: the attributes contradict their lengths.
    """
    return tuple(_decode(element) for _, element in attributes(payload))


def _decode(element: bytes) -> Expression:
    parts = attribute_map(element)
    name = read_text(parts.get(EXPR_NAME, b""))
    data = parts.get(EXPR_DATA, b"")
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
            if set(inner) != {DATA_VALUE}:
                return Opaque(name, data)
            values[field_name] = inner[DATA_VALUE]
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
    # A default is for writing; a dump that leaves out, say, the register of a compare is not ours.
    optional = {"flags", "dreg", "sreg", "reg_port", "reg_addr", "reg_addr_min", "reg_addr_max"}
    optional |= {"reg_proto_min", "reg_proto_max"}
    if any(name not in optional for name in missing):
        raise TypeError(missing)
    expression: Expression = cls(**values)
    return expression


def _verdict(found: dict[int, bytes]) -> Verdict | None:
    inner = attribute_map(found.get(2, b""))
    if DATA_VERDICT not in inner:
        return None
    verdict = attribute_map(inner[DATA_VERDICT])
    if VERDICT_CODE not in verdict:
        raise MalformedDump(inner[DATA_VERDICT])
    code = read_be32(verdict[VERDICT_CODE])
    return Verdict(code - (1 << 32) if code >> 31 else code, read_text(verdict.get(VERDICT_CHAIN, b"")))
