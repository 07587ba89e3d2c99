"""Tracks the control plane's description of a pod's own workload."""

import asyncio
from collections.abc import Callable
from typing import Final

from xds.model.mesh import Changes
from xds.model.workload import Workload
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.istio.accounting.outcome import EarlyDeny
from ztunnel.proxy.istio.accounting.workload_labels import WorkloadLabels
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.settings.config import PodName

#: How long to wait for the control plane to describe a new pod, in seconds.
_WAIT_S: Final = 5.0


def _nothing() -> None:
    """Do nothing. This replaces the function that stops watching the mesh, once it has been called."""


class LocalWorkload:
    """Tracks a pod's own workload in the mesh, from construction until :meth:`close`.

    Attributes:
        name: the pod's name.
    """

    def __init__(self, node: Node, name: PodName) -> None:
        self.name = name
        self._node = node
        self._current = node.mesh.local_workload(name.name, name.namespace, name.service_account)
        self._last = self._current
        self._labels: WorkloadLabels | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._watchers: list[Callable[[Workload], None]] = []
        self._stop_watching: Callable[[], None] = node.mesh.watch(self._mesh_changed)

    @property
    def current(self) -> Workload | None:
        """The workload as last described. ``None`` if the control plane does not describe it."""
        return self._current

    @property
    def last(self) -> Workload | None:
        """The workload as last described, even if the control plane has removed it since. ``None`` if it was never
        described.

        Open connections are checked against this value, because a pod that is temporarily missing from the mesh
        must not lose its policies.
        """
        return self._last

    def watch(self, changed: Callable[[Workload], None]) -> None:
        """Call ``changed`` with :attr:`last` after each change of the mesh, unless the workload was never
        described.
        """
        self._watchers.append(changed)

    def close(self) -> None:
        """Stop tracking the workload; idempotent."""
        self._stop_watching()
        self._stop_watching = _nothing  # the previous function refers to this object
        self._watchers.clear()

    def _mesh_changed(self, changes: Changes) -> None:
        if self._current is None or self._current.uid in changes.workloads:
            name = self.name
            self._current = self._node.mesh.local_workload(name.name, name.namespace, name.service_account)
        if self._current is not None:
            self._last = self._current
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)
        if self._last is not None:
            for changed in self._watchers:
                changed(self._last)

    async def get(self) -> WorkloadLabels:
        """Return the workload with its labels, waiting for the control plane to describe it.

        Raises:
            EarlyDeny: the control plane did not describe it in time.
        """
        if self._current is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                with self._node.waiting("workload"):
                    async with asyncio.timeout(_WAIT_S):
                        await future
            except TimeoutError:
                pass
            finally:
                self._waiting.discard(future)
        if self._current is None:
            name = self.name
            raise EarlyDeny(
                "failed to fetch information about local workload: "
                f"{name.service_account}.{name.namespace} ({name.name})",
                Reason.UNKNOWN_WORKLOAD,
            )
        labels = self.known()
        assert labels is not None
        return labels

    def known(self) -> WorkloadLabels | None:
        """Return the workload with its labels. ``None`` if the control plane does not describe it."""
        current, labels = self._current, self._labels
        if current is None:
            return None
        if labels is None or labels.workload is not current:
            labels = self._labels = self._node.labels_of(current)
        return labels
