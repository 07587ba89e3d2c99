"""Converts an entry of the flight recorder to Hubble's Flow in JSON, the format of ``hubble observe -o jsonpb``.
Pure.

Hubble reports packets of pods with numeric identities, but an entry here is an ended connection. Values without a
field in Hubble's message (bytes, times, SPIFFE ids, the reason) are in ``Summary`` for people, and in
``extensions`` for programs.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import xxhash

from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.flows.ring import Entry

#: Cilium's numeric identities for the world outside the cluster, and the first one for pods.
WORLD: Final = 2
_FIRST: Final = 65536
_IDENTITIES: Final = (1 << 24) - _FIRST
_STRUCT: Final = "type.googleapis.com/google.protobuf.Struct"
#: Hubble's event types and sub-types: a trace at an observation point, a drop, and a policy's verdict.
TRACE, DROP, POLICY = 4, 1, 5
TO_ENDPOINT, TO_STACK, TO_NETWORK = 0, 3, 11
_DROP_REASONS: Final = {133: "POLICY_DENIED", 181: "POLICY_DENY", 189: "AUTH_REQUIRED"}
#: The longest reason in a summary. It is limited, because peers supply parts of the text.
_MOST_SUMMARY: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a connection.

    Attributes:
        namespace, pod, workload, kind, cluster, account: empty if unknown.
        app, version: the canonical service and its revision.
        spiffe: the SPIFFE id. For a plain-text client it was looked up by address, so it is not authenticated.
    """

    namespace: str = ""
    pod: str = ""
    workload: str = ""
    kind: str = ""
    cluster: str = ""
    account: str = ""
    app: str = ""
    version: str = ""
    spiffe: str = ""

    @property
    def known(self) -> bool:
        """Whether this side is a workload known in the mesh."""
        return bool(self.pod or self.workload)


class Ended(NamedTuple):
    """How a connection ended.

    Attributes:
        reason: the reason of the failure. None for a normal end.
        text: the failure as stated in the access line.
        policy: ``NAMESPACE/NAME`` of the deciding policy, or empty.
        flags: the response flags.
    """

    reason: Reason | None = None
    text: str = ""
    policy: str = ""
    flags: str = "-"


BY_ITSELF: Final = Ended()
#: For connections that were refused or ended on purpose: the event's type and the drop reason.
_DROPPED: Final = {
    Reason.POLICY: ((POLICY, 0), 133),
    Reason.POLICY_MISSING: ((POLICY, 0), 133),
    Reason.POLICY_CHANGE: ((DROP, 133), 133),
    Reason.ADDON: ((DROP, 133), 133),
    Reason.REVOKED: ((DROP, 189), 189),
}


def verdict_of(ended: Ended, *, outbound: bool, tunnelled: bool) -> tuple[str, tuple[int, int], int]:
    """Return Hubble's verdict, the event's type and sub-type, and the drop reason (0 if not dropped)."""
    if ended.reason in _DROPPED:
        event, drop = _DROPPED[ended.reason]
        return "DROPPED", event, 181 if ended.reason is Reason.POLICY and ended.policy else drop
    trace = (TRACE, (TO_NETWORK if tunnelled else TO_STACK) if outbound else TO_ENDPOINT)
    return "FORWARDED" if ended.reason in (None, Reason.DRAIN) else "ERROR", trace, 0


def identity_of(side: Side) -> int:
    """Return a number for one side of a connection, like Cilium's numeric identity. It is the same on all nodes,
    and differs for workloads that share a service account.
    """
    if not side.known:
        return WORLD
    text = f"{side.spiffe}|{side.cluster}|{side.workload or side.pod}"
    return _FIRST + xxhash.xxh64_intdigest(text.encode()) % _IDENTITIES


