"""Converts the bytes of a pod's connections to packets of a capture file, within bounded memory. Pure.

A :class:`Capture` belongs to the process that carries the connections. Each tapped connection has a
:class:`CapturedStream`, which receives the relay's bytes (:class:`hbone.aio.observed.StreamObserver`). It queues
whole packet blocks of pcapng, and the owner empties the queue. Bytes that do not fit into the queue are dropped at
once, before encoding, and counted. The connection's next packet states their number. The data path never waits for
the reader of a capture.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from xds.model.address import SocketAddress
from ztunnel.proxy.tap import pcapng
from ztunnel.proxy.tap.request import Direction, StreamFacts, TapRequest
from ztunnel.proxy.tap.stream import Segment, Side, SyntheticTcp

log = logging.getLogger(__name__)

#: The size limit of the queue for the capture's reader. Packets beyond it are dropped.
MOST_WAITING_BYTES: Final = 4 * 1024 * 1024
#: Extra room in the queue for blocks without data (handshakes, ends), so that the capture still shows where
#: streams begin and end.
_SPARE_BYTES: Final = 256 * 1024
#: The size of a segment's block and its acknowledgment's block with a comment, without the payload.
_OVERHEAD_BYTES: Final = 512
#: The most ports that are tried to give each connection its own address: all streams of a tunnel connection can
#: have the same address.
_MOST_PORTS: Final = 4096
#: The comment of a connection's last packet in a capture if the tap had an internal error. The connection itself
#: lost no bytes.
_FAILED: Final = "the tap failed here; the connection itself continues"


def interface_of(direction: Direction) -> int:
    """Return the id of the capture interface for a direction."""
    return 0 if direction is Direction.OUTBOUND else 1


class Capture:
    """Collects the packets of one tap in one process.

    Args:
        request: selects the connections to capture.
        now_us: the time in microseconds since 1970.
        on_data: called when the queue gets its first block.
        most_waiting_bytes: the size of the queue above which packets are dropped.

    Attributes:
        packets: the number of packets, including dropped ones.
        dropped: the number of packets missing from the capture.
        dropped_bytes: the payload bytes of the dropped packets.
        streams: the number of captured connections.
        waiting_bytes: the length of the queue.
    """

    def __init__(
        self,
        request: TapRequest,
        now_us: Callable[[], int],
        on_data: Callable[[], object],
        most_waiting_bytes: int = MOST_WAITING_BYTES,
    ) -> None:
        self.request = request
        self.packets = dict.fromkeys(Direction, 0)
        self.dropped = dict.fromkeys(Direction, 0)
        self.dropped_bytes = 0
        self.streams = 0
        self.waiting_bytes = 0
        self._most_bytes = most_waiting_bytes
        self._now_us = now_us
        self._on_data = on_data
        self._queue: deque[bytes] = deque()
        self._ended = False
        self._open: set[tuple[SocketAddress, SocketAddress]] = set()

    def stream(self, facts: StreamFacts) -> CapturedStream | None:
        """Return an observer for a new connection, or ``None`` if the tap does not capture it."""
        if self._ended or not self.request.matches(facts):
            return None
        facts = self._told_apart(facts)
        self.streams += 1
        self._open.add((facts.client, facts.server))
        return CapturedStream(self, facts, self.streams)

    def _told_apart(self, facts: StreamFacts) -> StreamFacts:
        """Return a connection's facts with a unique pair of addresses.

        All streams of one tunnel connection can have the same client address, and a reader of the capture would
        merge them.
        """
        client, server = facts.client, facts.server
        for step in range(_MOST_PORTS):
            port = (client.port - 1 + step) % 65535 + 1
            if (SocketAddress(client.host, port), server) not in self._open:
                if not step:
                    return facts
                note = f"port {port} replaces {client.port}, which other streams of this connection have"
                return replace(facts, client=SocketAddress(client.host, port), notes=(*facts.notes, note))
        return facts

    def left(self, facts: StreamFacts) -> None:
        """Forget a connection that has ended."""
        self._open.discard((facts.client, facts.server))

    def take(self) -> bytes:
        """Remove and return the first blocks of the queue, about 64 KiB. Empty if the queue is empty.

        The returned blocks count as waiting until :meth:`taken`.
        """
        found, size = [], 0
        while self._queue and size < 64 * 1024:
            block = self._queue.popleft()
            found.append(block)
            size += len(block)
        return b"".join(found)

    def taken(self, size: int) -> None:
        """Record that the reader has received ``size`` of the taken bytes."""
        self.waiting_bytes -= size

    def end(self) -> None:
        """Stop capturing. Idempotent. The queue keeps its blocks."""
        self._ended = True

    def discard(self) -> None:
        """Stop capturing, and drop the queue, because it has no reader. Idempotent.

        Connections refer to their capture until they end, which can be days later.
        """
        self.end()
        self._queue.clear()
        self.waiting_bytes = 0

    @property
    def ended(self) -> bool:
        """Whether capturing was stopped."""
        return self._ended

    # Called by streams

    def has_room(self, size: int) -> bool:
        """Return whether the blocks for ``size`` bytes of payload fit into the queue."""
        return self.waiting_bytes + size + size // 8 + _OVERHEAD_BYTES <= self._most_bytes

    def put(self, direction: Direction, segment: Segment, inbound: bool, comment: str) -> bool:
        """Queue a packet. Return whether there was room."""
        self.packets[direction] += 1
        if self.waiting_bytes > self._most_bytes + _SPARE_BYTES:
            self.dropped[direction] += 1
            return False
        block = pcapng.packet(
            interface_of(direction), self._now_us(), segment.packet, inbound=inbound, comment=comment
        )
        self.waiting_bytes += len(block)
        self._queue.append(block)
        if len(self._queue) == 1:
            self._on_data()
        return True

    def dropped_payload(self, direction: Direction, size: int, packets: int) -> None:
        """Count payload bytes that were dropped before they became a packet."""
        self.packets[direction] += packets
        self.dropped[direction] += packets
        self.dropped_bytes += size


class CapturedStream:
    """Captures one connection. Implements :class:`hbone.aio.observed.StreamObserver`, and never raises."""

    __slots__ = ("_app", "_capture", "_comment", "_direction", "_facts", "_lost", "_open", "_tcp")

    def __init__(self, capture: Capture, facts: StreamFacts, number: int) -> None:
        self._capture = capture
        self._facts = facts
        self._direction = facts.direction
        self._app = Side.CLIENT if facts.direction is Direction.OUTBOUND else Side.SERVER
        self._open = set(Side)
        self._lost = dict.fromkeys(Side, 0)
        self._comment = "\n".join(facts.notes)
        self._tcp: SyntheticTcp | None = None
        try:
            self._tcp = SyntheticTcp(facts.client, facts.server, number)
            self._put(self._tcp.opening())
        except Exception:
            log.exception(_FAILED)
            self._tcp = None

    def received(self, chunk: memoryview) -> None:
        """Record bytes that the application has sent."""
        self._data(self._app, chunk)

    def sent(self, chunk: memoryview) -> None:
        """Record bytes that were sent to the application."""
        self._data(self._app.other, chunk)

    def receive_ended(self, *, reset: bool) -> None:
        """Record the end of the bytes from the application."""
        self._end(self._app, reset=reset)

    def send_ended(self, *, reset: bool) -> None:
        """Record the end of the bytes to the application."""
        self._end(self._app.other, reset=reset)

    def left(self) -> None:
        """Record the end of the connection. If one side has not sent its end, the proxy has closed the
        connection.
        """
        if self._app.other in self._open:
            self._comment = "closed by the proxy; its access log has the reason"
            self._end(self._app.other, reset=False)
        self._tcp = None
        self._capture.left(self._facts)

    def _data(self, sender: Side, chunk: memoryview) -> None:
        tcp, capture = self._tcp, self._capture
        if tcp is None or capture.ended:
            return
        try:
            size = len(chunk)
            if capture.has_room(size):
                self._put(tcp.data(sender, bytes(chunk)))
            else:
                tcp.lost(sender, size)
                self._lost[sender] += size
                capture.dropped_payload(self._direction, size, -(-size // tcp.mss))
        except Exception:
            log.exception(_FAILED)
            self._tcp = None

    def _end(self, sender: Side, *, reset: bool) -> None:
        self._open.discard(sender)
        tcp = self._tcp
        if tcp is None or self._capture.ended:
            return
        try:
            self._put(tcp.reset(sender) if reset else tcp.end(sender))
        except Exception:
            log.exception(_FAILED)
            self._tcp = None
        if reset:
            self._open.clear()

    def _put(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            comment, lost = self._comment, self._lost[segment.sender]
            if lost:
                gap = f"{lost} bytes before this packet are not in the capture: its reader was too slow"
                comment = f"{comment}\n{gap}" if comment else gap
            if self._capture.put(self._direction, segment, segment.sender is not self._app, comment):
                self._comment, self._lost[segment.sender] = "", 0
