"""The transport over real sockets: packets stay packets, and no descriptor is ever left over."""

import asyncio
import os
import resource
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from tests.ztunnel.proxy.istio.zds.agents import open_descriptors
from ztunnel.proxy.istio.zds.channel import Channel, Listener, connect
from ztunnel.proxy.istio.zds.messages import Unreadable
from ztunnel.runtime.descriptors import lowest_free

Run = Callable[..., None]
on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@pytest.fixture(scope="module", autouse=True)
def descriptors_that_uvloop_keeps() -> None:
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def nothing_left_open(descriptors_that_uvloop_keeps: None) -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


def over_a_pair(run: Run, body: Callable[[Channel, socket.socket], Awaitable[None]]) -> None:
    """``body`` with one end as a channel, the other as a plain blocking socket."""

    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        channel = Channel(ours)
        with theirs:
            try:
                await body(channel, theirs)
            finally:
                channel.close()

    run(main())


def own_namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@on_both_loops
def test_packets_arrive_one_by_one_then_the_end(run: Run) -> None:
    async def body(channel: Channel, peer: socket.socket) -> None:
        waiting = asyncio.get_running_loop().create_task(channel.receive())
        await asyncio.sleep(0)
        peer.send(b"one")
        peer.send(b"two")
        peer.shutdown(socket.SHUT_WR)
        first = await waiting
        second = await channel.receive()
        assert first is not None
        assert second is not None
        assert (first.data, second.data, await channel.receive()) == (b"one", b"two", None)

    over_a_pair(run, body)


@on_both_loops
def test_cancelled_reader_loses_no_packet(run: Run) -> None:
    async def body(channel: Channel, peer: socket.socket) -> None:
        waiting = asyncio.get_running_loop().create_task(channel.receive())
        await asyncio.sleep(0)
        peer.send(b"one")
        waiting.cancel()
        await asyncio.wait([waiting])
        packet = await channel.receive()
        assert packet is not None
        assert packet.data == b"one"

    over_a_pair(run, body)


@on_both_loops
def test_sending_waits_for_room(run: Run) -> None:
    async def body(channel: Channel, peer: socket.socket) -> None:
        count = 500

        async def send() -> None:
            for number in range(count):
                await channel.send(number.to_bytes(2, "big") * 500)

        sending = asyncio.get_running_loop().create_task(send())
        seen = 0
        peer.setblocking(False)
        while seen < count:
            try:
                assert peer.recv(1024)[:2] == seen.to_bytes(2, "big")
                seen += 1
            except BlockingIOError:
                await asyncio.sleep(0)
        await sending

    over_a_pair(run, body)


@on_both_loops
def test_a_namespace_travels_and_is_closed_on_exec(run: Run) -> None:
    async def body(channel: Channel, peer: socket.socket) -> None:
        mine = own_namespace()
        socket.send_fds(peer, [b"add"], [mine])
        packet = await channel.receive()
        assert packet is not None
        with packet:
            assert packet.descriptors == 1
            with packet.pop_namespace("pod") as netns:
                assert netns.inode == os.fstat(mine).st_ino
                assert not os.get_inheritable(netns.fileno())
        os.close(mine)

    over_a_pair(run, body)


def test_a_channel_sends_a_namespace() -> None:
    async def body(channel: Channel, peer: socket.socket) -> None:
        mine = own_namespace()
        await channel.send(b"add", [mine])
        data, descriptors, _, _ = socket.recv_fds(peer, 1024, 4)
        assert (data, len(descriptors)) == (b"add", 1)
        assert os.path.sameopenfile(descriptors[0], mine)
        for descriptor in (mine, *descriptors):
            os.close(descriptor)

    over_a_pair(asyncio.run, body)


@pytest.mark.parametrize("count", [1, 3, 16])
def test_descriptors_not_taken_are_closed(count: int) -> None:
    async def body(channel: Channel, peer: socket.socket) -> None:
        socket.send_fds(peer, [b"add"], [peer.fileno()] * count)
        packet = await channel.receive()
        assert packet is not None
        with packet:
            assert packet.descriptors == count

    over_a_pair(asyncio.run, body)


def test_descriptor_other_than_a_namespace_is_refused_and_closed() -> None:
    async def body(channel: Channel, peer: socket.socket) -> None:
        socket.send_fds(peer, [b"add"], [peer.fileno()])
        user = os.open("/proc/self/ns/user", os.O_RDONLY)
        socket.send_fds(peer, [b"add"], [user])
        os.close(user)
        for _ in range(2):
            packet = await channel.receive()
            assert packet is not None
            with packet, pytest.raises(Unreadable, match="not a network namespace"):
                packet.pop_namespace("pod")

    over_a_pair(asyncio.run, body)


@pytest.mark.parametrize(
    ("size", "descriptors", "text"),
    [
        (1024, 0, None),
        (1025, 0, "failure to read message : message truncated"),
        (1025, 1, "failure to read message : message truncated"),
        (10, 17, "failure to read message : control message truncated"),
        (10, 200, "failure to read message : control message truncated"),
    ],
)
def test_truncated_packet_is_an_error_and_its_descriptors_are_closed(
    size: int, descriptors: int, text: str | None
) -> None:
    async def body(channel: Channel, peer: socket.socket) -> None:
        socket.send_fds(peer, [bytes(size)], [peer.fileno()] * descriptors) if descriptors else peer.send(
            bytes(size)
        )
        peer.send(b"next")
        if text is None:
            packet = await channel.receive()
            assert packet is not None
            assert len(packet.data) == size
        else:
            with pytest.raises(Unreadable) as caught:
                await channel.receive()
            assert str(caught.value) == text
        following = await channel.receive()
        assert following is not None
        assert following.data == b"next"

    over_a_pair(asyncio.run, body)


def test_descriptor_that_finds_no_free_place_is_an_error_that_says_so() -> None:
    async def body(channel: Channel, peer: socket.socket) -> None:
        socket.send_fds(peer, [b"request"], [peer.fileno()])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free(), hard))
        try:
            with pytest.raises(Unreadable) as caught:
                await channel.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        said = "control message truncated: this process has no free file descriptors"
        assert str(caught.value) == f"failure to read message : {said}"

    over_a_pair(asyncio.run, body)


def test_an_empty_packet_is_the_end_and_its_descriptors_are_closed() -> None:
    async def body(channel: Channel, peer: socket.socket) -> None:
        socket.send_fds(peer, [b""], [peer.fileno()])
        assert await channel.receive() is None

    over_a_pair(asyncio.run, body)


@on_both_loops
def test_listening_and_connecting(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "zds.sock"
    path.write_text("left over")

    async def main() -> None:
        listener = Listener(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        accepting = asyncio.get_running_loop().create_task(listener.accept())
        await asyncio.sleep(0)
        client = connect(path)
        server = await accepting
        await client.send(b"hello")
        packet = await server.receive()
        assert packet is not None
        assert packet.data == b"hello"
        client.close()
        assert await server.receive() is None
        server.close()
        listener.close()
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(FileNotFoundError):
            connect(path)

    run(main())


def test_socket_path_of_a_successor_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "zds.sock"
    old, new = Listener(path), Listener(path)
    old.close()
    connect(path).close()
    new.close()
    assert not path.exists()


def test_unusable_socket_path_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "zds.sock", tmp_path / ("x" * 120)):
        with pytest.raises(OSError, match=path.name):
            Listener(path)
