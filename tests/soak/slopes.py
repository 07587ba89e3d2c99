"""Decides whether a series of measurements grows: a line by least squares with a 95 % confidence interval. Pure.

Samples of a process that is taken every few seconds are not independent: memory that was high a moment ago is
high now. A fit over all of them would claim a precision that it does not have, so the series is cut into 20
stretches, and the line goes through their means, which are nearly independent (method of batch means).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BATCHES: Final = 20
#: Student's t for a two-sided interval of 95 %, by degrees of freedom; the next smaller one is on the safe side.
_T: Final = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 13: 2.16, 18: 2.10}


@dataclass(frozen=True, slots=True)
class Slope:
    """A line through a series.

    Attributes:
        per_hour: its slope.
        margin: half of the 95 % confidence interval of ``per_hour``.
        added: what the line has gained from the first sample to the last.
        first, last: means of the first and last stretch.
    """

    per_hour: float
    margin: float
    added: float
    first: float
    last: float

    def grows(self, noise: float) -> bool:
        """Return whether the interval lies above 0 and the gain is more than ``noise``, in the series' unit."""
        return self.per_hour - self.margin > 0 and self.added > noise


def slope_of(samples: Sequence[tuple[float, float]]) -> Slope:
    """Fit a line to (seconds, value) samples in order of time.

    Raises:
        ValueError: fewer than six samples, or all at one time.
    """
    if len(samples) < 6:
        raise ValueError("a slope with an interval needs six samples")
    points = _batch_means(samples, min(BATCHES, len(samples) // 2))
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        raise ValueError("all samples are of one time")
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residual = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    freedom = count - 2
    error = math.sqrt(residual / freedom / spread)
    quantile = _T[max(known for known in _T if known <= freedom)]
    return Slope(
        per_hour=slope * 3600,
        margin=quantile * error * 3600,
        added=slope * (samples[-1][0] - samples[0][0]),
        first=points[0][1],
        last=points[-1][1],
    )


def _batch_means(samples: Sequence[tuple[float, float]], batches: int) -> list[tuple[float, float]]:
    means = []
    for number in range(batches):
        part = samples[number * len(samples) // batches : (number + 1) * len(samples) // batches]
        means.append((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return means
