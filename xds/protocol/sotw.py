"""The client half of state-of-the-world xDS, one stream at a time, without I/O.

The rules for each type on a stream:

* The first request has an empty nonce, and the last version accepted on any stream.
* Every response is answered. An ACK has the response's version and nonce. A NACK has the previously accepted
  version, the response's nonce and an error. A change of names is a request with the current version and the last
  nonce.
* A response with listeners or clusters is complete: missing resources were removed. Responses of other types can
  be partial. Duplicates are refused, and resources without a subscription are ignored.

:mod:`xds.protocol.client_state` has the interface and the terms.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from xds.proto import registry
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import Resource as WrappedResource
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.client_state import BadResponse, ClientOptions, Lifetimes, Received, Refused, failure, ttl_of
from xds.protocol.resource import Resource, Update
from xds.protocol.types import COMPLETE_TYPES, name_of

_WRAPPER = registry.type_url(WrappedResource)


@dataclass(slots=True)
class _Type:
    type_url: str
    wanted: set[str] | None = field(default_factory=set)
    in_order: list[str] | None = None
    """A cache of ``wanted`` in sorted order."""
    version: str = ""
    nonce: str = ""
    opened: bool = False
    """Whether a request for this type was already sent on this stream."""
    dirty: bool = False
    """Whether a request must be sent because the requested names have changed."""
    repeat: bool = False
    """Whether a separate request must be sent besides an ACK or NACK, because servers ignore known names in
    those.
    """
    named: bool = False
    """Whether names of this type were already sent on this stream. After that, an empty list no longer means all
    resources.
    """
    unanswered: int = 0
    answers: list[DiscoveryRequest] = field(default_factory=list)

    def names(self) -> list[str]:
        if self.wanted is None:
            return ["*"] if self.named else []
        self.named = self.named or bool(self.wanted)
        if self.in_order is None:
            self.in_order = sorted(self.wanted)
        return self.in_order


class SotwClient:
    """The state-of-the-world client's state of all types on one stream of :class:`DiscoveryRequest` and
    :class:`DiscoveryResponse`.
    """

    def __init__(self, options: ClientOptions) -> None:
        self.control_plane = ""
        self._options = options
        self._types: dict[str, _Type] = {}
        self._lifetimes = Lifetimes()
        self._stream = 0
        self._is_open = False
        self._node_due = True

    def want(self, type_url: str, names: frozenset[str] | None, *, again: Iterable[str] = ()) -> None:
        """Implement :meth:`ClientState.want`. For ``again``, the request is repeated unchanged, like in Envoy."""
        state = self._types.setdefault(type_url, _Type(type_url))
        if names is not None and state.wanted is not None:
            self._lifetimes.ended(type_url, state.wanted - names)
        # No request can end a wildcard subscription, or request its resources again. So resources that are no
        # longer requested are ignored when they arrive.
        state.repeat = state.repeat or any(True for _ in again)
        if names != state.wanted or state.repeat:
            state.dirty = True
        state.wanted = None if names is None else set(names)
        state.in_order = None

    def change(
        self, type_url: str, added: Collection[str], dropped: Collection[str], again: Iterable[str]
    ) -> None:
        state = self._types.setdefault(type_url, _Type(type_url))
        assert state.wanted is not None, "everything is wanted already"
        if not state.wanted.issuperset(added) or not state.wanted.isdisjoint(dropped):
            state.wanted.update(added)
            state.wanted.difference_update(dropped)
            state.in_order = None
            state.dirty = True
        if any(True for _ in again):
            state.dirty = state.repeat = True
        self._lifetimes.ended(type_url, dropped)

    def stream_opened(self) -> None:
        self._stream += 1
        self._is_open = True
        self._node_due = True
        for state in self._types.values():
            state.nonce = ""
            state.opened = state.named = False
            state.unanswered = 0
            state.answers.clear()

    def stream_closed(self) -> None:
        self._is_open = False

    def receive(self, response: DiscoveryResponse, now_s: float) -> Received | Refused | None:
        if response.control_plane.identifier:
            self.control_plane = response.control_plane.identifier
        state = self._types.get(response.type_url)
        if state is None:
            return None
        state.nonce = response.nonce
        try:
            all_resources, heartbeats = resources_of(response, response.type_url)
        except BadResponse as bad:
            self._answer(state, response.nonce, str(bad))
            return Refused(type_url=state.type_url, version=response.version_info, reason=str(bad))
        wanted = state.wanted
        resources = [resource for resource in all_resources if wanted is None or resource.name in wanted]
        renewed = [
            held
            for name, ttl_s in heartbeats
            if (held := self._lifetimes.renewed(state.type_url, name, ttl_s, now_s)) is not None
        ]
        only_heartbeats = bool(heartbeats) and not resources
        complete = state.type_url in COMPLETE_TYPES
        if only_heartbeats or state.wanted == set():
            state.version = response.version_info
            self._answer(state, response.nonce)
            return None
        if complete:
            # A heartbeat has no body. Add its resource to the complete list, so that the resource does not count
            # as removed.
            resources.extend(renewed)
        state.unanswered += 1
        update = Update(
            type_url=state.type_url, version=response.version_info, resources=tuple(resources), complete=complete
        )
        return Received(update=update, nonces=(response.nonce,), stream=self._stream, arrived_s=now_s)

    def accept(self, received: Received) -> None:
        update = received.update
        state = self._types[update.type_url]
        state.version = update.version
        for resource in update.resources:
            self._lifetimes.started(update.type_url, resource, received.arrived_s)
        if update.complete:
            present = {resource.name for resource in update.resources}
            self._lifetimes.ended(update.type_url, self._lifetimes.names(update.type_url) - present)
        self._answered(state, received, None)

    def reject(self, received: Received, reason: str, rejected: Collection[str] | None = None) -> None:
        self._answered(self._types[received.update.type_url], received, reason)

    def requests_to_send(self) -> list[DiscoveryRequest]:
        if not self._is_open:
            return []
        requests: list[DiscoveryRequest] = []
        for state in self._types.values():
            if not state.opened:
                if state.wanted == set():
                    state.dirty = False
                    continue
                state.opened, state.dirty, state.repeat = True, False, False
                requests.append(self._request(state, ""))
                continue
            requests.extend(state.answers)
            if state.answers:
                # Put the current names into the newest ACK or NACK.
                del requests[-1].resource_names[:]
                requests[-1].resource_names.extend(state.names())
                state.answers.clear()
                state.dirty = state.repeat
            if state.dirty and not state.unanswered:
                state.dirty = state.repeat = False
                # The names are sent even if the list is empty: to a server it means all resources, unless this
                # stream has requested names before.
                requests.append(self._request(state, state.nonce))
        for request in requests:
            if self._node_due or not self._options.node_on_first_only:
                request.node.CopyFrom(self._options.node)
                self._node_due = False
        return requests

    def next_expiry_s(self) -> float | None:
        return self._lifetimes.next_expiry_s()

    def expire(self, now_s: float) -> list[Update]:
        return [
            Update(type_url=type_url, version=self._types[type_url].version, resources=(), removed=names)
            for type_url, names in self._lifetimes.expired(now_s)
        ]

    def _request(self, state: _Type, nonce: str) -> DiscoveryRequest:
        return DiscoveryRequest(
            version_info=state.version,
            resource_names=state.names(),
            type_url=state.type_url,
            response_nonce=nonce,
        )

    def _answered(self, state: _Type, received: Received, reason: str | None) -> None:
        if received.stream == self._stream:
            state.unanswered -= len(received.nonces)
            # Answer only the newest of the merged responses, because servers ignore answers with older nonces.
            self._answer(state, received.nonces[-1], reason)

    def _answer(self, state: _Type, nonce: str, reason: str | None = None) -> None:
        request = self._request(state, nonce)
        if reason is not None:
            request.error_detail.CopyFrom(failure(reason))
        state.answers.append(request)


def resources_of(
    response: DiscoveryResponse, type_url: str
) -> tuple[list[Resource], list[tuple[str, float | None]]]:
    """Unwrap a response. Return its resources, and the names and times to live of heartbeats.

    Raises:
        BadResponse: the response has duplicates, resources of other types, or malformed resources.
    """
    resources: list[Resource] = []
    heartbeats: list[tuple[str, float | None]] = []
    seen: set[str] = set()
    for packed in response.resources:
        name, body, ttl_s = _unwrap(packed, type_url)
        if name in seen:
            raise BadResponse(f"duplicate name {name} found among added/updated resources")
        seen.add(name)
        if body is None:
            heartbeats.append((name, ttl_s))
        else:
            resources.append(Resource(name=name, version=response.version_info, body=body, ttl_s=ttl_s))
    return resources, heartbeats


def _unwrap(packed: AnyMessage, type_url: str) -> tuple[str, AnyMessage | None, float | None]:
    """Return a resource's name, body (None for a heartbeat) and time to live."""
    name, ttl_s = "", None
    try:
        if packed.type_url == _WRAPPER:
            wrapper = registry.unpack(packed)
            assert isinstance(wrapper, WrappedResource)
            name = wrapper.name
            if wrapper.HasField("ttl"):
                ttl_s = ttl_of(wrapper.ttl)
            if not wrapper.HasField("resource"):
                if not name:
                    raise BadResponse("a resource has neither a name nor a body")
                return name, None, ttl_s
            packed = wrapper.resource
        if packed.type_url != type_url:
            raise BadResponse(
                f"type URL {packed.type_url} embedded in an individual Any does not match "
                f"the message-wide type URL {type_url}"
            )
        return name or name_of(packed), packed, ttl_s
    except (registry.UnknownType, registry.MalformedMessage) as error:
        raise BadResponse(str(error)) from None
