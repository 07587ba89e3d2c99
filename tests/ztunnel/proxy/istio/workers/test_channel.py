"""Two ends of a link over a real socket pair."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from ztunnel.proxy.identity.csr import IdentityError
from ztunnel.proxy.istio.workers import channel as module
from ztunnel.proxy.istio.workers.channel import (
    ChannelClosed,
    Descriptors,
    IpcChannel,
    Outgoing,
    Refused,
    RequestBody,
)
from ztunnel.proxy.istio.workers.messages import (
    MAX_WORKER_BYTES,
    Barrier,
    DrainPod,
    GetCounts,
    LogFilterChanged,
    Notification,
    ProtocolViolation,
    Response,
    RevocationsChanged,
    StopPod,
    Value,
    encode,
)


class Other:
    """An end that records notifications and answers by request."""

    def __init__(self) -> None:
        self.notified: list[Notification] = []
        self.read: list[bytes] = []
        self.drained = asyncio.Event()

    async def on_notification(self, message: Notification, descriptors: Descriptors) -> None:
        await asyncio.sleep(0)
        self.notified.append(message)
        while descriptors:
            file = descriptors.take()
            self.read.append(os.read(file, 100))
            os.close(file)

    async def on_request(self, request: RequestBody, descriptors: Descriptors) -> AsyncIterator[Value]:
        match request:
            case Barrier():
                yield str(len(self.notified))
            case GetCounts():
                for number in range(3):
                    yield str(number)
            case DrainPod():
                await self.drained.wait()
            case StopPod(1):
                raise IdentityError("no such identity")
            case StopPod(2):
                raise ZeroDivisionError("oops")
            case StopPod(3):
                for _ in range(2):
                    yield "x" * MAX_WORKER_BYTES
            case StopPod(4):
                file = descriptors.take()
                yield os.read(file, 100).decode()
                os.close(file)


Body = Callable[[IpcChannel, Other, socket.socket], Awaitable[None]]


def talking(body: Body) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        other, near = Other(), Other()
        here = IpcChannel(ours, near.on_notification, near.on_request)
        there = IpcChannel(theirs, other.on_notification, other.on_request, to_main=True)
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(here.run()), group.create_task(there.run())]
            try:
                await body(here, other, theirs)
            finally:
                here.disconnect()
                with contextlib.suppress(ProtocolViolation):
                    await asyncio.gather(*runs)
                await here.close()
                await there.close()

    asyncio.run(main())


def test_requests_are_answered_after_earlier_notifications() -> None:
    async def body(here: IpcChannel, other: Other, _: socket.socket) -> None:
        said = [LogFilterChanged(str(number)) for number in range(300)]
        for message in said:
            here.notify(message)
        assert await here.request(Barrier()) == ["300"]
        assert other.notified == said
        assert await here.request(GetCounts()) == ["0", "1", "2"]

    talking(body)


def test_slow_answer_does_not_delay_other_requests() -> None:
    async def body(here: IpcChannel, other: Other, _: socket.socket) -> None:
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(here.request(DrainPod(1, 5.0)))
            assert await here.request(Barrier()) == ["0"]
            assert not slow.done()
            other.drained.set()
        assert slow.result() == []

    talking(body)


def test_refusals_and_internal_errors_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def body(here: IpcChannel, other: Other, _: socket.socket) -> None:
        with pytest.raises(Refused, match="no such identity"):
            await here.request(StopPod(1))
        with pytest.raises(Refused, match="ZeroDivisionError"):
            await here.request(StopPod(2))
        assert await here.request(Barrier()) == ["0"]

    talking(body)
    assert "StopPod" in caplog.text


def test_descriptors_arrive_with_their_message() -> None:
    async def body(here: IpcChannel, other: Other, _: socket.socket) -> None:
        for number in range(40):
            reading, writing = os.pipe()
            os.write(writing, str(number).encode())
            # Big frames and small ones, so that descriptors meet both halves of a read.
            here.notify(RevocationsChanged((b"x" * (number * 20_000),)), [reading])
            os.close(reading)
            os.close(writing)
        assert await here.request(Barrier()) == ["40"]
        assert other.read == [str(number).encode() for number in range(40)]

    before = len(os.listdir("/proc/self/fd"))
    talking(body)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_answer_of_a_worker_that_is_too_long_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def body(here: IpcChannel, other: Other, _: socket.socket) -> None:
        with pytest.raises(Refused, match="too much for one frame"):
            await here.request(StopPod(3))
        assert await here.request(Barrier()) == ["0"]

    talking(body)
    assert "cannot be answered" in caplog.text


def test_a_notification_that_is_too_long_ends_the_channel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1000)

    async def body(here: IpcChannel, other: Other, _: socket.socket) -> None:
        here.notify(RevocationsChanged((b"x" * 1000,)))  # without it, the worker would accept revoked peers
        with pytest.raises(ChannelClosed):
            await here.request(Barrier())

    talking(body)
    assert "a message cannot be sent" in caplog.text


def test_descriptors_that_are_lost_refuse_only_their_request() -> None:
    async def body(here: IpcChannel, other: Other, _: socket.socket) -> None:
        async def read(text: str, *, most_files: int | None = None) -> str:
            reading, writing = os.pipe()
            os.write(writing, text.encode())
            os.close(writing)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            async with asyncio.TaskGroup() as group:
                answer = group.create_task(_outcome(here.request(StopPod(4), [reading])))
                await asyncio.sleep(0)  # duplicates the descriptor
                os.close(reading)
                if most_files is not None:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, hard))
                try:
                    return str(await answer)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        assert await read("a") == "['a']"
        assert "limit of open files" in await read("b", most_files=3)
        assert await read("c") == "['c']"

    before = len(os.listdir("/proc/self/fd"))
    talking(body)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_worker_cannot_use_up_the_descriptors_of_the_main_process() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        near = Other()
        here = IpcChannel(ours, near.on_notification, near.on_request)
        with theirs, open(os.devnull, "rb") as file:
            before = len(os.listdir("/proc/self/fd"))
            socket.send_fds(theirs, [encode(Response(number=1))], [file.fileno()] * 8)
            with pytest.raises(ProtocolViolation, match="descriptors from a worker"):
                await here.run()
            assert len(os.listdir("/proc/self/fd")) == before
        await here.close()

    asyncio.run(main())


def test_a_message_whose_descriptors_cannot_be_duplicated_leaves_none_open() -> None:
    with open(os.devnull, "rb") as file:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="descriptor"):
            Outgoing(LogFilterChanged("x"), [file.fileno(), -1])
        assert len(os.listdir("/proc/self/fd")) == before


def test_broadcast_message_is_encoded_once() -> None:
    outgoing = Outgoing(LogFilterChanged("x"))
    assert outgoing.frame() is outgoing.frame()
    assert outgoing.frame() == encode(LogFilterChanged("x"))


def test_pending_requests_fail_when_the_other_process_ends() -> None:
    async def body(here: IpcChannel, other: Other, theirs: socket.socket) -> None:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_outcome(here.request(DrainPod(1, 5.0))))
            assert await here.request(Barrier()) == ["0"]
            theirs.shutdown(socket.SHUT_RDWR)
        assert isinstance(waiting.result(), ChannelClosed)
        assert isinstance(await _outcome(here.request(Barrier())), ChannelClosed)
        here.notify(LogFilterChanged("nobody hears it"))

    talking(body)


async def _outcome(asking: Awaitable[list[Value]]) -> object:
    try:
        return await asking
    except (ChannelClosed, Refused) as gone:
        return gone


def test_channel_disconnects_a_process_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 10)

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        near = Other()
        here = IpcChannel(ours, near.on_notification, near.on_request)
        for _ in range(20):
            here.notify(RevocationsChanged((b"x" * 1_000_000,)))
            await asyncio.sleep(0)
        with pytest.raises(ChannelClosed):
            await here.request(Barrier())
        await here.close()
        theirs.close()

    asyncio.run(main())
    assert "does not read" in caplog.text


@pytest.mark.parametrize(
    "noise", [b"\xff" * 20, encode(Response(number=1))[:-1] + b"?"], ids=["length", "message"]
)
def test_invalid_bytes_end_the_channel(noise: bytes) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        near = Other()
        here = IpcChannel(ours, near.on_notification, near.on_request)
        theirs.sendall(noise)
        with pytest.raises(ProtocolViolation):
            await here.run()
        await here.close()
        theirs.close()

    asyncio.run(main())


def test_unexpected_answers_are_ignored() -> None:
    async def body(here: IpcChannel, other: Other, theirs: socket.socket) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await here.request(DrainPod(1, 5.0))
        other.drained.set()
        assert await here.request(Barrier()) == ["0"]

    talking(body)
