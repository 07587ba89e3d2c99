"""The server half: what it sends when, and that client and server agree after any history."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.generated import examples
from xds.errors import ConfigError
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.envoy.config.route.v3.route_pb2 import RouteConfiguration
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import Secret
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import (
    DeltaDiscoveryRequest,
    DeltaDiscoveryResponse,
    DiscoveryRequest,
)
from xds.proto.istio.workload.workload_pb2 import Address, Service, Workload
from xds.protocol.client_state import ClientOptions, ClientState, Received, Refused
from xds.protocol.delta import DeltaClient
from xds.protocol.snapshot import Answered, DeltaServer, Named, ServerState, Snapshot, SotwServer
from xds.protocol.sotw import SotwClient
from xds.protocol.types import CDS, EDS, LDS, PUSH_ORDER, RDS, SDS, name_of

NODE = Node(id="n")


def cluster(name: str, content: str = "") -> Cluster:
    return Cluster(name=name, alt_stat_name=content)


def endpoints(name: str, weight: int = 1) -> ClusterLoadAssignment:
    assignment = ClusterLoadAssignment(cluster_name=name)
    assignment.policy.overprovisioning_factor.value = weight
    return assignment


def test_versions_are_those_of_the_content() -> None:
    one, two = Snapshot.of([cluster("a"), cluster("b", "x")]), Snapshot.of([cluster("b", "x"), cluster("a", "y")])
    assert one.of_type(CDS)["b"] == two.of_type(CDS)["b"]
    assert one.of_type(CDS)["a"].version != two.of_type(CDS)["a"].version


def test_two_resources_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a'"):
        Snapshot.of([cluster("a"), cluster("a", "x")])


# ---------------------------------------------------------------------- state of the world


def names_in(response: Any) -> list[str]:
    return [getattr(r, "name", "") or name_of(r) for r in response.resources]


def sotw(*messages: Any) -> SotwServer:
    return SotwServer("me", Snapshot.of(messages))


def test_sotw_first_response_and_identifier() -> None:
    server = sotw(cluster("a"), cluster("b"))
    assert server.receive(DiscoveryRequest(type_url=CDS, node=NODE)) is None
    (response,) = server.responses_to_send()
    assert names_in(response) == ["a", "b"]
    assert response.control_plane.identifier == "me"
    assert server.node == NODE
    assert server.responses_to_send() == []


def test_sotw_types_go_out_in_make_before_break_order() -> None:
    server = sotw(Secret(name="s"), RouteConfiguration(name="r"), Listener(name="l"), endpoints("e"), cluster("c"))
    for type_url, names in ((SDS, "s"), (LDS, ""), (RDS, "r"), (CDS, ""), (EDS, "e")):
        server.receive(DiscoveryRequest(type_url=type_url, resource_names=[*names], node=NODE))
    assert tuple(r.type_url for r in server.responses_to_send()) == (CDS, EDS, LDS, RDS, SDS) == PUSH_ORDER[:5]


def test_sotw_next_response_waits_for_the_verdict_and_is_the_newest() -> None:
    server = sotw(cluster("a", "1"))
    server.receive(DiscoveryRequest(type_url=CDS, node=NODE))
    (first,) = server.responses_to_send()
    server.update(Snapshot.of([cluster("a", "2")]))
    server.update(Snapshot.of([cluster("a", "3")]))
    assert server.responses_to_send() == []
    ack = DiscoveryRequest(type_url=CDS, version_info=first.version_info, response_nonce=first.nonce)
    assert server.receive(ack) == Answered(type_url=CDS, version=first.version_info)
    (second,) = server.responses_to_send()
    assert second.resources[0] == registry.pack(cluster("a", "3"))


def test_sotw_refused_content_is_not_sent_again() -> None:
    server = sotw(cluster("a", "1"))
    server.receive(DiscoveryRequest(type_url=CDS, node=NODE))
    (first,) = server.responses_to_send()
    nack = DiscoveryRequest(type_url=CDS, response_nonce=first.nonce)
    nack.error_detail.message = "no"
    assert server.receive(nack) == Answered(type_url=CDS, version=first.version_info, error="no")
    assert server.responses_to_send() == []
    server.update(Snapshot.of([cluster("a", "2")]))
    assert len(server.responses_to_send()) == 1


def test_sotw_stale_nonces_are_ignored() -> None:
    server = sotw(endpoints("a"), endpoints("b"))
    server.receive(DiscoveryRequest(type_url=EDS, resource_names=["a"], node=NODE))
    server.responses_to_send()
    assert server.receive(DiscoveryRequest(type_url=EDS, resource_names=["b"], response_nonce="0")) is None
    assert server.responses_to_send() == []


def test_sotw_new_names_are_answered_and_other_changes_are_not_pushed() -> None:
    server = sotw(endpoints("a"), endpoints("b"))
    server.receive(DiscoveryRequest(type_url=EDS, resource_names=["a"], node=NODE))
    (first,) = server.responses_to_send()
    server.receive(DiscoveryRequest(type_url=EDS, resource_names=["a"], response_nonce=first.nonce))
    server.update(Snapshot.of([endpoints("a"), endpoints("b", 2)]))
    assert server.responses_to_send() == []
    server.receive(DiscoveryRequest(type_url=EDS, resource_names=["a", "b"], response_nonce=first.nonce))
    (second,) = server.responses_to_send()
    assert names_in(second) == ["a", "b"]


def test_sotw_names_that_were_dropped_are_answered_when_they_come_back() -> None:
    server = sotw(endpoints("a"))
    server.receive(DiscoveryRequest(type_url=EDS, resource_names=["a"], node=NODE))
    (first,) = server.responses_to_send()
    for names in (["a"], []):
        server.receive(DiscoveryRequest(type_url=EDS, resource_names=names, response_nonce=first.nonce))
        assert server.responses_to_send() == []
    server.receive(DiscoveryRequest(type_url=EDS, resource_names=["a"], response_nonce=first.nonce))
    assert [names_in(response) for response in server.responses_to_send()] == [["a"]]


def test_sotw_empty_names_of_named_types_ask_for_nothing() -> None:
    server = sotw(endpoints("a"))
    server.receive(DiscoveryRequest(type_url=EDS, node=NODE))
    assert [names_in(response) for response in server.responses_to_send()] == [[]]


# ---------------------------------------------------------------------- incremental


def delta(*messages: Any) -> DeltaServer:
    return DeltaServer("me", Snapshot.of(messages))


def ack(response: DeltaDiscoveryResponse) -> DeltaDiscoveryRequest:
    return DeltaDiscoveryRequest(type_url=response.type_url, response_nonce=response.nonce)


def test_delta_sends_differences_only() -> None:
    server = delta(cluster("a"), cluster("b"), cluster("c"))
    server.receive(DeltaDiscoveryRequest(type_url=CDS, node=NODE))
    (first,) = server.responses_to_send()
    assert names_in(first) == ["a", "b", "c"]
    server.receive(ack(first))
    server.update(Snapshot.of([cluster("a"), cluster("b", "x"), cluster("d")]))
    (second,) = server.responses_to_send()
    assert (names_in(second), list(second.removed_resources)) == (["b", "d"], ["c"])


def test_delta_initial_versions_save_what_the_client_has_and_remove_what_is_gone() -> None:
    versions = {name: r.version for name, r in Snapshot.of([cluster("a"), cluster("b")]).of_type(CDS).items()}
    server = delta(cluster("a"), cluster("b", "x"))
    server.receive(
        DeltaDiscoveryRequest(type_url=CDS, node=NODE, initial_resource_versions={**versions, "z": "1"})
    )
    (response,) = server.responses_to_send()
    assert (names_in(response), list(response.removed_resources)) == (["b"], ["z"])


def test_delta_names_that_do_not_exist_are_told_at_once_and_sent_when_they_do() -> None:
    server = delta(endpoints("a"))
    server.receive(DeltaDiscoveryRequest(type_url=EDS, node=NODE, resource_names_subscribe=["a", "q"]))
    (first,) = server.responses_to_send()
    assert (names_in(first), list(first.removed_resources)) == (["a"], ["q"])
    server.receive(ack(first))
    assert server.responses_to_send() == []
    server.update(Snapshot.of([endpoints("a"), endpoints("q")]))
    (second,) = server.responses_to_send()
    assert names_in(second) == ["q"]


def test_delta_subscribing_again_sends_again() -> None:
    server = delta(endpoints("a"))
    server.receive(DeltaDiscoveryRequest(type_url=EDS, node=NODE, resource_names_subscribe=["a"]))
    server.receive(ack(server.responses_to_send()[0]))
    server.receive(DeltaDiscoveryRequest(type_url=EDS, resource_names_subscribe=["a"]))
    assert [names_in(response) for response in server.responses_to_send()] == [["a"]]


def test_delta_unsubscribed_names_are_not_sent() -> None:
    server = delta(endpoints("a"), endpoints("b"))
    server.receive(DeltaDiscoveryRequest(type_url=EDS, node=NODE, resource_names_subscribe=["a", "b"]))
    server.receive(ack(server.responses_to_send()[0]))
    server.receive(DeltaDiscoveryRequest(type_url=EDS, resource_names_unsubscribe=["a"]))
    server.update(Snapshot.of([endpoints("a", 2), endpoints("b", 2)]))
    assert [names_in(response) for response in server.responses_to_send()] == [["b"]]


def test_delta_refused_content_is_not_sent_again() -> None:
    server = delta(cluster("a"))
    server.receive(DeltaDiscoveryRequest(type_url=CDS, node=NODE))
    (first,) = server.responses_to_send()
    nack = ack(first)
    nack.error_detail.message = "no"
    assert server.receive(nack) == Answered(type_url=CDS, version=first.system_version_info, error="no")
    assert server.responses_to_send() == []


def test_delta_client_without_anything_to_get_is_answered() -> None:
    server = delta()
    server.receive(DeltaDiscoveryRequest(type_url=CDS, node=NODE))
    assert len(server.responses_to_send()) == 1


HOSTS = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
CONTENTS = st.sampled_from(["", "x"])


class OnDemand(RuleBasedStateMachine):
    """A client that requests what it needs, a mesh that changes, and streams that end."""

    @initialize()
    def begin(self) -> None:
        self.held: dict[str, str] = {}
        self.asked: set[str] = set()
        self.snapshot = Snapshot()
        self.server = DeltaServer("me", self.snapshot)
        self._open()

    def _open(self) -> None:
        request = DeltaDiscoveryRequest(
            type_url=ADDRESS,
            node=NODE,
            resource_names_subscribe=EVERYTHING,
            resource_names_unsubscribe=EVERYTHING,
            initial_resource_versions=self.held | dict.fromkeys(self.asked - self.held.keys(), ""),
        )
        self.server.receive(request)
        self._drain()

    def _drain(self) -> set[str]:
        """Process the server's messages. Return the names in them."""
        mentioned: set[str] = set()
        while responses := self.server.responses_to_send():
            for response in responses:
                for resource in response.resources:
                    self.held[resource.name] = resource.version
                    mentioned |= {resource.name, *resource.aliases}
                for name in response.removed_resources:
                    self.held.pop(name, None)
                    mentioned.add(name)
                self.server.receive(ack(response))
        return mentioned

    @rule(name=st.sampled_from(["a", "b", "s", "/10.0.0.1", "/10.0.0.2", "/10.9.0.1", "nobody"]))
    def ask(self, name: str) -> None:
        self.asked.add(name)
        self.server.receive(DeltaDiscoveryRequest(type_url=ADDRESS, resource_names_subscribe=[name]))
        assert name in self._drain(), "whoever asks is answered"

    @rule(
        a=st.none() | st.tuples(HOSTS, CONTENTS),
        b=st.none() | st.tuples(HOSTS, CONTENTS),
        backends=st.none() | st.sampled_from(["", "a", "ab"]),
        own=st.sampled_from(["", "a"]),
    )
    def change(self, a: tuple[str, str] | None, b: tuple[str, str] | None, backends: str | None, own: str) -> None:
        named = [workload(name, *value) for name, value in (("a", a), ("b", b)) if value is not None]
        if backends is not None:
            named.append(service("s", "10.9.0.1", backends))
        self.snapshot = mesh_of(*named, own=own if a is not None else "")
        self.server.update(self.snapshot)
        self._drain()

    @rule(name=st.sampled_from(["a", "s", "/10.0.0.1", "/10.9.0.1"]))
    def ask_no_longer(self, name: str) -> None:
        self.asked.discard(name)
        self.held.pop(name, None)
        self.server.receive(DeltaDiscoveryRequest(type_url=ADDRESS, resource_names_unsubscribe=[name]))
        self._drain()

    @rule()
    def stream_ends(self) -> None:
        self.server = DeltaServer("me", self.snapshot)
        self._open()

    @invariant()
    def the_client_has_what_it_asked_for_and_nothing_stale(self) -> None:
        current = {name: resource.version for name, resource in self.snapshot.of_type(ADDRESS).items()}
        assert self.held.items() <= current.items()
        assert self.snapshot.asked(ADDRESS, self.asked) <= self.held.keys()
        assert self.snapshot.own.get(ADDRESS, frozenset()) <= self.held.keys()


