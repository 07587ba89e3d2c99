"""Connections of Envoy's dialect where Calico's policies are in force, too; see :mod:`ztunnel.calico.guard`.

One more list that must allow, beside the filters of the configuration, asked when the address that is dialled is
known and before it is. Without Calico's policies none of this is made, and a connection costs what it did.

=================================  ==================================================================
what is dialled                    what is judged
=================================  ==================================================================
an application, for a tunnel that  ingress of the pod that is dialled, with the peer's certificate
ends here
a tunnel                           egress of the pod that dials, with the port that CONNECT will name
anything else                      egress of the pod that dials and ingress of the pod that is dialled,
                                   whichever are known; without either, as a pod that is not known
=================================  ==================================================================

The names of a tunnel's far end are proven by its handshake only, after this: rules about the destination's account
allow nothing here.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hbone.aio.end import End
from hbone.aio.poller import Poller
from xds.model import calico as c
from xds.model.address import SocketAddress
from xds.model.cluster import TransportSocket
from ztunnel.calico.guard import Decision, Guard, connection
from ztunnel.calico.live import LivePolicies
from ztunnel.dataplane.connection_entry import Abort, cancels_current_task
from ztunnel.envoy.internal import InternalListeners
from ztunnel.envoy.listeners.chains import LiveTcpProxy
from ztunnel.envoy.outcome import POLICY_CHANGE, Denied, Hop
from ztunnel.envoy.stream_info import StreamInfo
from ztunnel.envoy.telemetry.decisions import Decisions
from ztunnel.envoy.telemetry.stats import Counter, Stats
from ztunnel.envoy.upstream.cluster import LiveCluster
from ztunnel.envoy.upstream.connect import Connector, tunnel_request, tunnels
from ztunnel.envoy.upstream.dial import ClusterUpstream, Dialler
from ztunnel.envoy.upstream.host import Host
from ztunnel.envoy.upstream.manager import ClusterManager

log = logging.getLogger(__name__)

#: Begin of ``CONNECTION_TERMINATION_DETAILS``, in the manner of Envoy's ``rbac_access_denied_matched_policy``.
_DENIED = "calico_access_denied"
#: Dynamic metadata with tier, name and rule of a decision: ``%DYNAMIC_METADATA(calico.policy:rule)%``.
METADATA = "calico.policy"

_Question = tuple[c.Direction, c.Flow]


@dataclass(slots=True, eq=False)
class _Live:
    """An open connection, the questions that let it in, and what ends it."""

    questions: tuple[_Question, ...]
    info: StreamInfo
    abort: Abort


class Enforcer:
    """Asks before a connection is opened, and again after each change."""

    def __init__(self, poller: Poller, policies: LivePolicies, decisions: Decisions) -> None:
        self._poller = poller
        self._policies = policies
        self._decisions = decisions
        self._live: dict[_Live, None] = {}
        policies.watch(self._review)

    @property
    def knows(self) -> Callable[[str], bool]:
        """See :meth:`ztunnel.calico.guard.Guard.knows`."""
        return self._policies.guard.knows

    async def open(
        self,
        info: StreamInfo,
        questions: tuple[_Question, ...],
        opening: Callable[[], Awaitable[ClusterUpstream]],
    ) -> ClusterUpstream:
        """Return what ``opening`` returns, if every question is answered by an allow.

        Raises:
            Denied: one is not.
        """
        for direction, flow in questions:
            decision = await self._policies.admit(direction, flow)
            _note(info, decision)
            if not decision.allowed:
                denied = _denied(decision)
                self._decisions.denied(info, info.facts, denied.details)
                raise denied
        # Registered before it is dialled: a change meanwhile must find it.
        live = _Live(questions, info, cancels_current_task(self._poller))
        self._live[live] = None
        try:
            # The first question may have been answered before a later one waited.
            self._judge(live)
            upstream = await opening()
        except BaseException:
            del self._live[live]
            raise
        upstream.on_close(lambda: self._live.pop(live, None))
        return upstream

    def _judge(self, live: _Live) -> None:
        for direction, flow in live.questions:
            decision = self._policies.guard.check(direction, flow, counted=False)
            if not decision.allowed:
                _note(live.info, decision)
                raise _denied(decision)

    def _review(self) -> Iterator[None]:
        for live in list(self._live):
            try:
                self._judge(live)
            except Denied as denied:
                if self._live.pop(live, live) is None:  # it was there, and is ended once
                    info = live.info
                    log.info("connection %s->%s closed: %s", info.source, info.upstream_host, denied.details)
                    info.termination_details = f"{POLICY_CHANGE}: {denied.details}"
                    self._decisions.denied(info, info.facts, info.termination_details)
                    live.abort(info.termination_details)
            yield


def _note(info: StreamInfo, decision: Decision) -> None:
    """Put the rule that decided in the connection's metadata."""
    told = {name.removeprefix("policy."): value for name, value in decision.fields}
    if decision.staged:
        told["dry_run"] = decision.staged
    # A copy: the tunnels of one connection share its facts, and each has a line of its own.
    info.facts = replace(info.facts, metadata={**info.facts.metadata, METADATA: told})


def _denied(decision: Decision) -> Denied:
    return Denied(f"{_DENIED}[{decision.verdict.message.removeprefix('denied by ')}]")


