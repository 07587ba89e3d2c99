"""Carries a connection to a cluster, plainly or in a tunnel: outbound, passthrough and plaintext inbound."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from hbone.aio.deadline import Deadline
from hbone.aio.end import End
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, Relay, RelayEnd, relay
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.end_state import SourceState
from hbone.errors import TunnelBroken, TunnelClosed
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.reasons import Reason, is_ordinary
from ztunnel.proxy.envoy.listeners.chains import LiveChain, LiveTcpProxy
from ztunnel.proxy.envoy.listeners.connections import LiveConnection, LiveHop
from ztunnel.proxy.envoy.listeners.handshakes import Handshakes
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.path.connect import Connector
from ztunnel.proxy.envoy.path.dial import ClusterUpstream
from ztunnel.proxy.envoy.path.downstream_tls import accept_tls
from ztunnel.proxy.envoy.path.opening import Opening
from ztunnel.proxy.envoy.stream.outcome import Refused, UpstreamFailed
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo

if TYPE_CHECKING:
    from ztunnel.proxy.tap.taps import Taps


class _WithChain(Protocol):
    """A hop that is live in this process, or was just received from another process."""

    @property
    def chain(self) -> LiveChain | None:
        """The hop's filter chain."""


class TcpProxies:
    """Carries connections of chains that end in a TCP proxy filter.

    Args:
        connector: opens upstreams.
        handshakes: schedules and limits handshakes.
        poller: this loop's poller.
        taps: taps by pod address. ``None`` if taps are not permitted.

    Attributes:
        connector, taps: see above.
    """

    def __init__(self, connector: Connector, handshakes: Handshakes, poller: Poller, taps: Taps | None) -> None:
        self.connector = connector
        self._handshakes = handshakes
        self._poller = poller
        self.taps = taps

    async def carry(
        self, connection: LiveConnection, listener: LiveListener, chain: LiveChain, end: PlainSocket
    ) -> None:
        """Carry one accepted connection from its filter chain to its end.

        Raises:
            Refused: the connection ended before bytes flowed.
        """
        downstream: End = end
        if chain.tls is not None:
            downstream = await self._secured(connection, listener, chain, end)
        connection.admit()
        await self.open_and_relay(connection, chain, downstream, None)

    async def _secured(
        self, connection: LiveConnection, listener: LiveListener, chain: LiveChain, end: PlainSocket
    ) -> End:
        """Run the client's TLS handshake. Like in Envoy, the filter's maximum connection duration includes the
        handshake.

        Raises:
            Refused: see :func:`~ztunnel.proxy.envoy.path.downstream_tls.accept_tls`, or the time is over.
        """
        handshake = accept_tls(self._handshakes, connection, listener, chain, end, self._poller)
        proxy = chain.proxy
        assert proxy is not None
        if not proxy.model.max_duration_s:
            return await handshake
        deadline = Deadline(self._poller, proxy.model.max_duration_s, self._poller.loop.time() - connection.age_s)
        try:
            with deadline:
                return await handshake
        except TimeoutError:
            if not deadline.passed:
                raise
            proxy.max_duration.value += 1
            connection.info.flags.add(Flag.DURATION_TIMEOUT)
            raise Refused("max_downstream_connection_duration", Reason.TIMEOUT) from None

    async def open_and_relay(
        self, connection: LiveConnection, chain: LiveChain, downstream: End, begun: Opening | None
    ) -> None:
        """Carry an admitted connection to its end.

        Args:
            connection: the connection.
            chain: the connection's filter chain.
            downstream: the client's end.
            begun: the first attempt, if it was begun without a coroutine.

        Raises:
            Refused: the connection ended before bytes flowed.
        """
        proxy, info = chain.proxy, connection.info
        assert proxy is not None
        capture = self.taps.of(info.source.host) if self.taps is not None else None
        # With a tap, no first bytes are sent along with a CONNECT: they bypass the relay, so the tap would miss
        # them.
        first = downstream if capture is None else None
        limit, by_duration = proxy.opening_limit_s, False
        if limit == math.inf:
            upstream = await self.connector.open(connection, proxy, first, begun)
        else:
            # If the attempt began before this coroutine, part of the time limit is already used.
            began_s = begun.began_s if begun is not None else None
            idle, longest = proxy.model.idle_timeout_s or math.inf, proxy.model.max_duration_s or math.inf
            if longest < math.inf:
                age_s = connection.age_s
                by_duration = longest - age_s <= idle
                if began_s is None and by_duration:
                    limit = longest
                    # For younger connections, a shared timer is exact enough: it can be late by 1/64 of the limit.
                    began_s = self._poller.loop.time() - age_s if age_s > longest / 64 else None
            deadline = Deadline(self._poller, limit, began_s)
            try:
                with deadline:
                    upstream = await self.connector.open(connection, proxy, first, begun)
            except TimeoutError:
                if not deadline.passed and not (begun is not None and begun.timed_out):
                    raise
                raise _too_late(info, proxy, by_duration=by_duration) from None
        try:
            client = downstream
            if capture is not None:
                from ztunnel.proxy.envoy.path.tapped import (
                    observed_client,  # imported here to save memory: most proxies have no taps
                )

                client = observed_client(capture, info, upstream, downstream)
            await self._relay(connection, proxy, client, upstream)
        finally:
            upstream.close()

    async def carry_moved(
        self, connection: LiveConnection, proxy: LiveTcpProxy, ends: tuple[End, End], running: Relay
    ) -> None:
        """Carry a connection that came from another process, with a running relay, to its end.

        Args:
            connection: the connection. Its ``upstream`` is the relay's upstream.
            proxy: the TCP proxy of the connection's filter chain.
            ends: the two ends of the relay, the client's end first.
            running: the relay.
        """
        upstream = connection.upstream
        assert upstream is not None
        try:
            await self._follow(connection, proxy, ends[0], upstream, running)
        finally:
            upstream.close()

    async def _relay(
        self,
        connection: LiveConnection,
        proxy: LiveTcpProxy,
        downstream: End,
        upstream: ClusterUpstream,
    ) -> None:
        """Relay until both directions have ended, then count the bytes of every hop."""
        counts = ByteCounts()
        hops = (connection, *upstream.hops)
        application = upstream.end
        if self.taps is not None:
            application = application_of(self.taps, hops[-1].info, upstream)
        idle_s = idle_timeout_s(proxy, upstream.hops)
        running = relay(downstream, application, counts, idle_timeout_s=idle_s)
        await self._follow(connection, proxy, downstream, upstream, running)

    async def _follow(
        self,
        connection: LiveConnection,
        proxy: LiveTcpProxy,
        downstream: End,
        upstream: ClusterUpstream,
        running: Relay,
    ) -> None:
        """Wait until a running relay has ended."""
        self.relays(connection, upstream, running)
        limit = self.limit_duration(connection, proxy, upstream, running)
        ended = None
        try:
            ended = await running
        finally:
            if limit is not None:
                limit.cancel()
            self.relayed(connection, proxy, downstream, upstream, ended)

    def limit_duration(
        self, connection: LiveConnection, proxy: LiveTcpProxy, upstream: ClusterUpstream, running: Relay
    ) -> asyncio.TimerHandle | None:
        """Abort a relay when a hop reaches the ``max_downstream_connection_duration`` of its filter.

        The time runs from the start of the hop, like in Envoy, and includes handshakes and the opening of the
        upstream.

        Returns:
            The timer, for the caller to cancel. ``None`` without a limit.
        """
        if not (proxy.model.max_duration_s or upstream.hops):
            return None  # most connections
        over_s = min(map(_over_s, _filters((connection, *upstream.hops), proxy)))
        if over_s == math.inf:
            return None
        left_s = max(0.0, over_s - connection.clock.monotonic())
        return self._poller.loop.call_later(left_s, running.abort, "max duration")

    @staticmethod
    def relays(connection: LiveConnection, upstream: ClusterUpstream, running: Relay) -> None:
        """Store a running relay in the connection table's entries of its hops."""
        counts = running.counts
        connection.relay, connection.upstream = running, upstream
        connection.opened(running.abort, finish=running.finish)
        if connection.asked is not None:
            connection.asked.opened(connection, counts)
        for inner in upstream.hops:
            inner.opened(running.abort, state=State.JOINED, finish=running.finish)
            if inner.asked is not None:
                inner.asked.opened(inner, counts)
        connection.counts = counts

    @staticmethod
    def relayed(
        connection: LiveConnection,
        proxy: LiveTcpProxy,
        downstream: End,
        upstream: ClusterUpstream,
        ended: RelayEnd | None,
    ) -> None:
        """After the end of a relay, count the bytes of every hop, and record how the relay ended.

        Args:
            connection: the connection.
            proxy: the connection's TCP proxy filter.
            downstream: the client's end.
            upstream: the relay's upstream, which the caller closes.
            ended: how the relay ended. ``None``: it was cancelled.
        """
        counts, hops = connection.counts, (connection, *upstream.hops)
        assert counts is not None
        received, sent = counts.sent, counts.received
        received_here, sent_here = counts.sent_here, counts.received_here
        for each in hops:
            each.info.bytes_received = received
            each.info.bytes_sent = sent
            if each.account is not None:
                each.account.moved_bytes += received_here + sent_here
            if each.cluster is not None:
                each.cluster.stats.cx_tx_bytes.value += received_here
                each.cluster.stats.cx_rx_bytes.value += sent_here
        proxy.rx_bytes.value += received_here
        proxy.tx_bytes.value += sent_here
        if ended is not None:
            _note_end(hops, proxy, ended, upstream)
            upstream.relayed(ended, downstream)


