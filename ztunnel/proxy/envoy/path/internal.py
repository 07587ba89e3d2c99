"""Connects hops within this process: through internal listeners, and by tunnels between two pods of this node."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from hbone.aio.poller import Poller
from hbone.errors import TunnelBroken
from xds.model.address import InternalAddress, SocketAddress
from xds.model.facts import ConnectionFacts
from xds.model.http import HttpConnectionManager
from xds.model.listener import HttpInspector, TlsInspector
from ztunnel.proxy.dataplane.apart import run_apart
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.live_table import Abort, cancels_current_task
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.listeners.chains import LiveChain, LiveConnectionManager, LiveTcpProxy
from ztunnel.proxy.envoy.listeners.connections import Connections, InnerHop, LiveHop
from ztunnel.proxy.envoy.listeners.filters import FilterClosed, NotArrived, annotate, due
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.listeners.table import ListenerTable
from ztunnel.proxy.envoy.path.dial import ClusterUpstream
from ztunnel.proxy.envoy.path.terminate import RequestRefused, Terminator
from ztunnel.proxy.envoy.secrets.contexts import LiveContext, agree, verified_client
from ztunnel.proxy.envoy.secrets.names import peer_names
from ztunnel.proxy.envoy.stream.outcome import POLICY_CHANGE, NoFilterChain, Refused, UpstreamFailed
from ztunnel.proxy.envoy.stream.request_headers import traceparent
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo, TlsFacts, UpstreamOptions
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.tasks import Tasks

_CLIENT_ADDRESS = "envoy://internal_client_address/"
_MOST_LOCAL: Final = 16384


class Entry(NamedTuple):
    """A connection that an internal listener has accepted. Closing ``hop`` counts and logs the connection's
    end.
    """

    hop: LiveHop
    proxy: LiveTcpProxy


@dataclass(slots=True)
class InternalListeners:
    """Opens hops within this process.

    Args:
        listeners: the table of listeners.
        connections: the table that every hop is registered in.
        terminator: terminates node-local tunnels.
        clock: the clock of start times.
        poller: this loop's poller.
        tasks: run the inbound halves of node-local tunnels.
        shortcut_ports: destination ports of tunnels that return to this proxy, and the listening port where they
            arrive (15008, and 15088 by the node's NAT rule). Empty disables node-local tunnels.
    """

    listeners: ListenerTable
    connections: Connections
    terminator: Terminator
    clock: Clock
    poller: Poller
    tasks: Tasks
    shortcut_ports: Mapping[int, int] = field(default_factory=dict)
    #: A cache of the results of :meth:`leads_here`, valid for one version of the listener table.
    _local: dict[SocketAddress, bool] = field(default_factory=dict)
    _version: int = -1

    def enter(
        self,
        address: InternalAddress,
        outer: StreamInfo,
        metadata: Mapping[str, Mapping[str, Any]],
        shared: tuple[tuple[str, bool], ...],
        abort: Abort,
        *,
        keep_options: bool,
    ) -> Entry | None:
        """Open a connection to an internal listener. Return ``None`` if the listener or a matching filter chain
        does not exist.

        Args:
            address: the endpoint.
            outer: the hop that connects.
            metadata: the metadata passed on by the endpoint's transport socket.
            shared: the filter state passed on by the transport socket; see ``ConnectionFacts.shared_state``.
            abort: ends the new hop until its upstream is open.
            keep_options: whether to keep the client's address, which Envoy's internal connections lose.
        """
        facts = facts_behind(outer.facts, metadata, shared)
        listener = self.listeners.internal(address.listener)
        if listener is None:
            return None
        info = StreamInfo(
            connection_id=next(self.connections.ids),
            facts=facts,
            started=self.clock.monotonic(),
            started_at=self.clock.wall(),
            listener=listener.name,
            listener_metadata=listener.model.metadata,
            direct_local=address,
            remote_text=_CLIENT_ADDRESS,
            options=outer.options if keep_options else UpstreamOptions(),
        )
        outer.behind = info
        hop = InnerHop(self.connections.hops, info, listener, self.clock, abort)
        try:
            if listener.filters:
                for name, found in due(listener.filters, info):
                    annotate(found, info, name)
        except FilterClosed as error:
            listener.extension_config_missing.value += isinstance(error, NotArrived)
            info.termination_details = str(error)
            info.failure = error.failure
            hop.close()
            return None
        chain = listener.chain_for(facts)
        if chain is None:
            listener.no_filter_chain_match.value += 1
            hop.refused(NoFilterChain())
            hop.close()
            return None
        if chain.proxy is None or not chain.takes_internal:
            info.failure = Reason.NO_ROUTE
            hop.close()
            return None
        hop.chain = chain
        info.chain = chain.name
        info.chain_metadata = chain.model.metadata
        hop.filter_sinks = chain.sinks
        try:
            if chain.gated:
                chain.admit(info)
            hop.require()
        except Refused as error:
            hop.refused(error)
            hop.close()
            return None
        hop.state = State.DIALING
        if chain.filter_state:
            chain.set_filter_state(info)
        return Entry(hop, chain.proxy)

    def leads_here(self, address: SocketAddress) -> bool:
        """Return whether a tunnel to an address leads to a pod of this node."""
        if self._version != self.listeners.version or len(self._local) >= _MOST_LOCAL:
            self._local.clear()
            self._version = self.listeners.version
        known = self._local.get(address)
        if known is None:
            known = self._local[address] = self._far_end(address) is not None
        return known

    def _far_end(self, address: SocketAddress) -> LiveListener | None:
        port = self.shortcut_ports.get(address.port)
        listener = self.listeners.listening_on(port) if port is not None else None
        return listener if listener is not None and listener.model.serves(address.host) else None

    async def shortcut(
        self,
        hop: LiveHop,
        client: LiveContext | None,
        address: SocketAddress,
        authority: str,
        headers: list[tuple[str, str]],
    ) -> ClusterUpstream | None:
        """Open a tunnel within this process, if its far end is a pod of this node.

        Both certificates are checked as in a handshake: the client's certificate by the inbound chain's TLS
        context, and the server's certificate by the client's TLS context. Then the inbound chain's policies and
        request handling run unchanged.

        Returns:
            The connection to the application, or ``None`` if the tunnel must go over the network.

        Raises:
            UpstreamFailed: the inbound side refuses.
        """
        listener, port = self._far_end(address), self.shortcut_ports.get(address.port)
        if listener is None or port is None or client is None:
            return None
        outer = hop.info
        source = SocketAddress(outer.options.source or outer.source.host, outer.source.port)
        facts = ConnectionFacts(
            source=source,
            direct_source=source,
            destination=SocketAddress(address.host, port),
            transport_protocol="tls",
            application_protocols=("h2",),
        )
        chain = listener.chain_for(facts)
        if chain is None or not isinstance(chain.model.terminal, HttpConnectionManager) or chain.tls is None:
            return None
        if not agree(client, chain.tls, datetime.fromtimestamp(self.clock.wall(), UTC)):
            return None  # over the network, the handshake fails with the right alert and counters
        facts.secured = True
        if client.presented.leaf is not None:
            facts.peer = peer_names(client.presented.leaf, client.local_uri_sans)
        info = self._inbound_info(listener, chain, facts, authority, headers)
        try:
            for name, found in due(listener.filters, info):
                if not isinstance(found, TlsInspector | HttpInspector):  # their results are already known
                    annotate(found, info, name)
        except FilterClosed:
            return None  # over the network, the connection is refused
        outer.behind = info
        joining = self._join(info, listener, chain, client)
        try:
            return await run_apart(self.tasks, self.poller, joining, f"{info.connection_id} joined", _discard)
        except TunnelBroken as error:
            raise UpstreamFailed(f"tunnel failed: {error}", failure=Reason.HTTP2) from error

    def _inbound_info(
        self,
        listener: LiveListener,
        chain: LiveChain,
        facts: ConnectionFacts,
        authority: str,
        headers: list[tuple[str, str]],
    ) -> StreamInfo:
        return StreamInfo(
            connection_id=next(self.connections.ids),
            facts=facts,
            started=self.clock.monotonic(),
            started_at=self.clock.wall(),
            listener=listener.name,
            listener_metadata=listener.model.metadata,
            direct_local=facts.destination,
            restored=True,
            chain=chain.name,
            chain_metadata=chain.model.metadata,
            protocol="HTTP/2",
            method="CONNECT",
            authority=authority,
            request_headers=tuple(headers),
            trace=traceparent(headers),
            manager=chain.manager.model if chain.manager is not None else None,
        )

    async def _join(
        self, info: StreamInfo, listener: LiveListener, chain: LiveChain, client: LiveContext
    ) -> ClusterUpstream:
        """Open the inbound half of a node-local tunnel, in its own fiber.

        Raises:
            UpstreamFailed: the request was refused. The error contains the answer that a client on the network
                would get.
            TunnelBroken: something other than a policy ended the inbound half while it dialled the application.
        """
        manager = chain.manager
        assert manager is not None
        assert chain.tls is not None
        info.tls = TlsFacts(
            version="in-process",
            peer_chain=tuple(verified_client(client, chain.tls)),
            peer_uri_sans=client.local_uri_sans,
            local_uri_sans=chain.tls.local_uri_sans,
        )
        listener.node_local.value += 1
        judges_ports = self.terminator.rules.judge_ports
        abort = cancels_current_task(self.poller)
        hop = LiveHop(self.connections.hops, info, listener, self.clock, abort, port_known=not judges_ports)
        hop.chain = chain
        hop.filter_sinks = chain.sinks
        hop.addons, hop.account = self.connections.addons, self.connections.account
        try:
            return await self._open_joined(hop, chain, manager)
        except BaseException:
            hop.close()
            raise

    async def _open_joined(
        self, hop: LiveHop, chain: LiveChain, manager: LiveConnectionManager
    ) -> ClusterUpstream:
        info = hop.info
        try:
            chain.admit(info)
            hop.require()
        except Refused as error:
            hop.refused(error)
            raise UpstreamFailed("connection_termination", failure=Reason.HTTP2) from error
        manager.rq_total.value += 1
        manager.rq_active.stored += 1
        hop.own(manager.request_ended)
        try:
            _, upstream = await self.terminator.open(hop, chain)
        except RequestRefused as refusal:
            info.response_code = refusal.answer.status
            info.response_details = refusal.answer.details
            info.failure = info.failure or refusal.answer.failure
            status = refusal.answer.status
            raise UpstreamFailed(f"tunnel_response:{status}", status=status) from refusal
        except asyncio.CancelledError as error:
            info.response_details = hop.reason
            if hop.reason.startswith(POLICY_CHANGE):
                info.response_code = 403
                raise UpstreamFailed("tunnel_response:403", status=403) from error
            raise
        info.response_code = 200
        info.response_details = "via_upstream"
        manager.rq_by_class[2].value += 1
        hop.state = State.JOINED
        upstream.hops = (*upstream.hops, hop)
        upstream.on_close(hop.close)
        return upstream


def facts_behind(
    outer: ConnectionFacts, metadata: Mapping[str, Mapping[str, Any]], shared: tuple[tuple[str, bool], ...]
) -> ConnectionFacts:
    """Return the facts about a connection that an internal listener has accepted.

    Args:
        outer: the facts about the hop that connects to the listener.
        metadata: the metadata passed on by the endpoint's transport socket.
        shared: the filter state passed on by the transport socket; see ``ConnectionFacts.shared_state``.
    """
    return ConnectionFacts(
        source=outer.source,
        direct_source=outer.direct_source,
        destination=outer.destination,
        metadata=dict(metadata),
        filter_state={key: outer.filter_state[key] for key, _ in shared},
        shared_state=tuple([entry for entry in shared if entry[1]]),
    )


def _discard(upstream: ClusterUpstream) -> None:
    upstream.close()
