"""The rules of the incremental client, each as the requests it makes."""

import pytest

from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import (
    DeltaDiscoveryRequest,
    DeltaDiscoveryResponse,
    Resource,
    ResourceName,
)
from xds.protocol.client_state import ClientOptions, Received, Refused
from xds.protocol.delta import DeltaClient
from xds.protocol.types import CDS, EDS, SDS

NODE = Node(id="n")


def started(cds: bool = False, eds: str = "") -> DeltaClient:
    client = DeltaClient(ClientOptions(node=NODE))
    if cds:
        client.want(CDS, None)
    if eds:
        client.want(EDS, frozenset(eds))
    client.stream_opened()
    return client


def cluster(name: str, version: str = "1", *, ttl_s: int = 0, heartbeat: bool = False) -> Resource:
    resource = Resource(name=name, version=version)
    if ttl_s:
        resource.ttl.seconds = ttl_s
    if not heartbeat:
        resource.resource.CopyFrom(registry.pack(Cluster(name=name)))
    return resource


def clusters(nonce: str, *resources: Resource, removed: str = "") -> DeltaDiscoveryResponse:
    return DeltaDiscoveryResponse(
        type_url=CDS,
        system_version_info=f"v{nonce}",
        nonce=nonce,
        resources=resources,
        removed_resources=[*removed],
    )


def endpoints(nonce: str, names: str, removed: str = "") -> DeltaDiscoveryResponse:
    resources = [
        Resource(name=n, version="1", resource=registry.pack(ClusterLoadAssignment(cluster_name=n))) for n in names
    ]
    return DeltaDiscoveryResponse(
        type_url=EDS, system_version_info="1", nonce=nonce, resources=resources, removed_resources=[*removed]
    )


def received(client: DeltaClient, response: DeltaDiscoveryResponse, now_s: float = 0.0) -> Received:
    event = client.receive(response, now_s)
    assert isinstance(event, Received)
    return event


def test_what_is_being_removed_is_not_claimed_on_the_next_stream() -> None:
    client = started(cds=True)
    client.requests_to_send()
    client.accept(received(client, clusters("1", cluster("a"), cluster("b"))))
    applying = received(client, clusters("2", cluster("b", "2"), cluster("c", "2"), removed="a"))
    client.stream_closed()
    client.stream_opened()
    # Whatever the server does with names that are still being applied, it must not take them for settled.
    assert dict(only_request(client).initial_resource_versions) == {"b": "", "c": ""}
    client.accept(applying)
    client.stream_closed()
    client.stream_opened()
    assert dict(only_request(client).initial_resource_versions) == {"b": "2", "c": "2"}


def only_request(client: DeltaClient) -> DeltaDiscoveryRequest:
    (request,) = client.requests_to_send()
    return request


def test_first_requests_subscribe_to_names_or_to_nothing_for_all() -> None:
    client = started(cds=True, eds="ba")
    assert client.requests_to_send() == [
        DeltaDiscoveryRequest(type_url=CDS, node=NODE),
        DeltaDiscoveryRequest(type_url=EDS, resource_names_subscribe=["a", "b"]),
    ]
    assert client.requests_to_send() == []


def test_later_requests_carry_differences_and_no_nonce() -> None:
    client = started(eds="ab")
    client.requests_to_send()
    client.want(EDS, frozenset("bc"))
    assert only_request(client) == DeltaDiscoveryRequest(
        type_url=EDS, resource_names_subscribe=["c"], resource_names_unsubscribe=["a"]
    )


def test_asking_again_subscribes_again() -> None:
    client = started(eds="a")
    client.requests_to_send()
    client.want(EDS, frozenset("a"), again=["a", "gone"])
    assert only_request(client) == DeltaDiscoveryRequest(type_url=EDS, resource_names_subscribe=["a"])


def test_ack_is_the_nonce_alone() -> None:
    client = started(cds=True)
    client.requests_to_send()
    client.accept(received(client, clusters("n1", cluster("a"))))
    assert only_request(client) == DeltaDiscoveryRequest(type_url=CDS, response_nonce="n1")


def test_nack_adds_code_13_and_the_reason() -> None:
    client = started(cds=True)
    client.requests_to_send()
    client.reject(received(client, clusters("n1", cluster("a"))), "why")
    request = only_request(client)
    assert (request.response_nonce, request.error_detail.code, request.error_detail.message) == ("n1", 13, "why")


def test_resources_keep_their_own_versions() -> None:
    event = received(started(cds=True), clusters("n1", cluster("a", "7"), cluster("b", "8")))
    assert event.update.version == "vn1"
    assert not event.update.complete
    assert [(resource.name, resource.version) for resource in event.update.resources] == [("a", "7"), ("b", "8")]


