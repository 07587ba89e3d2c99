"""The rules of the state-of-the-world client, each as the requests it makes."""

import pytest

from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse, Resource
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.client_state import ClientOptions, Received, Refused
from xds.protocol.sotw import SotwClient
from xds.protocol.types import CDS, EDS, LDS, SDS

NODE = Node(id="n")


def started(**wanted: frozenset[str] | None) -> SotwClient:
    client = SotwClient(ClientOptions(node=NODE))
    for short, names in wanted.items():
        client.want({"cds": CDS, "eds": EDS, "lds": LDS, "sds": SDS}[short], names)
    client.stream_opened()
    return client


def clusters(version: str, nonce: str, *names: str) -> DiscoveryResponse:
    resources = [registry.pack(Cluster(name=name)) for name in names]
    return DiscoveryResponse(type_url=CDS, version_info=version, nonce=nonce, resources=resources)


def endpoints(version: str, nonce: str, *names: str) -> DiscoveryResponse:
    resources = [registry.pack(ClusterLoadAssignment(cluster_name=name)) for name in names]
    return DiscoveryResponse(type_url=EDS, version_info=version, nonce=nonce, resources=resources)


def received(client: SotwClient, response: DiscoveryResponse, now_s: float = 0.0) -> Received:
    event = client.receive(response, now_s)
    assert isinstance(event, Received)
    return event


def only_request(client: SotwClient) -> DiscoveryRequest:
    (request,) = client.requests_to_send()
    return request


def names_of(event: Received) -> list[str]:
    return [resource.name for resource in event.update.resources]


def test_first_requests_have_no_nonce_and_node_is_sent_once() -> None:
    client = started(cds=None, sds=frozenset({"b", "a"}))
    first, second = client.requests_to_send()
    assert first == DiscoveryRequest(type_url=CDS, node=NODE)
    assert second == DiscoveryRequest(type_url=SDS, resource_names=["a", "b"])
    assert client.requests_to_send() == []


def test_node_in_every_request_when_asked_for() -> None:
    client = SotwClient(ClientOptions(node=NODE, node_on_first_only=False))
    client.want(CDS, None)
    client.want(LDS, None)
    client.stream_opened()
    assert [request.node.id for request in client.requests_to_send()] == ["n", "n"]


def test_nothing_is_sent_without_a_stream() -> None:
    client = SotwClient(ClientOptions(node=NODE))
    client.want(CDS, None)
    assert client.requests_to_send() == []


def test_ack_carries_version_and_nonce_of_the_response() -> None:
    client = started(cds=None)
    client.requests_to_send()
    event = received(client, clusters("1", "n1", "c"))
    assert event.update.complete
    assert client.requests_to_send() == []
    client.accept(event)
    assert only_request(client) == DiscoveryRequest(type_url=CDS, version_info="1", response_nonce="n1")


def test_nack_carries_the_previous_version_the_nonce_and_code_13() -> None:
    client = started(cds=None)
    client.requests_to_send()
    client.accept(received(client, clusters("1", "n1", "c")))
    client.requests_to_send()
    client.reject(received(client, clusters("2", "n2", "c")), "Error adding/updating cluster(s) c: why")
    request = only_request(client)
    assert (request.version_info, request.response_nonce) == ("1", "n2")
    assert (request.error_detail.code, request.error_detail.message) == (
        13,
        "Error adding/updating cluster(s) c: why",
    )


def test_change_of_names_sends_the_full_list_with_version_and_nonce() -> None:
    client = started(eds=frozenset("a"))
    client.requests_to_send()
    client.accept(received(client, endpoints("1", "n1", "a")))
    client.requests_to_send()
    client.want(EDS, frozenset("ab"))
    assert only_request(client) == DiscoveryRequest(
        type_url=EDS, version_info="1", response_nonce="n1", resource_names=["a", "b"]
    )


def test_change_of_names_before_the_first_response_has_no_nonce() -> None:
    client = started(eds=frozenset("a"))
    client.requests_to_send()
    client.want(EDS, frozenset("ab"))
    assert only_request(client) == DiscoveryRequest(type_url=EDS, resource_names=["a", "b"])


def test_unchanged_names_are_silent_unless_asked_for_again() -> None:
    client = started(eds=frozenset("a"))
    client.requests_to_send()
    client.want(EDS, frozenset("a"))
    assert client.requests_to_send() == []
    client.want(EDS, frozenset("a"), again=["a"])
    assert only_request(client).resource_names == ["a"]


