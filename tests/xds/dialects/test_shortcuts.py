"""Plain assignments and clusters of a known shape are judged as if they were compiled in full."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xds.dialects.test_envoy import SURROUNDINGS
from xds.dialects.envoy import Surroundings, cluster, compile_assignment, compile_cluster, filters, matcher
from xds.dialects.envoy import listener as envoy_listener
from xds.dialects.envoy.endpoint import Member, plain_members
from xds.dialects.envoy.parts import Parts
from xds.dialects.envoy.reading import Shared, every_fault
from xds.errors import ConfigError
from xds.model.address import InternalAddress, SocketAddress
from xds.model.cluster import Cluster as ClusterModel
from xds.model.cluster import Endpoint, Health, LoadAssignment
from xds.model.listener import TcpProxy as TcpProxyModel
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Filter, FilterChain
from xds.proto.envoy.extensions.filters.network.tcp_proxy.v3.tcp_proxy_pb2 import TcpProxy
from xds.proto.json import parse_value
from xds.proto.xds.core.v3.core_pb2 import TypedExtensionConfig
from xds.proto.xds.type.matcher.v3.matcher_pb2 import Matcher

Given, Read = TypeVar("Given"), TypeVar("Read")

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
    *(((("endpoints", group, "priority"), value)) for group in (0, 1) for value in (0, 1, 128, 129)),
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


def _result(read: Callable[[Given], Read], message: Given) -> Read | str:
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
    (("name",), "a" * 97),  # its length is the code of its letter
    (("name",), "b" * 97),
    (("name",), None),
    (("type",), "STATIC"),
    (("type",), "STRICT_DNS"),
    (("eds_cluster_config",), None),
    (("eds_cluster_config", "service_name"), "other"),
    (("eds_cluster_config", "service_name"), "two"),
    (("alt_stat_name",), "two"),
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
    return _result(lambda message: compile_cluster(message, SURROUNDINGS), parse_value(document, Cluster).message)


_SHARED: tuple[Shared[Any], ...] = (
    *(cluster._named, envoy_listener._named, matcher._named),
    *(filters._tcp_proxies, matcher._inputs),
)


def _forget() -> None:
    for each in _SHARED:
        each.clear()


@pytest.fixture
def shapes() -> Iterator[None]:
    _forget()
    yield
    _forget()


def _same_as_alone(results: list[Callable[[], object]]) -> None:
    """Hold results, computed one after another, to those of the same without shared values."""
    _forget()
    together = [result() for result in results]
    for result, found in zip(results, together, strict=True):
        _forget()
        assert result() == found


@given(
    shape=st.lists(st.sampled_from(_CLUSTER_CHANGES), max_size=3),
    changes=st.lists(st.sampled_from(_CLUSTER_CHANGES), max_size=3),
)
def test_a_cluster_of_a_known_shape_is_as_if_compiled(shape: list[Change], changes: list[Change]) -> None:
    documents = [_changed(_EDS, shape), *(_changed(_EDS, [*shape, change]) for change in changes)]
    _same_as_alone([partial(_compiled, document) for document in documents])


_LOG = {
    "name": "file",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
        "path": "/dev/null",
        "log_format": {"text_format_source": {"filename": "/format"}},
    },
}
_PROXY = {"stat_prefix": "one", "cluster": "one"}
_WEIGHTED = {"clusters": [{"name": "one", "weight": 1}]}
_PROXY_CHANGES: list[Change] = [
    (("stat_prefix",), "two"),
    (("stat_prefix",), None),
    (("cluster",), "two"),
    (("cluster",), ""),
    (("cluster",), None),
    (("idle_timeout",), "5s"),
    (("idle_timeout",), "-5s"),
    (("max_connect_attempts",), 3),
    (("max_connect_attempts",), 0),
    (("access_log",), [_LOG]),
    (("tunneling_config",), {"hostname": "%CLUSTER%"}),
    (("tunneling_config",), {}),
    (("on_demand",), {}),
]


def _proxy(document: dict[str, Any], contents: bytes) -> object:
    surroundings = Surroundings(read_file=lambda _: contents, environment={})
    message = parse_value(document, TcpProxy).message
    return _result(lambda message: filters.compile_filter(message, surroundings), message)


@given(
    shape=st.lists(st.sampled_from(_PROXY_CHANGES), max_size=3),
    changes=st.lists(
        st.tuples(st.sampled_from(_PROXY_CHANGES), st.sampled_from([b"%ROUTE_NAME%", b"x"])), max_size=3
    ),
    weighted=st.booleans(),
)
def test_a_tcp_proxy_of_a_known_shape_is_as_if_compiled(
    shape: list[Change], changes: list[tuple[Change, bytes]], weighted: bool
) -> None:
    plain = {"stat_prefix": "one", "weighted_clusters": _WEIGHTED} if weighted else _PROXY
    if weighted:  # one of the two
        shape = [change for change in shape if change[0] != ("cluster",)]
        changes = [change for change in changes if change[0][0] != ("cluster",)]
    documents = [(_changed(plain, shape), b"x")]
    documents += [(_changed(plain, [*shape, change]), contents) for change, contents in changes]
    _same_as_alone([partial(_proxy, *each) for each in documents])


@pytest.mark.usefixtures("shapes")
def test_a_file_is_read_for_each_tcp_proxy() -> None:
    first, second = (_proxy({**_PROXY, "access_log": [_LOG]}, contents) for contents in (b"x", b"%ROUTE_NAME%"))
    assert first != second


@pytest.mark.usefixtures("shapes")
def test_a_tcp_proxy_of_a_known_shape_needs_its_names() -> None:
    assert isinstance(_proxy(_PROXY, b""), TcpProxyModel)
    for name in _PROXY:
        assert f"{name}: Proto constraint" in str(_proxy({**_PROXY, name: ""}, b""))


def test_tcp_proxies_share_their_values() -> None:
    log = _changed(_LOG, [(("typed_config", "log_format"), {"text_format_source": {"inline_string": "x"}})])
    first, second = (_proxy({**_PROXY, "cluster": name, "access_log": [log]}, b"") for name in ("one", "two"))
    assert isinstance(first, TcpProxyModel)
    assert isinstance(second, TcpProxyModel)
    assert second.clusters[0].name == "two"
    assert second.access_log is first.access_log


_NAMES = st.sampled_from(["a", ":a", "::", "aa", "a" * 97, "b" * 97, ":" * 58, "x:\x03", "tcp", "x" * 200, "\xe9"])


def _chain(name: str, prefix: str, to: str, filter_name: str) -> object:
    proxy = TcpProxy(stat_prefix=prefix, cluster=to)
    message = FilterChain(name=name, filters=[Filter(name=filter_name, typed_config=registry.pack(proxy))])
    noted, asked = SURROUNDINGS.noted()
    return _result(lambda given: envoy_listener._chain_or_kept(given, noted, asked, Parts()), message)


@given(chains=st.lists(st.one_of(_NAMES.map(lambda name: (name, name, name, "tcp")), st.tuples(*[_NAMES] * 4))))
def test_a_chain_that_differs_in_its_name_is_as_if_compiled(chains: list[tuple[str, str, str, str]]) -> None:
    _same_as_alone([partial(_chain, *each) for each in chains])


def _entry(port: str, name: str, value: str, keep: bool) -> object:
    action = {"name": name, "typed_config": {"@type": "type.googleapis.com/google.protobuf.StringValue"}}
    action["typed_config"] |= {"value": value}
    lookup = {"input": _INPUTS[0], "exact_match_map": {"map": {port: {"action": action, "keep_matching": keep}}}}
    message = parse_value({"matcher": {"matcher_tree": lookup}}, Matcher.OnMatch).message
    return _result(lambda given: matcher._on_match(given, Parts()), message)


@given(
    entries=st.lists(
        st.one_of(
            _NAMES.map(lambda name: ("80", name, name, False)),
            st.tuples(st.sampled_from(["80", "a"]), _NAMES, _NAMES, st.booleans()),
        )
    )
)
def test_an_entry_that_differs_in_its_name_is_as_if_compiled(entries: list[tuple[str, str, str, bool]]) -> None:
    _same_as_alone([partial(_entry, *each) for each in entries])


@pytest.mark.usefixtures("shapes")
def test_clusters_that_differ_in_their_names_are_not_parsed() -> None:
    def packed(**changes: Any) -> tuple[bytes, str]:
        message = parse_value({**_EDS, "name": "two", **changes}, Cluster).message
        return message.SerializeToString(deterministic=True), message.name

    assert cluster.renamed_cluster(*packed()) is None
    _compiled(_EDS)
    assert cluster.renamed_cluster(*packed()) == _compiled({**_EDS, "name": "two"})
    assert cluster.renamed_cluster(*packed(connect_timeout="7s")) is None
    wire, name = packed()
    assert cluster.renamed_cluster(wire + b"\xd2\x3e\x01x", name) is None, "an unknown field"
    assert cluster.renamed_cluster(wire, "one") is None, "another name than the message has"


_INPUT = "type.googleapis.com/envoy.extensions.matching.common_inputs.network.v3"
_INPUTS = [
    {"name": "port", "typed_config": {"@type": f"{_INPUT}.DestinationPortInput"}},
    {"name": "port", "typed_config": {"@type": f"{_INPUT}.SourceIPInput"}},
    {"name": "state", "typed_config": {"@type": f"{_INPUT}.FilterStateInput", "key": "a"}},
    {"name": "state", "typed_config": {"@type": f"{_INPUT}.FilterStateInput", "key": "b"}},
    {"name": "namespace", "typed_config": {"@type": f"{_INPUT}.NetworkNamespaceInput"}},
    {"name": "other", "typed_config": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": "x"}},
]


@given(documents=st.lists(st.sampled_from(_INPUTS), max_size=5))
def test_a_known_matching_input_is_as_if_compiled(documents: list[dict[str, Any]]) -> None:
    messages = [parse_value(document, TypedExtensionConfig).message for document in documents]
    _same_as_alone([partial(_result, matcher._input, message) for message in messages])


@pytest.mark.usefixtures("shapes")
def test_shapes_are_shared_and_bounded() -> None:
    first, second = _compiled(_EDS), _compiled({**_EDS, "name": "two"})
    assert isinstance(first, ClusterModel)
    assert isinstance(second, ClusterModel)
    assert second.eds_name == second.name == "two"
    assert second.balancing is first.balancing
    for number in range(1, 2 * cluster._named._most):
        _compiled({**_EDS, "connect_timeout": f"{number}s"})
        assert len(cluster._named._values) <= cluster._named._most


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
    document = {**_EDS, "close_connections_on_host_health_failure": True}
    message = parse_value(document, Cluster).message
    assert every_fault(lambda: compile_cluster(message, SURROUNDINGS))[0] is None
    assert not cluster._named._values
