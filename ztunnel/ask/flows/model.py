"""Flows read from lines of ``/flows``, as commands print them, and the filters that select flows. Pure.

Filters work like Hubble's. Pods are selected by ``NAMESPACE/PREFIX``: an empty namespace matches any, and a prefix
alone means namespace ``default``. Filters of one kind are alternatives; filters of different kinds must all match.
"""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from xds.digits import whole_number
from ztunnel.runtime.console.output import Column, Item, Kind

VERDICTS: Final = ("FORWARDED", "DROPPED", "ERROR", "AUDIT")


class Flow(Item, frozen=True, kw_only=True):
    """A connection that ended. If it is not ``encrypted``, ``source_identity`` is not proven.

    ``failure`` is the reason as in ``ztunnel_connection_errors_total``. With ``--why``, ``clause`` is the clause
    of the current policies that refuses the connection.
    """

    time: str
    uuid: str
    verdict: str
    direction: str
    encrypted: bool
    source: str
    source_port: int
    source_pod: str | None = None
    source_identity: str | None = None
    destination: str
    destination_port: int
    destination_pod: str | None = None
    destination_identity: str | None = None
    service: str | None = None
    hbone_address: str | None = None
    duration_seconds: float | None = None
    connect_seconds: float | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    reason: str | None = None
    failure: str | None = None
    policy: str | None = None
    clause: str | None = None
    addon: str | None = None
    response_flags: str | None = None
    trace_id: str | None = None


def _end(pod: str | None, address: str, port: int) -> str:
    return f"{pod}:{port}" if pod else f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _span(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.3f}s"


def _shown_time(item: Flow) -> str:
    return f"{item.time[:23]}Z" if len(item.time) > 23 else item.time


FLOW: Final[Kind[Flow]] = Kind(
    name="Flow",
    several="flows",
    item=Flow,
    identity=lambda item: item.uuid,
    columns=(
        Column("TIME", _shown_time),
        Column("VERDICT", "verdict"),
        Column("DIRECTION", "direction"),
        Column("SOURCE", lambda item: item.source_pod or item.source),
        Column("DESTINATION", lambda item: _end(item.destination_pod, item.destination, item.destination_port)),
        Column("TLS", lambda item: "mTLS" if item.encrypted else "plain"),
        Column(
            "DURATION", lambda item: None if item.duration_seconds is None else f"{item.duration_seconds:.3f}s"
        ),
        Column("SENT", "bytes_sent"),
        Column("RECEIVED", "bytes_received"),
        Column("REASON", "reason"),
        Column("CONNECT", lambda item: _span(item.connect_seconds), wide=True),
        Column("POLICY", "policy", wide=True),
        Column("CLAUSE", "clause", wide=True),
        Column("ADDON", "addon", wide=True),
        Column("SERVICE", "service", wide=True),
        Column("SOURCE IDENTITY", "source_identity", wide=True),
        Column("UUID", "uuid", wide=True),
    ),
)


def read(line: Mapping[str, Any]) -> Flow | None:
    """Return the flow in a line of ``/flows``, in our form or Hubble's. None if the line has no flow."""
    flow = line.get("flow")
    if not isinstance(flow, Mapping):
        return None
    ip, tcp = flow.get("IP") or {}, (flow.get("l4") or {}).get("TCP") or {}
    more = (flow.get("extensions") or {}).get("value") or {}
    service = flow.get("destination_service") or {}
    policies = [*(flow.get("ingress_denied_by") or ()), *(flow.get("egress_denied_by") or ())]
    policy = more.get("policy") or next((f"{p.get('namespace')}/{p.get('name')}" for p in policies), None)
    return Flow(
        time=str(flow.get("time")),
        uuid=str(flow.get("uuid") or ""),
        verdict=str(flow.get("verdict") or "FORWARDED"),
        direction="outbound" if flow.get("traffic_direction") == "EGRESS" else "inbound",
        encrypted=bool(ip.get("encrypted")),
        source=str(ip.get("source") or ""),
        source_port=int(tcp.get("source_port") or 0),
        source_pod=_pod(flow.get("source") or {}),
        source_identity=more.get("source_identity"),
        destination=str(ip.get("destination") or ""),
        destination_port=int(tcp.get("destination_port") or 0),
        destination_pod=_pod(flow.get("destination") or {}),
        destination_identity=more.get("destination_identity"),
        service=f"{service.get('namespace')}/{service['name']}" if service.get("name") else None,
        hbone_address=more.get("hbone_address"),
        duration_seconds=more.get("duration_seconds"),
        connect_seconds=more.get("connect_seconds"),
        bytes_sent=more.get("bytes_sent"),
        bytes_received=more.get("bytes_received"),
        reason=more.get("reason"),
        failure=more.get("failure"),
        policy=policy,
        addon=more.get("addon"),
        response_flags=more.get("response_flags"),
        trace_id=((flow.get("trace_context") or {}).get("parent") or {}).get("trace_id"),
    )


