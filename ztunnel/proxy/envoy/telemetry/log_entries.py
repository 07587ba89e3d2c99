"""Converts the facts of a finished hop to an access log service's entry. Pure.

Some fields of Envoy's entries are unset, because this proxy does not measure their values: the times of a
request's phases, bytes including framing, sizes of headers, TLS session identifiers. Like in Envoy, an entry lists
only URI subject alternative names.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeAlias

from xds.model.access_log import GrpcAccessLog
from xds.model.address import InternalAddress, PipeAddress, SocketAddress
from xds.model.metadata import Metadata
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.data.accesslog.v3 import accesslog_pb2 as data
from xds.proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from ztunnel.proxy.envoy.stream.request_headers import header_values, stream_id
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo, TlsFacts
from ztunnel.proxy.envoy.telemetry.certificate_values import VALUES
from ztunnel.proxy.envoy.telemetry.command_values import local_address, own_chain

Identifier: TypeAlias = StreamAccessLogsMessage.Identifier
Entry: TypeAlias = data.TCPAccessLogEntry | data.HTTPAccessLogEntry
#: Makes the access log entry of a hop.
MakesEntry: TypeAlias = Callable[[StreamInfo], Entry]

_FLAGS: dict[Flag, str] = {
    Flag.NO_HEALTHY_UPSTREAM: "no_healthy_upstream",
    Flag.UPSTREAM_CONNECT_FAILURE: "upstream_connection_failure",
    Flag.UPSTREAM_OVERFLOW: "upstream_overflow",
    Flag.NO_ROUTE: "no_route_found",
    Flag.UPSTREAM_RETRY_EXHAUSTED: "upstream_retry_limit_exceeded",
    Flag.NO_CLUSTER: "no_cluster_found",
    Flag.DURATION_TIMEOUT: "duration_timeout",
    Flag.DOWNSTREAM_TERMINATED: "downstream_connection_termination",
    Flag.LOCAL_RESET: "local_reset",
    Flag.UPSTREAM_RESET: "upstream_remote_reset",
    Flag.UPSTREAM_TERMINATED: "upstream_connection_termination",
    Flag.UPSTREAM_TIMEOUT: "upstream_request_timeout",
    Flag.STREAM_IDLE: "stream_idle_timeout",
    Flag.DOWNSTREAM_RESET: "downstream_remote_reset",
    Flag.DOWNSTREAM_PROTOCOL_ERROR: "downstream_protocol_error",
    Flag.UPSTREAM_PROTOCOL_ERROR: "upstream_protocol_error",
    Flag.OVERLOAD: "overload_manager",
}
_VERSIONS = {
    "TLSv1.2": data.TLSProperties.TLSv1_2,
    "TLSv1.3": data.TLSProperties.TLSv1_3,
}
#: IANA's numbers of the cipher suites that this proxy can negotiate, by the suites' names in logs.
_SUITES = {
    "TLS_AES_128_GCM_SHA256": 0x1301,
    "TLS_AES_256_GCM_SHA384": 0x1302,
    "TLS_CHACHA20_POLY1305_SHA256": 0x1303,
    "ECDHE-ECDSA-AES128-GCM-SHA256": 0xC02B,
    "ECDHE-ECDSA-AES256-GCM-SHA384": 0xC02C,
    "ECDHE-RSA-AES128-GCM-SHA256": 0xC02F,
    "ECDHE-RSA-AES256-GCM-SHA384": 0xC030,
    "ECDHE-RSA-CHACHA20-POLY1305": 0xCCA8,
    "ECDHE-ECDSA-CHACHA20-POLY1305": 0xCCA9,
}
#: The fields of a request's log entry whose values are request headers.
_REQUEST_FIELDS = {
    "user-agent": "user_agent",
    "referer": "referer",
    "x-forwarded-for": "forwarded_for",
    "x-request-id": "request_id",
    "x-envoy-original-path": "original_path",
}


def entry_maker(log: GrpcAccessLog) -> MakesEntry:
    """Return the function that makes a logger's entries."""
    if not log.stream.http:
        return _tcp_entry
    wanted = log.request_headers
    return lambda info: _http_entry(info, wanted)


def packed(entries: Iterable[Entry], *, http: bool, identifier: Identifier | None) -> bytes:
    """Return a message with log entries, all for TCP or all for HTTP. The first message of a stream has the
    ``identifier``.
    """
    message = StreamAccessLogsMessage(identifier=identifier)
    if http:
        message.http_logs.log_entry.extend(each for each in entries if isinstance(each, data.HTTPAccessLogEntry))
    else:
        message.tcp_logs.log_entry.extend(each for each in entries if isinstance(each, data.TCPAccessLogEntry))
    return message.SerializeToString()


def _tcp_entry(info: StreamInfo) -> data.TCPAccessLogEntry:
    entry = data.TCPAccessLogEntry()
    _common(entry.common_properties, info)
    entry.connection_properties.received_bytes = info.bytes_received
    entry.connection_properties.sent_bytes = info.bytes_sent
    return entry


