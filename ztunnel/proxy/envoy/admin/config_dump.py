"""Makes ``/config_dump``: selects messages (``resource``, ``mask``, ``name_regex``, ``include_eds``), prints JSON.

The page is made element by element, because the dump of a large mesh takes seconds: see :func:`pieces`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from xds.model.re2 import Pattern, Re2Error
from xds.proto import registry
from xds.proto.dump import format_json, to_dict
from xds.proto.well_known import Any as AnyMessage
from xds.proto.well_known import FieldMask
from ztunnel.proxy.envoy.admin import dump
from ztunnel.proxy.envoy.admin.dump import Dump
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.runtime.http.page import JSON, PLAIN, Deferred, Page, Piece, Query, text

#: Elements whose encoding is longer than this are printed in a thread. Printing 32 KiB takes about 10 ms.
_LARGE_BYTES = 16 * 1024


class Refused(Exception):
    """The request's parameters are invalid. The exception contains the error page to answer with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message


def page(proxy: InspectedProxy, query: Query) -> Page:
    """Return the answer to a request for ``/config_dump``."""
    try:
        shown = _name_filter(query.get("name_regex"))
        dumps = dump.dumps(proxy, include_eds="include_eds" in query, shown=shown)
        resource, mask = query.get("resource"), query.get("mask")
        selected: Iterable[Dump] = dumps
        if resource is not None:
            elements = _elements(dumps, resource)
            if mask is not None:
                elements = [_masked_element(element, mask) for element in elements]
            selected = map(Dump, elements)
        elif mask is not None:
            selected = map(Dump, _masked(dumps, mask))
    except Refused as refused:
        return text(refused.message, refused.status, PLAIN)
    return Page(content_type=JSON, body=pieces(selected))


def _name_filter(expression: str | None) -> dump.Shown:
    if expression is None:
        return dump.everything
    try:
        return Pattern(expression).fullmatch
    except Re2Error as error:
        raise Refused(
            400, f"INVALID_ARGUMENT: Error while parsing name_regex from {expression}: {error}"
        ) from None


# Selection


def _elements(dumps: Iterable[Dump], name: str) -> Iterable[Message]:
    """Return the elements of the repeated field ``name``, from the dump that has this field."""
    for each in dumps:
        field = each.message.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            continue
        if not field.is_repeated:
            raise Refused(400, f"{name} is not a repeated field. Use ?mask={name} to get only this field")
        return dict(each.lists).get(name) or list(getattr(each.message, name))
    raise Refused(404, f"{name} not found in config dump")


def _fits(mask: FieldMask, message: Message) -> bool:
    # protobuf's type stubs declare two descriptor classes. At run time there is only one, hence the cast.
    return mask.IsValidForDescriptor(cast(Descriptor, message.DESCRIPTOR))


def _mask_of(paths: Iterable[str]) -> FieldMask:
    return FieldMask(paths=list(paths))


def _masked(dumps: Iterable[Dump], mask: str) -> list[Message]:
    """Return the dumps that have all paths of the field mask, reduced to these paths."""
    fields = _mask_of(mask.split(","))
    found = [_trimmed(each.complete(), fields) for each in dumps if _fits(fields, each.message)]
    if not found:
        raise Refused(400, f"FieldMask {mask} could not be successfully applied to any configs.")
    return found


def _trimmed(message: Message, mask: FieldMask) -> Message:
    result = type(message)()
    mask.MergeMessage(message, result)
    return result


def _masked_element(element: Message, mask: str) -> Message:
    """Return an element reduced to the field mask, whose paths can lead into an ``Any`` (``cluster.name``)."""
    outer: list[str] = []
    inner: dict[str, list[str]] = {}
    for path in mask.split(","):
        first, _, rest = path.partition(".")
        if _is_any(element, first):
            outer.append(first)
            inner.setdefault(first, []).append(rest)
        else:
            outer.append(path)
    fields = _mask_of(outer)
    if not _fits(fields, element):
        raise _unusable(outer)
    result = _trimmed(element, fields)
    for name, paths in inner.items():
        if element.HasField(name) and "" not in paths:
            getattr(result, name).CopyFrom(_masked_any(getattr(element, name), paths))
    return result


def _is_any(message: Message, name: str) -> bool:
    field = message.DESCRIPTOR.fields_by_name.get(name)
    kind = field.message_type if field is not None else None
    return (
        field is not None
        and not field.is_repeated
        and kind is not None
        and kind.full_name == "google.protobuf.Any"
    )


def _masked_any(packed: AnyMessage, paths: list[str]) -> AnyMessage:
    fields = _mask_of(paths)
    try:
        message = registry.unpack(packed)
    except (registry.UnknownType, registry.MalformedMessage):
        raise _unusable(paths) from None
    if not _fits(fields, message):
        raise _unusable(paths)
    return registry.pack(_trimmed(message, fields))


def _unusable(paths: Iterable[str]) -> Refused:
    shown = "".join(f'paths: "{path}"\n' for path in paths)
    return Refused(400, f"FieldMask {shown} could not be successfully used.")


# Printing


def pieces(dumps: Iterable[Dump]) -> Iterator[Piece]:
    """Yield the JSON text of a ``ConfigDump`` in pieces.

    Lists are printed element by element. Elements never change once they are in a dump (bodies of resources are
    replaced, never edited), so a thread can print a large element while the proxy serves.
    """
    before = '{\n "configs": [\n'
    for each in dumps:
        yield before
        yield from _typed(each)
        before = ",\n"
    yield "{}\n" if before != ",\n" else "\n ]\n}\n"


def _typed(each: Dump) -> Iterator[Piece]:
    """Yield the JSON text of one element of ``configs`` in pieces, two levels deep."""
    message = each.message
    yield f'  {{\n   "@type": "{registry.type_url(message)}"'
    for field, value in message.ListFields():
        if field.is_repeated and field.message_type is not None:
            yield from _list(field.name, value)
        else:
            yield f',\n   "{field.name}": '
            yield _field(message, field.name)
    for name, elements in each.lists:
        yield from _list(name, elements)
    yield "\n  }"


def _list(name: str, elements: Iterable[Message]) -> Iterator[Piece]:
    before = f',\n   "{name}": [\n'
    for element in elements:
        yield before
        yield _element(element, "    ")
        before = ",\n"
    if before == ",\n":  # an empty list is left out
        yield "\n   ]"


def _element(message: Message, indent: str) -> Piece:
    if message.ByteSize() <= _LARGE_BYTES:
        return indent + _indented(message, indent)
    return Deferred(lambda: indent + _indented(message, indent))


def _indented(message: Message, indent: str) -> str:
    # Every line break can be indented, because JSON escapes line breaks inside strings.
    return format_json(to_dict(message, redact=True)).rstrip("\n").replace("\n", f"\n{indent}")


def _field(message: Message, name: str) -> Piece:
    """Return the JSON of a field that is not a list of messages, printed as the only field of a message."""
    alone = type(message)()
    _mask_of([name]).MergeMessage(message, alone)

    def make() -> str:
        value = to_dict(alone, redact=True)[name]
        return format_json(value).rstrip("\n").replace("\n", "\n   ")

    return make() if alone.ByteSize() <= _LARGE_BYTES else Deferred(make)
