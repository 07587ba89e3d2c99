"""Defines the state that the inbound and the outbound half of a pod's proxy share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hbone.aio.connection_settings import ConnectionSettings
from hbone.flow import WindowPool
from xds.model.workload import Workload
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate
from ztunnel.proxy.istio.path.connections import PodConnections
from ztunnel.proxy.istio.path.local_workload import LocalWorkload
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.pod_sockets import PodSockets
from ztunnel.runtime.tasks import Tasks

if TYPE_CHECKING:
    from ztunnel.proxy.tap.capture import Capture


@dataclass(frozen=True, slots=True, eq=False)
class PodContext:
    """One pod's shared objects, used by all code that carries its connections. The pod's proxy owns them.

    Attributes:
        node: the shared state of the node's pods.
        local: the pod's own workload.
        sockets: opens sockets in the pod.
        connections: the pod's connections.
        tasks: the tasks and fibers that carry the connections.
        windows: the budget for enlarging the flow-control windows of all the pod's tunnel connections.
    """

    node: Node
    local: LocalWorkload
    sockets: PodSockets
    connections: PodConnections
    tasks: Tasks
    windows: WindowPool

    @property
    def client_settings(self) -> ConnectionSettings:
        """The HTTP/2 settings of the pod's outgoing tunnel connections."""
        return replace(self.node.client_settings, windows=self.windows)

    @property
    def server_settings(self) -> ConnectionSettings:
        """The HTTP/2 settings of tunnel connections that peers open to the pod."""
        return replace(self.node.server_settings, windows=self.windows)

    @property
    def tap(self) -> Capture | None:
        """The packet capture (tap) that currently runs for this pod, if any. Read once per connection."""
        taps = self.node.taps
        if taps is None:
            return None
        name = self.local.name
        return taps.of(f"{name.namespace}/{name.name}")

    @property
    def is_tapped(self) -> bool:
        """Whether a packet capture (tap) runs for this pod now."""
        return self.tap is not None

    async def certificate(self, workload: Workload) -> WorkloadCertificate:
        """Return a workload's certificate.

        Raises:
            IdentityError: no certificate could be obtained.
        """
        identity = workload.identity
        certificates = self.node.certificates
        found = certificates.current(identity)
        if found is None:
            with self.node.waiting("certificate"):
                found = await certificates.fetch(identity)
        return found