def test_reconnect_tells_accepted_versions_in_the_first_request_only() -> None:
    client = started(cds=True)
    assert not only_request(client).initial_resource_versions
    client.accept(received(client, clusters("n1", cluster("a", "7"), cluster("b", "8"))))
    client.accept(received(client, clusters("n2", removed="b")))
    client.reject(received(client, clusters("n3", cluster("a", "9"))), "no")
    client.requests_to_send()
    client.stream_closed()
    client.stream_opened()
    request = only_request(client)
    assert dict(request.initial_resource_versions) == {"a": "7"}
    assert (request.response_nonce, request.node) == ("", NODE)
    client.accept(received(client, clusters("n4", cluster("a", "9"))))
    assert not only_request(client).initial_resource_versions


def test_reconnect_tells_versions_of_the_accepted_part_of_a_refused_response() -> None:
    client = started(cds=True)
    client.accept(received(client, clusters("n1", cluster("a", "1"), cluster("b", "1"))))
    response = clusters("n2", cluster("a", "2"), cluster("b", "2"), cluster("c", "2"))
    client.reject(received(client, response), "no", {"b", "c"})
    client.requests_to_send()
    client.stream_closed()
    client.stream_opened()
    assert dict(only_request(client).initial_resource_versions) == {"a": "2", "b": "1", "c": ""}


def test_reconnect_forgets_versions_of_names_no_longer_wanted() -> None:
    client = started(eds="ab")
    client.accept(received(client, endpoints("n1", "ab")))
    client.want(EDS, frozenset("b"))
    client.stream_closed()
    client.stream_opened()
    assert dict(only_request(client).initial_resource_versions) == {"b": "1"}


def test_removed_tells_of_deleted_and_of_unknown_names() -> None:
    client = started(eds="ab")
    event = received(client, endpoints("n1", "a", removed="bz"))
    assert event.update.removed == ("b",)


def test_removed_resource_names_mean_the_same() -> None:
    client = started(cds=True)
    response = DeltaDiscoveryResponse(type_url=CDS, nonce="n", removed_resource_names=[ResourceName(name="a")])
    assert received(client, response).update.removed == ("a",)


def test_unrequested_resources_and_types_are_ignored() -> None:
    client = started(eds="a")
    assert [r.name for r in received(client, endpoints("n1", "az")).update.resources] == ["a"]
    assert client.receive(DeltaDiscoveryResponse(type_url=SDS, nonce="x"), 0.0) is None


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (clusters("n1", cluster("a"), cluster("a")), "duplicate name a"),
        (clusters("n1", cluster("a"), removed="a"), "union of added+removed"),
        (clusters("n1", removed="aa"), "union of added+removed"),
        (clusters("n1", Resource(resource=registry.pack(Cluster(name="a")))), "no name"),
        (
            clusters("n1", Resource(name="a", resource=registry.pack(ClusterLoadAssignment(cluster_name="a")))),
            "does not match the message-wide type URL",
        ),
    ],
)
def test_responses_that_break_the_rules_are_refused_whole(response: DeltaDiscoveryResponse, reason: str) -> None:
    client = started(cds=True)
    client.requests_to_send()
    event = client.receive(response, 0.0)
    assert isinstance(event, Refused)
    assert reason in event.reason
    assert only_request(client).error_detail.message == event.reason


def test_every_response_of_a_merged_update_is_answered() -> None:
    client = started(cds=True)
    client.requests_to_send()
    first = received(client, clusters("n1", cluster("a"), cluster("b")))
    merged = first.then(received(client, clusters("n2", cluster("c"), removed="a")))
    assert sorted(resource.name for resource in merged.update.resources) == ["b", "c"]
    assert merged.update.removed == ("a",)
    client.accept(merged)
    assert [request.response_nonce for request in client.requests_to_send()] == ["n1", "n2"]


def test_a_name_removed_and_added_again_while_waiting_is_there() -> None:
    client = started(cds=True)
    merged = received(client, clusters("n1", removed="a")).then(received(client, clusters("n2", cluster("a"))))
    assert merged.update.removed == ()
    assert [resource.name for resource in merged.update.resources] == ["a"]


def test_wildcard_that_ends_is_unsubscribed() -> None:
    client = started(cds=True)
    client.requests_to_send()
    client.want(CDS, frozenset("a"))
    assert only_request(client) == DeltaDiscoveryRequest(
        type_url=CDS, resource_names_subscribe=["a"], resource_names_unsubscribe=["*"]
    )


def test_heartbeats_renew_and_expiry_removes() -> None:
    client = started(cds=True)
    client.requests_to_send()
    client.accept(received(client, clusters("n1", cluster("a", ttl_s=5)), 10.0))
    client.requests_to_send()
    assert client.receive(clusters("n2", cluster("a", ttl_s=5, heartbeat=True)), 13.0) is None
    assert only_request(client).response_nonce == "n2"
    assert client.next_expiry_s() == 18.0
    (update,) = client.expire(18.0)
    assert update.removed == ("a",)
    client.stream_closed()
    client.stream_opened()
    assert not only_request(client).initial_resource_versions
