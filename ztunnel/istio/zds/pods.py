"""What a pod is to the manager that starts and stops proxies for pods."""

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from tproxy.aio.netns import Netns

#: The Kubernetes pod UID; unrelated to a workload's uid in xDS.
PodUid = NewType("PodUid", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodInfo:
    """Who a pod is, as announced."""

    name: str
    namespace: str
    service_account: str


class PodState(Enum):
    """As ``/config_dump`` prints it."""

    UP = "Up"
    PENDING = "Pending"


class RunningPod(Protocol):
    """The proxy of one pod, listening."""

    async def stop(self) -> None:
        """End at once: listeners closed, connections aborted. Never raises, never waits for peers."""

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, say GOAWAY, give what runs until the deadline, then abort."""


class StartPod(Protocol):
    """Makes the proxy of a pod."""

    async def __call__(self, uid: PodUid, info: PodInfo, netns: Netns) -> RunningPod:
        """Bind every listener in the pod's namespace; returns when all are bound.

        Args:
            netns: stays the manager's: open until after :meth:`RunningPod.stop` returned.

        Raises:
            TproxyError, OSError: a listener could not be had; the pod stays pending and is tried again.
        """