TestOnDemand = OnDemand.TestCase
TestOnDemand.settings = settings(max_examples=examples(150), stateful_step_count=25, deadline=None)


# ---------------------------------------------------------------------- both ends

# ---------------------------------------------------------------------- resources with aliases, on demand

ADDRESS = registry.type_url(Address)
EVERYTHING = ["*"]


def workload(name: str, host: str, content: str = "") -> Named:
    message = Address(workload=Workload(uid=name, name=content))
    return Named(name=name, message=message, aliases=(f"/{host}",))


def mesh_of(*named: Named, own: str = "") -> Snapshot:
    return replace(Snapshot.of(named), own={ADDRESS: frozenset(own)})


def service(name: str, host: str, backends: str) -> Named:
    message = Address(service=Service(name=name))
    return Named(name=name, message=message, aliases=(f"/{host}",), companions=tuple(backends))


def on_demand(server: DeltaServer, **versions: str) -> DeltaDiscoveryResponse:
    server.receive(
        DeltaDiscoveryRequest(
            type_url=ADDRESS,
            node=NODE,
            resource_names_subscribe=EVERYTHING,
            resource_names_unsubscribe=EVERYTHING,
            initial_resource_versions=versions,
        )
    )
    (response,) = server.responses_to_send()
    server.receive(ack(response))
    return response


