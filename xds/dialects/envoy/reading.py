"""Helpers for all compilers of this dialect: they add paths to errors, refuse fields, and compile common small
messages.
"""

import hashlib
import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from sys import intern
from typing import Any, Generic, TypeVar

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from xds.errors import ConfigError, Unsupported
from xds.model.address import (
    EndpointAddress,
    InternalAddress,
    IpNetwork,
    NamedAddress,
    PipeAddress,
    SocketAddress,
    canonical,
)
from xds.model.format_string import FormatString, parse_format
from xds.model.metadata import NO_METADATA
from xds.model.re2 import Re2Error
from xds.model.string_match import StringMatch, ascii_lower
from xds.model.tls import AdsSource, ConfigSource, FileSource, GrpcSource
from xds.proto import registry
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.type.matcher.v3 import matcher_pb2 as envoy_matcher
from xds.proto.pool import POOL
from xds.proto.udpa.type.v1 import type_pb2 as udpa_type
from xds.proto.unknown import unknown_fields
from xds.proto.well_known import Any as AnyMessage
from xds.proto.well_known import Duration, Struct
from xds.proto.xds.core.v3 import core_pb2 as xds_core
from xds.proto.xds.type.matcher.v3 import matcher_pb2 as xds_matcher
from xds.proto.xds.type.v3 import type_pb2 as xds_type

# Import all message modules now, not during the first update, because most configurations of this dialect need
# them.
registry.import_all()

M = TypeVar("M", bound=Message)
Compiled = TypeVar("Compiled")

#: Equal metadata structs up to this size share one object. "tunnel: h2" has 20 bytes; metadata of a single
#: endpoint has more. A guess.
_SHORT = 64
_TYPED_STRUCTS = (xds_type.TypedStruct, udpa_type.TypedStruct)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The files, environment variables and other values that a configuration message can refer to.

    Attributes:
        read_file: returns the contents of a file, or raises ``OSError``.
        environment: for ``environment_variable`` data sources.
        cluster_id: the cluster's name in baggage (node metadata ``CLUSTER_ID``).
    """

    read_file: Callable[[str], bytes]
    environment: Mapping[str, str]
    cluster_id: str = "Kubernetes"

    def noted(self) -> "tuple[Surroundings, list[str]]":
        """Return a copy of this object, and a list. Whenever the copy reads a file or variable, it adds the name
        to the list.
        """
        asked: list[str] = []

        def read_file(path: str) -> bytes:
            asked.append(path)
            return self.read_file(path)

        return replace(self, read_file=read_file, environment=_Noted(self.environment, asked)), asked


class _Noted(Mapping[str, str]):
    def __init__(self, values: Mapping[str, str], asked: list[str]) -> None:
        self._values = values
        self._asked = asked

    def __getitem__(self, name: str) -> str:
        self._asked.append(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Collector:
    """Collects the faults of one compilation, with their full paths.

    Attributes:
        gaps: the number of omitted faulty parts. A later fault in the same place is not reported, because the
            omission can be its cause ("needs a last filter").
    """

    __slots__ = ("_places", "faults", "gaps")

    def __init__(self) -> None:
        self.faults: list[ConfigError] = []
        self.gaps = 0
        self._places: list[tuple[tuple[str | int, ...], int]] = []

    def enter(self, steps: tuple[str | int, ...]) -> None:
        """Extend the current path by a field, or several steps."""
        self._places.append((steps, self.gaps))

    def add(self, error: ConfigError) -> None:
        """Record an error raised at the current path."""
        for steps, _ in reversed(self._places):
            error = error.under(_path(steps))
        self.faults.append(error)

    def leave(self, error: BaseException | None) -> bool:
        """Leave the current field. ``error`` is the error raised inside, if any.

        Returns:
            Whether compilation continues after this field: after a :class:`ConfigError`, or after another error if
            an omitted part in this field can be its cause.
        """
        _, gaps = self._places[-1]
        goes_on = isinstance(error, ConfigError)
        if isinstance(error, ConfigError):
            if self.gaps == gaps:
                self.add(error)
            self.gaps += 1
        elif isinstance(error, Exception):
            goes_on = self.gaps != gaps
        self._places.pop()
        return goes_on


_collector: _Collector | None = None


def every_fault(compiles: Callable[[], Compiled]) -> tuple[Compiled | None, list[ConfigError]]:
    """Compile, and continue after a faulty part in order to find all faults. Not reentrant.

    This is for checking a configuration. A normal compilation ends at its first fault.

    Returns:
        The result, if there is no fault, and the faults in the order of their places.
    """
    global _collector  # global, because it would otherwise be an argument of every compiler
    assert _collector is None
    _collector = found = _Collector()
    try:
        result = compiles()
    except ConfigError as error:
        if not found.gaps:
            found.faults.append(error)
        return None, found.faults
    except Exception:
        # Other exceptions can follow from an earlier fault, because the compiler's values are then incomplete.
        if not found.faults:
            raise
        return None, found.faults
    finally:
        _collector = None
    return (None if found.faults else result), found.faults


class Shared(Generic[Compiled]):
    """A cache of compiled values, with the messages' bytes as keys. A mesh has thousands of equal messages."""

    def __init__(self, most: int = 256) -> None:  # a guess: control planes send few distinct values
        self._most = most
        self._values: dict[bytes, Compiled] = {}

    def get(self, packed: bytes) -> Compiled | None:
        """Return the cached value for these bytes, or None."""
        return self._values.get(packed)

    def keep(self, packed: bytes, value: Compiled) -> None:
        """Cache a value that depends only on these bytes. During :func:`every_fault`, values can be incomplete and
        are not cached.
        """
        if _collector is None:
            if len(self._values) >= self._most:
                self._values.clear()
            self._values[packed] = value

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()


