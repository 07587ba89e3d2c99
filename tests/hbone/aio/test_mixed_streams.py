"""Streams of one connection that open, transfer, half-close and reset in any order keep their bytes apart.

A peer writes its frames itself, those of several streams into one read, while the applications at the other ends
of the tunnels send, end and reset. In every order, an application gets a prefix of its own stream's bytes; if no
side reset the stream, it gets all of them and then the end. The same holds for the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hbone import frames
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.end import End
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.socket import PlainSocket
from hbone.errors import ErrorCode, TunnelBroken
from hbone.settings import Http2Settings
from tests.generated import examples
from tests.hbone.aio.harness import (
    LOOPS,
    WAIT_S,
    App,
    RawPeer,
    polling,
    raw_client,
    request_frame,
    run,
    tcp_pair,
    until,
)

STREAMS = 5
GRANT = 1 << 20
#: The peer does not read what it is granted before it ends: as much as a script sends at most.
SETTINGS = ConnectionSettings(http2=Http2Settings(initial_window_bytes=1 << 18))

#: What one stream does next. The peer's steps leave with others in one write; the application's happen at once.
STEPS = (
    "data",
    "data",
    "data",
    "end",
    "reset",
    "grant",
    "sends",
    "sends",
    "sends much",
    "application ends",
    "application resets",
)

Step = tuple[int, str]


@st.composite
def scripts(draw: st.DrawFn) -> list[list[Step]]:
    """Batches of steps: (which stream, what)."""
    step = st.tuples(st.integers(0, STREAMS - 1), st.sampled_from(STEPS))
    return draw(st.lists(st.lists(step, min_size=1, max_size=8), min_size=1, max_size=8))


@dataclass
class Stream:
    """One stream with its application, and the bytes that each of the two has sent."""

    number: int
    app: App
    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """The peer sent END_STREAM."""
    app_ended: bool = False
    peer_reset: bool = False
    app_reset: bool = False

    @property
    def id(self) -> int:
        return 2 * self.number + 1

    @property
    def reset(self) -> bool:
        return self.peer_reset or self.app_reset

    def words(self, said: bytearray, size: int) -> bytes:
        """The next bytes of a direction, that no other stream and no other place of this one has."""
        begin = len(said)
        mark = b"%d%s" % (self.number, b"u" if said is self.up else b"d")
        text = b"".join(b"%s%07d" % (mark, at) for at in range(begin // 9, (begin + size) // 9 + 1))
        said += (part := text[begin % 9 : begin % 9 + size])
        return part

    def step(self, what: str) -> bytes:
        """Do the application's step, or return the peer's frames. Return nothing if the step would break the
        protocol.
        """
        peer_may = not self.ended and not self.reset
        if what == "data" and peer_may:
            return frames.frame(frames.DATA, 0, self.id, self.words(self.up, 3_000))
        if what == "end" and peer_may:
            self.ended = True
            return frames.frame(frames.DATA, frames.END_STREAM, self.id)
        if what == "reset" and not (self.reset or (self.ended and self.app_ended)):
            self.peer_reset = True
            return frames.frame(frames.RST_STREAM, 0, self.id, int(ErrorCode.CANCEL).to_bytes(4))
        if what == "grant" and not self.reset:
            return frames.frame(frames.WINDOW_UPDATE, 0, self.id, (50_000).to_bytes(4))
        if what.startswith("sends") and not self.app_ended:
            self._send(300_000 if what == "sends much" else 500)
        if what == "application ends" and not self.app_ended and not self.reset:
            self.app_ended = True
            self.app.eof()
        if what == "application resets" and not self.reset:
            self.app_reset = self.app_ended = True
            self.app.reset()
        return b""

    def _send(self, size: int) -> None:
        """Send as much as the kernel's buffer takes, like an application that does not wait."""
        before = len(self.down)
        try:
            sent = self.app.sock.send(self.words(self.down, size))
        except BlockingIOError:
            sent = 0
        except ConnectionError:  # the stream was reset
            sent, self.app_ended = 0, True
        del self.down[before + sent :]


async def received(app: App) -> tuple[bytes, bool]:
    """Return the bytes that an application received, and whether they ended in order instead of by a reset."""
    data = bytearray()
    try:
        while piece := await asyncio.wait_for(app.loop.sock_recv(app.sock, 1 << 20), WAIT_S):
            data += piece
    except ConnectionError:
        return bytes(data), False
    return bytes(data), True


async def play(script: list[list[Step]]) -> None:
    with polling() as poller:
        async with contextlib.AsyncExitStack() as stack:
            streams: list[Stream] = []
            targets: list[End] = []
            for number in range(STREAMS):
                near, far = tcp_pair()
                streams.append(Stream(number, App(far)))
                stack.callback(far.close)
                targets.append(PlainSocket(near, poller))

            async def carry(request: Request) -> None:
                with targets.pop(0) as target, contextlib.suppress(TunnelBroken), request.accept() as tunnel:
                    await relay(tunnel, target, ByteCounts())

            peer = await stack.enter_async_context(raw_client(poller, carry, SETTINGS))
            await peer.settle(b"".join(request_frame(each.id) for each in streams))
            for batch in script:
                await peer.send(b"".join(streams[number].step(what) for number, what in batch))
                await asyncio.sleep(0)
            await finish(peer, streams)
            for each in streams:
                await check(each, peer)
            await until(lambda: poller.registered == 1)  # all tunnels have ended, the connection stays


async def finish(peer: RawPeer, streams: list[Stream]) -> None:
    """End open streams, grant any credit they need, and read everything."""
    last = bytearray(frames.frame(frames.WINDOW_UPDATE, 0, 0, (4 * GRANT).to_bytes(4)))
    for each in streams:
        if not each.peer_reset:  # what an application sent before it reset is delivered, too, and needs a window
            last += frames.frame(frames.WINDOW_UPDATE, 0, each.id, (4 * GRANT).to_bytes(4))
        last += each.step("end")
        each.step("application ends")
    await peer.send(bytes(last))
    wanted = {each.id for each in streams if not each.reset}
    while not wanted <= {
        number
        for kind, flags, number, _ in peer.received
        if kind == frames.RST_STREAM or (kind == frames.DATA and flags & frames.END_STREAM)
    }:
        assert await peer.read(), "the connection ended"
    await peer.barrier()


async def check(each: Stream, peer: RawPeer) -> None:
    own = [(kind, flags, data) for kind, flags, number, data in peer.received if number == each.id]
    down = b"".join(data for kind, _, data in own if kind == frames.DATA)
    if not each.reset:
        assert not [kind for kind, _, _ in own if kind == frames.RST_STREAM], each.number
        assert await received(each.app) == (each.up, True)
        assert down == each.down
        return
    assert each.down.startswith(down)
    if not each.app_reset:
        up, _ = await received(each.app)
        assert each.up.startswith(up)


@pytest.mark.parametrize("loop", LOOPS)
def test_every_byte_of_mixed_streams_arrives_where_it_belongs(loop: str) -> None:
    @settings(max_examples=examples(150), deadline=None)
    @given(scripts())
    def property_holds(script: list[list[Step]]) -> None:
        run(lambda: play(script), loop)

    property_holds()
