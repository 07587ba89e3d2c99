"""From the bytes of connections to packets: directions, ends, and a bounded queue."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.ztunnel.proxy.tap.reader import Capture as Read
from tests.ztunnel.proxy.tap.reader import read
from xds.model.address import SocketAddress
from ztunnel.proxy.tap import pcapng
from ztunnel.proxy.tap.capture import MOST_WAITING_BYTES, Capture, CapturedStream
from ztunnel.proxy.tap.request import Direction, StreamFacts, TapRequest

OUTBOUND = StreamFacts(
    direction=Direction.OUTBOUND,
    client=SocketAddress("10.0.0.1", 41000),
    server=SocketAddress("10.96.0.9", 80),
    peers=frozenset({"web"}),
    notes=("spiffe://a -> spiffe://b", "tunnel 1"),
)
INBOUND = replace(OUTBOUND, direction=Direction.INBOUND, client=OUTBOUND.server, server=OUTBOUND.client)
HEAD = pcapng.section("test") + pcapng.interface("outbound") + pcapng.interface("inbound")


class Harness:
    """A capture whose clock counts its packets."""

    def __init__(self, most_waiting_bytes: int = MOST_WAITING_BYTES, **more: str) -> None:
        self.woken = self.now_us = 0
        request = TapRequest.parse({"pod": "a/b", **more})
        self.capture = Capture(request, self._now, self._wake, most_waiting_bytes)

    def _now(self) -> int:
        self.now_us += 1
        return self.now_us

    def _wake(self) -> None:
        self.woken += 1

    def stream(self, facts: StreamFacts = OUTBOUND) -> CapturedStream:
        found = self.capture.stream(facts)
        assert found is not None
        return found

    def read(self) -> Read:
        """Everything that waits, as its reader finds it."""
        data = b""
        while more := self.capture.take():
            data += more
            self.capture.taken(len(more))
        return read(HEAD + data)


@pytest.mark.parametrize("facts", [OUTBOUND, INBOUND])
def test_captured_request_and_answer_have_their_directions(facts: StreamFacts) -> None:
    harness = Harness()
    stream = harness.stream(facts)
    outbound = facts is OUTBOUND
    stream.received(memoryview(b"from the application"))
    stream.receive_ended(reset=False)
    stream.sent(memoryview(b"to the application"))
    stream.send_ended(reset=False)
    stream.left()

    found = harness.read()

    names = tuple(facts.client), tuple(facts.server)
    both = (b"from the application", b"to the application")
    assert found.streams() == {names: both if outbound else both[::-1]}
    assert {packet.interface for packet in found.packets} == {0 if outbound else 1}
    application = names[0] if outbound else names[1]
    assert all(packet.inbound == (packet.destination == application) for packet in found.packets)
    assert [packet.at_us for packet in found.packets] == list(range(1, len(found.packets) + 1))
    assert found.packets[0].comment == "spiffe://a -> spiffe://b\ntunnel 1"
    assert {packet.comment for packet in found.packets[1:]} == {""}
    assert "".join(packet.flags for packet in found.packets if "F" in packet.flags) == "FAFA"
    assert harness.capture.packets[facts.direction] == len(found.packets)
    assert harness.capture.waiting_bytes == 0
    assert harness.woken == 1


@pytest.mark.parametrize("received", [True, False])
def test_a_reset_comes_from_the_side_that_sent_it(received: bool) -> None:
    harness = Harness()
    stream = harness.stream()
    if received:
        stream.receive_ended(reset=True)
    else:
        stream.send_ended(reset=True)
    stream.left()
    last = harness.read().packets[-1]
    assert last.flags == "RA"
    assert last.source == tuple(OUTBOUND.client if received else OUTBOUND.server)


def test_connection_closed_by_the_proxy_has_a_comment() -> None:
    harness = Harness()
    stream = harness.stream()
    stream.received(memoryview(b"x"))
    stream.left()
    stream.received(memoryview(b"late"))
    fin = next(packet for packet in harness.read().packets if "F" in packet.flags)
    assert fin.source == tuple(OUTBOUND.server)
    assert fin.comment == "closed by the proxy; its access log has the reason"


def test_unmatched_connections_are_not_captured() -> None:
    harness = Harness(peer="db")
    assert harness.capture.stream(OUTBOUND) is None
    assert harness.capture.streams == 0


def test_nothing_is_captured_after_the_end() -> None:
    harness = Harness()
    stream = harness.stream()
    harness.read()
    harness.capture.end()
    stream.received(memoryview(b"late"))
    stream.left()
    assert harness.capture.stream(OUTBOUND) is None
    assert harness.read().packets == []


@given(st.lists(st.integers(min_value=1, max_value=6000), min_size=5, max_size=20), st.booleans())
@example([137, 233, 413, 657, 2953, 4025, 5997, 5997, 5997, 1, 61], False)
def test_slow_reader_loses_only_reported_bytes_within_bounded_memory(sizes: list[int], late: bool) -> None:
    harness = Harness(30_000)
    stream = harness.stream()
    sent = 0
    kept = b""
    for number, size in enumerate(sizes):
        before = harness.capture.dropped_bytes
        stream.received(memoryview(bytes([number]) * size))
        sent += size
        if harness.capture.dropped_bytes == before:
            kept += bytes([number]) * size
        assert harness.capture.waiting_bytes <= 30_000
    found = harness.read()
    if late:
        stream.received(memoryview(b"after"))
        kept += b"after"
        sent += 5
    stream.receive_ended(reset=False)
    rest = harness.read()

    dropped = harness.capture.dropped_bytes
    assert len(kept) == sent - dropped
    packets = found.packets + rest.packets
    assert b"".join(packet.payload for packet in packets if packet.source == tuple(OUTBOUND.client)) == kept
    # Sequence numbers count what is missing.
    fin = next(packet for packet in rest.packets if "F" in packet.flags)
    assert fin.sequence - packets[0].sequence == (1 + sent) % (1 << 32)
    told = [packet.comment for packet in packets if "are not in the capture" in packet.comment]
    assert sum(int(text.split()[0]) for text in told) == dropped
    assert harness.capture.dropped[Direction.OUTBOUND] == harness.capture.packets[Direction.OUTBOUND] - len(
        packets
    )


def test_blocks_without_data_are_bounded_too() -> None:
    harness = Harness(30_000)
    for _ in range(1000):
        stream = harness.stream()
        stream.left()
    assert harness.capture.waiting_bytes < 30_000 + 257 * 1024
    assert harness.capture.dropped[Direction.OUTBOUND] > 0


def test_invalid_address_ends_the_capture_and_not_the_connection() -> None:
    harness = Harness()
    stream = harness.stream(replace(OUTBOUND, client=SocketAddress("not an address", 1)))
    stream.received(memoryview(b"x"))
    stream.left()
    assert harness.read().packets == []


@given(st.binary(max_size=200_000), st.lists(st.integers(min_value=1, max_value=3000), max_size=40))
def test_blocks_are_found_wherever_the_bytes_are_cut(payload: bytes, cuts: list[int]) -> None:
    harness = Harness()
    harness.stream().received(memoryview(payload))
    data = b""
    while more := harness.capture.take():
        data += more
    blocks = pcapng.PacketBlocks()
    found, rest = [], data
    for cut in cuts:
        found += blocks.receive(rest[:cut])
        rest = rest[cut:]
    found += blocks.receive(rest)
    assert b"".join(found) == data
    assert len(found) == len(read(HEAD + data).packets)


@pytest.mark.parametrize(
    "data",
    [
        b"\x01\0\0\0\x20\0\0\0",  # an interface
        b"\x06\0\0\0\x1c\0\0\0",  # too short
        b"\x06\0\0\0\x22\0\0\0",  # no whole words
        b"\x06\0\0\0\0\0\x10\0",  # too long
    ],
)
def test_block_other_than_a_packet_is_an_error(data: bytes) -> None:
    with pytest.raises(pcapng.BadBlock):
        list(pcapng.PacketBlocks().receive(data))
