"""Collects the content of the live page in an Istio mesh, which :mod:`ztunnel.proxy.ui` limits in size and serves.

Large tables are read in slices, so that the event loop runs other work in between.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from typing import Final, TypeVar

from xds.model.authorization import AuthorizationPolicy
from ztunnel import __version__
from ztunnel.policy.effect import without_effect
from ztunnel.policy.ledger import PolicyUse, Tally
from ztunnel.proxy.istio.accounting.metrics import NONE_MATCHED, TRAFFIC_LABELS, UNKNOWN, Metrics
from ztunnel.proxy.istio.accounting.outcome import Flags
from ztunnel.proxy.istio.accounting.traffic_series import TrafficSeries
from ztunnel.proxy.istio.admin.inspected import InspectedProxy
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate
from ztunnel.proxy.istio.path.connections import Shown
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.istio.path.pod_connection import PodConnection
from ztunnel.proxy.istio.settings.config import ProxyMode
from ztunnel.proxy.istio.xds import mesh_dump
from ztunnel.proxy.istio.zds.pods import RunningPod
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

#: The number of table entries read per event loop iteration: about a millisecond of work.
_SLICE: Final = 100
#: The number of connections kept while the table is read. The page shows even fewer connections.
_MOST_CONNECTIONS: Final = 200
#: A certificate's entry lists at most this many workloads that use it.
_MOST_USERS: Final = 3
_REPORTER, _SERVICE, _SERVICE_NAMESPACE, _POLICY = map(
    TRAFFIC_LABELS.index,
    ("reporter", "destination_service", "destination_service_namespace", "connection_security_policy"),
)
#: The positions of workload, namespace and principal in the traffic labels, for source and destination.
_SOURCE, _DESTINATION = (
    tuple(TRAFFIC_LABELS.index(f"{side}_{name}") for name in ("workload", "workload_namespace", "principal"))
    for side in ("source", "destination")
)

ItemT = TypeVar("ItemT")


async def seen(proxy: InspectedProxy) -> Seen:
    """Collect the current content of the page. Called once per event."""
    workers = proxy.workers
    metrics = await workers.metrics() if workers is not None else proxy.metrics
    carried = await workers.connections() if workers is not None else {}
    workloads = {workload.key: workload for workload in _pods(proxy)}
    flows: dict[tuple[str, ...], Flow] = {}
    async for series in _slices(list(metrics.series)):
        flow = _flow(series, workloads)
        known = flows.get(flow.key)
        flows[flow.key] = flow if known is None else _sum(known, flow)
    entries = list(_connections(proxy))
    shown: list[Connection] = []
    async for part in _chunks(entries):
        shown = heapq.nlargest(_MOST_CONNECTIONS, [*shown, *(_shown(*each) for each in part)], key=_moved)
    carried_shown, carried_open = _carried(proxy, carried)
    return Seen(
        facts=_facts(proxy),
        workloads=list(workloads.values()),
        flows=list(flows.values()),
        connections=[*shown, *carried_shown][:_MOST_CONNECTIONS],
        connections_open=len(entries) + carried_open,
        policies=await _policies(proxy, metrics),
        denials=[
            Denied(
                place=denial.pair.direction,
                source=denial.pair.source,
                identity=denial.pair.identity,
                destination=denial.pair.destination,
                reason=denial.pair.reason,
                count=denial.times,
                last_s=denial.last_s,
                address=denial.address,
            )
            for denial in metrics.ledger.denials
        ],
        certificates=list(_certificates(proxy)),
        sources=list(_sources(proxy)),
        refusals=[Refusal(kind=kind, name=name, reason=reason) for kind, name, reason in proxy.control.refused()],
        past=metrics.history.shown(proxy.clock.monotonic(), proxy.clock.wall()),
    )


async def _chunks(items: list[ItemT]) -> AsyncIterator[list[ItemT]]:
    for start in range(0, len(items), _SLICE):
        yield items[start : start + _SLICE]
        await asyncio.sleep(0)


async def _slices(items: list[ItemT]) -> AsyncIterator[ItemT]:
    async for part in _chunks(items):
        for item in part:
            yield item


def _facts(proxy: InspectedProxy) -> Facts:
    pending = sorted(proxy.readiness.pending)
    mesh, config = proxy.mesh, proxy.config
    return Facts(
        dialect="istio",
        version=__version__,
        node=config.node,
        ready=not pending,
        state=f"waits for {', '.join(pending)}" if pending else "ready",
        uptime_s=proxy.clock.monotonic() - proxy.started_s,
        totals=mesh.counts(),
        question={"source": "default/client", "destination": "reviews.default:9080"},
        flows_kept=config.flows,
    )


# The graph


def _pods(proxy: InspectedProxy) -> Iterator[Workload]:
    """Yield this node's workloads under their names in metrics. The pods of a deployment share a name."""
    if proxy.config.proxy_mode is not ProxyMode.SHARED:
        return
    for status in proxy.pods.states().values():
        info = status.info
        workload = proxy.mesh.local_workload(info.name, info.namespace, info.service_account)
        name = (workload.workload_name if workload is not None else "") or info.name
        state = "" if status.running is not None else status.error or status.state.value
        yield Workload(
            key=_key(info.namespace, name),
            name=name,
            namespace=info.namespace,
            identity=str(workload.identity) if workload is not None else "",
            here=True,
            state=state or ("" if workload is not None else "the control plane has not described it"),
        )