def test_change_of_names_rides_with_the_answer_that_is_due() -> None:
    client = started(eds=frozenset("a"))
    client.requests_to_send()
    event = received(client, endpoints("1", "n1", "a"))
    client.want(EDS, frozenset("ab"))
    assert client.requests_to_send() == []
    client.accept(event)
    request = only_request(client)
    assert (request.version_info, request.resource_names) == ("1", ["a", "b"])
    assert client.requests_to_send() == []


def test_what_was_dropped_and_is_wanted_again_needs_a_request_of_its_own() -> None:
    client = started(eds=frozenset("a"))
    client.requests_to_send()
    event = received(client, endpoints("1", "n1", "a"))
    client.want(EDS, frozenset())
    client.want(EDS, frozenset("a"), again="a")
    client.accept(event)
    answer, request = client.requests_to_send()
    assert (
        answer
        == request
        == DiscoveryRequest(type_url=EDS, version_info="1", response_nonce="n1", resource_names=["a"])
    )
    assert client.requests_to_send() == []


def test_one_type_waiting_does_not_hold_back_another() -> None:
    client = started(cds=None, eds=frozenset("a"))
    client.requests_to_send()
    received(client, clusters("1", "n1", "c"))
    client.accept(received(client, endpoints("1", "n2", "a")))
    assert only_request(client).type_url == EDS


def test_absence_means_nothing_for_endpoints_and_removal_for_clusters() -> None:
    client = started(cds=None, eds=frozenset("ab"))
    assert not received(client, endpoints("1", "n1", "a")).update.complete
    empty = received(client, clusters("1", "n2"))
    assert empty.update.complete
    assert empty.update.resources == ()


def test_resources_nobody_asked_for_are_ignored() -> None:
    client = started(eds=frozenset("a"))
    assert names_of(received(client, endpoints("1", "n1", "a", "z"))) == ["a"]


def test_types_nobody_asked_for_are_ignored() -> None:
    client = started(eds=frozenset("a"))
    client.requests_to_send()
    assert client.receive(clusters("1", "n1", "c"), 0.0) is None
    assert client.requests_to_send() == []


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ([Cluster(name="c"), Cluster(name="c")], "duplicate name c found"),
        ([ClusterLoadAssignment(cluster_name="c")], "does not match the message-wide type URL"),
        ([AnyMessage(type_url=CDS, value=b"\x0a\xff")], "malformed"),
        ([Resource(version="1")], "neither a name nor a body"),
    ],
)
def test_responses_that_break_the_rules_are_refused_whole(resources: list[object], reason: str) -> None:
    client = started(cds=None)
    client.requests_to_send()
    client.accept(received(client, clusters("1", "n1", "c")))
    client.requests_to_send()
    packed = [r if isinstance(r, AnyMessage) else registry.pack(r) for r in resources]  # type: ignore[arg-type]
    event = client.receive(DiscoveryResponse(type_url=CDS, version_info="2", nonce="n2", resources=packed), 0.0)
    assert isinstance(event, Refused)
    assert reason in event.reason
    request = only_request(client)
    assert (request.version_info, request.response_nonce, request.error_detail.code) == ("1", "n2", 13)
    assert request.error_detail.message == event.reason


def test_wrapped_resources_are_unwrapped() -> None:
    client = started(cds=None)
    wrapped = Resource(name="alias", resource=registry.pack(Cluster(name="c")))
    event = received(client, DiscoveryResponse(type_url=CDS, resources=[registry.pack(wrapped)]))
    (resource,) = event.update.resources
    assert (resource.name, resource.body) == ("alias", registry.pack(Cluster(name="c")))


def test_reconnect_asks_in_first_order_without_nonces_with_versions_and_node() -> None:
    client = started(cds=None, sds=frozenset("s"), eds=frozenset("a"))
    client.accept(received(client, clusters("7", "n1", "c")))
    client.requests_to_send()
    client.stream_closed()
    client.want(LDS, None)
    client.want(SDS, frozenset())
    client.stream_opened()
    requests = client.requests_to_send()
    assert [(r.type_url, r.version_info, r.response_nonce) for r in requests] == [
        (CDS, "7", ""),
        (EDS, "", ""),
        (LDS, "", ""),
    ]
    assert [r.HasField("node") for r in requests] == [True, False, False]


def test_an_answer_from_before_the_reconnect_changes_the_version_and_sends_nothing() -> None:
    client = started(cds=None)
    client.requests_to_send()
    old = received(client, clusters("1", "n1", "c"))
    client.stream_closed()
    client.stream_opened()
    assert only_request(client).version_info == ""
    client.accept(old)
    assert client.requests_to_send() == []
    client.reject(received(client, clusters("2", "n2", "c")), "no")
    assert only_request(client).version_info == "1"


