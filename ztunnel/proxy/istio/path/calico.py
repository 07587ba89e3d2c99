"""Enforces Calico's policies on a pod's connections; see :mod:`ztunnel.policy.calico.guard`.

Calico's tiers are evaluated first, then the policies of the mesh; both must allow a connection. Without Calico's
policies these objects are not created, and connections have no extra cost.

================  ===============================================  =========================================
direction         the other end                                    identities
================  ===============================================  =========================================
inbound           the client's address, the application's port     the peer's certificate; this pod's own
outbound          the chosen endpoint, with the application's      this pod's own; the identities accepted from
                  port, or the address of a waypoint or gateway    the tunnel's far end, none without a tunnel
                  in between
================  ===============================================  =========================================
"""

from __future__ import annotations

import logging
from typing import assert_never

from hbone.aio.requests import Request
from xds.model import calico as c
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from xds.model.workload import Workload
from ztunnel.policy.calico.guard import Decision, connection
from ztunnel.policy.calico.live import LivePolicies
from ztunnel.proxy.dataplane.life_table import Event, Verdict
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.istio.accounting.access_record import Record
from ztunnel.proxy.istio.accounting.outcome import POLICY_CHANGE, REJECTED, Failed
from ztunnel.proxy.istio.path import socks5
from ztunnel.proxy.istio.path.authorizer import POLICY_GRACE_S, Authorizer, Denied
from ztunnel.proxy.istio.path.denial_log import DenialLog
from ztunnel.proxy.istio.path.inbound import Inbound
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.outbound import Outbound, OutboundUpstream, PodCall
from ztunnel.proxy.istio.path.planned_request import PlannedRequest
from ztunnel.proxy.istio.path.plans import Plan
from ztunnel.proxy.istio.path.pod_connection import PodConnection
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.pod_tunnels import PodTunnels
from ztunnel.proxy.istio.path.request_plans import Peer
from ztunnel.proxy.istio.path.route import Direct, DoubleTunnel, Route, Tunnel

log = logging.getLogger(__name__)


class CalicoAuthorizer(Authorizer):
    """Evaluates Calico's policies before the mesh's policies."""

    def __init__(self, node: Node, policies: LivePolicies) -> None:
        super().__init__(node)
        self._calico = policies

    async def authorize(
        self, workload: Workload, facts: ConnectionFacts, record: Record, grace_s: float = POLICY_GRACE_S
    ) -> None:
        flow = _inbound_flow(workload, facts)
        self._require(await self._calico.admit(c.Direction.INGRESS, flow), workload, facts, record)
        await super().authorize(workload, facts, record, grace_s)
        # Check Calico's policies again. They can have changed while the connection waited until a policy of the
        # mesh had arrived, and a change of policies is applied only to connections that are already accepted.
        decision = self._calico.guard.check(c.Direction.INGRESS, flow, counted=False)
        self._require(decision, workload, facts, record)

    def _require(self, decision: Decision, workload: Workload, facts: ConnectionFacts, record: Record) -> None:
        """Record the results of staged policies in the record, and raise an error if the connection is not
        allowed.

        Raises:
            Denied: the connection is not allowed.
        """
        record.dry_run = decision.staged or record.dry_run
        if not decision.allowed:
            self.lines.write("denied", workload, facts, *_policy_and_rule(decision))
            raise Denied(decision.verdict.message, decision.fields)

    def verdict(self, workload: Workload, facts: ConnectionFacts) -> Verdict:
        flow = _inbound_flow(workload, facts)
        decision = self._calico.guard.check(c.Direction.INGRESS, flow, counted=False)
        if not decision.allowed:
            self.lines.write("ended", workload, facts, *_policy_and_rule(decision))
            return Verdict(POLICY_CHANGE)
        return super().verdict(workload, facts)


class CalicoInbound(Inbound):
    """Inbound connections of one pod, checked again after each change of Calico's policies until :meth:`close`."""

    def __init__(self, pod: PodContext, policies: LivePolicies) -> None:
        super().__init__(pod, CalicoAuthorizer(pod.node, policies))
        self._calico = policies
        policies.watch(self._policies_changed)

    def take(self, peer: Peer, request: Request) -> PlannedRequest | None:
        return None  # Calico's policies can require waiting, and evaluate more than a plan contains

    def _policies_changed(self) -> None:
        self._pod.connections.inbound.review(Event.POLICIES)

    def close(self) -> None:
        self._calico.unwatch(self._policies_changed)
        super().close()


