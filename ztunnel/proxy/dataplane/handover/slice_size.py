"""Chooses how many connections each slice of a hand-over contains. Pure."""

from typing import Final


class SliceSize:
    """Chooses the number of connections offered per slice, from the duration of the previous slice.

    The target duration of a slice is 5 ms, or half of the time since the previous slice if this is longer, up to
    50 ms. The longer target is for busy processors: there even a slice of one connection waits for a processor
    several times, so small slices would make a hand-over of 10,000 connections take minutes.
    """

    #: The smallest slice. Both processes together need about 5 ms of CPU time to move 16 plain connections.
    FEWEST: Final = 16
    MOST: Final = 128
    _SHORT_S: Final = 0.005
    _LONG_S: Final = 0.05

    def __init__(self) -> None:
        self.connections = self.FEWEST

    def ended(self, took_s: float, gap_s: float) -> None:
        """Adapt the size after a slice that took ``took_s`` and began ``gap_s`` after the end of the previous
        slice.
        """
        aim_s = min(max(self._SHORT_S, gap_s / 2), self._LONG_S)
        if took_s > aim_s:
            self.connections = max(self.FEWEST, self.connections // 2)
        elif took_s < aim_s / 2:
            self.connections = min(self.MOST, self.connections * 2)
