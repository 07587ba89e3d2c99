"""Helpers for all readers of Istio's dialect: they convert addresses from bytes, and make equal values share one
object.

A mesh of 200,000 workloads repeats the same few namespaces, accounts, localities and port maps. Equal values share
one object here, which reduces a workload to a few hundred bytes (``bench/scale_istio.py``).
"""

import ipaddress
from functools import lru_cache
from sys import intern

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from xds.errors import ConfigError
from xds.model.address import IpNetwork, canonical
from xds.model.workload import GatewayAddress, Locality, NamespacedHostname, NetworkAddress, PolicyKey, ServiceKey

#: The size of each shared-value cache. When a cache is full, further values are not shared. A guess.
_SHARED = 65536


def unknown_field(message: Message) -> int | None:
    """Return the number of the first field of a message that our protobuf definition lacks."""
    unknown = UnknownFieldSet(message)
    return unknown[0].field_number if len(unknown) else None


def host_of(data: bytes) -> str:
    """Return the canonical text of an address given as bytes.

    Raises:
        ConfigError: neither 4 nor 16 bytes.
    """
    if len(data) == 4:
        return "%d.%d.%d.%d" % tuple(data)  # noqa: UP031 - half the time of every other spelling
    if len(data) == 16:
        return canonical(ipaddress.IPv6Address(data))
    raise ConfigError(f"failed to parse address, had {len(data)} bytes")


def network_of(data: bytes, length: int) -> IpNetwork:
    """Return a CIDR block of addresses. Bits after the prefix are dropped, and IPv4-mapped IPv6 becomes IPv4.

    Raises:
        ConfigError: not an address, or a prefix longer than the address.
    """
    if len(data) not in (4, 16):
        raise ConfigError(f"failed to parse address, had {len(data)} bytes")
    address = ipaddress.ip_address(data)
    if length > address.max_prefixlen:
        raise ConfigError(f"prefix length {length} is more than the {address.max_prefixlen} bits of {address}")
    if address.version == 6 and address.ipv4_mapped is not None and length >= 96:
        return ipaddress.ip_network((address.ipv4_mapped, length - 96), strict=False)
    return ipaddress.ip_network((address, length), strict=False)


def service_key(text: str) -> ServiceKey:
    """Read ``namespace/hostname``.

    Raises:
        ConfigError: the text does not have exactly these two parts.
    """
    namespace, slash, hostname = text.partition("/")
    if not slash or not namespace or not hostname or "/" in hostname:
        raise ConfigError(f"failed to parse namespaced hostname: {text}")
    return ServiceKey(intern(text))


def port(number: int, what: str) -> int:
    """Return a port after checking it.

    Raises:
        ConfigError: the number is above 65535. 0 is allowed, because it has a meaning in many fields.
    """
    if not 0 <= number < 65536:
        raise ConfigError(f"{what} {number} is no port".lstrip())
    return number


@lru_cache(maxsize=_SHARED)
def shared_locality(region: str, zone: str, subzone: str) -> Locality:
    """Return a locality. Equal localities share one object."""
    return Locality(intern(region), intern(zone), intern(subzone))


@lru_cache(maxsize=_SHARED)
def shared_gateway(destination: NetworkAddress | NamespacedHostname, hbone_mtls_port: int) -> GatewayAddress:
    """Return a gateway's address. Equal addresses share one object."""
    return GatewayAddress(destination, hbone_mtls_port)


@lru_cache(maxsize=_SHARED)
def shared_ports(ports: tuple[tuple[int, int], ...]) -> dict[int, int]:
    """Return a map of ports. Equal maps share one object, which must not be changed."""
    return dict(ports)


@lru_cache(maxsize=_SHARED)
def shared_services(
    services: tuple[tuple[str, tuple[tuple[int, int], ...]], ...],
) -> dict[ServiceKey, dict[int, int]]:
    """Return ports by service. Equal maps share one object, which must not be changed."""
    return {service_key(key): shared_ports(ports) for key, ports in services}


@lru_cache(maxsize=_SHARED)
def shared_policies(names: tuple[str, ...]) -> tuple[PolicyKey, ...]:
    """Return the names of policies as a tuple. Equal tuples share one object."""
    return tuple(PolicyKey(intern(name)) for name in names)
