"""A client of the local socket for tests, and a proxy of one pod behind it."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import h11

from tests.limits import WAIT_S
from tests.ztunnel.proxy.tap.reader import Capture as Read
from tests.ztunnel.proxy.tap.reader import read
from xds.model.address import SocketAddress
from ztunnel.proxy.tap.capture import Capture
from ztunnel.proxy.tap.request import Direction, StreamFacts
from ztunnel.proxy.tap.taps import CannotTap, Carry, Taps
from ztunnel.runtime.clock import SystemClock

POD = "default/web"
FACTS = StreamFacts(
    direction=Direction.OUTBOUND,
    client=SocketAddress("10.0.0.1", 41000),
    server=SocketAddress("10.96.0.9", 80),
    peers=frozenset({"db"}),
)


class Source:
    """A proxy with one pod, carried by several processes if that is wanted."""

    def __init__(self, processes: int = 1) -> None:
        self.taps = [Taps(SystemClock()) for _ in range(processes)]

    async def open_connections(self, pod: str) -> int:
        if pod != POD and not pod.startswith("default/more"):
            raise CannotTap(f"no pod {pod} here")
        return 3

    def carriers(self) -> list[Carry]:
        return [taps.carry for taps in self.taps]

    def capture(self, process: int = 0) -> Capture | None:
        return self.taps[process].of(POD)


@dataclass
class Tapped:
    """One request, with the received part of its answer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)

    @classmethod
    async def ask(cls, path: Path, target: str = "/tap", method: str = "GET", **given: str) -> "Tapped":
        """Ask, and wait for the head of the answer."""
        reader, writer = await asyncio.open_unix_connection(path)
        found = cls(reader, writer, h11.Connection(h11.CLIENT))
        head = h11.Request(
            method=method, target=f"{target}?{urlencode(given)}" if given else target, headers=[("host", "x")]
        )
        writer.write(found.http.send(head) or b"")
        writer.write(found.http.send(h11.EndOfMessage()) or b"")
        response = await found._event()
        assert isinstance(response, h11.Response)
        found.status = response.status_code
        found.headers = {name.decode(): value.decode() for name, value in response.headers}
        return found

    async def _event(self) -> object:
        async with asyncio.timeout(WAIT_S):
            while (event := self.http.next_event()) is h11.NEED_DATA:
                self.http.receive_data(await self.reader.read(65536))
        return event

    async def until(self, size: int) -> None:
        """Read until so many bytes of the capture are here."""
        while len(self.data) < size:
            event = await self._event()
            assert isinstance(event, h11.Data)
            self.data += event.data

    def stop(self) -> None:
        """End the tap. The rest of the capture still arrives."""
        self.writer.write_eof()

    async def rest(self) -> Read:
        """Read to the end."""
        while isinstance(event := await self._event(), h11.Data):
            self.data += event.data
        assert isinstance(event, h11.EndOfMessage)
        self.trailers = {name.decode(): value.decode() for name, value in event.headers}
        self.writer.close()
        return read(self.data)

    async def text(self) -> str:
        """Return the body of a refusal."""
        while isinstance(event := await self._event(), h11.Data):
            self.data += event.data
        self.writer.close()
        return self.data.decode().strip()
