"""The open connections of this proxy: accepted connections, their requests and further hops.

Each connection, request or hop is an entry of the process's connection table
(:mod:`ztunnel.proxy.dataplane.live_table`). When a listener drains, or a policy or revocation list changes, all
entries are checked, and connections that are no longer allowed end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hbone.aio.connection import Connection
from hbone.aio.relay import ByteCounts, Relay
from ztunnel.proxy.dataplane.life_table import ALLOWED, Event, State, Verdict
from ztunnel.proxy.dataplane.live_table import Abort, Life, Lives, LiveTable
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.stream.ends import hops_of
from ztunnel.proxy.envoy.stream.outcome import (
    NOT_SERVED,
    POLICY_CHANGE,
    REVOKED,
    Denied,
    Refused,
    UpstreamFailed,
    reason_of_end,
)
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.telemetry.access_log import Sink, write_all
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.descriptors import Descriptors

if TYPE_CHECKING:
    from hbone.aio.connection import Connection
    from xds.model.address import SocketAddress
    from ztunnel.proxy.addons.host import Asked
    from ztunnel.proxy.dataplane.upstream import Upstream
    from ztunnel.proxy.envoy.listeners.chains import LiveChain
    from ztunnel.proxy.envoy.listeners.listener import LiveListener
    from ztunnel.proxy.envoy.upstream.cluster import LiveCluster
    from ztunnel.proxy.envoy.upstream.host import Host


class HopAddons(Protocol):
    """The interface to the addons of this process. :class:`ztunnel.proxy.envoy.path.addons.StreamAddons`
    implements it.
    """

    async def connecting(
        self, hop: LiveHop, host: Host, *, tunnelled: bool
    ) -> tuple[frozenset[tuple[str, str]], ...] | None:
        """Ask the addons for a verdict on a connection whose upstream host is chosen."""

    async def accepting(self, hop: LiveHop, application: SocketAddress | None) -> None:
        """Ask the addons for a verdict on a connection to an application of this node."""

    def rehosted(self, hop: LiveHop, host: Host, *, tunnelled: bool) -> None:
        """Store the facts about a host chosen for another attempt. Later hooks get these facts."""

    def explained(self, info: StreamInfo, host: Host, inbound: bool) -> dict[str, Any]:
        """Return the addons' predicted verdicts on a connection."""

    def ended(self, hop: LiveHop) -> None:
        """Inform the addons that a hop has ended."""


class HopAccount(Protocol):
    """Counts ended connections. :class:`ztunnel.proxy.envoy.path.account.Account` implements this.

    Attributes:
        moved_bytes: bytes moved by the relays that have ended.
    """

    moved_bytes: int

    def ended(self, hop: LiveHop) -> None:
        """Count the end of a connection."""

    def first_request(self, connection: Connection, trace: str) -> None:
        """Store the trace of a tunnel connection's first request as the exemplar of its handshake duration."""