class Renamed(Shared[Compiled]):
    """A cache of compiled messages that differ in one name only, such as the clusters of a mesh.

    The key of a message is its encoding, but mask bytes replace each occurrence of the name and its length prefix.
    Occurrences are searched from the left. An earlier occurrence that overlaps a field with the name would contain
    the field's tag and length, but :meth:`key` excludes names with these two bytes. If there are no other
    occurrences, all masked bytes are fields with the name. Then messages with equal keys differ only in the masked
    fields, which contain their own names.
    """

    def key(self, packed: bytes, name: str) -> bytes | None:
        """Return the cache key of a message, or ``None`` if the message cannot be cached.

        Args:
            packed: the message's deterministic encoding.
            name: the value of the message's name fields. The tags of these fields are not printable, or ``:``
                (field 7).
        """
        if not (name.isprintable() and name.isascii()) or not 0 < len(name) < 1 << 14 or _MASK in packed:
            return None
        delimited = _delimited(name.encode())
        if delimited.find(b":" + delimited[:1]) >= 0:
            return None
        return packed.replace(delimited, _MASK * len(delimited))

    def keep_named(self, key: bytes | None, name: str, fields: int, value: Compiled) -> None:
        """Cache a value if its message has the name in exactly ``fields`` fields, and nowhere else."""
        if key is not None and key.count(_MASK) == fields * len(_delimited(name.encode())):
            self.keep(key, value)


_MASK = b"\xfe"  # no string contains this byte, and few numbers


def _delimited(raw: bytes) -> bytes:
    """Return the protobuf encoding of a string: the length as a varint of one or two bytes, then the string."""
    size = len(raw)
    return (bytes((size,)) if size < 0x80 else bytes((size & 0x7F | 0x80, size >> 7))) + raw


def with_values(value: Compiled, **changes: object) -> Compiled:
    """Return a copy of a frozen dataclass with slots and without ``__post_init__``.

    :func:`dataclasses.replace` takes four times as long.
    """
    kind: Any = type(value)
    made: Compiled = object.__new__(kind)
    for name, read, write in _members(kind):
        write(made, changes[name] if name in changes else read(value))
    return made


