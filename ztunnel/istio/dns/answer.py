"""What the mesh says of a name, and when that is for somebody else to say. Pure.

A client types short names and leaves the rest to its search list, so one question may stand for several names:
the name itself, what Kubernetes would make of it, and, where it ends in a search domain, both of what is in front
of that. The first that is a service of the mesh is meant. A service without addresses of its own counts if its
name is in the cluster's domain (it is headless); other names without addresses are not ours to answer.

Names are compared in lower case, whatever case they are asked in (RFC 4343; resolvers vary it on purpose).
"""

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from xds.model.mesh import Mesh
from xds.model.service import IpFamilies, Service
from xds.model.workload import Workload

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_SVC: Final = "svc"


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsSettings:
    """How names are read.

    Attributes:
        cluster_domain: where Kubernetes' services are.
        search: the clients' search list; ``None``: Kubernetes' for the client's namespace.
        ipv6: whether AAAA is ever answered.
        preferred_namespace: whose service is meant if several share a name and neither is the client's.
        ttl_s: of our own records; short, since the mesh changes.
    """

    cluster_domain: str = "cluster.local"
    search: tuple[str, ...] | None = None
    ipv6: bool = True
    preferred_namespace: str = ""
    ttl_s: int = 30

    def search_for(self, namespace: str) -> tuple[str, ...]:
        """The search list of a client."""
        if self.search is not None:
            return self.search
        domain = self.cluster_domain
        return (f"{namespace}.svc.{domain}", f"svc.{domain}", domain)


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that may be meant.

    Attributes:
        stripped: set if a search domain was taken off: what was left.
    """

    name: str
    stripped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """The mesh's answer: addresses under ``name``, perhaps none.

    Attributes:
        canonical: the question's name is another name for this one.
    """

    service: Service
    addresses: tuple[IpAddress, ...]
    canonical: str | None = None


def answer(name: str, *, ipv6: bool, client: Workload, mesh: Mesh, settings: DnsSettings) -> Local | None:
    """What the mesh says.

    Args:
        name: asked for, without the final dot.
        ipv6: AAAA, else A.
        client: who asks.
        mesh: the mesh.
        settings: see there.

    Returns:
        ``None``: nothing; ask the name servers. Addresses are in the mesh's order.
    """
    found = _find(name.lower(), client, mesh, settings) if name else None  # the root is nobody's service
    if found is None:
        return None
    alias, service = found
    is_wildcard = service.hostname.startswith("*")
    return Local(
        service=service,
        addresses=_addresses(service, ipv6=ipv6, client=client, mesh=mesh, settings=settings),
        canonical=None if is_wildcard else alias.stripped,
    )


def _find(name: str, client: Workload, mesh: Mesh, settings: DnsSettings) -> tuple[Alias, Service] | None:
    kubernetes = f".{_SVC}.{settings.cluster_domain}"
    for alias in aliases(name, client.namespace, settings):
        for hostname in (alias.name, *wildcards(alias.name)):
            service = mesh.service_named(hostname, client.namespace, settings.preferred_namespace)
            if service is not None and (service.vips or hostname.endswith(kubernetes)):
                return alias, service
    return None


def aliases(name: str, namespace: str, settings: DnsSettings) -> Iterator[Alias]:
    """Every name that may be meant, in order, none twice."""
    seen: set[str] = set()
    for alias in _aliases(name, namespace, settings):
        if alias.name not in seen:
            seen.add(alias.name)
            yield alias


def _aliases(name: str, namespace: str, settings: DnsSettings) -> Iterator[Alias]:
    yield Alias(name)
    for expanded in expansions(name, namespace, settings.cluster_domain):
        yield Alias(expanded)
    for domain in settings.search_for(namespace):
        stripped = name.removesuffix(f".{domain}")
        if stripped == name or not stripped:
            continue
        yield Alias(stripped, stripped)
        for expanded in expansions(stripped, namespace, settings.cluster_domain):
            yield Alias(expanded, stripped)


def expansions(name: str, namespace: str, domain: str) -> Iterator[str]:
    """What Kubernetes' search list would make of a name, told by its number of labels."""
    labels = name.split(".")
    ends_in_svc = labels[-1] == _SVC
    match len(labels):
        case 1:
            yield f"{name}.{namespace}.svc.{domain}"
        case 2:
            yield f"{name}.svc.{domain}"
            yield f"{name}.{namespace}.svc.{domain}"
        case 3:
            if ends_in_svc:
                yield f"{name}.{domain}"
            yield f"{name}.svc.{domain}"
        case 4 if ends_in_svc:
            yield f"{name}.{domain}"


def wildcards(name: str) -> Iterator[str]:
    """``*.b.c`` and ``*.c`` of ``a.b.c``."""
    labels = name.split(".")
    for index in range(1, len(labels)):
        yield ".".join(("*", *labels[index:]))


def _addresses(
    service: Service, *, ipv6: bool, client: Workload, mesh: Mesh, settings: DnsSettings
) -> tuple[IpAddress, ...]:
    if ipv6 and (not settings.ipv6 or service.ip_families is IpFamilies.IPV4):
        return ()
    if not ipv6 and service.ip_families is IpFamilies.IPV6:
        return ()
    if service.vips:
        hosts = (vip.host for vip in service.vips if vip.network == client.network)
        return tuple(_of_family(hosts, ipv6=ipv6))
    found = []
    for uid in mesh.endpoints(service.key):
        workload = mesh.workload(uid)
        if workload is not None:
            found.extend(list(_of_family(iter(workload.addresses), ipv6=ipv6))[:1])
    return tuple(found)


def _of_family(hosts: Iterator[str], *, ipv6: bool) -> Iterator[IpAddress]:
    for host in hosts:
        address = ipaddress.ip_address(host)
        if (address.version == 6) is ipv6:
            yield address
