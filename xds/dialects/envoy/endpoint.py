"""Compiles the cluster load assignments of EDS."""

from collections.abc import Mapping

from xds.dialects.envoy.health_check import compile_endpoint_check
from xds.dialects.envoy.reading import (
    at,
    constraint,
    endpoint_address,
    enum_name,
    metadata,
    nothing_unknown,
    only,
    required,
    socket_address,
    wrapped,
)
from xds.errors import ConfigError, Unsupported
from xds.model import cluster as model
from xds.model.metadata import Metadata
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.config.endpoint.v3 import endpoint_pb2 as proto
from xds.proto.envoy.type.v3 import type_pb2
from xds.proto.well_known import Any as AnyMessage
from xds.proto.well_known import UInt32Value

_HEALTH = {
    core.UNKNOWN: model.Health.UNKNOWN,
    core.HEALTHY: model.Health.HEALTHY,
    core.UNHEALTHY: model.Health.UNHEALTHY,
    core.DRAINING: model.Health.DRAINING,
    core.TIMEOUT: model.Health.TIMEOUT,
    core.DEGRADED: model.Health.DEGRADED,
}
_DENOMINATORS = {
    type_pb2.FractionalPercent.HUNDRED: 100,
    type_pb2.FractionalPercent.TEN_THOUSAND: 10_000,
    type_pb2.FractionalPercent.MILLION: 1_000_000,
}
_LAST_PRIORITY = 128  # the same as in Envoy
_USABLE = (core.UNKNOWN, core.HEALTHY)
_PLAIN_POLICIES = (
    proto.ClusterLoadAssignment.Policy(),
    proto.ClusterLoadAssignment.Policy(overprovisioning_factor=UInt32Value(value=140)),
)
#: A key that identifies the address of an endpoint.
Member = tuple[str, str | int]


def compile_assignment(message: proto.ClusterLoadAssignment, *, names: bool = False) -> model.LoadAssignment:
    """Compile the endpoints of one cluster.

    Args:
        message: an EDS resource or an inline ``load_assignment``.
        names: whether addresses can be DNS names, as in STRICT_DNS and LOGICAL_DNS clusters.

    Raises:
        ConfigError: a weight of 0, a malformed address.
    """
    nothing_unknown(message)
    only(message, "cluster_name", "endpoints", "policy", "named_endpoints")
    required(message, "cluster_name")
    groups = []
    for index, group in enumerate(message.endpoints):
        with at("endpoints", index):
            groups.append(_group(group, message.named_endpoints, names))
    with at("policy"):
        only(
            message.policy,
            "drop_overloads",
            "overprovisioning_factor",
            "weighted_priority_health",
        )
        factor = wrapped(message.policy, "overprovisioning_factor", 140)
        if factor == 0:
            raise constraint(message.policy, "overprovisioning_factor", "value must be greater than 0")
        drop = []
        for index, entry in enumerate(message.policy.drop_overloads):
            with at("drop_overloads", index):
                required(entry, "category")
            with at("drop_overloads", index, "drop_percentage"):
                enum_name(entry.drop_percentage, "denominator")
                ratio = entry.drop_percentage.numerator / _DENOMINATORS[entry.drop_percentage.denominator]
                if ratio > 1:
                    raise ConfigError(f"the drop ratio {ratio:g} is above 1")
                drop.append((entry.category, ratio))
    return model.LoadAssignment(
        cluster_name=message.cluster_name,
        groups=tuple(groups),
        overprovisioning_factor=factor,
        drop=tuple(drop),
        weighted_priority_health=message.policy.weighted_priority_health,
    )