def ask(server: DeltaServer, *names: str) -> DeltaDiscoveryResponse:
    server.receive(DeltaDiscoveryRequest(type_url=ADDRESS, resource_names_subscribe=names))
    (response,) = server.responses_to_send()
    server.receive(ack(response))
    return response


def sent_and_removed(response: DeltaDiscoveryResponse) -> tuple[list[str], list[str]]:
    return [resource.name for resource in response.resources], list(response.removed_resources)


def test_on_demand_begins_with_what_is_on_the_node() -> None:
    server = DeltaServer("me", mesh_of(workload("a", "10.0.0.1"), workload("b", "10.0.0.2"), own="a"))
    response = on_demand(server)
    assert sent_and_removed(response) == (["a"], [])
    assert list(response.resources[0].aliases) == ["/10.0.0.1"]


def test_an_address_brings_who_has_it_and_a_service_its_backends() -> None:
    snapshot = mesh_of(workload("a", "10.0.0.1"), workload("b", "10.0.0.2"), service("s", "10.9.0.1", "ab"))
    server = DeltaServer("me", snapshot)
    on_demand(server)
    assert sent_and_removed(ask(server, "/10.0.0.2")) == (["b"], [])
    assert sent_and_removed(ask(server, "/10.9.0.1")) == (["a", "b", "s"], [])
    assert sent_and_removed(ask(server, "/10.0.0.2")) == (["b"], []), "asked again, sent again"
    assert sent_and_removed(ask(server, "/10.7.7.7", "nobody")) == ([], ["/10.7.7.7", "nobody"])


