"""Enforces Calico's policies on connections of Envoy's dialect; see :mod:`ztunnel.policy.calico.guard`.

Calico's policies must allow a connection in addition to the configuration's filters. They are evaluated
when the address to dial is known, before dialling. Without Calico's policies these objects are not created, and
connections have no extra cost.

=================================  ==================================================================
target                             evaluated policies
=================================  ==================================================================
an application, for a tunnel that  ingress of the dialled pod, with the peer's certificate
ends here
a tunnel                           egress of the dialling pod, with the port in the CONNECT
any other address                  egress of the dialling pod and ingress of the dialled pod, for pods that
                                   are known. If neither pod is known, rules for an unknown pod
=================================  ==================================================================

The identity at the far end of a tunnel is proven only by the later handshake, so rules about the destination's
service account never allow a connection here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from xds.model import calico as c
from xds.model.address import SocketAddress
from ztunnel.policy.calico.guard import Decision, Guard, connection
from ztunnel.policy.calico.live import LivePolicies
from ztunnel.proxy.dataplane.life_table import ALLOWED, Event, Verdict
from ztunnel.proxy.envoy.listeners.chains import LiveTcpProxy
from ztunnel.proxy.envoy.listeners.connections import Connections, LiveHop
from ztunnel.proxy.envoy.path.connect import tunnels
from ztunnel.proxy.envoy.path.tunnel_request import tunnel_request
from ztunnel.proxy.envoy.stream.outcome import POLICY_CHANGE, Denied
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.telemetry.decisions import Decisions
from ztunnel.proxy.envoy.upstream.host import Host

log = logging.getLogger(__name__)

#: Prefix of ``CONNECTION_TERMINATION_DETAILS``, modelled on Envoy's ``rbac_access_denied_matched_policy``.
_DENIED = "calico_access_denied"
#: Dynamic metadata with tier, name and rule of a decision: ``%DYNAMIC_METADATA(calico.policy:rule)%``.
METADATA = "calico.policy"

_Question = tuple[c.Direction, c.Flow]


class Enforcer:
    """Checks Calico's policies before a connection is opened, and checks every open connection again after each
    change.
    """

    def __init__(self, policies: LivePolicies, decisions: Decisions, connections: Connections) -> None:
        self._policies = policies
        self._decisions = decisions
        policies.watch(partial(connections.review_all, Event.POLICIES))

    async def admit_application(self, hop: LiveHop, address: SocketAddress) -> None:
        """Check whether Calico's policies allow a terminated tunnel to its application; see :meth:`_admit`."""
        own = hop.info.tls.local_uri_sans if hop.info.tls is not None else ()
        await self._admit(hop, _at_its_end(hop.info, address, own))

    async def admit_host(self, hop: LiveHop, proxy: LiveTcpProxy, host: Host) -> None:
        """Check whether Calico's policies allow a connection to the host that a TCP proxy has chosen; see
        :meth:`_admit`.
        """
        address = host.endpoint.address
        if isinstance(address, SocketAddress):  # other kinds of hosts have no IP address, or none yet
            await self._admit(hop, _where_it_begins(hop.info, proxy, address, self._policies.guard.knows))

    async def _admit(self, hop: LiveHop, questions: tuple[_Question, ...]) -> None:
        """Check each flow in ``questions`` against the policies, and store ``questions`` for later reviews of the
        hop.

        A later attempt replaces the stored questions.

        Raises:
            Denied: a flow is denied.
        """
        info = hop.info
        for direction, flow in questions:
            decision = await self._policies.admit(direction, flow)
            _note(info, decision)
            if not decision.allowed:
                denied = _denied(decision)
                self._decisions.denied(info, info.facts, denied.details)
                raise denied
        hop.also = (partial(self._verdict, questions, info),)
        # Check all flows again, because policies can have changed during the ``await`` for a later flow.
        denial = self._denial(questions, info)
        if denial is not None:
            raise denial

    @property
    def in_sync(self) -> bool:
        """Whether Calico's policies have been received completely."""
        return self._policies.source.in_sync

    def watch(self, hop: LiveHop, host: Host) -> None:
        """Register a hop taken over from another process for policy checks of its current host, at once and after
        each policy change.

        Raises:
            Refused: the current configuration does not determine which flow the policies must check.
        """
        info, address = hop.info, host.endpoint.address
        chain = hop.chain
        assert chain is not None
        if not isinstance(address, SocketAddress):
            return
        if chain.proxy is not None:
            questions = _where_it_begins(info, chain.proxy, address, self._policies.guard.knows)
        else:
            own = info.tls.local_uri_sans if info.tls is not None else ()
            questions = _at_its_end(info, address, own)
        hop.also = (partial(self._verdict, questions, info),)

    def _denial(self, questions: tuple[_Question, ...], info: StreamInfo) -> Denied | None:
        for direction, flow in questions:
            decision = self._policies.guard.check(direction, flow, counted=False)
            if not decision.allowed:
                _note(info, decision)
                return _denied(decision)
        return None

    def _verdict(self, questions: tuple[_Question, ...], info: StreamInfo) -> Verdict:
        denial = self._denial(questions, info)
        if denial is None:
            return ALLOWED
        log.info("connection %s->%s closed: %s", info.source, info.upstream_host, denial.details)
        verdict = Verdict(f"{POLICY_CHANGE}: {denial.details}")
        self._decisions.denied(info, info.facts, verdict.reason)
        return verdict


def _note(info: StreamInfo, decision: Decision) -> None:
    """Write the deciding rule to the connection's dynamic metadata."""
    told = {name.removeprefix("policy."): value for name, value in decision.fields}
    if decision.staged:
        told["dry_run"] = decision.staged
    # Change a copy of the facts, because all tunnels of a connection share one facts object, and each tunnel has
    # its own log line.
    info.facts = replace(info.facts, metadata={**info.facts.metadata, METADATA: told})


def _denied(decision: Decision) -> Denied:
    return Denied(f"{_DENIED}[{decision.verdict.message.removeprefix('denied by ')}]")


def explained(
    guard: Guard, info: StreamInfo, proxy: LiveTcpProxy | None, address: SocketAddress, own: Sequence[str]
) -> dict[str, Any]:
    """Return what Calico's policies decide about a connection, for an explanation. No counter changes.

    Args:
        guard: evaluates the policies.
        info: the connection.
        proxy: the TCP proxy that opens the connection. ``None`` at the end of a tunnel.
        address: the next socket's address.
        own: the identities that the tunnel's end presents.
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
        # A tunnel never gets an empty principal, not even if it has no identity. An empty principal means plain
        # text, which a rule can allow by address alone.
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
    """Return the identity of the dialling pod if its connection used TLS (unusual), otherwise empty."""
    peer = info.facts.peer
    return str(peer.identity) if peer is not None and peer.identity is not None else ""
