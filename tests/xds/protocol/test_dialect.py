"""What istiod and Rust ztunnel do otherwise than Envoy, each as the requests it makes."""

import itertools

import pytest
from google.protobuf.message import DecodeError

from xds.proto import registry
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import (
    DeltaDiscoveryRequest,
    DeltaDiscoveryResponse,
    Resource,
)
from xds.proto.istio.workload import workload_pb2 as wds
from xds.protocol.backoff import DoublingBackoff, StreamEnd, stream_end
from xds.protocol.client_state import ISTIO, ClientOptions, Dialect, Received
from xds.protocol.delta import DeltaClient
from xds.protocol.types import ADDRESS, AUTHORIZATION

NODE = Node(id="n")
#: The client's name that no resource has.
TOGGLED = "/0.0.0.0"
ON_DEMAND = Dialect(nack_code=0, node_per_type=True, one_by_one=True, on_demand=frozenset((ADDRESS,)))


def started(dialect: Dialect = ISTIO) -> DeltaClient:
    client = DeltaClient(ClientOptions(node=NODE, dialect=dialect))
    client.want(ADDRESS, None)
    client.want(AUTHORIZATION, None)
    client.stream_opened()
    return client


def resource(name: str, version: str = "1", *aliases: str) -> Resource:
    message = wds.Address(workload=wds.Workload(uid=name))
    return Resource(name=name, version=version, aliases=aliases, resource=registry.pack(message))


def response(nonce: str, *resources: Resource, removed: tuple[str, ...] = ()) -> DeltaDiscoveryResponse:
    return DeltaDiscoveryResponse(type_url=ADDRESS, nonce=nonce, resources=resources, removed_resources=removed)


def received(client: DeltaClient, message: DeltaDiscoveryResponse) -> Received:
    event = client.receive(message, 0.0)
    assert isinstance(event, Received)
    return event


def versions(client: DeltaClient) -> dict[str, str]:
    client.stream_closed()
    client.stream_opened()
    return dict(client.requests_to_send()[0].initial_resource_versions)


def test_the_node_is_in_the_first_request_of_each_type() -> None:
    client = started()
    assert client.requests_to_send() == [
        DeltaDiscoveryRequest(type_url=ADDRESS, node=NODE),
        DeltaDiscoveryRequest(type_url=AUTHORIZATION, node=NODE),
    ]
    client.accept(received(client, response("1", resource("a"))))
    assert client.requests_to_send() == [DeltaDiscoveryRequest(type_url=ADDRESS, response_nonce="1")]


def test_versions_are_told_again_except_of_what_was_refused_or_removed() -> None:
    client = started()
    client.requests_to_send()
    client.accept(received(client, response("1", resource("a"), resource("b"), resource("c"))))
    update = received(client, response("2", resource("a", "2"), resource("b", "2"), removed=("c",)))
    client.reject(update, "b: x", {"b"})
    (_, nack) = client.requests_to_send()
    assert (nack.error_detail.message, nack.error_detail.code) == ("b: x", 0)
    assert versions(client) == {"a": "2", "b": "1"}


def test_a_refused_resource_without_an_older_version_is_told_without_one() -> None:
    """Otherwise its removal while no stream is open would never be reported."""
    client = started()
    client.requests_to_send()
    client.reject(received(client, response("1", resource("a"), resource("b"))), "b: x", {"b"})
    assert versions(client) == {"a": "1", "b": ""}
    client.accept(received(client, response("2", removed=("b",))))
    assert versions(client) == {"a": "1"}


def test_a_refusal_of_everything_records_nothing() -> None:
    client = started()
    client.requests_to_send()
    client.reject(received(client, response("1", resource("a"))), "x")
    assert versions(client) == {}


def test_bodies_are_judged_one_by_one() -> None:
    client = started()
    other = Resource(name="other")
    other.resource.type_url = "type.googleapis.com/other"
    update = received(
        client, response("1", resource("a"), other, Resource(name="none"), resource("a", "2"))
    ).update
    assert [(r.name, r.version, r.body.type_url) for r in update.resources] == [
        ("a", "1", ADDRESS),
        ("other", "", "type.googleapis.com/other"),
        ("none", "", ""),
        ("a", "2", ADDRESS),
    ]


def test_on_demand_nothing_comes_unasked() -> None:
    client = started(ON_DEMAND)
    first, second = client.requests_to_send()
    assert first == DeltaDiscoveryRequest(
        type_url=ADDRESS, node=NODE, resource_names_subscribe=["*"], resource_names_unsubscribe=["*"]
    )
    assert second == DeltaDiscoveryRequest(type_url=AUTHORIZATION, node=NODE)
    client.ask(ADDRESS, ["/10.0.0.1", "/10.0.0.1"])
    client.ask(ADDRESS, ["shop/cart"])
    assert client.requests_to_send() == [
        DeltaDiscoveryRequest(type_url=ADDRESS, resource_names_subscribe=["/10.0.0.1", "shop/cart", TOGGLED])
    ]
    assert client.requests_to_send() == []


def test_names_that_were_not_answered_are_told_without_a_version() -> None:
    client = started(ON_DEMAND)
    client.requests_to_send()
    client.ask(ADDRESS, ["/10.0.0.1", "gone", "late"])
    assert dict.fromkeys(("/10.0.0.1", "gone", "late"), "") == versions(client)
    client.accept(received(client, response("1", resource("a", "7", "/10.0.0.1"), removed=("gone",))))
    assert versions(client) == {"a": "7", "late": ""}


