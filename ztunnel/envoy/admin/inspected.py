"""The interface by which admin pages read and change the proxy, so that they need not import the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hbone.aio.poller import Poller
from xds.aio.client import AdsClient
from ztunnel.envoy.bootstrap import BootstrapConfig
from ztunnel.envoy.connections import Connections
from ztunnel.envoy.listeners.manager import ListenerManager
from ztunnel.envoy.secrets.store import SecretStore
from ztunnel.envoy.settings import Settings
from ztunnel.envoy.state import State
from ztunnel.envoy.telemetry.access_log import AccessLogs
from ztunnel.envoy.telemetry.decisions import Decisions
from ztunnel.envoy.telemetry.stats import Stats
from ztunnel.envoy.upstream.manager import ClusterManager
from ztunnel.http.page import Page, Query
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.descriptors import Descriptors

if TYPE_CHECKING:
    from ztunnel.calico.live import LivePolicies


class InspectedProxy(Protocol):
    """A proxy process; see :class:`ztunnel.envoy.app.Proxy`.

    Attributes:
        started, started_at: monotonic and wall-clock seconds of the start.
        ads: the aggregated stream; None where the bootstrap has none.
        failing_health_checks: set by ``/healthcheck/fail``; ``/ready`` then answers DRAINING.
    """

    settings: Settings
    bootstrap: BootstrapConfig
    clock: Clock
    poller: Poller
    started: float
    started_at: float
    stats: Stats
    ads: AdsClient | None
    connections: Connections
    decisions: Decisions
    clusters: ClusterManager
    listeners: ListenerManager
    secrets: SecretStore
    logs: AccessLogs
    policies: LivePolicies | None
    descriptors: Descriptors
    failing_health_checks: bool

    @property
    def state(self) -> State:
        """The state of the start."""

    def shut_down(self) -> None:
        """Begin to drain, then end."""


class Drain(Protocol):
    """The type of :meth:`ztunnel.envoy.admin.server.AdminServer.drain`."""

    def __call__(self, *, inbound_only: bool, graceful: bool, skip_exit: bool) -> None:
        """Drain listeners."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to the admin server, with the objects that its handler may use."""

    proxy: InspectedProxy
    drain: Drain
    live_page: Callable[[], Page | Awaitable[Page]]
    query: Query
