"""Services as described by Istio's control plane (WDS): names and addresses for sets of workloads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from xds.model.address import IpNetwork
from xds.model.workload import GatewayAddress, NetworkAddress, ServiceKey


class Scope(StrEnum):
    """The levels at which the localities of two workloads can be equal, for locality-aware balancing."""

    REGION = "Region"
    ZONE = "Zone"
    SUBZONE = "Subzone"
    NODE = "Node"
    CLUSTER = "Cluster"
    NETWORK = "Network"


class BalancerMode(StrEnum):
    """Which endpoints the load balancer can choose for a client."""

    STANDARD = "Standard"
    STRICT = "Strict"
    FAILOVER = "Failover"
    PASSTHROUGH = "Passthrough"


class HealthPolicy(StrEnum):
    """Whether unhealthy endpoints can be chosen."""

    ONLY_HEALTHY = "OnlyHealthy"
    ALLOW_ALL = "AllowAll"


class IpFamilies(StrEnum):
    """The IP versions that can be used for the addresses of endpoints. No value means any."""

    IPV4 = "IPv4"
    IPV6 = "IPv6"
    DUAL = "Dual"


class Visibility(StrEnum):
    """The clients that can see the service."""

    PUBLIC = "Public"
    NAMESPACE = "Namespace"


@dataclass(frozen=True, slots=True)
class LoadBalancing:
    """The load balancing settings of a service: how an endpoint is chosen."""

    preferences: tuple[Scope, ...] = ()
    mode: BalancerMode = BalancerMode.STANDARD
    health: HealthPolicy = HealthPolicy.ONLY_HEALTHY


@dataclass(frozen=True, slots=True)
class CidrAddress:
    """A block of virtual addresses in one network."""

    network: str
    block: IpNetwork


@dataclass(frozen=True, slots=True)
class WeightedWaypoint:
    """One of several weighted waypoints of a service. A waypoint is chosen for each connection."""

    destination: GatewayAddress
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service.

    Attributes:
        hostname: the full name, which can be a wildcard such as ``*.example.net``.
        vips: virtual addresses. ``cidr_vips`` are blocks of addresses.
        ports: service port to target port. A target of 0 stands for a named port, which each endpoint defines.
        subject_alt_names: SPIFFE identities that the service's endpoints can present besides their own.
        canonical: whether this service is preferred if several share a name or an address.
    """

    name: str
    namespace: str
    hostname: str
    vips: tuple[NetworkAddress, ...] = ()
    cidr_vips: tuple[CidrAddress, ...] = ()
    ports: Mapping[int, int] = field(default_factory=dict)
    subject_alt_names: tuple[str, ...] = ()
    waypoint: GatewayAddress | None = None
    weighted_waypoints: tuple[WeightedWaypoint, ...] = ()
    load_balancing: LoadBalancing | None = None
    ip_families: IpFamilies | None = None
    canonical: bool = False
    visibility: Visibility = Visibility.PUBLIC

    @property
    def key(self) -> ServiceKey:
        """``namespace/hostname``."""
        return ServiceKey(f"{self.namespace}/{self.hostname}")

    @property
    def mode(self) -> BalancerMode:
        return self.load_balancing.mode if self.load_balancing is not None else BalancerMode.STANDARD
