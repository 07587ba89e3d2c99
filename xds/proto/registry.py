"""Finds the project's message types by name or type URL.

The generated modules are some 130 files. The first look-up of a name that is in no imported module imports all of
them (:func:`import_all`, 30 ms). A proxy in an Istio mesh has already imported its three types and never needs the
others. An ``Any`` of an unknown type stays packed, and :func:`unpack` raises :class:`UnknownType` for it.
"""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from xds.errors import XdsError
from xds.proto.pool import POOL
from xds.proto.well_known import Any as AnyMessage

if TYPE_CHECKING:
    from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster

TYPE_URL_PREFIX = "type.googleapis.com/"

_GENERATED = ("envoy", "google", "istio", "udpa", "xds")


class UnknownType(XdsError):
    """No message type has this name.

    Attributes:
        type_url: the type URL or the name that was looked up.
    """

    def __init__(self, type_url: str) -> None:
        super().__init__(type_url)
        self.type_url = type_url

    def __str__(self) -> str:
        return f"Unable to find the message type of {self.type_url!r}"


class MalformedMessage(XdsError):
    """The bytes are not a message of the named type.

    Attributes:
        type_url: the type URL that came with the bytes.
    """

    def __init__(self, type_url: str) -> None:
        super().__init__(type_url)
        self.type_url = type_url

    def __str__(self) -> str:
        return f"Unable to unpack as {self.type_url.rpartition('/')[2]}: the bytes are malformed"


def type_url(message: type[Message] | Message) -> str:
    """Return the type URL of a message or its class."""
    return TYPE_URL_PREFIX + message.DESCRIPTOR.full_name


@cache
def message_for(type_url: str) -> type[Message]:
    """Return the class for ``type.googleapis.com/<full name>``, with this prefix, any other or none.

    Raises:
        UnknownType: no generated module has a message of this name.
    """
    name = type_url.rpartition("/")[2]
    for attempt in (1, 2):
        try:
            return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))
        except KeyError:
            if attempt == 1:
                import_all()
    raise UnknownType(type_url)


def messages() -> Iterator[Descriptor]:
    """Yield the descriptors of all message types, nested ones included, sorted by the name of their file."""
    import_all()
    modules = sorted(name for name in sys.modules if name.startswith(f"{__package__}.") and name.endswith("_pb2"))
    left = [sys.modules[name].DESCRIPTOR.message_types_by_name.values() for name in modules]
    while left:
        for descriptor in left.pop(0):
            yield descriptor
            left.append(descriptor.nested_types)


def unpack(packed: AnyMessage) -> Message:
    """Return the message inside, converted to its current form (see :func:`normalise`).

    Raises:
        UnknownType: its type is not known.
        MalformedMessage: its bytes do not parse.
    """
    return parse(packed.type_url, packed.value)


def parse(type_url: str, data: bytes) -> Message:
    """Parse ``data`` as a message of a type.

    Raises:
        UnknownType: the type is not known.
        MalformedMessage: the bytes do not parse.
    """
    message = message_for(type_url)()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise MalformedMessage(type_url) from None
    normalise(message)
    return message


def pack(message: Message) -> AnyMessage:
    """Return ``message`` as an ``Any``. Maps are in the order of their keys, so that equal messages give equal
    bytes.
    """
    packed = AnyMessage()
    packed.Pack(message, deterministic=True)
    return packed


def normalise(message: Message) -> None:
    """Convert a field that older peers send with another wire type to the current field.

    ``Cluster.OriginalDstLbConfig.upstream_port_override`` is a ``UInt32Value``; the private API of the 2022
    preview build had a plain ``uint32`` of the same number, which a parser keeps as an unknown field.
    """
    # Compare names, so that this module need not import the cluster's module, which only Envoy's dialect needs.
    if message.DESCRIPTOR.full_name == "envoy.config.cluster.v3.Cluster":
        cluster = cast("Cluster", message)
        if cluster.HasField("original_dst_lb_config"):
            _normalise_port_override(cluster.original_dst_lb_config)


def _normalise_port_override(config: "Cluster.OriginalDstLbConfig") -> None:
    number = config.UPSTREAM_PORT_OVERRIDE_FIELD_NUMBER
    unknown = UnknownFieldSet(config)
    fields = [unknown[index] for index in range(len(unknown))]
    # Varint is wire type 0; the last one wins, as for any singular field.
    plain = [field.data for field in fields if field.field_number == number and field.wire_type == 0]
    # A single unknown field cannot be dropped. If there are others, it stays, and all of them are refused.
    if plain and len(plain) == len(fields):
        config.DiscardUnknownFields()
        config.upstream_port_override.value = plain[-1] & 0xFFFFFFFF


@cache
def import_all() -> None:
    """Import every generated module; idempotent.

    Called before text with arbitrary type names is parsed by protobuf itself, and by code that will need all types
    and must not pause for the import later.
    """
    here = Path(__file__).parent
    for top in _GENERATED:
        for module in pkgutil.walk_packages([str(here / top)], f"{__package__}.{top}."):
            if module.name.endswith("_pb2"):
                importlib.import_module(module.name)