def test_what_was_brought_is_kept_current_and_what_was_asked_in_vain_comes_when_it_is_there() -> None:
    server = DeltaServer("me", mesh_of(workload("a", "10.0.0.1"), service("s", "10.9.0.1", "a")))
    on_demand(server)
    ask(server, "/10.9.0.1")
    ask(server, "/10.0.0.9")
    server.update(mesh_of(workload("a", "10.0.0.1", "new"), workload("z", "10.0.0.9"), workload("y", "10.0.0.8")))
    (response,) = server.responses_to_send()
    assert sent_and_removed(response) == (["a", "z"], ["s"])


def test_a_client_that_comes_back_on_demand_keeps_what_it_has() -> None:
    snapshot = mesh_of(workload("a", "10.0.0.1"), workload("b", "10.0.0.2"), workload("c", "10.0.0.3"))
    version = snapshot.of_type(ADDRESS)["a"].version
    server = DeltaServer("me", snapshot)
    versions = {"a": version, "b": "old", "gone": "1", "/10.0.0.3": "", "/10.7.7.7": ""}
    assert sent_and_removed(on_demand(server, **versions)) == (["b", "c"], ["/10.7.7.7", "gone"])


def test_wildcard_subscribers_get_all_resources_with_their_aliases() -> None:
    server = DeltaServer("me", mesh_of(workload("a", "10.0.0.1"), workload("b", "10.0.0.2")))
    server.receive(DeltaDiscoveryRequest(type_url=ADDRESS, node=NODE))
    (response,) = server.responses_to_send()
    assert sent_and_removed(response) == (["a", "b"], [])


