"""Collects the live page's content in Envoy's dialect. :mod:`ztunnel.proxy.ui` limits its size and serves it.

Envoy's statistics count by cluster and listener, not by pair of workloads. So this module counts flows, from open
and ended connections, while a client has the page open. A workload is identified by its address, and named by the
identity that its certificate proves.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from xds.model.policy import Verdict
from ztunnel import __version__
from ztunnel.policy.ledger import PolicyUse, Tally
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.admin.certs import certificates_shown
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.proxy.envoy.config.state import State
from ztunnel.proxy.envoy.listeners.connections import LiveConnection
from ztunnel.proxy.envoy.stream.ends import hops_of, last_host, proven, service_of
from ztunnel.proxy.envoy.stream.outcome import POLICY_CHANGE
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.telemetry.decisions import NONE_MATCHED, DeniedBy
from ztunnel.proxy.ui.seen import (
    Certificate,
    Connection,
    Denied,
    Facts,
    Flow,
    Policy,
    Refusal,
    Security,
    Seen,
    Source,
    Workload,
)

#: The number of connections read before other tasks can run: about a millisecond of work.
_SLICE: Final = 200
#: The page lists at most this many connections, those with the most bytes. The view shortens the list further.
_MOST_CONNECTIONS: Final = 200
#: The number of workload pairs with their own counts. All further pairs share one entry.
_MOST_FLOWS: Final = 2_000
_OTHERS: Final = "others"
#: Termination details begin with one of these prefixes if a policy denied the connection; see LiveRbac and
#: :mod:`ztunnel.proxy.envoy.path.calico`.
_POLICY_DENIED: Final = ("rbac_access_denied", "calico_access_denied", POLICY_CHANGE)


class _Ends(NamedTuple):
    """The values that the page groups its counts by: the two workloads of a connection, and others."""

    source: str
    destination: str
    service: str
    service_namespace: str
    reporter: str
    security: Security


class _Counts:
    """The totals of the ended connections between one pair of workloads."""

    __slots__ = ("denied", "failed", "opened", "received", "refused", "sent")

    def __init__(self) -> None:
        self.opened = self.failed = self.denied = self.refused = self.sent = self.received = 0


class Traffic:
    """Counts ended connections by pair of workloads, from :meth:`begin` to :meth:`end`. Both methods are
    idempotent.
    """

    def __init__(self, proxy: InspectedProxy) -> None:
        self._proxy = proxy
        self.since_s = 0.0
        self.counts: dict[_Ends, _Counts] = {}
        self.identities: dict[str, str] = {}
        self._denied_before: dict[DeniedBy, int] = {}

    def begin(self) -> None:
        """Start to count."""
        self.since_s = self._proxy.clock.wall()
        self._denied_before = {denial.pair: denial.times for denial in self._proxy.decisions.ledger.denials}
        self._proxy.connections.on_close = self._ended

    def end(self) -> None:
        """Stop counting connections, and clear the counts."""
        self._proxy.connections.on_close = None
        self.counts, self.identities, self.since_s, self._denied_before = {}, {}, 0.0, {}

    def _ended(self, connection: LiveConnection) -> None:
        info = connection.info
        counts = self.at(self.ends(connection))
        counts.opened += 1
        counts.failed += bool(info.flags) or bool(info.termination_details)
        counts.denied += info.termination_details.startswith(_POLICY_DENIED)
        counts.refused += info.failure is Reason.PEER_DENIED
        sent, received = _moved(connection)
        counts.sent += sent
        counts.received += received

    def add_denied(self) -> None:
        """Count denied node-local tunnels separately, because no connection exists at the destination."""
        denied: dict[_Ends, int] = {}
        for pair, times, _, _ in self._proxy.decisions.ledger.denials if self.since_s else ():
            if pair.identity:  # a denied plain connection is counted as a connection
                host = pair.destination.rpartition(":")[0].strip("[]")
                ends = _Ends(pair.source, host, "", "", "destination", Security.MUTUAL_TLS)
                denied[ends] = denied.get(ends, 0) + max(0, times - self._denied_before.get(pair, 0))
        for ends, times in denied.items():
            if times:
                counts = self.at(ends)
                counts.denied, counts.failed = max(counts.denied, times), max(counts.failed, times)
                counts.opened = max(counts.opened, times)

    def at(self, ends: _Ends) -> _Counts:
        """Return a pair's counts. Once the limit of pairs is reached, all further pairs share their counts."""
        counts = self.counts.get(ends)
        if counts is None:
            if len(self.counts) >= _MOST_FLOWS:
                ends = ends._replace(source=_OTHERS, destination=_OTHERS, service="", service_namespace="")
            counts = self.counts.setdefault(ends, _Counts())
        return counts

    def ends(self, connection: LiveConnection) -> _Ends:
        """Return the two workloads of a connection, and remember their authenticated identities."""
        info = connection.info
        hops = hops_of(info)
        source, there = info.source.host, info.destination
        proven_names = proven(hops)
        if info.tls is not None and info.tls.peer_uri_sans:
            reporter, destination = "destination", there.host
        else:
            reporter = "source"
            last = last_host(hops)
            destination = last.host if last is not None else there.host
        if len(self.identities) < 2 * _MOST_FLOWS:
            for host, identity in zip((source, destination), proven_names, strict=True):
                if identity:
                    self.identities[host] = identity
        named = service_of(hops) if reporter == "source" else None
        service, namespace = (".".join(filter(None, named)), named[1]) if named is not None else ("", "")
        if reporter == "source" and not service and there.host != destination:
            service = str(there)
        return _Ends(source, destination, service, namespace, reporter, _security(info, proven_names))