def idle_timeout_s(proxy: LiveTcpProxy, hops: Iterable[_WithChain]) -> float | None:
    """Return the shortest idle timeout of a connection's TCP proxy filters, or ``None`` if none has a limit.

    Args:
        proxy: the first TCP proxy.
        hops: the further hops. Hops behind internal listeners have TCP proxies, too.
    """
    shortest = proxy.model.idle_timeout_s or math.inf
    for hop in hops:
        if hop.chain is not None and hop.chain.proxy is not None:
            shortest = min(shortest, hop.chain.proxy.model.idle_timeout_s or math.inf)
    return shortest if shortest < math.inf else None


def _filters(hops: Sequence[LiveHop], proxy: LiveTcpProxy) -> Iterator[tuple[LiveHop, LiveTcpProxy]]:
    """Yield each hop that has a TCP proxy filter, with this filter. ``proxy`` is the filter of the first hop."""
    yield hops[0], proxy
    for hop in hops[1:]:
        if hop.chain is not None and hop.chain.proxy is not None:
            yield hop, hop.chain.proxy


def _over_s(each: tuple[LiveHop, LiveTcpProxy]) -> float:
    """Return the time, by the hop's clock, at which the hop reaches its maximum duration."""
    hop, proxy = each
    return hop.info.started + (proxy.model.max_duration_s or math.inf)


