"""Everything that is alive in this proxy: accepted connections, and the hops behind and on them.

Each is a life of the process's table (:mod:`ztunnel.proxy.dataplane.lives`). Drains, policies and revocation lists
reach them by reviews; pages iterate over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hbone.aio.relay import ByteCounts
from ztunnel.proxy.dataplane.life import ALLOWED, Event, Verdict
from ztunnel.proxy.dataplane.lives import (
    Abort,
    Life,
    Lives,
    LiveTable,
)
from ztunnel.proxy.envoy.stream.outcome import POLICY_CHANGE, Denied, Refused
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo

if TYPE_CHECKING:
    from xds.model.address import SocketAddress
    from ztunnel.proxy.envoy.listeners.chains import LiveChain
    from ztunnel.proxy.envoy.listeners.listener import LiveListener

#: The reason of a connection whose listener has no chain for it any more.
NOT_SERVED = "connection closed: its destination is no longer served"
#: The reason of a connection whose peer is on a revocation list now.
REVOKED = "connection closed: peer certificate revoked by CRL"


class LiveHop(Life):
    """One hop: an accepted connection, one behind an internal listener, or the inbound half of a joined tunnel.

    Args:
        group: where it is registered.
        info: what is known of it.
        owner: the listener that counts it.
        abort: see :class:`~ztunnel.proxy.dataplane.lives.Life`.
        port_known: its destination port is the application's. Before a tunnel's request it is not, and filters
            that read the port are asked with :attr:`application`.

    Attributes:
        owner: not always the version of the listener that is active now.
        chain: its filter chain; ``None`` until one is chosen.
        application: the application that a tunnel's request names, once that is known.
        also: further judges: those of Calico's policies.
    """

    __slots__ = ("also", "application", "chain", "info", "owner", "port_known")

    def __init__(
        self,
        group: Lives[Any],
        info: StreamInfo,
        owner: LiveListener,
        abort: Abort | None = None,
        *,
        port_known: bool = True,
    ) -> None:
        super().__init__(group, abort)
        self.info = info
        self.owner = owner
        self.port_known = port_known
        self.chain: LiveChain | None = None
        self.application: SocketAddress | None = None
        self.also: tuple[Callable[[], Verdict], ...] = ()

    def judge(self) -> Verdict:
        """See :meth:`ztunnel.proxy.dataplane.lives.Life.judge`: by the chain that would be chosen for it now."""
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
        """Check it by the listener's active version, which need not be the one that its chain was chosen from.

        A peer that was revoked since its handshake is refused, too.

        Args:
            live: it was allowed before, and is judged again.

        Raises:
            Refused: it is not allowed, or not served any more.
        """
        chain = self.current_chain()
        tls = self.info.tls
        if tls is not None and chain.tls is not None and chain.tls.has_revoked(tls.peer_chain):
            raise Refused(REVOKED)
        chain.judge(self.info, port_known=self.port_known, live=live)
        if self.application is not None:
            chain.judge_port(self.info, self.application, live=live)

    def current_chain(self) -> LiveChain:
        """Return the chain that would be chosen for it now.

        Raises:
            Refused: there is none any more.
        """
        latest = self.owner.latest
        if latest is self.owner and self.chain is not None:
            return self.chain
        chain = latest.chain_for(self.info.facts)
        if chain is None:
            raise Refused(NOT_SERVED)
        return chain

    def close(self) -> None:
        """See :meth:`ztunnel.proxy.dataplane.lives.Life.close`."""
        self.also = ()
        if self.reason and not self.info.termination_details:
            self.info.termination_details = self.reason
        super().close()


class LiveRequest(LiveHop):
    """A request of a tunnel connection: the filters that can be asked without it have judged the connection."""

    __slots__ = ()

    def require(self, *, live: bool = False) -> None:
        """See :meth:`LiveHop.require`."""
        if self.application is not None:
            self.current_chain().judge_port(self.info, self.application, live=live)


class LiveConnection(LiveHop):
    """One accepted connection.

    Attributes:
        id: unique in the process.
        counts: bytes moved so far, while bytes are relayed.
        inner: the hops behind internal listeners, outermost first.
    """

    __slots__ = ("counts", "id", "inner")

    def __init__(self, group: Lives[Any], info: StreamInfo, owner: LiveListener, abort: Abort | None) -> None:
        super().__init__(group, info, owner, abort)
        self.id = info.connection_id
        self.counts: ByteCounts | None = None
        self.inner: Sequence[StreamInfo] = ()


class Connections(Lives[LiveConnection]):
    """The accepted connections, oldest first, and the counter of ids.

    Attributes:
        table: everything alive in this process.
        hops: hops that are no accepted connection: requests, hops behind internal listeners, joined halves.
    """

    __slots__ = ("_numbers", "hops", "table")

    def __init__(self) -> None:
        self.table = LiveTable()
        # In the order in which a review visits them: what a tunnel connection carries has a reason of its own.
        self.hops: Lives[LiveHop] = Lives(self.table)
        super().__init__(self.table)
        self._numbers = itertools.count(1)

    def next_id(self) -> int:
        """Return a number that no other connection has."""
        return next(self._numbers)

    def review_all(
        self, event: Event, reason: str = "", *, concerned: Callable[[LiveHop], bool] | None = None
    ) -> None:
        """Do for each hop and connection what the table says of an event; see :meth:`Lives.review`."""
        self.hops.review(event, reason, concerned=concerned)
        self.review(event, reason, concerned=concerned)
