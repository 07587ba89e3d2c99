"""Entries of access log services: the field for each fact of a hop."""

import pytest

from tests.ztunnel.proxy.envoy.telemetry.test_format import info
from xds.model.access_log import GrpcAccessLog, LogStream
from xds.model.address import InternalAddress, PipeAddress, SocketAddress
from xds.model.cluster import Endpoint
from xds.proto.envoy.data.accesslog.v3 import accesslog_pb2 as data
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo, TlsFacts
from ztunnel.proxy.envoy.telemetry.log_entries import entry_maker


def tcp(made: StreamInfo) -> data.TCPAccessLogEntry:
    entry = entry_maker(GrpcAccessLog(stream=LogStream(cluster="c", log_name="l", http=False)))(made)
    assert isinstance(entry, data.TCPAccessLogEntry)
    return entry


def http(made: StreamInfo, *headers: str) -> data.HTTPAccessLogEntry:
    stream = LogStream(cluster="c", log_name="l", http=True)
    entry = entry_maker(GrpcAccessLog(stream=stream, request_headers=headers))(made)
    assert isinstance(entry, data.HTTPAccessLogEntry)
    return entry


def test_tcp_entry_has_the_facts_of_a_connection() -> None:
    entry = tcp(
        info(
            bytes_received=7,
            bytes_sent=8,
            duration_s=1.5,
            cluster="app",
            upstream_cluster="app",
            attempts=2,
            endpoint=Endpoint(address=SocketAddress("10.0.0.9", 80)),
            connected=True,
            upstream_local="[fd00::1]:50",
            route="r",
        )
    )
    assert (entry.connection_properties.received_bytes, entry.connection_properties.sent_bytes) == (7, 8)
    common = entry.common_properties
    remote = common.downstream_remote_address.socket_address
    assert (remote.address, remote.port_value) == ("10.244.2.3", 40000)
    assert common.downstream_direct_remote_address.socket_address == remote
    assert common.downstream_local_address.socket_address.address == "10.96.183.192"
    assert common.upstream_remote_address.socket_address.address == "10.0.0.9"
    assert common.upstream_local_address.socket_address.address == "fd00::1"
    assert (common.start_time.seconds, common.start_time.nanos) == (1668503741, 834567000)
    assert (common.duration.seconds, common.duration.nanos) == (1, 500_000_000)
    assert (common.upstream_cluster, common.upstream_request_attempt_count, common.route_name) == ("app", 2, "r")
    assert common.access_log_type == data.TcpConnectionEnd
    assert common.metadata.filter_metadata["tunnel"]["destination"] == "10.244.1.23:9080"
    assert len(common.stream_id) == 36
    assert not common.HasField("tls_properties")
    assert not common.HasField("response_flags")


def test_entry_names_the_last_host_and_its_failure() -> None:
    made = info(endpoint=Endpoint(address=SocketAddress("10.0.0.9", 80)), upstream_failure="no route")
    common = tcp(made).common_properties
    assert common.upstream_remote_address.socket_address.address == "10.0.0.9"
    assert not common.HasField("upstream_local_address")
    assert common.upstream_transport_failure_reason == "no route"  # with its space: this is no line of text


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        (Flag.UPSTREAM_CONNECT_FAILURE, "upstream_connection_failure"),
        (Flag.UPSTREAM_RETRY_EXHAUSTED, "upstream_retry_limit_exceeded"),
        (Flag.NO_ROUTE, "no_route_found"),
        (Flag.DOWNSTREAM_TERMINATED, "downstream_connection_termination"),
        (Flag.UPSTREAM_RESET, "upstream_remote_reset"),
        (Flag.UPSTREAM_TERMINATED, "upstream_connection_termination"),
        (Flag.UPSTREAM_TIMEOUT, "upstream_request_timeout"),
        (Flag.OVERLOAD, "overload_manager"),
    ],
)
def test_response_flag_sets_its_field(flag: Flag, field: str) -> None:
    flags = tcp(info(flags={flag})).common_properties.response_flags
    assert [(each.name, value) for each, value in flags.ListFields()] == [(field, True)]


def test_external_denial_has_an_unauthorized_reason() -> None:
    flags = tcp(info(flags={Flag.EXTERNAL_AUTH})).common_properties.response_flags
    assert flags.unauthorized_details.reason == data.ResponseFlags.Unauthorized.EXTERNAL_SERVICE


def test_every_response_flag_has_its_own_field() -> None:
    every = tcp(info(flags=set(Flag))).common_properties.response_flags
    assert len(every.ListFields()) == len(Flag)


def test_internal_hops_and_pipes() -> None:
    made = info(
        remote_text="envoy://internal_client_address/",
        direct_local=InternalAddress("inner", "7"),
        endpoint=Endpoint(address=PipeAddress("/run/x")),
        upstream_local="envoy://internal_client_address/",
    )
    common = tcp(made).common_properties
    for each in (common.downstream_remote_address, common.downstream_direct_remote_address):
        assert each.envoy_internal_address.server_listener_name == "internal_client_address"
    local = common.downstream_local_address.envoy_internal_address
    assert (local.server_listener_name, local.endpoint_id) == ("inner", "7")
    assert common.upstream_remote_address.pipe.path == "/run/x"
    own = common.upstream_local_address.envoy_internal_address
    assert own.server_listener_name == "internal_client_address"


def test_entry_has_the_tls_properties() -> None:
    tls = TlsFacts(
        version="TLSv1.3",
        cipher="TLS_AES_128_GCM_SHA256",
        peer_subject="CN=x",
        peer_uri_sans=("spiffe://a",),
        peer_dns_sans=("b",),
        local_uri_sans=("spiffe://c",),
    )
    found = tcp(info(tls=tls)).common_properties.tls_properties
    assert (found.tls_version, found.tls_cipher_suite.value) == (data.TLSProperties.TLSv1_3, 0x1301)
    peer = found.peer_certificate_properties
    assert [each.uri for each in peer.subject_alt_name] == ["spiffe://a"]  # the URIs only, as Envoy
    assert peer.subject == "CN=x"
    assert [each.uri for each in found.local_certificate_properties.subject_alt_name] == ["spiffe://c"]


def test_http_entry_has_the_facts_of_a_request() -> None:
    entry = http(
        info(
            method="CONNECT",
            authority="x:1",
            response_code=200,
            response_details="via_upstream",
            bytes_received=3,
            bytes_sent=4,
            request_headers=(("x-a", "1"), ("x-a", "2"), ("user-agent", "me"), ("x-b", "3")),
        ),
        "x-a",
        "x-missing",
    )
    assert entry.protocol_version == data.HTTPAccessLogEntry.HTTP2
    assert (entry.request.authority, entry.request.user_agent, entry.request.scheme) == ("x:1", "me", "http")
    assert dict(entry.request.request_headers) == {"x-a": "1,2"}
    assert (entry.request.request_body_bytes, entry.response.response_body_bytes) == (3, 4)
    assert (entry.response.response_code.value, entry.response.response_code_details) == (200, "via_upstream")
    assert entry.common_properties.access_log_type == data.DownstreamEnd


def test_http_entry_of_a_plain_connection_has_no_response_code() -> None:
    entry = http(info())
    assert entry.common_properties.access_log_type == data.TcpConnectionEnd
    assert not entry.response.HasField("response_code")
    assert entry.request.request_method == 0
