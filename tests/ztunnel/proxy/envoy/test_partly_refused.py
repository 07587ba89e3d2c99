"""A response with listeners or clusters of which some are refused."""

from pathlib import Path

import pytest

from tests.ztunnel.proxy.envoy.harness import KINDS, Harness, Json, cluster, listener, run
from xds.proto import registry
from xds.proto.json import parse_value
from xds.protocol.resource import Resource, Update, UpdateRejected


def update_of(*resources: tuple[str, Json]) -> Update:
    """Return an update of the incremental protocol."""
    (kind,) = {kind for kind, _ in resources}
    packed = [
        Resource(name=body["name"], version="1", body=registry.pack(parse_value(body, KINDS[kind]).message))
        for _, body in resources
    ]
    return Update(type_url=registry.type_url(KINDS[kind]), version="1", resources=tuple(packed))


def test_a_refusal_names_the_refused_resources_only(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        bad_cluster = cluster(1, name="bad", connect_timeout="0s")
        with pytest.raises(UpdateRejected) as refused:
            await harness.proxy.clusters.receive(update_of(cluster(1, name="good"), bad_cluster))
        assert refused.value.rejected == {"bad"}
        bad_listener = listener(name="bad", listener_filters_timeout="-1s")
        with pytest.raises(UpdateRejected) as refused:
            await harness.proxy.listeners.receive(update_of(listener(name="good"), bad_listener))
        assert refused.value.rejected == {"bad"}

    run(tmp_path, body, listener(), cluster(1))
