"""Answers DNS questions about services of the mesh, and leaves all other names to the name servers. Pure.

Clients complete short names from their search list, so a question can mean several names. They are the question's
name and its expansions by Kubernetes' search list. If the name ends in a search domain, the part before this
domain and the expansions of this part are added. The answer is for the first of these names that is a service in
the mesh. A service without addresses of its own counts only if its name is in the cluster's domain, because it is
then headless. Queries for other names are forwarded.

Names are compared in lower case (RFC 4343), because resolvers vary the case to protect against forged answers.
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
    """The settings of name resolution.

    Attributes:
        cluster_domain: the domain of Kubernetes' services.
        search: the clients' search list. None: Kubernetes' search list for the client's namespace.
        ipv6: whether AAAA questions are answered with IPv6 addresses.
        preferred_namespace: the namespace to prefer if several services share a name, and no such service is in
            the client's namespace.
        ttl_s: the time to live of our own records. It is short, because the mesh changes.
    """

    cluster_domain: str = "cluster.local"
    search: tuple[str, ...] | None = None
    ipv6: bool = True
    preferred_namespace: str = ""
    ttl_s: int = 30

    def search_for(self, namespace: str) -> tuple[str, ...]:
        """Return the search list that clients in a namespace use."""
        if self.search is not None:
            return self.search
        domain = self.cluster_domain
        return (f"{namespace}.svc.{domain}", f"svc.{domain}", domain)


@dataclass(frozen=True, slots=True)
class Alias:
    """A possible meaning of a question's name.

    Attributes:
        stripped: the question's name without its search domain. None if no search domain was removed.
    """

    name: str
    stripped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """An answer from the mesh: the addresses of a service, possibly none.

    Attributes:
        canonical: the service's name, for a CNAME record, if the question's name is an alias. Otherwise None.
    """

    service: Service
    addresses: tuple[IpAddress, ...]
    canonical: str | None = None


def answer(name: str, *, ipv6: bool, client: Workload, mesh: Mesh, settings: DnsSettings) -> Local | None:
    """Answer a question for addresses from the mesh.

    Args:
        name: the question's name, without the final dot.
        ipv6: whether the question is for AAAA. If not, it is for A.
        client: the workload that sent the query.
        mesh: the mesh.
        settings: the DNS proxy's settings.

    Returns:
        The answer, with addresses in the mesh's order. None if the name is not a service and must be forwarded.
    """
    found = _find(name.lower(), client, mesh, settings) if name else None  # the DNS root is not a service
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
            # A service of Kubernetes without an address is headless. Other names are then resolved upstream.
            addressed = not hostname.endswith(kubernetes)
            service = mesh.service_named(
                hostname, client.namespace, settings.preferred_namespace, addressed=addressed
            )
            if service is not None:
                return alias, service
    return None


def aliases(name: str, namespace: str, settings: DnsSettings) -> Iterator[Alias]:
    """Yield the names that a question can mean, most likely first, without duplicates."""
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
    """Yield the expansions of a name by Kubernetes' search list that can be a service's full name.

    A service's full name is ``name.namespace.svc.domain``, so the number of labels in ``name`` decides which
    expansions are possible.
    """
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
    """Yield the wildcards that match a name, most specific first: ``*.b.c`` and ``*.c`` for ``a.b.c``."""
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
