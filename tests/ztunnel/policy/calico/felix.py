"""A PolicySync server with scripted messages, stream by stream."""

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

from xds.aio.grpc_server import Context, GrpcServer, read
from xds.dialects.calico.policysync import encode
from xds.model import calico as c
from ztunnel.policy.calico.follower import METHOD


class Felix:
    """Serves ``unix:<folder>/felix.sock`` while entered.

    Attributes:
        streams: one queue for each begun stream; bytes are sent unchanged, None ends the stream.
    """

    def __init__(self, folder: Path) -> None:
        self.target = f"unix:{folder}/felix.sock"
        self.streams: asyncio.Queue[asyncio.Queue[c.Update | bytes | None]] = asyncio.Queue()
        self._server = GrpcServer([self.target], route=lambda path: self._serve if path == METHOD else None)

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.__aexit__(kind, error, trace)

    async def stream(self, *updates: c.Update | bytes | None) -> asyncio.Queue[c.Update | bytes | None]:
        """Wait for the next stream, send these messages in it, and return its queue."""
        queue = await self.streams.get()
        for update in updates:
            queue.put_nowait(update)
        return queue

    async def _serve(self, context: Context) -> None:
        assert await read(context) == b""
        queue: asyncio.Queue[c.Update | bytes | None] = asyncio.Queue()
        self.streams.put_nowait(queue)
        while (update := await queue.get()) is not None:
            await context.write(update if isinstance(update, bytes) else encode(update))
