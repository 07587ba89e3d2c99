"""The interface through which admin pages read and change the proxy without importing the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hbone.aio.poller import Poller
from xds.aio.client import AdsClient
from ztunnel.proxy.dataplane.handshake_limiter import HalfOpen
from ztunnel.proxy.envoy.config.bootstrap import BootstrapConfig
from ztunnel.proxy.envoy.config.settings import Settings
from ztunnel.proxy.envoy.config.state import State
from ztunnel.proxy.envoy.listeners.connections import Connections
from ztunnel.proxy.envoy.listeners.manager import ListenerManager
from ztunnel.proxy.envoy.path.account import Account
from ztunnel.proxy.envoy.path.terminate import TunnelRules
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.telemetry.access_log import AccessLogs
from ztunnel.proxy.envoy.telemetry.decisions import Decisions
from ztunnel.proxy.envoy.upstream.manager import ClusterManager
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.descriptors import Descriptors
from ztunnel.runtime.http.page import Page, PageRequest, Query
from ztunnel.runtime.watchdog import LoopDelays

if TYPE_CHECKING:
    from ztunnel.policy.calico.live import LivePolicies
    from ztunnel.proxy.addons.process import AddonProcess
    from ztunnel.proxy.dataplane.handover.service import Handover


class InspectedProxy(Protocol):
    """A proxy process; see :class:`ztunnel.proxy.envoy.app.Proxy`.

    Attributes:
        started, started_at: the start time in monotonic and in wall-clock seconds.
        ads: the aggregated xDS stream. None if the bootstrap does not configure it.
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
    account: Account
    clusters: ClusterManager
    listeners: ListenerManager
    secrets: SecretStore
    logs: AccessLogs
    tunnel_rules: TunnelRules
    policies: LivePolicies | None
    addons: AddonProcess | None
    descriptors: Descriptors
    half_open: HalfOpen
    delays: LoopDelays
    failing_health_checks: bool

    @property
    def handover(self) -> Handover | None:
        """The object that hands over open connections, or ``None`` if hand-overs are off."""

    @property
    def state(self) -> State:
        """The proxy's state, in the words of ``/ready``."""

    def shut_down(self) -> None:
        """Begin to drain all connections, and then end the process."""


class Drain(Protocol):
    """The signature of :meth:`ztunnel.proxy.envoy.admin.server.AdminServer.drain`."""

    def __call__(self, *, inbound_only: bool, graceful: bool, skip_exit: bool) -> None:
        """Drain listeners."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to the admin server, with the objects that its handler can use."""

    proxy: InspectedProxy
    drain: Drain
    live_page: Callable[[], Page | Awaitable[Page]]
    request: PageRequest

    @property
    def query(self) -> Query:
        """The request's query."""
        return self.request.query
