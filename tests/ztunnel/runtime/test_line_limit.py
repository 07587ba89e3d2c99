"""Lines that strangers cause are written at a rate, and the others are counted."""

from ztunnel.runtime.line_limit import LineLimit


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return 0.0


def test_a_burst_then_a_rate_and_the_others_are_counted() -> None:
    clock, counts = Clock(), list[int]()
    limit = LineLimit(clock, counts.append, burst=3, rate=2.0)
    assert [limit.admits() for _ in range(10)] == [True] * 3 + [False] * 7
    assert counts == []
    clock.now_s += 0.5
    assert [limit.admits() for _ in range(2)] == [True, False]
    assert counts == [7]
    clock.now_s += 60.0
    assert [limit.admits() for _ in range(4)] == [True] * 3 + [False]
    assert counts == [7, 1]


def test_lines_that_are_left_out_do_not_delay_the_next() -> None:
    clock, counts = Clock(), list[int]()
    limit = LineLimit(clock, counts.append, burst=1, rate=1.0)
    for _ in range(10_000):
        limit.admits()
    clock.now_s += 1.0
    assert limit.admits()
    assert counts == [9999]
