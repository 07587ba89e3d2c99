"""The API of addons: classes in Python with hooks that the proxy calls at the steps of a connection's life.

An addon is a class with any of the methods of :data:`HOOKS`; :class:`Addon` is an optional base class. Every value
that a hook receives is a tuple of the classes below and cannot be changed. A hook that decides returns one of the
verdicts or ``None``. No verdict can allow what a policy denies, and no hook receives an application's bytes.
``docs/addons.md`` has an example for each hook.

:data:`API_VERSION` is the version of this module. Before a name is removed, it has been listed in
:data:`DEPRECATED` for at least one minor release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol

__all__ = [
    "API_VERSION",
    "DEPRECATED",
    "HOOKS",
    "Addon",
    "Cut",
    "Delay",
    "Deny",
    "Deprecated",
    "Direction",
    "Facts",
    "MeshSummary",
    "Metric",
    "Path",
    "Prefer",
    "Record",
    "Verdict",
    "Workload",
]

#: The version of this API. An addon that states a higher one in :attr:`Addon.api` is not loaded.
API_VERSION: Final = 1

_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


class Direction(StrEnum):
    """Which end of a connection this proxy serves."""

    OUTBOUND = "outbound"
    INBOUND = "inbound"


class Path(StrEnum):
    """How a connection leaves this proxy (outbound), or how it arrived here (inbound)."""

    DIRECT = "direct"
    """Plain TCP."""
    TUNNEL = "tunnel"
    """A tunnel with mutual TLS, over the wire or within the node."""
    DOUBLE_TUNNEL = "double tunnel"
    """A tunnel in a tunnel, through another network's gateway."""


class Workload(NamedTuple):
    """One side of a connection, as the control plane or the peer's proxy describes it. Unknown texts are empty.

    Attributes:
        name: the pod's name.
        namespace: the pod's namespace.
        service_account: the pod's service account.
        node: the name of its node.
        cluster: the id of its cluster.
        labels: as sent by the control plane. In an Istio mesh these are ``app``, ``version``,
            ``topology.kubernetes.io/region``, ``topology.kubernetes.io/zone`` and ``kubernetes.io/hostname``.
    """

    name: str = ""
    namespace: str = ""
    service_account: str = ""
    node: str = ""
    cluster: str = ""
    labels: Mapping[str, str] = _NO_LABELS


class Facts(NamedTuple):
    """The known facts of a connection when a hook is called. Unknown texts are empty.

    Attributes:
        connection: the connection's number, unique in the process and the same in all hooks.
        dialect: the front end: ``istio`` or ``envoy``.
        direction: which end of the connection this proxy serves.
        path: how the connection leaves or has arrived.
        source: the workload that opened the connection.
        source_address: the source's IP address.
        source_port: the source's port.
        source_identity: the source's SPIFFE identity. Inbound: proven by its certificate. Outbound: the pod's own.
        destination: the destination workload. Outbound: the chosen endpoint.
        destination_address: outbound: the IP address that the application dialled. Inbound: the application's.
        destination_port: the destination's port.
        destination_identity: outbound: the SPIFFE identity that the far end must prove. Inbound: the pod's own.
        endpoint: ``host:port`` of the chosen endpoint (outbound).
        service: the host name of the service.
        names: the names that the proxy's DNS resolved to this address for the pod (outbound).
        server_name: SNI of a TLS connection that is passed through. Only for addons with ``server_name`` in
            :attr:`Addon.needs`.
    """

    connection: int = 0
    dialect: str = "istio"
    direction: Direction = Direction.OUTBOUND
    path: Path = Path.DIRECT
    source: Workload = Workload()
    source_address: str = ""
    source_port: int = 0
    source_identity: str = ""
    destination: Workload = Workload()
    destination_address: str = ""
    destination_port: int = 0
    destination_identity: str = ""
    endpoint: str = ""
    service: str = ""
    names: tuple[str, ...] = ()
    server_name: str = ""


class Record(NamedTuple):
    """The record of an ended connection.

    Attributes:
        facts: the connection's last known facts.
        bytes_sent: from the source to the destination.
        bytes_received: from the destination to the source.
        duration_s: seconds from its accept to its end.
        reason: the text of its access line. Empty if it ended normally.
        addon: names of the addons that denied, delayed, directed or cut it, joined by commas.
    """

    facts: Facts
    bytes_sent: int = 0
    bytes_received: int = 0
    duration_s: float = 0.0
    reason: str = ""
    addon: str = ""


class MeshSummary(NamedTuple):
    """The size of the mesh after a change, as this process knows it.

    Attributes:
        workloads: the number of workloads.
        services: the number of services.
        policies: the number of policies.
    """

    workloads: int = 0
    services: int = 0
    policies: int = 0


