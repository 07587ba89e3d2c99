"""The kinds of addresses in configuration, as values."""

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from xds.digits import whole_number

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class SocketAddress(NamedTuple):
    """Host and port. ``host`` is the canonical text of an IP address (IPv4-mapped IPv6 already unmapped).

    The host is text instead of an :mod:`ipaddress` object, because sockets, matchers and logs use text for each
    connection.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, name: tuple[str, int]) -> "SocketAddress":
        """Make an address from the result of ``getpeername`` or ``getsockname``. IPv4-mapped IPv6 becomes IPv4.

        Raises:
            ValueError: the host is not an IP address.
        """
        return tuple.__new__(cls, (canonical(name[0]), name[1]))

    @classmethod
    def parse(cls, text: str) -> "SocketAddress":
        """Parse ``ip:port``, with IPv6 addresses in brackets.

        Raises:
            ValueError: the text has another form, for example a host name, or the port is not within 1 to 65535.
        """
        return _parse(text)

    @classmethod
    def parse_or_none(cls, text: str | None) -> "SocketAddress | None":
        """Parse like :meth:`parse`, but return None if the text is missing or has another form."""
        try:
            return None if text is None else _parse(text)
        except ValueError:
            return None


# The caches below save about 20 microseconds per connection. A peer that uses many addresses can only make them
# useless.
@lru_cache(maxsize=16384)
def _parse(text: str) -> SocketAddress:
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    number = whole_number(port, 65535)
    if not colon or not number:
        raise ValueError(f"not an ip:port: {text!r}")
    address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    if bracketed != (address.version == 6):
        raise ValueError(f"not an ip:port: {text!r}")
    return SocketAddress(canonical(address), number)


@lru_cache(maxsize=16384)
def canonical(address: IpAddress | str) -> str:
    """Return the canonical text of an IP address: compressed, without scope, and IPv4-mapped IPv6 as IPv4.

    Raises:
        ValueError: not an IP address.
    """
    ip = ipaddress.ip_address(address.partition("%")[0]) if isinstance(address, str) else address
    if ip.version == 6 and ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ip)


_LENGTH = re.compile(r"[0-9]{1,9}")


def parse_network(text: str) -> IpNetwork | None:
    """Parse a network like Go's ``net.ParseCIDR``, or a single address. Return None if the text is neither.

    Host bits are cleared, and IPv4-mapped IPv6 becomes IPv4. Netmasks instead of a prefix length, and zones in
    addresses, are not accepted.
    """
    _, slash, length = text.partition("/")
    if "%" in text or (slash and not _LENGTH.fullmatch(length)):
        return None
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
    if network.version == 6 and network.prefixlen >= 96 and (mapped := network.network_address.ipv4_mapped):
        return ipaddress.IPv4Network((int(mapped), network.prefixlen - 96))
    return network


@lru_cache(maxsize=16384)
def is_loopback(host: str) -> bool:
    """Return whether an IP address, as text, belongs to a loopback network."""
    return ipaddress.ip_address(host).is_loopback


@dataclass(frozen=True, slots=True)
class InternalAddress:
    """An endpoint inside this process: an internal listener. ``endpoint_id`` distinguishes endpoints of the same
    listener.
    """

    listener: str
    endpoint_id: str

    def __str__(self) -> str:
        return f"envoy://{self.listener}/{self.endpoint_id}"


@dataclass(frozen=True, slots=True)
class PipeAddress:
    """A Unix domain socket."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class NamedAddress:
    """A DNS name and a port, for clusters that resolve names (STRICT_DNS, LOGICAL_DNS)."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


EndpointAddress = SocketAddress | InternalAddress | PipeAddress | NamedAddress
