"""Reads JSON and YAML into protobuf messages by Envoy's rules for its configuration.

Field names are accepted in snake_case and lowerCamelCase, enums by number or by name in any case, numbers and
booleans also as strings, one element in place of a list, wrappers as bare values or as ``{value: N}``, durations
as ``5s`` or as ``{seconds: 5}``, ``Any`` as an object with ``@type``. A differential test compares each form with
Envoy. This module exists because of four differences from protobuf's own JSON reader:

* errors name the place: ``resources[0].filter_chains[1].filters[0].typed_config.stat_prefix: ...``;
* fields that our message type lacks are omitted and *reported* with a reason (:attr:`Parsed.unknown_fields`), so
  that callers refuse fields that Envoy would obey (see :mod:`xds.proto.unknown`);
* all faults of a document can be listed, not just the first (``faults``);
* an ``Any`` of an unknown type becomes an ``Any`` of ``xds.type.v3.TypedStruct``, which is made for this purpose.
  So an unknown extension causes only its resource to be refused, not the whole file.

:mod:`xds.proto.dump` writes messages as JSON. This module also reads its ``@bytes`` form of unknown types.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from xds.errors import ConfigError
from xds.proto import registry
from xds.proto.unknown import UnknownField, reason_for
from xds.proto.well_known import Any as AnyMessage
from xds.proto.well_known import Duration, FieldMask, ListValue, Struct, Timestamp, Value
from xds.proto.xds.type.v3.type_pb2 import TypedStruct

#: The nesting limit, the same as protobuf's. Envoy's configuration stays below 40, but YAML aliases can nest
#: without end.
MAX_DEPTH = 100

WRAPPERS = frozenset(
    f"google.protobuf.{kind}Value"
    for kind in ("Bool", "Bytes", "Double", "Float", "Int32", "Int64", "String", "UInt32", "UInt64")
)

#: The texts that absl's parser of booleans accepts, in any case.
_BOOLEANS = {"true": True, "t": True, "yes": True, "y": True, "1": True}
_BOOLEANS |= {"false": False, "f": False, "no": False, "n": False, "0": False}
_DURATION = re.compile(r"-?[0-9]+(\.[0-9]{1,9})?s", re.ASCII)
_DECIMAL = re.compile(r"[-+]?[0-9]+", re.ASCII)
_HEXADECIMAL = re.compile(r"[-+]?0[xX][0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
_LONGEST_NUMBER = 64

_M = TypeVar("_M", bound=Message)

_INTEGER_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(Generic[_M]):
    """A message, and the parts of its text that it cannot hold.

    Attributes:
        unknown_fields: fields that our message type lacks, except harmless ones.
        unknown_types: path and type URL of each ``Any`` that became a ``TypedStruct``.
    """

    message: _M
    unknown_fields: tuple[UnknownField, ...] = ()
    unknown_types: tuple[tuple[str, str], ...] = ()


def parse_text(
    text: str, message_type: type[_M], *, name: str = "", faults: list[ConfigError] | None = None
) -> Parsed[_M]:
    """Read one JSON or YAML document.

    Args:
        text: the document.
        message_type: the type of the result.
        name: the document's file. A file named ``.yaml`` or ``.yml`` is read as YAML, even if it could be JSON.
        faults: a list that gets the errors of all bad values, which are omitted from the result. None raises the
            first error.

    Raises:
        ConfigError: the text is neither JSON nor YAML, or does not fit the message type.
    """
    return parse_value(_load_as_envoy(text, name), message_type, faults=faults)


def parse_value(
    value: object, message_type: type[_M], *, path: str = "", faults: list[ConfigError] | None = None
) -> Parsed[_M]:
    """Read a value that :func:`load` returned. ``path`` is the prefix of paths in errors and reports.

    Raises:
        ConfigError: ``value`` does not fit.
    """
    reader = _Reader(faults)
    message = message_type()
    with reader.noting():
        reader.message(message, value, path, 0)
    registry.normalise(message)
    return Parsed(
        message=message,
        unknown_fields=tuple(reader.unknown_fields),
        unknown_types=tuple(reader.unknown_types),
    )


# ---------------------------------------------------------------------- text -> plain values


def load(text: str) -> object:
    """Return the plain values of a JSON or YAML document.

    YAML is read by version 1.2 and with the types of JSON: ``no``, ``12:30`` and dates are strings, and mapping
    keys are always text.

    Raises:
        ConfigError: a syntax error, with line and column.
    """
    if text.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(text)
            if "\\u" in text:
                json.dumps(value, ensure_ascii=False).encode()
            return value
        except json.JSONDecodeError as error:
            json_error = error
        except UnicodeEncodeError:
            raise ConfigError("not valid Unicode: a lone surrogate") from None
        except ValueError as error:  # an integer of 5,000 digits
            raise ConfigError(f"not valid JSON: {error}") from None
        except RecursionError:
            raise ConfigError("nested too deeply") from None
        try:
            return _load_yaml(text)  # flow style YAML also starts with a bracket
        except ConfigError:
            raise ConfigError(f"not valid JSON: {json_error}") from None
    return _load_yaml(text)


def _load_as_envoy(text: str, name: str) -> object:
    if text.lstrip().startswith(("{", "[")) and not name.endswith((".yaml", ".yml")):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            json_error = error
        except ValueError as error:  # an integer of 5,000 digits
            raise ConfigError(f"not valid JSON: {error}") from None
        except RecursionError:
            raise ConfigError("nested too deeply") from None
        try:
            return _load_envoy_yaml(text)  # flow style
        except ConfigError:
            raise ConfigError(f"not valid JSON: {json_error}") from None
    return _load_envoy_yaml(text)


def _load_envoy_yaml(text: str) -> object:
    from xds.proto import envoy_yaml  # configuration that comes over gRPC has no need of it: 1 MiB

    return envoy_yaml.load(text)


def _load_yaml(text: str) -> object:
    from xds.proto import core_yaml  # configuration that comes over gRPC has no need of it: 1 MiB

    return core_yaml.load(text)


# ---------------------------------------------------------------------- plain values -> message


@cache
def _fields_by_name(descriptor: Descriptor) -> dict[str, FieldDescriptor]:
    fields = {field.json_name: field for field in descriptor.fields}
    fields.update({field.name: field for field in descriptor.fields})
    return fields


def map_entry(field: FieldDescriptor) -> Descriptor | None:
    """Return the entry type (fields ``key`` and ``value``) of a map field, None for other fields."""
    entry = field.message_type
    return entry if entry is not None and entry.has_options and entry.GetOptions().map_entry else None


def _shown(value: object) -> str:
    if isinstance(value, str | bytes):
        text = repr(value)
    else:
        text = ""
        for piece in json.JSONEncoder(default=str).iterencode(value):  # only the part that is displayed
            text += piece
            if len(text) > 60:
                break
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
        case _:
            return "a list"


class _Reader:
    def __init__(self, faults: list[ConfigError] | None) -> None:
        self.faults = faults
        self.unknown_fields: list[UnknownField] = []
        self.unknown_types: list[tuple[str, str]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record a fault and continue after it, if all faults are requested. Otherwise raise it."""
        try:
            yield
        except ConfigError as error:
            if self.faults is None:
                raise
            self.faults.append(error)

    def message(self, message: Message, value: object, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ConfigError(f"nested more than {MAX_DEPTH} levels deep", path)
        descriptor = message.DESCRIPTOR
        if descriptor.file.name.startswith("google/protobuf/"):
            if descriptor.full_name in WRAPPERS:
                field = cast(FieldDescriptor, descriptor.fields_by_name["value"])
                if isinstance(value, Mapping) and not value.keys() - {"value"}:
                    value, path = value.get("value"), _under(path, "value")
                    if value is None:
                        return
                setattr(message, "value", self.scalar(field, value, path))  # noqa: B010
                return
            if self.well_known(message, value, path, depth):
                return
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"expected an object for {descriptor.full_name}, found {_kind(value)} {_shown(value)}", path
            )
        self.fields(message, value, path, depth)

    def fields(self, message: Message, value: Mapping[Any, object], path: str, depth: int) -> None:
        known = _fields_by_name(message.DESCRIPTOR)
        seen: set[str] = set()
        oneofs: dict[str, str] = {}
        for key, item in value.items():
            if key == "@type":  # it has a meaning only in Any; elsewhere it repeats the field's type
                continue
            field = known.get(str(key))
            if field is None:
                reason = reason_for(message.DESCRIPTOR.full_name, str(key))
                if reason is not None:
                    self.unknown_fields.append(UnknownField(_under(path, str(key)), reason))
                continue
            inner = _under(path, field.name)
            if self.faults is None:
                self.one_field(message, field, key, item, inner, depth, seen, oneofs)
                continue
            with self.noting():
                self.one_field(message, field, key, item, inner, depth, seen, oneofs)

    def one_field(
        self,
        message: Message,
        field: FieldDescriptor,
        key: object,
        item: object,
        path: str,
        depth: int,
        seen: set[str],
        oneofs: dict[str, str],
    ) -> None:
        if item is None and not _takes_null(field):
            return
        if field.name in seen:  # Envoy takes one of them, depending on its hash table
            raise ConfigError(f"given twice, once as {key!r}", path)
        seen.add(field.name)
        oneof = field.containing_oneof
        if oneof is not None:
            if oneof.name in oneofs:
                raise ConfigError(f"only one of {oneofs[oneof.name]!r} and {field.name!r} may be set", path)
            oneofs[oneof.name] = field.name
        self.field(message, field, item, path, depth)

    def field(self, message: Message, field: FieldDescriptor, value: object, path: str, depth: int) -> None:
        entry = map_entry(field)
        if entry is not None:
            self.map(getattr(message, field.name), entry, value, path, depth)
        elif field.is_repeated:
            if not isinstance(value, list | tuple):
                value = [value]
            target = getattr(message, field.name)
            for index, item in enumerate(value):
                inner = f"{path}[{index}]"
                with self.noting():
                    if field.type == FieldDescriptor.TYPE_MESSAGE:
                        self.message(target.add(), item, inner, depth + 1)
                    else:
                        target.append(self.scalar(field, item, inner))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            target = getattr(message, field.name)
            target.SetInParent()
            self.message(target, value, path, depth + 1)
        else:
            setattr(message, field.name, self.scalar(field, value, path))

    def map(self, target: Any, entry: Descriptor, value: object, path: str, depth: int) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"expected an object, found {_kind(value)} {_shown(value)}", path)
        key_field, value_field = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for raw, item in value.items():
            inner = f"{path}[{json.dumps(str(raw), ensure_ascii=False)}]"
            with self.noting():
                key = self.map_key(key_field, raw, inner)
                if value_field.type == FieldDescriptor.TYPE_MESSAGE:
                    if item is None and not _takes_null(value_field):
                        target[key].SetInParent()
                    else:
                        self.message(target[key], item, inner, depth + 1)
                else:
                    target[key] = self.scalar(value_field, item, inner)

    def map_key(self, field: FieldDescriptor, raw: object, path: str) -> object:
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return str(raw)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL and raw in ("true", "false"):
            return raw == "true"
        return self.scalar(field, raw, path)

    # ------------------------------------------------------------------ scalars

    def scalar(self, field: FieldDescriptor, value: object, path: str) -> Any:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            if isinstance(value, bool):
                return value
            if isinstance(value, str) and (known := _BOOLEANS.get(value.lower())) is not None:
                return known
            raise ConfigError(f"expected true or false, found {_shown(value)}", path)
        if kind == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return _bytes(value, path)
            return _string(value, path)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return _enum(field.enum_type, value, path)
        if kind in _INTEGER_RANGES:
            low, high = _INTEGER_RANGES[kind]
            return _integer(value, low, high, path)
        return _float(value, path)

    # ------------------------------------------------------------------ well-known types

    def well_known(self, message: Message, value: object, path: str, depth: int) -> bool:
        """Fill ``message`` if its type has a special JSON form. Return False for an ordinary message."""
        match message:
            case AnyMessage():
                self.any(message, value, path, depth)
            case Struct():
                self.struct(message, value, path, depth)
            case Value():
                self.value(message, value, path, depth)
            case ListValue():
                self.list_value(message, value, path, depth)
            case Duration() | Timestamp() if isinstance(value, Mapping):
                return False
            case Duration() | Timestamp() | FieldMask():
                text = _string(value, path)
                try:
                    if isinstance(message, Duration) and not _DURATION.fullmatch(text):
                        raise ValueError
                    message.FromJsonString(text)
                except (ValueError, OverflowError):
                    example = {"Duration": "2s or 0.250s", "Timestamp": "2022-09-07T12:00:00Z"}.get(
                        message.DESCRIPTOR.name, "a.b,c"
                    )
                    raise ConfigError(f"expected a value such as {example}, found {_shown(text)}", path) from None
            case _:
                return False
        return True

    def any(self, message: AnyMessage, value: object, path: str, depth: int) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"expected an object with @type, found {_kind(value)} {_shown(value)}", path)
        if not value:
            return
        type_url = value.get("@type")
        if not isinstance(type_url, str) or not type_url:
            raise ConfigError("an Any needs @type", path)
        if "/" not in type_url[1:]:
            raise ConfigError(
                f"expected @type with a slash, such as type.googleapis.com/..., found {type_url!r}", path
            )
        if "@bytes" in value:
            message.type_url, message.value = type_url, _bytes(value["@bytes"], _under(path, "@bytes"))
            return
        try:
            inner = registry.message_for(type_url)()
        except registry.UnknownType:
            self.unknown_types.append((path, type_url))
            stand_in = TypedStruct(type_url=type_url)
            plain = {key: item for key, item in value.items() if key != "@type"}
            self.struct(stand_in.value, plain, path, depth + 1)
            message.CopyFrom(registry.pack(stand_in))
            return
        if has_value_form(inner):
            if "value" not in value:
                raise ConfigError(f"{inner.DESCRIPTOR.full_name} in an Any needs the field value", path)
            self.message(inner, value["value"], _under(path, "value"), depth + 1)
        else:
            self.message(inner, value, path, depth + 1)
        registry.normalise(inner)
        message.value = inner.SerializeToString(deterministic=True)
        message.type_url = type_url

    def struct(self, message: Struct, value: object, path: str, depth: int) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"expected an object, found {_kind(value)} {_shown(value)}", path)
        for key, item in value.items():
            self.value(message.fields[str(key)], item, f"{path}[{json.dumps(str(key))}]", depth + 1)

    def list_value(self, message: ListValue, value: object, path: str, depth: int) -> None:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"expected a list, found {_kind(value)} {_shown(value)}", path)
        for index, item in enumerate(value):
            self.value(message.values.add(), item, f"{path}[{index}]", depth + 1)

    def value(self, message: Value, value: object, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ConfigError(f"nested more than {MAX_DEPTH} levels deep", path)
        match value:
            case None:
                message.null_value = 0  # type: ignore[assignment]  # NullValue.NULL_VALUE
            case bool():
                message.bool_value = value
            case int() | float():
                message.number_value = _float(value, path)
            case str():
                message.string_value = _string(value, path)
            case Mapping():
                message.struct_value.SetInParent()
                self.struct(message.struct_value, value, path, depth)
            case list() | tuple():
                message.list_value.SetInParent()
                self.list_value(message.list_value, value, path, depth)
            case _:
                raise ConfigError(f"no JSON value: {_shown(value)}", path)


def has_value_form(message: Message) -> bool:
    """Return whether the type has a special JSON form, so that an ``Any`` has it under ``value``."""
    name = message.DESCRIPTOR.full_name
    if name in WRAPPERS:
        return True
    return name in {
        f"google.protobuf.{n}"
        for n in ("Any", "Duration", "FieldMask", "ListValue", "Struct", "Timestamp", "Value")
    }


def _takes_null(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.full_name == Value.DESCRIPTOR.full_name


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"expected a string, found {_kind(value)} {_shown(value)}", path)
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON's \ud800
        raise ConfigError("not valid Unicode: a lone surrogate", path) from None
    return value


def _bytes(value: object, path: str) -> bytes:
    text = _string(value, path).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(f"expected base64, found {_shown(value)}", path) from None


@cache
def _values_by_name(descriptor: EnumDescriptor) -> dict[str, int]:
    return {name.upper(): value.number for name, value in descriptor.values_by_name.items()}


def _enum(descriptor: EnumDescriptor | None, value: object, path: str) -> int:
    assert descriptor is not None, path
    if isinstance(value, str):
        number = _values_by_name(descriptor).get(value.upper())
        if number is not None:
            return number
        digits = value.isascii() and value.isdigit() and len(value) <= _LONGEST_NUMBER
        if digits and int(value) in descriptor.values_by_number:
            return int(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Numbers without a name are kept, as on the wire (proto3 enums are open).
        return _integer(value, *_INTEGER_RANGES[FieldDescriptor.CPPTYPE_INT32], path)
    names = ", ".join(descriptor.values_by_name)
    raise ConfigError(f"expected one of {names}, found {_shown(value)}", path)


def _integer(value: object, low: int, high: int, path: str) -> int:
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    elif isinstance(value, str) and len(value) <= _LONGEST_NUMBER:
        number = _integer_in(value)
    if number is None:
        raise ConfigError(f"expected an integer, found {_kind(value)} {_shown(value)}", path)
    if not low <= number <= high:
        raise ConfigError(f"expected an integer from {low} to {high}, found {number}", path)
    return number


def _integer_in(text: str) -> int | None:
    """Return the integer in a text: decimal, hexadecimal, or a float without a fraction."""
    if _HEXADECIMAL.fullmatch(text):
        return int(text, 16)
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and (number := float(text)).is_integer():
        return int(number)
    return None


def _float(value: object, path: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError("number out of range", path) from None
    if isinstance(value, str):
        special = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
        if value in special:
            return special[value]
        if _HEXADECIMAL.fullmatch(value) and len(value) <= _LONGEST_NUMBER:
            return float(int(value, 16))
        if _FLOAT.fullmatch(value):
            return float(value)
    raise ConfigError(f"expected a number, found {_kind(value)} {_shown(value)}", path)