def test_unsubscribing_from_all_names_sends_an_empty_list() -> None:
    client = started(eds=frozenset("a"))
    client.requests_to_send()
    client.want(EDS, frozenset())
    assert only_request(client).resource_names == []


def test_names_that_become_all_are_asked_for_with_a_star() -> None:
    client = started(cds=frozenset("a"))
    client.requests_to_send()
    client.want(CDS, None)
    assert only_request(client).resource_names == ["*"]


def test_merged_responses_are_answered_once_with_the_newest_nonce() -> None:
    client = started(eds=frozenset("ab"))
    client.requests_to_send()
    first = received(client, endpoints("1", "n1", "a"))
    second = received(client, endpoints("2", "n2", "b"))
    merged = first.then(second)
    assert sorted(names_of(merged)) == ["a", "b"]
    client.accept(merged)
    assert (request := only_request(client)).version_info == "2"
    assert request.response_nonce == "n2"
    client.want(EDS, frozenset("abc"))
    assert only_request(client).resource_names == ["a", "b", "c"]


def test_merged_complete_updates_are_the_newest() -> None:
    client = started(cds=None)
    merged = received(client, clusters("1", "n1", "a", "b")).then(received(client, clusters("2", "n2", "b")))
    assert names_of(merged) == ["b"]


# ---------------------------------------------------------------------- time to live


def with_ttl(name: str, ttl_s: int | None, *, heartbeat: bool = False) -> AnyMessage:
    wrapped = Resource(name=name)
    if ttl_s is not None:
        wrapped.ttl.seconds = ttl_s
    if not heartbeat:
        wrapped.resource.CopyFrom(registry.pack(Cluster(name=name)))
    return registry.pack(wrapped)


def lives(client: SotwClient, now_s: float, nonce: str, *resources: AnyMessage) -> Received | None:
    event = client.receive(
        DiscoveryResponse(type_url=CDS, version_info=nonce, nonce=nonce, resources=resources), now_s
    )
    assert not isinstance(event, Refused)
    if event is not None:
        client.accept(event)
    return event


def test_expired_resources_are_removed() -> None:
    client = started(cds=None)
    lives(client, 10.0, "1", with_ttl("a", 5), with_ttl("b", None))
    assert client.next_expiry_s() == 15.0
    assert client.expire(14.9) == []
    (update,) = client.expire(15.0)
    assert (update.removed, update.resources, update.complete) == (("a",), (), False)
    assert client.next_expiry_s() is None


def test_heartbeats_renew_and_are_acknowledged_without_an_update() -> None:
    client = started(cds=None)
    client.requests_to_send()
    lives(client, 10.0, "1", with_ttl("a", 5))
    client.requests_to_send()
    assert lives(client, 14.0, "2", with_ttl("a", 5, heartbeat=True)) is None
    assert only_request(client).response_nonce == "2"
    assert client.next_expiry_s() == 19.0


def test_heartbeat_beside_new_resources_keeps_its_resource() -> None:
    client = started(cds=None)
    lives(client, 10.0, "1", with_ttl("a", 5))
    event = lives(client, 11.0, "2", with_ttl("a", 5, heartbeat=True), with_ttl("b", None))
    assert event is not None
    assert sorted(names_of(event)) == ["a", "b"]
    assert event.update.resources[1].body == registry.pack(Cluster(name="a"))


def test_heartbeat_for_an_unknown_resource_does_nothing() -> None:
    client = started(cds=None)
    assert lives(client, 10.0, "1", with_ttl("a", 5, heartbeat=True)) is None
    assert client.next_expiry_s() is None


def test_a_resource_sent_without_a_time_to_live_lives_on() -> None:
    client = started(cds=None)
    lives(client, 10.0, "1", with_ttl("a", 5))
    lives(client, 11.0, "2", with_ttl("a", None))
    assert client.next_expiry_s() is None


def test_a_refused_resource_does_not_touch_the_lifetime_of_its_predecessor() -> None:
    client = started(cds=None)
    lives(client, 10.0, "1", with_ttl("a", 5))
    refused = received(
        client, DiscoveryResponse(type_url=CDS, version_info="2", resources=[with_ttl("a", 60)]), 11.0
    )
    client.reject(refused, "no")
    assert client.next_expiry_s() == 15.0
