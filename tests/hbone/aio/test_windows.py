"""Streams whose readers do not read, beside one whose reader does, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.socket import PlainSocket
from tests.generated import at_night
from tests.hbone.aio.harness import CONNECT, LOOPS, App, connected, polling, run, tcp_pair, until

MIB = 1 << 20


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("receiver", ["client", "server"])
@pytest.mark.parametrize("unread", [3, at_night(99, 20)])
def test_a_stream_moves_beside_others_that_nothing_reads(unread: int, receiver: str, loop: str) -> None:
    async def main() -> None:
        outers: list[socket.socket] = []
        with polling() as poller:
            far_apps: asyncio.Queue[App] = asyncio.Queue()

            async def carry(request: Request) -> None:
                inner, outer = tcp_pair()
                outers.append(outer)
                with PlainSocket(inner, poller) as app, request.accept() as tunnel:
                    far_apps.put_nowait(App(outer))
                    await relay(tunnel, app, ByteCounts())

            async with connected(poller, on_request=carry) as pair, asyncio.TaskGroup() as tasks:
                relays = []

                async def open_one() -> tuple[App, App]:
                    """Return the sending and the receiving application of a new stream."""
                    inner, outer = tcp_pair()
                    outers.append(outer)

                    async def run_relay() -> None:
                        with PlainSocket(inner, poller) as client, await pair.client.open(CONNECT) as tunnel:
                            await relay(client, tunnel, ByteCounts())

                    relays.append(tasks.create_task(run_relay()))
                    near, far = App(outer), await far_apps.get()
                    return (near, far) if receiver == "server" else (far, near)

                stuck = []
                for _ in range(unread):
                    writer, _ = await open_one()
                    stuck.append(tasks.create_task(writer.send(bytes(8 * MIB))))
                engine = pair.server.engine if receiver == "server" else pair.client.engine
                await until(lambda: engine.open_streams == unread)
                writer, reader = await open_one()
                size = 48 * MIB
                sending = tasks.create_task(writer.send(bytes(size)))
                left = size
                while left:
                    left -= len(await reader.read(min(left, MIB)))
                await sending
                assert not any(task.done() for task in stuck)
                for task in (*stuck, *relays):
                    task.cancel()
                for task in (*stuck, *relays):
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                for outer in outers:  # a relay lingers for an application that may read on
                    outer.close()

    run(main, loop)
