"""Connections that never leave the process: internal listeners, and tunnels between two pods of this node."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from xds.model.address import InternalAddress, SocketAddress
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.http import HttpConnectionManager
from ztunnel.envoy.connections import Connections
from ztunnel.envoy.listeners.chains import LiveChain, LiveTcpProxy
from ztunnel.envoy.listeners.filters import annotate
from ztunnel.envoy.listeners.listener import LiveListener
from ztunnel.envoy.listeners.table import ListenerTable
from ztunnel.envoy.outcome import Hop, Refused, UpstreamFailed
from ztunnel.envoy.secrets.contexts import LiveContext, agree
from ztunnel.envoy.stream_info import StreamInfo, TlsFacts, UpstreamOptions
from ztunnel.envoy.terminate import RequestRefused, Terminator
from ztunnel.envoy.upstream.dial import ClusterUpstream
from ztunnel.runtime.clock import Clock

_CLIENT_ADDRESS = "envoy://internal_client_address/"


@dataclass(slots=True)
class Entry:
    """A connection that entered an internal listener."""

    hop: Hop
    proxy: LiveTcpProxy
    close: Callable[[], None]


@dataclass(slots=True)
class InternalListeners:
    """Hops inside the process.

    Args:
        listeners: by name and by port.
        connections: gives connection ids.
        terminator: the tunnels' end, for the short cut.
        clock: for start times.
        shortcut_ports: destination ports of tunnels that come back to this very proxy, and the listener port
            they come back to (15008, and 15088 by the NAT rule of the node). Empty switches the short cut off.
    """

    listeners: ListenerTable
    connections: Connections
    terminator: Terminator
    clock: Clock
    shortcut_ports: Mapping[int, int] = field(default_factory=dict)

    def enter(
        self,
        address: InternalAddress,
        outer: StreamInfo,
        metadata: Mapping[str, Mapping[str, Any]],
        shared: tuple[tuple[str, bool], ...],
        *,
        keep_options: bool,
    ) -> Entry | None:
        """Open a connection to an internal listener; ``None`` when there is none, or no chain takes it.

        Args:
            address: the endpoint.
            outer: the hop that connects.
            metadata: what its transport socket passes on.
            shared: the filter state that it passes on, see ``ConnectionFacts.shared_state``.
            keep_options: keep the client's address, which Envoy's internal connections lose.
        """
        listener = self.listeners.internal(address.listener)
        if listener is None:
            return None
        facts = ConnectionFacts(
            source=outer.facts.source,
            direct_source=outer.facts.direct_source,
            destination=outer.facts.destination,
            metadata=dict(metadata),
            filter_state={key: outer.facts.filter_state[key] for key, _ in shared},
            shared_state=tuple([entry for entry in shared if entry[1]]),
        )
        info = StreamInfo(
            connection_id=self.connections.next_id(),
            facts=facts,
            started=self.clock.monotonic(),
            started_at=self.clock.wall(),
            listener=listener.name,
            listener_metadata=listener.model.metadata,
            direct_local=address,
            remote_text=_CLIENT_ADDRESS,
            options=outer.options if keep_options else UpstreamOptions(),
        )
        hop = Hop(info, self.clock, listener_sinks=listener.sinks)
        listener.opened()
        for _, filter_ in listener.filters:
            if filter_ is not None:
                annotate(filter_, info)
        chain = listener.chain_for(facts)
        if chain is None or chain.proxy is None or chain.tls is not None:
            listener.no_filter_chain_match.value += chain is None
            listener.closed()
            hop.finish()
            return None
        info.chain = chain.name
        info.chain_metadata = chain.model.metadata
        hop.filter_sinks = chain.sinks
        try:
            chain.admit(info)
            chain.judge(info)
        except Refused as error:
            hop.refused(error)
            listener.closed()
            hop.finish()
            return None
        chain.set_filter_state(info)
        return Entry(hop, chain.proxy, listener.closed)

    async def shortcut(
        self,
        hop: Hop,
        client: LiveContext | None,
        address: SocketAddress,
        authority: str,
        headers: list[tuple[str, str]],
    ) -> ClusterUpstream | None:
        """Join a tunnel to a pod of this node in-process, if its far end is one.

        Both certificates are checked as in a handshake: the client's by the inbound chain's context, the
        server's by the client's. Then the inbound chain's policy and its request handling run unchanged.

        Returns:
            The connection to the application, or ``None`` when the tunnel must go over the wire.

        Raises:
            UpstreamFailed: the inbound side refuses.
        """
        port = self.shortcut_ports.get(address.port)
        if port is None or client is None:
            return None
        listener = self.listeners.listening_on(port)
        if listener is None or not listener.model.serves(address.host):
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
            return None  # the wire refuses it with the right alert and counters
        facts.peer = PeerCertificate(uri_sans=client.local_uri_sans)
        inbound = self._inbound_hop(listener, chain, facts, authority, headers)
        inbound.info.options = listener.options_for(inbound.info)
        return await self._join(inbound, listener, chain, client)

    def _inbound_hop(
        self,
        listener: LiveListener,
        chain: LiveChain,
        facts: ConnectionFacts,
        authority: str,
        headers: list[tuple[str, str]],
    ) -> Hop:
        info = StreamInfo(
            connection_id=self.connections.next_id(),
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
            manager=chain.manager.model if chain.manager is not None else None,
        )
        return Hop(info, self.clock, listener_sinks=(), filter_sinks=chain.sinks)

    async def _join(
        self, hop: Hop, listener: LiveListener, chain: LiveChain, client: LiveContext
    ) -> ClusterUpstream:
        manager, info = chain.manager, hop.info
        assert manager is not None
        assert chain.tls is not None
        info.tls = TlsFacts(
            version="in-process",
            peer_uri_sans=client.local_uri_sans,
            local_uri_sans=chain.tls.local_uri_sans,
        )
        listener.node_local.value += 1
        try:
            chain.admit(info)
            chain.judge(info, port_known=not self.terminator.judges_ports)
        except Refused as error:
            hop.refused(error)
            hop.finish()
            raise UpstreamFailed("connection_termination") from error
        manager.rq_total.value += 1
        manager.rq_active.stored += 1
        try:
            _, upstream = await self.terminator.open(hop, chain)
        except RequestRefused as refusal:
            manager.rq_active.stored -= 1
            info.response_code = refusal.answer.status
            info.response_details = refusal.answer.details
            hop.finish()
            status = refusal.answer.status
            raise UpstreamFailed(f"tunnel_response:{status}", status=status) from refusal
        except BaseException:
            manager.rq_active.stored -= 1
            hop.finish()
            raise
        info.response_code = 200
        info.response_details = "via_upstream"
        manager.rq_by_class[2].value += 1

        def closed() -> None:
            manager.rq_active.stored -= 1

        upstream.hops.append(hop)
        upstream.on_close(closed)
        return upstream
