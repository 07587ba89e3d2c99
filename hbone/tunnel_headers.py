"""Parses and formats the header fields of tunnels: authority, baggage, forwarded, traceparent.

The formatted values are exactly the Rust ztunnel's, and the parsing functions accept the values that it accepts.
Identifiers and random bytes are arguments.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from hbone.errors import InvalidHeader
from hbone.events import Headers

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_HOSTNAME: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*\Z")
_PORT: Final = re.compile(r"[0-9]{1,5}\Z")


@dataclass(frozen=True, slots=True)
class Authority:
    """The target of a CONNECT: an address or a lower-case host name, and a port from 1 to 65535."""

    host: IPAddress | str
    port: int

    def __str__(self) -> str:
        if isinstance(self.host, ipaddress.IPv6Address):
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    def encode(self) -> bytes:
        """Return the value of the ``:authority`` field."""
        return str(self).encode("ascii")


@lru_cache(maxsize=4096)  # called for each tunnel, with few different values
def parse_authority(value: bytes | None) -> Authority:
    """Split a CONNECT ``:authority`` into host and port (RFC 9113, 8.5; RFC 3986, 3.2).

    Args:
        value: ASCII ``host:port``, an IPv6 host in brackets, no userinfo. None if the field was missing.

    Returns:
        The host, as an address (an IPv4-mapped IPv6 address as IPv4, so that rules apply to both spellings), or as
        a lower-case name. A trailing dot is refused.

    Raises:
        InvalidHeader: the value has another form. Callers answer 400.
    """
    raw = value if value is not None else b""
    try:
        text = raw.decode("ascii")
    except UnicodeDecodeError:
        raise InvalidHeader("authority", raw) from None
    host, colon, port_text = text.rpartition(":")
    if not colon or not _PORT.match(port_text) or not 0 < int(port_text) < 65536:
        raise InvalidHeader("authority", raw)
    port = int(port_text)
    if host.startswith("[") and host.endswith("]"):
        if "%" in host:
            raise InvalidHeader("authority", raw)
        try:
            address = ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise InvalidHeader("authority", raw) from None
        return Authority(address.ipv4_mapped or address, port)
    try:
        return Authority(ipaddress.IPv4Address(host), port)
    except ValueError:
        pass  # not an address, so it is a name
    name = host.lower()
    # Names that some resolvers treat as IPv4 addresses: digits and dots only, or a hexadecimal last label.
    if not _HOSTNAME.match(name) or re.match(r"(0x[0-9a-f]*|[0-9]+)\Z", name.rpartition(".")[2]):
        raise InvalidHeader("authority", raw)
    return Authority(name, port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baggage:
    """The workload metadata in the ``baggage`` header, for one side of a tunnel. Empty fields are not sent."""

    cluster_id: str = ""
    namespace: str = ""
    workload_type: str = ""
    workload_name: str = ""
    service_name: str = ""
    revision: str = ""
    region: str = ""
    zone: str = ""


_WORKLOAD_TYPES: Final = ("deployment", "cronjob", "pod", "job")
_BAGGAGE_FIELDS: Final = {
    "k8s.cluster.name": "cluster_id",
    "k8s.namespace.name": "namespace",
    "service.name": "service_name",
    "service.version": "revision",
    "cloud.region": "region",
    "cloud.availability_zone": "zone",
}


def format_baggage(baggage: Baggage) -> bytes:
    """Return the value of the ``baggage`` field, with its keys in the Rust ztunnel's order."""
    kind = baggage.workload_type.lower() or "deployment"
    pairs = (
        ("k8s.cluster.name", baggage.cluster_id),
        ("k8s.namespace.name", baggage.namespace),
        (f"k8s.{kind}.name", baggage.workload_name),
        ("service.name", baggage.service_name),
        ("service.version", baggage.revision),
        ("cloud.region", baggage.region),
        ("cloud.availability_zone", baggage.zone),
    )
    return ",".join(f"{key}={value}" for key, value in pairs if value).encode("utf-8")


def parse_baggage(headers: Headers) -> Baggage:
    """Parse all ``baggage`` fields of a header section. Unknown keys are ignored, and later values replace earlier
    ones.

    As in the Rust ztunnel, spaces are kept, and a non-ASCII byte in any field makes the result empty.
    """
    values: dict[str, str] = {}
    for name, raw in headers:
        if name != b"baggage":
            continue
        if not raw.isascii():
            return Baggage()
        for item in raw.decode("ascii").split(","):
            pieces = item.split("=")
            if len(pieces) < 2:
                continue
            key, value = pieces[0], pieces[1]
            if key in _BAGGAGE_FIELDS:
                values[_BAGGAGE_FIELDS[key]] = value
            elif key.startswith("k8s.") and key.endswith(".name") and key[4:-5] in _WORKLOAD_TYPES:
                values["workload_type"] = key[4:-5] if value else ""
                values["workload_name"] = value
    return Baggage(**values)


def format_forwarded(client: str, host: str | None = None) -> bytes:
    """Return the value of the ``forwarded`` field (RFC 7239): the client's ``ip:port``, and the dialled service,
    if any.
    """
    value = f'for="{client}"'
    return (f"{value};host={host}" if host else value).encode("ascii")


def forwarded_host(headers: Headers) -> str | None:
    """Return the ``host`` parameter of the ``forwarded`` field (RFC 7239), without quotes. None if it is absent or
    not ASCII.
    """
    value = first(headers, b"forwarded")
    if value is None or not value.isascii():
        return None
    for part in value.decode("ascii").split(";"):
        text = part.strip()
        if text.startswith("host="):
            return text[5:].strip('"') or None
    return None


def format_traceparent(noise: int, sampled_below: int = 0) -> bytes:
    """Return the ``traceparent`` value of a new trace (W3C trace context, version 00).

    Args:
        noise: 192 random bits, used as the identifiers of trace and parent.
        sampled_below: the trace is sampled if the last 7 octets of its identifier, as a number, are below this.
    """
    digits = f"{noise:048x}"
    flags = "01" if sampled_below and (noise >> 64) & 0xFFFFFFFFFFFFFF < sampled_below else "00"
    return f"00-{digits[:32]}-{digits[32:]}-{flags}".encode("ascii")


def first(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Return the first value of the field ``name`` (in lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None