def _security(info: StreamInfo, names: tuple[str, str]) -> Security:
    if any(names):
        return Security.MUTUAL_TLS
    return Security.PLAIN if info.connected else Security.NONE


def _moved(connection: LiveConnection) -> tuple[int, int]:
    info, counts = connection.info, connection.counts
    return (counts.sent, counts.received) if counts is not None else (info.bytes_received, info.bytes_sent)


async def seen(proxy: InspectedProxy, traffic: Traffic) -> Seen:
    """Collect the page's current content, for one server-sent event."""
    open_now: dict[_Ends, list[int]] = {}
    shown: list[Connection] = []
    entries = list(proxy.connections)
    now_s = proxy.clock.monotonic()
    async for part in _chunks(entries):
        more = []
        for entry in part:
            ends = traffic.ends(entry)
            sent, received = _moved(entry)
            counted = open_now.setdefault(ends, [0, 0, 0])
            counted[0] += 1
            counted[1] += sent
            counted[2] += received
            more.append(_shown(proxy, entry, ends, now_s))
        shown = heapq.nlargest(_MOST_CONNECTIONS, [*shown, *more], key=_bytes)
    traffic.add_denied()
    flows = [_flow(ends, traffic.counts.get(ends), open_now.get(ends)) for ends in {**traffic.counts, **open_now}]
    hosts = dict.fromkeys(host for flow in flows for host in (flow.source, flow.destination))
    here = {flow.source for flow in flows if flow.reporter == "source"}
    return Seen(
        facts=_facts(proxy, traffic),
        workloads=[
            _workload(host, traffic.identities.get(host, ""), here=host in here or _is_served(proxy, host))
            for host in hosts
        ],
        flows=flows,
        connections=shown,
        connections_open=len(entries),
        policies=_policies(proxy),
        denials=[
            Denied(
                place=f"{denial.pair.listener}, {denial.pair.chain}"
                if denial.pair.chain
                else denial.pair.listener,
                source=denial.pair.source,
                identity=denial.pair.identity,
                destination=denial.pair.destination,
                reason=denial.pair.reason,
                count=denial.times,
                last_s=denial.last_s,
                address=denial.address,
            )
            for denial in proxy.decisions.ledger.denials
        ],
        certificates=list(_certificates(proxy)),
        sources=list(_sources(proxy)),
        refusals=[
            Refusal(kind=kind, name=each.name, reason=each.details)
            for kind, failures in (("cluster", proxy.clusters.failures), ("listener", proxy.listeners.failures))
            for each in failures.values()
        ],
        past=proxy.account.times.history.shown(proxy.clock.monotonic(), proxy.clock.wall()),
    )


async def _chunks(items: list[LiveConnection]) -> AsyncIterator[list[LiveConnection]]:
    for start in range(0, len(items), _SLICE):
        yield items[start : start + _SLICE]
        await asyncio.sleep(0)


def _facts(proxy: InspectedProxy, traffic: Traffic) -> Facts:
    ready = proxy.state is State.LIVE and not proxy.failing_health_checks
    return Facts(
        dialect="envoy",
        version=__version__,
        node=proxy.settings.node or proxy.bootstrap.message.node.id,
        ready=ready,
        state="ready" if ready else "fails health checks" if proxy.failing_health_checks else str(proxy.state),
        uptime_s=proxy.clock.monotonic() - proxy.started,
        totals={"listeners": len(proxy.listeners.active), "clusters": len(proxy.clusters.active)},
        counted_since_s=traffic.since_s,
        question={"source": "10.244.2.10", "destination": "10.96.183.192:9080"},
        flows_kept=proxy.account.ring.capacity,
    )


def _is_served(proxy: InspectedProxy, host: str) -> bool:
    return any(listener.model.serves(host) for listener in proxy.listeners.active)


def _workload(host: str, identity: str, *, here: bool) -> Workload:
    """Return the workload at an address, named by its authenticated identity if there is one."""
    if not identity:
        return Workload(key=host, name=host, address=host, here=here)
    parts = identity.split("/")  # spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT
    namespaced = len(parts) == 7 and parts[3] == "ns" and parts[5] == "sa"
    return Workload(
        key=host,
        name=parts[-1] or identity,
        namespace=parts[4] if namespaced else "",
        identity=identity,
        address=host,
        here=here,
    )


