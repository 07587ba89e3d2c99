"""Runs both sides of a hand-over: a process takes connections from its predecessor, and later gives its
connections to its successor.

The processes connect through a Unix socket in a shared folder. When a process is ready, it connects to this
socket, on which its predecessor listens. The predecessor hands over its connections when it drains. Once the
predecessor has ended, this process listens on the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hbone.aio.poller import Poller
from ztunnel.proxy.dataplane.handover.counts import HandoverCounts
from ztunnel.proxy.dataplane.handover.giver import Giver, MovableUnits, Result, TakerGone, read_message
from ztunnel.proxy.dataplane.handover.messages import (
    OLDEST_SCHEMA,
    SCHEMA,
    SLICE_S,
    Busy,
    Declined,
    Finished,
    FromGiver,
    FromTaker,
    Go,
    Greeting,
    Keep,
    Offer,
    ReadGiver,
    Ready,
    SliceBegins,
    SliceEnds,
    Taken,
    TakeNow,
    Unreadable,
    encode,
)
from ztunnel.proxy.dataplane.handover.taker import Make, Taker
from ztunnel.proxy.dataplane.rendezvous import Parcel, Rendezvous, RendezvousError
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.process import forbid_core_dumps
from ztunnel.runtime.settings import HANDOVER_SOCKET, plain_reason
from ztunnel.runtime.sockets import UnixListener, ready
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

#: For this many seconds, connections that cannot move yet are offered again. Then they are drained.
GIVE_S: Final = 2.0
_GREETING_S: Final = 5.0
#: The delay before another try with a predecessor that was busy.
_BUSY_S: Final = 1.0
#: The delay before another try to create the socket, if the folder is unusable.
_UNUSABLE_S: Final = 15.0
#: While this process drains, connections that could not move are offered again at this interval.
_AGAIN_S: Final = 0.25
_BACKLOG: Final = 4


def protect_secrets() -> None:
    """Forbid core dumps of this process, because its memory has the TLS keys of movable connections."""
    try:
        forbid_core_dumps()
    except OSError as error:
        log.warning("core dumps of this process can have keys of connections error=%s", plain_reason(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """A front end's functions to give its connections to another process and to continue received connections.

    Attributes:
        dialect: the dialect's name. Connections never move between processes of different dialects.
        read: parses a giver's messages.
        movable_units: returns the units that can move from this process.
        make: rebuilds the unit that an offer describes.
        carried: returns the number of this process's pods or listeners, for the other process's log.
    """

    dialect: str
    read: ReadGiver
    movable_units: MovableUnits
    make: Make
    carried: Callable[[], int]


class Handover:
    """Runs both sides of hand-overs in this process, from :meth:`begin` to :meth:`close`.

    Args:
        folder: the shared folder with the Unix socket where the processes meet.
        kinds: the front end's functions.
        poller: serves this process's connections.
        clock: measures pauses and ages.
        version: this program's version, for the other process's log.
        replace: whether to make the predecessor hand over and exit as soon as this process is ready.
        on_take_now: called when a successor demands an immediate hand-over.
        statistics: receives the counts. ``None``: a new object.
        worker: the index of this worker process, which meets only workers of the same index. ``None``: the main
            process.
    """

    def __init__(
        self,
        folder: Path,
        kinds: Kinds,
        poller: Poller,
        clock: Clock,
        *,
        version: str,
        replace: bool = False,
        on_take_now: Callable[[], object] = lambda: None,
        statistics: HandoverCounts | None = None,
        worker: int | None = None,
    ) -> None:
        name = Path(HANDOVER_SOCKET)
        self.path = folder / (name if worker is None else f"{name.stem}-{worker}{name.suffix}")
        self.statistics = statistics if statistics is not None else HandoverCounts()
        self._kinds = kinds
        self._poller = poller
        self._clock = clock
        self._version = version
        self._replace = replace
        self._on_take_now = on_take_now
        self._tasks = Tasks("handover")
        self._listener: UnixListener | None = None
        self._giver: Giver | None = None
        self._predecessor: Greeting | None = None
        self._last = ""

    def begin(self) -> None:
        """Take over connections from the predecessor, then wait for a successor. Called once this process serves
        its pods.
        """
        self._tasks.keep(self._run, "rendezvous")

    async def close(self) -> None:
        """Stop giving and taking. Connections that the predecessor has not released stay in the predecessor."""
        if self._listener is not None:
            # Remove the socket from the folder before the channel closes, because the successor then binds its own
            # socket there.
            self._listener.remove()
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()

    @property
    def successor_waits(self) -> bool:
        """Whether a successor is connected."""
        return self._giver is not None and not self._giver.gone

    def status(self) -> dict[str, Any]:
        """Return the status that ``ztunnel handover status`` prints."""
        giver = self._giver
        counts = {
            f"{result}{f' ({reason})' if reason else ''}": number
            for (result, reason), number in sorted(self.statistics.connections.items())
        }
        return {
            "socket": str(self.path),
            "listening": self._listener is not None,
            "predecessor": self._predecessor.version if self._predecessor is not None else None,
            "successor": giver.taker.version if giver is not None and not giver.gone else None,
            "connections": counts,
            "last": self._last,
        }

    @property
    def generations(self) -> int:
        """The number of running processes of this proxy: this one, and perhaps a predecessor that still drains."""
        return 1 if self._predecessor is None else 2

    # As the successor

    async def _run(self) -> None:
        while not await self._take_from_predecessor():  # noqa: ASYNC110  waits for another process
            await asyncio.sleep(_BUSY_S)
        self._listener = await self._listening()
        try:
            await self._accept(self._listener.socket)
        finally:
            self._listener.close()
            self._listener = None

    async def _listening(self) -> UnixListener:
        """Return the socket on which to listen for successors, retrying until it can be created."""
        while True:
            try:
                return UnixListener(self.path, socket.SOCK_STREAM, _BACKLOG)
            except OSError as error:
                reason = plain_reason(error)
                log.error("open connections will not move to a successor path=%s error=%s", self.path, reason)
                await asyncio.sleep(_UNUSABLE_S)

    async def _take_from_predecessor(self) -> bool:
        """Take connections from the process that listens on the socket. Return True once there is
        no such process.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(str(self.path))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return True
        except OSError as error:  # the socket's queue is full, or its path is too long
            sock.close()
            log.warning("no hand-over from a predecessor path=%s error=%s", self.path, plain_reason(error))
            return False
        try:
            channel = Rendezvous(sock)
        except RendezvousError as error:
            log.error("no hand-over from a predecessor path=%s error=%s", self.path, error)
            return False
        taker = Taker(self._kinds.make, self.statistics)
        try:
            return await self._take(channel, taker)
        except (RendezvousError, Unreadable) as error:
            log.error("the hand-over ends: the predecessor sent an unreadable message error=%s", error)
            return False
        except OSError:
            return False  # the predecessor has disconnected when the caller tries again
        finally:
            self._poller.resume()
            taker.close()
            channel.close()
            self._predecessor = None

    def _greeting(self) -> Greeting:
        kinds = self._kinds
        return Greeting(
            version=self._version,
            schema=SCHEMA,
            oldest=OLDEST_SCHEMA,
            pods=kinds.carried(),
            dialect=kinds.dialect,
            slices=True,
        )

    async def _take(self, channel: Rendezvous, taker: Taker) -> bool:
        await channel.send(encode(self._greeting()))
        if self._replace:
            await channel.send(encode(TakeNow()))
        while (parcel := await channel.receive()) is not None:
            try:
                message = self._kinds.read(parcel.data)
                if isinstance(message, Busy):
                    log.info("the predecessor cannot hand over yet reason=%s", message.reason)
                    return False
                await self._answer(channel, taker, message, parcel)
            finally:
                parcel.close()
        if self._predecessor is None:
            return False
        log.info("the predecessor is gone; %d of its connections continued here", taker.taken)
        return True

    async def _answer(self, channel: Rendezvous, taker: Taker, message: FromGiver, parcel: Parcel) -> None:
        match message:
            case Greeting():
                self._predecessor = message
                log.info("waiting for the connections of a predecessor version=%s", message.version)
            case SliceBegins():
                self._poller.pause(SLICE_S)
                await channel.send(encode(Ready()))
            case SliceEnds():
                self._poller.resume()
            case Offer():
                reason = await taker.consider(message, parcel)
                answer = Declined(message.number, reason) if reason else Taken(message.number)
                await channel.send(encode(answer))
            case Go():
                taker.begin(message.number)
            case Keep():
                taker.forget(message.number)
            case Finished():
                self._last = f"took {taker.taken}, left with the predecessor {message.left}"
                log.info(
                    "connections taken over from the predecessor taken=%d stayed=%d", taker.taken, message.left
                )

    # As the predecessor

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                await ready(listener, writing=False)
                continue
            except OSError as error:  # out of descriptors
                log.warning("no successor accepted error=%s", plain_reason(error))
                await asyncio.sleep(_BUSY_S)
                continue
            sock.setblocking(False)
            self._tasks.start(self._serve(sock), "successor")

    async def _serve(self, sock: socket.socket) -> None:
        """Serve a successor that has connected, until it disconnects."""
        try:
            channel = Rendezvous(sock)
        except RendezvousError as error:
            log.error("a hand-over was refused error=%s", error)
            return
        giver: Giver | None = None
        try:
            async with asyncio.timeout(_GREETING_S):
                greeting = await read_message(channel)
            reason = self._objection(greeting)
            if reason:
                await channel.send(encode(Busy(reason=reason)))
                return
            assert isinstance(greeting, Greeting)
            giver = self._giver = Giver(
                channel, greeting, self._kinds.movable_units, self._poller, self._clock, self.statistics
            )
            await channel.send(encode(self._greeting()))
            log.info("a successor waits version=%s pods=%d", greeting.version, greeting.pods)
            while (message := await read_message(channel)) is not None:
                self._heard(giver, message)
        except TimeoutError:
            log.warning("a process connected for a hand-over and sent no greeting")
        except RendezvousError as error:
            log.error("the hand-over ends error=%s", error)
        except OSError as error:
            log.debug("a successor is gone error=%s", plain_reason(error))
        finally:
            if giver is not None:
                giver.close()
                if self._giver is giver:
                    self._giver = None
            channel.close()

    def _objection(self, greeting: FromTaker | None) -> str:
        if not isinstance(greeting, Greeting):
            raise RendezvousError("no greeting")
        if self.successor_waits:
            return "another process takes over already"
        if not greeting.oldest <= SCHEMA <= greeting.schema:
            return f"its schemas {greeting.oldest} to {greeting.schema} do not include {SCHEMA}"
        if greeting.dialect != self._kinds.dialect:
            return f"its configuration is of the dialect {greeting.dialect}, not {self._kinds.dialect}"
        return ""

    def _heard(self, giver: Giver, message: FromTaker) -> None:
        if isinstance(message, TakeNow):
            log.info("the successor takes over now")
            self._on_take_now()
        else:
            giver.answered(message)

    async def give(self, seconds: float = GIVE_S) -> Result | None:
        """Give the open connections to the successor, if one is connected; see :meth:`Giver.give`."""
        giver = self._giver
        if giver is None or giver.gone:
            return None
        result = await giver.give(seconds)
        self._note(giver, result)
        with contextlib.suppress(TakerGone):
            await giver.finish(result)
        return result

    def _note(self, giver: Giver, result: Result) -> None:
        self._last = f"gave {result.given}, kept {result.left}"
        log.info(
            "connections handed over to the successor version=%s %s pause_p50=%.1fms pause_p99=%.1fms "
            "longest_pause=%.1fms",
            giver.taker.version,
            result,
            *(result.pause_ms(part) for part in (0.5, 0.99, 1.0)),
        )

    async def give_late(self) -> None:
        """Until cancelled, repeatedly offer the remaining connections to this successor or a later one."""
        while True:
            await asyncio.sleep(_AGAIN_S)
            giver = self._giver
            if giver is not None and not giver.gone:
                result = await giver.give(0.0)
                if result.given or result.carriers:
                    self._note(giver, result)
