"""Writes protobuf messages as JSON, byte for byte in the style of Envoy's admin interface.

The style has snake_case names, fields in the order of their numbers, no default values, ``@type`` first inside
``Any``, 64-bit integers as strings, one space of indentation, ``<`` and ``>`` as ``\\u003c`` and ``\\u003e``, a
newline at the end. Maps have no order on the wire. Here they are sorted by key, so that equal messages give equal
text.

Two additions show bytes that have no name, instead of hiding them:

* an ``Any`` whose type is unknown, or whose bytes do not parse, prints as
  ``{"@type": <type URL>, "@bytes": <base64>}`` (read back by :mod:`xds.proto.json`);
* unknown fields are printed last, as ``"@unknown": ["<number>:<kind>:<value>", ...]`` with the kinds ``varint``,
  ``fixed64``, ``bytes`` (base64), ``group`` (its fields in parentheses) and ``fixed32``.
"""

import base64
import json
import math
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from xds.proto import registry
from xds.proto.json import WRAPPERS, has_value_form, map_entry
from xds.proto.well_known import Any as AnyMessage
from xds.proto.well_known import Duration, FieldMask, ListValue, Struct, Timestamp, Value

JsonValue = dict[str, "JsonValue"] | list["JsonValue"] | str | int | float | bool | None

REDACTED = "[redacted]"

_TLS = "envoy.extensions.transport_sockets.tls.v3."
#: Fields whose whole content is secret, wherever the message is nested.
_SENSITIVE = frozenset(
    _TLS + name
    for name in (
        "TlsCertificate.private_key",
        "TlsCertificate.password",
        "TlsCertificate.pkcs12",
        "TlsSessionTicketKeys.keys",
        "GenericSecret.secret",
        "GenericSecret.secrets",
    )
)

_64_BIT = frozenset((FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64))
_WIRE_KINDS = {0: "varint", 1: "fixed64", 2: "bytes", 3: "group", 5: "fixed32"}


def to_json(message: Message, *, redact: bool = False) -> str:
    """Return the text of a dump; see :func:`to_dict` for ``redact``."""
    return format_json(to_dict(message, redact=redact))


def format_json(value: object) -> str:
    """Return plain values in the layout of Envoy's dumps."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    # Both characters occur inside strings only.
    return text.replace("<", "\\u003c").replace(">", "\\u003e") + "\n"


def to_dict(message: Message, *, redact: bool = False) -> Any:
    """Return the JSON form of ``message``: a dictionary, or a single value for types such as wrappers and
    durations.

    Args:
        redact: replace every string and byte field of private keys, passwords, session ticket keys and
            generic secrets by ``[redacted]``, also inside ``Any``. Unknown fields of TLS messages are redacted,
            too.
    """
    return _Writer(redact).message(message, secret=False)


class _Writer:
    def __init__(self, redact: bool) -> None:
        self._redact = redact

    def message(self, message: Message, *, secret: bool) -> JsonValue:
        if message.DESCRIPTOR.file.name.startswith("google/protobuf/"):
            match message:
                case AnyMessage():
                    return self.any(message)
                case Struct():
                    return {
                        key: self.message(message.fields[key], secret=secret) for key in sorted(message.fields)
                    }
                case ListValue():
                    return [self.message(item, secret=secret) for item in message.values]
                case Value():
                    return self.value(message, secret)
                case Duration() | Timestamp() | FieldMask():
                    try:
                        return message.ToJsonString()
                    except ValueError:  # seconds out of the documented range: show the fields
                        return self.fields(message, secret)
            if message.DESCRIPTOR.full_name in WRAPPERS:
                field = cast(FieldDescriptor, message.DESCRIPTOR.fields_by_name["value"])
                return self.scalar(field, getattr(message, "value"), secret)  # noqa: B009
        return self.fields(message, secret)

    def fields(self, message: Message, secret: bool) -> dict[str, JsonValue]:
        result: dict[str, JsonValue] = {}
        for field, value in message.ListFields():  # sorted by number
            entry = map_entry(field)
            hidden = secret or (self._redact and field.full_name in _SENSITIVE)
            if field.type != FieldDescriptor.TYPE_MESSAGE:
                if field.is_repeated:
                    result[field.name] = [self.scalar(field, item, hidden) for item in value]
                else:
                    result[field.name] = self.scalar(field, value, hidden)
            elif entry is not None:
                item_field = entry.fields_by_name["value"]
                result[field.name] = {
                    _map_key(key): self.message(value[key], secret=hidden)
                    if item_field.type == FieldDescriptor.TYPE_MESSAGE
                    else self.scalar(item_field, value[key], hidden)
                    for key in sorted(value)
                }
            elif field.is_repeated:
                result[field.name] = [self.message(item, secret=hidden) for item in value]
            else:
                result[field.name] = self.message(value, secret=hidden)
        unknown = UnknownFieldSet(message)
        if len(unknown):
            if secret or (self._redact and message.DESCRIPTOR.full_name.startswith(_TLS)):
                result["@unknown"] = [REDACTED]
            else:
                result["@unknown"] = list(_unknown(unknown))
        return result

    def scalar(self, field: FieldDescriptor, value: Any, secret: bool) -> JsonValue:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return _base64(REDACTED.encode() if secret else value)
            return REDACTED if secret else str(value)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            named = field.enum_type.values_by_number.get(value) if field.enum_type is not None else None
            return named.name if named is not None else int(value)
        if kind in _64_BIT:
            return str(value)
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return _number(value)
        return bool(value) if kind == FieldDescriptor.CPPTYPE_BOOL else int(value)

    def any(self, message: AnyMessage) -> JsonValue:
        if not message.type_url:
            return {}
        try:
            inner = registry.unpack(message)
        except (registry.UnknownType, registry.MalformedMessage):
            return {"@type": message.type_url, "@bytes": _base64(message.value)}
        shown = self.message(inner, secret=False)
        if has_value_form(inner) or not isinstance(shown, dict):
            return {"@type": message.type_url, "value": shown}
        return {"@type": message.type_url, **shown}

    def value(self, message: Value, secret: bool) -> JsonValue:
        match message.WhichOneof("kind"):
            case "bool_value":
                return message.bool_value
            case "number_value":
                return _number(message.number_value)
            case "string_value":
                return REDACTED if secret else message.string_value
            case "struct_value":
                return self.message(message.struct_value, secret=secret)
            case "list_value":
                return self.message(message.list_value, secret=secret)
            case _:
                return None


def _number(value: float) -> JsonValue:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    # C++ prints integral doubles without a fraction; from 1e15 on it changes to exponents, as Python does.
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _map_key(key: object) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unknown(fields: UnknownFieldSet) -> list[str]:
    return [_unknown_field(fields[index]) for index in range(len(fields))]


def _unknown_field(field: Any) -> str:
    kind = _WIRE_KINDS.get(field.wire_type, str(field.wire_type))
    if kind == "bytes":
        shown = _base64(field.data)
    elif kind == "group":
        shown = f"({' '.join(_unknown(field.data))})"
    else:
        shown = str(field.data)
    return f"{field.field_number}:{kind}:{shown}"