def _key(namespace: str, name: str) -> str:
    return f"{namespace}/{name}"


def _flow(series: TrafficSeries, workloads: dict[str, Workload]) -> Flow:
    labels = series.labels
    secured = labels[_POLICY] != UNKNOWN
    service, namespace = (
        "" if each == UNKNOWN else each for each in (labels[_SERVICE], labels[_SERVICE_NAMESPACE])
    )
    closed = series.closed
    return Flow(
        source=_end(labels, _SOURCE, workloads, proven=secured),
        destination=_end(labels, _DESTINATION, workloads, proven=secured),
        service=service,
        service_namespace=namespace,
        reporter=labels[_REPORTER],
        security=_security(secured),
        open=series.open,
        opened=series.opened,
        failed=sum(count for flags, count in closed.items() if flags != Flags.NONE),
        denied=closed.get(Flags.DENY, 0),
        refused=series.refused,
        bytes_sent=series.received_now,
        bytes_received=series.sent_now,
    )


def _end(labels: tuple[str, ...], side: tuple[int, ...], workloads: dict[str, Workload], *, proven: bool) -> str:
    """Return the key of the workload on one side of a flow. If it is not in ``workloads``, add it. ``proven`` is
    whether mTLS has authenticated the principal.
    """
    name, namespace, principal = (labels[place] for place in side)
    identity = principal if proven and principal != UNKNOWN else ""
    if name == UNKNOWN:
        # The metrics do not contain the addresses of clients outside the mesh. So there is one entry per identity,
        # and one for all clients without an identity.
        name, namespace = ("outside the mesh", "") if not identity else (identity.rpartition("/")[2], "")
        key = f"?{identity}"
    else:
        key = _key(namespace, name)
    known = workloads.get(key)
    if known is None or (identity and not known.identity):
        here = known is not None and known.here
        state = known.state if known is not None else ""
        workloads[key] = Workload(
            key=key, name=name, namespace=namespace, identity=identity, here=here, state=state
        )
    return key


def _sum(one: Flow, other: Flow) -> Flow:
    """Add up two flows between the same workloads, whose series differ only in labels that the graph does not
    show.
    """
    return replace(
        one,
        open=one.open + other.open,
        opened=one.opened + other.opened,
        failed=one.failed + other.failed,
        denied=one.denied + other.denied,
        refused=one.refused + other.refused,
        bytes_sent=one.bytes_sent + other.bytes_sent,
        bytes_received=one.bytes_received + other.bytes_received,
    )


def _security(secured: bool) -> Security:
    return Security.MUTUAL_TLS if secured else Security.PLAIN


# Connections


def _connections(proxy: InspectedProxy) -> Iterator[tuple[PodConnection, float]]:
    now_s = proxy.clock.monotonic()
    for pod in _running(proxy):
        for table in (pod.connections.inbound, pod.connections.outbound):
            yield from ((entry, now_s) for entry in table)


def _running(proxy: InspectedProxy) -> Iterator[PodProxy]:
    for status in proxy.pods.states().values():
        if isinstance(status.running, PodProxy):
            yield status.running


def _shown(entry: PodConnection, now_s: float) -> Connection:
    record = entry.record
    source, destination = record.source_workload, record.destination_workload
    peer = record.source_identity if record.direction == "inbound" else record.destination_identity
    return Connection(
        id=f"{id(entry):x}",
        direction=str(record.direction),
        source=str(record.source),
        source_name=f"{source.namespace}/{source.name}" if source is not None else "",
        destination=entry.original or str(record.destination),
        destination_name=f"{destination.namespace}/{destination.name}" if destination is not None else "",
        next_hop=str(entry.actual or record.destination),
        protocol=entry.protocol,
        security=_security(record.secured),
        identity=str(peer) if record.secured and peer is not None else "",
        age_s=round(now_s - record.started_s, 1),
        bytes_sent=record.counts.sent,
        bytes_received=record.counts.received,
    )


