"""A literal reader of pcapng and of the TCP in it, for tests: slow, strict, and written from the formats alone."""

import ipaddress
import struct
from dataclasses import dataclass, field


@dataclass
class Packet:
    """One packet, with the fields of its block."""

    interface: int
    at_us: int
    source: tuple[str, int]
    destination: tuple[str, int]
    sequence: int
    acknowledged: int
    flags: str
    payload: bytes
    comment: str
    inbound: bool


@dataclass
class Interface:
    """One interface, its comment, and its statistics if there are any."""

    name: str
    description: str
    comment: str
    statistics: dict[str, int] | None = None
    closing_comment: str = ""


@dataclass
class Capture:
    """A whole file."""

    application: str = ""
    comment: str = ""
    interfaces: list[Interface] = field(default_factory=list)
    packets: list[Packet] = field(default_factory=list)

    def streams(self) -> dict[tuple[tuple[str, int], tuple[str, int]], tuple[bytes, bytes]]:
        """Return the bytes of each direction by client and server. Every sequence number is checked.

        Connections with equal ports are joined. A gap is filled with nothing.
        """
        found: dict[tuple[tuple[str, int], tuple[str, int]], tuple[bytearray, bytearray]] = {}
        for packet in self.packets:
            here, there = packet.source, packet.destination
            if packet.flags == "S":
                found.setdefault((here, there), (bytearray(), bytearray()))
            elif (here, there) in found:
                found[here, there][0].extend(packet.payload)
            else:
                found[there, here][1].extend(packet.payload)
        return {names: (bytes(sent), bytes(received)) for names, (sent, received) in found.items()}


def read(data: bytes) -> Capture:
    """Read a file that ends after a whole block."""
    capture = Capture()
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from("<II", data, at)
        assert size % 4 == 0
        assert struct.unpack_from("<I", data, at + size - 4) == (size,)
        body = data[at + 8 : at + size - 4]
        at += size
        assert bool(capture.application) == (kind != 0x0A0D0D0A)
        if kind == 0x0A0D0D0A:
            assert struct.unpack_from("<IHHq", body) == (0x1A2B3C4D, 1, 0, -1)
            options = _options(body[16:])
            capture.application, capture.comment = options[4].decode(), options.get(1, b"").decode()
        elif kind == 1:
            assert struct.unpack_from("<HHI", body) == (101, 0, 65_575)
            options = _options(body[8:])
            texts = [options.get(code, b"").decode() for code in (2, 3, 1)]
            capture.interfaces.append(Interface(*texts))
        elif kind == 6:
            interface, high, low, size, whole = struct.unpack_from("<IIIII", body)
            assert size == whole
            assert interface < len(capture.interfaces)
            options = _options(body[20 + size + -size % 4 :])
            packet = _packet(body[20 : 20 + size])
            packet.interface, packet.at_us, packet.comment = (
                interface,
                high << 32 | low,
                options.get(1, b"").decode(),
            )
            packet.inbound = {1: True, 2: False}[struct.unpack("<I", options[2])[0]]
            capture.packets.append(packet)
        else:
            assert kind == 5
            found = capture.interfaces[struct.unpack_from("<I", body)[0]]
            options = _options(body[12:])
            found.statistics = {
                "started_us": _time(options[2]),
                "ended_us": _time(options[3]),
                "packets": struct.unpack("<Q", options[4])[0],
                "dropped": struct.unpack("<Q", options[5])[0],
            }
            found.closing_comment = options.get(1, b"").decode()
    return capture


def _time(value: bytes) -> int:
    high, low = struct.unpack("<II", value)
    return int(high << 32 | low)


def _options(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while data:
        code, size = struct.unpack_from("<HH", data)
        if code == 0:
            assert data[2:] == b"\0\0"
            return found
        found[code] = data[4 : 4 + size]
        data = data[4 + size + -size % 4 :]
    return found


def _packet(data: bytes) -> Packet:
    if data[0] >> 4 == 4:
        assert _sum(data[:20]) == 0xFFFF
        assert struct.unpack_from("!H", data, 2) == (len(data),)
        assert data[9] == 6
        source, destination, tcp = data[12:16], data[16:20], data[20:]
    else:
        assert data[0] >> 4 == 6
        assert struct.unpack_from("!H", data, 4) == (len(data) - 40,)
        assert data[6] == 6
        source, destination, tcp = data[8:24], data[24:40], data[40:]
    assert _sum(source + destination + struct.pack("!II", 6, len(tcp)) + tcp) == 0xFFFF
    sport, dport, sequence, acknowledged, offset, bits = struct.unpack_from("!HHIIBB", tcp)
    flags = "".join(letter for bit, letter in enumerate("FSRPA") if bits >> bit & 1)
    return Packet(
        interface=0,
        at_us=0,
        source=(str(ipaddress.ip_address(source)), sport),
        destination=(str(ipaddress.ip_address(destination)), dport),
        sequence=sequence,
        acknowledged=acknowledged,
        flags=flags,
        payload=tcp[(offset >> 4) * 4 :],
        comment="",
        inbound=False,
    )


def _sum(data: bytes) -> int:
    """Return the ones' complement sum of the words; 0xFFFF: a checksum in them is right."""
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
