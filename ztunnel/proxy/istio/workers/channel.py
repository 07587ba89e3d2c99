"""The channel between the main process and a worker. Both send notifications, requests and responses.

Notifications are applied in the order of sending, each before the next message is read. Requests are started in
this order too, each in its own task, so that a slowly draining pod does not delay other requests.
"""

from __future__ import annotations

import array
import asyncio
import errno
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, cast

from tproxy.errors import TproxyError
from ztunnel.proxy.identity.csr import IdentityError
from ztunnel.proxy.istio.workers.messages import (
    MAX_BYTES,
    MAX_DESCRIPTORS,
    MAX_WORKER_BYTES,
    FrameDecoder,
    Message,
    Notification,
    ProtocolViolation,
    Request,
    RequestToMain,
    RequestToWorker,
    Response,
    Value,
    encode,
)
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.sockets import ready
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

_READ_BYTES: Final = 256 * 1024
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
#: If more messages than this are queued, the other process is considered stuck. The limit is enough for a mesh of
#: five million workloads.
MAX_QUEUED: Final = 20_000

RequestBody = RequestToWorker | RequestToMain


class ChannelClosed(Exception):
    """The other process is no longer running."""


class Refused(Exception):
    """The other process could not carry out the request. The text states the reason."""


class Descriptors:
    """The file descriptors that arrived with a message. :meth:`close` closes the descriptors that were not
    taken.

    Args:
        found: the descriptors, which this object owns.
        lost: whether the kernel dropped some of them, because this process has reached its limit of open files.
            Then none can be taken.
    """

    def __init__(self, found: Sequence[int] = (), *, lost: bool = False) -> None:
        self._found = deque(found)
        self._lost = lost
        if lost:
            self.close()

    def __len__(self) -> int:
        return len(self._found)

    def take(self) -> int:
        """Remove and return the next descriptor, which the caller then owns.

        Raises:
            OSError: the descriptors were lost on their way.
            ProtocolViolation: no descriptor is left.
        """
        if self._lost:
            raise OSError(errno.EMFILE, "a worker can open no more files (raise the limit of open files)")
        if not self._found:
            raise ProtocolViolation("a message without its descriptors")
        return self._found.popleft()

    def close(self) -> None:
        """Close the descriptors that were not taken; idempotent."""
        while self._found:
            os.close(self._found.popleft())


