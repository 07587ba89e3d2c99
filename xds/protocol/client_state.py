"""The common parts of the two xDS client variants (state of the world and delta): interface, events, and times to
live.

A client half is a state machine without I/O. Its owner passes in the requested names (:meth:`ClientState.want`),
the opening and closing of streams, and the received messages. The client half returns events, and after every call
it has the requests to send. A :class:`Received` stays open until its owner answers it with ``accept`` or
``reject``. Other types continue in the meantime. No request of its own type is sent while it is open, like in
Envoy, so a change of names is sent together with the answer.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.google.rpc.status_pb2 import Status
from xds.proto.well_known import Duration
from xds.protocol.resource import Resource, Update

#: The error code google.rpc.Code.INTERNAL, which Envoy puts into every NACK.
INTERNAL = 13

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message, contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A response to apply, or several merged ones. Answer it with ``accept`` or ``reject``, oldest first per type.

    Attributes:
        nonces: the nonces of all merged responses, oldest first.
        stream: the number of the response's stream. An answer after a reconnect changes the state, but sends no
            request.
        arrived_s: the arrival time of the newest response; times to live count from then.
        versions: the resources' versions by name, if they were already collected. A large response is collected in
            steps.
        serial: the serial number of the newest merged response. Responses of the same type with smaller numbers
            are merged into this one, or were answered.
    """

    update: Update
    nonces: tuple[str, ...]
    stream: int
    arrived_s: float
    versions: dict[str, str] | None = field(default=None, compare=False, repr=False)
    serial: int = field(default=0, compare=False, repr=False)

    def then(self, newer: "Received") -> "Received":
        """Merge a later response into this one, and return the result.

        While a receiver warms, servers send further responses without waiting for an ACK. Merging keeps the queue
        as small as the configuration itself.
        """
        return Received(
            update=_merged(self.update, newer.update),
            nonces=(*self.nonces, *newer.nonces) if self.stream == newer.stream else newer.nonces,
            stream=newer.stream,
            arrived_s=newer.arrived_s,
            serial=newer.serial,
        )


