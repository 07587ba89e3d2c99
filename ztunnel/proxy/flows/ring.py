"""A ring buffer of the last ended connections, in preallocated slots.

Adding a connection writes numbers into a buffer and references into a list. It creates no objects that outlive
the connection: CPython frees memory in blocks of a megabyte, so a few small objects would keep whole
megabytes allocated. Texts come from a bounded table. Entries are formatted only when they are read.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from xds.digits import whole_number

#: The default number of connections that are kept. Each takes about 200 octets.
CAPACITY: Final = 4096
_MOST_ENTRIES: Final = 1_000_000
#: The most different texts and identities in the shared table. When it is full, it is cleared.
_MOST_TEXTS: Final = 8192
#: The layout of an entry's numbers: time, durations, bytes, ports, flags, addresses, trace id. These are 93
#: octets.
_SLOT: Final = struct.Struct("<qddqqHHB16s16s16s")
_ZEROES: Final = bytes(16)
_V4_IN_V6: Final = bytes(10) + b"\xff\xff"


def flow_count(text: str) -> int:
    """Parse the capacity of a flight recorder.

    Raises:
        ValueError: the text is not a number between 0 and a million.
    """
    number = whole_number(text, _MOST_ENTRIES)
    if number is None:
        raise ValueError(f"must be a number from 0 to {_MOST_ENTRIES:,}")
    return number


class Entry(NamedTuple):
    """An ended connection.

    Attributes:
        ended_ns: wall time in nanoseconds, unique within a ring.
        duration_s: from accept to end.
        connect_s: from accept until the connection counted as opened, negative if it never did.
        sent, received: bytes from the client to the server, and back.
        source, destination: address and port. An empty host is unknown, for example for a destination given by
        name.
        trace: the trace id, 16 octets; zeroes without one.
        outbound: whether the source's proxy reports.
        secured: whether mTLS was used.
        refs: further values that the front end stores, in the front end's order.
    """

    ended_ns: int
    duration_s: float
    connect_s: float
    sent: int
    received: int
    source: tuple[str, int]
    destination: tuple[str, int]
    trace: bytes
    outbound: bool
    secured: bool
    refs: tuple[Any, ...]


class RingCounts(NamedTuple):
    """How full rings are.

    Attributes:
        held, capacity: the current and the largest number of kept entries.
        total: the number of entries written since the start.
        lost: a lower bound for the number of overwritten entries after a given time.
    """

    held: int = 0
    capacity: int = 0
    total: int = 0
    lost: int = 0

    @classmethod
    def added(cls, counts: Iterable[RingCounts]) -> RingCounts:
        """Return the counts of several rings, added up."""
        return cls(*map(sum, zip(cls(), *counts, strict=True)))


class FlowRing:
    """The last connections of one process.

    Args:
        capacity: the number of entries to keep; 0 keeps none.
        width: the number of references (``refs``) per entry.

    Attributes:
        total: the number of entries written since the start.
        capacity: see above.
    """

    def __init__(self, capacity: int = CAPACITY, width: int = 8) -> None:
        self.capacity = capacity
        self.total = 0
        self._width = width
        self._slots = bytearray(_SLOT.size * capacity)
        self._refs: list[Any] = [None] * (width * capacity)
        self._texts: dict[Any, Any] = {}
        self._hosts: dict[str, bytes] = {}
        self._last_ns = 0

    def add(
        self,
        ended_s: float,
        duration_s: float,
        connect_s: float,
        counts: tuple[int, int],
        ends: tuple[tuple[str, int], tuple[str, int]],
        trace: bytes,
        flags: int,
        refs: tuple[Any, ...],
    ) -> None:
        """Record an ended connection. It overwrites the oldest entry.

        Args:
            ended_s: wall time.
            duration_s: from accept to end.
            connect_s: from accept to open, or negative.
            counts: bytes sent and received.
            ends: host and port of source and destination.
            trace: a ``traceparent``, or empty.
            flags: bit 0 outbound, bit 1 secured.
            refs: values shared by many entries. Pass texts and other per-connection values through :meth:`text`
                first.
        """
        capacity = self.capacity
        if not capacity:
            return
        slot = self.total % capacity
        self.total += 1
        ended_ns = int(ended_s * 1e9)
        if ended_ns <= self._last_ns:
            ended_ns = self._last_ns + 1
        self._last_ns = ended_ns
        (host, port), (other_host, other_port) = ends
        hosts = self._hosts
        _SLOT.pack_into(
            self._slots,
            slot * _SLOT.size,
            ended_ns,
            duration_s,
            connect_s,
            *counts,
            port & 0xFFFF,
            other_port & 0xFFFF,
            flags,
            hosts.get(host) or self._packed(host),
            hosts.get(other_host) or self._packed(other_host),
            trace_id(trace) if trace else _ZEROES,
        )
        place = slot * self._width
        self._refs[place : place + self._width] = refs

    def text(self, value: Any) -> Any:
        """Return an equal value that is shared by several entries."""
        texts = self._texts
        known = texts.get(value)
        if known is None:
            if len(texts) >= _MOST_TEXTS:
                texts.clear()
            known = texts[value] = value
        return known

    def _packed(self, host: str) -> bytes:
        """Return an address as 16 octets, or zeroes for any other text. The result is cached, because hosts
        recur.
        """
        if len(self._hosts) >= _MOST_TEXTS:
            self._hosts.clear()
        try:
            v6 = ":" in host
            packed = socket.inet_pton(socket.AF_INET6, host) if v6 else _V4_IN_V6 + socket.inet_aton(host)
        except OSError:
            packed = _ZEROES
        self._hosts[host] = packed
        return packed

    def entries(
        self, after_ns: int = 0, last: int | None = None, missed: Callable[[], object] | None = None
    ) -> Iterator[Entry]:
        """Yield entries from the oldest to the newest.

        Args:
            after_ns: only entries that ended later.
            last: at most this number of the newest entries.
            missed: called for each entry that was overwritten while the reader paused.
        """
        capacity = self.capacity
        first = max(0, self.total - capacity)
        if last is not None:
            first = max(first, self.total - last)
        for number in range(first, self.total):
            if number < self.total - capacity:  # overwritten while the reader paused
                if missed is not None:
                    missed()
                continue
            slot = number % capacity
            if self._ended(slot) > after_ns:
                yield self._entry(slot)

    def lost(self, after_ns: int) -> int:
        """Return at least how many entries newer than ``after_ns`` were overwritten. 0 if unknown."""
        if not after_ns or self.total <= self.capacity or not self.capacity:
            return 0
        return 1 if self._ended(self.total % self.capacity) > after_ns else 0

    def counts(self, after_ns: int = 0) -> RingCounts:
        """Return how full the ring is, and how many entries newer than ``after_ns`` were overwritten."""
        return RingCounts(min(self.total, self.capacity), self.capacity, self.total, self.lost(after_ns))

    def _ended(self, slot: int) -> int:
        return int.from_bytes(self._slots[slot * _SLOT.size : slot * _SLOT.size + 8], "little")

    def _entry(self, slot: int) -> Entry:
        found = _SLOT.unpack_from(self._slots, slot * _SLOT.size)
        ended_ns, duration_s, connect_s, sent, received, port, other_port, flags, host, other_host, trace = found
        place = slot * self._width
        return Entry(
            ended_ns,
            duration_s,
            connect_s,
            sent,
            received,
            (_unpacked(host), port),
            (_unpacked(other_host), other_port),
            trace,
            bool(flags & 1),
            bool(flags & 2),
            tuple(self._refs[place : place + self._width]),
        )


def _unpacked(data: bytes) -> str:
    if data == _ZEROES:
        return ""
    if data.startswith(_V4_IN_V6):
        return socket.inet_ntoa(data[12:])
    return socket.inet_ntop(socket.AF_INET6, data)


def trace_id(traceparent: bytes) -> bytes:
    """Return the trace id in a ``traceparent`` (W3C Trace Context, 3.2.2.3). Zeroes if it has none."""
    try:
        found = bytes.fromhex(traceparent[3:35].decode("ascii"))
    except ValueError:
        return _ZEROES
    return found if len(found) == 16 else _ZEROES
