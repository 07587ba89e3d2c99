"""Packets of synthetic connections: what a receiver that follows RFC 9293 makes of them."""

from collections.abc import Iterable
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ztunnel.proxy.tap.reader import Packet, read
from xds.model.address import SocketAddress
from ztunnel.proxy.tap import pcapng
from ztunnel.proxy.tap.stream import Segment, Side, SyntheticTcp

V4 = SocketAddress("10.0.0.1", 41000), SocketAddress("10.0.0.2", 8080)
V6 = SocketAddress("fd00::1", 41000), SocketAddress("fd00::2", 8080)


def packets(segments: Iterable[Segment]) -> list[Packet]:
    """Read segments back, checksums and lengths included."""
    data = pcapng.section("test") + pcapng.interface("a")
    data += b"".join(pcapng.packet(0, 0, each.packet, inbound=each.sender is Side.SERVER) for each in segments)
    return read(data).packets


@pytest.mark.parametrize(("client", "server"), [V4, V6])
def test_synthetic_tcp_of_a_whole_connection(client: SocketAddress, server: SocketAddress) -> None:
    tcp = SyntheticTcp(client, server)
    segments = [
        *tcp.opening(),
        *tcp.data(Side.CLIENT, b"ping"),
        *tcp.end(Side.CLIENT),
        *tcp.data(Side.SERVER, b"pong!"),
        *tcp.end(Side.SERVER),
    ]
    found = packets(segments)

    first, other = found[0].sequence, found[1].sequence
    assert [
        (
            p.source == tuple(client),
            p.flags,
            p.sequence - (first if p.source == tuple(client) else other),
            p.payload,
        )
        for p in found
    ] == [
        (True, "S", 0, b""),
        (False, "SA", 0, b""),
        (True, "A", 1, b""),
        (True, "PA", 1, b"ping"),
        (False, "A", 1, b""),
        (True, "FA", 5, b""),
        (False, "A", 1, b""),
        (False, "PA", 1, b"pong!"),
        (True, "A", 6, b""),
        (False, "FA", 6, b""),
        (True, "A", 6, b""),
    ]
    assert [p.acknowledged - (other if p.source == tuple(client) else first) for p in found[1:]] == [
        *(1, 1, 1, 5, 1, 6, 6, 6, 6, 7)
    ]


@given(
    st.lists(st.tuples(st.sampled_from(Side), st.binary(max_size=5000)), max_size=12),
    st.sampled_from([V4, V6]),
    st.integers(0, 1 << 20),
)
def test_stream_bytes_do_not_depend_on_segment_boundaries(
    writes: list[tuple[Side, bytes]], addresses: tuple[SocketAddress, SocketAddress], number: int
) -> None:
    tcp = SyntheticTcp(*addresses, number)
    segments = tcp.opening()
    for sender, payload in writes:
        segments += tcp.data(sender, payload)
    segments += [*tcp.end(Side.CLIENT), *tcp.end(Side.SERVER)]
    received = dict.fromkeys(Side, b"")
    expected: dict[Side, int] = {}
    for packet in packets(segments):
        side = Side.CLIENT if packet.source == tuple(addresses[0]) else Side.SERVER
        assert len(packet.payload) <= tcp.mss
        assert packet.sequence == expected.setdefault(side, packet.sequence)
        if "A" in packet.flags:
            assert packet.acknowledged == expected[side.other]
        taken = len(packet.payload) + ("S" in packet.flags) + ("F" in packet.flags)
        expected[side] = (packet.sequence + taken) % (1 << 32)
        received[side] += packet.payload
    for side in Side:
        assert received[side] == b"".join(payload for sender, payload in writes if sender is side)


@pytest.mark.parametrize("sender", Side)
def test_a_reset_ends_both_directions(sender: Side) -> None:
    tcp = SyntheticTcp(*V4)
    tcp.opening()
    found = packets(tcp.reset(sender))
    assert [(p.source == tuple(V4[0]), p.flags) for p in found] == [(sender is Side.CLIENT, "RA")]
    assert tcp.reset(sender.other) == []
    assert [*tcp.end(Side.CLIENT), *tcp.data(Side.SERVER, b"late")] == []


def test_reset_follows_a_half_close_but_not_a_full_close() -> None:
    tcp = SyntheticTcp(*V4)
    tcp.opening()
    tcp.end(Side.CLIENT)
    assert tcp.end(Side.CLIENT) == []
    assert [p.flags for p in packets(tcp.reset(Side.SERVER))] == ["RA"]
    whole = SyntheticTcp(*V4)
    whole.opening()
    whole.end(Side.CLIENT)
    whole.end(Side.SERVER)
    assert whole.reset(Side.CLIENT) == []


def test_lost_bytes_are_a_gap_in_sequence_numbers() -> None:
    tcp = SyntheticTcp(*V4)
    tcp.opening()
    before = packets(tcp.data(Side.CLIENT, b"abc"))[0]
    tcp.lost(Side.CLIENT, 1000)
    after = packets(tcp.data(Side.CLIENT, b"def"))[0]
    assert after.sequence - before.sequence == 1003


def test_ipv4_address_beside_ipv6_is_shown_as_ipv4_mapped() -> None:
    found = packets(SyntheticTcp(V4[0], V6[1]).opening())
    shown = [ip_address(host) for host in (found[0].source[0], found[0].destination[0])]
    assert shown == [ip_address("::ffff:10.0.0.1"), ip_address("fd00::2")]  # its text depends on Python's version


def test_initial_sequence_numbers_differ_by_connection() -> None:
    first = {packets(SyntheticTcp(*V4, number).opening())[0].sequence for number in range(40)}
    assert len(first) == 40


def test_the_handshake_offers_the_largest_segment_and_window() -> None:
    syn = SyntheticTcp(*V4).opening()[0].packet
    assert syn[40:] == b"\x02\x04\x05\xb4\x01\x03\x03\x0e"
