"""The node's nftables table that lets kubelet's probes reach captured pods past the proxy."""

import asyncio
import logging
from collections.abc import Iterable

from tproxy.errors import TproxyError
from tproxy.inpod import Probed
from ztunnel.node.agent.kernel_thread import KernelThread
from ztunnel.node.agent.namespaces import apply_probes, remove_probes
from ztunnel.runtime.settings import plain_reason

log = logging.getLogger(__name__)


class ProbedPods:
    """Keeps the table equal to the set of captured pods. Its methods log errors of the kernel, and raise none.

    Args:
        thread: runs the calls to the kernel.
        user: the numeric user of the node's kubelet. None if there is no kubelet; then nothing is changed.
    """

    def __init__(self, thread: KernelThread, user: int | None) -> None:
        self._thread = thread
        self._user = user
        self._pods: dict[str, Probed] = {}
        self._one_at_a_time = asyncio.Lock()
        self._wanted = self._applied = 0
        #: The reason why kubelet's probes are captured. Empty if the table is in place, or not configured.
        self.fault = ""

    async def expect(self, pods: Iterable[Probed]) -> None:
        """Let kubelet probe these pods before they are enrolled; idempotent.

        A successor calls it with all pods of its predecessor, because probes of pods missing from the set fail
        until the pods are enrolled again.
        """
        self._pods = {pod.uid: pod for pod in pods} | self._pods
        await self._apply()

    async def add(self, pod: Probed) -> None:
        """Let kubelet probe a pod; idempotent."""
        if self.fault or self._pods.get(pod.uid) != pod:
            self._pods[pod.uid] = pod
            await self._apply()

    async def remove(self, uid: str) -> None:
        """Remove a pod from the set; idempotent."""
        if self._pods.pop(uid, None) is not None:
            await self._apply()

    async def repair(self) -> None:
        """Compare the table with the set of pods, and repair it; idempotent."""
        if self._pods:
            await self._apply()

    async def end(self) -> None:
        """Remove the table, because the agent has no successor; idempotent."""
        if self._user is None:
            return
        self._pods.clear()
        async with self._one_at_a_time:
            try:
                await self._thread.run(remove_probes)
            except (TproxyError, OSError) as error:
                log.error("table for kubelet's probes not removed error=%s", plain_reason(error))

    async def _apply(self) -> None:
        """Update the table. Calls during an update share the next one."""
        if self._user is None:
            return
        self._wanted += 1
        wanted = self._wanted
        async with self._one_at_a_time:
            if self._applied >= wanted:
                return
            self._applied = self._wanted
            try:
                await self._thread.run(apply_probes, list(self._pods.values()), self._user)
            except (TproxyError, OSError) as error:
                self.fault = plain_reason(error)
                log.error("kubelet's probes will be captured error=%s", plain_reason(error))
            else:
                self.fault = ""
