"""The client half of incremental xDS, one stream at a time, without I/O.

The rules for each type on a stream:

* The first request subscribes to all requested names, or to no name if all resources are requested. After a
  reconnect, it lists the versions of all held resources, and the server sends only the differences.
* A later request changes the subscription, with an empty nonce, or answers a response with its nonce and, for a
  refusal, an error. One request can do both.
* Versions come from accepted responses: after a NACK the old versions are still sent, except for the accepted
  resources of a partly refused response. A refused resource of such a response without an old version is sent with
  an empty one.

The differences of istiod and the Rust ztunnel are in :class:`xds.protocol.client_state.Dialect`: the node in the
first request of each type, types on demand, and requested names without an answer, which are sent with an empty
version.

:mod:`xds.protocol.client_state` has the interface and the terms.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DeltaDiscoveryResponse
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import Resource as WireResource
from xds.proto.google.rpc.status_pb2 import Status
from xds.protocol.client_state import BadResponse, ClientOptions, Lifetimes, Received, Refused, failure, ttl_of
from xds.protocol.resource import Resource, Update
from xds.protocol.types import varint

_RESOURCES = DeltaDiscoveryResponse.RESOURCES_FIELD_NUMBER
#: The number of resources unpacked per step, which takes about three milliseconds.
_STEP = 500


#: The name of an address that no workload or service has, for :meth:`DeltaClient._demands`.
_TOGGLED: Final = "/0.0.0.0"


@dataclass(slots=True)
class _Type:
    type_url: str
    wanted: set[str] | None = field(default_factory=set)
    held: dict[str, str] = field(default_factory=dict)
    """The versions of all accepted resources, by name."""
    version: str = ""
    opened: bool = False
    subscribed: set[str] = field(default_factory=set)
    """The names that this stream has requested. ``*`` means that a request after the first has subscribed to all
    names. Not used for on-demand types.
    """
    replaced: bool = False
    """Whether the next request must compare all of ``wanted`` with ``subscribed``, instead of only the names in
    ``touched``.
    """
    touched: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)
    on_demand: bool = False
    asked: dict[str, None] = field(default_factory=dict)
    """For on-demand types: the requested names that no response has contained yet."""
    asking: list[str] = field(default_factory=list)
    """The wanted names that this stream has not requested yet."""
    toggled: bool = False
    """For on-demand types: whether this stream is subscribed to :data:`_TOGGLED`."""
    unanswered: int = 0
    undecided: dict[int, Update] = field(default_factory=dict)
    """The updates that the owner has got and not yet accepted or rejected, by serial number."""
    answers: list[tuple[str, Status | None]] = field(default_factory=list)

    def claims(self) -> dict[str, str]:
        """Return the versions that a new stream's first request reports as held, by name.

        An update of an older stream can still be in progress. The resources that it removes are not reported. For
        the resources that it contains, the held version is uncertain, so they are reported with an empty version.
        The server then sends them or reports their removal.
        """
        if not self.undecided:
            return self.held
        claims = dict(self.held)
        for update in self.undecided.values():
            claims.update((resource.name, "") for resource in update.resources)
            for name in update.removed:
                claims.pop(name, None)
        return claims

    def subscription(self) -> set[str]:
        return {"*"} if self.wanted is None else self.wanted

    def wants(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted


class DeltaClient:
    """The delta client's state of all types on one stream of :class:`DeltaDiscoveryRequest` and
    :class:`DeltaDiscoveryResponse`.
    """

    def __init__(self, options: ClientOptions) -> None:
        self.control_plane = ""
        self._options = options
        self._types: dict[str, _Type] = {}
        self._lifetimes = Lifetimes()
        self._stream = 0
        self._serial = 0
        self._is_open = False
        self._node_due = True

    def _type(self, type_url: str) -> _Type:
        state = self._types.get(type_url)
        if state is None:
            state = _Type(type_url, on_demand=type_url in self._options.dialect.on_demand)
            self._types[type_url] = state
        return state

    def ask(self, type_url: str, names: Iterable[str]) -> None:
        """Request resources of an on-demand type by name, even if they were requested before."""
        state = self._type(type_url)
        for name in names:
            state.asked[name] = None
            if name not in state.asking:
                state.asking.append(name)

    def resume(self, type_url: str, versions: Mapping[str, str]) -> None:
        """Treat the resources of an earlier process as held. The first request lists their versions."""
        self._type(type_url).held = dict(versions)

    def want(self, type_url: str, names: frozenset[str] | None, *, again: Iterable[str] = ()) -> None:
        """Implement :meth:`ClientState.want`. For ``again``, the names are subscribed to a second time."""
        state = self._type(type_url)
        state.wanted = None if names is None else set(names)
        state.replaced = True
        gone = [name for name in state.held if not state.wants(name)]
        for name in gone:
            del state.held[name]
        self._lifetimes.ended(type_url, gone)
        state.again.update(name for name in again if state.wants(name))

    def change(
        self, type_url: str, added: Collection[str], dropped: Collection[str], again: Iterable[str]
    ) -> None:
        state = self._type(type_url)
        assert state.wanted is not None, "everything is wanted already"
        state.wanted.update(added)
        state.wanted.difference_update(dropped)
        for name in dropped:
            state.held.pop(name, None)
        self._lifetimes.ended(type_url, dropped)
        state.touched.update(added, dropped)
        state.again.update(name for name in again if name in state.wanted)

    def stream_opened(self) -> None:
        self._stream += 1
        self._is_open = True
        self._node_due = True
        for state in self._types.values():
            state.opened = False
            state.subscribed = set()
            state.asking.clear()
            state.toggled = False
            state.unanswered = 0
            state.answers.clear()

    def stream_closed(self) -> None:
        self._is_open = False

    def receive(self, response: DeltaDiscoveryResponse, now_s: float) -> Received | Refused | None:
        if response.control_plane.identifier:
            self.control_plane = response.control_plane.identifier
        state = self._types.get(response.type_url)
        if state is None:
            return None
        try:
            resources, heartbeats, removed = self._contents(response, state)
        except BadResponse as bad:
            state.answers.append((response.nonce, self._failure(str(bad))))
            return Refused(type_url=state.type_url, version=response.system_version_info, reason=str(bad))
        for name, ttl_s in heartbeats:
            self._lifetimes.renewed(state.type_url, name, ttl_s, now_s)
        if (heartbeats and not resources and not removed) or state.wanted == set():
            state.answers.append((response.nonce, None))
            return None
        state.unanswered += 1
        update = Update(
            type_url=state.type_url,
            version=response.system_version_info,
            resources=tuple(resources),
            removed=tuple(removed),
        )
        return self._handed_out(state, update, response.nonce, now_s)

    def receive_in_steps(self, data: bytes, now_s: float) -> Iterator[Received | Refused | None]:
        """Process one large packed response in steps. Each step yields; the last one yields the result of
        :meth:`receive`.

        A mesh of 200,000 workloads arrives as one response of 60 MB. Unpacking it in one call of protobuf blocks
        the process for a quarter of a second, including all other threads.

        Raises:
            DecodeError: the bytes are not a response.
        """
        rest = DeltaDiscoveryResponse()
        resources: list[Resource] = []
        versions: dict[str, str] = {}
        for number, (field_number, piece) in enumerate(_pieces(data), start=1):
            if field_number == _RESOURCES:
                resource = _resource(WireResource.FromString(piece))
                resources.append(resource)
                versions[resource.name] = resource.version
            else:
                rest.MergeFromString(piece)
            if number % _STEP == 0:
                yield None
        if not self._options.dialect.one_by_one or rest.type_url not in self._types:
            yield self.receive(DeltaDiscoveryResponse.FromString(data), now_s)
            return
        state = self._types[rest.type_url]
        self.control_plane = rest.control_plane.identifier or self.control_plane
        state.unanswered += 1
        update = Update(
            type_url=rest.type_url,
            version=rest.system_version_info,
            resources=tuple(resources),
            removed=tuple(rest.removed_resources),
        )
        yield self._handed_out(state, update, rest.nonce, now_s, versions)

    def _handed_out(
        self, state: _Type, update: Update, nonce: str, now_s: float, versions: dict[str, str] | None = None
    ) -> Received:
        self._serial += 1
        state.undecided[self._serial] = update
        return Received(
            update=update,
            nonces=(nonce,),
            stream=self._stream,
            arrived_s=now_s,
            versions=versions,
            serial=self._serial,
        )

    def accept(self, received: Received) -> None:
        self._hold(received, ())
        self._answered(self._types[received.update.type_url], received, None)

    def reject(self, received: Received, reason: str, rejected: Collection[str] | None = None) -> None:
        if rejected is not None:
            self._hold(received, rejected)
        self._answered(self._types[received.update.type_url], received, self._failure(reason))

    def _hold(self, received: Received, rejected: Collection[str]) -> None:
        """Record the versions of accepted resources."""
        update = received.update
        state = self._types[update.type_url]
        state.version = update.version
        if self._options.dialect.one_by_one:
            versions = received.versions
            if versions is None:
                versions = {resource.name: resource.version for resource in update.resources}
            for name in rejected:
                versions.pop(name, None)
            state.held.update(versions)
        else:
            for resource in update.resources:
                if state.wants(resource.name) and resource.name not in rejected:
                    state.held[resource.name] = resource.version
                    self._lifetimes.started(update.type_url, resource, received.arrived_s)
        for name in rejected:
            # An empty version makes the server send the resource again on the next stream, or report its removal,
            # which ends the fault that the receiver shows.
            if state.wants(name):
                state.held.setdefault(name, "")
        for name in update.removed:
            state.held.pop(name, None)
        self._lifetimes.ended(update.type_url, update.removed)
        if state.asked:
            for resource in update.resources:
                for name in (resource.name, *resource.aliases):
                    state.asked.pop(name, None)
            for name in update.removed:
                state.asked.pop(name, None)

    def _failure(self, reason: str) -> Status:
        return failure(reason, self._options.dialect.nack_code)

    def requests_to_send(self) -> list[DeltaDiscoveryRequest]:
        if not self._is_open:
            return []
        requests: list[DeltaDiscoveryRequest] = []
        introduced: set[str] = set()
        for state in self._types.values():
            if not state.opened:
                if state.wanted != set():
                    requests.append(self._first(state))
                    if self._options.dialect.node_per_type:
                        introduced.add(state.type_url)
                continue
            for nonce, error in state.answers:
                requests.append(
                    DeltaDiscoveryRequest(type_url=state.type_url, response_nonce=nonce, error_detail=error)
                )
            state.answers.clear()
            if not state.unanswered:
                requests += self._changes(state)
        for request in requests:
            if self._node_due or not self._options.node_on_first_only or request.type_url in introduced:
                request.node.CopyFrom(self._options.node)
                self._node_due = False
        return requests

    def next_expiry_s(self) -> float | None:
        return self._lifetimes.next_expiry_s()

    def expire(self, now_s: float) -> list[Update]:
        updates: list[Update] = []
        for type_url, names in self._lifetimes.expired(now_s):
            state = self._types[type_url]
            for name in names:
                state.held.pop(name, None)
            updates.append(Update(type_url=type_url, version=state.version, resources=(), removed=names))
        return updates

    def _first(self, state: _Type) -> DeltaDiscoveryRequest:
        state.opened = True
        state.again.clear()
        state.touched.clear()
        state.replaced = False
        state.asking.clear()
        if state.on_demand:
            versions = dict.fromkeys(state.asked, "") | state.claims()
            return DeltaDiscoveryRequest(
                type_url=state.type_url,
                resource_names_subscribe=["*"],
                resource_names_unsubscribe=["*"],
                initial_resource_versions=versions,
            )
        state.subscribed = set(state.subscription())
        return DeltaDiscoveryRequest(
            type_url=state.type_url,
            resource_names_subscribe=sorted(state.wanted or ()),
            initial_resource_versions=state.claims(),
        )

    def _changes(self, state: _Type) -> list[DeltaDiscoveryRequest]:
        if state.on_demand:
            return self._demands(state)
        wanted = state.subscription()
        looked_at = wanted | state.subscribed if state.replaced else state.touched
        added = (looked_at & wanted) - state.subscribed
        dropped = (looked_at & state.subscribed) - wanted
        state.subscribed |= added
        state.subscribed -= dropped
        added |= state.again & wanted
        state.replaced = False
        state.touched.clear()
        state.again.clear()
        if not added and not dropped:
            return []
        return [
            DeltaDiscoveryRequest(
                type_url=state.type_url,
                resource_names_subscribe=sorted(added),
                resource_names_unsubscribe=sorted(dropped),
            )
        ]

    @staticmethod
    def _demands(state: _Type) -> list[DeltaDiscoveryRequest]:
        """Return the request for names of an on-demand type, if there are any.

        istiod answers only requests that change a subscription (``shouldRespondDelta``), and a name can have been
        requested before. So each request also subscribes to :data:`_TOGGLED` or unsubscribes from it. Names are
        never unsubscribed: if a request has no names but those that it unsubscribes, istiod answers with the
        removal of all resources of the stream (``generateDeltasOndemand``).
        """
        if not state.asking:
            return []
        names, state.asking = state.asking, []
        state.toggled = not state.toggled
        request = DeltaDiscoveryRequest(type_url=state.type_url, resource_names_subscribe=names)
        if state.toggled:
            request.resource_names_subscribe.append(_TOGGLED)
        else:
            request.resource_names_unsubscribe.append(_TOGGLED)
        return [request]

    def _answered(self, state: _Type, received: Received, error: Status | None) -> None:
        for serial in [serial for serial in state.undecided if serial <= received.serial]:
            del state.undecided[serial]
        if received.stream == self._stream:
            state.unanswered -= len(received.nonces)
            state.answers.extend((nonce, error) for nonce in received.nonces)

    def _contents(
        self, response: DeltaDiscoveryResponse, state: _Type
    ) -> tuple[list[Resource], list[tuple[str, float | None]], list[str]]:
        """Split a response into resources, heartbeats as (name, time to live), and names of removed resources.
        Names that were not requested are omitted.
        """
        resources: list[Resource] = []
        heartbeats: list[tuple[str, float | None]] = []
        if self._options.dialect.one_by_one:
            return [_resource(wrapper) for wrapper in response.resources], [], list(response.removed_resources)
        seen: set[str] = set()
        for wrapper in response.resources:
            name = wrapper.name or wrapper.resource_name.name
            if not name:
                raise BadResponse("a resource has no name")
            if name in seen:
                raise BadResponse(f"duplicate name {name} found among added/updated resources")
            seen.add(name)
            ttl_s = ttl_of(wrapper.ttl) if wrapper.HasField("ttl") else None
            if not wrapper.HasField("resource"):
                if state.wants(name):
                    heartbeats.append((name, ttl_s))
                continue
            if wrapper.resource.type_url != response.type_url:
                raise BadResponse(
                    f"type URL {wrapper.resource.type_url} embedded in an individual Any does not match "
                    f"the message-wide type URL {response.type_url}"
                )
            if state.wants(name):
                resources.append(Resource(name=name, version=wrapper.version, body=wrapper.resource, ttl_s=ttl_s))
        removed: list[str] = []
        for name in [*response.removed_resources, *(gone.name for gone in response.removed_resource_names)]:
            if name in seen:
                raise BadResponse(f"duplicate name {name} found in the union of added+removed resources")
            seen.add(name)
            if state.wants(name):
                removed.append(name)
        return resources, heartbeats, removed


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a packed response: field numbers with the contents of resources, and other fields
    unchanged.

    Raises:
        DecodeError: the bytes are not a message.
    """
    position, end = 0, len(data)
    try:
        while position < end:
            start = position
            tag, position = varint(data, position)
            match tag & 7:
                case 0:  # this and the fixed sizes below are fields of later versions of the protocol
                    _, position = varint(data, position)
                case 1:
                    position += 8
                case 2:
                    length, position = varint(data, position)
                    start = position if tag >> 3 == _RESOURCES else start
                    position += length
                case 5:
                    position += 4
                case _:
                    raise DecodeError("groups are not part of proto3")
            if position > end:
                raise IndexError
            yield tag >> 3, data[start:position]
    except (IndexError, ValueError):
        raise DecodeError("cut short") from None


def _resource(wrapper: WireResource) -> Resource:
    return Resource(
        name=wrapper.name, version=wrapper.version, body=wrapper.resource, aliases=tuple(wrapper.aliases)
    )
