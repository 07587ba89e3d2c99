"""START HERE: the path of one connection, from accept to its last log line.

:meth:`Datapath.accepted` is called for each socket. The methods below follow in the order of their calls: listener
filters, filter chain, then either :class:`~ztunnel.proxy.envoy.path.tcp_proxy.TcpProxies` (carries bytes to a
cluster, plainly or in a tunnel) or :class:`~ztunnel.proxy.envoy.path.tunnel_server.TunnelServer` (terminates
tunnels). All errors become response flags at the end of ``_serve``. When a connection's table entry closes, the
connection is counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from typing import Any

from hbone.aio.fiber import current
from hbone.aio.poller import Poller
from hbone.aio.socket import PlainSocket
from tproxy.aio import sockets
from tproxy.aio.sockets import is_transparent
from xds.model import listener as model
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from ztunnel.proxy.dataplane.life_table import Event
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.listeners.chains import LiveChain
from ztunnel.proxy.envoy.listeners.connections import Connections, LiveConnection
from ztunnel.proxy.envoy.listeners.filters import (
    FilterClosed,
    NotArrived,
    annotate,
    due,
    inspect_http,
    inspect_tls,
    restore,
    take_proxy_header,
)
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.listeners.plans import Key, Plan, Plans
from ztunnel.proxy.envoy.listeners.table import ListenerTable
from ztunnel.proxy.envoy.path.opening import Opening
from ztunnel.proxy.envoy.path.planned import PlannedConnection
from ztunnel.proxy.envoy.path.tcp_proxy import TcpProxies
from ztunnel.proxy.envoy.path.tunnel_server import TunnelServer
from ztunnel.proxy.envoy.stream.outcome import STOPPED, Incomplete, NoFilterChain, Refused, TooMany
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)


class Datapath:
    """Carries accepted connections to their end. The owner of this object closes it.

    Args:
        listeners: the listeners that a connection can be handed to.
        proxies: carries connections to clusters.
        tunnels: terminates tunnels.
        connections: the table that every connection is registered in.
        poller: this loop's poller.
        clock: the clock of log times.
    """

    def __init__(
        self,
        listeners: ListenerTable,
        proxies: TcpProxies,
        tunnels: TunnelServer,
        *,
        connections: Connections,
        poller: Poller,
        clock: Clock,
    ) -> None:
        self._listeners = listeners
        self._plans = Plans(listeners)
        self._proxies = proxies
        self._tunnels = tunnels
        self._connections = connections
        self._poller = poller
        self._clock = clock
        self._tasks = Tasks("connections")

    # Accepting

    def accepted(self, listener: LiveListener, sock: socket.SocketType, peer: tuple[str, int]) -> None:
        """Start serving an accepted socket, and return at once. This object closes the socket."""
        try:
            name = sock.getsockname()
            key: Key | None = None
            plan: Plan | None = None
            if not (listener.ends_tunnels or listener.reads_bytes):
                key = listener, peer[0], name, sockets.tracked_address(sock, 6 if ":" in name[0] else 4) or name
                plan = self._plans.plan(key)
                if plan is not None and (plan.chain.gated or self._proxies.taps):
                    plan = None
            if plan is not None:
                pod = plan.host
            else:
                source, local = SocketAddress.of(peer), SocketAddress.of(name)
                pod = local.host if listener.ends_tunnels else source.host
        except (OSError, ValueError):
            sock.close()  # the client has already disconnected
            return
        connections, clock = self._connections, self._clock
        if connections.quota.descriptors.crowded and not connections.quota.admits(pod):
            listener.overload_reject.value += 1
            sock.close()
            return
        connection_id = next(connections.ids)
        if plan is not None:
            info = plan.info(connection_id, listener, peer[1], clock)
            client = PlainSocket(sock, self._poller)
            PlannedConnection.begin(self, self._proxies, connections, info, listener, plan, client, clock)
            return
        info = StreamInfo(
            connection_id=connection_id,
            facts=ConnectionFacts(source=source, direct_source=source, destination=local),
            started=clock.monotonic(),
            started_at=clock.wall(),
            listener=listener.name,
            listener_metadata=listener.model.metadata,
            direct_local=local,
        )
        self._tasks.run(self._poller, self._serve(listener, sock, info, pod, key), f"{connection_id}")

    def go_on(self, connection: LiveConnection, client: PlainSocket, opening: Opening | None) -> None:
        """Continue a planned connection in a coroutine; see :class:`~ztunnel.proxy.envoy.path.planned.Owner`."""
        work = self._going_on(connection, client, opening)
        self._tasks.run(self._poller, work, f"{connection.info.connection_id}")

    async def _going_on(self, connection: LiveConnection, client: PlainSocket, opening: Opening | None) -> None:
        cancel = current(self._poller).cancel
        if opening is not None:
            opening.aborts_by(cancel)
        connection.aborts_by(cancel)
        assert connection.chain is not None
        try:
            await self._proxies.open_and_relay(connection, connection.chain, client, opening)
        except (Refused, OSError) as error:
            self._failed(connection, error)
        finally:
            connection.close()

    async def _serve(
        self, listener: LiveListener, sock: socket.SocketType, info: StreamInfo, pod: str, key: Key | None
    ) -> None:
        end = PlainSocket(sock, self._poller)
        cancel = current(self._poller).cancel
        connection = LiveConnection(self._connections, info, listener, self._clock, cancel, pod, end.close)
        try:
            listener = await self._filter(listener, end, info)
            if listener is not connection.owner:
                connection.move_to(listener)
            chain = self._choose_chain(connection, info)
            if key is not None:
                self._plans.learn(key, listener, chain, info)
            connection.choose(chain)
            if chain.gated:
                await self._admit(chain, info)
            if chain.manager is not None:
                # Like in Envoy, a connection manager's access loggers write one line per request, but none for the
                # connection.
                info.protocol = "HTTP/2"
                await self._tunnels.serve(connection, listener, chain, end)
            else:
                await self._proxies.carry(connection, listener, chain, end)
        except (Refused, FilterClosed, OSError) as error:
            self._failed(connection, error)
        finally:
            connection.close()

    @staticmethod
    def _failed(connection: LiveConnection, error: Refused | FilterClosed | OSError) -> None:
        """Record why a connection ended before any bytes were relayed."""
        info, listener = connection.info, connection.owner
        if isinstance(error, Refused):
            connection.refused(error)
            if isinstance(error, NoFilterChain):
                listener.no_filter_chain_match.value += 1
            elif isinstance(error, Incomplete):
                listener.network_extension_config_missing.value += 1
        elif isinstance(error, FilterClosed):
            if isinstance(error, NotArrived):
                listener.extension_config_missing.value += 1
            info.termination_details = str(error)
            info.failure = error.failure
        else:
            info.flags.add(Flag.DOWNSTREAM_TERMINATED)
            info.failure = Reason.CLIENT_GONE
            log.debug("connection %d: %s", info.connection_id, error)

    @staticmethod
    async def _admit(chain: LiveChain, info: StreamInfo) -> None:
        """Apply the chain's connection limits. A connection above a limit is closed after the configured delay."""
        try:
            chain.admit(info)
        except TooMany as error:
            await asyncio.sleep(error.delay_s)
            raise

    async def _filter(self, listener: LiveListener, end: PlainSocket, info: StreamInfo) -> LiveListener:
        """Run the listener filters. If they change the destination, hand the connection to its listener."""
        transparent = listener.model.transparent or is_transparent(end.sock)
        if listener.model.use_original_dst:
            restore(end, info, transparent=transparent)
            listener = self._listeners.hand_off(info.facts.destination, listener)
        accepted_for = info.facts.destination
        await self._run_limited(listener, end, info, transparent=transparent)
        if listener.model.use_original_dst and info.restored and info.facts.destination != accepted_for:
            # A PROXY header has changed the destination. Like in Envoy, a connection is handed off only once.
            named = self._listeners.hand_off(info.facts.destination, listener)
            if named is not listener:
                listener = named
                await self._run_limited(listener, end, info, transparent=transparent)
        return listener

    async def _run_limited(
        self, listener: LiveListener, end: PlainSocket, info: StreamInfo, *, transparent: bool
    ) -> None:
        """Run the filters of a listener within the listener's time limit.

        Raises:
            FilterClosed: a filter or the time limit ends the connection.
        """
        if not listener.reads_bytes:
            await self._run_filters(listener, end, info, transparent=transparent)
            return
        listener.pre_cx_active.stored += 1
        try:
            if listener.model.listener_filters_timeout_s:
                async with asyncio.timeout(listener.model.listener_filters_timeout_s):
                    await self._run_filters(listener, end, info, transparent=transparent)
            else:
                await self._run_filters(listener, end, info, transparent=transparent)
        except TimeoutError:
            listener.pre_cx_timeout.value += 1
            if not listener.model.continue_on_filter_timeout:
                raise FilterClosed("listener filters timed out", Reason.TIMEOUT) from None
        finally:
            listener.pre_cx_active.stored -= 1

    @staticmethod
    async def _run_filters(
        listener: LiveListener, end: PlainSocket, info: StreamInfo, *, transparent: bool
    ) -> None:
        for name, found in due(listener.filters, info):
            match found:
                case model.OriginalDst():
                    if not info.restored:
                        restore(end, info, transparent=transparent)
                case model.TlsInspector():
                    await inspect_tls(end, info)
                    listener.inspected.count(info.facts)
                case model.HttpInspector():
                    await inspect_http(end, info)
                case model.ProxyProtocol():
                    await take_proxy_header(found, end, info)
                case _:
                    annotate(found, info, name)

    @staticmethod
    def _choose_chain(connection: LiveConnection, info: StreamInfo) -> LiveChain:
        # Use the active version of the listener, which can have changed while filters waited for bytes.
        chain = connection.owner.latest.chain_for(info.facts)
        if chain is None:
            raise NoFilterChain()
        return chain

    # Start and end

    def run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run the coroutine of a connection that came from another process, until the connection ends."""
        self._tasks.run(self._poller, work, name)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """End all live connections at once, with a reason in their access lines. Idempotent."""
        self._connections.review_all(Event.STOP, STOPPED)
        await self._connections.table.reviewed()
        await self._tasks.close()
        await self._connections.emptied()  # planned connections end without a task
