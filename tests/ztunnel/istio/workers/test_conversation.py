"""Two ends of a link over a real socket pair."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from ztunnel.identity.csr import IdentityError
from ztunnel.istio.workers import conversation as module
from ztunnel.istio.workers.conversation import Conversation, Descriptors, Gone, Outgoing, Refused
from ztunnel.istio.workers.link import (
    Caught,
    Corrupt,
    CountsWanted,
    DrainPod,
    LogFilterChanged,
    Question,
    Reply,
    RevocationsChanged,
    StopPod,
    Told,
    encode,
)


class Other:
    """The end that is talked to: remembers, and answers by question."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.read: list[bytes] = []
        self.drained = asyncio.Event()

    async def tell(self, message: Told, descriptors: Descriptors) -> None:
        await asyncio.sleep(0)
        self.told.append(message)
        while descriptors:
            file = descriptors.take()
            self.read.append(os.read(file, 100))
            os.close(file)

    async def asked(self, question: Question, descriptors: Descriptors) -> AsyncIterator[object]:
        match question:
            case Caught():
                yield len(self.told)
            case CountsWanted():
                for number in range(3):
                    yield number
            case DrainPod():
                await self.drained.wait()
            case StopPod(1):
                raise IdentityError("no such identity")
            case StopPod(2):
                raise ZeroDivisionError("oops")


Body = Callable[[Conversation, Other, socket.socket], Awaitable[None]]


def talking(body: Body) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        other, near = Other(), Other()
        here, there = Conversation(ours, near.tell, near.asked), Conversation(theirs, other.tell, other.asked)
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(here.run()), group.create_task(there.run())]
            try:
                await body(here, other, theirs)
            finally:
                here.hang_up()
                with contextlib.suppress(Corrupt):
                    await asyncio.gather(*runs)
                await here.close()
                await there.close()

    asyncio.run(main())


def test_questions_are_answered_after_all_that_was_told_before() -> None:
    async def body(here: Conversation, other: Other, _: socket.socket) -> None:
        said = [LogFilterChanged(str(number)) for number in range(300)]
        for message in said:
            here.tell(message)
        assert await here.ask(Caught()) == [300]
        assert other.told == said
        assert await here.ask(CountsWanted()) == [0, 1, 2]

    talking(body)


def test_a_slow_answer_holds_up_nobody() -> None:
    async def body(here: Conversation, other: Other, _: socket.socket) -> None:
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(here.ask(DrainPod(1, 5.0)))
            assert await here.ask(Caught()) == [0]
            assert not slow.done()
            other.drained.set()
        assert slow.result() == []

    talking(body)


def test_refusals_and_bugs_are_answers(caplog: pytest.LogCaptureFixture) -> None:
    async def body(here: Conversation, other: Other, _: socket.socket) -> None:
        with pytest.raises(Refused, match="no such identity"):
            await here.ask(StopPod(1))
        with pytest.raises(Refused, match="ZeroDivisionError"):
            await here.ask(StopPod(2))
        assert await here.ask(Caught()) == [0]

    talking(body)
    assert "StopPod" in caplog.text


def test_descriptors_come_with_their_message() -> None:
    async def body(here: Conversation, other: Other, _: socket.socket) -> None:
        for number in range(40):
            reading, writing = os.pipe()
            os.write(writing, str(number).encode())
            # Big frames and small ones, so that descriptors meet both halves of a read.
            here.tell(RevocationsChanged((b"x" * (number * 20_000),)), [reading])
            os.close(reading)
            os.close(writing)
        assert await here.ask(Caught()) == [40]
        assert other.read == [str(number).encode() for number in range(40)]

    before = len(os.listdir("/proc/self/fd"))
    talking(body)
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_message_to_many_is_made_once() -> None:
    outgoing = Outgoing(LogFilterChanged("x"))
    assert outgoing.frame() is outgoing.frame()
    assert outgoing.frame() == encode(LogFilterChanged("x"))


def test_who_asks_hears_that_the_other_is_gone() -> None:
    async def body(here: Conversation, other: Other, theirs: socket.socket) -> None:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_outcome(here.ask(DrainPod(1, 5.0))))
            assert await here.ask(Caught()) == [0]
            theirs.shutdown(socket.SHUT_RDWR)
        assert isinstance(waiting.result(), Gone)
        assert isinstance(await _outcome(here.ask(Caught())), Gone)
        here.tell(LogFilterChanged("nobody hears it"))

    talking(body)


async def _outcome(asking: Awaitable[list[object]]) -> object:
    try:
        return await asking
    except Gone as gone:
        return gone


def test_who_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 10)

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        near = Other()
        here = Conversation(ours, near.tell, near.asked)
        for _ in range(20):
            here.tell(RevocationsChanged((b"x" * 1_000_000,)))
            await asyncio.sleep(0)
        with pytest.raises(Gone):
            await here.ask(Caught())
        await here.close()
        theirs.close()

    asyncio.run(main())
    assert "does not read" in caplog.text


@pytest.mark.parametrize("noise", [b"\xff" * 20, encode(Reply(number=1))[:-1] + b"?"], ids=["length", "pickle"])
def test_noise_ends_it(noise: bytes) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        near = Other()
        here = Conversation(ours, near.tell, near.asked)
        theirs.sendall(noise)
        with pytest.raises(Corrupt):
            await here.run()
        await here.close()
        theirs.close()

    asyncio.run(main())


def test_answers_that_nobody_waits_for_are_passed_over() -> None:
    async def body(here: Conversation, other: Other, theirs: socket.socket) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await here.ask(DrainPod(1, 5.0))
        other.drained.set()
        assert await here.ask(Caught()) == [0]

    talking(body)