def _flow(ends: _Ends, ended: _Counts | None, now: list[int] | None) -> Flow:
    ended, (count, sent, received) = ended or _Counts(), now or (0, 0, 0)
    return Flow(
        source=ends.source,
        destination=ends.destination,
        service=ends.service,
        service_namespace=ends.service_namespace,
        reporter=ends.reporter,
        security=ends.security,
        open=count,
        opened=ended.opened + count,
        failed=ended.failed,
        denied=ended.denied,
        refused=ended.refused,
        bytes_sent=ended.sent + sent,
        bytes_received=ended.received + received,
    )


def _shown(proxy: InspectedProxy, connection: LiveConnection, ends: _Ends, now_s: float) -> Connection:
    info = connection.info
    sent, received = _moved(connection)
    client, server = proven(hops_of(info))
    return Connection(
        id=str(connection.id),
        direction=info.listener,
        source=info.downstream_remote,
        source_name=_called(client),
        destination=str(info.destination),
        destination_name=_called(server),
        next_hop=next((hop.upstream_host for hop in (*reversed(connection.inner), info) if hop.upstream_host), ""),
        protocol="HTTP/2" if info.protocol == "HTTP/2" else "TCP",
        security=ends.security,
        identity=client if ends.reporter == "destination" else server,
        age_s=round(now_s - info.started, 1),
        bytes_sent=sent,
        bytes_received=received,
    )


def _called(identity: str) -> str:
    workload = _workload("", identity, here=False)
    return f"{workload.namespace}/{workload.name}" if workload.namespace else workload.name


def _bytes(connection: Connection) -> int:
    return (connection.bytes_sent or 0) + (connection.bytes_received or 0)


def _policies(proxy: InspectedProxy) -> list[Policy]:
    """Return the active RBAC filters' policies and removed policies that made decisions, the most used first."""
    uses = {use.policy: use for use in proxy.decisions.ledger.own}
    actions = dict.fromkeys(uses, "")
    enforced = set(uses)
    for listener in proxy.listeners.active:
        for chain in listener.live_chains:
            for rbac in chain.rbac:
                model = rbac.model
                for rules, shadow in ((model.rules, model.log_only), (model.shadow, True)):
                    for tier in rules.tiers if rules is not None else ():
                        for policy in tier.policies:
                            actions[policy.name] = "ALLOW" if policy.verdict is Verdict.ALLOW else "DENY"
                            if not shadow:
                                enforced.add(policy.name)
    found = [_policy(name, action, uses.get(name), name in enforced) for name, action in actions.items()]
    return sorted(found, key=lambda each: (-((each.denied or 0) + (each.allowed or 0)), each.name))


def _policy(name: str, action: str, use: PolicyUse[str] | None, enforced: bool) -> Policy:
    tally = use.tally if use is not None else Tally()
    return Policy(
        name="(no policy matched)" if name == NONE_MATCHED else name,
        action=action,
        mode="enforced" if enforced else "shadow",
        allowed=tally.allowed + tally.would_allow,
        denied=tally.denied + tally.would_deny,
        ended=tally.ended,
        last_s=use.last_s if use is not None else None,
    )


def _certificates(proxy: InspectedProxy) -> Iterator[Certificate]:
    """Yield each certificate that TLS contexts present once, with the number of these contexts."""
    users: dict[int, int] = {}
    found: dict[int, Certificate] = {}
    for leaf, names in certificates_shown(proxy):
        users[leaf.serial_number] = users.get(leaf.serial_number, 0) + 1
        if leaf.serial_number not in found:
            found[leaf.serial_number] = Certificate(
                identity=", ".join(names) or leaf.subject.rfc4514_string(),
                state="Available",
                serial=f"{leaf.serial_number:x}",
                valid_from_s=leaf.not_valid_before_utc.timestamp(),
                expires_s=leaf.not_valid_after_utc.timestamp(),
            )
    for serial, certificate in sorted(found.items(), key=lambda each: each[1].identity):
        number = users[serial]
        yield replace(certificate, used_by=f"{number} TLS context{'' if number == 1 else 's'}")


def _sources(proxy: InspectedProxy) -> Iterator[Source]:
    ads, config = proxy.ads, proxy.bootstrap.ads
    if ads is not None and config is not None:
        lost_s = ads.stats.lost_at_s
        away_s = 0.0
        if not ads.stats.connected_state:
            away_s = asyncio.get_running_loop().time() - (proxy.started if lost_s is None else lost_s)
        moments = [cluster.last_updated for cluster in proxy.clusters.active if cluster.added_via_api]
        moments += [listener.last_updated for listener in proxy.listeners.active]
        yield Source(
            name="control plane (xDS)",
            address=ads.stats.identifier or proxy.bootstrap.targets[config.cluster].address,
            connected=bool(ads.stats.connected_state),
            away_s=round(away_s, 1),
            updated_s=max(moments, default=None),
        )
    if proxy.settings.bootstrap:
        yield Source(name="bootstrap", address=proxy.settings.bootstrap, connected=None)
