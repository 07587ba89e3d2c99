"""A read is processed completely before another read can use the same scratch buffers."""

from __future__ import annotations

import contextlib

import pytest

from hbone import frames
from hbone.aio.end import End
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.socket import PlainSocket
from hbone.errors import ErrorCode
from tests.hbone.aio.harness import LOOPS, App, ends, polling, raw_client, request_frame, run, tcp_pair

WINDOW = 65_535  # of a peer that grants nothing
PAYLOAD = bytes(range(256)) * 40


@pytest.mark.parametrize("code", [ErrorCode.CANCEL, ErrorCode.CONNECT_ERROR])
@pytest.mark.parametrize("kind", ["plain", "tls"])
@pytest.mark.parametrize("loop", LOOPS)
def test_discarded_bytes_of_a_stream_do_not_overwrite_the_rest_of_the_read(
    loop: str, kind: str, code: ErrorCode
) -> None:
    """What the ended stream's application sends on is discarded, but not over the rest of the same read."""

    async def main() -> None:
        with polling() as poller:
            async with contextlib.AsyncExitStack() as stack:
                source, application = await stack.enter_async_context(ends(kind, poller))
                near, far = tcp_pair()
                other = App(stack.enter_context(far))
                targets: list[End] = [application, PlainSocket(near, poller)]

                async def carry(request: Request) -> None:
                    with targets.pop(0) as target, request.accept() as tunnel:
                        await relay(tunnel, target, ByteCounts())

                peer = await stack.enter_async_context(raw_client(poller, carry))
                await peer.settle(request_frame(1))
                await peer.settle(request_frame(3))
                source.write([memoryview(b"x" * 2_000_000)], 2_000_000)
                source.flush()
                while sum(len(data) for kind, _, _, data in peer.received if kind == frames.DATA) < WINDOW:
                    await peer.read()
                for _ in range(20):  # until the application's socket is full
                    await peer.settle(b"")
                reset = frames.frame(frames.RST_STREAM, 0, 1, int(code).to_bytes(4))
                await peer.send(reset + frames.frame(frames.DATA, 0, 3, PAYLOAD))
                assert await other.read(len(PAYLOAD)) == PAYLOAD
                source.close()

    run(main, loop)
