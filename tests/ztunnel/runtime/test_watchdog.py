"""The watchdog: a loop that stands still is reported with its stack while it does, and counted."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import uvloop

from ztunnel.runtime.watchdog import LoopDelays, Watchdog, _Check

_WAIT_S = 30.0


class _Seen(logging.Handler):
    """Sets an event with the first report of a stall."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.reported = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if "stands still" in self.lines[-1]:
            self.reported.set()


@pytest.fixture
def seen() -> Iterator[_Seen]:
    handler = _Seen()
    logger = logging.getLogger("ztunnel.runtime.watchdog")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_stall_is_reported_with_its_stack_while_it_lasts(run: Callable[..., None], seen: _Seen) -> None:
    delays, flushed = LoopDelays(), threading.Event()

    def the_function_that_blocks() -> None:
        assert seen.reported.wait(_WAIT_S), "no report while the loop stood still"
        assert flushed.wait(_WAIT_S), "the report waits for a timer of the loop"

    async def main() -> None:
        with Watchdog(delays, flush=flushed.set, stall_s=0.05, beat_s=0.01):
            the_function_that_blocks()
            async with asyncio.timeout(_WAIT_S):
                while not delays.stalls.value:
                    await asyncio.sleep(0.005)

    run(main())
    report = next(line for line in seen.lines if "stands still" in line)
    assert "the_function_that_blocks" in report
    assert any("stood still for" in line for line in seen.lines)
    assert delays.late_s > 0.0


def test_the_thread_ends_with_its_watchdog() -> None:
    async def main() -> None:
        with Watchdog(LoopDelays()):
            assert "watchdog" in [thread.name for thread in threading.enumerate()]

    asyncio.run(main())
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def _checks(check: _Check, *observations: tuple[float, float, float | None]) -> list[bool]:
    """Return the verdict on each (now, processor seconds, time of a beat just before it)."""
    verdicts = []
    for now_s, cpu_s, beat_s in observations:
        if beat_s is not None:
            check.beat_s_at = beat_s
        verdicts.append(check.stalled(now_s, cpu_s))
    return verdicts


def _check() -> _Check:
    check = _Check(stall_s=1.0, beat_s=0.5)
    check.begin(0.0, 0.0)
    return check


def test_one_report_per_stall() -> None:
    found = _checks(_check(), (0.5, 0, 0.4), (1.0, 0, None), (1.6, 0, None), (2.1, 0, None), (2.6, 0, 2.5))
    assert found == [False, False, False, True, False]


def test_a_second_stall_is_reported_again() -> None:
    first = _checks(check := _check(), (0.5, 0, 0.0), (1.1, 0, None), (1.7, 0, None))
    second = _checks(check, (2.2, 0, 2.1), (3.0, 0, None), (3.7, 0, None))
    assert first == second == [False, False, True]


def test_a_stopped_process_is_not_reported_as_a_stall() -> None:
    """After SIGSTOP thread and loop are both late, and no processor was used; the loop beats right afterwards."""
    assert _checks(_check(), (0.5, 0.1, 0.4), (30.0, 0.1, None), (30.5, 0.1, 30.01)) == [False, False, False]


def test_a_process_stopped_before_the_first_check_is_not_reported_as_a_stall() -> None:
    assert _checks(_check(), (30.0, 0.1, None), (30.5, 0.1, 30.01)) == [False, False]


def test_a_stopped_process_whose_loop_then_stands_still_is_reported() -> None:
    assert _checks(_check(), (0.5, 0.1, 0.4), (30.0, 0.1, None), (30.5, 0.1, None)) == [False, False, True]


def test_a_c_function_that_keeps_the_lock_is_reported() -> None:
    """The thread was late, too, but the process used the processor all the time."""
    assert _checks(_check(), (0.5, 0.1, 0.4), (3.5, 3.0, None)) == [False, True]