@cache
def _members(kind: Any) -> tuple[tuple[str, Callable[..., Any], Callable[..., None]], ...]:
    assert not hasattr(kind, "__post_init__")
    members = ((field.name, kind.__dict__[field.name]) for field in fields(kind))
    return tuple((name, member.__get__, member.__set__) for name, member in members)


class _At:
    # A class instead of a generator, because it is entered a dozen times per endpoint. Generators took a fifth of
    # the start in a big mesh.
    __slots__ = ("_steps",)

    def __init__(self, steps: tuple[str | int, ...]) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        if _collector is not None:
            _collector.enter(self._steps)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if _collector is not None and _collector.leave(error):
            # The declared return type None is right for all callers that use the result, because errors are
            # swallowed only inside every_fault.
            return True  # type: ignore[return-value]
        if isinstance(error, ConfigError):
            raise error.under(_path(self._steps)) from error.__cause__
        return None


def _path(steps: tuple[str | int, ...]) -> str:
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def at(*steps: str | int) -> _At:
    """Prefix the errors raised inside with a path: ``with at("filters", 0, "typed_config")``."""
    return _At(steps)


def only(message: Message, *names: str) -> None:
    """Refuse any field that is set, except ``names``.

    Raises:
        Unsupported: another field is set. The error names the first.
    """
    others = _others(message.DESCRIPTOR, names)
    if not others:
        return
    for field, _ in message.ListFields():
        if field.name in others:
            _refuse(Unsupported("this proxy does not support this field", field.name))


@cache
def _others(kind: Descriptor, names: tuple[str, ...]) -> frozenset[str]:
    """Return the fields of a message except ``names``. The result is mostly empty, because the generated messages
    contain only fields that this program reads.
    """
    return frozenset(kind.fields_by_name) - frozenset(names)


def _refuse(error: ConfigError) -> None:
    if _collector is None:
        raise error
    _collector.add(error)


def nothing_unknown(message: Message, packed: AnyMessage | None = None) -> None:
    """Refuse fields that our version of a message lacks, at any depth.

    Every compiler of a resource calls this first.

    Args:
        message: the message.
        packed: the packed form that the message was parsed from.

    Raises:
        Unsupported: the message has unknown fields. The error names the first.
    """
    unknown = unknown_fields(message, packed)
    if unknown and _collector is not None:
        for field in unknown:
            _collector.add(Unsupported(field.reason, field.path))
    elif unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise Unsupported(unknown[0].reason + more, unknown[0].path)


def constraint(message: Message, field: str, rule: str) -> ConfigError:
    """Return the error for a violated constraint, in Envoy's wording."""
    camel = "".join(part.capitalize() for part in field.split("_"))
    name = f"{message.DESCRIPTOR.name}ValidationError.{camel}"
    return ConfigError(f"Proto constraint validation failed ({name}: {rule})", field)


def enum_name(message: Message, field: str) -> str:
    """Return the name of an enumeration's value.

    Raises:
        ConfigError: the value has no name. Enumerations of proto3 are open: values from newer versions arrive as
            numbers without a name.
    """
    value = getattr(message, field)
    enum = message.DESCRIPTOR.fields_by_name[field].enum_type
    assert enum is not None
    if value not in enum.values_by_number:
        raise constraint(message, field, "value must be one of the defined enum values")
    return enum.values_by_number[value].name


#: Characters that no name and no value of a header can have.
NEVER_IN_HEADERS = frozenset("\0\r\n")


def required(message: Message, field: str) -> None:
    """Refuse a message whose string ``field`` is empty."""
    if not getattr(message, field):
        raise constraint(message, field, "value length must be at least 1 characters")


def unpack(packed: AnyMessage, name: str) -> Message:
    """Return the message inside a typed config. A ``TypedStruct`` is converted to the message that it represents.

    Raises:
        ConfigError: unknown type (with Envoy's text), malformed bytes, or a field that our version of the type
            lacks.
    """
    try:
        message = registry.unpack(packed)
    except registry.UnknownType:
        raise _unregistered(name, packed.type_url) from None
    except registry.MalformedMessage as error:
        raise ConfigError(str(error)) from None
    if isinstance(message, _TYPED_STRUCTS):
        return _from_struct(message.type_url, message.value, name)
    nothing_unknown(message, packed)
    return message


