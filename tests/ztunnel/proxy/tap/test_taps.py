"""Taps of one process: how a capture is written to its reader, and what is left of it afterwards."""

import asyncio
import socket

from tests.limits import WAIT_S
from tests.ztunnel.proxy.tap.test_capture import OUTBOUND
from ztunnel.proxy.tap.request import TapRequest
from ztunnel.proxy.tap.taps import Taps
from ztunnel.runtime.clock import SystemClock


def test_ended_capture_keeps_no_packets_for_connections_that_are_still_open() -> None:
    async def body() -> None:
        taps = Taps(SystemClock())
        near, far = socket.socketpair()
        for sock in (near, far):
            sock.setblocking(False)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            carrying = tasks.create_task(taps.carry(TapRequest.parse({"pod": "a/b"}), far))
            await asyncio.sleep(0)
            capture = taps.of("a/b")
            assert capture is not None
            stream = capture.stream(OUTBOUND)
            assert stream is not None
            for _ in range(32):
                stream.received(memoryview(bytes(64 * 1024)))
            assert capture.waiting_bytes > 1 << 20
            near.close()  # the reader has disconnected
            await carrying
        # The stream refers to the capture until its connection ends.
        assert (capture.take(), capture.waiting_bytes) == (b"", 0)
        stream.received(memoryview(b"the connection goes on"))
        stream.left()
        assert capture.take() == b""

    asyncio.run(body())
