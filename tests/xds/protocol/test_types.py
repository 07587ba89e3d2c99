"""The name of a resource is read without parsing it, and is what parsing it finds."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.types import CDS, name_of


def cluster(name: str) -> Cluster:
    message = Cluster(name=name, type=Cluster.EDS)
    message.connect_timeout.seconds = 300
    message.metadata.filter_metadata["a"].fields["b"].number_value = 1.5
    return message


@pytest.mark.parametrize(
    "message", [cluster("c"), cluster("n" * 300), cluster("ünïcode"), Cluster(), Listener(name="l")]
)
def test_names_are_read_from_packed_resources(message: Cluster | Listener) -> None:
    assert name_of(registry.pack(message)) == message.name


def test_the_last_of_two_names_counts() -> None:
    data = cluster("first").SerializeToString() + Cluster(name="last").SerializeToString()
    assert name_of(AnyMessage(type_url=CDS, value=data)) == Cluster.FromString(data).name == "last"


def test_fields_of_every_wire_type_are_passed_over() -> None:
    # Numbers no message has: fixed64, fixed32, and a varint of ten bytes.
    unknown = b"\xf9\xff\x01" + bytes(8) + b"\xfd\xff\x01" + bytes(4) + b"\xf8\xff\x01" + b"\xff" * 9 + b"\x01"
    data = unknown + cluster("c").SerializeToString()
    assert name_of(AnyMessage(type_url=CDS, value=data)) == Cluster.FromString(data).name == "c"


DATA = cluster("cut").SerializeToString()


@pytest.mark.parametrize("cut", range(len(DATA)))
def test_what_is_cut_short_is_malformed_or_what_the_parser_makes_of_it(cut: int) -> None:
    packed = AnyMessage(type_url=CDS, value=DATA[:cut])
    try:
        expected = Cluster.FromString(DATA[:cut]).name
    except DecodeError:
        with pytest.raises(registry.MalformedMessage):
            name_of(packed)
        return
    assert name_of(packed) == expected


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_have_a_name_or_are_malformed(data: bytes) -> None:
    try:
        name = name_of(AnyMessage(type_url=CDS, value=data))
    except registry.MalformedMessage:
        return
    assert isinstance(name, str)


def test_a_resource_of_an_unknown_type_has_no_name() -> None:
    with pytest.raises(registry.UnknownType):
        name_of(AnyMessage(type_url="type.googleapis.com/nobody.knows.This"))