def response(
    entry: Entry,
    node: str,
    source: Side,
    destination: Side,
    ended: Ended,
    *,
    addon: str,
    tunnelled: bool,
    service: tuple[str, str] | None,
    tunnel: str,
    emitter: str,
) -> dict[str, Any]:
    """Return a recorded connection as a GetFlowsResponse of Hubble's API.

    Args:
        entry: the ring's entry.
        node: ``CLUSTER/NODE``.
        source, destination: the sides.
        ended: how it ended.
        addon: the addons that denied, delayed, directed or cut it, joined by commas. Empty without such
            addons.
        tunnelled: whether the connection used, or would have used, a tunnel.
        service: name and namespace of the called service, if any.
        tunnel: the address of the tunnel's other end, or empty.
        emitter: the version of this program.
    """
    time = rfc3339(entry.ended_ns)
    verdict, event, drop = verdict_of(ended, outbound=entry.outbound, tunnelled=tunnelled)
    v6 = ":" in (entry.source[0] or entry.destination[0])
    flow: dict[str, Any] = {
        "time": time,
        "uuid": str(uuid.UUID(int=(entry.ended_ns << 64) | xxhash.xxh64_intdigest(node.encode()))),
        "verdict": verdict,
        **({"drop_reason": drop} if drop else {}),
        "IP": {
            "source": entry.source[0],
            "destination": entry.destination[0],
            "ipVersion": "IPv6" if v6 else "IPv4",
            **({"encrypted": True} if entry.secured else {}),
        },
        "l4": {
            "TCP": {
                "source_port": entry.source[1],
                "destination_port": entry.destination[1],
                "flags": {"RST": True} if ended.reason is not None else {"FIN": True},
            }
        },
        "source": _endpoint(source),
        "destination": _endpoint(destination),
        "Type": "L3_L4",
        "node_name": node,
        "event_type": {"type": event[0], **({"sub_type": event[1]} if event[1] else {})},
        **({"destination_service": {"name": service[0], "namespace": service[1]}} if service is not None else {}),
        "traffic_direction": "EGRESS" if entry.outbound else "INGRESS",
        **({"policy_match_type": 2} if ended.policy else {}),
        **({"drop_reason_desc": _DROP_REASONS[drop]} if drop else {}),
        "is_reply": False,
        **({"auth_type": "SPIRE"} if entry.secured else {}),
        **({"trace_context": {"parent": {"trace_id": entry.trace.hex()}}} if any(entry.trace) else {}),
        "emitter": {"name": "ztunnel", "version": emitter},
        "Summary": summary(entry, ended.text, tunnel),
        "extensions": {"@type": _STRUCT, "value": _extension(entry, source, destination, ended, addon, tunnel)},
    }
    if ended.policy and verdict == "DROPPED" and not entry.outbound:
        namespace, _, name = ended.policy.rpartition("/")
        flow["ingress_denied_by"] = [{"name": name, "namespace": namespace, "kind": "AuthorizationPolicy"}]
    return {"flow": flow, "node_name": node, "time": time}


def _extension(
    entry: Entry, source: Side, destination: Side, ended: Ended, addon: str, tunnel: str
) -> dict[str, Any]:
    found: Mapping[str, Any] = {
        "bytes_sent": entry.sent,
        "bytes_received": entry.received,
        "duration_seconds": round(entry.duration_s, 6),
        "connect_seconds": round(entry.connect_s, 6) if entry.connect_s >= 0 else None,
        "source_identity": source.spiffe or None,
        "destination_identity": destination.spiffe or None,
        "hbone_address": tunnel or None,
        "reason": ended.text or None,
        "failure": ended.reason,
        "policy": ended.policy or None,
        "addon": addon or None,
        "response_flags": ended.flags,
    }
    return {key: value for key, value in found.items() if value is not None}


def _endpoint(side: Side) -> dict[str, Any]:
    if not side.known:
        return {"identity": WORLD, "labels": ["reserved:world"]}
    labels = {
        "k8s:app": side.app,
        "k8s:version": side.version,
        "k8s:io.kubernetes.pod.namespace": side.namespace,
        "k8s:io.cilium.k8s.policy.serviceaccount": side.account,
        "k8s:io.cilium.k8s.policy.cluster": side.cluster,
        "spiffe:id": side.spiffe,
    }
    found = {
        "identity": identity_of(side),
        "cluster_name": side.cluster,
        "namespace": side.namespace,
        "labels": [f"{key}={value}" for key, value in labels.items() if value],
        "pod_name": side.pod,
        "workloads": [{"name": side.workload or side.pod, "kind": side.kind or "Pod"}],
    }
    return {key: value for key, value in found.items() if value}


def summary(entry: Entry, reason: str, tunnel: str) -> str:
    """Return a readable summary of a flow: bytes, duration, tunnel and reason, without control characters."""
    way = f"HBONE {tunnel}" if tunnel else "TCP"
    moved = f"{entry.sent} bytes sent, {entry.received} received"
    text = f"{way}: {reason or 'closed'} after {shown_duration(entry.duration_s)}, {moved}"
    return "".join(each if each.isprintable() else "?" for each in text)[:_MOST_SUMMARY]


def shown_duration(seconds: float) -> str:
    """Return a duration in a form for people."""
    return f"{seconds * 1000:.0f}ms" if seconds < 10 else f"{seconds:.0f}s"


def rfc3339(time_ns: int) -> str:
    """Return a time in UTC, with nanoseconds."""
    seconds, ns = divmod(time_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ns:09d}Z"
