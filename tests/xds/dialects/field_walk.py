"""Set every field of every message inside some resources, one at a time, and record the compiler's result.

Each resource is valid and contains as many kinds of messages as possible. The result for a field:

``refused``
    The compiler reports that it is not supported.
``obeyed``
    The compiled value differs, or the field's value was checked and found wrong.
``ignored``
    The compiled value is the same. Such a field must be known to have no effect.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from xds.errors import ConfigError, Unsupported
from xds.proto import registry
from xds.proto.json import WRAPPERS
from xds.proto.well_known import Any as AnyMessage

Compile = Callable[[Any], object]
#: One step from a message to a message in it: a field, and an index or key if it has one.
Step = tuple[str, int | str | None]
#: Parts of compiled values that are the message itself or its digest.
_VERBATIM = (
    "Listener.content",
    "FilterChain.content",
    "Cluster.content",
    "BootstrapConfig.message",
    "GrpcTarget.cluster",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one field. ``result`` can also be an exception that no compiler may raise.

    Attributes:
        site: the message and field that contain it; a message can be obeyed in one place and not in another.
        inner: the type of the empty message that it was set to. Empty for other fields.
    """

    site: str
    message: str
    field: str
    result: str
    inner: str = ""


def walk(root: Message, compile_it: Compile) -> Iterator[Outcome]:
    """Yield an outcome for each field of the messages in ``root``, once for each site of a type of message."""
    unchanged = comparable(compile_it(_copy(root)))
    seen: set[tuple[str, str]] = set()
    for path, message in _messages(root, ()):
        descriptor = message.DESCRIPTOR
        site = "/".join(name for name, _ in path[-2:])
        if (site, descriptor.full_name) in seen or descriptor.full_name.startswith("google.protobuf."):
            continue
        seen.add((site, descriptor.full_name))
        for field in descriptor.fields:
            if _is_present(message, field):
                continue  # its parts are walked themselves
            results = [_outcome(root, path, partial(_set, field=field), compile_it, unchanged)]
            if field.message_type is not None and field.message_type.full_name == "google.protobuf.BoolValue":
                # One of the two values is the default. The field's reader determines which one.
                results.append(_outcome(root, path, partial(_set_false, field=field), compile_it, unchanged))
            result = next((each for each in results if each != "ignored"), "ignored")
            inner = "" if field.message_type is None else field.message_type.full_name
            yield Outcome(site, descriptor.full_name, field.name, result, inner)


def kinds_in(root: Message) -> set[str]:
    """Return the types of the messages inside ``root``, its own among them."""
    return {message.DESCRIPTOR.full_name for _, message in _messages(root, ())}


def _is_present(message: Message, field: FieldDescriptor) -> bool:
    kind = field.message_type
    if kind is None or (kind.full_name.startswith("google.protobuf.") and not kind.full_name.endswith(".Any")):
        return False
    return bool(getattr(message, field.name)) if field.is_repeated else message.HasField(field.name)


def _outcome(
    root: Message,
    path: tuple[Step, ...],
    change: Callable[[Message], None],
    compile_it: Compile,
    unchanged: object,
) -> str:
    changed = _copy(root)
    _edit(changed, path, change)
    try:
        compiled = compile_it(changed)
    except Unsupported:
        return "refused"
    except ConfigError:
        return "obeyed"
    except Exception as error:  # noqa: BLE001  the finding
        return f"{type(error).__name__}: {error}"
    return "ignored" if comparable(compiled) == unchanged else "obeyed"


def comparable(value: object) -> object:
    """Return a compiled value as plain tuples, without what is verbatim in it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, [
            (field.name, comparable(getattr(value, field.name)))
            for field in dataclasses.fields(value)
            if f"{type(value).__name__}.{field.name}" not in _VERBATIM
        ]
    if callable(value):
        return None  # a reader made from the fields beside it
    if isinstance(value, Mapping):
        return [(key, comparable(value[key])) for key in value]
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    return value


def _copy(message: Message) -> Message:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _messages(message: Message, path: tuple[Step, ...]) -> Iterator[tuple[tuple[Step, ...], Message]]:
    if isinstance(message, AnyMessage):
        yield from _messages(registry.unpack(message), path)
        return
    yield path, message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for at, inner in _items(field, value):
                yield from _messages(inner, (*path, (field.name, at)))


def _items(field: FieldDescriptor, value: Any) -> Iterator[tuple[int | str | None, Message]]:
    entry = field.message_type
    assert entry is not None
    if entry.GetOptions().map_entry:
        if entry.fields_by_name["value"].type == FieldDescriptor.TYPE_MESSAGE:
            yield from ((key, value[key]) for key in value)
    elif field.is_repeated:
        yield from enumerate(value)
    else:
        yield None, value


def _edit(message: Message, path: tuple[Step, ...], change: Callable[[Message], None]) -> None:
    if isinstance(message, AnyMessage):
        inner = registry.unpack(message)
        _edit(inner, path, change)
        message.CopyFrom(registry.pack(inner))
    elif not path:
        change(message)
    else:
        (name, at), *rest = path
        value = getattr(message, name)
        _edit(value if at is None else value[at], tuple(rest), change)


def _set(message: Message, field: FieldDescriptor) -> None:
    """Set a field to a value other than its default and its current value."""
    value: Any = getattr(message, field.name)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        if entry.fields_by_name["value"].type == FieldDescriptor.TYPE_MESSAGE:
            value["x"].SetInParent()
        else:
            value["x"] = "x"
    elif field.is_repeated:
        if entry is not None:
            value.add()
        else:
            value.append(_scalar(field, None))
    elif entry is not None:
        if entry.full_name in WRAPPERS:
            value.value = _scalar(value.DESCRIPTOR.fields_by_name["value"], value.value)
        elif entry.full_name == "google.protobuf.Duration":
            value.seconds += 3
        elif entry.full_name == "google.protobuf.Struct":
            value["k"] = "v"
        elif entry.full_name == "envoy.config.core.v3.Metadata":
            value.filter_metadata["envoy.lb"]["k"] = "v"
        value.SetInParent()
    else:
        setattr(message, field.name, _scalar(field, value))


def _set_false(message: Message, field: FieldDescriptor) -> None:
    value = getattr(message, field.name)
    value.value = False
    value.SetInParent()


def _scalar(field: FieldDescriptor, old: Any) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return not old
        case FieldDescriptor.CPPTYPE_STRING:
            return b"x" if field.type == FieldDescriptor.TYPE_BYTES else f"{old or ''}x"
        case FieldDescriptor.CPPTYPE_ENUM:
            return 99  # proto3's enums are open: a value of a later version arrives like this
        case _:
            return (old or 0) + 7
