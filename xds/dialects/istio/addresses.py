"""Compiles ``istio.workload.Address`` to a workload or a service, or raises an error with the reason.

A resource with an unknown enum number is refused. If it were obeyed in part, traffic that must be encrypted could
be sent in plain text. Its last good version stays in use. Without one, connections to its addresses are refused
(:func:`refused_addresses`); the Rust ztunnel passes them through as plain text. Unknown fields are ignored,
because istiod expects that from older proxies. Refusing one resource does not affect others.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from sys import intern
from typing import TypeVar

from google.protobuf.message import DecodeError

from xds.dialects.istio.reading import (
    host_of,
    network_of,
    port,
    shared_gateway,
    shared_locality,
    shared_policies,
    shared_ports,
    shared_services,
)
from xds.errors import ConfigError
from xds.model.refused import RefusedResource
from xds.model.service import (
    BalancerMode,
    CidrAddress,
    HealthPolicy,
    IpFamilies,
    LoadBalancing,
    Scope,
    Service,
    Visibility,
    WeightedWaypoint,
)
from xds.model.workload import (
    ApplicationTunnel,
    AppProtocol,
    GatewayAddress,
    Health,
    Locality,
    NamespacedHostname,
    NetworkAddress,
    NetworkMode,
    Protocol,
    ServiceKey,
    Workload,
    WorkloadUid,
)
from xds.proto.istio.workload import workload_pb2 as wds

Number = TypeVar("Number", bound=int)
Named = TypeVar("Named")

_PROTOCOLS = {wds.NONE: Protocol.TCP, wds.HBONE: Protocol.HBONE}
_NETWORK_MODES = {wds.STANDARD: NetworkMode.STANDARD, wds.HOST_NETWORK: NetworkMode.HOST_NETWORK}
_HEALTH = {wds.HEALTHY: Health.HEALTHY, wds.UNHEALTHY: Health.UNHEALTHY}
_WORKLOAD_TYPES = {wds.DEPLOYMENT: "deployment", wds.CRONJOB: "cronjob", wds.POD: "pod", wds.JOB: "job"}
_APP_PROTOCOLS = {
    wds.ApplicationTunnel.NONE: AppProtocol.NONE,
    wds.ApplicationTunnel.PROXY: AppProtocol.PROXY,
}
_SCOPES = {
    wds.LoadBalancing.REGION: Scope.REGION,
    wds.LoadBalancing.ZONE: Scope.ZONE,
    wds.LoadBalancing.SUBZONE: Scope.SUBZONE,
    wds.LoadBalancing.NODE: Scope.NODE,
    wds.LoadBalancing.CLUSTER: Scope.CLUSTER,
    wds.LoadBalancing.NETWORK: Scope.NETWORK,
}
_MODES = {
    wds.LoadBalancing.UNSPECIFIED_MODE: BalancerMode.STANDARD,
    wds.LoadBalancing.STRICT: BalancerMode.STRICT,
    wds.LoadBalancing.FAILOVER: BalancerMode.FAILOVER,
    wds.LoadBalancing.PASSTHROUGH: BalancerMode.PASSTHROUGH,
}
_HEALTH_POLICIES = {
    wds.LoadBalancing.ONLY_HEALTHY: HealthPolicy.ONLY_HEALTHY,
    wds.LoadBalancing.ALLOW_ALL: HealthPolicy.ALLOW_ALL,
}
_IP_FAMILIES = {
    wds.AUTOMATIC: None,
    wds.IPV4_ONLY: IpFamilies.IPV4,
    wds.IPV6_ONLY: IpFamilies.IPV6,
    wds.DUAL: IpFamilies.DUAL,
}
_NOWHERE = Locality()
_NO_SERVICES: Mapping[ServiceKey, Mapping[int, int]] = {}


def compile_address(data: bytes, name: str = "") -> Workload | Service:
    """Compile one packed ``Address``.

    Args:
        data: the message.
        name: the resource's name. If it equals the uid, as it should, the workload's uid is this same string
            object. This saves a hundred bytes per workload, because sources keep the names.

    Raises:
        ConfigError: the address is invalid. The error has the reason, which the NACK contains.
    """
    try:
        message = wds.Address.FromString(data)
    except DecodeError as error:
        raise ConfigError(f"decode: failed to decode Protobuf message: {error}") from None
    match message.WhichOneof("type"):
        case "workload":
            return compile_workload(message.workload, name)
        case "service":
            return compile_service(message.service)
        case _:
            raise ConfigError("unknown address type")


def refused_addresses(data: bytes, name: str, reason: str) -> RefusedResource | None:
    """Return the readable addresses of an ``Address`` that :func:`compile_address` refused, or ``None`` if there
    are none.

    Addresses of a workload in its host's network are left out: they belong to the node.

    Args:
        data: the message.
        name: the resource's name.
        reason: why it was refused.
    """
    try:
        message = wds.Address.FromString(data)
    except DecodeError:
        return None
    places: list[NetworkAddress | CidrAddress] = []
    workload = message.workload  # empty if the message has a service
    if workload.network_mode != wds.HOST_NETWORK:
        for host in workload.addresses:
            with suppress(ConfigError):
                places.append(NetworkAddress(workload.network, host_of(host)))
    for address in message.service.addresses:
        with suppress(ConfigError):
            places.append(_vip(address))
    return RefusedResource(name, reason, *_split(places)) if places else None


def compile_workload(message: wds.Workload, name: str = "") -> Workload:
    """Compile one workload; see :func:`compile_address`.

    Raises:
        ConfigError: see :func:`compile_address`.
    """
    uid = message.uid
    if not uid:
        raise ConfigError("a workload needs a uid")
    if message.tunnel_protocol == wds.LEGACY_ISTIO_MTLS:
        raise ConfigError("unsupported tunnel protocol LEGACY_ISTIO_MTLS", "tunnel_protocol")
    capacity = message.capacity.value if message.HasField("capacity") else 1
    locality = message.locality
    return Workload(
        uid=WorkloadUid(name if name == uid else uid),
        namespace=intern(message.namespace),
        name=message.name,
        addresses=tuple([host_of(address) for address in message.addresses]),
        hostname=message.hostname,
        network=intern(message.network),
        protocol=_named(_PROTOCOLS, message.tunnel_protocol, "tunnel_protocol"),
        network_mode=_named(_NETWORK_MODES, message.network_mode, "network_mode"),
        trust_domain=intern(message.trust_domain or "cluster.local"),
        service_account=intern(message.service_account or "default"),
        waypoint=_gateway(message.waypoint) if message.HasField("waypoint") else None,
        network_gateway=_gateway(message.network_gateway) if message.HasField("network_gateway") else None,
        node=intern(message.node),
        canonical_name=intern(message.canonical_name),
        canonical_revision=intern(message.canonical_revision),
        workload_type=_named(_WORKLOAD_TYPES, message.workload_type, "workload_type"),
        workload_name=intern(message.workload_name),
        native_tunnel=message.native_tunnel,
        application_tunnel=(
            _application_tunnel(message.application_tunnel) if message.HasField("application_tunnel") else None
        ),
        services=_services(message),
        authorization_policies=shared_policies(tuple(message.authorization_policies)),
        status=_named(_HEALTH, message.status, "status"),
        cluster_id=intern(message.cluster_id or "Kubernetes"),
        locality=(
            shared_locality(locality.region, locality.zone, locality.subzone)
            if message.HasField("locality")
            else _NOWHERE
        ),
        capacity=capacity,
    )


def compile_service(message: wds.Service) -> Service:
    """Compile one service.

    Raises:
        ConfigError: see :func:`compile_address`.
    """
    if not message.namespace or not message.hostname or "/" in message.namespace + message.hostname:
        raise ConfigError(f"failed to parse namespaced hostname: {message.namespace}/{message.hostname}")
    vips, blocks = _split(map(_vip, message.addresses))
    return Service(
        name=message.name,
        namespace=intern(message.namespace),
        hostname=intern(message.hostname),
        vips=vips,
        cidr_vips=blocks,
        ports=shared_ports(_ports(message.ports)),
        subject_alt_names=tuple(message.subject_alt_names),
        waypoint=_gateway(message.waypoint) if message.HasField("waypoint") else None,
        weighted_waypoints=tuple(
            WeightedWaypoint(_gateway(weighted.destination), weighted.weight)
            for weighted in message.weighted_waypoints
        ),
        load_balancing=_load_balancing(message.load_balancing) if message.HasField("load_balancing") else None,
        ip_families=_named(_IP_FAMILIES, message.ip_families, "ip_families"),
        canonical=message.canonical,
        # Unlike for other enums, an unknown value means the default, as in the Rust ztunnel. This is safe, because
        # the visibility of a service is not access control.
        visibility=(Visibility.NAMESPACE if message.visibility == wds.Service.NAMESPACE else Visibility.PUBLIC),
    )


def _named(names: Mapping[Number, Named], number: Number, field: str) -> Named:
    try:
        return names[number]
    except KeyError:
        raise ConfigError(f"unknown enumeration value {number}", field) from None


def _network_address(message: wds.NetworkAddress) -> NetworkAddress:
    return NetworkAddress(intern(message.network), host_of(message.address))


def _vip(message: wds.NetworkAddress) -> NetworkAddress | CidrAddress:
    # A prefix length of all bits means the same as no prefix length: a single address.
    if message.HasField("length") and message.length != len(message.address) * 8:
        return CidrAddress(intern(message.network), network_of(message.address, message.length))
    return _network_address(message)


def _split(
    places: Iterable[NetworkAddress | CidrAddress],
) -> tuple[tuple[NetworkAddress, ...], tuple[CidrAddress, ...]]:
    """Separate single addresses from blocks."""
    single: list[NetworkAddress] = []
    blocks: list[CidrAddress] = []
    for place in places:
        if isinstance(place, NetworkAddress):
            single.append(place)
        else:
            blocks.append(place)
    return tuple(single), tuple(blocks)


def _gateway(message: wds.GatewayAddress) -> GatewayAddress:
    destination: NetworkAddress | NamespacedHostname
    match message.WhichOneof("destination"):
        case "hostname":
            destination = NamespacedHostname(message.hostname.namespace, message.hostname.hostname)
        case "address":
            destination = _network_address(message.address)
        case _:
            raise ConfigError("nonempty gateway address is missing address")
    return shared_gateway(destination, port(message.hbone_mtls_port, "hbone_mtls_port"))


def _application_tunnel(message: wds.ApplicationTunnel) -> ApplicationTunnel:
    protocol = _named(_APP_PROTOCOLS, message.protocol, "application_tunnel.protocol")
    return ApplicationTunnel(protocol, port(message.port, "application_tunnel.port"))


def _services(message: wds.Workload) -> Mapping[ServiceKey, Mapping[int, int]]:
    services = message.services
    if not services:
        return _NO_SERVICES
    return shared_services(tuple([(key, _ports(services[key].ports)) for key in services]))


def _ports(messages: Iterable[wds.Port]) -> tuple[tuple[int, int], ...]:
    return tuple(
        [
            (port(message.service_port, "service_port"), port(message.target_port, "target_port"))
            for message in messages
        ]
    )


def _load_balancing(message: wds.LoadBalancing) -> LoadBalancing:
    return LoadBalancing(
        preferences=tuple(
            _named(_SCOPES, scope, f"load_balancing.routing_preference[{index}]")
            for index, scope in enumerate(message.routing_preference)
        ),
        mode=_named(_MODES, message.mode, "load_balancing.mode"),
        health=_named(_HEALTH_POLICIES, message.health_policy, "load_balancing.health_policy"),
    )
