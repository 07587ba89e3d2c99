"""Which pods have the connections, for the time when descriptors run short.

A listener of this dialect accepts for all pods of the node. So one that has too many cannot be left waiting in its
accept queue, as in an Istio mesh; its next connections are closed while others' are served.
"""

from __future__ import annotations

from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.runtime.descriptors import Descriptors


class Crowd:
    """Accepted connections by pod.

    Args:
        descriptors: of the process.
    """

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._used: dict[str, int] = {}

    def admits(self, pod: str) -> bool:
        """Return whether one more connection of a pod may be served; False while its share is used up."""
        descriptors = self._descriptors
        return not descriptors.crowded or not descriptors.has_most(self._used.get(pod, 0), len(self._used))

    def enter(self, pod: str) -> None:
        """Count a connection."""
        self._used[pod] = self._used.get(pod, 0) + 1

    def leave(self, pod: str) -> None:
        """Undo one :meth:`enter`."""
        left = self._used[pod] - 1
        if left:
            self._used[pod] = left
        else:
            del self._used[pod]


def pod_of(listener: LiveListener, info: StreamInfo) -> str:
    """Return the address of the pod that a connection just accepted is of: the client's, or where tunnels end."""
    return info.destination.host if listener.ends_tunnels else info.facts.source.host