def _unregistered(name: str, type_url: str) -> Unsupported:
    bare = type_url.rpartition("/")[2]
    return Unsupported(f"Didn't find a registered implementation for '{name}' with type URL: '{bare}'")


def _from_struct(type_url: str, value: Struct, name: str) -> Message:
    try:
        message = registry.message_for(type_url)()
        json_format.ParseDict(json_format.MessageToDict(value), message, descriptor_pool=POOL)
    except registry.UnknownType:
        raise _unregistered(name, type_url) from None
    except json_format.ParseError as error:
        raise ConfigError(str(error)) from None
    return message


def unpack_as(packed: AnyMessage, expected: type[M], name: str) -> M:
    """Return the message inside a typed config like :func:`unpack`, for a field that accepts only one type."""
    message = unpack(packed, name)
    if not isinstance(message, expected):
        raise _unregistered(name, packed.type_url)
    return message


def digest(message: Message) -> str:
    """Return a digest of a message. It includes unknown fields, and is equal for equal messages."""
    return digest_of(message.SerializeToString(deterministic=True))


def digest_of(packed: bytes) -> str:
    """Return the digest of a message, given its deterministic encoding."""
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def seconds(message: Message, field: str, default: float) -> float:
    """Return a duration field in seconds, or ``default`` if the field is not set.

    Raises:
        ConfigError: negative.
    """
    if not message.HasField(field):
        return default
    value = getattr(message, field)
    assert isinstance(value, Duration)
    total = value.seconds + value.nanos / 1e9
    if total < 0:
        raise ConfigError("a duration must not be negative", field)
    return total


def wrapped(message: Message, field: str, default: Any) -> Any:
    """Return the value of a wrapper field such as ``UInt32Value``, or ``default`` if the field is not set."""
    return getattr(message, field).value if message.HasField(field) else default


def network(cidr: core.CidrRange | xds_core.CidrRange) -> IpNetwork:
    """Compile a CIDR range. Bits beyond the prefix are dropped.

    Like in Envoy, an IPv4-mapped range stays an IPv6 range, which contains no IPv4 addresses.

    Raises:
        ConfigError: not an address, or a prefix longer than the address.
    """
    try:
        host = ipaddress.ip_address(cidr.address_prefix)
        return ipaddress.ip_network((host, cidr.prefix_len.value), strict=False)
    except ValueError as error:
        raise ConfigError(f"malformed CIDR {cidr.address_prefix}/{cidr.prefix_len.value}: {error}") from None


def socket_address(address: core.SocketAddress) -> SocketAddress:
    """Compile an address: an IP address and a numeric port.

    Raises:
        ConfigError: a name instead of an address, a named port, UDP, or a namespace.
    """
    _check_socket_address(address)
    try:
        return SocketAddress(canonical(address.address), address.port_value)
    except ValueError:
        raise ConfigError(f"malformed IP address: {address.address}", "address") from None


def _check_socket_address(address: core.SocketAddress) -> None:
    only(address, "protocol", "address", "port_value", "ipv4_compat")
    if address.protocol != core.SocketAddress.TCP:
        raise Unsupported("only TCP is carried", "protocol")
    if address.WhichOneof("port_specifier") is None:
        raise constraint(address, "port_specifier", "value is required")
    if address.port_value > 65535:
        raise constraint(address, "port_value", "value must be less than or equal to 65535")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def endpoint_address(address: core.Address, *, names: bool) -> EndpointAddress:
    """Compile the address of an endpoint. With ``names`` it can be a DNS name, as in STRICT_DNS clusters."""
    kind = address.WhichOneof("address")
    if kind == "socket_address":
        with at("socket_address"):
            found = address.socket_address
            if not names or not found.address or _is_ip(found.address):
                return socket_address(found)
            _check_socket_address(found)
            return NamedAddress(found.address, found.port_value)
    if kind == "envoy_internal_address":
        internal = address.envoy_internal_address
        with at("envoy_internal_address"):
            required(internal, "server_listener_name")
        return InternalAddress(intern(internal.server_listener_name), internal.endpoint_id)
    if kind == "pipe":
        with at("pipe"):
            required(address.pipe, "path")
        return PipeAddress(address.pipe.path)
    raise constraint(address, "address", "value is required")


