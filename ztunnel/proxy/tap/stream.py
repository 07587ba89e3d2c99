"""Packets of an imagined TCP connection that carries a stream: addresses, sequence numbers, checksums. Pure.

A tap observes bytes that pass between an application and the proxy, not packets. Tools that read captures need a
handshake, segments with sequence numbers, and an end, so :class:`SyntheticTcp` creates them (RFC 9293). It
simulates TCP on a perfect network: no segment is lost, reordered or sent twice, every write is acknowledged at
once, and the window is scaled so far that no sender waits. A reader sees gaps only where the capture itself has
them (:meth:`SyntheticTcp.lost`).
"""

import ipaddress
import struct
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple

from xds.model.address import SocketAddress

_FIN, _SYN, _RST, _PSH, _ACK = 0x01, 0x02, 0x04, 0x08, 0x10
_TCP: Final = 6
_TTL: Final = 64
_WINDOW: Final = 0xFFFF
_WINDOW_SCALE: Final = 14  # the largest (RFC 7323, 2.3): a window of 1 GiB
#: The payload of an Ethernet frame, 1,500 bytes, without the IP and TCP headers.
_MSS4, _MSS6 = 1460, 1440
_SEQUENCE: Final = 1 << 32
#: The longest gap in sequence numbers. For readers, a jump of 2**31 or more leads back to earlier data.
_LONGEST_GAP: Final = 1 << 30

_HEADER4: Final = struct.Struct("!BBHHHBBH4s4s")
_HEADER6: Final = struct.Struct("!IHBB16s16s")
_HEADER_TCP: Final = struct.Struct("!HHIIBBHHH")


class Side(Enum):
    """One end of a connection, as the sender of a packet."""

    CLIENT = "client"
    SERVER = "server"

    @property
    def other(self) -> "Side":
        """The other end."""
        return Side.SERVER if self is Side.CLIENT else Side.CLIENT


class Segment(NamedTuple):
    """One packet.

    Attributes:
        sender: the end that has sent it.
        packet: IP header, TCP header, payload.
    """

    sender: Side
    packet: bytes


class _End:
    """One end of a connection, with the number of bytes that it has sent.

    Attributes:
        next: the sequence number of the next byte.
        ended: whether it has sent FIN or RST.
        skipped: the number of skipped sequence numbers since its last data.
    """

    __slots__ = ("address", "ended", "next", "port", "skipped")

    def __init__(self, address: bytes, port: int, first: int) -> None:
        self.address = address
        self.port = port
        self.next = first % _SEQUENCE
        self.ended = False
        self.skipped = 0

    def advance(self, size: int) -> None:
        self.next = (self.next + size) % _SEQUENCE