def _merged(older: Update, newer: Update) -> Update:
    if newer.complete:
        return newer
    resources = {resource.name: resource for resource in older.resources}
    for name in newer.removed:
        resources.pop(name, None)
    resources.update((resource.name, resource) for resource in newer.resources)
    removed = dict.fromkeys((*older.removed, *newer.removed))
    return Update(
        type_url=newer.type_url,
        version=newer.version,
        resources=tuple(resources.values()),
        removed=tuple(name for name in removed if name not in resources),
        complete=older.complete,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A response that breaks a rule of the protocol. It was answered with a NACK at once."""

    type_url: str
    version: str
    reason: str


class ClientState(Protocol[Request, Response]):
    """The client half of xDS, in one of the variants state of the world and delta."""

    control_plane: str
    """The identifier by which the server has named itself, or an empty text."""

    def want(self, type_url: str, names: frozenset[str] | None, *, again: Iterable[str] = ()) -> None:
        """Replace the requested names of one type. ``None`` subscribes to all names, an empty set to none.

        ``again`` has the names of resources that the server must send another time.
        """

    def change(
        self, type_url: str, added: Collection[str], dropped: Collection[str], again: Iterable[str]
    ) -> None:
        """Add and remove requested names. The cost depends on the change, not on the number of requested names.

        Must not be called for a type whose wildcard is requested.
        """

    def stream_opened(self) -> None:
        """A new stream is open: subscribe to all types again, in the order of their first subscription."""

    def stream_closed(self) -> None:
        """The stream has ended: stop sending until the next stream. Versions, names and times to live are kept."""

    def receive(self, response: Response, now_s: float) -> Received | Refused | None:
        """Process one response. Return None for a response without resources to apply (heartbeats, types without a
        subscription).
        """

    def accept(self, received: Received) -> None:
        """The update is applied."""

    def reject(self, received: Received, reason: str, rejected: Collection[str] | None = None) -> None:
        """Refuse an update, in part or as a whole. Refused resources keep their previous versions.

        ``rejected`` names the refused resources if all others of the update were accepted.
        """

    def requests_to_send(self) -> list[Request]:
        """Return the requests to send now, and remove them from the queue."""

    def next_expiry_s(self) -> float | None:
        """Return the next time at which :meth:`expire` must be called, by the clock given to :meth:`receive`."""

    def expire(self, now_s: float) -> list[Update]:
        """Return updates that remove the resources whose time to live has passed without renewal."""


class BadResponse(Exception):
    """A response breaks a rule of the protocol. The error's text is sent in the NACK."""


@dataclass(slots=True)
class Lifetimes:
    """Times to live for resources of all types. The caller supplies the clock."""

    _held: dict[tuple[str, str], tuple[float, Resource]]

    def __init__(self) -> None:
        self._held = {}

    def started(self, type_url: str, resource: Resource, now_s: float) -> None:
        """Record the time to live of a received resource. If it has none, an earlier time to live of the same name
        is dropped.
        """
        if resource.ttl_s is None:
            self._held.pop((type_url, resource.name), None)
        else:
            self._held[type_url, resource.name] = now_s + resource.ttl_s, resource

    def renewed(self, type_url: str, name: str, ttl_s: float | None, now_s: float) -> Resource | None:
        """Process a heartbeat, which renews a time to live. Return the renewed resource, or None if it has no time
        to live here.
        """
        held = self._held.get((type_url, name))
        if held is None:
            return None
        self.started(type_url, _with_ttl(held[1], ttl_s), now_s)
        return held[1]

    def ended(self, type_url: str, names: Iterable[str]) -> None:
        """Forget removed resources."""
        for name in names:
            self._held.pop((type_url, name), None)

    def names(self, type_url: str) -> set[str]:
        """Return the names of one type's resources that have a time to live."""
        return {name for held_type, name in self._held if held_type == type_url}

    def next_expiry_s(self) -> float | None:
        """Return the earliest time at which a resource expires."""
        return min((at for at, _ in self._held.values()), default=None)

    def expired(self, now_s: float) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Remove the expired resources and return their names, by type."""
        gone: dict[str, list[str]] = {}
        for (type_url, name), (at, _) in list(self._held.items()):
            if at <= now_s:
                del self._held[type_url, name]
                gone.setdefault(type_url, []).append(name)
        for type_url, names in gone.items():
            yield type_url, tuple(names)


def _with_ttl(resource: Resource, ttl_s: float | None) -> Resource:
    return Resource(name=resource.name, version=resource.version, body=resource.body, ttl_s=ttl_s)


def ttl_of(duration: Duration) -> float:
    """Return a protobuf duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a control plane's use of the xDS protocol differs from Envoy's.

    Attributes:
        nack_code: the error detail's code.
        node_per_type: whether the first request of each type contains the node, not only the first of the stream.
        one_by_one: whether resources are checked separately: types of bodies are not compared with the response's
            type, a resource without a body is passed to the receiver, and there are no times to live.
        on_demand: for these types the server sends requested names only (``*`` subscribed and unsubscribed in one
            request).
        keeps_bodies: whether accepted resources are kept for later subscriptions.
        response_limit_bytes: the longest accepted response. None allows any length.
    """

    nack_code: int = INTERNAL
    node_per_type: bool = False
    one_by_one: bool = False
    on_demand: frozenset[str] = frozenset()
    keeps_bodies: bool = True
    response_limit_bytes: int | None = None


ENVOY = Dialect()

#: The protocol between the Rust ztunnel and istiod. istiod is tested only with this protocol.
ISTIO = Dialect(
    nack_code=0, node_per_type=True, one_by_one=True, keeps_bodies=False, response_limit_bytes=200 * 2**20
)


def failure(reason: str, code: int = INTERNAL) -> Status:
    """Return the error detail for a NACK with this reason."""
    return Status(code=code, message=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Settings that affect the content of requests, besides names and versions.

    Attributes:
        node_on_first_only: send ``node`` only in the first request of a stream (Envoy's
            ``set_node_on_first_message_only``), otherwise in each.
        dialect: the variant of the protocol.
    """

    node: Node
    node_on_first_only: bool = True
    dialect: Dialect = ENVOY