def _pod(endpoint: Mapping[str, Any]) -> str | None:
    name = endpoint.get("pod_name") or next((each.get("name") for each in endpoint.get("workloads") or ()), None)
    return f"{endpoint.get('namespace') or ''}/{name}" if name else None


# Filters

Test = Callable[[Flow], bool]


class BadFilter(ValueError):
    """The value of a filter is invalid; the text says why."""


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter of a command line: its name, its value, and whether ``--not`` negates it."""

    name: str
    test: Test
    negated: bool = False


def make(name: str, value: str, *, negated: bool = False) -> Filter:
    """Return a filter.

    Args:
        name: from, to, pod, namespace, identity, verdict, port, service, plain, encrypted, direction or trace.
        value: the flag's value.
        negated: whether matching flows are left out instead of selected.

    Raises:
        BadFilter: the value has another form.
    """
    return Filter(name, _test(name, value), negated)


def _test(name: str, value: str) -> Test:
    match name:
        case "from":
            source = _side(value)
            return lambda flow: source(flow.source_pod, flow.source, flow.source_identity)
        case "to":
            target = _side(value)
            return lambda flow: target(flow.destination_pod, flow.destination, flow.destination_identity)
        case "pod" | "identity":
            either = _side(value)
            return lambda flow: (
                either(flow.source_pod, flow.source, flow.source_identity)
                or either(flow.destination_pod, flow.destination, flow.destination_identity)
            )
        case "namespace":
            # Not the kind "pod": filters of one kind are alternatives, and a namespace restricts all others.
            return _test("pod", f"{value}/")
        case "verdict":
            wanted = value.upper()
            if wanted not in VERDICTS:
                raise BadFilter(f"verdict: must be one of {', '.join(VERDICTS)}: {value!r}")
            return lambda flow: flow.verdict == wanted
        case "port":
            port = whole_number(value, 65535)
            if port is None:
                raise BadFilter(f"port: must be a number: {value!r}")
            return lambda flow: port in (flow.source_port, flow.destination_port)
        case "service":
            prefix = _prefix(value)
            return lambda flow: flow.service is not None and flow.service.startswith(prefix)
        case "plain":
            return lambda flow: not flow.encrypted
        case "encrypted":
            return lambda flow: flow.encrypted
        case "direction":
            if value not in ("inbound", "outbound"):
                raise BadFilter(f"direction: must be inbound or outbound: {value!r}")
            return lambda flow: flow.direction == value
        case "trace":
            return lambda flow: flow.trace_id == value
    raise BadFilter(f"no filter {name}")


def _side(value: str) -> Callable[[str | None, str, str | None], bool]:
    """Return a test of a flow's source or destination. It compares a SPIFFE id (``*`` matches any text), an
    address or CIDR block, or the beginning of a pod's name.
    """
    if value.startswith("spiffe://"):
        return lambda pod, address, identity: identity is not None and fnmatch.fnmatchcase(identity, value)
    try:
        block = ipaddress.ip_network(value, strict=False)
    except ValueError:
        prefix = _prefix(value)
        if prefix == "":
            return lambda pod, address, identity: pod is not None
        anywhere = value.startswith("/")
        return lambda pod, address, identity: (
            pod is not None and (pod.partition("/")[2] if anywhere else pod).startswith(prefix)
        )
    return lambda pod, address, identity: bool(address) and ipaddress.ip_address(address) in block


def _prefix(value: str) -> str:
    if value.startswith("/"):
        return value[1:]
    return value if "/" in value else f"default/{value}"


def chosen(filters: Sequence[Filter]) -> Test:
    """Return whether the filters select a flow: of each kind at least one matches, and no negated filter
    matches.
    """
    kinds: dict[str, list[Test]] = {}
    for each in filters:
        if not each.negated:
            kinds.setdefault(each.name, []).append(each.test)
    unwanted = [each.test for each in filters if each.negated]

    def wanted(flow: Flow) -> bool:
        return all(any(test(flow) for test in tests) for tests in kinds.values()) and not any(
            test(flow) for test in unwanted
        )

    return wanted
