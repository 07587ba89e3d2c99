"""Remembers endpoints that failed recently on this node. Connections avoid these endpoints if the service has
others. Pure.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator

from xds.model.workload import WorkloadUid

#: How long a failed endpoint is avoided. A guess between Envoy's outlier ejection (30 s) and the restart of a pod.
AVOID_S = 10.0
_MOST = 10_000

_NONE: frozenset[WorkloadUid] = frozenset()


class _Both(Collection[WorkloadUid]):
    """The union of two collections, as a view that copies neither."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Collection[WorkloadUid], second: Collection[WorkloadUid]) -> None:
        self._first = first
        self._second = second

    def __contains__(self, uid: object) -> bool:
        return uid in self._first or uid in self._second

    def __iter__(self) -> Iterator[WorkloadUid]:
        yield from self._first
        yield from (uid for uid in self._second if uid not in self._first)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._first) or bool(self._second)


class FailedEndpoints:
    """The endpoints that failed within :data:`AVOID_S`, at most 10,000."""

    def __init__(self) -> None:
        # All entries are kept for the same time, so the oldest expires first. In a plain dict, finding the oldest
        # key would be slow, because the search iterates over all previously removed keys.
        self._until_s: OrderedDict[WorkloadUid, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, uid: WorkloadUid, now_s: float) -> None:
        """Record that an endpoint failed. If the table is full, the oldest entry is evicted."""
        self._until_s[uid] = now_s + AVOID_S
        self._until_s.move_to_end(uid)
        if len(self._until_s) > _MOST:
            self._until_s.popitem(last=False)

    def clear(self, uid: WorkloadUid) -> None:
        """Forget an endpoint's failure, because the workload changed. Idempotent."""
        self._until_s.pop(uid, None)

    def current(self, now_s: float, own: Collection[WorkloadUid] = _NONE) -> Collection[WorkloadUid]:
        """Return the endpoints to avoid now. The result is a view, valid until the next change.

        Called for every connection, so the cost depends only on the number of newly expired entries.

        Args:
            now_s: the clock of :meth:`add`.
            own: further endpoints that the calling connection avoids.
        """
        until_s = self._until_s
        while until_s and next(iter(until_s.values())) <= now_s:
            until_s.popitem(last=False)
        if not until_s:
            return own
        return _Both(until_s.keys(), own) if own else until_s.keys()
