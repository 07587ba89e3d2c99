"""The server half of xDS, in both variants and without I/O. It decides what to send on one client's stream.

A :class:`Snapshot` has all resources of one node. A stream's state compares it with the resources sent so far, and
returns the next response. Its rules:

* At most one response per type is unanswered. Changes made in the meantime are sent together, after its ACK or
  NACK.
* A resource that the client refused is not sent again until it changes.
* Requests with a stale nonce get no response. In the incremental variant their subscriptions still count.
* Types are sent in the order CDS, EDS, LDS, RDS, SDS, so that referenced resources come first.
* In the incremental variant a resource can have aliases and companions: a client that requests an address gets its
  workload or service, a service's workloads with the service, and from then on the changes of all these resources.

Times to live are passed on but not renewed: a resource that has one expires at the client unless a later
snapshot changes it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.message import Message

from xds.errors import ConfigError
from xds.proto import registry
from xds.proto.envoy.config.core.v3.core_pb2 import ControlPlane, Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import (
    DeltaDiscoveryRequest,
    DeltaDiscoveryResponse,
    DiscoveryRequest,
    DiscoveryResponse,
)
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import Resource as WrappedResource
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.client_state import Request, Response
from xds.protocol.resource import Resource
from xds.protocol.types import NAMED_TYPES, PUSH_ORDER, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A message with a separate name, because it contains none, such as the resources of Istio's node proxies
    (incremental variant only).

    Attributes:
        aliases: other names that clients can request the resource by. Several resources can share an alias.
        companions: names of resources that are sent together with this one.
    """

    name: str
    message: Message
    aliases: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All resources for one node, by type URL and name. :meth:`of` builds a snapshot.

    Attributes:
        aliases: per type URL, names of resources by alias.
        companions: per type URL, see :class:`Named`.
        own: by type URL, the names of the resources that belong to the client's own node. A client gets these
            without requesting them.
    """

    resources: Mapping[str, Mapping[str, Resource]] = field(default_factory=dict)
    aliases: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    companions: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    own: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: Iterable[Message | AnyMessage | Named]) -> "Snapshot":
        """Build a snapshot. A resource's version is a hash of its bytes, so that equal content has an equal
        version.

        Raises:
            ConfigError: two messages of one type have the same name.
        """
        resources: dict[str, dict[str, Resource]] = {}
        aliases: dict[str, dict[str, frozenset[str]]] = {}
        companions: dict[str, dict[str, tuple[str, ...]]] = {}
        for message in messages:
            named = message if isinstance(message, Named) else None
            content = message.message if isinstance(message, Named) else message
            body = content if isinstance(content, AnyMessage) else registry.pack(content)
            name = name_of(body) if named is None else named.name
            of_type = resources.setdefault(body.type_url, {})
            if name in of_type:
                raise ConfigError(f"two resources of type {body.type_url} are named {name!r}")
            other = named.aliases if named is not None else ()
            of_type[name] = Resource(name=name, version=_digest([body.value]), body=body, aliases=other)
            if named is None:
                continue
            by_alias = aliases.setdefault(body.type_url, {})
            for alias in other:
                by_alias[alias] = by_alias.get(alias, frozenset()) | {name}
            companions.setdefault(body.type_url, {})[name] = named.companions
        return cls(resources, aliases, companions)

    def of_type(self, type_url: str) -> Mapping[str, Resource]:
        """Return the resources of one type by name."""
        return self.resources.get(type_url, {})

    def carried(self, type_url: str, names: AbstractSet[str] | None = None) -> list[Resource]:
        """Return the resources of a state-of-the-world response: those with one of ``names``, or all of the type
        for None.
        """
        of_type = self.of_type(type_url)
        return [of_type[name] for name in sorted(of_type if names is None else names & of_type.keys())]

    def version(self, type_url: str, names: AbstractSet[str] | None = None) -> str:
        """Return the version of a state-of-the-world response for ``names``: a hash of its resources."""
        carried = self.carried(type_url, names)
        return _digest(part.encode() for resource in carried for part in (resource.name, resource.version))

    def asked(self, type_url: str, names: AbstractSet[str]) -> set[str]:
        """Return the names of the resources that a client gets if it requests ``names``, which can be aliases."""
        of_type = self.of_type(type_url)
        found = {name for name in names if name in of_type}
        if type_url in self.aliases:
            aliases, companions = self.aliases[type_url], self.companions[type_url]
            found.update(*(aliases[name] for name in names if name in aliases))
            for name in list(found):
                found.update(companion for companion in companions[name] if companion in of_type)
        return found


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A client's ACK or NACK of a response.

    Attributes:
        error: the error text of a NACK. None for an ACK.
    """

    type_url: str
    version: str
    error: str | None = None