def string_match(matcher: envoy_matcher.StringMatcher | xds_matcher.StringMatcher) -> StringMatch:
    """Compile a string matcher.

    Raises:
        ConfigError: no pattern, an extension, or a regular expression that does not compile.
    """
    only(matcher, "exact", "prefix", "suffix", "safe_regex", "contains", "ignore_case")
    kind = matcher.WhichOneof("match_pattern")
    if kind is None:
        raise constraint(matcher, "match_pattern", "value is required")
    if kind == "safe_regex":
        return regex_match(matcher.safe_regex.regex)
    value = getattr(matcher, kind)
    if kind != "exact" and not value:
        raise constraint(matcher, kind, "value length must be at least 1 characters")
    return StringMatch(kind, ascii_lower(value) if matcher.ignore_case else value, matcher.ignore_case)


def regex_match(pattern: str) -> StringMatch:
    """Compile a full-match regular expression in RE2's syntax.

    Raises:
        ConfigError: RE2 refuses the expression.
    """
    if not pattern:
        raise ConfigError("regex must not be empty", "safe_regex")
    try:
        return StringMatch("regex", pattern)
    except Re2Error as error:
        raise ConfigError(f"invalid regex '{pattern}': {error}", "safe_regex") from None


def config_source(source: core.ConfigSource) -> ConfigSource:
    """Compile a ``ConfigSource``, which says where resources come from.

    Raises:
        ConfigError: no source is named, or the source is REST.
    """
    only(
        source,
        "path",
        "api_config_source",
        "ads",
        "self",
        "path_config_source",
        "initial_fetch_timeout",
        "resource_api_version",
    )
    only_v3(source, "resource_api_version")
    kind = source.WhichOneof("config_source_specifier")
    if kind == "ads":
        return AdsSource()
    if kind == "path":
        return FileSource(source.path)
    if kind == "path_config_source":
        with at("path_config_source"):
            required(source.path_config_source, "path")
        return FileSource(source.path_config_source.path, source.path_config_source.watched_directory.path)
    if kind == "api_config_source":
        with at("api_config_source"):
            return api_config_source(source.api_config_source)
    if kind == "self":
        return AdsSource()
    raise constraint(source, "config_source_specifier", "value is required")


def only_v3(message: Message, field: str) -> None:
    """Refuse version 2 of the xDS protocol, like Envoy. An unspecified version means 3."""
    if getattr(message, field) == core.V2:
        raise ConfigError("V2 (and AUTO) xDS transport protocol versions are deprecated", field)


def api_config_source(source: core.ApiConfigSource) -> ConfigSource:
    """Compile a configuration source that is a gRPC stream to a named cluster.

    For ADS, the bootstrap decides whether every request contains the node. Other streams send the node once.
    """
    only(source, "api_type", "grpc_services", "set_node_on_first_message_only", "transport_api_version")
    only_v3(source, "transport_api_version")
    kinds = core.ApiConfigSource
    if source.api_type in (kinds.AGGREGATED_GRPC, kinds.AGGREGATED_DELTA_GRPC):
        return AdsSource()
    if source.api_type not in (kinds.GRPC, kinds.DELTA_GRPC):
        raise Unsupported("only gRPC and delta gRPC are supported", "api_type")
    if len(source.grpc_services) != 1:
        raise ConfigError("exactly one gRPC service is needed", "grpc_services")
    with at("grpc_services", 0):
        cluster = grpc_cluster(source.grpc_services[0])
    return GrpcSource(cluster, source.api_type == kinds.DELTA_GRPC)


