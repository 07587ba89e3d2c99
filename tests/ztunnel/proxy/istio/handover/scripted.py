"""A predecessor or a successor in a hand-over that says what its test tells it to."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec

from tests.ztunnel.proxy.istio.handover.generations import SERVER, Generations, echoed
from tests.ztunnel.proxy.istio.pods import APP_PORT, End
from ztunnel.proxy.dataplane.handover.giver import Result
from ztunnel.proxy.dataplane.handover.messages import SCHEMA, FromGiver, FromTaker, Greeting, encode
from ztunnel.proxy.dataplane.rendezvous import Parcel, Rendezvous
from ztunnel.proxy.istio.handover.messages import from_giver
from ztunnel.runtime.settings import HANDOVER_SOCKET

GREETING = Greeting(version="scripted", schema=SCHEMA, oldest=SCHEMA)


#: A greeting of a version with slices; GREETING is of one without.
SLICING = msgspec.structs.replace(GREETING, slices=True)


class Scripted:
    """A stand-in for a process, controlled by the test."""

    def __init__(self, channel: Rendezvous) -> None:
        self.channel = channel
        self.parcel = Parcel(b"", ())

    async def say(self, message: FromTaker | FromGiver, descriptors: tuple[int, ...] = ()) -> None:
        await self.channel.send(encode(message), descriptors)

    async def hear(self) -> FromGiver | None:
        self.parcel.close()
        parcel = await self.channel.receive()
        if parcel is None:
            return None
        self.parcel = parcel
        return from_giver(parcel.data)

    def close(self) -> None:
        self.parcel.close()
        self.channel.close()


@contextlib.asynccontextmanager
async def scripted_taker(made: Generations, greeting: Greeting | None = GREETING) -> AsyncIterator[Scripted]:
    """A successor of the old proxy, which listens from now on."""
    if not made.before.status()["listening"]:
        made.before.begin()
        await made.old.until(lambda: made.before.status()["listening"])
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    sock.connect(str(made.folder / HANDOVER_SOCKET))
    taker = Scripted(Rendezvous(sock))
    try:
        if greeting is not None:
            await taker.say(greeting)
        yield taker
    finally:
        taker.close()


async def plain(made: Generations) -> End:
    end = made.old.plain(f"{SERVER}:{APP_PORT}")
    await echoed(end)
    return end


def giving(made: Generations, seconds: float = 0.0) -> "asyncio.Task[Result | None]":
    return asyncio.get_running_loop().create_task(made.before.give(seconds))


async def still_served(made: Generations, end: End) -> None:
    """The old proxy carries a connection to its end, and writes its line."""
    assert await end.ask() == b"ping"
    line = await made.old.line(1)
    assert "error" not in line
    assert line["bytes_sent"] == 9


async def greeted(taker: Scripted) -> None:
    message = await taker.hear()
    assert isinstance(message, Greeting)
