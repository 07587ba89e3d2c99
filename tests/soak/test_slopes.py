"""Slopes and their intervals: what grows is found, what wanders is not."""

import random

import pytest

from tests.soak.slopes import slope_of


def test_a_line_is_found_exactly() -> None:
    slope = slope_of([(second, 5 + second / 3600) for second in range(0, 3600, 10)])
    assert slope.per_hour == pytest.approx(1.0)
    assert slope.margin == pytest.approx(0.0, abs=1e-6)
    assert slope.added == pytest.approx(3590 / 3600)
    assert slope.grows(noise=0.5)
    assert not slope.grows(noise=2.0)


def test_a_leak_below_the_noise_of_single_samples_is_found() -> None:
    rng = random.Random(1)
    slope = slope_of([(second, rng.gauss(100, 5) + second / 600) for second in range(0, 3600, 5)])
    assert slope.grows(noise=1.0)
    assert slope.per_hour - slope.margin < 6 < slope.per_hour + slope.margin


def test_noise_is_no_growth() -> None:
    """Of 200 series without a slope the interval of 95 % excludes zero upwards in about 5."""
    rng = random.Random(2)
    series = [[(float(second), rng.gauss(100, 5)) for second in range(400)] for _ in range(200)]
    assert sum(slope_of(samples).grows(noise=0.0) for samples in series) <= 12


def test_a_falling_line_is_no_growth() -> None:
    assert not slope_of([(second, -second) for second in range(100)]).grows(noise=0.0)


@pytest.mark.parametrize("samples", [[], [(0.0, 1.0)] * 5, [(1.0, float(n)) for n in range(50)]])
def test_too_little_is_no_slope(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError):
        slope_of(samples)
