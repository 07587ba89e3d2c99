"""Workloads as described by Istio's control plane (WDS): their identity, their node, and how to connect to them.

Addresses are canonical texts (:func:`xds.model.address.canonical`). A service's name is ``namespace/hostname``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from xds.model.identity import SpiffeId

WorkloadUid = NewType("WorkloadUid", str)
#: ``namespace/hostname``.
ServiceKey = NewType("ServiceKey", str)
#: The key of an authorization policy, ``namespace/name``.
PolicyKey = NewType("PolicyKey", str)


class Protocol(StrEnum):
    """The protocol for connections to a workload."""

    TCP = "TCP"
    HBONE = "HBONE"


class NetworkMode(StrEnum):
    """Whether the workload has its own addresses or its host's addresses."""

    STANDARD = "Standard"
    HOST_NETWORK = "HostNetwork"


class Health(StrEnum):
    """An endpoint's health as reported by the control plane."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


@dataclass(frozen=True, slots=True)
class NetworkAddress:
    """An address in one network. The same text can be a different address in another network."""

    network: str
    host: str

    def __str__(self) -> str:
        return f"{self.network}/{self.host}"


@dataclass(frozen=True, slots=True)
class NamespacedHostname:
    """A service (or a workload's host name) of one namespace."""

    namespace: str
    hostname: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.hostname}"


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """The address of a waypoint or a network gateway."""

    destination: NetworkAddress | NamespacedHostname
    hbone_mtls_port: int


@dataclass(frozen=True, slots=True)
class Locality:
    """The locality of a workload. Unknown parts are empty strings."""

    region: str = ""
    zone: str = ""
    subzone: str = ""


class AppProtocol(StrEnum):
    """The protocol that a proxy uses to pass tunnelled connections to an application."""

    NONE = "NONE"
    PROXY = "PROXY"


@dataclass(frozen=True, slots=True)
class ApplicationTunnel:
    """The settings of an application that itself accepts the content of tunnels, optionally after a PROXY header.

    Attributes:
        port: the application tunnel's port. 0 means the requested port.
    """

    protocol: AppProtocol
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One workload.

    Attributes:
        uid: primary key, such as ``cluster//Pod/ns/name``.
        hostname: a name that is resolved by DNS if the workload has no addresses.
        services: for each service with this workload as an endpoint, the map of service port to target port.
        authorization_policies: the policies with a workload selector that apply to this workload.
        workload_type: ``deployment``, ``cronjob``, ``pod`` or ``job``.
        capacity: the weight of the workload among the endpoints of a service.
    """

    uid: WorkloadUid
    namespace: str
    name: str = ""
    addresses: tuple[str, ...] = ()
    hostname: str = ""
    network: str = ""
    protocol: Protocol = Protocol.TCP
    network_mode: NetworkMode = NetworkMode.STANDARD
    trust_domain: str = "cluster.local"
    service_account: str = "default"
    waypoint: GatewayAddress | None = None
    network_gateway: GatewayAddress | None = None
    node: str = ""
    canonical_name: str = ""
    canonical_revision: str = ""
    workload_type: str = "deployment"
    workload_name: str = ""
    native_tunnel: bool = False
    application_tunnel: ApplicationTunnel | None = None
    services: Mapping[ServiceKey, Mapping[int, int]] = field(default_factory=dict)
    authorization_policies: tuple[PolicyKey, ...] = ()
    status: Health = Health.HEALTHY
    cluster_id: str = "Kubernetes"
    locality: Locality = Locality()
    capacity: int = 1

    @property
    def identity(self) -> SpiffeId:
        """The identity in the workload's certificate."""
        return SpiffeId(self.trust_domain, self.namespace, self.service_account)
