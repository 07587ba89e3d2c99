"""Either end of the link between the main process and a worker: tells, asks and answers over a Unix socket.

What is told is done in the order in which it was told, each before the next is read. A question is answered by a
task of its own, begun in that same order, so that a pod which takes its time to drain holds up nobody.
"""

from __future__ import annotations

import array
import asyncio
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from tproxy.errors import TproxyError
from ztunnel.identity.csr import IdentityError
from ztunnel.istio.workers.link import (
    MOST_DESCRIPTORS,
    Ask,
    Corrupt,
    Decoder,
    Message,
    Question,
    Reply,
    Told,
    encode,
)
from ztunnel.runtime.sockets import ready
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

_READ_BYTES: Final = 256 * 1024
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
#: Messages that may wait for the other side: a mesh of five million workloads. Who has let so many come together
#: does not read any more.
_MOST_WAITING: Final = 20_000


class Gone(Exception):
    """The other process is not there, or not any more."""


class Refused(Exception):
    """The other process could not do what it was asked for; the text says why."""


class Descriptors:
    """Those that came with a message; who wants one takes it, the rest is closed."""

    def __init__(self, found: Sequence[int] = ()) -> None:
        self._found = deque(found)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, found: Sequence[int]) -> None:
        """More came."""
        self._found.extend(found)

    def take(self) -> int:
        """The next one, the caller's from now on.

        Raises:
            Corrupt: there is none.
        """
        if not self._found:
            raise Corrupt("a message without its descriptors")
        return self._found.popleft()

    def close(self) -> None:
        """Close what nobody took."""
        while self._found:
            os.close(self._found.popleft())