def grpc_cluster(service: core.GrpcService) -> str:
    """Return the name of the cluster that a gRPC service is reached through.

    Raises:
        ConfigError: the service is not reached through a cluster, or has settings that are not supported.
    """
    only(service, "envoy_grpc", "google_grpc")
    if service.WhichOneof("target_specifier") != "envoy_grpc":
        raise Unsupported("only envoy_grpc is supported", "target_specifier")
    with at("envoy_grpc"):
        only(service.envoy_grpc, "cluster_name")
        required(service.envoy_grpc, "cluster_name")
    return service.envoy_grpc.cluster_name


def fetch_timeout(source: core.ConfigSource) -> float:
    """Return ``initial_fetch_timeout`` in seconds. The default is 15 s, and 0 means no limit."""
    return seconds(source, "initial_fetch_timeout", 15.0)


def data(source: core.DataSource, surroundings: Surroundings, *, watched: bool = False) -> bytes:
    """Return the bytes of a data source.

    Args:
        source: the message.
        surroundings: where files and variables are read.
        watched: whether the caller watches the file for changes.

    Raises:
        ConfigError: unreadable file, unset variable, or no source named.
    """
    if source.HasField("watched_directory") and not watched:
        raise Unsupported("this file is read once, when its resource arrives", "watched_directory")
    kind = source.WhichOneof("specifier")
    if kind == "inline_bytes":
        return source.inline_bytes
    if kind == "inline_string":
        return source.inline_string.encode()
    if kind == "filename":
        try:
            return surroundings.read_file(source.filename)
        except OSError as error:
            raise ConfigError(f"cannot read {source.filename}: {error.strerror}", "filename") from None
        except ValueError as error:  # a name with a NUL
            raise ConfigError(f"cannot read {source.filename!r}: {error}", "filename") from None
    if kind == "environment_variable":
        value = surroundings.environment.get(source.environment_variable)
        if value is None:
            raise ConfigError(f"{source.environment_variable} is not set", "environment_variable")
        return value.encode()
    raise constraint(source, "specifier", "value is required")


def format_text(message: core.SubstitutionFormatString, surroundings: Surroundings) -> FormatString:
    """Compile a text format.

    Raises:
        ConfigError: JSON where text is needed, or a bad format string.
    """
    # Two fields are accepted but not read here. content_type concerns response bodies, which do not exist.
    # omit_empty_values is read by callers.
    only(message, "text_format", "text_format_source", "json_format", "omit_empty_values", "content_type")
    kind = message.WhichOneof("format")
    if kind == "text_format":
        return parse_format(message.text_format)
    if kind == "text_format_source":
        with at("text_format_source"):
            try:
                text = data(message.text_format_source, surroundings).decode()
            except UnicodeDecodeError as error:
                raise ConfigError(f"not UTF-8 at byte {error.start}") from None
            return parse_format(text)
    raise ConfigError("a text format is needed here", "format")


def struct(message: Struct) -> dict[str, Any]:
    """Convert a protobuf struct to plain values. Numbers stay floats."""
    fields = message.fields
    # Keys are interned, because all endpoints have the same few. (Indexing is faster than the map's items(), a
    # loop in Python.)
    return {intern(key): _value(fields[key]) for key in fields}


@lru_cache(maxsize=1024)
def _shared_struct(packed: bytes) -> Mapping[str, Any]:
    return struct(Struct.FromString(packed))


def _value(value: Any) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return struct(value.struct_value)
    if kind == "list_value":
        return [_value(item) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


def metadata(message: core.Metadata) -> Mapping[str, Mapping[str, Any]]:
    """Return ``filter_metadata`` as plain values. Equal structs share one object."""
    spaces = message.filter_metadata
    if not spaces:
        return NO_METADATA
    return {intern(name): _namespace(spaces[name]) for name in spaces}


def _namespace(value: Struct) -> Mapping[str, Any]:
    packed = value.SerializeToString(deterministic=True)
    return _shared_struct(packed) if len(packed) <= _SHORT else struct(value)
