"""Captures as Wireshark reads them."""

import pytest

from tests.ztunnel.proxy.tap.test_stream import V4, V6
from tests.ztunnel.proxy.tap.tshark import complaints, needs_tshark, tshark
from xds.model.address import SocketAddress
from ztunnel.proxy.tap import pcapng
from ztunnel.proxy.tap.stream import Side, SyntheticTcp

pytestmark = needs_tshark


def a_capture(client: SocketAddress, server: SocketAddress) -> bytes:
    """Two connections of equal ports: a request with a large answer, and one that is reset after a half close."""
    data = pcapng.section("ztunnel", "a test") + pcapng.interface(
        "default/web outbound", "as spiffe://a/b", "of web"
    )
    at_us = 1_795_000_000_000_000
    for number in range(2):
        tcp = SyntheticTcp(client, server, number)
        segments = [
            *tcp.opening(),
            *tcp.data(Side.CLIENT, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"),
            *tcp.end(Side.CLIENT),
        ]
        if number == 0:
            segments += tcp.data(
                Side.SERVER, b"HTTP/1.1 200 OK\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000
            )
            segments += tcp.end(Side.SERVER)
        else:
            segments += tcp.reset(Side.SERVER)
        for index, each in enumerate(segments):
            comment = "begins" if index == 0 else ""
            data += pcapng.packet(0, at_us, each.packet, inbound=each.sender is Side.SERVER, comment=comment)
            at_us += 1
    return data + pcapng.statistics(0, started_us=at_us - 500, ended_us=at_us, packets=9, dropped=0)


@pytest.mark.parametrize(("client", "server"), [V4, V6])
def test_wireshark_sees_no_fault(client: SocketAddress, server: SocketAddress) -> None:
    found = complaints(a_capture(client, server))
    # Wireshark warns about the intended reset.
    assert [line for line in found if "Connection reset (RST)" not in line] == []
    assert len(found) == 1


def test_wireshark_follows_the_stream() -> None:
    shown = tshark(a_capture(*V4), "-q", "-z", "follow,tcp,ascii,0")
    assert "GET / HTTP/1.1" in shown
    assert shown.count("x") >= 300_000
    assert "\n27\n" in shown  # the request, whole


@pytest.mark.parametrize("size", [1 << 20, 3 << 30, 4 << 30, 9 << 30])
def test_wireshark_follows_the_stream_behind_a_gap_of_any_size(size: int) -> None:
    """Sequence numbers have 32 bits: a gap of 2 GiB or more would look like old or like no missing data."""
    tcp = SyntheticTcp(*V4)
    segments = [*tcp.opening(), *tcp.data(Side.CLIENT, b"before")]
    for _ in range(4):
        tcp.lost(Side.CLIENT, size // 4)
    segments += [*tcp.data(Side.CLIENT, b"after1"), *tcp.data(Side.CLIENT, b"after2"), *tcp.end(Side.CLIENT)]
    tcp.lost(Side.SERVER, size)
    segments += [*tcp.data(Side.SERVER, b"answer"), *tcp.end(Side.SERVER)]
    data = pcapng.section("ztunnel", "a test") + pcapng.interface("default/web outbound", "", "")
    for at_us, each in enumerate(segments):
        data += pcapng.packet(0, at_us, each.packet, inbound=each.sender is Side.SERVER, comment="")
    lines = [line.strip() for line in tshark(data, "-q", "-z", "follow,tcp,ascii,0").splitlines()]
    gap = f"[{min(size, 1 << 30)} bytes missing in capture file]."
    assert [line for line in lines if line in ("before", "after1", "after2", "answer", gap)] == [
        *("before", gap, "after1", "after2", gap, "answer")
    ]


def test_wireshark_understands_http_and_shows_names_and_comments() -> None:
    fields = ("frame.interface_name", "frame.interface_description", "frame.comment", "http.response.code")
    columns = [part for name in fields for part in ("-e", name)]
    rows = [line.split("\t") for line in tshark(a_capture(*V4), "-T", "fields", *columns).splitlines()]
    assert rows[0][:3] == ["default/web outbound", "as spiffe://a/b", "begins"]
    assert [row[3] for row in rows if row[3]] == ["200"]
