"""Long connections of well-known clients and servers: grpcio, wsproto, and psql with a PostgreSQL server.

``serve`` answers gRPC and websockets until it is killed. ``use HOST COUNT POSTGRES`` opens ``COUNT`` connections
of each and ``POSTGRES`` sessions of psql, says ``open`` when each has had an answer, uses them until its input
ends, and prints a JSON object: ``done`` by kind, and ``failures``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Pong, Request

GRPC_PORT, WEBSOCKET_PORT, POSTGRES_PORT = 9001, 9002, 5432
_METHOD = "/test.Numbers/Exchange"
#: One connection each per channel, and none that was there before.
_OWN = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
_PACE_S = 0.25
_FAST = 50
"""From this number of connections of a kind on, all together are used as often, so each one less often."""
Ask = Callable[[int], Awaitable[bool]]


def _message(number: int) -> bytes:
    return number.to_bytes(8, "big") + os.urandom(number * 997 % 16_384)


def _answer(message: bytes) -> bytes:
    return message[:8] + hashlib.sha256(message).digest()


# Servers


async def _exchange(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield _answer(message)


async def _websocket(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection, whole = WSConnection(ConnectionType.SERVER), b""
    while data := await reader.read(65_536):
        connection.receive_data(data)
        for event in connection.events():
            if isinstance(event, Request):
                writer.write(connection.send(AcceptConnection()))
            elif isinstance(event, BytesMessage):
                whole += event.data
                if event.message_finished:
                    writer.write(connection.send(BytesMessage(data=_answer(whole))))
                    whole = b""
            elif isinstance(event, Ping | CloseConnection):
                writer.write(connection.send(event.response()))
    writer.close()


async def serve() -> None:
    """Answer gRPC and websockets."""
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(_exchange)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Numbers", {"Exchange": method}),))
    server.add_insecure_port(f"[::]:{GRPC_PORT}")
    await server.start()
    await asyncio.start_server(_websocket, None, WEBSOCKET_PORT)
    await server.wait_for_termination()


# Clients


class Client:
    """Every connection of this process."""

    def __init__(self, host: str, count: int, postgres: int) -> None:
        self.host = host
        self.done: dict[str, int] = {}
        self.failures: list[str] = []
        self._stop = asyncio.Event()
        self._pace_s = _PACE_S * max(1.0, count / _FAST)
        self._silent = 2 * count + postgres
        self._kinds = [("grpc", self._grpc)] * count + [("websocket", self._websocket)] * count
        self._kinds += [("postgres", self._postgres)] * postgres

    async def run(self) -> None:
        """Use all until the input ends."""
        async with asyncio.TaskGroup() as group:
            for kind, use in self._kinds:
                group.create_task(self._one(kind, use))
            await asyncio.to_thread(sys.stdin.read)
            self._stop.set()
        print(json.dumps({"done": self.done, "failures": self.failures}), flush=True)

    async def _one(self, kind: str, use: Callable[[], Awaitable[None]]) -> None:
        try:
            await use()
            self.done[kind] = self.done.get(kind, 0) + 1
        except (OSError, EOFError, ValueError, grpc.aio.AioRpcError) as error:
            self.failures.append(f"{kind} to {self.host}: {error!r}")

    async def _repeat(self, ask: Ask) -> int:
        number = 0
        while not self._stop.is_set():
            if not await ask(number):
                raise ValueError(f"a wrong answer to message {number}")
            if not number:
                self._silent -= 1
                if not self._silent:
                    print("open", flush=True)
            number += 1
            await asyncio.sleep(self._pace_s)
        return number

    async def _grpc(self) -> None:
        async with grpc.aio.insecure_channel(f"{self.host}:{GRPC_PORT}", options=_OWN) as channel:
            call = channel.stream_stream(_METHOD)()

            async def ask(number: int) -> bool:
                message = _message(number)
                await call.write(message)
                return await call.read() == _answer(message)

            await self._repeat(ask)
            await call.done_writing()
            if await call.read() is not grpc.aio.EOF or await call.code() is not grpc.StatusCode.OK:
                raise ValueError("the stream did not end in order")

    async def _websocket(self) -> None:
        reader, writer = await asyncio.open_connection(self.host, WEBSOCKET_PORT)
        connection = WSConnection(ConnectionType.CLIENT)
        events: list[Any] = []

        async def event() -> Any:
            while not events:
                data = await reader.read(65_536)
                if not data:
                    raise EOFError("the connection ended")
                connection.receive_data(data)
                events.extend(connection.events())
            return events.pop(0)

        async def ask(number: int) -> bool:
            message = _message(number)
            writer.write(connection.send(Ping(message[:8])) + connection.send(BytesMessage(data=message)))
            pong, answer = await event(), await event()
            return (
                isinstance(pong, Pong) and bytes(pong.payload) == message[:8] and answer.data == _answer(message)
            )

        writer.write(connection.send(Request(host=self.host, target="/")))
        if not isinstance(await event(), AcceptConnection):
            raise ValueError("the server did not accept")
        await self._repeat(ask)
        writer.write(connection.send(CloseConnection(code=1000)))
        if not isinstance(await event(), CloseConnection):
            raise ValueError("the connection was not closed in order")
        writer.close()

    async def _postgres(self) -> None:
        """One session, which its temporary table does not outlive."""
        pipe = asyncio.subprocess.PIPE
        options = ("-qAtX", "-v", "ON_ERROR_STOP=1", "-h", self.host, "-p", str(POSTGRES_PORT), "-U", "postgres")
        psql = await asyncio.create_subprocess_exec("psql", *options, stdin=pipe, stdout=pipe)
        assert psql.stdin is not None
        assert psql.stdout is not None
        sent, received = psql.stdin, psql.stdout

        async def said(query: str) -> bytes:
            sent.write(query.encode() + b";\n")
            return (await received.readline()).strip()

        async def ask(number: int) -> bool:
            return await said(f"INSERT INTO seen VALUES ({number}) RETURNING n") == b"%d" % number

        sent.write(b"CREATE TEMPORARY TABLE seen (n int);\n")
        count = await self._repeat(ask)
        if await said("SELECT count(*) FROM seen") != b"%d" % count:
            raise ValueError("another session answered")
        sent.close()
        if await psql.wait():
            raise ValueError(f"psql ended with {psql.returncode}")


def main() -> None:
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    else:
        host, count, postgres = sys.argv[2:]
        asyncio.run(Client(host, int(count), int(postgres)).run())


if __name__ == "__main__":
    main()
