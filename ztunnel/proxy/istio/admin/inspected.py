"""The interface through which admin pages read and change the proxy without importing the application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hbone.aio.poller import Poller
from xds.model.mesh import Mesh
from ztunnel.proxy.dataplane.handover import page as handover_page
from ztunnel.proxy.flows.page import OtherFlows
from ztunnel.proxy.istio.accounting.logs import LogStream
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.certificates.manager import CertificateManager
from ztunnel.proxy.istio.path.connections import Shown
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.settings.config import IstioConfig, PodName
from ztunnel.proxy.istio.xds.control import ControlPlane
from ztunnel.proxy.istio.zds.manager import PodManager
from ztunnel.proxy.istio.zds.pods import RunningPod
from ztunnel.runtime.clock import Clock

if TYPE_CHECKING:
    from ztunnel.policy.calico.live import LivePolicies
    from ztunnel.proxy.tap.taps import Carry

#: Connections as config-dump entries, by direction: ``inbound`` and ``outbound``.
Connections = dict[str, list[Shown]]


class PendingTasks(Protocol):
    """The tasks that must be complete before the proxy is ready."""

    @property
    def pending(self) -> set[str]:
        """The names of the pending tasks."""


class InspectedWorkers(Protocol):
    """The worker processes; see :class:`ztunnel.proxy.istio.workers.main.Workers`."""

    async def metrics(self) -> Metrics:
        """Return the sum of all processes' counters."""

    async def connections(self) -> dict[RunningPod, Connections]:
        """Return the open connections by pod."""

    async def flows(self, after_ns: int, last: int) -> OtherFlows:
        """Return the workers' latest ended connections as (time in nanoseconds, JSON line), oldest first."""

    def carriers(self) -> list[Carry]:
        """Return one packet-capture function (``Carry``) per worker process."""


class CarriedPod(RunningPod, Protocol):
    """A pod whose connections this proxy carries."""

    name: PodName


class InspectedProxy(Protocol):
    """A proxy process; see :class:`ztunnel.proxy.istio.app.IstioProxy`.

    Attributes:
        started_s: when the process started, in monotonic seconds.
    """

    started_s: float
    config: IstioConfig
    clock: Clock
    poller: Poller
    mesh: Mesh
    node: Node
    metrics: Metrics
    logs: LogStream
    certificates: CertificateManager
    control: ControlPlane
    pods: PodManager

    @property
    def readiness(self) -> PendingTasks:
        """The tasks that must be complete before the proxy is ready."""

    @property
    def policies(self) -> LivePolicies | None:
        """Calico's policies, or ``None`` if they are disabled."""

    @property
    def workers(self) -> InspectedWorkers | None:
        """The worker processes, or ``None`` if this process carries all connections."""

    @property
    def handover(self) -> handover_page.Shown | None:
        """The object that hands open connections over to a successor; ``None`` if this is not configured."""

    def carried(self) -> Sequence[CarriedPod]:
        """Return all pods that this proxy serves, including its own."""

    def change_log_filter(self, text: str, *, reset: bool) -> None:
        """Change the log filter of this process and its workers."""

    def send_goaway(self) -> int:
        """Send GOAWAY, so that peers open new connections elsewhere. Return the number of open connections."""

    def shut_down(self) -> None:
        """Start to drain all connections. The process ends after the drain."""
