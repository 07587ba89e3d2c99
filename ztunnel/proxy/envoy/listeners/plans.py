"""Plans: decisions that are the same for all accepted connections from one client address to one destination.

A plan has the results of the listener filters, the listener that the connection is handed to, and the filter
chain. They depend only on the listeners and on addresses. So every change of the listeners drops all plans, and a
new filter configuration from ECDS drops the plans made with the earlier configuration. The decisions about the
first connection to a destination are stored as a plan for later connections. Policies, limits, hosts and
certificates change independently, so they are looked up for each connection.

If the decisions depend on more than addresses, no plan is made, for example with filters that wait for bytes, or
with matchers of client ports.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from hbone.events import Header
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from ztunnel.proxy.envoy.listeners.chains import LiveChain
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.listeners.table import ListenerTable
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo, UpstreamOptions
from ztunnel.runtime.clock import Clock

#: The largest number of plans in a process.
_MOST: Final = 16384
#: The key of a plan: the accepting listener, the client's host, the socket's local address, and the address that
#: the client dialled.
Key = tuple[LiveListener, str, tuple[str, int], tuple[str, int]]


class TunnelRequest(NamedTuple):
    """The CONNECT request that opens a tunnel.

    Attributes:
        authority: the request's authority.
        headers: the headers other than pseudo-headers.
        fields: all fields of the request.
        block: the encoded fields.
        trace: the request's ``traceparent``, or an empty text.
    """

    authority: str
    headers: list[tuple[str, str]]
    fields: tuple[Header, ...]
    block: bytes
    trace: str


class Plan:
    """The values shared by the connections of one client address to one destination.

    Attributes:
        listener: the listener that carries the connection. It is possible that a different listener accepted it.
        chain: the filter chain of the connection.
        local: the local address of the accepted socket.
        destination, restored, options, metadata: the facts that the listener filters have determined.
        filters, own_filters: the filters of ``listener`` and of the accepting listener when the plan was made.
        request: the request for a tunnel, if it is equal for all these connections; see
            :meth:`~ztunnel.proxy.envoy.path.connect.Connector.begin`.
    """

    __slots__ = (
        "chain",
        "destination",
        "filters",
        "host",
        "listener",
        "local",
        "metadata",
        "options",
        "own_filters",
        "request",
        "restored",
    )

    def __init__(
        self, accepting: LiveListener, listener: LiveListener, chain: LiveChain, info: StreamInfo
    ) -> None:
        assert isinstance(info.direct_local, SocketAddress)
        facts = info.facts
        self.listener = listener
        self.chain = chain
        self.host = facts.source.host
        self.local = info.direct_local
        self.destination = facts.destination
        self.restored = info.restored
        self.options: UpstreamOptions = info.options
        self.metadata: Mapping[str, Mapping[str, Any]] = dict(facts.metadata)
        self.request: TunnelRequest | None = None
        self.filters, self.own_filters = listener.filters, accepting.filters

    def info(self, connection_id: int, accepting: LiveListener, port: int, clock: Clock) -> StreamInfo:
        """Return the facts about a connection that has this plan, with the results of the listener filters.

        Args:
            connection_id: unique in this process.
            accepting: the accepting listener.
            port: the client's port.
            clock: the clock for the start time.
        """
        source = SocketAddress(self.host, port)
        return StreamInfo(
            connection_id=connection_id,
            facts=ConnectionFacts(
                source=source, direct_source=source, destination=self.destination, metadata=dict(self.metadata)
            ),
            started=clock.monotonic(),
            started_at=clock.wall(),
            listener=accepting.name,
            listener_metadata=accepting.model.metadata,
            direct_local=self.local,
            restored=self.restored,
            options=self.options,
        )


class Plans:
    """All plans of a process, by their keys.

    Args:
        listeners: the active listeners.
    """

    def __init__(self, listeners: ListenerTable) -> None:
        self._listeners = listeners
        self._version = -1
        self._made: dict[Key, Plan] = {}

    def plan(self, key: Key) -> Plan | None:
        """Return the plan with this key, or ``None`` if there is no valid plan."""
        if self._version != self._listeners.version:
            self._made.clear()
            return None
        found = self._made.get(key)
        # ECDS has replaced the filters of a listener since the plan was made.
        if found is None or found.own_filters is not key[0].filters or found.filters is not found.listener.filters:
            return None
        return found

    def learn(self, key: Key, listener: LiveListener, chain: LiveChain, info: StreamInfo) -> None:
        """Store the decisions about a connection as a plan, unless they depend on more than the plan's key.

        Args:
            key: the connection's key.
            listener: the listener that the connection was handed to.
            chain: the chosen chain.
            info: the connection, after the listener filters.
        """
        facts, accepting = info.facts, key[0]
        if (
            accepting.reads_bytes
            or listener.reads_bytes
            or not listener.model.chosen_by_addresses
            or chain.proxy is None
            or chain.tls is not None
            or facts.filter_state
            or facts.shared_state
            or facts.source is not facts.direct_source
        ):
            return
        if self._version != self._listeners.version or len(self._made) >= _MOST:
            self._made.clear()
            self._version = self._listeners.version
        self._made[key] = Plan(accepting, listener, chain, info)
