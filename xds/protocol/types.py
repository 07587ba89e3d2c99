"""Type URLs, the gRPC methods that carry them, and how a resource is named inside its message."""

from sys import intern
from typing import Final

from xds.errors import ConfigError
from xds.proto import registry
from xds.proto.well_known import Any as AnyMessage

_PREFIX = registry.TYPE_URL_PREFIX

LDS: Final = _PREFIX + "envoy.config.listener.v3.Listener"
CDS: Final = _PREFIX + "envoy.config.cluster.v3.Cluster"
EDS: Final = _PREFIX + "envoy.config.endpoint.v3.ClusterLoadAssignment"
RDS: Final = _PREFIX + "envoy.config.route.v3.RouteConfiguration"
SDS: Final = _PREFIX + "envoy.extensions.transport_sockets.tls.v3.Secret"
ECDS: Final = _PREFIX + "envoy.config.core.v3.TypedExtensionConfig"
RTDS: Final = _PREFIX + "envoy.service.runtime.v3.Runtime"
ADDRESS: Final = _PREFIX + "istio.workload.Address"
AUTHORIZATION: Final = _PREFIX + "istio.security.Authorization"

#: State-of-the-world responses of these types are complete: resources that they lack were removed.
COMPLETE_TYPES: Final = frozenset((LDS, CDS))

#: Resources of these types are requested by name, and an empty list of names requests none.
NAMED_TYPES: Final = frozenset((EDS, RDS, SDS, ECDS, RTDS))

#: The order of types in a push. Referenced resources are sent first ("make before break").
PUSH_ORDER: Final = (CDS, EDS, LDS, RDS, SDS, ECDS, RTDS)

_SERVICES = {
    LDS: ("listener.v3.ListenerDiscoveryService", "Listeners"),
    CDS: ("cluster.v3.ClusterDiscoveryService", "Clusters"),
    EDS: ("endpoint.v3.EndpointDiscoveryService", "Endpoints"),
    RDS: ("route.v3.RouteDiscoveryService", "Routes"),
    SDS: ("secret.v3.SecretDiscoveryService", "Secrets"),
    ECDS: ("extension.v3.ExtensionConfigDiscoveryService", "ExtensionConfigs"),
    RTDS: ("runtime.v3.RuntimeDiscoveryService", "Runtime"),
}


def method_path(type_url: str | None, *, delta: bool) -> str:
    """Return the gRPC path of the type's own service, or of the aggregated stream for ``None``.

    Raises:
        ConfigError: the type has no service of its own.
    """
    if type_url is None:
        service, noun = "discovery.v3.AggregatedDiscoveryService", "AggregatedResources"
    elif type_url in _SERVICES:
        service, noun = _SERVICES[type_url]
    else:
        raise ConfigError(f"no discovery service carries {type_url}")
    return f"/envoy.service.{service}/{'Delta' if delta else 'Stream'}{noun}"


def type_of_method(path: str) -> tuple[str | None, bool] | None:
    """Return the type URL (None for the aggregated stream) and whether it is delta, for a gRPC path. Return None
    for other paths.
    """
    return _METHODS.get(path)


_METHODS = {
    method_path(type_url, delta=delta): (type_url, delta)
    for type_url in (None, *_SERVICES)
    for delta in (False, True)
}


def name_of(body: AnyMessage) -> str:
    """Return the resource's own name, which every type of this API has in field 1.

    Only the outermost fields are read, not the messages in them, because a state-of-the-world response repeats
    every resource of a mesh, and most are known. Deeper faults are found when the resource is compiled.

    Raises:
        registry.UnknownType: the resource's type is not known.
        registry.MalformedMessage: the bytes do not parse.
    """
    registry.message_for(body.type_url)
    try:
        return intern(_first_field(body.value).decode())  # a cluster's name is that of its endpoints, and others
    except (IndexError, ValueError):
        raise registry.MalformedMessage(body.type_url) from None


def _first_field(data: bytes) -> bytes:
    """Return field 1 of a message, a string. If it occurs repeatedly, the last one counts.

    Raises:
        IndexError: the message is cut short.
        ValueError: the bytes are not a message.
    """
    found = b""
    position, end = 0, len(data)
    while position < end:
        tag, position = varint(data, position)
        match tag & 7:
            case 0:
                _, position = varint(data, position)
            case 1:
                position += 8
            case 2:
                length, position = varint(data, position)
                if tag >> 3 == 1:
                    found = data[position : position + length]
                position += length
            case 5:
                position += 4
            case _:
                raise ValueError("groups are not part of proto3")
    if position > end:
        raise IndexError
    return found


def varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position in a message, and the next position.

    Raises:
        IndexError: the message is cut short.
        ValueError: the number is too long.
    """
    value = data[position]
    position += 1
    if value < 0x80:
        return value, position
    value &= 0x7F
    for shift in range(7, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a varint has at most ten bytes")
