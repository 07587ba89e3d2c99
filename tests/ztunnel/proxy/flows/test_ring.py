"""The ring: order, bounds, and that nothing of a connection is kept beside shared values."""

import gc
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ztunnel.proxy.flows.ring import FlowRing

A, B = ("10.0.0.1", 4000), ("2001:db8::2", 80)


def add(ring: FlowRing, ended_s: float = 1.0, **more: Any) -> None:
    counts, refs = more.get("counts", (1, 2)), more.get("refs", ("x", None))
    ring.add(
        ended_s, 0.5, 0.1, counts, more.get("ends", (A, B)), more.get("trace", b""), more.get("flags", 3), refs
    )


def test_entry_reads_back_as_written() -> None:
    ring = FlowRing(4, width=2)
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    add(ring, 12.5, trace=trace, flags=1)
    (entry,) = ring.entries()
    assert entry.ended_ns == 12_500_000_000
    assert (entry.source, entry.destination) == (A, B)
    assert (entry.duration_s, entry.connect_s, entry.sent, entry.received) == (0.5, 0.1, 1, 2)
    assert entry.trace.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert (entry.outbound, entry.secured, entry.refs) == (True, False, ("x", None))


def test_invalid_address_or_trace_reads_as_empty() -> None:
    ring = FlowRing(1, width=2)
    add(ring, ends=(("host.example", 80), ("", 0)), trace=b"nonsense")
    (entry,) = ring.entries()
    assert (entry.source, entry.destination) == (("", 80), ("", 0))
    assert not any(entry.trace)


@given(st.integers(1, 5), st.lists(st.floats(0, 10, allow_nan=False), max_size=20))
def test_ring_keeps_the_newest_entries_with_distinct_times(capacity: int, times: list[float]) -> None:
    ring = FlowRing(capacity, width=2)
    for number, ended_s in enumerate(times):
        add(ring, ended_s, counts=(number, 0))
    found = list(ring.entries())
    assert [entry.sent for entry in found] == list(range(len(times)))[-capacity:]
    moments = [entry.ended_ns for entry in found]
    assert moments == sorted(set(moments))
    for entry in found:
        assert [each.sent for each in ring.entries(entry.ended_ns)] == [
            each.sent for each in found if each.ended_ns > entry.ended_ns
        ]
    assert [entry.sent for entry in ring.entries(last=2)] == [entry.sent for entry in found][-2:]


def test_lost_counts_overwritten_entries_after_a_time() -> None:
    ring = FlowRing(2, width=2)
    for moment in (1.0, 2.0, 3.0, 4.0):
        add(ring, moment)
    assert ring.lost(1_000_000_000) == 1
    assert ring.lost(3_500_000_000) == 0
    assert ring.lost(0) == 0


def test_ring_without_capacity_keeps_no_entries() -> None:
    ring = FlowRing(0)
    add(ring, refs=())
    assert list(ring.entries()) == []
    assert ring.lost(5) == 0


def test_equal_texts_are_shared_and_bounded() -> None:
    ring = FlowRing(1)
    first, second = "".join(["reason", "-1"]), "".join(["reason", "-1"])
    assert ring.text(first) is ring.text(second)
    for number in range(20_000):
        ring.text(f"reason-{number}")
    assert len(ring._texts) <= 8192


def test_entries_make_no_lasting_objects() -> None:
    """CPython returns memory by the megabyte: one object kept per connection would keep all of theirs."""
    ring = FlowRing(512, width=2)
    for number in range(600):  # addresses recur, as those of pods do
        add(ring, ends=((f"10.0.{number % 200}.1", number), B))
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(2000):
        add(ring, number / 7, ends=((f"10.0.{number % 200}.1", number), B), counts=(number * 10**6, 5))
    gc.collect()
    assert sys.getallocatedblocks() - before < 50