class SyntheticTcp:
    """One connection. Methods report an event, and return its packets in order.

    Args:
        client, server: the two addresses. If only one address is IPv4, it is shown as IPv4-mapped.
        number: the connection's number in the capture. Initial sequence numbers depend on it, so that a reader
            does not mistake a connection for an earlier one with the same ports.
        mss: the longest payload of a segment. ``None`` uses Ethernet's.
    """

    def __init__(
        self, client: SocketAddress, server: SocketAddress, number: int = 0, mss: int | None = None
    ) -> None:
        hosts = ipaddress.ip_address(client.host), ipaddress.ip_address(server.host)
        self._is_ipv6 = any(host.version == 6 for host in hosts)
        source, destination = (self._packed(host) for host in hosts)
        first = number * 0x1000_0000 + number
        self._ends = {
            Side.CLIENT: _End(source, client.port, first),
            Side.SERVER: _End(destination, server.port, first + 0x0800_0000),
        }
        self.mss = mss if mss is not None else _MSS6 if self._is_ipv6 else _MSS4

    def _packed(self, host: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bytes:
        if self._is_ipv6 and host.version == 4:
            return b"\0" * 10 + b"\xff\xff" + host.packed
        return host.packed

    def opening(self) -> list[Segment]:
        """Return the three packets of the handshake. Call this first, and only once."""
        options = struct.pack("!BBHBBBB", 2, 4, self.mss, 1, 3, 3, _WINDOW_SCALE)
        syn = self._segment(Side.CLIENT, _SYN, options=options)
        self._ends[Side.CLIENT].advance(1)
        answer = self._segment(Side.SERVER, _SYN | _ACK, options=options)
        self._ends[Side.SERVER].advance(1)
        return [syn, answer, self._segment(Side.CLIENT, _ACK)]

    def data(self, sender: Side, payload: bytes) -> Iterator[Segment]:
        """Yield the segments of the data, each of at most ``mss`` bytes, and the acknowledgment of the last one.
        Yields none after the end.
        """
        end = self._ends[sender]
        if end.ended or not payload:
            return
        end.skipped = 0
        for start in range(0, len(payload), self.mss):
            part = payload[start : start + self.mss]
            last = start + len(part) == len(payload)
            yield self._segment(sender, _ACK | (_PSH if last else 0), part)
            end.advance(len(part))
        yield self._segment(sender.other, _ACK)

    def lost(self, sender: Side, size: int) -> None:
        """Skip bytes that were sent but are missing from the capture. A reader of the capture sees a gap, at most
        the longest one.
        """
        end = self._ends[sender]
        if not end.ended:
            skipped = min(size, _LONGEST_GAP - end.skipped)
            end.advance(skipped)
            end.skipped += skipped

    def end(self, sender: Side) -> list[Segment]:
        """Return the FIN of one direction and its acknowledgment, or an empty list if the direction has ended."""
        end = self._ends[sender]
        if end.ended:
            return []
        fin = self._segment(sender, _FIN | _ACK)
        end.advance(1)
        end.ended = True
        return [fin, self._segment(sender.other, _ACK)]

    def reset(self, sender: Side) -> list[Segment]:
        """Return RST, which ends both directions. Empty after both have ended or after another RST."""
        if all(end.ended for end in self._ends.values()):
            return []
        for end in self._ends.values():
            end.ended = True
        return [self._segment(sender, _RST | _ACK)]

    def _segment(self, sender: Side, flags: int, payload: bytes = b"", options: bytes = b"") -> Segment:
        here, there = self._ends[sender], self._ends[sender.other]
        offset = (20 + len(options)) // 4 << 4
        acknowledged = there.next if flags & _ACK else 0
        fields = (here.port, there.port, here.next, acknowledged, offset, flags, _WINDOW)
        size = 20 + len(options) + len(payload)
        rest = options + payload
        addresses = here.address + there.address
        # The pseudo header of both IP versions has the addresses, the length and the protocol (RFC 9293, 3.1 and
        # RFC 8200, 8.1). Their order does not matter to a sum.
        total = _checksum(addresses + struct.pack("!II", size, _TCP) + _HEADER_TCP.pack(*fields, 0, 0) + rest)
        tcp = _HEADER_TCP.pack(*fields, total, 0) + rest
        if self._is_ipv6:
            head = _HEADER6.pack(6 << 28, size, _TCP, _TTL, here.address, there.address)
        else:
            # The identification can be 0, because a packet with DF is never fragmented (RFC 6864, 4.1).
            ip = (0x45, 0, 20 + size, 0, 0x4000, _TTL, _TCP)
            total = _checksum(_HEADER4.pack(*ip, 0, here.address, there.address))
            head = _HEADER4.pack(*ip, total, here.address, there.address)
        return Segment(sender, head + tcp)


def _checksum(data: bytes) -> int:
    """Return the internet checksum (RFC 1071): 16 bits, the complement of the ones' complement sum.

    2**16 is 1 modulo 65,535, so the sum of the words is the whole number modulo that: one division in C instead of
    a loop. A remainder of 0 stands for 0xFFFF, because the data is never all zero.
    """
    if len(data) % 2:
        data += b"\0"
    return 0xFFFF - (int.from_bytes(data, "big") % 0xFFFF or 0xFFFF)
