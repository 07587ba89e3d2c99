"""A field unknown to our messages is rejected by its name over gRPC, and the previous version continues to
serve.
"""

from pathlib import Path

import pytest
from google.protobuf.message import Message

from tests.xds.proto.test_unknown import field
from tests.ztunnel.proxy.envoy.harness import (
    KINDS,
    Harness,
    application,
    ask,
    chain,
    connect_route,
    connection_manager,
    endpoint,
    listener,
    run,
)
from xds.proto.json import parse_value
from xds.protocol.snapshot import Snapshot

RDS = {"rds": {"route_config_name": "routes", "config_source": {"ads": {}}}}
RESOURCES = [
    listener(),
    listener(chain(connection_manager(RDS)), name="tunnels"),
    ("cluster", {"name": "app", "type": "EDS", "eds_cluster_config": {"eds_config": {"ads": {}}}}),
    ("route", connect_route("app")),
]


def with_field(message: Message, path: list[int], number: int) -> None:
    """Set a field of another version of a message, below the first element of each field of a path."""
    if not path:
        message.MergeFromString(field(number))
        return
    inner = getattr(message, message.DESCRIPTOR.fields_by_number[path[0]].name)
    with_field(inner[0] if hasattr(inner, "add") else inner, path[1:], number)


@pytest.mark.parametrize(
    ("kind", "path", "number", "answer", "words"),
    [
        ("listener", [], 36, "Listener", "l: fcds_config: this proxy does not support this field"),
        ("cluster", [], 23, "Cluster", "app: ring_hash_lb_config: this proxy does not support this field"),
        (
            "route",
            [2, 3, 1],
            9,
            "RouteConfiguration",
            "routes: virtual_hosts[0].routes[0].match.runtime_fraction: this proxy does not support this field",
        ),
        ("route", [2], 4, "RouteConfiguration", "routes: virtual_hosts[0].require_tls: this proxy does not"),
        (
            "endpoints",
            [2],
            8,
            "ClusterLoadAssignment",
            "app: endpoints[0].leds_cluster_locality_config: this",
        ),
        (
            "endpoints",
            [2],
            99,
            "ClusterLoadAssignment",
            "app: endpoints[0]: unknown field number 99 of envoy",
        ),
    ],
)
def test_unknown_field_is_refused_over_grpc(
    kind: str, path: list[int], number: int, answer: str, words: str, tmp_path: Path
) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"good") as port:
            assigned = "endpoints", {"cluster_name": "app", "endpoints": [{"lb_endpoints": [endpoint(port)]}]}
            everything = [*RESOURCES, assigned]
            await harness.published(*everything)
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            messages = [parse_value(document, KINDS[each]).message for each, document in everything]
            changed = next(m for (each, _), m in zip(everything, messages, strict=True) if each == kind)
            with_field(changed, path, number)
            harness.server.publish("it", Snapshot.of(messages))
            await harness.until(lambda: [error for each, error in harness.answers if each == answer and error])
            error = next(error for each, error in harness.answers if each == answer and error)
            assert words in error
            assert await ask(harness.port("l"), b"") == b"good"

    run(tmp_path, body)
