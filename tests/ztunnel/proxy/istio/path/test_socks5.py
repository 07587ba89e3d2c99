"""SOCKS5 by bytes: every order of arrival, every refusal, over a real socket pair."""

import asyncio
import socket

import pytest

from hbone.aio.poller import Poller
from hbone.aio.socket import PlainSocket
from xds.model.address import SocketAddress
from ztunnel.proxy.istio.path import socks5

HELLO = b"\x05\x01\x00"
GREETED = b"\x05\x00"
TO_IPV4 = b"\x05\x01\x00\x01\x0a\x00\x00\x01\x1f\x90"
TO_IPV6 = b"\x05\x01\x00\x04" + bytes(15) + b"\x01\x1f\x90"
TO_MAPPED = b"\x05\x01\x00\x04" + bytes(10) + b"\xff\xff\x0a\x00\x00\x01\x1f\x90"


def to_name(name: bytes, port: int = 8080) -> bytes:
    return b"\x05\x01\x00\x03" + bytes([len(name)]) + name + port.to_bytes(2, "big")


def answer(status: int) -> bytes:
    return bytes((5, status, 0, 1)) + bytes(6)


async def resolve(name: str, *, ipv6: bool) -> str | None:
    found = {
        ("web.shop", False): "10.0.0.9",
        ("web.shop", True): "fd00::9",
        ("six.shop", True): "fd00::6",
        ("four.shop", False): "10.0.0.4",
    }
    return found.get((name, ipv6))


def shaken(pieces: list[bytes], *, end: bool = False, ipv6: bool = False) -> tuple[SocketAddress | None, bytes]:
    """Return the client's requested destination, and the answer to the client."""

    async def main() -> tuple[SocketAddress | None, bytes]:
        family, host = (socket.AF_INET6, "::1") if ipv6 else (socket.AF_INET, "127.0.0.1")
        poller = Poller()
        with socket.create_server((host, 0), family=family) as server:
            theirs = socket.create_connection(server.getsockname()[:2])
            ours, _ = server.accept()
        ours.setblocking(False)
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = PlainSocket(ours, poller)
        try:
            with theirs:

                async def send() -> None:
                    for piece in pieces:
                        theirs.sendall(piece)
                        await asyncio.sleep(0)
                    if end:
                        theirs.shutdown(socket.SHUT_WR)

                async with asyncio.timeout(20):
                    wanted, _ = await asyncio.gather(socks5.accept(client, resolve), send())
                client.close()
                told = b""
                while data := await asyncio.to_thread(theirs.recv, 4096):
                    told += data
                return wanted, told
        finally:
            client.close()
            poller.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("request_", "ipv6", "wanted"),
    [
        (TO_IPV4, False, SocketAddress("10.0.0.1", 8080)),
        (TO_IPV6, False, SocketAddress("::1", 8080)),
        (TO_MAPPED, False, SocketAddress("10.0.0.1", 8080)),
        (to_name(b"web.shop"), False, SocketAddress("10.0.0.9", 8080)),
        (to_name(b"web.shop"), True, SocketAddress("fd00::9", 8080)),
        (to_name(b"six.shop"), False, SocketAddress("fd00::6", 8080)),
        (to_name(b"four.shop"), True, SocketAddress("10.0.0.4", 8080)),
    ],
)
def test_socks_requests_name_destinations(request_: bytes, ipv6: bool, wanted: SocketAddress) -> None:
    assert shaken([HELLO, request_], ipv6=ipv6) == (wanted, GREETED + answer(0))


@pytest.mark.parametrize("whole", [HELLO + TO_IPV4, b"\x05\x03\x02\x00\x01" + to_name(b"web.shop")])
def test_socks_bytes_can_be_split_anywhere(whole: bytes) -> None:
    expected = shaken([whole])
    assert expected[0] is not None
    for cut in range(1, len(whole)):
        assert shaken([whole[:cut], whole[cut:]]) == expected


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"\x04\x01\x00", answer(7)),
        (b"\x05\x01\x02", b"\x05\xff"),
        (HELLO + b"\x05\x02\x00\x01\x0a\x00\x00\x01\x1f\x90", GREETED + answer(7)),
        (HELLO + b"\x04\x01\x00\x01\x0a\x00\x00\x01\x1f\x90", GREETED + answer(7)),
        (HELLO + b"\x05\x01\x00\x02\x0a\x00\x00\x01\x1f\x90", GREETED + answer(7)),
        (HELLO + b"\x05\x01\x00\x01\x0a\x00\x00\x01\x00\x00", GREETED + answer(1)),
        (HELLO + to_name(b"nobody"), GREETED + answer(4)),
        (HELLO + to_name(b""), GREETED + answer(4)),
        (HELLO + to_name(b"\xff.shop"), GREETED + answer(1)),
    ],
)
def test_invalid_socks_requests_are_refused(sent: bytes, told: bytes) -> None:
    assert shaken([sent]) == (None, told)


@pytest.mark.parametrize("whole", [HELLO + TO_IPV4, HELLO + to_name(b"web.shop")])
def test_a_client_that_ends_in_the_middle(whole: bytes) -> None:
    for cut in range(len(whole)):
        with pytest.raises(ConnectionResetError):
            shaken([whole[:cut]], end=True)


def test_silent_socks_client_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socks5, "_TIMEOUT_S", 0.05)
    assert shaken([HELLO]) == (None, GREETED)
