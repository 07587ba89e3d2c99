"""What waits for a collector: in order, in batches, within a bound, and by a thread that survives."""

import logging
import threading
from collections.abc import Sequence

import pytest

from tests.limits import WAIT_S
from ztunnel.proxy.otlp.outbox import ExportFailed, Outbox


class Taken:
    """Stores sent batches. The first ``failures`` of them fail."""

    def __init__(self, failures: Sequence[Exception] = ()) -> None:
        self.batches: list[list[int]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.began = threading.Event()
        self._failures = list(failures)

    def send(self, batch: Sequence[int]) -> None:
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        if self._failures:
            raise self._failures.pop(0)
        self.batches.append(list(batch))


def test_items_leave_in_order_and_in_batches() -> None:
    taken = Taken()
    outbox = Outbox("items", taken.send, most=1000, batch=10, delay_s=0.001)
    for number in range(500):
        outbox.put(number)
    outbox.close(WAIT_S)
    assert [number for batch in taken.batches for number in batch] == list(range(500))
    assert max(map(len, taken.batches)) <= 10
    assert (outbox.sent, outbox.dropped) == (500, 0)


def test_a_full_batch_does_not_wait_for_the_delay() -> None:
    taken = Taken()
    outbox = Outbox("items", taken.send, most=100, batch=3, delay_s=WAIT_S * 10)
    for number in range(3):
        outbox.put(number)
    assert taken.began.wait(WAIT_S)
    outbox.close(WAIT_S)
    assert taken.batches == [[0, 1, 2]]


def test_stuck_batch_drops_the_oldest_queued_items() -> None:
    taken = Taken()
    taken.go_on.clear()
    outbox = Outbox("items", taken.send, most=5, batch=1, delay_s=0.0)
    outbox.put(0)
    assert taken.began.wait(WAIT_S)
    for number in range(1, 21):
        outbox.put(number)
    assert outbox.dropped == 15
    taken.go_on.set()
    outbox.close(WAIT_S)
    assert taken.batches == [[0], [16], [17], [18], [19], [20]]
    assert (outbox.sent, outbox.dropped) == (6, 15)


def test_failure_and_recovery_are_each_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    taken = Taken([ExportFailed("nobody there"), ExportFailed("nobody there"), ExportFailed("nobody there")])
    with caplog.at_level(logging.INFO):
        outbox = Outbox("items", taken.send, most=100, batch=1, delay_s=0.0)
        for number in range(5):
            outbox.put(number)
        outbox.close(WAIT_S)
    assert taken.batches == [[3], [4]]
    assert (outbox.sent, outbox.dropped) == (2, 3)
    assert caplog.messages == [
        "otlp: items are dropped, the collector does not accept them: nobody there",
        "otlp: items are accepted again dropped=3",
    ]


def test_the_thread_survives_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    taken = Taken([KeyError("ours")])
    outbox = Outbox("items", taken.send, most=100, batch=1, delay_s=0.0)
    outbox.put(1)
    outbox.put(2)
    outbox.close(WAIT_S)
    assert taken.batches == [[2]]
    assert outbox.dropped == 1
    assert "a bug in sending items" in caplog.text


def test_an_end_waits_for_no_collector(caplog: pytest.LogCaptureFixture) -> None:
    taken = Taken()
    taken.go_on.clear()
    outbox = Outbox("items", taken.send, most=100, batch=1, delay_s=0.0)
    for number in range(4):
        outbox.put(number)
    assert taken.began.wait(WAIT_S)
    outbox.close(0.01)
    assert "3 items were not sent before the end" in caplog.text
    taken.go_on.set()
    outbox.close(WAIT_S)


def test_unused_outbox_closes_at_once() -> None:
    Outbox("items", Taken().send, most=1, batch=1, delay_s=0.0).close(WAIT_S)


def test_items_queued_at_any_time_are_sent() -> None:
    """Items that come just as the thread has found none."""
    for count in range(1, 60):
        taken = Taken()
        outbox = Outbox("items", taken.send, most=1000, batch=4, delay_s=0.0)
        for number in range(count):
            outbox.put(number)
            if number % 7 == count % 7:
                threading.Event().wait(0.0005)
        outbox.close(WAIT_S)
        assert outbox.sent == count