class Outgoing:
    """A message for one or several workers. It is encoded only once, when the first channel sends it."""

    __slots__ = ("_frame", "_message", "descriptors")

    def __init__(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        self._message: Message | None = message
        self._frame = b""
        #: Duplicates of the descriptors, because the caller can close the originals before the message is sent.
        self.descriptors: list[int] = []
        try:
            for each in descriptors:
                self.descriptors.append(os.dup(each))
        except OSError:
            self.close()
            raise

    def frame(self, most_bytes: int = MAX_BYTES) -> bytes:
        """Return the bytes.

        Raises:
            ValueError: there are more than ``most_bytes``.
        """
        if self._message is not None:
            self._frame = encode(self._message, len(self.descriptors), most_bytes)
            self._message = None
        return self._frame

    @property
    def answers(self) -> int | None:
        """The number of the request that this message answers, if it is an answer that was not encoded yet."""
        return self._message.number if isinstance(self._message, Response) else None

    def close(self) -> None:
        """Close the duplicates; idempotent."""
        while self.descriptors:
            os.close(self.descriptors.pop())


OnNotification = Callable[[Notification, Descriptors], Awaitable[None]]
OnRequest = Callable[[RequestBody, Descriptors], AsyncIterator[Value]]


class IpcChannel:
    """One end of the channel between the main process and a worker. It owns its socket.

    Args:
        sock: one socket of a connected pair, non-blocking.
        on_notification: applies one notification.
        on_request: answers one request, and yields the answer in parts. It can raise :class:`IdentityError`,
            :class:`TproxyError`, :class:`OSError` or :class:`Refused` to refuse the request. Any other exception
            is a bug: it is logged, and the request is refused.
        to_main: whether the other end is the main process. Otherwise it is a worker, which is not trusted.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_notification: OnNotification,
        on_request: OnRequest,
        *,
        to_main: bool = False,
    ) -> None:
        self._socket = sock
        self._to_main = to_main
        self._most_bytes = MAX_WORKER_BYTES if to_main else MAX_BYTES
        self._on_notification = on_notification
        self._on_request = on_request
        self._tasks = Tasks("worker link")
        self._queue: deque[Outgoing] = deque()
        self._wake = asyncio.Event()
        self._numbers = itertools.count(1)
        self._responses: dict[int, tuple[asyncio.Future[list[Value]], list[Value]]] = {}
        self._closed = False
        self._tasks.start(self._write(), "write")

    # Sending

    def notify(self, message: Notification, descriptors: Sequence[int] = ()) -> None:
        """Queue a notification for sending. If the channel is closed, the notification is dropped.

        Raises:
            OSError: the descriptors cannot be duplicated.
        """
        self.send(Outgoing(message, descriptors))

    def send(self, outgoing: Outgoing) -> None:
        """Queue a message, which can be queued in several channels. If the channel is closed, the message is
        dropped.
        """
        if self._closed:
            outgoing.close()
            return
        self._queue.append(outgoing)
        self._wake.set()
        if len(self._queue) > MAX_QUEUED:
            log.error("the other process does not read; %d messages are queued", len(self._queue))
            self.disconnect()

    async def request(self, body: RequestBody, descriptors: Sequence[int] = ()) -> list[Value]:
        """Send a request and return all parts of the answer.

        Raises:
            Refused: the request cannot be carried out.
            ChannelClosed: the other process has ended.
            OSError: the descriptors cannot be duplicated.
        """
        if self._closed:
            raise ChannelClosed
        number = next(self._numbers)
        # The type cast is safe: each kind of request is for one side only, and the other side's decoder refuses
        # it.
        outgoing = Outgoing(cast(Message, Request(number, body)), descriptors)
        future: asyncio.Future[list[Value]] = asyncio.get_running_loop().create_future()
        self._responses[number] = (future, [])
        self.send(outgoing)
        try:
            return await future
        finally:
            self._responses.pop(number, None)

    # Start and end

    async def run(self) -> None:
        """Read and dispatch until the other side has closed.

        Raises:
            ProtocolViolation: the other process sent an unreadable or forbidden message.
        """
        decoder, arrived = FrameDecoder(from_main=self._to_main), deque[Descriptors]()
        try:
            while data := await self._read(arrived):
                decoder.receive(data)
                for message, count in decoder:
                    own = arrived.popleft() if count and arrived else Descriptors()
                    await self._dispatch(message, own)
                    await asyncio.sleep(0)  # one read can contain many messages, and each takes milliseconds
        except ConnectionError:
            pass
        finally:
            for each in arrived:
                each.close()
            self.disconnect()

    def disconnect(self) -> None:
        """Close the channel for both sides: :meth:`run` returns, and pending requests raise. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end has closed it
        for future, _ in self._responses.values():
            if not future.done():
                future.set_exception(ChannelClosed())
                future.exception()  # retrieved here because the caller may have stopped waiting
        while self._queue:
            self._queue.popleft().close()

    async def close(self) -> None:
        """Disconnect, and end every task that answers a request. Call this after :meth:`run` has returned."""
        self.disconnect()
        await self._tasks.close()
        self._socket.close()

    # Receiving

    async def _read(self, arrived: deque[Descriptors]) -> bytes:
        """Read bytes, and append the descriptors that were sent with one of their frames. One recvmsg(2) never
        returns the descriptors of two frames.
        """
        # Without room, the kernel drops descriptors. So a compromised worker cannot fill the main process's table.
        room = _ANCILLARY_BYTES if self._to_main else 0
        while True:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                await ready(self._socket, writing=False)
        found = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
        lost = bool(flags & socket.MSG_CTRUNC)
        if lost and not self._to_main:
            raise ProtocolViolation("descriptors from a worker")
        if found or lost:
            arrived.append(Descriptors(found, lost=lost))
        return data

    async def _dispatch(self, message: Message, descriptors: Descriptors) -> None:
        match message:
            case Request():
                # Even if it is cancelled at once, the task starts to run, so that it always closes the
                # descriptors.
                answering = self._answer(message.number, message.body, descriptors)
                self._tasks.start(answering, type(message.body).__name__)
            case Response():
                descriptors.close()
                self._resolve(message)
            case _:
                try:
                    await self._on_notification(message, descriptors)
                finally:
                    descriptors.close()

    def _resolve(self, response: Response) -> None:
        future, parts = self._responses.get(response.number, (None, []))
        if future is None or future.done():
            return  # the caller has stopped waiting
        if response.refused is not None:
            future.set_exception(Refused(response.refused))
        elif response.more:
            parts.append(response.value)
        else:
            future.set_result(parts)

    async def _answer(self, number: int, body: RequestBody, descriptors: Descriptors) -> None:
        refused: str | None = None
        try:
            async for part in self._on_request(body, descriptors):
                self.send(Outgoing(Response(number=number, value=part, more=True)))
                await asyncio.sleep(0)
        except (IdentityError, TproxyError, OSError, Refused) as error:
            refused = plain_reason(error)
        except Exception as error:  # a bug in this program; the other process must still get an answer
            log.exception("a request between processes failed: %s", type(body).__name__)
            refused = repr(error)
        finally:
            descriptors.close()
        self.send(Outgoing(Response(number=number, refused=refused)))

    # Bytes

    async def _write(self) -> None:
        try:
            while not self._closed:
                while self._queue:
                    outgoing = self._queue.popleft()
                    try:
                        await self._write_one(self._fitting(outgoing))
                    finally:
                        outgoing.close()
                    await asyncio.sleep(0)
                self._wake.clear()
                if not self._closed:
                    await self._wake.wait()
        except OSError as error:
            log.debug("the other process has ended: %s", error)
            self.disconnect()
        except ValueError as error:
            # Without this message the other process would have another state than this one.
            log.error("the other process is ended, because a message cannot be sent: %s", error)
            self.disconnect()

    def _fitting(self, outgoing: Outgoing) -> Outgoing:
        """Encode a message. An answer that is too long for a frame is replaced by a refusal: the main process
        would end a worker that sends such a frame.
        """
        number = outgoing.answers
        try:
            outgoing.frame(self._most_bytes)
        except ValueError as error:
            if number is None:
                raise
            log.error("a request of the other process cannot be answered: %s", error)
            return Outgoing(Response(number=number, refused=str(error)))
        return outgoing

    async def _write_one(self, outgoing: Outgoing) -> None:
        left, descriptors = memoryview(outgoing.frame()), outgoing.descriptors
        while left:
            try:
                if descriptors:
                    sent = socket.send_fds(self._socket, [left], descriptors, socket.MSG_NOSIGNAL)
                    descriptors = []  # already sent with the first bytes of the frame
                else:
                    sent = self._socket.send(left, socket.MSG_NOSIGNAL)
                left = left[sent:]
            except BlockingIOError:
                await ready(self._socket, writing=True)
