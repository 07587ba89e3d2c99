"""Every pair of frames in one read of a connection: the same results as in two reads, and nothing left of it."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hbone import frames
from hbone.aio.connection import connect
from hbone.aio.connection_settings import default_client
from hbone.aio.fiber import Fiber
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectRefused, ErrorCode, TunnelBroken
from hbone.frames import frame
from hbone.hpack_cache import BlockEncoder
from tests.hbone.aio.harness import CONNECT, LOOPS, RawPeer, polling, raw_client, request_frame, run, tcp_pair

SETTINGS_WINDOW = frame(frames.SETTINGS, 0, 0, frames.SETTING.pack(frames.Setting.INITIAL_WINDOW_SIZE, 100_000))


def response(status: bytes, *, ended: bool = False) -> bytes:
    flags = frames.END_HEADERS | (frames.END_STREAM if ended else 0)
    return frame(frames.HEADERS, flags, 1, BlockEncoder().encode([(b":status", status)]))


def reset(stream_id: int, code: int) -> bytes:
    return frame(frames.RST_STREAM, 0, stream_id, frames.U32.pack(code))


COMMON = {
    "DATA": frame(frames.DATA, 0, 1, b"data"),
    "DATA END": frame(frames.DATA, frames.END_STREAM, 1, b"data"),
    "END": frame(frames.DATA, frames.END_STREAM, 1),
    "CANCEL": reset(1, ErrorCode.CANCEL),
    "NO_ERROR": reset(1, ErrorCode.NO_ERROR),
    "INTERNAL_ERROR": reset(1, ErrorCode.INTERNAL_ERROR),
    "REFUSED_STREAM": reset(1, ErrorCode.REFUSED_STREAM),
    "WINDOW_UPDATE": frame(frames.WINDOW_UPDATE, 0, 1, frames.U32.pack(1000)),
    "SETTINGS": SETTINGS_WINDOW,
    "broken": frame(frames.PUSH_PROMISE, 0, 1, b"\0\0\0\2"),
}
#: From a client, after its SETTINGS.
TO_SERVER = {
    **COMMON,
    "request": request_frame(1),
    "request END": request_frame(1, ended=True),
    "request, data": request_frame(1) + COMMON["DATA"],
    "another": request_frame(3),
    "another reset": request_frame(3) + reset(3, ErrorCode.CANCEL),
    "GOAWAY": frame(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(0, 0)),
}
#: From a server, which has got the request for stream 1.
TO_CLIENT = {
    **COMMON,
    "200": response(b"200"),
    "200 END": response(b"200", ended=True),
    "200, data": response(b"200") + COMMON["DATA"],
    "100": response(b"100"),
    "503": response(b"503"),
    "503 END": response(b"503", ended=True),
    "GOAWAY 0": frame(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(0, 0)),
    "GOAWAY 1": frame(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(1, 0)),
}


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no object of streams or their handlers outlives the block."""

    def alive() -> int:
        gc.collect()
        return sum(type(one) in (Request, Tunnel, Fiber) for one in gc.get_objects())

    gc.collect()
    gc.freeze()  # what there is already, the whole test session, need not be looked through again and again
    before = alive()
    yield
    assert alive() == before


async def deliver(peer: RawPeer, reads: list[bytes]) -> bool:
    """Deliver each read after the previous one is processed; return False if the connection ended."""
    for read in reads:
        if not await peer.settle(read):
            return False
    return True


def of_streams(peer: RawPeer) -> list[tuple[int, int, int, bytes]]:
    """What a peer has got; credit, acknowledgements and the order among streams are about reads."""
    about_reads = (frames.WINDOW_UPDATE, frames.PING, frames.SETTINGS)
    return sorted((one for one in peer.received if one[0] not in about_reads), key=lambda one: one[2])


async def served(poller: Poller, reads: list[bytes]) -> tuple[object, ...]:
    """Return the end of a handler that waits for its application, and what its client gets."""
    met: list[str] = []

    async def wait(request: Request) -> None:
        met.append("begun")
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            met.append("gone" if request.gone else "over")
            raise

    async with raw_client(poller, wait) as peer:
        alive = await deliver(peer, reads)
        if alive:
            # The connection still works.
            peer.received.clear()
            assert await peer.settle(request_frame(5))
            assert not any(one[0] == frames.RST_STREAM and one[2] == 5 for one in peer.received)
        got = of_streams(peer)
    return alive, sorted(met), got


async def asked(poller: Poller, reads: list[bytes]) -> tuple[object, ...]:
    """Return the answer to a client's CONNECT, and the application's end of the tunnel if there is one."""
    near, far = tcp_pair()
    client = await connect(near, None, default_client(), poller)
    with far:
        peer = RawPeer(far)
        opening = asyncio.get_running_loop().create_task(client.open(CONNECT))
        await peer.skip(len(frames.PREFACE))
        while not any(one[0] == frames.HEADERS for one in peer.received):
            assert await peer.read()
        assert await peer.settle(frame(frames.SETTINGS, 0, 0))
        alive = await deliver(peer, reads)
        result: object
        if opening.done() or not alive:
            try:
                tunnel = await opening
            except ConnectRefused as error:
                result = error.status
            except TunnelBroken as error:
                result = (type(error), error.code, error.unprocessed)
            else:
                result = await relayed(poller, tunnel)
        else:
            opening.cancel()
            await asyncio.wait([opening])
            result = "waits"
        open_streams = client.open_streams
        client.close()
    return alive, result, open_streams


async def relayed(poller: Poller, tunnel: Tunnel) -> tuple[object, ...]:
    """Return what a silent application receives from an open tunnel."""
    near, inner = tcp_pair()
    near.setblocking(False)
    loop = asyncio.get_running_loop()
    with near:
        with PlainSocket(inner, poller) as end, tunnel:
            running = relay(tunnel, end, ByteCounts())
            near.shutdown(socket.SHUT_WR)
            waiting = loop.create_task(wait_for(running))
            if tunnel.source.value == "open":
                running.abort("the server says no more")
            outcome = await waiting
        data, how = b"", "end"
        try:
            while piece := await loop.sock_recv(near, 1000):
                data += piece
        except ConnectionResetError:
            how = "reset"
    return data, how, outcome


async def wait_for(running: object) -> tuple[object, ...]:
    result = await running  # type: ignore[misc]
    return type(result.error), getattr(result.error, "code", None), result.timed_out


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("first", TO_SERVER)
def test_frame_pairs_to_a_server_have_one_result_in_one_read_or_two(
    first: str, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with nothing_left():
            for second in TO_SERVER:
                pair = [TO_SERVER[first], TO_SERVER[second]]
                with polling() as poller:
                    together = await served(poller, [b"".join(pair)])
                    assert await served(poller, pair) == together, second
            await asyncio.sleep(0)  # in which uvloop drops timers that were cancelled

    run(main, loop)
    assert caplog.records == []


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("first", TO_CLIENT)
def test_frame_pairs_to_a_client_have_one_result_in_one_read_or_two(
    first: str, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with nothing_left():
            for second in TO_CLIENT:
                pair = [TO_CLIENT[first], TO_CLIENT[second]]
                with polling() as poller:
                    together = await asked(poller, [b"".join(pair)])
                    assert await asked(poller, pair) == together, second
            await asyncio.sleep(0)  # in which uvloop drops timers that were cancelled

    run(main, loop)
    assert caplog.records == []