def _http_entry(info: StreamInfo, wanted: Iterable[str]) -> data.HTTPAccessLogEntry:
    entry = data.HTTPAccessLogEntry()
    _common(entry.common_properties, info)
    asked, answered = entry.request, entry.response
    if info.method:
        entry.protocol_version = data.HTTPAccessLogEntry.HTTP2
        if info.method in _METHODS:
            asked.request_method = core.RequestMethod.Value(info.method)
        asked.scheme = "http" if info.tls is None else "https"
    asked.authority = info.authority
    asked.path = info.path
    for name, field in _REQUEST_FIELDS.items():
        setattr(asked, field, ",".join(header_values(info, name)))
    asked.request_body_bytes = info.bytes_received
    for name in wanted:
        values = header_values(info, name)
        if values:  # several values are joined, as in Envoy
            asked.request_headers[name] = ",".join(values)
    if info.response_code:
        answered.response_code.value = info.response_code
    answered.response_body_bytes = info.bytes_sent
    answered.response_code_details = info.response_details.replace(" ", "_")  # as in Envoy
    return entry


#: The text that replaces the downstream address of a hop behind an internal listener.
_INTERNAL = "internal_client_address"
_METHODS = frozenset(core.RequestMethod.keys())


def _common(common: data.AccessLogCommon, info: StreamInfo) -> None:
    if info.remote_text:  # the far end of an internal hop
        for each in (common.downstream_remote_address, common.downstream_direct_remote_address):
            each.envoy_internal_address.server_listener_name = _INTERNAL
    else:
        _address(common.downstream_remote_address, info.source)
        _address(common.downstream_direct_remote_address, info.facts.direct_source)
    _address(common.downstream_local_address, local_address(info))
    if info.tls is not None:
        _tls(common.tls_properties, info.tls, info.facts.server_name)
    microseconds = int(info.started_at * 1_000_000)
    common.start_time.seconds, rest = divmod(microseconds, 1_000_000)
    common.start_time.nanos = rest * 1000
    if info.endpoint is not None:
        _address(common.upstream_remote_address, info.endpoint.address)
    if info.upstream_local.startswith("envoy://"):
        common.upstream_local_address.envoy_internal_address.server_listener_name = _INTERNAL
    elif info.upstream_local:
        with suppress(ValueError):  # no socket address
            _address(common.upstream_local_address, SocketAddress.parse(info.upstream_local))
    common.upstream_cluster = info.upstream_cluster
    _flags(common, info.flags)
    _metadata(common.metadata, info.facts.metadata)
    common.upstream_transport_failure_reason = info.upstream_failure
    common.downstream_transport_failure_reason = info.downstream_failure
    common.route_name = info.route
    nanos = int((info.duration_s or 0.0) * 1e9)
    common.duration.seconds, common.duration.nanos = divmod(nanos, 1_000_000_000)
    common.upstream_request_attempt_count = info.attempts
    common.connection_termination_details = info.termination_details
    common.stream_id = stream_id(info) or ""
    common.access_log_type = data.DownstreamEnd if info.method else data.TcpConnectionEnd


def _address(message: core.Address, address: object) -> None:
    match address:
        case SocketAddress():
            message.socket_address.address = address.host
            message.socket_address.port_value = address.port
        case InternalAddress():
            message.envoy_internal_address.server_listener_name = address.listener
            message.envoy_internal_address.endpoint_id = address.endpoint_id
        case PipeAddress():
            message.pipe.path = address.path


def _flags(common: data.AccessLogCommon, flags: Iterable[Flag]) -> None:
    for flag in flags:
        if flag is Flag.EXTERNAL_AUTH:
            reason = data.ResponseFlags.Unauthorized.EXTERNAL_SERVICE
            common.response_flags.unauthorized_details.reason = reason
        else:
            setattr(common.response_flags, _FLAGS[flag], True)


def _metadata(message: core.Metadata, metadata: Metadata) -> None:
    for namespace, values in metadata.items():
        message.filter_metadata[namespace].update(dict(values))  # type: ignore[arg-type]  # what JSON can hold


def _tls(message: data.TLSProperties, tls: TlsFacts, server_name: str) -> None:
    message.tls_version = _VERSIONS.get(tls.version) or data.TLSProperties.VERSION_UNSPECIFIED
    if tls.cipher in _SUITES:
        message.tls_cipher_suite.value = _SUITES[tls.cipher]
    message.tls_sni_hostname = server_name
    own = message.local_certificate_properties
    own.subject_alt_name.extend([_name(uri=uri) for uri in tls.local_uri_sans])
    chain = own_chain(tls.local)
    if chain:
        own.subject = VALUES["SUBJECT"](chain) or ""
    peer = message.peer_certificate_properties
    peer.subject_alt_name.extend([_name(uri=uri) for uri in tls.peer_uri_sans])
    peer.subject = tls.peer_subject
    if tls.peer_chain:
        peer.issuer = VALUES["ISSUER"](tls.peer_chain) or ""


_name = data.TLSProperties.CertificateProperties.SubjectAltName
