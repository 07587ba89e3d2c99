"""Hosts that no connection has needed are not made, and nobody can tell."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ztunnel.proxy.envoy.upstream.test_cluster import surround_of
from xds.model.address import SocketAddress
from xds.model.cluster import Balancing, Cluster, Discovery, OutlierDetection, SlowStart
from xds.model.facts import ConnectionFacts
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.json import parse_value
from xds.proto.registry import pack
from xds.protocol.resource import Resource, Update, UpdateRejected
from ztunnel.proxy.dataplane.resolver import Resolver
from ztunnel.proxy.envoy.admin.clusters import hosts_of
from ztunnel.proxy.envoy.admin.dump import assignment_message
from ztunnel.proxy.envoy.stream.outcome import NoHealthyHost
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.upstream import cluster as module
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster

_MODEL = Cluster(name="web", discovery=Discovery.EDS, eds_name="web")


def _cluster(model: Cluster = _MODEL) -> LiveCluster:
    return LiveCluster(model, pack(ClusterLoadAssignment()), surround_of(random.Random(1), Resolver()))


def _assignment(*groups: tuple[int, list[int]], status: str = "HEALTHY", **more: Any) -> dict[str, Any]:
    def endpoint(last: int) -> dict[str, Any]:
        address = {"socket_address": {"address": f"10.0.0.{last}", "port_value": 80}}
        return {"endpoint": {"address": address}, "health_status": status}

    listed = [{"priority": priority, "lb_endpoints": list(map(endpoint, lasts))} for priority, lasts in groups]
    return {"cluster_name": "web", "endpoints": listed, **more}


def _receive(cluster: LiveCluster, document: dict[str, Any]) -> str:
    """Pass an assignment to a cluster. Return the error if it refuses."""
    body = pack(parse_value(document, ClusterLoadAssignment).message)
    resource = Resource(name="web", version="1", body=body)
    try:
        # It waits for nothing.
        with pytest.raises(StopIteration):
            cluster._receive_endpoints(Update(type_url=module.EDS_URL, version="1", resources=(resource,))).send(
                None
            )
    except UpdateRejected as error:
        return str(error)
    return ""


def _choose(cluster: LiveCluster) -> str:
    source = SocketAddress("10.9.9.9", 4000)
    facts = ConnectionFacts(source=source, direct_source=source, destination=source)
    try:
        return str(cluster.choose(StreamInfo(connection_id=1, facts=facts, started=0.0, started_at=0.0)))
    except NoHealthyHost:
        return "None"


def _seen(cluster: LiveCluster) -> tuple[object, ...]:
    counts = (cluster.host_count, cluster.host_changes, cluster.healthy_count, cluster.degraded_count)
    hosts = [(str(host), priority, host.flags, host.endpoint) for host, priority in hosts_of(cluster)]
    return (*counts, hosts, assignment_message(cluster), cluster.unchanged_updates)


_UPDATES = st.one_of(
    st.builds(
        lambda groups, status: _assignment(*groups, status=status),
        st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(1, 2), max_size=2)), max_size=2),
        st.sampled_from(["HEALTHY", "UNKNOWN"]),
    ),
    st.sampled_from(
        [
            _assignment((0, [1, 2]), status="DEGRADED"),
            _assignment((0, [1, 2]), status="DRAINING"),
            _assignment((0, [1, 2]), policy={"overprovisioning_factor": 200}),
            _assignment((0, [1, 2]), (128, [3])),
        ]
    ),
)


@given(updates=st.lists(st.tuples(_UPDATES, st.booleans()), max_size=6))
def test_a_cluster_with_unmade_hosts_shows_what_one_with_hosts_does(
    updates: list[tuple[dict[str, Any], bool]],
) -> None:
    lazy, eager = _cluster(), _cluster()
    for document, use in updates:
        assert _receive(lazy, document) == _receive(eager, document)
        assert eager.hosts is eager.hosts_shown
        assert _seen(lazy) == _seen(eager)
        if use:
            assert _choose(lazy) == _choose(eager)
            assert _seen(lazy) == _seen(eager)


def test_hosts_are_made_for_the_first_connection() -> None:
    cluster = _cluster()
    assert not _receive(cluster, _assignment((0, [1]), (1, [2])))
    assert len(_seen(cluster)[4]) == 2  # type: ignore[arg-type]
    assert cluster.hosts_shown is not cluster.hosts_shown  # made for a page, not kept
    assert _choose(cluster) == "10.0.0.1:80"
    assert cluster.hosts_shown is cluster.hosts_shown
    (first, second) = cluster.hosts.hosts
    assert not _receive(cluster, _assignment((0, [2, 3])))
    assert cluster.hosts.hosts[0] is second
    assert first not in cluster.hosts.hosts


@pytest.mark.parametrize(
    "model",
    [
        Cluster(name="web", discovery=Discovery.EDS, eds_name="web", outlier=OutlierDetection()),
        Cluster(
            name="web",
            discovery=Discovery.EDS,
            eds_name="web",
            balancing=Balancing(slow_start=SlowStart(window_s=5.0)),
        ),
    ],
    ids=["outlier detection", "slow start"],
)
def test_hosts_are_made_at_once_where_their_age_or_state_counts(model: Cluster) -> None:
    cluster = _cluster(model)
    assert not _receive(cluster, _assignment((0, [1])))
    assert cluster.hosts_shown is cluster.hosts_shown


def test_many_hosts_are_made_at_once() -> None:
    """A connection does not wait for them."""
    cluster = _cluster()
    assert not _receive(cluster, _assignment((0, list(range(1, module._MOST_UNMADE + 2)))))
    assert cluster.hosts_shown is cluster.hosts_shown


def test_a_drop_share_of_an_earlier_assignment_without_endpoints_is_not_applied() -> None:
    cluster = _cluster()
    everything = {"category": "all", "drop_percentage": {"numerator": 100}}
    assert not _receive(cluster, _assignment(policy={"drop_overloads": [everything]}))
    assert _choose(cluster) == "None"
    assert not _receive(cluster, _assignment((0, [1])))
    assert _choose(cluster) == "10.0.0.1:80"
