"""Adds up the time of an addon's calls, and decides when the addon has used too much event-loop time. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, NamedTuple

#: The upper bounds of the buckets in the histogram of call durations.
BOUNDS_US: Final = (10.0, 50.0, 200.0, 1_000.0, 10_000.0, 100_000.0, 1_000_000.0)
#: The histogram's first bound, in nanoseconds.
QUICK_NS: Final = 10_000
_BOUNDS_NS: Final = tuple(int(bound * 1000) for bound in BOUNDS_US)
#: The fraction of the event loop's time that one addon may use within :data:`WINDOW_S`.
SHARE: Final = 0.02
WINDOW_S: Final = 60
_WINDOW_NS: Final = WINDOW_S * 1_000_000_000
#: The event-loop time that one addon may use within a window, in nanoseconds.
MOST_NS: Final = int(_WINDOW_NS * SHARE)


class HookCounts(NamedTuple):
    """Call counts of one addon's hook. The counts of several processes can be added.

    Attributes:
        addon: the addon's name.
        hook: the hook's name.
        results: the number of calls, by result.
        buckets: the number of calls by duration: up to each bound in :data:`BOUNDS_US`, and longer ones.
        total_ns: the time of all calls.
        over_budget: calls above the addon's budget.
    """

    addon: str
    hook: str
    results: tuple[tuple[str, int], ...] = ()
    buckets: tuple[int, ...] = (0,) * (len(BOUNDS_US) + 1)
    total_ns: int = 0
    over_budget: int = 0

    @property
    def calls(self) -> int:
        """The number of calls, including calls skipped during a suspension."""
        return sum(number for _, number in self.results)

    def __add__(self, other: object) -> HookCounts:
        """Return the sum of two processes' counts for the same hook."""
        if not isinstance(other, HookCounts):
            return NotImplemented
        results = dict(self.results)
        for result, number in other.results:
            results[result] = results.get(result, 0) + number
        return HookCounts(
            self.addon,
            self.hook,
            tuple(sorted(results.items())),
            tuple(mine + others for mine, others in zip(self.buckets, other.buckets, strict=True)),
            self.total_ns + other.total_ns,
            self.over_budget + other.over_budget,
        )


class HookAccount:
    """Counts the calls of one hook. Callers increment the attributes directly, because most calls are short and
    return no verdict.

    Attributes:
        results: the number of calls by their result, if other than ``none``: the name of a verdict in lower case,
            ``fault``, ``timeout``, ``cancelled`` or ``suspended``.
        silent: the number of calls with the result ``none``.
        quick: the number of calls that took at most :data:`QUICK_NS`.
        total_ns: the time of all calls.
        over_budget: calls above the budget.
    """

    __slots__ = ("_buckets", "over_budget", "quick", "results", "silent", "total_ns")

    def __init__(self) -> None:
        self.results: dict[str, int] = {}
        self.silent = self.quick = 0
        self.total_ns = 0
        self.over_budget = 0
        self._buckets = [0] * (len(_BOUNDS_NS) + 1)

    def took(self, took_ns: int) -> None:
        """Count a call's duration."""
        self.total_ns += took_ns
        if took_ns <= QUICK_NS:
            self.quick += 1
        else:
            self._buckets[bisect_left(_BOUNDS_NS, took_ns)] += 1

    def copy(self, addon: str, hook: str) -> HookCounts:
        """Return the counts so far."""
        silent = {"none": self.silent} if self.silent else {}
        return HookCounts(
            addon,
            hook,
            tuple(sorted((self.results | silent).items())),
            (self.quick, *self._buckets[1:]),
            self.total_ns,
            self.over_budget,
        )


class LoopShare:
    """Measures the event-loop time that one addon uses within one-minute windows.

    The clock is read only when the sum reaches the addon's share of a minute. If the window is older than a minute
    at that time, the addon is within its share, and the sum is reset. So neither a list of calls nor a clock
    reading per call is needed. An excess is detected before the addon has used twice its share.

    Attributes:
        used_ns: the time used in this window. Callers add to it directly, and call :meth:`exceeded` above
            :data:`MOST_NS`.
    """

    __slots__ = ("_began_ns", "used_ns")

    def __init__(self, now_ns: int) -> None:
        self._began_ns = now_ns
        self.used_ns = 0

    def use(self, took_ns: int, now_ns: int) -> bool:
        """Add the duration of a call, and return whether the addon has exceeded its share."""
        self.used_ns += took_ns
        return self.used_ns > MOST_NS and self.exceeded(now_ns)

    def exceeded(self, now_ns: int) -> bool:
        """Return whether the addon used up its share within a minute. If not, start a new window."""
        if now_ns - self._began_ns < _WINDOW_NS:
            return True
        self._began_ns, self.used_ns = now_ns, 0
        return False


def too_much(used_ns: int) -> str:
    """Return a sentence that an addon is suspended because it exceeded its share of event-loop time."""
    return f"it used {used_ns / 1e9:.2f} s of the loop within {WINDOW_S} s, more than {SHARE:.0%}"
