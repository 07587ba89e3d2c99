"""Parses and formats PROXY protocol headers, versions 1 and 2, which precede a connection's bytes."""

import ipaddress
from dataclasses import dataclass
from typing import Final

from xds.model.address import SocketAddress, canonical

SIGNATURE_2 = b"\r\n\r\n\x00\r\nQUIT\n"
_LONGEST_1 = 107  # the longest version 1 line, including its CRLF
LONGEST = 16 + 4096
"""The longest accepted header in bytes, with addresses and TLVs. The limit is this project's own."""


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """A parsed header.

    Attributes:
        version: 1 or 2.
        size: the header's length in bytes.
        source: the original source. ``None`` for LOCAL and UNKNOWN, which stand for the socket's own addresses.
        destination: the original destination, or ``None`` for LOCAL and UNKNOWN.
    """

    version: int
    size: int
    source: SocketAddress | None = None
    destination: SocketAddress | None = None


class NoHeader(Exception):
    """The bytes do not begin with a PROXY header."""


class NeedMore(Exception):
    """The bytes are the beginning of a PROXY header that is not complete yet."""


class BadHeader(Exception):
    """The PROXY header is malformed."""


def parse_header(data: bytes) -> ProxyHeader:
    """Parse the PROXY header at the beginning of a connection.

    Raises:
        NeedMore, NoHeader, BadHeader: the header is incomplete, missing or invalid.
    """
    if data[: len(SIGNATURE_2)] == SIGNATURE_2[: len(data)]:
        return _version_2(data)
    if data[:6] == b"PROXY "[: len(data)]:
        return _version_1(data)
    raise NoHeader


def _version_1(data: bytes) -> ProxyHeader:
    end = data.find(b"\r\n", 0, _LONGEST_1)
    if end < 0:
        if len(data) >= _LONGEST_1:
            raise BadHeader("no line end within 107 bytes")
        raise NeedMore
    fields = data[:end].split(b" ")
    if fields[1:2] == [b"UNKNOWN"]:
        return ProxyHeader(1, end + 2)
    if len(fields) != 6 or fields[1] not in (b"TCP4", b"TCP6"):
        raise BadHeader(f"malformed line {data[:end]!r}")
    try:
        hosts = [ipaddress.ip_address(field.decode("ascii")) for field in fields[2:4]]
        ports = [int(field) for field in fields[4:6] if field.isdigit()]
    except ValueError:
        raise BadHeader(f"malformed line {data[:end]!r}") from None
    version = 4 if fields[1] == b"TCP4" else 6
    if any(host.version != version for host in hosts) or len(ports) != 2 or max(ports) > 65535:
        raise BadHeader(f"malformed line {data[:end]!r}")
    source, destination = (SocketAddress(canonical(host), port) for host, port in zip(hosts, ports, strict=True))
    return ProxyHeader(1, end + 2, source, destination)


def _version_2(data: bytes) -> ProxyHeader:
    if len(data) < 16:
        raise NeedMore
    version, command = data[12] >> 4, data[12] & 0xF
    length = int.from_bytes(data[14:16], "big")
    if version != 2 or command > 1:
        raise BadHeader(f"version {version}, command {command}")
    if 16 + length > LONGEST:
        raise BadHeader(f"header of {length} bytes")
    if len(data) < 16 + length:
        raise NeedMore
    size = 16 + length
    if command == 0:
        return ProxyHeader(2, size)
    width = {0x11: 4, 0x21: 16}.get(data[13])
    if width is None:
        return ProxyHeader(2, size)
    if length < 2 * width + 4:
        raise BadHeader("addresses are cut off")
    body = data[16:]
    hosts = [ipaddress.ip_address(body[index * width : (index + 1) * width]) for index in range(2)]
    ports = [int.from_bytes(body[at : at + 2], "big") for at in (2 * width, 2 * width + 2)]
    return ProxyHeader(
        2, size, SocketAddress(canonical(hosts[0]), ports[0]), SocketAddress(canonical(hosts[1]), ports[1])
    )


_TLV_SPIFFE_ID = 0xD0
_VERSION_2_PROXY = 0x21


def encode_header(source: SocketAddress, destination: SocketAddress, spiffe_id: str | None) -> bytes:
    """Return a version 2 header in the form that the Rust ztunnel sends to a sandwiched waypoint
    (``application_tunnel``).

    One header cannot hold addresses of two families. If the families differ, it has AF_UNSPEC and no addresses.

    Args:
        source: the peer address of the tunnel's TCP connection.
        destination: the destination of the tunnel.
        spiffe_id: the SPIFFE id of the tunnel's client, for TLV 0xD0. ``None`` omits the TLV.
    """
    addresses = [ipaddress.ip_address(address.host) for address in (source, destination)]
    versions = {address.version for address in addresses}
    family = {4: 0x11, 6: 0x21}[versions.pop()] if len(versions) == 1 else 0x01
    body = b""
    if family != 0x01:
        ports = source.port.to_bytes(2, "big") + destination.port.to_bytes(2, "big")
        body = addresses[0].packed + addresses[1].packed + ports
    if spiffe_id is not None:
        value = spiffe_id.encode()
        body += bytes((_TLV_SPIFFE_ID,)) + len(value).to_bytes(2, "big") + value
    return SIGNATURE_2 + bytes((_VERSION_2_PROXY, family)) + len(body).to_bytes(2, "big") + body


LOCAL_HEADER: Final = SIGNATURE_2 + bytes((0x20, 0, 0, 0))
"""A version 2 header (LOCAL) for a connection that the proxy opens for its own purposes."""


def header_of_version(version: int, source: SocketAddress, destination: SocketAddress) -> bytes:
    """Return the header of a proxied connection in the form of Envoy's ``upstream_proxy_protocol``.

    One header cannot hold addresses of two families. If the families differ, it has UNKNOWN in version 1, or
    AF_UNSPEC in version 2.

    Args:
        version: 1 or 2.
        source: the client's address.
        destination: the address that the client connected to.
    """
    if version == 2:
        return encode_header(source, destination, None)
    families = {":" in address.host for address in (source, destination)}
    if len(families) == 2:
        return b"PROXY UNKNOWN\r\n"
    family = "TCP6" if families.pop() else "TCP4"
    return f"PROXY {family} {source.host} {destination.host} {source.port} {destination.port}\r\n".encode()
