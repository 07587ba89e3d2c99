"""Parses a request for a tap, with its limits, and decides which connections it captures. Pure."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from xds.digits import whole_number
from xds.model.address import SocketAddress, canonical
from ztunnel.runtime.settings import duration_s

#: The path of the page on the taps' local socket.
PATH: Final = "/tap"
CONTENT_TYPE: Final = "application/x-pcapng"
#: The header with the number of the pod's connections that were already open when the tap began.
OPEN: Final = "ztunnel-open-connections"
#: The trailers that end a capture.
ENDED, STREAMS, PACKETS, DROPPED, DROPPED_BYTES = (
    f"ztunnel-{name}" for name in ("ended", "streams", "packets", "dropped", "dropped-bytes")
)
#: The variable that permits taps. Its value is the path of the socket; the default, an empty value, permits none.
VARIABLE: Final = "ZTUNNEL_TAP_SOCKET"

#: The default and the longest duration of a tap in seconds, so that a forgotten tap ends by itself.
DEFAULT_S, MOST_S = 60.0, 900.0
DEFAULT_BYTES, MOST_BYTES = 64 * 1024 * 1024, 1024 * 1024 * 1024
#: The largest number of concurrent taps of one proxy. Each pod can have one.
MOST_TAPS: Final = 4
#: The limit of each count from another process, so that the sum of all processes fits into 64 bits.
_MOST_COUNT: Final = 1 << 56
#: The limit of each text in a request. The texts are repeated in logs and in the capture.
_MOST_TEXT: Final = 512
_UNITS: Final = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE: Final = re.compile(r"(\d+)\s*([KMG]?i?B?)", re.ASCII | re.IGNORECASE)


def refusal(socket_path: str) -> str:
    """Return the admin server's refusal of a tap request. Taps are only for root, but any process of the node can
    reach the admin server.
    """
    if not socket_path:
        return f"taps are not permitted: {VARIABLE} names no socket\n"
    return f"taps are for root, at the local socket {socket_path}: ztunnel tap\n"


class BadRequest(ValueError):
    """A request for a tap is invalid. The text names the parameter."""


class Direction(StrEnum):
    """Whether the pod or its peer opened a connection: the direction as seen from the pod."""

    OUTBOUND = "outbound"
    INBOUND = "inbound"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """One connection, as a tap shows it.

    Attributes:
        direction: the direction of the connection, as seen from the tapped pod.
        client: the address of the application that connected.
        server: the dialled address (outbound), or the application's address (inbound).
        peers: the names of the other end: its addresses, its workload, its services, its identity.
        ports: the dialled port, besides the server's port.
        notes: lines about identities, the tunnel and so on.
    """

    direction: Direction
    client: SocketAddress
    server: SocketAddress
    peers: frozenset[str]
    ports: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TapRequest:
    """The connections that a tap captures, and the limits of the capture.

    Attributes:
        pod: ``NAMESPACE/NAME`` in an Istio mesh, an address in Envoy's dialect.
        port: capture only connections to this port. 0: any port.
        peer: capture only connections with this address, workload, service or identity. Empty: any peer.
        for_s: the longest duration of the capture, in seconds.
        limit_bytes: the largest size of the capture.
    """

    pod: str
    port: int = 0
    peer: str = ""
    for_s: float = DEFAULT_S
    limit_bytes: int = DEFAULT_BYTES

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "TapRequest":
        """Parse the parameters ``pod``, ``port``, ``peer``, ``for`` and ``limit`` of a request.

        Raises:
            BadRequest: a parameter is missing, unknown, or beyond its limit.
        """
        unknown = given.keys() - {"pod", "port", "peer", "for", "limit"}
        if unknown:
            raise BadRequest(f"{min(unknown)}: no such parameter")
        for name, text in given.items():
            if len(text) > _MOST_TEXT or not text.isprintable():
                raise BadRequest(f"{name}: at most {_MOST_TEXT} printable characters")
        if not given.get("pod"):
            raise BadRequest("pod: this parameter is required")
        return cls(
            pod=_plain(given["pod"]),
            port=_port(given.get("port", "")),
            peer=_plain(given.get("peer", "")),
            for_s=_seconds(given.get("for", "")),
            limit_bytes=_bytes(given.get("limit", "")),
        )

    def matches(self, facts: StreamFacts) -> bool:
        """Return whether the tap captures a connection."""
        if self.port and self.port != facts.server.port and self.port not in facts.ports:
            return False
        return not self.peer or self.peer in facts.peers

    def __str__(self) -> str:
        only = [f"port {self.port}"] if self.port else []
        only += [f"peer {self.peer}"] if self.peer else []
        return f"{self.pod}, {' and '.join(only) or 'every connection'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The counts of a tap in one process, or summed over all processes.

    Attributes:
        streams: the number of captured connections.
        outbound, inbound: the number of packets per direction, including dropped ones.
        outbound_dropped, inbound_dropped: the number of these packets that are missing from the capture.
        dropped_bytes: the payload bytes of the missing packets.
    """

    streams: int = 0
    outbound: int = 0
    inbound: int = 0
    outbound_dropped: int = 0
    inbound_dropped: int = 0
    dropped_bytes: int = 0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            streams=self.streams + other.streams,
            outbound=self.outbound + other.outbound,
            inbound=self.inbound + other.inbound,
            outbound_dropped=self.outbound_dropped + other.outbound_dropped,
            inbound_dropped=self.inbound_dropped + other.inbound_dropped,
            dropped_bytes=self.dropped_bytes + other.dropped_bytes,
        )

    @property
    def bounded(self) -> "Totals":
        """Return the same counts limited to pcapng's 64 bits, because they can come from another process."""
        return Totals(**{each.name: min(max(getattr(self, each.name), 0), _MOST_COUNT) for each in fields(self)})

    @property
    def packets(self) -> int:
        """The number of packets in both directions, including dropped ones."""
        return self.outbound + self.inbound

    @property
    def dropped(self) -> int:
        """The number of packets in both directions that are missing from the capture."""
        return self.outbound_dropped + self.inbound_dropped


def _plain(text: str) -> str:
    """Return an address in canonical form, and any other text unchanged."""
    try:
        return canonical(ipaddress.ip_address(text))
    except ValueError:
        return text


def _port(text: str) -> int:
    if not text:
        return 0
    number = whole_number(text, 65535)
    if not number:
        raise BadRequest(f"port: {text} is not a port from 1 to 65535")
    return number


def _seconds(text: str) -> float:
    if not text:
        return DEFAULT_S
    try:
        found = duration_s(text)
    except ValueError as error:
        raise BadRequest(f"for: {text} {error}") from None
    if not 0 < found <= MOST_S:
        raise BadRequest(f"for: {text} must be more than 0 and at most {MOST_S:g}s")
    return found


def _bytes(text: str) -> int:
    if not text:
        return DEFAULT_BYTES
    match = _SIZE.fullmatch(text)
    unit = match[2].upper() if match is not None else ""
    # A unit of one letter, as in "64M", means the binary unit (MiB).
    unit = (
        f"{unit}iB".upper() if len(unit) == 1 and unit != "B" else unit.removesuffix("B") if unit == "B" else unit
    )
    if match is None or unit not in _UNITS:
        raise BadRequest(f"limit: {text} is no size such as 500KiB, 64MiB or 1GiB")
    found = int(match[1][:20]) * _UNITS[unit]
    if not 0 < found <= MOST_BYTES:
        raise BadRequest(f"limit: {text} must be more than 0 and at most {MOST_BYTES >> 20}MiB")
    return found
