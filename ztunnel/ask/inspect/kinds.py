"""The kinds of items that commands print about a proxy: their fields, columns and names. Pure.

Columns of an Istio mesh are the same as in ``istioctl ztunnel-config``. A field that the answer lacks is ``None``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from ztunnel.ask.inspect.ages import shown_age
from ztunnel.runtime.console.output import Column, Item, Kind


class Fact(Item, frozen=True, kw_only=True):
    """A line of ``ztunnel status``. ``error`` makes the exit status 1."""

    name: str
    state: str
    severity: Literal["ok", "warning", "error"] = "ok"


class Connection(Item, frozen=True, kw_only=True):
    """A live connection of a pod in an Istio mesh. ``remote_target`` is the destination that the client
    requested."""

    namespace: str | None = None
    pod: str
    direction: Literal["Inbound", "Outbound"]
    local: str
    remote: str
    remote_target: str | None = None
    protocol: str
    identity: str | None = None
    service: str | None = None
    age_seconds: float | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None


class EnvoyConnection(Item, frozen=True, kw_only=True):
    """A live connection in Envoy's dialect."""

    id: str
    age_seconds: float | None = None
    source: str
    destination: str
    listener: str | None = None
    cluster: str | None = None
    upstream_host: str | None = None
    peers: tuple[str, ...] = ()


class Workload(Item, frozen=True, kw_only=True):
    """A workload of the mesh. ``seen_by`` has the nodes whose proxies report it in this form. Empty if all do."""

    namespace: str
    name: str
    addresses: tuple[str, ...] = ()
    workload_node: str | None = None
    waypoint: str | None = None
    protocol: str
    status: str
    service_account: str | None = None
    uid: str | None = None
    seen_by: tuple[str, ...] = ()


class Service(Item, frozen=True, kw_only=True):
    """A service of the mesh. ``seen_by`` has the nodes whose proxies report it in this form. Empty if all do."""

    namespace: str
    name: str
    hostname: str | None = None
    vips: tuple[str, ...] = ()
    waypoint: str | None = None
    healthy_endpoints: int
    endpoints: int
    seen_by: tuple[str, ...] = ()


class Policy(Item, frozen=True, kw_only=True):
    """An authorization policy, with the numbers of its decisions. ``without_effect`` is the reason why a policy
    never decides, although it looks like protection. ``enforced`` is false for a dry run, whose numbers are
    hypothetical.
    """

    namespace: str | None = None
    name: str
    action: str | None = None
    scope: str | None = None
    enforced: bool | None = True
    without_effect: str | None = None
    faults: tuple[str, ...] = ()
    allowed: int | None = None
    denied: int | None = None
    ended: int | None = None
    last_time: str | None = None


class EnvoyPolicy(Item, frozen=True, kw_only=True):
    """A policy of RBAC filters. ``chains`` is the number of filter chains that contain it."""

    name: str
    action: str | None = None
    mode: str | None = None
    chains: int | None = None
    allowed: int | None = None
    denied: int | None = None
    ended: int | None = None
    last_time: str | None = None


class Certificate(Item, frozen=True, kw_only=True):
    """A certificate of an identity. ``type`` is Leaf, Intermediate or Root. It is ``None`` as long as the identity
    has no certificate.
    """

    identity: str | None = None
    type: str | None = None
    state: str | None = None
    serial_number: str | None = None
    not_after: str | None = None
    not_before: str | None = None


class Denial(Item, frozen=True, kw_only=True):
    """Connections between two workloads that were denied or ended. ``listener`` and ``chain`` exist in Envoy's
    dialect.
    """

    direction: str | None = None
    source: str | None = None
    identity: str | None = None
    destination: str | None = None
    listener: str | None = None
    chain: str | None = None
    reason: str | None = None
    count: int
    last_address: str | None = None
    last_time: str | None = None


class LogLevel(Item, frozen=True, kw_only=True):
    """A log level: of a target, or in Envoy's dialect of a logger."""

    target: str
    level: str


class HandoverFact(Item, frozen=True, kw_only=True):
    """A fact about whether open connections can move to another process."""

    name: str
    value: str


