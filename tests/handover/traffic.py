"""Long connections of several kinds, each of which notices a byte that is lost, doubled or out of order.

The first 32 bytes of a connection name its kind and its pace in seconds. It lasts until
the event ``Outcome.stop``. Kinds:

======  ==========================================================================================
kind    what it does
======  ==========================================================================================
echo    the client sends numbers, the server returns them, and the client measures round trips
both    client and server send numbers at their own rates, and each checks the other's
bulk    the client sends as fast as it can, and both compare the hash of all bytes
idle    says nothing until its end, and then echoes once
short   echoes once, at once
half    the client ends its direction at once, the server sends numbers until the end
======  ==========================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from tproxy.aio.netns import Netns
from tproxy.aio.sockets import connect, listen

PORT = 9000
KINDS = ("echo", "both", "bulk", "idle", "half")
_NUMBER = struct.Struct("!Q")
_PACE_S = 0.02
_CHUNK = os.urandom(65_536)


def paced(connections: int) -> float:
    """Return the seconds between two sends of a connection.

    One process plays most applications. From 100 connections on all together send the same, and from 4,000 on
    less, because proxies need processors, too.
    """
    return _PACE_S * max(1.0, connections / 100) * max(1.0, connections / 4000)


class Where(Protocol):
    """A pod, or this machine."""

    @property
    def name(self) -> str:
        """For failures."""

    @property
    def netns(self) -> Netns | None:
        """Return the network namespace of its sockets; None for the current one."""


@dataclass(slots=True)
class Outcome:
    """The results of all connections.

    Attributes:
        done: connections that ended as they should, by kind.
        failures: what was wrong with others.
        round_trips_s: of echoes.
        bytes: that bulk connections have moved.
        stop: ends all long connections.
    """

    done: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    round_trips_s: list[float] = field(default_factory=list)
    bytes: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)


class _Stream:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    async def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await self._loop.sock_recv(self.sock, size - len(data))
            if not piece:
                raise EOFError(f"ended after {len(data)} of {size} bytes")
            data += piece
        return data

    async def some(self) -> bytes:
        return await self._loop.sock_recv(self.sock, 1 << 16)

    def eof(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    async def numbers(self, stop: asyncio.Event, pace_s: float) -> None:
        """Send numbers in order until an event, then end this direction."""
        number = 0
        while not stop.is_set():
            await self.send(_NUMBER.pack(number))
            number += 1
            await asyncio.sleep(pace_s)
        self.eof()

    async def expect_numbers(self) -> int:
        """Read numbers in order to the end."""
        number, rest = 0, b""
        while data := await self.some():
            rest += data
            whole = len(rest) - len(rest) % _NUMBER.size
            for (found,) in _NUMBER.iter_unpack(rest[:whole]):
                if found != number:
                    raise ValueError(f"{found} instead of {number}")
                number += 1
            rest = rest[whole:]
        if rest:
            raise ValueError("a number was cut off")
        return number


# The server


async def _answer(sock: socket.socket, stop: asyncio.Event) -> None:
    stream = _Stream(sock)
    kind, pace = (await stream.read(32)).decode().split()
    pace_s = float(pace)
    if kind in ("echo", "idle", "short"):
        while data := await stream.some():
            await stream.send(data)
        stream.eof()
    elif kind == "half":
        if await stream.some():
            raise ValueError("more bytes than were sent")
        await stream.numbers(stop, pace_s)
    elif kind == "both":
        _, count = await asyncio.gather(stream.numbers(stop, pace_s), stream.expect_numbers())
        if not count:
            raise ValueError("no number arrived")
    elif kind == "bulk":
        seen, size = hashlib.sha256(), 0
        while data := await stream.some():
            seen.update(data)
            size += len(data)
        await stream.send(seen.digest() + _NUMBER.pack(size))
        stream.eof()


@contextlib.asynccontextmanager
async def serving(place: Where, outcome: Outcome, host: str = "::") -> AsyncIterator[None]:
    """Serve every kind of connection in a pod. Faults that the server detects count as failures, too."""
    loop = asyncio.get_running_loop()

    async def one(client: socket.socket) -> None:
        with client:
            try:
                await _answer(client, outcome.stop)
            except (OSError, EOFError, ValueError) as error:
                outcome.failures.append(f"server in {place.name}: {error!r}")

    async def accept(sock: socket.socket, group: asyncio.TaskGroup) -> None:
        while True:
            client, _ = await loop.sock_accept(sock)
            client.setblocking(False)
            group.create_task(one(client))

    with listen(host, PORT, netns=place.netns) as sock:
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(accept(sock, group))
            try:
                yield
            finally:
                accepting.cancel()


# The client


async def _echo(stream: _Stream, pace_s: float, outcome: Outcome) -> None:
    number = 0
    while not outcome.stop.is_set():
        sent_s = time.monotonic()
        await stream.send(_NUMBER.pack(number))
        if await stream.read(_NUMBER.size) != _NUMBER.pack(number):
            raise ValueError(f"another number than {number}")
        outcome.round_trips_s.append(time.monotonic() - sent_s)
        number += 1
        await asyncio.sleep(pace_s)


async def _both(stream: _Stream, pace_s: float, outcome: Outcome) -> None:
    _, count = await asyncio.gather(stream.numbers(outcome.stop, pace_s), stream.expect_numbers())
    if not count:
        raise ValueError("no number arrived")


async def _bulk(stream: _Stream, pace_s: float, outcome: Outcome) -> None:
    sent, size = hashlib.sha256(), 0
    while not outcome.stop.is_set():
        await stream.send(_CHUNK)
        sent.update(_CHUNK)
        size += len(_CHUNK)
        await asyncio.sleep(pace_s)
    stream.eof()
    if await stream.read(sent.digest_size + _NUMBER.size) != sent.digest() + _NUMBER.pack(size):
        raise ValueError("other bytes arrived")
    outcome.bytes += size


async def _idle(stream: _Stream, pace_s: float, outcome: Outcome) -> None:
    await outcome.stop.wait()
    await _short(stream, pace_s, outcome)


async def _short(stream: _Stream, pace_s: float, outcome: Outcome) -> None:
    await stream.send(b"still here")
    if await stream.read(10) != b"still here":
        raise ValueError("another answer")


async def _half(stream: _Stream, pace_s: float, outcome: Outcome) -> None:
    stream.eof()
    if not await stream.expect_numbers():
        raise ValueError("no number arrived")


_CLIENTS: dict[str, Callable[[_Stream, float, Outcome], Awaitable[None]]] = {
    "echo": _echo,
    "both": _both,
    "bulk": _bulk,
    "idle": _idle,
    "half": _half,
    "short": _short,
}


async def client(place: Where, host: object, kind: str, outcome: Outcome, pace_s: float = _PACE_S) -> None:
    """Run one connection of a kind from a pod to another; ``pace_s`` is the time between its messages."""
    try:
        with await connect((str(host), PORT), netns=place.netns) as sock:
            stream = _Stream(sock)
            await stream.send(f"{kind} {pace_s:.3f}".ljust(32).encode())
            await _CLIENTS[kind](stream, pace_s, outcome)
            if kind in ("echo", "idle", "short"):
                stream.eof()
                if await stream.some():
                    raise ValueError("more bytes than were sent")
        outcome.done[kind] = outcome.done.get(kind, 0) + 1
    except (OSError, EOFError, ValueError) as error:
        outcome.failures.append(f"{kind} from {place.name}: {error!r}")


async def short_connections(place: Where, host: object, outcome: Outcome) -> None:
    """New connections, one after the other, beside the long ones."""
    while not outcome.stop.is_set():
        await client(place, host, "short", outcome)
        await asyncio.sleep(_PACE_S)