class LiveHop(Life):
    """One hop: an accepted connection, a connection behind an internal listener, or the inbound half of a
    node-local tunnel.

    The hop's access lines are written once, when it closes.

    Args:
        group: the group to register in.
        info: the facts about the hop.
        owner: the listener that counts the hop.
        clock: measures the duration.
        abort: see :class:`~ztunnel.proxy.dataplane.live_table.Life`.
        port_known: whether the destination port is the application's port. If not, as in a tunnel, filters that
            read the port use :attr:`application`.

    Attributes:
        owner: the listener that accepted the hop, in its version at the time.
        chain: the filter chain, once it is chosen.
        cluster: the upstream cluster, once it is chosen.
        filter_sinks: loggers of the TCP proxy or connection manager. They come before ``listener_sinks``.
        application: the application named by a tunnel's request, once it is known.
        also: further checks of the hop, for example by Calico's policies.
        addons: the addons to inform of the hop's end. ``None``: no addons are loaded, or another hop informs them.
        account: counts the connection's end. ``None``: another hop counts it.
        asked: the addons' verdicts. ``None`` if no addon was asked.
        relay: the relay that copies the bytes. ``None`` until it runs, and always ``None`` for inner hops.
        upstream: the relay's upstream, which holds the hops behind this one.
        moved: whether the hop continues in another process, which then writes its access lines and counts its end.
    """

    __slots__ = (
        "account",
        "addons",
        "also",
        "application",
        "asked",
        "chain",
        "clock",
        "cluster",
        "filter_sinks",
        "info",
        "listener_sinks",
        "moved",
        "owner",
        "port_known",
        "relay",
        "upstream",
    )

    def __init__(
        self,
        group: Lives[Any],
        info: StreamInfo,
        owner: LiveListener,
        clock: Clock,
        abort: Abort | None = None,
        *,
        port_known: bool = True,
    ) -> None:
        super().__init__(group, abort)
        self.info = info
        self.owner = owner
        self.clock = clock
        self.port_known = port_known
        self.chain: LiveChain | None = None
        self.cluster: LiveCluster | None = None
        self.filter_sinks: Sequence[Sink] = ()
        self.listener_sinks: Sequence[Sink] = ()
        self.application: SocketAddress | None = None
        self.also: tuple[Callable[[], Verdict], ...] = ()
        self.addons: HopAddons | None = None
        self.account: HopAccount | None = None
        self.asked: Asked | None = None
        self.relay: Relay | None = None
        self.upstream: Upstream[LiveHop] | None = None
        self.moved = False

    @property
    def age_s(self) -> float:
        """The age of the hop. It includes the time in earlier processes."""
        return self.clock.monotonic() - self.info.started

    def judge(self) -> Verdict:
        """Check whether the filter chain that matches the hop now still allows it."""
        try:
            self.require(live=True)
        except Denied as error:
            return Verdict(f"{POLICY_CHANGE}: {error.details}")
        except Refused as error:
            return Verdict(error.details)
        for judge in self.also:
            verdict = judge()
            if verdict.reason:
                return verdict
        return ALLOWED

    def require(self, *, live: bool = False) -> None:
        """Check the hop against the listener's active version, because the hop's own filter chain can belong to an
        older version.

        A peer whose certificate was revoked since its handshake is refused, too.

        Args:
            live: whether the hop was allowed before and is checked again.

        Raises:
            Refused: the hop is not allowed, or no filter chain matches it any more.
        """
        chain = self.current_chain()
        tls = self.info.tls
        if tls is not None and chain.tls is not None and chain.tls.has_revoked(tls.peer_chain):
            raise Refused(REVOKED, Reason.REVOKED)
        if chain.rbac:
            chain.judge(self.info, port_known=self.port_known, live=live)
            if self.application is not None and chain.reads_port:
                chain.judge_port(self.info, self.application, live=live)

    def require_port(self, application: SocketAddress) -> None:
        """Store the application named by a tunnel's request, and run the filters that read the application's port.

        Raises:
            Refused: the hop is not allowed, or no filter chain matches it any more.
        """
        self.application = application
        chain = self.current_chain()
        if chain.reads_port:
            chain.judge_port(self.info, application)

    def current_chain(self) -> LiveChain:
        """Return the filter chain that now matches the hop.

        Raises:
            Refused: no chain matches any more.
        """
        owner = self.owner
        if owner.successor is None and self.chain is not None:
            return self.chain
        chain = owner.latest.chain_for(self.info.facts)
        if chain is None:
            raise Refused(NOT_SERVED, Reason.NO_ROUTE)
        return chain

    def refused(self, error: Refused) -> None:
        """Record why the hop ends although no bytes were relayed yet."""
        info = self.info
        if error.flag is not None:
            info.flags.add(error.flag)
        if error.details:
            info.termination_details = error.details
        if error.response_details:
            info.response_details = error.response_details
        if isinstance(error, UpstreamFailed):
            info.upstream_failure = error.reason
        info.failure = error.failure
        if isinstance(error, Denied):
            info.policy = error.policy

    def close(self) -> None:
        """Release the hop's resources, then write its access lines. Idempotent."""
        if self.state is State.CLOSED:
            return
        info = self.info
        self.also = ()
        if self.reason:
            info.termination_details = info.termination_details or self.reason
            info.failure = info.failure or reason_of_end(self.reason)
        for release in info.held:
            release()
        try:
            super().close()
        finally:
            self.relay = self.upstream = None
            info.duration_s = self.clock.monotonic() - info.started
            if not self.moved:
                if self.addons is not None:
                    self.addons.ended(self)
                if self.account is not None:
                    self.account.ended(self)
                write_all((*self.filter_sinks, *self.listener_sinks), info)


