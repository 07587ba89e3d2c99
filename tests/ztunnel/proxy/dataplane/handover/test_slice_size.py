"""How many connections are offered in one slice of a hand-over."""

import pytest

from ztunnel.proxy.dataplane.handover.slice_size import SliceSize


@pytest.mark.parametrize(
    ("took_s", "gap_s", "sizes"),
    [
        (0.001, 0.001, [32, 64, 128, 128]),  # idle processors: as many as fit into 5 ms
        (0.004, 0.001, [16, 16]),
        (0.020, 0.100, [32, 64]),  # busy: half of the time between slices
        (0.040, 0.100, [16, 16]),
        (0.060, 5.000, [16, 16]),  # but never more than 50 ms
    ],
)
def test_slices_get_longer_where_processors_are_busy(took_s: float, gap_s: float, sizes: list[int]) -> None:
    size = SliceSize()
    for expected in sizes:
        size.ended(took_s, gap_s)
        assert size.connections == expected


def test_long_slices_halve_the_next_one() -> None:
    size = SliceSize()
    size.connections = 128
    for expected in (64, 32, 16, 16):
        size.ended(0.006, 0.001)
        assert size.connections == expected
