"""Writes access log lines for inbound connections that are denied before their handshake is complete."""

from __future__ import annotations

import logging

from xds.model.address import SocketAddress
from ztunnel.policy.ledger import Use
from ztunnel.proxy.dataplane.handshake_limiter import PendingHandshake
from ztunnel.proxy.dataplane.reasons import Reason, Stage
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.outcome import EarlyDeny
from ztunnel.proxy.istio.path.node import Node
from ztunnel.runtime.line_limit import LineLimit

log = logging.getLogger(__name__)


def _denials_left_out(count: int) -> None:
    log.warning("connections denied before their handshake have no line left_out=%d", count)


class EarlyDenials:
    """Writes access log lines for connections denied before their handshake, at a rate limited per pod.

    The limit is needed because any host can open any number of such connections.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.limit = LineLimit(node.clock, _denials_left_out)

    def write(self, source: SocketAddress, local: SocketAddress, denial: EarlyDeny) -> None:
        """Count a denied connection, and write its access log line if the rate limit permits."""
        node = self._node
        if self.limit.admits():
            Record(node, Direction.INBOUND, source, local).denied_early(denial)
        else:
            node.metrics.ledger.early.note(str(Direction.INBOUND), Use.REFUSED_EARLY, node.clock.wall())
            node.metrics.failed(Direction.INBOUND.reporter, Stage.EARLY, denial.reason)


def account_rejected(denials: EarlyDenials, pending: PendingHandshake, reason: str) -> None:
    """Count and log a connection that ended before its handshake began, or whose handshake took too long."""
    if not pending.in_handshake:  # during the handshake, its fiber closes the owner
        pending.owner.close()
    if reason:
        try:
            source, local = SocketAddress.of(pending.peer), SocketAddress.of(pending.sock.getsockname())
        except OSError:
            return
        denials.write(source, local, handshake_error(reason))


def handshake_error(reason: object) -> EarlyDeny:
    """Return the denial of a connection whose TLS handshake failed."""
    return EarlyDeny(f"tls handshake error: {reason}", Reason.TLS)
