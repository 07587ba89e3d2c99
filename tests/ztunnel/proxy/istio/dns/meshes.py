"""A mesh with every kind of service that names tell apart."""

from xds.model.mesh import Mesh
from xds.model.service import IpFamilies, Service, Visibility
from xds.model.workload import NetworkAddress, ServiceKey, Workload, WorkloadUid

CD = "cluster.local"


def service(
    hostname: str,
    *vips: str,
    namespace: str = "shop",
    network: str = "",
    canonical: bool = False,
    visibility: Visibility = Visibility.PUBLIC,
    ip_families: IpFamilies | None = None,
) -> Service:
    return Service(
        name=hostname.split(".")[0],
        namespace=namespace,
        hostname=hostname,
        vips=tuple(NetworkAddress(network, vip) for vip in vips),
        ports={80: 8080},
        canonical=canonical,
        visibility=visibility,
        ip_families=ip_families,
    )


def workload(name: str, *addresses: str, of: Service | None = None, namespace: str = "shop") -> Workload:
    return Workload(
        uid=WorkloadUid(f"Kubernetes//Pod/{namespace}/{name}"),
        name=name,
        namespace=namespace,
        addresses=addresses,
        services={} if of is None else {ServiceKey(of.key): {80: 8080}},
    )


CLIENT = workload("client", "10.0.0.1")


def mesh(*values: Service | Workload) -> Mesh:
    made = Mesh()
    made.apply([CLIENT, *values])
    return made
