"""Blocks of pcapng: by bytes, and through a reader that knows only the format."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ztunnel.proxy.tap.reader import read
from xds.model.address import SocketAddress
from ztunnel.proxy.tap import pcapng
from ztunnel.proxy.tap.stream import SyntheticTcp

CLIENT, SERVER = SocketAddress("10.0.0.1", 41000), SocketAddress("10.0.0.2", 8080)
BEGIN = pcapng.section("ztunnel") + pcapng.interface("default/web")


def a_packet() -> bytes:
    return SyntheticTcp(CLIENT, SERVER).opening()[0].packet


def test_a_section_is_these_bytes() -> None:
    assert pcapng.section("zt", "hi") == (
        b"\x0a\x0d\x0d\x0a"  # type
        b"\x30\0\0\0"  # length
        b"\x4d\x3c\x2b\x1a\x01\0\0\0"  # byte order, version 1.0
        b"\xff\xff\xff\xff\xff\xff\xff\xff"  # length of the section: unknown
        b"\x01\0\x02\0hi\0\0"  # opt_comment
        b"\x04\0\x02\0zt\0\0"  # shb_userappl
        b"\0\0\0\0"  # opt_endofopt
        b"\x30\0\0\0"
    )


def test_an_interface_is_these_bytes() -> None:
    assert pcapng.interface("web") == (
        b"\x01\0\0\0\x20\0\0\0"
        b"\x65\0\0\0\x27\x00\x01\0"  # LINKTYPE_RAW, snaplen 65,575
        b"\x02\0\x03\0web\0"  # if_name
        b"\0\0\0\0\x20\0\0\0"
    )


def test_a_packet_is_these_bytes() -> None:
    assert pcapng.packet(1, 0x1_0000_0002, b"abcde", inbound=True, comment="x") == (
        b"\x06\0\0\0\x3c\0\0\0"
        b"\x01\0\0\0"  # interface
        b"\x01\0\0\0\x02\0\0\0"  # time: upper half, lower half
        b"\x05\0\0\0\x05\0\0\0"  # captured, on the wire
        b"abcde\0\0\0"
        b"\x01\0\x01\0x\0\0\0"
        b"\x02\0\x04\0\x01\0\0\0"  # epb_flags: inbound
        b"\0\0\0\0\x3c\0\0\0"
    )


def test_written_blocks_read_back() -> None:
    data = pcapng.section("ztunnel 1", "of a test")
    data += pcapng.interface("default/web outbound", "spiffe://a", "one") + pcapng.interface("default/web inbound")
    data += pcapng.packet(1, 1_800_000_000_123_456, a_packet(), inbound=True, comment="begins")
    data += pcapng.statistics(1, started_us=1, ended_us=1 << 40, packets=7, dropped=6, comment="reader too slow")

    found = read(data)

    assert (found.application, found.comment) == ("ztunnel 1", "of a test")
    assert [(each.name, each.description, each.comment) for each in found.interfaces] == [
        ("default/web outbound", "spiffe://a", "one"),
        ("default/web inbound", "", ""),
    ]
    packet = found.packets[0]
    assert (packet.interface, packet.at_us, packet.comment) == (1, 1_800_000_000_123_456, "begins")
    assert packet.inbound
    assert (packet.source, packet.destination, packet.flags) == (tuple(CLIENT), tuple(SERVER), "S")
    assert found.interfaces[0].statistics is None
    assert found.interfaces[1].statistics == {"started_us": 1, "ended_us": 1 << 40, "packets": 7, "dropped": 6}
    assert found.interfaces[1].closing_comment == "reader too slow"


@pytest.mark.parametrize("size", range(9))
def test_texts_and_packets_of_any_length_are_padded(size: int) -> None:
    text = "abcdefgh"[:size]
    found = read(
        BEGIN + pcapng.interface(text) + pcapng.packet(1, 0, a_packet() + b"", inbound=False, comment=text)
    )
    assert (found.interfaces[1].name, found.packets[0].comment) == (text, text)


@given(st.text(max_size=3000))
def test_a_text_is_cut_between_characters(text: str) -> None:
    cut = read(BEGIN + pcapng.packet(0, 0, a_packet(), inbound=False, comment=text)).packets[0].comment
    written = text.encode(errors="replace").decode()
    assert written.startswith(cut)
    assert cut == written or pcapng.MOST_TEXT_BYTES - 4 < len(cut.encode()) <= pcapng.MOST_TEXT_BYTES


@given(st.lists(st.integers(min_value=0, max_value=(1 << 64) - 1), min_size=1, max_size=5))
def test_packet_times_keep_64_bits(times_us: list[int]) -> None:
    data = b"".join(pcapng.packet(0, at_us, a_packet(), inbound=False) for at_us in times_us)
    assert [packet.at_us for packet in read(BEGIN + data).packets] == times_us


def test_blocks_can_be_walked_backwards() -> None:
    data, sizes = BEGIN + pcapng.packet(0, 0, a_packet(), inbound=False), []
    while data:
        sizes.append(struct.unpack("<I", data[-4:])[0])
        data = data[: -sizes[-1]]
    assert len(sizes) == 3
