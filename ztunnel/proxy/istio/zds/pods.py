"""The interfaces through which the pod manager uses a pod and its proxy."""

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from tproxy.aio.netns import Netns

#: The Kubernetes pod UID; unrelated to a workload's uid in xDS.
PodUid = NewType("PodUid", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodInfo:
    """The identity of a pod, as the agent announced it."""

    name: str
    namespace: str
    service_account: str


class PodState(Enum):
    """The state of a pod, as ``/config_dump`` prints it."""

    UP = "Up"
    PENDING = "Pending"


class RunningPod(Protocol):
    """A pod's proxy whose listeners are open."""

    async def stop(self) -> None:
        """Close the listeners and abort connections at once. This never raises, and never waits for peers."""

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, send GOAWAY, and abort the connections that are left after ``timeout_s``."""


class StartPod(Protocol):
    """A function that starts the proxy of a pod."""

    async def __call__(self, uid: PodUid, info: PodInfo, netns: Netns) -> RunningPod:
        """Bind every listener in the pod's namespace. Returns when all listeners are bound.

        Args:
            uid: the pod.
            info: the pod's identity.
            netns: the pod's namespace. The manager closes it after :meth:`RunningPod.stop` has returned.

        Raises:
            TproxyError, OSError: a listener could not be bound. The pod stays pending and is retried.
        """
