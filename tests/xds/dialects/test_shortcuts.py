"""Plain assignments and clusters of a known shape are judged as if they were compiled in full."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xds.dialects.test_envoy import SURROUNDINGS
from xds.dialects.envoy import cluster, compile_assignment, compile_cluster
from xds.dialects.envoy.endpoint import Member, plain_members
from xds.dialects.envoy.reading import every_fault
from xds.errors import ConfigError
from xds.model.address import InternalAddress, SocketAddress
from xds.model.cluster import Cluster as ClusterModel
from xds.model.cluster import Endpoint, Health, LoadAssignment
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.json import parse_value

Read = TypeVar("Read")

# Plain documents, and changes of them: a place and a value; None omits the field

Change = tuple[tuple[str | int, ...], Any]


def _changed(document: dict[str, Any], changes: Iterable[Change]) -> dict[str, Any]:
    copied: dict[str, Any] = copy.deepcopy(document)
    for place, value in changes:
        found: Any = copied
        for step in place[:-1]:
            found = found[step] if isinstance(step, int) else found.setdefault(step, {})
        if value is None:
            found.pop(place[-1], None)
        else:
            found[place[-1]] = value
    return copied


def _socket(host: str, **more: Any) -> dict[str, Any]:
    return {"socket_address": {"address": host, **(more or {"port_value": 80})}}


def _internal(**fields: str) -> dict[str, Any]:
    return {"envoy_internal_address": fields}


_PLAIN = {
    "cluster_name": "web",
    "endpoints": [
        {
            "locality": {"region": "r"},
            "lb_endpoints": [
                {"endpoint": {"address": _socket("10.0.0.1")}, "load_balancing_weight": 2},
                {
                    "endpoint": {"address": _internal(server_listener_name="tunnel", endpoint_id="10.0.0.2:80")},
                    "health_status": "HEALTHY",
                    "metadata": {"filter_metadata": {"tunnel": {"address": "10.0.0.2:15008"}}},
                },
            ],
        },
        {"priority": 2, "lb_endpoints": [{"endpoint": {"address": _socket("10.0.0.3"), "hostname": "web"}}]},
    ],
}
_ENDPOINTS: tuple[tuple[str | int, ...], ...] = (
    ("endpoints", 0, "lb_endpoints", 0),
    ("endpoints", 0, "lb_endpoints", 1),
    ("endpoints", 1, "lb_endpoints", 0),
)
_CHANGES: list[Change] = [
    (("cluster_name",), None),
    (("policy",), {}),
    (("policy", "overprovisioning_factor"), 140),
    (("policy", "overprovisioning_factor"), 0),
    (("policy", "overprovisioning_factor"), 200),
    (("policy", "weighted_priority_health"), True),
    (("policy", "endpoint_stale_after"), "5s"),
    (("policy", "drop_overloads"), [{"category": "all", "drop_percentage": {"numerator": 5}}]),
    *(((*place, "health_status"), status) for place in _ENDPOINTS for status in (*map(str, Health), 77)),
    *(((*place, "load_balancing_weight"), weight) for place in _ENDPOINTS for weight in (0, 1, None)),
    *(((*place, "metadata"), {"filter_metadata": {"envoy.lb": {"canary": True}}}) for place in _ENDPOINTS),
    *(((*place, "endpoint"), value) for place in _ENDPOINTS for value in ({}, None)),
    *(
        ((*place, "endpoint", *field), value)
        for place in _ENDPOINTS
        for field, value in (
            (("hostname",), "other"),
            (("health_check_config",), {}),
            (("health_check_config",), {"port_value": 70000}),
            (("additional_addresses",), [{"address": _socket("10.0.0.9")}]),
            *(
                (("address",), address)
                for address in (
                    *map(_socket, ("10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1", "fd00::1", "FD00:0::1", "name", "")),
                    _socket("10.0.0.1", port_value=70000),
                    _socket("10.0.0.1", named_port="http"),
                    _socket("10.0.0.1", protocol="UDP", port_value=80),
                    _internal(server_listener_name="tunnel", endpoint_id="10.0.0.2:80"),
                    _internal(server_listener_name="tunnel"),
                    _internal(endpoint_id="10.0.0.2:80"),
                    {"pipe": {"path": "/x"}},
                    {},
                    None,
                )
            ),
        )
    ),
    *(((("endpoints", group, "priority"), value)) for group in (0, 1) for value in (0, 1, 127, 128)),
    *(((("endpoints", group, "load_balancing_weight"), value)) for group in (0, 1) for value in (0, 3)),
]


def _member(endpoint: Endpoint) -> tuple[str, str | int]:
    assert isinstance(endpoint.address, InternalAddress | SocketAddress)
    if isinstance(endpoint.address, InternalAddress):
        return endpoint.address.listener, endpoint.address.endpoint_id
    return endpoint.address


def _members(assignment: LoadAssignment) -> tuple[set[tuple[str, str | int]], ...]:
    levels: list[set[tuple[str, str | int]]] = []
    for group in assignment.groups:
        levels.extend(set() for _ in range(len(levels), group.priority + 1))
        levels[group.priority].update(map(_member, group.endpoints))
    return tuple(levels)


def _result(read: Callable[[ClusterLoadAssignment], Read], message: ClusterLoadAssignment) -> Read | str:
    try:
        return read(message)
    except ConfigError as error:
        return str(error)


def _hold(document: dict[str, Any], *, unknown: bool = False) -> None:
    message = parse_value(document, ClusterLoadAssignment).message
    if unknown:
        message.MergeFromString(b"\xd2\x3e\x01x")  # a field 1002, which no version has
    same = ClusterLoadAssignment.FromString(message.SerializeToString())
    compiled, members = _result(compile_assignment, same), _result(plain_members, message)
    if members is None:
        return
    if isinstance(members, str):
        assert compiled == members
        return
    assert isinstance(compiled, LoadAssignment), compiled
    assert members == _members(compiled)
    assert len(compiled.endpoints) == sum(map(len, members))
    assert {each.health for each in compiled.endpoints} <= {Health.UNKNOWN, Health.HEALTHY}
    assert compiled.overprovisioning_factor == 140
    assert not compiled.drop
    assert not compiled.weighted_priority_health


@pytest.mark.parametrize("change", _CHANGES, ids=str)
def test_a_plain_assignment_is_not_refused(change: Change) -> None:
    _hold(_changed(_PLAIN, [change]))


@given(changes=st.lists(st.sampled_from(_CHANGES), max_size=4), unknown=st.booleans())
def test_a_plain_assignment_is_what_compiling_makes_of_it(changes: list[Change], unknown: bool) -> None:
    _hold(_changed(_PLAIN, changes), unknown=unknown)


def test_the_usual_assignment_is_plain() -> None:
    message = parse_value(_PLAIN, ClusterLoadAssignment).message
    here: set[Member] = {("10.0.0.1", 80), ("tunnel", "10.0.0.2:80")}
    assert plain_members(message) == (here, set(), {("10.0.0.3", 80)})


_T = "type.googleapis.com/envoy.extensions.transport_sockets"
_RAW = {"name": "raw", "typed_config": {"@type": f"{_T}.raw_buffer.v3.RawBuffer"}}
_TLS = {
    "name": "tls",
    "typed_config": {
        "@type": f"{_T}.tls.v3.UpstreamTlsContext",
        "common_tls_context": {"validation_context": {"trusted_ca": {"filename": "/roots.pem"}}},
    },
}
_EDS = {"name": "one", "type": "EDS", "eds_cluster_config": {"eds_config": {"ads": {}}}, "transport_socket": _RAW}
_CHECK = {"timeout": "1s", "interval": "1s", "unhealthy_threshold": 1, "healthy_threshold": 1}
_CLUSTER_CHANGES: list[Change] = [
    (("name",), "two"),
    (("name",), "three"),
    (("name",), None),
    (("type",), "STATIC"),
    (("type",), "STRICT_DNS"),
    (("eds_cluster_config",), None),
    (("eds_cluster_config", "service_name"), "other"),
    (("eds_cluster_config", "eds_config"), {}),
    (("connect_timeout",), "2s"),
    (("connect_timeout",), "0s"),
    (("lb_policy",), "RANDOM"),
    (("lb_policy",), "CLUSTER_PROVIDED"),
    (("circuit_breakers",), {"thresholds": [{"max_connections": 5}]}),
    (("transport_socket",), _TLS),
    (("transport_socket",), {"name": "none"}),
    (("alt_stat_name",), "other"),
    (("metadata",), {"filter_metadata": {"istio": {"a": 1}}}),
    (("health_checks",), [{**_CHECK, "http_health_check": {"path": "/"}}]),
]


def _compiled(document: dict[str, Any]) -> ClusterModel | str:
    try:
        return compile_cluster(parse_value(document, Cluster).message, SURROUNDINGS)
    except ConfigError as error:
        return str(error)


@pytest.fixture
def shapes() -> Iterator[None]:
    cluster._shapes.clear()
    yield
    cluster._shapes.clear()


@given(
    shape=st.lists(st.sampled_from(_CLUSTER_CHANGES), max_size=3),
    changes=st.lists(st.sampled_from(_CLUSTER_CHANGES), max_size=3),
)
def test_a_cluster_of_a_known_shape_is_as_if_compiled(shape: list[Change], changes: list[Change]) -> None:
    documents = [_changed(_EDS, shape), *(_changed(_EDS, [*shape, change]) for change in changes)]
    cluster._shapes.clear()
    together = [_compiled(document) for document in documents]
    for document, found in zip(documents, together, strict=True):
        cluster._shapes.clear()
        assert _compiled(document) == found


@pytest.mark.usefixtures("shapes")
def test_shapes_are_shared_and_bounded() -> None:
    first, second = _compiled(_EDS), _compiled({**_EDS, "name": "two"})
    assert isinstance(first, ClusterModel)
    assert isinstance(second, ClusterModel)
    assert second.eds_name == second.name == "two"
    assert second.balancing is first.balancing
    for number in range(1, 2 * cluster._MOST_SHAPES):
        _compiled({**_EDS, "connect_timeout": f"{number}s"})
        assert len(cluster._shapes) <= cluster._MOST_SHAPES


@pytest.mark.usefixtures("shapes")
def test_files_are_read_for_each_cluster() -> None:
    contents = [b"first", b"second"]
    surroundings = type(SURROUNDINGS)(read_file=lambda _: contents.pop(0), environment={})
    for name in ("one", "two"):
        document = {**_EDS, "name": name, "transport_socket": _TLS}
        compile_cluster(parse_value(document, Cluster).message, surroundings)
    assert not contents


@pytest.mark.usefixtures("shapes")
def test_an_incomplete_result_is_no_shape() -> None:
    document = {
        **_EDS,
        "connect_timeout": "0s",
        "circuit_breakers": {"thresholds": [{"max_connections": 5}], "per_host_thresholds": [{}]},
    }
    message = parse_value(document, Cluster).message
    assert every_fault(lambda: compile_cluster(message, SURROUNDINGS))[0] is None
    assert not cluster._shapes
