"""Captures the packets between two nodes, and separates their TCP payloads into TLS records and other bytes."""

import socket
import struct
import threading
from dataclasses import dataclass, field

_ETH_P_ALL = 3
_TCP = 6
_RECORD_TYPES = (20, 21, 22, 23)  # change_cipher_spec, alert, handshake, application_data


@dataclass(slots=True)
class _Flow:
    """One direction of a connection. ``left`` is the number of bytes still missing from the current TLS record."""

    left: int = 0
    header: bytes = b""


@dataclass(slots=True)
class WireReport:
    """The totals of a capture; ``plain`` has the first bytes of payloads that are not TLS."""

    packets: int = 0
    tls_bytes: int = 0
    records: int = 0
    plain: list[str] = field(default_factory=list)
    secrets_seen: int = 0


class WireTap:
    """Reads a raw socket in its own thread.

    Args:
        raw: an AF_PACKET socket of the node's namespace, not yet bound.
        device: the device to capture.
        secret: bytes that must never appear.
    """

    def __init__(self, raw: socket.socket, device: str, secret: bytes) -> None:
        raw.bind((device, _ETH_P_ALL))
        raw.settimeout(0.1)
        self.report = WireReport()
        self._raw = raw
        self._secret = secret
        self._flows: dict[tuple[bytes, bytes], _Flow] = {}
        self._next: dict[tuple[bytes, bytes], int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="wire tap", daemon=True)
        self._thread.start()

    def stop(self) -> WireReport:
        """End the capture, and return its totals."""
        self._stopped.set()
        self._thread.join()
        self._raw.close()
        return self.report

    def _read(self) -> None:
        while not self._stopped.is_set():
            try:
                self._packet(self._raw.recv(65536))
            except TimeoutError:
                continue

    def _packet(self, frame: bytes) -> None:
        kind = int.from_bytes(frame[12:14], "big")
        if kind == 0x0800 and frame[23] == _TCP:
            header = (frame[14] & 0xF) * 4
            length = int.from_bytes(frame[16:18], "big")
            addresses, segment = frame[26:34], frame[14 + header : 14 + length]
        elif kind == 0x86DD and frame[20] == _TCP:
            length = int.from_bytes(frame[18:20], "big")
            addresses, segment = frame[22:54], frame[54 : 54 + length]
        else:
            return
        offset = (segment[12] >> 4) * 4
        payload = segment[offset:]
        if not payload:
            return
        flow = (addresses, segment[:4])
        sequence = struct.unpack("!I", segment[4:8])[0]
        if flow in self._next and (sequence - self._next[flow]) & 0x80000000:
            return  # a retransmission
        self._next[flow] = (sequence + len(payload)) & 0xFFFFFFFF
        self.report.packets += 1
        self.report.secrets_seen += payload.count(self._secret)
        self._records(flow, payload)

    def _records(self, key: tuple[bytes, bytes], payload: bytes) -> None:
        """Parse the TLS records of a stream. Bytes outside of a record count as plain text."""
        flow = self._flows.setdefault(key, _Flow())
        while payload:
            taken = payload[: flow.left]
            self.report.tls_bytes += len(taken)
            flow.left -= len(taken)
            payload = payload[len(taken) :]
            if not payload:
                return
            need = 5 - len(flow.header)
            flow.header, payload = flow.header + payload[:need], payload[need:]
            if len(flow.header) < 5:
                return
            if flow.header[0] not in _RECORD_TYPES or flow.header[1] != 3:
                self.report.plain.append(repr((flow.header + payload)[:40]))
                flow.header = b""
                return
            flow.left = int.from_bytes(flow.header[3:5], "big")
            flow.header = b""
            self.report.records += 1
