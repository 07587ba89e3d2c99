"""Chooses the size of a hand-over's slices. Pure."""

from typing import Final


class SliceSize:
    """Chooses the number of connections offered per slice, from the duration of the previous slice.

    The target duration is 5 ms. On busy processors it is half of the time since the previous slice, at most 50 ms.
    On these, even a slice of one connection waits for a processor several times, so small slices would make a
    hand-over of 10,000 connections take minutes.
    """

    #: Both processes together need about 5 ms of CPU for 16 plain connections.
    FEWEST: Final = 16
    MOST: Final = 128
    _SHORT_S: Final = 0.005
    _LONG_S: Final = 0.05

    def __init__(self) -> None:
        self.connections = self.FEWEST

    def ended(self, took_s: float, gap_s: float) -> None:
        """Adapt to a slice that took ``took_s`` and began ``gap_s`` after the end of the previous slice."""
        aim_s = min(max(self._SHORT_S, gap_s / 2), self._LONG_S)
        if took_s > aim_s:
            self.connections = max(self.FEWEST, self.connections // 2)
        elif took_s < aim_s / 2:
            self.connections = min(self.MOST, self.connections * 2)