class CalicoOutbound(Outbound):
    """Outbound connections of one pod, checked when their endpoint is chosen, and again after each change until
    :meth:`close`.
    """

    def __init__(
        self, pod: PodContext, tunnels: PodTunnels, resolve: socks5.Resolve, policies: LivePolicies
    ) -> None:
        super().__init__(pod, tunnels, resolve)
        self._calico = policies
        self._lines = DenialLog(pod.node)
        policies.watch(self._policies_changed)

    def plan(self, source: SocketAddress, destination: SocketAddress) -> Plan | None:
        return None  # Calico's policies can require waiting, and evaluate more than a plan contains

    async def _dial(self, call: PodCall, route: Route, target: SocketAddress) -> OutboundUpstream:
        flow = _outbound_flow(call, route, target, self._calico.http_waypoints)
        decision = await self._calico.admit(c.Direction.EGRESS, flow)
        call.entry.record.dry_run = decision.staged
        call.entry.record.http_left = decision.left
        if not decision.allowed:
            source = call.entry.record.source
            facts = ConnectionFacts(source=source, direct_source=source, destination=target)
            self._lines.write("denied", route.workload, facts, *_policy_and_rule(decision))
            raise Failed(f"{REJECTED}: {decision.verdict.message}", Reason.POLICY, fields=decision.fields)
        call.entry.flow = flow
        return await super()._dial(call, route, target)

    def verdict(self, entry: PodConnection) -> Verdict:
        """Check an open connection again. Calico's policies evaluate its flow to the endpoint that was dialled
        last.
        """
        if entry.flow is not None:
            decision = self._calico.guard.check(c.Direction.EGRESS, entry.flow, counted=False)
            if not decision.allowed:
                record = entry.record
                log.info(
                    "connection %s->%s closed because it's no longer allowed after a policy update: %s",
                    record.source,
                    record.destination,
                    decision.verdict.message,
                )
                return Verdict(POLICY_CHANGE)
        return super().verdict(entry)

    def _policies_changed(self) -> None:
        self._pod.connections.outbound.review(Event.POLICIES)

    def close(self) -> None:
        self._calico.unwatch(self._policies_changed)
        super().close()


def _policy_and_rule(decision: Decision) -> tuple[str, str]:
    """Return ``TIER|POLICY`` and the deciding rule, for the log line about a denial."""
    fields = {name.removeprefix("policy."): value for name, value in decision.fields}
    policy = "|".join(filter(None, (fields.get("tier"), fields.get("name"))))
    return policy, fields.get("rule") or decision.verdict.message


def _inbound_flow(workload: Workload, facts: ConnectionFacts) -> c.Flow:
    peer = facts.peer
    principal = ""
    if peer is not None:
        # A tunnel's principal is never empty, even without an identity. An empty principal means plain text, which
        # a rule can allow by address alone.
        principal = str(peer.identity) if peer.identity is not None else ",".join(peer.names) or "no identity"
    return connection(facts.source, facts.destination, principal, str(workload.identity))


def _outbound_flow(call: PodCall, route: Route, target: SocketAddress, http_waypoints: frozenset[str]) -> c.Flow:
    own = str(call.labels.workload.identity)
    match route:
        case Direct():
            return connection(call.entry.record.source, target, own, "")
        case Tunnel() | DoubleTunnel():
            port = int(route.authority.rpartition(":")[2])
            there = SocketAddress(target.host, port)
            identity = route.workload.identity
            # The tunnel's handshake proves this identity, so no other workload can pose as the waypoint.
            waypoint = f"{identity.namespace}/{identity.service_account}"
            judging = isinstance(route, Tunnel) and route.waypoint and waypoint in http_waypoints
            return connection(
                call.entry.record.source,
                there,
                own,
                str(identity),
                requests_left_to=f"waypoint {waypoint}" if judging else "",
            )
        case _:
            assert_never(route)
