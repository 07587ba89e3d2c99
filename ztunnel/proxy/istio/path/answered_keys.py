"""Remembers for which on-demand resource names the control plane has answered, for a short time. Pure.

An answer is only valid for some seconds. istiod pushes later changes by the name of the resource (the uid of a
workload, or a service), not by the requested name (``WorkloadGenerator.GenerateDeltas``). If a pod gets an address
that was requested before, the pod is found only if the address is requested again. Until then, connections to the
pod would be passed through as plain text.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

#: How long an answer is valid, in seconds. A guess: as long as a change of the mesh can take to reach a proxy that
#: receives all resources. The Rust ztunnel requests an unknown address for each connection.
VALID_S: Final = 5.0


class AnsweredKeys:
    """The keys that were answered within :data:`VALID_S`.

    Args:
        now_s: returns monotonic seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._until_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, key: str) -> bool:
        until_s = self._until_s.get(key)
        return until_s is not None and self._now_s() < until_s

    def add(self, key: str) -> None:
        """Record that the control plane has answered now, and forget expired answers."""
        now_s = self._now_s()
        self._until_s[key] = now_s + VALID_S
        self._until_s.move_to_end(key)
        while next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
