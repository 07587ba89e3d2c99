"""Encodes requests to conntrack and decodes its dumps (``linux/netfilter/nfnetlink_conntrack.h``), without I/O."""

import struct
from dataclasses import dataclass
from ipaddress import ip_address

from tproxy.expressions import IpAddress
from tproxy.wire import MalformedDump, Message, attribute, attribute_map

_SUBSYSTEM = 1
_GET, _DELETE = 1, 2
_REQUEST, _DUMP = 0x1, 0x300
_ORIGINAL, _REPLY, _ID, _ZONE = 1, 2, 12, 18
_NESTED = 0x8000
_HEADER = struct.Struct("!BBH")


@dataclass(frozen=True, slots=True)
class Flow:
    """A tracked connection. Its addresses are the addresses in forwarded packets, after translation of the
    destination.

    Attributes:
        family: the addresses' family, ``AF_INET`` or ``AF_INET6``.
        icmp: type and code of the first packet for ICMP and ICMPv6. Otherwise zeros.
        entry: the attributes that identify the entry in the kernel.
    """

    family: int
    source: IpAddress
    destination: IpAddress
    protocol: int
    source_port: int
    destination_port: int
    entry: bytes
    icmp: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"{self.source}:{self.source_port} > {self.destination}:{self.destination_port}/{self.protocol}"


def dump_request() -> Message:
    """Return the request for all tracked connections."""
    return Message(_SUBSYSTEM << 8 | _GET, _REQUEST | _DUMP, _HEADER.pack(0, 0, 0), "read tracked connections")


def delete_request(flow: Flow) -> Message:
    """Return the request that deletes one entry. It fails with ENOENT if the entry no longer exists."""
    body = _HEADER.pack(flow.family, 0, 0) + flow.entry
    return Message(_SUBSYSTEM << 8 | _DELETE, _REQUEST, body, f"delete the tracked connection {flow}")


def read_flow(body: bytes) -> Flow:
    """Decode one entry of a dump.

    Raises:
        MalformedDump: the entry lacks an address or does not have the kernel's layout.
    """
    parts = attribute_map(body[_HEADER.size :])
    original, reply = _tuple(parts.get(_ORIGINAL, b"")), _tuple(parts.get(_REPLY, b""))
    entry = b"".join(
        attribute(kind | (_NESTED if kind == _ORIGINAL else 0), parts[kind])
        for kind in (_ORIGINAL, _ZONE, _ID)
        if kind in parts
    )
    # The translated destination is the source of the reply direction. The source of the original direction is
    # never translated.
    return Flow(body[0], original[0], reply[0], original[2], original[3], reply[3], entry, original[5])


def _tuple(payload: bytes) -> tuple[IpAddress, IpAddress, int, int, int, tuple[int, int]]:
    """Return source, destination, protocol, ports, and ICMP's type and code of one direction."""
    parts = attribute_map(payload)
    addresses, ports = attribute_map(parts.get(1, b"")), attribute_map(parts.get(2, b""))
    source, destination = (addresses.get(1) or addresses.get(3), addresses.get(2) or addresses.get(4))
    if source is None or destination is None or len(ports.get(1, b"")) != 1:
        raise MalformedDump(payload)
    numbers = (int.from_bytes(ports.get(kind, b""), "big") for kind in (2, 3))
    # 5 is CTA_PROTO_ICMP_TYPE, and 8 is CTA_PROTO_ICMPV6_TYPE. The code has the next number.
    icmp = next(
        ((ports[kind][0], ports[kind + 1][0]) for kind in (5, 8) if ports.get(kind) and ports.get(kind + 1)),
        (0, 0),
    )
    try:
        ends = ip_address(source), ip_address(destination)
    except ValueError as error:
        raise MalformedDump(payload) from error
    return *ends, ports[1][0], next(numbers), next(numbers), icmp