@dataclass(frozen=True, slots=True)
class Deny:
    """Refuse the connection.

    Attributes:
        reason: the text for the access line. Required.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait before the upstream is dialled. Delays of several addons add up.

    Attributes:
        seconds: the length of the delay, more than 0 and at most 300.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Prefer:
    """Prefer endpoints with these labels. If routing allows no such endpoint, all endpoints are considered.

    Attributes:
        labels: the preferred labels, at least one.
    """

    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Cut:
    """Let the connection open, and end it later. The lowest limits of several addons apply.

    Attributes:
        reason: the text for the access line.
        after_s: seconds since the connection opened. ``None``: no limit of time.
        after_bytes: bytes of both directions together, checked every 10 ms. ``None``: no limit of bytes.
    """

    reason: str
    after_s: float | None = None
    after_bytes: int | None = None


Verdict = Deny | Delay | Prefer | Cut


class Metric(NamedTuple):
    """One family of the metrics page. Its name there is ``ztunnel_addon_ADDON_NAME``.

    Attributes:
        name: letters, digits and underscores. Counters have no suffix ``_total`` here.
        help: the description of the family: one sentence without its full stop.
        values: the samples by label values, in the order of ``labels``. Samples of several processes are added.
        labels: the names of the labels.
        kind: ``counter`` or ``gauge``.
    """

    name: str
    help: str
    values: Mapping[tuple[str, ...], float]
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge"] = "counter"


class Addon:
    """The settings of an addon, all optional. A class without this base can have the same attributes.

    Attributes:
        name: the addon's name in logs, metrics and options. Default: the class's name in lower case with dashes.
        api: the version of this API that the addon was written for.
        pure: whether the verdicts follow from the facts alone, so that ``ztunnel explain`` can call the hooks. An
            addon that counts, draws lots or reads the clock sets it to false.
        on_error: the verdict of a hook that fails, takes too long or belongs to a suspended addon: ``deny`` or
            ``ignore``. Can be overridden by the option ``on_error``.
        budget_us: the microseconds budgeted for one call of a ``def`` hook; longer calls are counted and logged.
        time_limit_s: the seconds after which an ``async def`` hook is cancelled and counts as failed.
        needs: facts that are obtained only on request, because this takes time. ``server_name`` is the only one.
        Options: a frozen dataclass whose fields are the addon's options, with types ``str``, ``int``, ``float``,
            ``bool``, tuples of these, and ``Mapping[str, str]``.
    """

    name: ClassVar[str] = ""
    api: ClassVar[int] = API_VERSION
    pure: ClassVar[bool] = True
    on_error: ClassVar[str] = "deny"
    budget_us: ClassVar[float] = 200.0
    time_limit_s: ClassVar[float] = 1.0
    needs: ClassVar[frozenset[str]] = frozenset()
    Options: ClassVar[type[Any]]


class _Hooks(Protocol):
    """The signatures of all hooks. ``connecting`` and ``accepting`` can also be ``async def``."""

    def configured(self, options: Any) -> None:
        """Receive the addon's options, once before the first connection. They are ``None`` for an addon without
        ``Options``.
        """

    def connecting(self, facts: Facts) -> Verdict | None:
        """Decide about an outbound connection, before an upstream is dialled."""

    def accepting(self, facts: Facts) -> Deny | None:
        """Decide about an inbound connection that the mesh's policies allow."""

    def opened(self, facts: Facts) -> None:
        """Observe that a connection is open: its bytes flow from now on."""

    def closed(self, record: Record) -> None:
        """Observe the end of a connection that was open."""

    def refused(self, record: Record) -> None:
        """Observe the end of a connection that never opened."""

    def mesh_changed(self, summary: MeshSummary) -> None:
        """Observe that the mesh has changed. Called at most once a second."""

    def metrics(self) -> Iterable[Metric]:
        """Return the addon's metric families for the current scrape."""

    def done(self) -> None:
        """Release all resources, because the process ends or another version replaces this one."""


#: The name of each hook, and whether its return value decides about the connection.
HOOKS: Final[Mapping[str, bool]] = MappingProxyType(
    {
        "configured": False,
        "connecting": True,
        "accepting": True,
        "opened": False,
        "closed": False,
        "refused": False,
        "mesh_changed": False,
        "metrics": False,
        "done": False,
    }
)


class Deprecated(NamedTuple):
    """A hook or setting that a later release will remove. An addon that uses it is loaded, and a warning is
    logged.

    Attributes:
        since: the release that deprecated it.
        removed_in: the first release without it. instead: its replacement.
    """

    since: str
    removed_in: str
    instead: str


#: Deprecated names, by hook or by setting of :class:`Addon`.
DEPRECATED: Final[Mapping[str, Deprecated]] = MappingProxyType({})