class Outgoing:
    """A message on its way, perhaps to several workers: made into bytes once, when the first one takes it."""

    __slots__ = ("_frame", "_message", "descriptors")

    def __init__(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        self._message: Message | None = message
        self._frame = b""
        #: Ours, and closed when they are sent: originals may be closed meanwhile.
        self.descriptors = [os.dup(each) for each in descriptors]

    def frame(self) -> bytes:
        """The bytes."""
        if self._message is not None:
            self._frame = encode(self._message, len(self.descriptors))
            self._message = None
        return self._frame

    def close(self) -> None:
        """Close the descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())


Telling = Callable[[Told, Descriptors], Awaitable[None]]
Answering = Callable[[Question, Descriptors], AsyncIterator[object]]


class Conversation:
    """One end; owns its socket.

    Args:
        sock: one of a pair, non-blocking.
        told: does what it is told.
        asked: answers a question, in parts. What it raises of :class:`IdentityError`, :class:`TproxyError`,
            :class:`OSError` and :class:`Refused` refuses the question; anything else is a bug, and refuses it too.
        with_main: the other end is the main process, which is trusted.
    """

    def __init__(self, sock: socket.socket, told: Telling, asked: Answering, *, with_main: bool = False) -> None:
        self._socket = sock
        self._with_main = with_main
        self._told = told
        self._asked = asked
        self._tasks = Tasks("worker link")
        self._waiting: deque[Outgoing] = deque()
        self._wake = asyncio.Event()
        self._numbers = itertools.count(1)
        self._answers: dict[int, tuple[asyncio.Future[list[object]], list[object]]] = {}
        self._closed = False
        self._tasks.start(self._write(), "write")

    # Saying

    def tell(self, message: Told, descriptors: Sequence[int] = ()) -> None:
        """Say something; when nobody listens any more, it is lost."""
        self.send(Outgoing(message, descriptors))

    def send(self, outgoing: Outgoing) -> None:
        """Send what may be sent to others too."""
        if self._closed:
            outgoing.close()
            return
        self._waiting.append(outgoing)
        self._wake.set()
        if len(self._waiting) > _MOST_WAITING:
            log.error("the other process does not read; %d messages wait for it", len(self._waiting))
            self.hang_up()

    async def ask(self, question: Question, descriptors: Sequence[int] = ()) -> list[object]:
        """Ask, and wait for all parts of the answer.

        Raises:
            Refused: it cannot be done.
            Gone: nobody is there to do it.
        """
        if self._closed:
            raise Gone
        number = next(self._numbers)
        future: asyncio.Future[list[object]] = asyncio.get_running_loop().create_future()
        self._answers[number] = (future, [])
        self.send(Outgoing(Ask(number, question), descriptors))
        try:
            return await future
        finally:
            self._answers.pop(number, None)

    # Life

    async def run(self) -> None:
        """Listen until the other side is gone.

        Raises:
            Corrupt: it says what cannot be understood.
        """
        decoder, arrived = Decoder(trusted=self._with_main), Descriptors()
        try:
            while data := await self._read(arrived):
                decoder.receive(data)
                for message, count in decoder:
                    own = Descriptors([arrived.take() for _ in range(count)])
                    await self._hear(message, own)
                    await asyncio.sleep(0)  # several may have come in one read, and each takes milliseconds
        except ConnectionError:
            pass
        finally:
            arrived.close()
            self.hang_up()

    def hang_up(self) -> None:
        """End it for both sides; :meth:`run` returns, and who waits for an answer gets :class:`Gone`."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was quicker
        for future, _ in self._answers.values():
            if not future.done():
                future.set_exception(Gone())
                future.exception()  # who asked may have stopped waiting
        while self._waiting:
            self._waiting.popleft().close()

    async def close(self) -> None:
        """Hang up and end everything that was begun; not while :meth:`run` runs."""
        self.hang_up()
        await self._tasks.close()
        self._socket.close()

    # Hearing

    async def _read(self, arrived: Descriptors) -> bytes:
        while True:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    _READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                await ready(self._socket, writing=False)
        found = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
        arrived.add(found)
        if flags & socket.MSG_CTRUNC:
            raise Corrupt("descriptors were lost on the way (is the limit of open files reached?)")
        return data

    async def _hear(self, message: Message, descriptors: Descriptors) -> None:
        match message:
            case Ask(number, question):
                self._tasks.start(self._answer(number, question, descriptors), type(question).__name__)
            case Reply():
                descriptors.close()
                self._answered(message)
            case _:
                try:
                    await self._told(message, descriptors)
                finally:
                    descriptors.close()

    def _answered(self, reply: Reply) -> None:
        future, parts = self._answers.get(reply.number, (None, []))
        if future is None or future.done():
            return  # nobody waits any more
        if reply.refused is not None:
            future.set_exception(Refused(reply.refused))
        elif reply.more:
            parts.append(reply.value)
        else:
            future.set_result(parts)

    async def _answer(self, number: int, question: Question, descriptors: Descriptors) -> None:
        refused: str | None = None
        try:
            async for part in self._asked(question, descriptors):
                self.send(Outgoing(Reply(number=number, value=part, more=True)))
                await asyncio.sleep(0)
        except (IdentityError, TproxyError, OSError, Refused) as error:
            refused = str(error)
        except Exception as error:  # a bug of ours; who asked must not wait for ever
            log.exception("a question between processes failed: %s", type(question).__name__)
            refused = repr(error)
        finally:
            descriptors.close()
        self.send(Outgoing(Reply(number=number, refused=refused)))

    # The bytes

    async def _write(self) -> None:
        try:
            while not self._closed:
                while self._waiting:
                    outgoing = self._waiting.popleft()
                    try:
                        await self._write_one(outgoing)
                    finally:
                        outgoing.close()
                    await asyncio.sleep(0)
                self._wake.clear()
                if not self._closed:
                    await self._wake.wait()
        except OSError as error:
            log.debug("the other process is gone: %s", error)
            self.hang_up()

    async def _write_one(self, outgoing: Outgoing) -> None:
        left, descriptors = memoryview(outgoing.frame()), outgoing.descriptors
        while left:
            try:
                if descriptors:
                    sent = socket.send_fds(self._socket, [left], descriptors, socket.MSG_NOSIGNAL)
                    descriptors = []  # they went with the first of these bytes
                else:
                    sent = self._socket.send(left, socket.MSG_NOSIGNAL)
                left = left[sent:]
            except BlockingIOError:
                await ready(self._socket, writing=True)
