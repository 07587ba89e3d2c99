"""The cost of moving open connections to another process: ``python -m bench.handover``.

Two pollers of one process stand for the old and the new process. Each connection is frozen, encoded, sent with its
descriptors over a Unix socket, decoded, created again, compared, released by the old side and continued by the
new one, as in a hand-over. Log lines and metrics are not moved, so the figures measure only the tunnel engine. For
each kind of connection it prints connections per second of CPU time of both sides together, bytes of state and
microseconds per connection, and the longest pause of what moves at once (a tunnel connection with its tunnels, or
one plain connection).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import uvloop

from bench.tunnel_micro import identity
from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.handover import Frozen, UnitState, resumed
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, Relay, relay
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.aio.socket import PlainSocket
from hbone.settings import Role
from hbone.tls_context import TlsContext
from ztunnel.proxy.dataplane.rendezvous import Rendezvous
from ztunnel.runtime.descriptors import raise_limit

#: Connections that share a tunnel connection; the default limit of a pool is 100.
_SHARED = 100
_BYTES = b"x" * 3000
_REQUEST = ((b":method", b"CONNECT"), (b":authority", b"127.0.0.1:80"))


class Machine:
    """The pollers of the old and the new process, their channel, and the applications' ends."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.old, self.new = Poller(), Poller()
        one, other = socket.socketpair()
        for sock in (one, other):
            sock.setblocking(False)
        self.giver, self.taker = Rendezvous(one), Rendezvous(other)
        stack.callback(self.giver.close)
        stack.callback(self.taker.close)
        self.bytes = 0
        self.pauses_s: list[float] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """Return an application's socket, and the proxy's."""
        one, other = socket.socketpair()
        other.setblocking(False)
        one.setblocking(False)
        self.stack.callback(one.close)
        return one, other

    def plain(self) -> tuple[Relay, socket.socket]:
        """Return a relay of two plain sockets, and the client."""
        client, near = self.pair()
        _, far = self.pair()
        return relay(PlainSocket(near, self.old), PlainSocket(far, self.old), ByteCounts()), client

    async def tunnels(self, count: int) -> tuple[Connection, list[Relay], list[socket.socket]]:
        """Return a tunnel connection with relays to plain clients. Its server answers requests and reads."""
        tls = replace(identity(), movable=True)
        one, far = socket.socketpair()
        for sock in (one, far):
            sock.setblocking(False)

        async def answer(request: Request) -> None:
            with request.accept() as tunnel:
                app, end = self.pair()
                await relay(tunnel, PlainSocket(end, self.old), ByteCounts())
                app.close()

        serving = serve_connection(far, TlsContext(Role.SERVER, tls), ConnectionSettings(), self.old, answer)
        task = asyncio.ensure_future(serving)  # noqa: TID251  cancelled below
        self.stack.callback(task.cancel)
        connection = await connect(one, TlsContext(Role.CLIENT, tls), default_client(), self.old)
        relays, clients = [], []
        for _ in range(count):
            client, end = self.pair()
            tunnel = await connection.open(_REQUEST)
            relays.append(relay(PlainSocket(end, self.old), tunnel, ByteCounts()))
            clients.append(client)
        return connection, relays, clients

    async def move(self, relays: Sequence[Relay], connection: Connection | None) -> None:
        """Move one tunnel connection, or one plain connection, from the old poller to the new one."""
        began_s = time.perf_counter()
        frozen = Frozen(relays, connection)
        message = msgspec.msgpack.encode(frozen.state)
        self.bytes += len(message)
        sending = asyncio.ensure_future(self.giver.send(message, frozen.descriptors))  # noqa: TID251  awaited
        parcel = await self.taker.receive()
        await sending
        assert parcel is not None
        state = msgspec.msgpack.decode(parcel.data, type=UnitState)
        socks = [socket.socket(fileno=each) for each in parcel.take_all()]
        there = resumed(state, socks, default_client(), self.new)
        assert frozen.unchanged
        frozen.leave()
        there.start()
        self.pauses_s.append(time.perf_counter() - began_s)
        self.stack.callback(there.discard)


async def measured(kind: str, count: int) -> str:
    """Measure one kind of connection, and return its table row."""
    with contextlib.ExitStack() as stack:
        machine = Machine(stack)
        units: list[tuple[list[Relay], Connection | None]] = []
        clients: list[socket.socket] = []
        if kind == "plain":
            for _ in range(count):
                running, client = machine.plain()
                units.append(([running], None))
                clients.append(client)
        else:
            for _ in range(max(1, count // _SHARED)):
                carrier, relays, some = await machine.tunnels(min(count, _SHARED))
                units.append((relays, carrier))
                clients += some
        for client in clients:
            client.send(_BYTES)
        await asyncio.sleep(0.3)
        began_s = time.process_time()
        for relays, connection in units:
            await machine.move(relays, connection)
        took_s = time.process_time() - began_s
        moved = sum(len(relays) for relays, _ in units)
        row = (
            f"{kind:8} {moved:6} connections: {moved / took_s:8.0f}/s of CPU, {took_s / moved * 1e6:6.0f} us and "
            f"{machine.bytes / moved:6.0f} bytes each, longest pause {max(machine.pauses_s) * 1000:6.2f} ms"
        )
    machine.old.close()
    machine.new.close()
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each kind of connection and each number of them."""
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__)
    parser.add_argument("--connections", type=int, nargs="*", default=[100, 1_000])
    raise_limit()
    for count in parser.parse_args(arguments).connections:
        for kind in ("plain", "tunnels"):
            print(uvloop.run(measured(kind, count)))


if __name__ == "__main__":
    main()
