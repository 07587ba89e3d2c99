import subprocess
import sys

import pytest
from google.protobuf import descriptor_pb2

from xds.proto import generate, registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.well_known import Any as AnyMessage

TYPES = [
    "envoy.config.listener.v3.Listener",
    "envoy.config.cluster.v3.Cluster",
    "envoy.config.endpoint.v3.ClusterLoadAssignment",
    "envoy.config.route.v3.RouteConfiguration",
    "envoy.extensions.transport_sockets.tls.v3.Secret",
    "envoy.config.core.v3.TypedExtensionConfig",
    "envoy.service.runtime.v3.Runtime",
    "envoy.service.discovery.v3.DiscoveryRequest",
    "envoy.service.discovery.v3.Resource",
    "envoy.config.bootstrap.v3.Bootstrap",
    "envoy.admin.v3.ListenersConfigDump.DynamicListener",
    "envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
    "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
    "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
    "envoy.extensions.filters.network.set_filter_state.v3.Config",
    "envoy.extensions.matching.common_inputs.network.v3.DestinationIPInput",
    "envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
    "xds.type.matcher.v3.IPMatcher",
    "xds.type.v3.TypedStruct",
    "udpa.type.v1.TypedStruct",
    "google.rpc.Status",
    "google.protobuf.StringValue",
    "google.protobuf.Empty",
    "istio.set_internal_dst_address.v1.Config",
    "istio.telemetry.workloadmetadata.v1.WorkloadMetadataResources",
]


def test_importing_the_registry_alone_knows_every_type() -> None:
    script = (
        f"from xds.proto import registry\n"
        f"for name in {TYPES!r}: registry.message_for('type.googleapis.com/' + name)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=generate.ROOT)


def test_type_url_and_class_are_inverse() -> None:
    assert registry.type_url(Listener) == "type.googleapis.com/envoy.config.listener.v3.Listener"
    assert registry.message_for(registry.type_url(Listener())) is Listener


def test_unknown_type_and_malformed_bytes_are_told_apart() -> None:
    with pytest.raises(registry.UnknownType, match=r"no\.such\.Type"):
        registry.unpack(AnyMessage(type_url="type.googleapis.com/no.such.Type"))
    with pytest.raises(registry.MalformedMessage, match=r"envoy\.config\.cluster\.v3\.Cluster"):
        registry.unpack(AnyMessage(type_url=registry.type_url(Cluster), value=b"\x0a\xff"))


def test_fields_the_tables_omit_survive() -> None:
    # Field 1000 of Listener, length-delimited; inside a filter chain field 999, varint.
    chain = b"\x3a\x01c" + bytes([0xB8, 0x3E, 7])
    data = b"\x0a\x01l" + bytes([0x1A, len(chain)]) + chain + bytes([0xC2, 0x3E, 3]) + b"abc"
    message = registry.parse(registry.type_url(Listener), data)
    assert isinstance(message, Listener)
    assert message.filter_chains[0].name == "c"
    assert message.SerializeToString() == data


def _cluster_with(lb_config: bytes) -> Cluster:
    data = b"\x0a\x01c" + bytes([0x92, 0x02, len(lb_config)]) + lb_config
    message = registry.parse(registry.type_url(Cluster), data)
    assert isinstance(message, Cluster)
    return message


def test_port_override_is_read_as_wrapper_and_as_the_preview_builds_varint() -> None:
    wrapped = _cluster_with(b"\x08\x01\x1a\x03\x08\xa0\x75")
    plain = _cluster_with(b"\x08\x01\x18\xa0\x75")
    assert wrapped.original_dst_lb_config.upstream_port_override.value == 15008
    assert plain == wrapped
    assert plain.original_dst_lb_config.use_http_header


def test_last_plain_port_override_wins() -> None:
    assert _cluster_with(b"\x18\x01\x18\xa0\x75").original_dst_lb_config.upstream_port_override.value == 15008


def test_absent_port_override_stays_absent() -> None:
    assert not _cluster_with(b"\x08\x01").original_dst_lb_config.HasField("upstream_port_override")


def test_pack_is_deterministic_for_maps() -> None:
    one, two = Cluster(), Cluster()
    for cluster, keys in ((one, "abcdef"), (two, "fedcba")):
        for key in keys:
            cluster.typed_extension_protocol_options[key].type_url = key
    assert registry.pack(one) == registry.pack(two)


def test_file_names_in_the_descriptor_pool_are_ours() -> None:
    """Another package may bring Envoy's API under Envoy's own file names."""
    file = descriptor_pb2.FileDescriptorProto()
    Listener.DESCRIPTOR.file.CopyToProto(file)
    assert file.name == "xds/proto/envoy/config/listener/v3/listener.proto"


def test_a_proxy_of_an_istio_mesh_does_without_the_messages_of_envoys_dialect() -> None:
    """They are 130 modules, a sixth of the time until the first pod is served after a crash."""
    script = (
        "import sys, ztunnel.proxy.istio.app, ztunnel.proxy.istio.workers.worker\n"
        "from xds.aio.client import AdsClient\n"
        "found = [name for name in sys.modules if name.startswith('xds.proto.envoy.') and name.endswith('_pb2')]\n"
        "assert not [name for name in found if '.extensions.' in name or '.listener.' in name], found\n"
        "from xds.proto import registry\n"
        "assert registry.message_for('istio.workload.Address').__name__ == 'Address'\n"
        "assert len([name for name in sys.modules if name.startswith('xds.proto.envoy.')]) < 30\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=generate.ROOT)