class InnerHop(LiveHop):
    """A hop behind an internal listener. The listener counts it.

    Args:
        came: whether the hop came from another process, which has counted it as new.
    """

    __slots__ = ()

    def __init__(
        self,
        group: Lives[Any],
        info: StreamInfo,
        owner: LiveListener,
        clock: Clock,
        abort: Abort | None,
        *,
        came: bool = False,
    ) -> None:
        super().__init__(group, info, owner, clock, abort)
        self.listener_sinks = owner.sinks
        owner.opened(moved=came)

    def close(self) -> None:
        if self.state is State.CLOSED:
            return
        try:
            super().close()
        finally:
            self.owner.closed(moved=self.moved)


class LiveRequest(LiveHop):
    """A request of a tunnel connection, counted by the connection manager of the connection's filter chain.

    Filters that do not read the port have already checked the connection.

    Args:
        chain: the filter chain of the request's connection.
        account: see :class:`LiveHop`.
        carried: the open requests of the same connection. The request is in this table until it closes.
        came: whether the request came from another process, which has counted it as new.
    """

    __slots__ = ("_carried", "manager")

    def __init__(
        self,
        group: Lives[Any],
        info: StreamInfo,
        owner: LiveListener,
        clock: Clock,
        abort: Abort | None,
        chain: LiveChain,
        account: HopAccount | None,
        carried: dict[LiveRequest, None],
        *,
        came: bool = False,
    ) -> None:
        super().__init__(group, info, owner, clock, abort)
        assert chain.manager is not None
        self.manager = chain.manager
        self.chain = chain
        self.filter_sinks = chain.sinks
        self.account = account
        self._carried = carried
        carried[self] = None
        self.manager.rq_total.value += not came
        self.manager.rq_active.stored += 1

    def require(self, *, live: bool = False) -> None:
        if self.application is not None:
            self.current_chain().judge_port(self.info, self.application, live=live)

    def close(self) -> None:
        if self.state is State.CLOSED:
            return
        info, manager = self.info, self.manager
        self._carried.pop(self, None)
        try:
            super().close()
        finally:
            manager.rq_active.stored -= 1
            if not self.moved:
                code = info.response_code
                if code:
                    manager.rq_by_class[2 if code < 300 else 5 if code >= 500 else code // 100].value += 1
                manager.rq_time.record((info.duration_s or 0.0) * 1000)


class LiveConnection(LiveHop):
    """One accepted connection. It counts for its listener and its pod as long as it is open.

    Args:
        pod: the address of the connection's pod: the client, or for incoming tunnels the destination.
        release: closes the accepted socket.
        came: whether the connection came from another process, which has counted it as new.

    Attributes:
        id: unique in the process.
        counts: the bytes relayed so far, while the relay runs.
        tunnels: the HTTP/2 connection, once it serves requests. ``None`` if the filter chain terminates no
            tunnels.
    """

    __slots__ = ("_addons", "_pod", "_quota", "counts", "id", "tunnels")

    def __init__(
        self,
        group: Connections,
        info: StreamInfo,
        owner: LiveListener,
        clock: Clock,
        abort: Abort | None,
        pod: str,
        release: Callable[[], object],
        *,
        came: bool = False,
    ) -> None:
        self._pod = pod
        self._addons = group.addons
        self._quota = group.quota
        self._quota.enter(pod)
        super().__init__(group, info, owner, clock, abort)
        self.own(release)
        self.id = info.connection_id
        self.counts: ByteCounts | None = None
        self.account = group.account
        self.tunnels: Connection | None = None
        self.listener_sinks = owner.sinks
        owner.opened(moved=came)

    @property
    def pod(self) -> str:
        """The address of the pod that the connection belongs to."""
        return self._pod

    @property
    def inner(self) -> Sequence[StreamInfo]:
        """The hops behind internal listeners, outermost first."""
        return hops_of(self.info)[1:]

    def choose(self, chain: LiveChain) -> None:
        """Store the filter chain that was chosen for the connection."""
        info = self.info
        self.chain = chain
        info.chain = chain.name
        info.chain_metadata = chain.model.metadata
        self.state = State.FILTERED
        if chain.manager is None:
            self.filter_sinks = chain.sinks
            self.addons = self._addons

    def admit(self) -> None:
        """Check a connection whose chain ends in a TCP proxy filter, and count it for this filter.

        Raises:
            Refused: the connection is not allowed.
        """
        self.require()
        self.state = State.DIALING
        chain = self.chain
        assert chain is not None
        assert chain.proxy is not None
        if chain.filter_state:
            chain.set_filter_state(self.info)
        chain.proxy.cx_total.value += 1

    def move_to(self, listener: LiveListener) -> None:
        """Hand the connection to another listener, which counts and logs the connection from now on."""
        self.owner.closed()
        self.owner = listener
        listener.opened()
        self.listener_sinks = listener.sinks
        self.info.listener = listener.name
        self.info.listener_metadata = listener.model.metadata

    def close(self) -> None:
        if self.state is State.CLOSED:
            return
        self._quota.leave(self._pod)
        self.tunnels = None
        try:
            super().close()
        finally:
            self.owner.closed(moved=self.moved)
            if not self.moved:
                self.owner.cx_length.record((self.info.duration_s or 0.0) * 1000)


class PodQuota:
    """Limits accepted connections per pod when the process runs short of file descriptors.

    In an Istio mesh, each pod has its own accept queue, where new connections of a pod over its limit wait. A
    listener of Envoy's dialect accepts for all pods of the node, so it closes these connections and serves the
    other pods.

    Args:
        descriptors: the process's descriptors. Unless they are ``crowded``, every connection is admitted.
    """

    def __init__(self, descriptors: Descriptors) -> None:
        self.descriptors = descriptors
        self._used: dict[str, int] = {}

    def admits(self, pod: str) -> bool:
        """Return whether one more connection of a pod can be served. False while the pod's share is used up."""
        descriptors = self.descriptors
        return not descriptors.crowded or not descriptors.has_most(self._used.get(pod, 0), len(self._used))

    def enter(self, pod: str) -> None:
        """Count a connection."""
        self._used[pod] = self._used.get(pod, 0) + 1

    def leave(self, pod: str) -> None:
        """Remove a connection of a pod from the count; the opposite of :meth:`enter`."""
        left = self._used[pod] - 1
        if left:
            self._used[pod] = left
        else:
            del self._used[pod]


class Connections(Lives[LiveConnection]):
    """The table of accepted connections, oldest first, which also assigns ids to new connections.

    Args:
        quota: counts connections by pod.

    Attributes:
        ids: yields the ids of new connections, unique in this process.
        table: all live connections of this process.
        hops: open hops that are not accepted connections: requests, hops behind internal listeners, inbound
            halves of node-local tunnels.
        addons: this process's addons, if any.
        account: counts connections when they end.
    """

    __slots__ = ("account", "addons", "hops", "ids", "quota", "table")

    def __init__(self, quota: PodQuota) -> None:
        self.quota = quota
        self.addons: HopAddons | None = None
        self.account: HopAccount | None = None
        self.table = LiveTable()
        # A review checks hops before the tunnel connections that carry them, because ending a connection also ends
        # its streams.
        self.hops: Lives[LiveHop] = Lives(self.table)
        super().__init__(self.table)
        self.ids: Iterator[int] = itertools.count(1)

    def review_all(
        self, event: Event, reason: str = "", *, concerned: Callable[[LiveHop], bool] | None = None
    ) -> None:
        """Apply the table's action for an event to each hop and connection; see :meth:`Lives.review`."""
        self.hops.review(event, reason, concerned=concerned)
        self.review(event, reason, concerned=concerned)