def plain_members(
    message: proto.ClusterLoadAssignment, packed: AnyMessage | None = None
) -> tuple[set[Member], ...] | None:
    """Return the addresses of an assignment's endpoints, by priority.

    A node receives the endpoints of every service but uses only a few services. This function takes a fifth of the
    time of :func:`compile_assignment`. If this function returns addresses, :func:`compile_assignment` accepts the
    assignment, too.

    Args:
        message: an EDS resource.
        packed: the packed form that the message was parsed from.

    Returns:
        The addresses, or ``None`` if :func:`compile_assignment` is needed: an endpoint is not healthy or is listed
        twice, an endpoint or the policy has an unusual field, or the assignment would be refused.

    Raises:
        ConfigError: a field that our version of the message lacks.
    """
    nothing_unknown(message, packed)
    if not message.cluster_name or message.policy not in _PLAIN_POLICIES:
        return None
    levels: list[set[Member]] = []
    seen: set[Member] = set()
    count = 0
    for group in message.endpoints:
        if group.priority > _LAST_PRIORITY or wrapped(group, "load_balancing_weight", 1) == 0:
            return None
        levels.extend(set() for _ in range(len(levels), group.priority + 1))
        for endpoint in group.lb_endpoints:
            member = _plain_member(endpoint)
            if member is None:
                return None
            levels[group.priority].add(member)
            count += 1
    seen.update(*levels)
    return tuple(levels) if len(seen) == count else None


def _plain_member(message: proto.LbEndpoint) -> Member | None:
    # This function runs for every endpoint of a mesh, so it reads as few fields of the message as possible.
    if message.health_status not in _USABLE or not message.HasField("endpoint"):
        return None
    if message.HasField("load_balancing_weight") and message.load_balancing_weight.value == 0:
        return None
    endpoint = message.endpoint
    if endpoint.HasField("health_check_config") or endpoint.additional_addresses:
        return None
    address = endpoint.address
    kind = address.WhichOneof("address")
    if kind == "envoy_internal_address":
        internal = address.envoy_internal_address
        return (internal.server_listener_name, internal.endpoint_id) if internal.server_listener_name else None
    if kind == "socket_address":
        try:
            return socket_address(address.socket_address)
        except ConfigError:
            return None
    return None


def _group(
    message: proto.LocalityLbEndpoints, named: Mapping[str, proto.Endpoint], names: bool
) -> model.LocalityGroup:
    only(message, "locality", "lb_endpoints", "load_balancing_weight", "priority", "proximity", "metadata")
    if message.priority > _LAST_PRIORITY:
        raise constraint(message, "priority", f"value must be less than or equal to {_LAST_PRIORITY}")
    if message.HasField("load_balancing_weight") and message.load_balancing_weight.value == 0:
        raise constraint(message, "load_balancing_weight", "value must be greater than or equal to 1")
    locality = model.Locality(message.locality.region, message.locality.zone, message.locality.sub_zone)
    group_metadata = metadata(message.metadata)
    endpoints = []
    for index, endpoint in enumerate(message.lb_endpoints):
        with at("lb_endpoints", index):
            endpoints.append(_endpoint(endpoint, named, names, locality, message.priority, group_metadata))
    return model.LocalityGroup(
        locality=locality,
        priority=message.priority,
        weight=message.load_balancing_weight.value,
        endpoints=tuple(endpoints),
    )


def _endpoint(
    message: proto.LbEndpoint,
    named: Mapping[str, proto.Endpoint],
    names: bool,
    locality: model.Locality,
    priority: int,
    group_metadata: Metadata,
) -> model.Endpoint:
    only(message, "endpoint", "endpoint_name", "health_status", "metadata", "load_balancing_weight")
    weight = wrapped(message, "load_balancing_weight", 1)
    if weight == 0:
        raise constraint(message, "load_balancing_weight", "value must be greater than or equal to 1")
    if message.health_status not in _HEALTH:
        raise ConfigError(f"unknown health status {message.health_status}", "health_status")
    if message.WhichOneof("host_identifier") == "endpoint_name":
        if message.endpoint_name not in named:
            raise ConfigError(f"no such named endpoint: {message.endpoint_name}", "endpoint_name")
        endpoint = named[message.endpoint_name]
    else:
        endpoint = message.endpoint
    with at("endpoint"):
        only(endpoint, "address", "health_check_config", "hostname")
        if not endpoint.HasField("address"):
            raise Unsupported("an endpoint without address is not supported", "address")
        with at("address"):
            address = endpoint_address(endpoint.address, names=names)
        check = compile_endpoint_check(endpoint)
    own = metadata(message.metadata)
    return model.Endpoint(
        address=address,
        hostname=endpoint.hostname,
        health=_HEALTH[message.health_status],
        weight=weight,
        priority=priority,
        locality=locality,
        metadata={**group_metadata, **own} if group_metadata else own,
        check=check,
    )