def _idle_s(each: tuple[LiveHop, LiveTcpProxy]) -> float:
    return each[1].model.idle_timeout_s or math.inf


def _note_end(hops: Sequence[LiveHop], proxy: LiveTcpProxy, ended: RelayEnd, upstream: ClusterUpstream) -> None:
    """Set the response flags and termination details of all hops after their relay has ended. The first hop is the
    accepted connection.
    """
    flag: Flag | None = None
    details = ""
    flagged = hops
    broken = on_purpose = False
    for each in hops:
        on_purpose = on_purpose or bool(each.reason)
    if ended.timed_out:
        _, by = min(_filters(hops, proxy), key=_idle_s)
        by.idle_timeout.value += 1
        details = "tcp_session_idle_timeout"
    elif on_purpose:
        # This proxy ended one hop on purpose, so the other hops end gracefully, as they would over the network.
        for each in hops:
            each.info.termination_details = each.reason
        return
    elif isinstance(ended.error, TunnelClosed):
        details = str(ended.error)
        if details == "max duration":
            hop, by = min(_filters(hops, proxy), key=_over_s)
            by.max_duration.value += 1
            flagged = hops[hops.index(hop) :]  # as in Envoy, hops before an internal listener have no DT
            flag, details = Flag.DURATION_TIMEOUT, "max_downstream_connection_duration"
    elif upstream.end.source is SourceState.CUT:
        # Blame the cut end, not the end that stopped first. After a half-close by the client, the client would
        # always count as first.
        lost = isinstance(ended.error, TunnelBroken) and ended.error.code is None
        flag = Flag.UPSTREAM_TERMINATED if lost else Flag.UPSTREAM_RESET
        broken = lost
    elif ended.error is not None:
        # A lost client connection sets no response flag, like a reset of plain TCP. The transport's error is the
        # reason.
        hops[0].info.downstream_failure = str(ended.error)
        broken = not is_ordinary(ended.error)
    if broken:
        hops[0].info.failure = Reason.BROKEN
    for each in hops:
        if flag is not None and each in flagged:
            each.info.flags.add(flag)
        if details:
            each.info.termination_details = details


def application_of(taps: Taps, info: StreamInfo, upstream: ClusterUpstream, tunnel: Tunnel | None = None) -> End:
    """Return the upstream end of a relay, wrapped by a tap if the destination pod is tapped."""
    from ztunnel.proxy.envoy.path.tapped import (
        observed_application,  # imported here to save memory: most proxies have no taps
    )

    return observed_application(taps, info, upstream.end, tunnel)


def _too_late(info: StreamInfo, proxy: LiveTcpProxy, *, by_duration: bool) -> UpstreamFailed:
    """Count and return the failure of an upstream that did not open in time. The flag is UF, or DT if
    ``by_duration``.
    """
    error = UpstreamFailed("", failure=Reason.TIMEOUT)
    if by_duration:
        proxy.max_duration.value += 1
        info.flags.add(Flag.DURATION_TIMEOUT)
        error.details = "max_downstream_connection_duration"
    else:
        proxy.idle_timeout.value += 1
        error.details = "tcp_session_idle_timeout"
    return error
