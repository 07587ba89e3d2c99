"""A unit that cannot be read, sent or rebuilt stays, and the other units move."""

import asyncio
import os
import socket
from collections import Counter
from typing import Any, NoReturn
from unittest import mock

import msgspec
import pytest

from hbone.aio.handover import UnitState
from hbone.tls import Unmovable
from ztunnel.proxy.dataplane.handover.counts import HandoverCounts
from ztunnel.proxy.dataplane.handover.giver import Giver, Result
from ztunnel.proxy.dataplane.handover.messages import Declined, Greeting, Offer
from ztunnel.proxy.dataplane.handover.taker import Taker
from ztunnel.proxy.dataplane.rendezvous import MAX_BYTES, MAX_DESCRIPTORS, Parcel
from ztunnel.runtime.clock import SystemClock

EMPTY = UnitState(carrier=None, relays=())


class SentOffer(Offer, frozen=True, kw_only=True, tag=True):
    """An offer of no dialect."""

    padding: bytes = b""


class Channel:
    """A taker that declines every offer."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.giver: Any = None

    async def send(self, message: bytes, descriptors: list[int]) -> None:
        self.sent.append(message)
        found = msgspec.msgpack.decode(message)
        if found["type"] == "SentOffer":
            self.giver.answered(Declined(found["number"], "enough"))

    def end(self) -> NoReturn:
        raise AssertionError("the hand-over ended")


def unit(*, padding: int = 0, descriptors: int = 1, error: Exception | None = None) -> Any:
    frozen = mock.Mock(state=EMPTY, descriptors=[0] * descriptors)
    made = mock.Mock(entries=1, frozen=frozen)
    made.key = id(made)
    made.freeze = mock.Mock(return_value=frozen, side_effect=error)
    made.offer = lambda number, state, now_s: SentOffer(number=number, unit=state, padding=b"x" * padding)
    return made


def given(*units: Any) -> tuple[Result, Channel]:
    channel = Channel()

    async def main() -> Result:
        greeting = Greeting(version="1", schema=1, oldest=1)
        giver = channel.giver = Giver(
            channel, greeting, lambda: (list(units), Counter()), mock.Mock(), SystemClock(), HandoverCounts()
        )
        await giver.give(0.0)
        return await giver.give(0.05)

    return asyncio.run(main()), channel


@pytest.mark.parametrize("step", ["freeze", "offer"])
def test_a_unit_that_cannot_be_read_stays(caplog: pytest.LogCaptureFixture, step: str) -> None:
    faulty = unit()
    setattr(faulty, step, mock.Mock(side_effect=ZeroDivisionError("bug")))
    result, _ = given(faulty, unit(error=Unmovable("within a record")), unit())
    assert result.stays == {"failed": 1, "within a record": 1, "declined": 1}
    assert caplog.text.count("ZeroDivisionError: bug") == 1
    assert faulty.frozen.thaw.call_count == (2 if step == "offer" else 0)


@pytest.mark.parametrize(("padding", "descriptors"), [(MAX_BYTES, 1), (0, MAX_DESCRIPTORS + 1), (0, 70_000)])
def test_a_unit_that_no_message_can_carry_stays(padding: int, descriptors: int) -> None:
    """The taker ends the hand-over at a longer message."""
    large = unit(padding=padding, descriptors=descriptors)
    result, channel = given(large, unit())
    assert result.stays["too large"] == 1
    assert result.left == 2
    assert large.frozen.thaw.call_count == 2  # once for each call of give()
    assert max(map(len, channel.sent)) < 1000


def test_a_unit_that_cannot_be_rebuilt_is_declined(caplog: pytest.LogCaptureFixture) -> None:
    async def make(offer: Offer, socks: list[socket.socket]) -> NoReturn:
        raise ZeroDivisionError("bug")

    async def main() -> None:
        ours, theirs = socket.socketpair()
        statistics = HandoverCounts()
        with theirs:
            before = len(os.listdir("/proc/self/fd"))
            taker = Taker(make, statistics)
            reason = await taker.consider(SentOffer(number=1, unit=EMPTY), Parcel(b"", [ours.detach()]))
            assert reason == "failed"
            assert len(os.listdir("/proc/self/fd")) == before - 1
        assert statistics.connections == {("declined", "failed"): 1}

    asyncio.run(main())
    assert "ZeroDivisionError: bug" in caplog.text
