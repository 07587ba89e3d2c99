"""The state of a hop's attempt to reach a host, for attempts that begin without a coroutine."""

from __future__ import annotations

from typing import NamedTuple

from hbone.aio.tunnel import Tunnel
from ztunnel.proxy.dataplane.live_table import Abort
from ztunnel.proxy.envoy.listeners.chains import LiveTcpProxy
from ztunnel.proxy.envoy.listeners.connections import LiveHop
from ztunnel.proxy.envoy.path.dial import CountedConnection
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, LiveTransport
from ztunnel.proxy.envoy.upstream.host import Host


class Choice(NamedTuple):
    """A host chosen for an attempt, and its transport socket."""

    cluster: LiveCluster
    host: Host
    transport: LiveTransport


class Opening:
    """A hop's attempt that was begun without a coroutine; see
    :meth:`ztunnel.proxy.envoy.path.connect.Connector.begin`.

    Attributes:
        hop, proxy, cluster, host, transport, tunnelled: the hop, its filter, and the first choices for this hop.
        inner: the attempt of the next hop, behind an internal listener.
        counted: the connection to the internal listener.
        tunnel: the requested tunnel. Only the last hop has one.
        requested: whether this hop, or the last hop behind this hop, has requested a tunnel.
        error: why the attempt has failed. ``None`` if a coroutine can still make the attempt.
        began_s: when the filter's own time limit began, by the loop's clock. ``None``: the filter has no time
            limit, or it begins with the coroutine that continues.
        timed_out: whether the filter's time limit has passed.
    """

    __slots__ = (
        "began_s",
        "client",
        "cluster",
        "counted",
        "error",
        "header",
        "hop",
        "host",
        "inner",
        "proxy",
        "requested",
        "timed_out",
        "transport",
        "tunnel",
        "tunnelled",
    )

    def __init__(self, hop: LiveHop, proxy: LiveTcpProxy, choice: Choice, tunnelled: bool) -> None:
        self.hop = hop
        self.proxy = proxy
        self.cluster, self.host, self.transport = choice
        self.tunnelled = tunnelled
        self.inner: Opening | None = None
        self.counted: CountedConnection | None = None
        self.header = b""
        self.tunnel: Tunnel | None = None
        self.requested = False
        self.error: BaseException | None = None
        self.began_s: float | None = None
        self.timed_out = False

    @property
    def last(self) -> Opening:
        """The attempt of the last hop, behind all internal listeners."""
        return self if self.inner is None else self.inner.last

    def take_error(self) -> BaseException:
        """Return the error and clear the attribute, because the error's traceback and this object form a reference
        cycle.
        """
        error, self.error = self.error, None
        assert error is not None
        return error

    def aborts_by(self, abort: Abort) -> None:
        """Make ``abort`` the function that ends the hops behind internal listeners."""
        inner = self.inner
        while inner is not None:
            inner.hop.aborts_by(abort)
            inner = inner.inner
