"""Finds the fields of a message that our version of its type lacks, and reports them by name.

Our message types have only the fields that we read, and protobuf silently keeps unknown fields. A field that is
set but not supported must be refused, so this module checks every message before it is compiled. The names come
from ``missing_fields.txt`` (see :mod:`xds.proto.generate`). The error for a field without a name shows its number.

``Any`` fields stay packed. The code that unpacks one checks the message inside.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from xds.proto import registry
from xds.proto.well_known import Any as AnyMessage

#: Unknown fields that are allowed, because they have no effect on this proxy, with the reason.
HARMLESS = {
    "envoy.config.route.v3.Route.stat_prefix": "names statistics of a route, which are not kept",
    "envoy.config.route.v3.RouteConfiguration.metadata": "a description for the control plane and for logs",
}


@dataclass(frozen=True, slots=True)
class UnknownField:
    """A field that is set in a message but missing in our message type.

    Attributes:
        path: the path from the checked message, such as ``virtual_hosts[0].routes[1].match.runtime_fraction``.
        reason: why the field is refused.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


@cache
def missing_fields() -> dict[str, dict[int, str]]:
    """Return the fields of Envoy's messages that ours lack: message name -> number -> field name."""
    table: dict[str, dict[int, str]] = {}
    for line in Path(__file__).with_name("missing_fields.txt").read_text().splitlines():
        if not line.startswith("#"):
            message, *fields = line.split(" ")
            pairs = (field.split("=") for field in fields)
            table[message] = {int(number): name for number, name in pairs}
    return table


def unknown_fields(message: Message, packed: AnyMessage | None = None) -> list[UnknownField]:
    """Return every unknown field of a message and of the messages nested in it, except in packed ones.

    Harmless fields are removed from ``message`` and not returned. A message without unknown fields is only
    serialised, not traversed.

    Args:
        message: the message.
        packed: the packed form of the message. If its encoding is deterministic, like that of control planes, this
            function takes half of the time.
    """
    # protobuf drops unknown fields recursively, in C. If the message gets shorter, it had some. Traversing every
    # message in Python would take longer than compiling it.
    if packed is not None:
        message.DiscardUnknownFields()
        if message.SerializeToString(deterministic=True) == packed.value:
            return []
        message.CopyFrom(registry.unpack(packed))
    before = message.SerializeToString()
    message.DiscardUnknownFields()
    if message.ByteSize() == len(before):
        return []
    original = type(message)()
    original.ParseFromString(before)
    found = list(_walk(original, ""))
    if found:
        message.ParseFromString(before)
    return found


def reason_for(message: str, name: str) -> str | None:
    """Return why the field ``name`` of ``message`` (a full name) is refused; ``None``: it is harmless."""
    name = re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name)  # JSON's own spelling
    if f"{message}.{name}" in HARMLESS:
        return None
    return _NOT_SUPPORTED if name in missing_fields().get(message, {}).values() else _NO_SUCH_FIELD


_NOT_SUPPORTED = "this proxy does not support this field"
_NO_SUCH_FIELD = "no such field"


def _walk(message: Message, path: str) -> Iterator[UnknownField]:
    descriptor = message.DESCRIPTOR
    unknown = UnknownFieldSet(message)
    if len(unknown):
        names = missing_fields().get(descriptor.full_name, {})
        for number in sorted({unknown[index].field_number for index in range(len(unknown))}):
            if number in descriptor.fields_by_number:
                name = descriptor.fields_by_number[number].name
                yield UnknownField(_under(path, name), "malformed: another wire type than this field has")
            elif number not in names:
                yield UnknownField(path, f"unknown field number {number} of {descriptor.full_name}")
            elif f"{descriptor.full_name}.{names[number]}" not in HARMLESS:
                yield UnknownField(_under(path, names[number]), _NOT_SUPPORTED)
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        inner = _under(path, field.name)
        for step, item in _items(field, value):
            yield from _walk(item, f"{inner}{step}")


def _items(field: FieldDescriptor, value: Any) -> Iterator[tuple[str, Message]]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        if entry.fields_by_name["value"].type == FieldDescriptor.TYPE_MESSAGE:
            for key in value:
                yield f"[{key!r}]", value[key]
    elif field.is_repeated:
        for index, item in enumerate(value):
            yield f"[{index}]", item
    else:
        yield "", value


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
