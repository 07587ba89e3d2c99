"""Fields that our messages lack: found at any depth, called by name, and none that Envoy has is unknown."""

import pytest

from xds.dialects.envoy import (
    Surroundings,
    compile_assignment,
    compile_cluster,
    compile_listener,
    compile_route_table,
    compile_secret,
)
from xds.errors import ConfigError
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.envoy.config.route.v3.route_pb2 import RouteConfiguration
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import Secret
from xds.proto.unknown import HARMLESS, missing_fields, reason_for, unknown_fields
from xds.proto.well_known import Any

SURROUNDINGS = Surroundings(read_file=lambda path: b"", environment={})


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def field(number: int, payload: bytes = b"") -> bytes:
    """Return a length-delimited field. Its type is irrelevant to a reader that does not know the number."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def test_every_missing_field_is_found_by_its_name() -> None:
    walked = 0
    for name, fields in missing_fields().items():
        for number, called in fields.items():
            message = registry.message_for(name)()
            message.ParseFromString(field(number))
            found = unknown_fields(message)
            packed = Any(type_url=name, value=field(number))
            again = registry.unpack(packed)
            assert (unknown_fields(again, packed), again) == (found, message)
            if f"{name}.{called}" in HARMLESS:
                assert found == [], (name, called)
                assert message.ByteSize() == 0, "dropped, so that it changes no digest"
                continue
            assert [each.path for each in found] == [called], name
            assert "does not support" in found[0].reason
            assert message.ByteSize() > 0, "a refused message is as it was"
            walked += 1
    assert walked > 250


def test_harmless_fields_are_fields_that_are_missing() -> None:
    for name in HARMLESS:
        message, _, called = name.rpartition(".")
        assert called in missing_fields()[message].values()


def test_no_name_is_of_a_number_that_our_message_has() -> None:
    for name, fields in missing_fields().items():
        ours = registry.message_for(name).DESCRIPTOR.fields_by_number
        assert not fields.keys() & ours.keys()


def test_it_is_found_below_lists_and_maps() -> None:
    host = field(2, field(3, field(1, field(9))))  # virtual_hosts, routes, match, runtime_fraction
    routes = RouteConfiguration.FromString(field(2, b"") + host)
    assert [each.path for each in unknown_fields(routes)] == ["virtual_hosts[1].routes[0].match.runtime_fraction"]
    endpoints = field(5, field(1, b"one") + field(2, field(99)))  # named_endpoints
    (found,) = unknown_fields(ClusterLoadAssignment.FromString(endpoints))
    assert str(found) == "named_endpoints['one']: unknown field number 99 of envoy.config.endpoint.v3.Endpoint"


def test_a_field_of_another_wire_type_is_malformed() -> None:
    (found,) = unknown_fields(Cluster.FromString(varint(1 << 3) + b"\x05"))  # the name as a number
    assert str(found) == "name: malformed: another wire type than this field has"


def test_the_plain_port_override_of_2022_is_no_unknown_field() -> None:
    plain = varint(3 << 3) + varint(15008)
    number = Cluster.ORIGINAL_DST_LB_CONFIG_FIELD_NUMBER
    old = registry.parse(registry.type_url(Cluster), field(1, b"c") + field(number, plain))
    assert unknown_fields(old) == []
    both = registry.parse(registry.type_url(Cluster), field(1, b"c") + field(number, plain + field(99)))
    assert len(unknown_fields(both)) == 2, "one more unknown field beside it is not dropped with it"


def test_text_has_the_same_fields_in_either_spelling() -> None:
    for name in ("runtime_fraction", "runtimeFraction"):
        assert "does not support" in str(reason_for("envoy.config.route.v3.RouteMatch", name))
    assert reason_for("envoy.config.route.v3.RouteMatch", "colour") == "no such field"
    assert reason_for("envoy.config.route.v3.Route", "statPrefix") is None


@pytest.mark.parametrize(
    ("kind", "compile_it"),
    [
        (Listener, lambda m: compile_listener(m, SURROUNDINGS)),
        (Cluster, lambda m: compile_cluster(m, SURROUNDINGS)),
        (ClusterLoadAssignment, compile_assignment),
        (RouteConfiguration, lambda m: compile_route_table(m, SURROUNDINGS)),
        (Secret, lambda m: compile_secret(m, SURROUNDINGS)),
    ],
)
def test_every_compiler_of_a_resource_checks(kind, compile_it) -> None:  # type: ignore[no-untyped-def]  # a table
    message = kind.FromString(field(500))
    with pytest.raises(ConfigError, match="unknown field number 500"):
        compile_it(message)