# ---------------------------------------------------------------------- both ends

NAMES = st.frozensets(st.sampled_from("ab"))


class Link(RuleBasedStateMachine):
    """A client and a server joined by a link that keeps order but may be cut; see :meth:`teardown`."""

    make: Callable[[], tuple[ClientState[Any, Any], Any]]

    @initialize(refuses=st.booleans())
    def begin(self, refuses: bool) -> None:
        self.client, self.server_type = self.make()
        self.server: ServerState[Any, Any] | None = None
        self.up: deque[Any] = deque()
        self.down: deque[Any] = deque()
        self.snapshot = Snapshot()
        self.view: dict[str, dict[str, bytes]] = {CDS: {}, EDS: {}}
        self.wanted: dict[str, frozenset[str] | None] = {CDS: None, EDS: frozenset()}
        self.pending: dict[str, Received] = {}
        self.refuses = refuses
        self.has_refused = False
        self.client.want(CDS, None)
        self.publish(frozenset("ab"), frozenset("ab"), "x")
        self.want(frozenset("ab"))
        self.connect()
        self.settle()

    @rule(clusters=NAMES, loads=NAMES, content=st.sampled_from("xy"))
    def publish(self, clusters: frozenset[str], loads: frozenset[str], content: str) -> None:
        self.snapshot = Snapshot.of(
            [*(cluster(n, content) for n in clusters), *(endpoints(n, ord(content)) for n in loads)]
        )
        if self.server is not None:
            self.server.update(self.snapshot)

    @rule(names=NAMES)
    def want(self, names: frozenset[str]) -> None:
        added = names - (self.wanted[EDS] or frozenset())
        self.wanted[EDS] = names
        self.client.want(EDS, names, again=added)
        self.view[EDS] = {name: body for name, body in self.view[EDS].items() if name in names}

    @rule()
    def client_writes(self) -> None:
        if self.server is not None:
            self.up.extend(self.client.requests_to_send())

    @rule()
    def server_reads(self) -> None:
        if self.server is not None and self.up:
            self.server.receive(self.up.popleft())

    @rule()
    def server_writes(self) -> None:
        if self.server is not None:
            self.down.extend(self.server.responses_to_send())

    @rule()
    def client_reads(self) -> None:
        if self.down:
            event = self.client.receive(self.down.popleft(), 0.0)
            assert not isinstance(event, Refused)
            if event is not None:
                waiting = self.pending.get(event.update.type_url)
                self.pending[event.update.type_url] = event if waiting is None else waiting.then(event)

    @rule(type_url=st.sampled_from([CDS, EDS]))
    def accept(self, type_url: str) -> None:
        event = self.pending.pop(type_url, None)
        if event is None:
            return
        wanted = self.wanted[type_url]
        view = {} if event.update.complete else self.view[type_url]
        for resource in event.update.resources:
            if wanted is None or resource.name in wanted:
                view[resource.name] = resource.body.value
        for name in event.update.removed:
            view.pop(name, None)
        self.view[type_url] = view
        self.client.accept(event)

    @precondition(lambda self: self.refuses)
    @rule(type_url=st.sampled_from([CDS, EDS]))
    def reject(self, type_url: str) -> None:
        event = self.pending.pop(type_url, None)
        if event is not None:
            for name in event.update.removed:  # receivers refuse resources, but never removals
                self.view[type_url].pop(name, None)
            self.client.reject(event, "no")
            self.has_refused = True

    @precondition(lambda self: self.server is not None)
    @rule()
    def cut(self) -> None:
        self.server = None
        self.up.clear()
        self.down.clear()
        self.client.stream_closed()

    @precondition(lambda self: self.server is None)
    @rule()
    def connect(self) -> None:
        self.server = self.server_type("", self.snapshot)
        self.client.stream_opened()

    @precondition(lambda self: self.server is not None)
    @rule()
    def settle(self) -> None:
        """Let everything in flight arrive and be accepted, so that deep states are not left to chance."""
        for _ in range(12):
            self.client_writes()
            self.server_reads()
            self.server_writes()
            self.client_reads()
            self.accept(CDS)
            self.accept(EDS)
        assert not self.up
        assert not self.down

    def teardown(self) -> None:
        if not hasattr(self, "client"):
            return
        if self.server is None:
            self.connect()
        self.settle()
        if self.has_refused:
            # A refused version is not sent again, so both sides can only agree on a new one.
            self.publish(frozenset("ac"), frozenset("a"), "z")
            self.settle()
        for type_url, wanted in self.wanted.items():
            expected = {
                name: resource.body.value
                for name, resource in self.snapshot.of_type(type_url).items()
                if wanted is None or name in wanted
            }
            seen = self.view[type_url]
            if isinstance(self.client, SotwClient) and type_url == EDS:
                # The state-of-the-world variant cannot report the removal of endpoints.
                seen = {name: body for name, body in seen.items() if name in self.snapshot.of_type(EDS)}
            assert seen == expected, type_url


class SotwLink(Link):
    @staticmethod
    def make() -> tuple[ClientState[Any, Any], Any]:
        return SotwClient(ClientOptions(node=NODE)), SotwServer


class DeltaLink(Link):
    @staticmethod
    def make() -> tuple[ClientState[Any, Any], Any]:
        return DeltaClient(ClientOptions(node=NODE)), DeltaServer


TestSotwLink = SotwLink.TestCase
TestDeltaLink = DeltaLink.TestCase
TestSotwLink.settings = TestDeltaLink.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None
)
