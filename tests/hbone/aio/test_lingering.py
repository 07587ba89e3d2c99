"""Sockets of ended connections: open for a while, and not for ever."""

import asyncio
import socket

from hbone.aio import lingering
from hbone.aio.lingering import LINGER_S, Lingering
from hbone.aio.poller import Poller
from tests.hbone import virtual_time


def kept(into: Lingering) -> socket.socket:
    """The other end of a socket that is kept."""
    near, far = socket.socketpair()
    far.setblocking(False)
    near.setblocking(False)
    into.keep(far)
    return near


def is_open(peer: socket.socket) -> bool:
    try:
        peer.send(b"more")
    except OSError:
        return False
    return True


def test_a_socket_is_closed_after_its_time_and_its_direction_ends_at_once() -> None:
    async def main() -> None:
        poller = Poller()
        first = kept(poller.lingering)
        assert first.recv(1) == b""
        await asyncio.sleep(LINGER_S / 2)
        second = kept(poller.lingering)
        assert is_open(first)
        await asyncio.sleep(LINGER_S * 0.6)
        assert not is_open(first)
        assert is_open(second)
        await asyncio.sleep(LINGER_S)
        assert not is_open(second)
        assert len(poller.lingering) == 0
        third = kept(poller.lingering)
        poller.close()
        assert not is_open(third)
        for each in (first, second, third):
            each.close()

    virtual_time.run(main)


def test_the_oldest_makes_room() -> None:
    async def main() -> None:
        poller = Poller()
        peers = [kept(poller.lingering) for _ in range(lingering.MOST + 3)]
        assert len(poller.lingering) == lingering.MOST
        assert [is_open(peer) for peer in peers[:5]] == [False, False, False, True, True]
        poller.close()
        for peer in peers:
            peer.close()

    virtual_time.run(main)