class InboundDialler(Dialler):
    """Opens connections to the applications behind tunnels that end here."""

    def __init__(self, poller: Poller, enforcer: Enforcer) -> None:
        super().__init__(poller)
        self._enforcer = enforcer

    async def dial(
        self,
        info: StreamInfo,
        cluster: LiveCluster,
        host: Host,
        address: SocketAddress,
        transport: TransportSocket,
    ) -> ClusterUpstream:
        """See :meth:`Dialler.dial`.

        Raises:
            Denied: the pod's ingress policies do not allow it.
        """
        own = info.tls.local_uri_sans if info.tls is not None else ()
        dial = super().dial
        return await self._enforcer.open(
            info, _at_its_end(info, address, own), lambda: dial(info, cluster, host, address, transport)
        )


class GuardedConnector(Connector):
    """Opens what TCP proxies are configured to."""

    def __init__(
        self,
        enforcer: Enforcer,
        clusters: ClusterManager,
        dialler: Dialler,
        internal: InternalListeners,
        poller: Poller,
        rng: random.Random,
        *,
        keep_client_address: bool,
        early_data: bool,
    ) -> None:
        super().__init__(
            clusters,
            dialler,
            internal,
            poller,
            rng,
            keep_client_address=keep_client_address,
            early_data=early_data,
        )
        self._enforcer = enforcer

    async def _attempt(
        self, hop: Hop, proxy: LiveTcpProxy, cluster: LiveCluster, host: Host, client: End | None
    ) -> ClusterUpstream:
        attempt = super()._attempt
        address = host.endpoint.address
        if not isinstance(address, SocketAddress):
            return await attempt(hop, proxy, cluster, host, client)  # it has no address yet, or never has one
        info = hop.info
        info.upstream_host = str(address)
        questions = _where_it_begins(info, proxy, address, self._enforcer.knows)
        return await self._enforcer.open(info, questions, lambda: attempt(hop, proxy, cluster, host, client))


def told(
    guard: Guard, info: StreamInfo, proxy: LiveTcpProxy | None, address: SocketAddress, own: Sequence[str]
) -> dict[str, Any]:
    """Return what an explanation says of Calico's policies; nothing is counted.

    Args:
        guard: has the policies.
        info: the connection.
        proxy: that opens it; ``None`` at the end of a tunnel.
        address: of the next socket.
        own: the identities that the end of a tunnel shows.
    """
    asked = (
        _at_its_end(info, address, own) if proxy is None else _where_it_begins(info, proxy, address, guard.knows)
    )
    lines = []
    for direction, flow in asked:
        decision = guard.check(direction, flow, counted=False)
        verdict = decision.verdict
        if not decision.allowed:
            lines.append(f"{direction}: {verdict.message}")
            answer = {"calico": {"allowed": False, "lines": lines}}
            return {**answer, "verdict": f"closed: {_denied(decision).details}"}
        lines.append(f"{direction}: allowed by {verdict.rule or 'no rule: none is asked'}")
    return {"calico": {"allowed": True, "lines": lines}}


def _at_its_end(info: StreamInfo, address: SocketAddress, own: Sequence[str]) -> tuple[_Question, ...]:
    peer, principal = info.facts.peer, ""
    if peer is not None:
        # Not empty without an identity: that would be plain text, for which addresses may be enough.
        principal = str(peer.identity) if peer.identity is not None else ",".join(peer.names) or "no identity"
    return ((c.Direction.INGRESS, connection(info.source, address, principal, own[0] if own else "")),)


def _where_it_begins(
    info: StreamInfo, proxy: LiveTcpProxy, address: SocketAddress, knows: Callable[[str], bool]
) -> tuple[_Question, ...]:
    if tunnels(proxy, info):
        authority, _ = tunnel_request(proxy, info)
        port = authority.rpartition(":")[2]
        there = SocketAddress(address.host, int(port)) if port.isascii() and port.isdigit() else address
        return ((c.Direction.EGRESS, connection(info.source, there, _own(info), "")),)
    flow = connection(info.source, address, "", "")
    found = []
    if knows(info.source.host) or not knows(address.host):
        found.append((c.Direction.EGRESS, flow))
    if knows(address.host):
        found.append((c.Direction.INGRESS, flow))
    return tuple(found)


def _own(info: StreamInfo) -> str:
    """Return the identity of the pod that dials, as far as TLS has shown one on its side: normally it has not."""
    peer = info.facts.peer
    return str(peer.identity) if peer is not None and peer.identity is not None else ""


class CountedDecisions(MutableMapping[tuple[str, str, str], int]):
    """Decisions by tier, policy and result, each of which is a counter of the statistics."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._counters: dict[tuple[str, str, str], Counter] = {}

    def __getitem__(self, key: tuple[str, str, str]) -> int:
        return self._counters[key].value

    def __setitem__(self, key: tuple[str, str, str], value: int) -> None:
        found = self._counters.get(key)
        if found is None:
            labels = tuple(zip(("tier", "policy", "result"), key, strict=True))
            scope = self._stats.scope(f"policy.{'.'.join(key)}", family="policy", labels=labels)
            found = self._counters[key] = scope.counter("decisions")
        found.value = value

    def __delitem__(self, key: tuple[str, str, str]) -> None:
        del self._counters[key]

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        return iter(self._counters)

    def __len__(self) -> int:
        return len(self._counters)