def test_each_request_on_demand_changes_the_subscription_and_asks_for_all_its_names() -> None:
    """istiod answers no request that changes no subscription. It answers a request that only unsubscribes with the
    removal of everything.
    """
    client = started(ON_DEMAND)
    client.requests_to_send()

    def requests(*names: str) -> list[tuple[list[str], list[str]]]:
        client.ask(ADDRESS, names)
        return [
            (list(each.resource_names_subscribe), list(each.resource_names_unsubscribe))
            for each in client.requests_to_send()
            if not each.response_nonce
        ]

    assert requests("/10.0.0.1", "/10.0.0.2") == [(["/10.0.0.1", "/10.0.0.2", TOGGLED], [])]
    client.accept(received(client, response("1", resource("a", "7", "/10.0.0.1"), removed=("/10.0.0.2", TOGGLED))))
    assert requests("/10.0.0.2") == [(["/10.0.0.2"], [TOGGLED])]
    client.accept(received(client, response("2", removed=("/10.0.0.2",))))
    assert requests("/10.0.0.2", "a") == [(["/10.0.0.2", "a", TOGGLED], [])]
    client.stream_closed()
    client.stream_opened()
    (first, _) = client.requests_to_send()
    assert dict(first.initial_resource_versions) == {"a": "7", "/10.0.0.2": ""}
    client.accept(received(client, response("3", removed=("a", "/10.0.0.2"))))
    assert requests("a") == [(["a", TOGGLED], [])], "a new stream is not subscribed to it"
    assert requests() == []


# In steps


def in_steps(data: bytes) -> tuple[Received, int]:
    client = started()
    client.requests_to_send()
    events = list(client.receive_in_steps(data, 0.0))
    assert all(event is None for event in events[:-1])
    last = events[-1]
    assert isinstance(last, Received)
    return last, len(events)


def test_a_response_in_steps_is_the_same_response() -> None:
    message = response("7", *(resource(f"w{number}") for number in range(1700)), removed=("x", "y"))
    message.system_version_info = "v"
    event, steps = in_steps(message.SerializeToString())
    assert event == received(started(), message)
    assert steps == 4


def test_unknown_fields_of_any_type_do_not_break_a_response_in_steps() -> None:
    """The same bytes are read if the response is small."""
    message = response("7", *(resource(f"w{number}") for number in range(600)), removed=("x",))
    later = b"".join((b"\xa0\x06\x96\x01", b"\xa9\x06" + bytes(8), b"\xad\x06" + bytes(4), b"\xb2\x06\x01z"))
    data = message.SerializeToString()
    DeltaDiscoveryResponse.FromString(data + later)
    for extended in (data + later, later + data):
        found, _ = in_steps(extended)
        assert found.update == in_steps(data)[0].update
        assert found.nonces == ("7",)
    with pytest.raises(DecodeError):
        in_steps(data + b"\xa3\x06\xa4\x06")  # a group


def test_a_response_cut_anywhere_is_none_or_shorter() -> None:
    data = response("7", resource("a"), resource("b"), removed=("x",)).SerializeToString()
    for cut in range(len(data)):
        client = started()
        try:
            events = list(client.receive_in_steps(data[:cut], 0.0))
        except DecodeError:
            continue
        whole = client.receive(DeltaDiscoveryResponse.FromString(data[:cut]), 0.0)
        assert events[-1] == whole


def test_other_dialects_read_big_responses_as_ever() -> None:
    client = started(Dialect())
    client.requests_to_send()
    message = response("1", resource("a"))
    assert list(client.receive_in_steps(message.SerializeToString(), 0.0))[-1] == received(
        started(Dialect()), message
    )


# Ends of streams


@pytest.mark.parametrize(
    ("status", "details", "answered", "end"),
    [
        ("OK", "", True, StreamEnd.COMPLETE),
        ("UNAVAILABLE", "failed to connect to all addresses", False, StreamEnd.CONNECTION_ERROR),
        ("UNAVAILABLE", "transport is closing", True, StreamEnd.RECONNECT),
        ("UNAVAILABLE", "received prior goaway: code: NO_ERROR", True, StreamEnd.RECONNECT),
        ("UNAVAILABLE", "Socket closed", True, StreamEnd.RECONNECT),
        ("UNAVAILABLE", "try again later", True, StreamEnd.ERROR),
        ("UNKNOWN", "", True, StreamEnd.RECONNECT),
        ("CANCELLED", "", False, StreamEnd.RECONNECT),
        ("DEADLINE_EXCEEDED", "", True, StreamEnd.RECONNECT),
        ("UNAUTHENTICATED", "authentication failure", False, StreamEnd.ERROR),
        ("INTERNAL", "", True, StreamEnd.ERROR),
    ],
)
def test_why_a_stream_ended(status: str, details: str, answered: bool, end: StreamEnd) -> None:
    assert stream_end(status, details, answered=answered) is end


def waits(*ends: StreamEnd) -> list[float]:
    backoff = DoublingBackoff()
    found = []
    for end in ends:
        backoff.ended(end)
        found.append(round(backoff.next(0.5), 3))
    return found


def test_failures_double_the_wait_up_to_a_limit() -> None:
    failures = list(itertools.repeat(StreamEnd.CONNECTION_ERROR, 12))
    assert waits(*failures) == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 15.0, 15.0]


@pytest.mark.parametrize("end", [StreamEnd.RECONNECT, StreamEnd.COMPLETE])
def test_an_orderly_end_begins_again(end: StreamEnd) -> None:
    assert waits(StreamEnd.ERROR, StreamEnd.ERROR, end, StreamEnd.ERROR) == [0.02, 0.04, 0.01, 0.02]


def test_an_answer_is_no_reason_to_begin_again() -> None:
    backoff = DoublingBackoff()
    backoff.ended(StreamEnd.ERROR)
    backoff.reset()
    backoff.ended(StreamEnd.ERROR)
    assert backoff.next(0.5) == pytest.approx(0.04)
