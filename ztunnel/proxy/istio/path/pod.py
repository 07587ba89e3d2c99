"""Assembles one pod's proxy from its parts: outbound, inbound, tunnels, connection groups and sockets. Starts and
stops it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from hbone.flow import WindowPool
from ztunnel.proxy.istio.accounting.outcome import DRAINED
from ztunnel.proxy.istio.path.connections import PodConnections, Shown
from ztunnel.proxy.istio.path.inbound import Inbound
from ztunnel.proxy.istio.path.local_workload import LocalWorkload
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.outbound import Outbound
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.pod_sockets import Bound, PodSockets
from ztunnel.proxy.istio.path.pod_tunnels import PodTunnels
from ztunnel.proxy.istio.settings.config import HBONE_PORT, OUTBOUND_PORT, PLAINTEXT_PORT, SOCKS_PORT, PodName
from ztunnel.runtime.accepting import Gates
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)


#: The longest time that a draining pod's DNS proxy spends on its last queries. After this time clients repeat a
#: query (``timeout`` of resolv.conf(5)).
_ANSWERING_S = 5.0


class Dns(Protocol):
    """Resolves names for one pod. Implemented by ``PodDns``, and in workers by an object that asks the main
    process.
    """

    async def resolve(self, name: str, *, ipv6: bool) -> str | None:
        """Return the first address of a name, or ``None``."""

    def leave(self) -> None:
        """Let a successor, if there is one, receive the pod's new queries. Idempotent."""

    async def finish(self, limit_s: float) -> None:
        """Answer the queries that have arrived, for at most ``limit_s``."""

    async def close(self) -> None:
        """Stop resolving. Idempotent."""


class PodProxy:
    """Carries the connections of one pod, from :meth:`start` to :meth:`stop`.

    Args:
        node: the shared state of the node's pods.
        name: the pod's name.
        sockets: the pod's sockets. This object becomes the owner.
        dns: resolves names for SOCKS clients, and is closed with the pod. ``None``: names are not resolved.

    Attributes:
        name: the pod's name.
        context: the state shared by both directions.
    """

    def __init__(self, node: Node, name: PodName, sockets: PodSockets, *, dns: Dns | None = None) -> None:
        self.name = name
        self._node = node
        self._dns = dns
        self._local = LocalWorkload(node, name)
        self._sockets = sockets
        self._connections = PodConnections(node.live)
        self._tasks = Tasks(f"{name.namespace}/{name.name}")
        self._share = node.descriptors.share(f"{name.namespace}/{name.name}", self._connections.descriptors)
        windows = WindowPool(node.pod_window_bytes)
        context = self.context = PodContext(
            node, self._local, self._sockets, self._connections, self._tasks, windows
        )
        self._tunnels = PodTunnels(context)
        resolve = dns.resolve if dns is not None else _resolves_nothing
        self._inbound: Inbound
        self._outbound: Outbound
        if node.policies is None:
            self._inbound = Inbound(context)
            self._outbound = Outbound(context, self._tunnels, resolve)
        else:
            # Imported only here to save memory: most proxies do not enforce Calico's policies.
            from ztunnel.proxy.istio.path.calico import CalicoInbound, CalicoOutbound

            self._inbound = CalicoInbound(context, node.policies)
            self._outbound = CalicoOutbound(context, self._tunnels, resolve, node.policies)

    async def start(self, bound: Sequence[Bound] | None = None) -> None:
        """Start serving the pod's connections, and node-local tunnels to the pod. If this fails, the pod is
        stopped again.

        Args:
            bound: sockets bound by another process. This object becomes the owner. ``None``: bind here.

        Raises:
            TproxyError: a port is taken, or a capability is missing.
        """
        accepted = {
            HBONE_PORT: self._inbound.accepted,
            PLAINTEXT_PORT: self._inbound.accepted_plain,
            OUTBOUND_PORT: self._outbound.accepted,
            SOCKS_PORT: self._outbound.accepted_socks,
        }
        try:
            pressure = self._node.log_pressure
            gate = self._share if pressure is None else Gates(pressure, self._share)
            self._sockets.listen(accepted, bound, gate=gate)
        except BaseException:
            await self.stop()
            raise
        if not self._sockets.only_tunnels:
            self._node.register(self.name, self._inbound)

    @property
    def inbound(self) -> Inbound:
        """The pod's inbound connections."""
        return self._inbound

    @property
    def outbound(self) -> Outbound:
        """The pod's outbound connections."""
        return self._outbound

    @property
    def tunnels(self) -> PodTunnels:
        """The pool of the pod's tunnel connections."""
        return self._tunnels

    @property
    def connections(self) -> PodConnections:
        """The open connections of the pod, for the admin pages."""
        return self._connections

    def dump(self) -> dict[str, list[Shown]]:
        """Return the pod's ``connections`` for the config dump."""
        return self._connections.dump(self._node.clock.monotonic())

    @property
    def open_connections(self) -> int:
        """The number of connections that are open now."""
        return len(self._connections)

    def send_goaway(self) -> int:
        """Send GOAWAY, so that peers move to other endpoints, and keep serving peers without other endpoints.
        Idempotent.

        Called for a terminating pod, which peers can use until the control plane has removed its endpoints
        everywhere.

        Returns:
            The number of open connections.
        """
        self._connections.begin_drain()
        self._connections.send_goaway()
        return self.open_connections

    async def leave_ports(self) -> None:
        """Let a successor receive new connections and queries, but accept those already queued
        here. Idempotent.
        """
        if self._dns is not None:
            self._dns.leave()
        await self._sockets.hand_over()
        await asyncio.sleep(0)  # lets the last accepted connections be registered

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, send GOAWAY, wait for connections to end until the deadline, then :meth:`stop`.

        No connection is lost: a successor accepts new connections before the listeners close, and connections
        already queued are accepted here. Only then is GOAWAY sent, so that peers find the successor when they dial
        again. Running handshakes complete, and their peers also get GOAWAY instead of a reset.
        """
        deadline_s = self._node.poller.loop.time() + timeout_s
        self._connections.begin_drain()
        await self.leave_ports()
        self._connections.send_goaway()
        if await self._connections.left(deadline_s):
            log.warning("drain duration expired with pending connections, forcefully shutting down")
        self._connections.finish_all(DRAINED)
        if self._dns is not None:
            await self._dns.finish(answering_s(deadline_s - self._node.poller.loop.time()))
        await self.stop()

    async def stop(self) -> None:
        """End all connections at once. Idempotent.

        First, other pods are prevented from opening node-local tunnels to this pod: a tunnel opened later would
        not be ended.
        """
        self._node.unregister(self.name, self._inbound)
        self._sockets.close()
        self._share.close()
        self._inbound.close()
        self._outbound.close()
        self._local.close()
        self._connections.end_all(DRAINED)
        await self._tasks.close()
        await self._connections.closed()
        await self._tunnels.close()
        self._connections.dissolve()
        if self._dns is not None:
            await self._dns.close()


def answering_s(left_s: float) -> float:
    """Return for how many seconds a pod's DNS proxy continues to answer queries, ``left_s`` before the drain's
    deadline.
    """
    return max(0.0, min(_ANSWERING_S, left_s))


async def _resolves_nothing(name: str, *, ipv6: bool) -> str | None:
    return None