class ServerState(Protocol[Request, Response]):
    """The server's state of one stream, in either variant. ``node`` is None before the first request."""

    node: Node | None

    def receive(self, request: Response) -> Answered | None:
        """Process one request. Return the client's answer if the request is an ACK or NACK."""

    def update(self, snapshot: Snapshot) -> None:
        """Replace the resources that the client should have."""

    def responses_to_send(self) -> list[Request]:
        """Return the responses to send now, and remove them from the queue."""


def _in_push_order(types: Iterable[str]) -> list[str]:
    rank = {type_url: index for index, type_url in enumerate(PUSH_ORDER)}
    return sorted(types, key=lambda type_url: rank.get(type_url, len(rank)))


@dataclass(slots=True)
class _SotwType:
    names: frozenset[str] | None
    nonce: str = ""
    version: str = ""
    """The version of the last sent response. Empty before the first response."""
    sent_names: frozenset[str] | None = frozenset()
    again: bool = False
    """Whether a response must be sent even if nothing has changed."""
    waiting: bool = False
    """Whether the ACK or NACK of the last response is still pending."""


class SotwServer:
    """The server's state of one stream in the state-of-the-world variant."""

    def __init__(self, identifier: str = "", snapshot: Snapshot | None = None) -> None:
        self.node: Node | None = None
        self._identifier = identifier
        self._snapshot = snapshot or Snapshot()
        self._types: dict[str, _SotwType] = {}
        self._sent = 0

    def receive(self, request: DiscoveryRequest) -> Answered | None:
        if self.node is None:
            self.node = request.node
        state = self._types.get(request.type_url)
        names = frozenset(request.resource_names)
        if state is None:
            wildcard = "*" in names or (not names and request.type_url not in NAMED_TYPES)
            self._types[request.type_url] = _SotwType(None if wildcard else names)
            return None
        if request.response_nonce != state.nonce:
            return None
        before = state.names
        # An empty list of names means all resources if the client has subscribed to all. After a list of names, it
        # means none.
        if "*" in names:
            state.names = None
        elif names or state.names is not None:
            state.names = names
        if state.names is not None and before is not None:
            # Send the resources again if the list has new names: the client can have had them earlier and dropped
            # their resources. Also send them if the client repeats the names without answering a response, because
            # it then has lost the resources.
            repeated = state.names == before and not state.waiting
            state.again = state.again or repeated or not state.names <= before
        if not state.waiting:
            return None
        state.waiting = False
        error = request.error_detail.message if request.HasField("error_detail") else None
        return Answered(type_url=request.type_url, version=state.version, error=error)

    def update(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def responses_to_send(self) -> list[DiscoveryResponse]:
        responses: list[DiscoveryResponse] = []
        for type_url in _in_push_order(self._types):
            state = self._types[type_url]
            if state.waiting:
                continue
            version = self._snapshot.version(type_url, state.names)
            new_names = state.names is not None and not state.names <= (state.sent_names or frozenset())
            if version == state.version and not new_names and not state.again:
                continue
            if state.version and state.names == frozenset():
                continue
            self._sent += 1
            state.nonce, state.version, state.waiting = str(self._sent), version, True
            state.sent_names, state.again = state.names, False
            resources = self._snapshot.carried(type_url, state.names)
            responses.append(
                DiscoveryResponse(
                    version_info=version,
                    type_url=type_url,
                    nonce=state.nonce,
                    resources=[_sotw_body(resource) for resource in resources],
                    control_plane=_control_plane(self._identifier),
                )
            )
        return responses


def _sotw_body(resource: Resource) -> AnyMessage:
    return resource.body if resource.ttl_s is None else registry.pack(_wrapped(resource))


def _wrapped(resource: Resource) -> WrappedResource:
    wrapped = WrappedResource(name=resource.name, version=resource.version, resource=resource.body)
    wrapped.aliases.extend(resource.aliases)
    if resource.ttl_s is not None:
        wrapped.ttl.FromNanoseconds(round(resource.ttl_s * 1e9))
    return wrapped


def _control_plane(identifier: str) -> ControlPlane | None:
    return ControlPlane(identifier=identifier) if identifier else None


@dataclass(slots=True)
class _DeltaType:
    wildcard: bool
    names: set[str] = field(default_factory=set)
    known: dict[str, str] = field(default_factory=dict)
    """For each name, the version of the resource that the client has, or that was sent to it."""
    missing: set[str] = field(default_factory=set)
    """Requested names without a resource, about which no response was sent yet."""
    brought: set[str] = field(default_factory=set)
    """The names of all resources that were sent to an on-demand client for any reason. Later changes of these are
    sent, too.
    """
    nonce: str = ""
    version: str = ""
    waiting: bool = False
    answered: bool = False
    """Whether the first request was answered. It gets a response even without resources."""


class DeltaServer:
    """The server's state of one stream in the incremental variant."""

    def __init__(self, identifier: str = "", snapshot: Snapshot | None = None) -> None:
        self.node: Node | None = None
        self._identifier = identifier
        self._snapshot = snapshot or Snapshot()
        self._types: dict[str, _DeltaType] = {}
        self._sent = 0

    def receive(self, request: DeltaDiscoveryRequest) -> Answered | None:
        if self.node is None:
            self.node = request.node
        state = self._types.get(request.type_url)
        if state is None:
            wildcard = not request.resource_names_subscribe and request.type_url not in NAMED_TYPES
            state = self._types[request.type_url] = _DeltaType(
                wildcard, known=dict(request.initial_resource_versions)
            )
        self._subscribe(state, request)
        if not request.response_nonce or request.response_nonce != state.nonce or not state.waiting:
            return None
        state.waiting = False
        error = request.error_detail.message if request.HasField("error_detail") else None
        return Answered(type_url=request.type_url, version=state.version, error=error)

    def update(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def responses_to_send(self) -> list[DeltaDiscoveryResponse]:
        responses: list[DeltaDiscoveryResponse] = []
        for type_url in _in_push_order(self._types):
            state = self._types[type_url]
            if state.waiting:
                continue
            of_type = self._snapshot.of_type(type_url)
            names = of_type.keys() if state.wildcard else self._names(type_url, state)
            changed = [of_type[name] for name in sorted(names) if state.known.get(name) != of_type[name].version]
            gone = (state.known.keys() | state.missing) - of_type.keys()
            removed = sorted(name for name in gone if not self._snapshot.asked(type_url, {name}))
            if not changed and not removed and state.answered:
                continue
            state.answered = True
            state.missing.clear()
            for name in removed:
                state.known.pop(name, None)
            state.known.update((resource.name, resource.version) for resource in changed)
            self._sent += 1
            state.nonce, state.waiting = str(self._sent), True
            state.version = _digest(
                part.encode() for name in sorted(names) for part in (name, of_type[name].version)
            )
            responses.append(
                DeltaDiscoveryResponse(
                    system_version_info=state.version,
                    type_url=type_url,
                    nonce=state.nonce,
                    resources=[_wrapped(resource) for resource in changed],
                    removed_resources=removed,
                    control_plane=_control_plane(self._identifier),
                )
            )
        return responses

    def _names(self, type_url: str, state: _DeltaType) -> set[str]:
        """Return the names of the resources for a client that did not request all."""
        names = self._snapshot.asked(type_url, state.names)
        if type_url in self._snapshot.aliases:
            state.brought |= names | self._snapshot.own.get(type_url, frozenset())
            names |= state.brought & self._snapshot.of_type(type_url).keys()
        return names

    def _subscribe(self, state: _DeltaType, request: DeltaDiscoveryRequest) -> None:
        for name in request.resource_names_subscribe:
            if name == "*":
                state.wildcard = True
                continue
            state.names.add(name)
            state.missing.add(name)
            if name not in request.initial_resource_versions:
                for resource in {name} | self._snapshot.asked(request.type_url, {name}):
                    state.known.pop(resource, None)  # requested again, so sent again
        for name in request.resource_names_unsubscribe:
            if name == "*":
                state.wildcard = False
                if name in request.resource_names_subscribe:
                    # Istio's node proxies in on-demand mode begin a stream in this way. Their initial versions
                    # list the resources known from an earlier stream, and unanswered names with an empty version.
                    state.names.update(request.initial_resource_versions)
                    state.missing.update(request.initial_resource_versions)
                state.known = {known: version for known, version in state.known.items() if known in state.names}
                continue
            state.names.discard(name)
            state.brought.discard(name)
            state.missing.discard(name)
            state.known.pop(name, None)