def age_cell(seconds: float | None) -> str | None:
    """Return an age as the text of a table cell."""
    return None if seconds is None else shown_age(seconds)


def _workload(item: Connection) -> str:
    return f"{item.pod}.{item.namespace}" if item.namespace else item.pod


def _enforced(item: Policy) -> str:
    if item.enforced is None:
        return "implied"
    parts = ["yes" if item.enforced else "dry run"]
    if item.faults:
        parts.append("not understood in part")
    if item.without_effect:
        parts.append("NO EFFECT")
    return ", ".join(parts)


def _denied(item: Policy | EnvoyPolicy) -> str | None:
    if item.denied is None:
        return None
    return f"{item.denied}{f', {item.ended} ended' if item.ended else ''}"


def _seen_by(seen_by: Sequence[str]) -> str:
    return ", ".join(seen_by) or "all"


def _by_address(item: Workload) -> Iterator[Workload]:
    for address in item.addresses or ("",):
        yield msgspec.structs.replace(item, addresses=(address,) if address else ())


def _by_vip(item: Service) -> Iterator[Service]:
    for vip in item.vips or ("",):
        yield msgspec.structs.replace(item, vips=(vip,) if vip else ())


FACT: Final[Kind[Fact]] = Kind(
    name="Fact", several="facts", item=Fact, heading=False, identity=lambda item: item.name.replace(" ", "-"),
    columns=(Column("NAME", "name"), Column("STATE", "state")),
)  # fmt: skip
CONNECTION: Final[Kind[Connection]] = Kind(
    name="Connection", several="connections", item=Connection,
    identity=lambda item: f"{item.local}-{item.remote}",
    volatile=("age_seconds", "bytes_sent", "bytes_received"),
    columns=(
        Column("WORKLOAD", _workload),
        Column("DIRECTION", "direction"),
        Column("LOCAL", "local"),
        Column("REMOTE", "remote"),
        Column("REMOTE TARGET", "remote_target"),
        Column("PROTOCOL", "protocol"),
        Column("AGE", lambda item: age_cell(item.age_seconds), wide=True),
        Column("SENT", "bytes_sent", wide=True),
        Column("RECEIVED", "bytes_received", wide=True),
        Column("IDENTITY", "identity", wide=True),
        Column("SERVICE", "service", wide=True),
    ),
)  # fmt: skip
ENVOY_CONNECTION: Final[Kind[EnvoyConnection]] = Kind(
    name="EnvoyConnection", several="connections", item=EnvoyConnection, identity=lambda item: item.id,
    volatile=("age_seconds", "listener", "cluster", "upstream_host", "peers"),
    columns=(
        Column("ID", "id"),
        Column("AGE", lambda item: age_cell(item.age_seconds)),
        Column("SOURCE", "source"),
        Column("DESTINATION", "destination"),
        Column("LISTENER", "listener"),
        Column("CLUSTER", "cluster"),
        Column("UPSTREAM HOST", "upstream_host"),
        Column("PEER", "peers"),
    ),
)  # fmt: skip
WORKLOAD: Final[Kind[Workload]] = Kind(
    name="Workload", several="workloads", item=Workload, rows=_by_address,
    identity=lambda item: f"{item.namespace}/{item.name}",
    columns=(
        Column("NAMESPACE", "namespace"),
        Column("POD NAME", "name"),
        Column("ADDRESS", "addresses"),
        Column("NODE", "workload_node"),
        Column("WAYPOINT", lambda item: item.waypoint or "None"),
        Column("PROTOCOL", "protocol"),
        Column("STATUS", "status"),
        Column("ACCOUNT", "service_account", wide=True),
        Column("SEEN BY", lambda item: _seen_by(item.seen_by), wide=True),
    ),
)  # fmt: skip
SERVICE: Final[Kind[Service]] = Kind(
    name="Service", several="services", item=Service, rows=_by_vip,
    identity=lambda item: f"{item.namespace}/{item.name}",
    columns=(
        Column("NAMESPACE", "namespace"),
        Column("SERVICE NAME", "name"),
        Column("SERVICE VIP", "vips"),
        Column("WAYPOINT", lambda item: item.waypoint or "None"),
        Column("ENDPOINTS", lambda item: f"{item.healthy_endpoints}/{item.endpoints}"),
        Column("HOST NAME", "hostname", wide=True),
        Column("SEEN BY", lambda item: _seen_by(item.seen_by), wide=True),
    ),
)  # fmt: skip
POLICY: Final[Kind[Policy]] = Kind(
    name="Policy", several="policies", item=Policy,
    identity=lambda item: f"{item.namespace}/{item.name}" if item.namespace else item.name,
    columns=(
        Column("NAMESPACE", "namespace"),
        Column("POLICY NAME", "name"),
        Column("ACTION", "action"),
        Column("SCOPE", "scope"),
        Column("ENFORCED", _enforced),
        Column("ALLOWED", "allowed"),
        Column("DENIED", _denied),
        Column("LAST", "last_time"),
        Column("WHY", "without_effect", wide=True),
    ),
)  # fmt: skip
ENVOY_POLICY: Final[Kind[EnvoyPolicy]] = Kind(
    name="EnvoyPolicy", several="policies", item=EnvoyPolicy, identity=lambda item: item.name,
    columns=(
        Column("POLICY NAME", "name"),
        Column("ACTION", "action"),
        Column("MODE", "mode"),
        Column("CHAINS", "chains"),
        Column("ALLOWED", "allowed"),
        Column("DENIED", _denied),
        Column("LAST", "last_time"),
    ),
)  # fmt: skip
CERTIFICATE: Final[Kind[Certificate]] = Kind(
    name="Certificate", several="certificates", item=Certificate,
    identity=lambda item: f"{item.identity or '-'}/{item.serial_number or '-'}",
    columns=(
        Column("CERTIFICATE NAME", "identity"),
        Column("TYPE", "type"),
        Column("STATUS", "state"),
        Column("SERIAL NUMBER", "serial_number"),
        Column("NOT AFTER", "not_after"),
        Column("NOT BEFORE", "not_before"),
    ),
)  # fmt: skip
ENVOY_CERTIFICATE: Final[Kind[Certificate]] = Kind(
    name="EnvoyCertificate", several="certificates", item=Certificate, identity=CERTIFICATE.identity,
    columns=tuple(column for column in CERTIFICATE.columns if column.heading != "STATUS"),
)  # fmt: skip
DENIAL: Final[Kind[Denial]] = Kind(
    name="Denial", several="denials", item=Denial,
    identity=lambda item: f"{item.source}-{item.destination}",
    columns=(
        Column("LAST", "last_time"),
        Column("COUNT", "count"),
        Column("DIRECTION", lambda item: item.direction or item.listener),
        Column("SOURCE", "source"),
        Column("DESTINATION", "destination"),
        Column("REASON", "reason"),
        Column("IDENTITY", "identity", wide=True),
        Column("LAST ADDRESS", "last_address", wide=True),
        Column("CHAIN", "chain", wide=True),
    ),
)  # fmt: skip
LOG_LEVEL: Final[Kind[LogLevel]] = Kind(
    name="LogLevel", several="levels", item=LogLevel, identity=lambda item: item.target,
    columns=(Column("TARGET", "target"), Column("LEVEL", "level")),
)  # fmt: skip
HANDOVER: Final[Kind[HandoverFact]] = Kind(
    name="HandoverFact", several="hand-overs", item=HandoverFact, identity=lambda item: item.name,
    columns=(Column("FACT", "name"), Column("VALUE", "value")),
)  # fmt: skip

KINDS: Final[Mapping[str, Kind[Any]]] = {
    kind.name: kind
    for kind in (
        *(FACT, CONNECTION, ENVOY_CONNECTION, WORKLOAD, SERVICE, POLICY, ENVOY_POLICY, CERTIFICATE),
        *(ENVOY_CERTIFICATE, DENIAL, LOG_LEVEL, HANDOVER),
    )
}
