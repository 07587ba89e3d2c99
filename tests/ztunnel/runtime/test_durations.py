"""Exemplars of histograms: which trace a bucket keeps, and that other processes cannot break it."""

import pytest

from ztunnel.runtime.durations import DurationCounts, Durations, Exemplar

BOUNDS = (0.1, 1.0)


def trace(number: int, flags: str = "00") -> bytes:
    return f"00-{number:032x}-{number:016x}-{flags}".encode()


def kept(durations: Durations) -> list[Exemplar | None]:
    return list(durations.exemplars())


def test_buckets_keep_their_newest_trace_in_fixed_memory() -> None:
    durations = Durations(BOUNDS)
    durations.observe(0.05)
    assert kept(durations) == [None, None, None]
    assert durations.counts().exemplars == b""
    sizes = set()
    for number in range(1, 50):
        durations.observe(0.05, trace(number), 10.0 + number)
        sizes.add(len(durations.counts().exemplars))
    durations.observe(7.0, trace(99), 60.0)
    durations.observe(0.5)
    assert kept(durations) == [Exemplar(0.05, 59.0, trace(49)), None, Exemplar(7.0, 60.0, trace(99))]
    assert len(sizes) == 1
    assert [count for _, count in durations.cumulative()] == [50, 51, 52]


def test_a_sampled_trace_is_kept_for_a_minute() -> None:
    durations = Durations(BOUNDS)
    durations.observe(0.01, trace(1, "01"), 100.0)
    durations.observe(0.02, trace(2), 159.0)
    assert kept(durations)[0] == Exemplar(0.01, 100.0, trace(1, "01"))
    durations.observe(0.03, trace(3, "03"), 159.5)
    assert kept(durations)[0] == Exemplar(0.03, 159.5, trace(3, "03"))
    durations.observe(0.04, trace(4), 219.5)
    assert kept(durations)[0] == Exemplar(0.04, 219.5, trace(4))


def test_a_trace_that_is_not_sampled_is_kept_for_a_second() -> None:
    durations = Durations(BOUNDS)
    for number, wall_s in enumerate((100.0, 100.9, 101.0, 90.0, 30.0)):
        durations.observe(0.01, trace(number), wall_s)
        expected = {0: 0, 1: 0, 2: 2, 3: 2, 4: 4}[
            number
        ]  # the last time, the clock was set back by more than a minute
        found = kept(durations)[0]
        assert found is not None
        assert found.trace == trace(expected)


def test_an_observation_gets_its_trace_later() -> None:
    durations = Durations(BOUNDS)
    durations.observe(0.5)
    durations.exemplify(0.5, trace(1), 7.0)
    assert kept(durations)[1] == Exemplar(0.5, 7.0, trace(1))
    assert durations.count == 1


def test_a_text_that_is_too_short_is_no_trace() -> None:
    durations = Durations(BOUNDS)
    durations.observe(0.5, trace(1)[:54], 7.0)
    assert kept(durations) == [None, None, None]


def test_the_newer_exemplar_of_two_processes_is_shown() -> None:
    one, other = Durations(BOUNDS), Durations(BOUNDS)
    one.observe(0.05, trace(1), 10.0)
    one.observe(0.5, trace(2), 20.0)
    other.observe(0.05, trace(3), 11.0)
    other.observe(0.5, trace(4), 19.0)
    other.observe(5.0, trace(5), 9.0)
    one.add(other.counts())
    assert [found and found.trace for found in kept(one)] == [trace(3), trace(2), trace(5)]
    assert one.count == 5


@pytest.mark.parametrize("exemplars", [b"", b"x", bytes(72), bytes(72 * 5)])
def test_exemplars_of_another_size_are_left_out(exemplars: bytes) -> None:
    durations = Durations(BOUNDS)
    durations.observe(0.05, trace(1), 10.0)
    durations.add(DurationCounts((1, 0, 0), 0.05, exemplars))
    assert durations.count == 2
    assert kept(durations) == [Exemplar(0.05, 10.0, trace(1)), None, None]