def _moved(connection: Connection) -> int:
    return (connection.bytes_sent or 0) + (connection.bytes_received or 0)


def _carried(
    proxy: InspectedProxy, carried: dict[RunningPod, dict[str, list[Shown]]]
) -> tuple[list[Connection], int]:
    """Return the workers' connections to show, and their total number."""
    found: list[Connection] = []
    total = 0
    for number, tables in enumerate(carried.values()):
        for direction, entries in tables.items():
            total += len(entries)
            for entry in entries[: _MOST_CONNECTIONS - len(found)]:
                source, destination = str(entry["src"]), str(entry["originalDst"] or entry["actualDst"])
                found.append(
                    Connection(
                        id=f"{number} {direction} {source} {destination} {entry['actualDst']}",
                        direction=direction,
                        source=source,
                        destination=destination,
                        next_hop=str(entry["actualDst"]),
                        protocol=str(entry["protocol"]),
                        security=_security(bool(entry.get("srcIdentity")) or entry["protocol"] != "TCP"),
                        identity=str(entry.get("srcIdentity") or entry.get("dstIdentity") or ""),
                        age_s=float(entry["ageSeconds"] or 0),
                        bytes_sent=int(entry["bytesSent"] or 0),
                        bytes_received=int(entry["bytesReceived"] or 0),
                    )
                )
    return found, total


# Policies, certificates, configuration sources


async def _policies(proxy: InspectedProxy, metrics: Metrics) -> list[Policy]:
    uses = metrics.ledger.own
    found = [_policy(policy, uses.get(policy.key)) async for policy in _slices(list(proxy.mesh.policies()))]
    found.sort(key=lambda each: (-((each.denied or 0) + (each.allowed or 0)), each.name))
    none = uses.get(NONE_MATCHED)
    if none is not None:
        found.append(
            Policy(
                name="(no policy matched)",
                action="Deny",
                mode="implied",
                allowed=none.tally.allowed,
                denied=none.tally.denied,
                ended=none.tally.ended,
                last_s=none.last_s,
            )
        )
    return found


def _policy(policy: AuthorizationPolicy, use: PolicyUse[str] | None) -> Policy:
    tally = use.tally if use is not None else Tally()
    dry = policy.dry_run
    return Policy(
        name=policy.key,
        action=policy.action.value,
        scope=policy.scope.value,
        mode="dry run" if dry else "enforced",
        allowed=tally.would_allow if dry else tally.allowed,
        denied=tally.would_deny + tally.would_not_allow if dry else tally.denied,
        ended=tally.ended,
        last_s=use.last_s if use is not None else None,
        faults=(*policy.faults, *filter(None, [without_effect(mesh_dump.shown_policy(policy))])),
    )


def _certificates(proxy: InspectedProxy) -> Iterable[Certificate]:
    states = proxy.certificates.states()
    users: dict[str, list[str]] = {}
    for workload in _pods(proxy):
        users.setdefault(workload.identity, []).append(workload.key)
    for identity in sorted(states, key=str):
        state, users_here = states[identity], sorted(set(users.get(str(identity), ())))
        more = len(users_here) - _MOST_USERS
        used_by = ", ".join(users_here[:_MOST_USERS]) + (f" and {more} more" if more > 0 else "")
        if not isinstance(state, WorkloadCertificate):
            yield Certificate(identity=str(identity), state=state, used_by=used_by)
            continue
        leaf = state.issued.chain[0]
        yield Certificate(
            identity=str(identity),
            state="Available",
            used_by=used_by,
            serial=f"{leaf.serial_number:x}",
            valid_from_s=leaf.not_valid_before_utc.timestamp(),
            expires_s=leaf.not_valid_after_utc.timestamp(),
        )


def _sources(proxy: InspectedProxy) -> Iterator[Source]:
    config, control = proxy.config, proxy.control
    if config.xds_address:
        ago_s = control.updated_ago_s
        yield Source(
            name="control plane (xDS)",
            address=config.xds_address,
            connected=control.staleness_s == 0.0,
            away_s=round(control.staleness_s, 1),
            updates=sum(proxy.metrics.xds_messages.values()),
            updated_s=None if ago_s is None else proxy.clock.wall() - ago_s,
        )
    if config.local_xds or config.local_xds_path:
        yield Source(name="local file", address=config.local_xds_path or "LOCAL_XDS", connected=None)
    if config.ca_address:
        yield Source(name="certificate authority", address=config.ca_address, connected=None)
