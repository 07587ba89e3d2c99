"""Reads the values of access log commands from a :class:`StreamInfo`, such as ``%BYTES_SENT%`` or ``%REQ(X)%``."""

import json
import re
import socket
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from hbone.tls import PeerFacts
from xds.model.address import InternalAddress, SocketAddress
from xds.model.cluster import Endpoint
from xds.model.format_string import COMMANDS, Command
from xds.model.metadata import Metadata
from xds.model.secret import Certificate
from ztunnel.proxy.envoy.secrets.verify import leaf_of
from ztunnel.proxy.envoy.stream.request_headers import WRITTEN, header_values, stream_id
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.telemetry.certificate_values import VALUES, Chain, end_s, start_s
from ztunnel.runtime.clock import utc

#: Returns a command's value for a hop, or ``None`` if there is no value.
Reader = Callable[[StreamInfo], str | None]

_HOSTNAME = socket.gethostname()
_FRACTION = re.compile(r"%([1-9])f")
#: Extensions of strftime in the time library that Envoy uses. ``*`` prints all available digits, here
#: microseconds.
_EXTENDED = re.compile(r"%(?:E([0-9*])([Sf])|(E4Y)|f)")


def value_reader(command: Command) -> Reader:
    """Return the function that reads a command's value, cut to the command's maximum length. It returns ``None``
    if there is no value.
    """
    read = (
        _READERS_WITH_ARGUMENT[command.name](command.argument)
        if _takes_argument(command)
        else _READERS[command.name]
    )
    if command.max_length is None:
        return read
    length = command.max_length

    def cut(info: StreamInfo) -> str | None:
        value = read(info)
        return None if value is None else value[:length]

    return cut


def _takes_argument(command: Command) -> bool:
    return command.name in _READERS_WITH_ARGUMENT


def plain_numbers(value: Any) -> Any:
    """Convert the whole numbers in a value of a ``Struct`` to integers, because a Struct has only doubles."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: plain_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(inner) for inner in value]
    return value


def json_text(value: Any) -> str:
    """Return JSON in Envoy's form: one line, keys in order, only the escapes that JSON needs."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def _underscored(text: str) -> str | None:
    return text.replace(" ", "_") or None


def _host_of(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    return host.strip("[]") if port.isdigit() else address or None


def _port_of(address: str) -> str | None:
    port = address.rpartition(":")[2]
    return port if port.isdigit() else None


def _sans(sans: tuple[str, ...] | None) -> str | None:
    return ",".join(sans) if sans else None


def _duration(info: StreamInfo) -> str | None:
    return None if info.duration_s is None else str(int(info.duration_s * 1000))


class _Kept(str):
    """An empty text that is printed as it is. It counts as true, so that ``read(info) or missing`` does not print
    ``-``.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        return True


_EMPTY = _Kept()

#: Commands that never have a value in this proxy, because it has no request traces, no gRPC in tunnels, no TLS
#: fingerprints (the inspector's setting is refused), no QUIC round trips and no HTTP to upstreams.
_NEVER = (
    "TRACE_ID",
    "SPAN_ID",
    "TLS_JA3_FINGERPRINT",
    "TLS_JA4_FINGERPRINT",
    "GRPC_STATUS_NUMBER",
    "ROUNDTRIP_DURATION",
    "UPSTREAM_PROTOCOL",
)
#: Commands that print an empty text, also in Envoy: custom flags are set only by certain Envoy filters, and the
#: body is visible only to Envoy's local reply mapper.
_ALWAYS_EMPTY = ("CUSTOM_FLAGS", "LOCAL_REPLY_BODY")
#: Commands that always print 0: they count for QUIC or for trailers, and a CONNECT has neither.
_ALWAYS_ZERO = ("BYTES_RETRANSMITTED", "PACKETS_RETRANSMITTED", "RESPONSE_TRAILERS_BYTES")


_Local = SocketAddress | InternalAddress


def local_address(info: StreamInfo) -> _Local:
    """Return the local address of a hop, or the original destination if a filter has restored it (even behind a
    tunnel).
    """
    local = info.direct_local
    return local if not info.restored and isinstance(local, InternalAddress) else info.facts.destination


def _host(local: _Local | None) -> str | None:
    return local.host if isinstance(local, SocketAddress) else None if local is None else str(local)


def _port(local: _Local | None) -> str | None:
    return str(local.port) if isinstance(local, SocketAddress) else None


def _local_endpoint_id(info: StreamInfo) -> str:
    local = local_address(info)
    return _Kept(local.endpoint_id) if isinstance(local, InternalAddress) else _EMPTY


def _remote_endpoint_id(info: StreamInfo) -> str | None:
    if info.endpoint is None or not info.connected:
        return None
    address = info.endpoint.address
    return _Kept(address.endpoint_id) if isinstance(address, InternalAddress) else _EMPTY


def _attempted(value_of: Callable[[Endpoint], str]) -> Reader:
    """Return a reader of all upstream hosts that a hop has tried, in order."""

    def read(info: StreamInfo) -> str | None:
        if info.endpoint is None or (info.method and not info.connected):
            return None  # Envoy's router lists a host only once it is connected; its TCP proxy lists it earlier
        return ",".join([value_of(each) for each in (*info.failed, info.endpoint)])

    return read


def _last(value_of: Callable[[Endpoint], str]) -> Reader:
    return lambda info: value_of(info.endpoint) if info.endpoint is not None else None


def _name(endpoint: Endpoint) -> str:
    return endpoint.hostname or endpoint.key


def _name_without_port(endpoint: Endpoint) -> str:
    """Return the host's name without its port. Like in Envoy, ``envoy://listener/id`` is cut to ``envoy``."""
    name = _name(endpoint)
    end = name.find(":", name.find("]") + 1)
    return name if end < 0 else name[:end]


def _address_without_port(endpoint: Endpoint) -> str:
    address = endpoint.address
    return address.host if isinstance(address, SocketAddress) else endpoint.key


def _query(argument: str) -> Reader:
    """Return a reader of the request's query string, without decoding. Envoy does not decode it either, not even
    with DECODED.
    """

    def read(info: StreamInfo) -> str | None:
        _, mark, query = info.path.partition("?")
        return _Kept(query) if mark else None

    return read


_CHAINS: dict[str, Callable[[StreamInfo], Chain]] = {
    "DOWNSTREAM_PEER_": lambda info: info.tls.peer_chain if info.tls else (),
    "DOWNSTREAM_LOCAL_": lambda info: own_chain(info.tls.local) if info.tls else (),
    "UPSTREAM_PEER_": lambda info: _upstream_chain(info.upstream_tls),
    "UPSTREAM_LOCAL_": lambda info: own_chain(info.upstream_certificate),
}
_KEPT = frozenset(("DOWNSTREAM_PEER_URI_SAN", "DOWNSTREAM_PEER_DNS_SAN", "DOWNSTREAM_LOCAL_URI_SAN"))
_OF_CHAINS = tuple(
    end + value
    for end in _CHAINS
    for value in VALUES
    if end + value in COMMANDS and end + value not in _KEPT | {"DOWNSTREAM_PEER_SUBJECT", "UPSTREAM_PEER_URI_SAN"}
)


def own_chain(certificate: Certificate | None) -> Chain:
    """Return our own certificate, for :data:`~ztunnel.proxy.envoy.telemetry.certificate_values.VALUES`."""
    return (leaf_of(certificate),) if certificate is not None else ()


def _upstream_chain(facts: PeerFacts | None) -> Chain:
    if facts is None:
        return ()
    return facts.chain or ((facts.certificate,) if facts.certificate is not None else ())


def _of_chain(name: str) -> Reader:
    end = next(end for end in _CHAINS if name.startswith(end))
    chain_of, value_of = _CHAINS[end], VALUES[name.removeprefix(end)]

    def read(info: StreamInfo) -> str | None:
        chain = chain_of(info)
        return value_of(chain) if chain else None

    return read


_READERS: dict[str, Reader] = {
    "BYTES_RECEIVED": lambda info: str(info.bytes_received),
    "BYTES_SENT": lambda info: str(info.bytes_sent),
    "DURATION": _duration,
    "PROTOCOL": lambda info: info.protocol or None,
    "RESPONSE_CODE": lambda info: str(info.response_code),
    "RESPONSE_CODE_DETAILS": lambda info: _underscored(info.response_details),
    "CONNECTION_TERMINATION_DETAILS": lambda info: _underscored(info.termination_details),
    "RESPONSE_FLAGS": StreamInfo.flags_text,
    "RESPONSE_FLAGS_LONG": StreamInfo.long_flags_text,
    "UPSTREAM_HOST": lambda info: info.upstream_host or None,
    "UPSTREAM_REMOTE_ADDRESS": lambda info: info.upstream_host if info.connected else None,
    "UPSTREAM_REMOTE_ADDRESS_WITHOUT_PORT": lambda info: _host_of(info.upstream_host) if info.connected else None,
    "UPSTREAM_REMOTE_PORT": lambda info: _port_of(info.upstream_host) if info.connected else None,
    "UPSTREAM_CLUSTER": lambda info: info.upstream_cluster or None,
    "UPSTREAM_LOCAL_ADDRESS": lambda info: info.upstream_local or None,
    "UPSTREAM_LOCAL_ADDRESS_WITHOUT_PORT": lambda info: _host_of(info.upstream_local),
    "UPSTREAM_LOCAL_PORT": lambda info: _port_of(info.upstream_local),
    "UPSTREAM_TRANSPORT_FAILURE_REASON": lambda info: _underscored(info.upstream_failure),
    "UPSTREAM_PEER_URI_SAN": lambda info: _sans(info.upstream_uri_sans),
    "UPSTREAM_REQUEST_ATTEMPT_COUNT": lambda info: str(info.attempts),
    "DOWNSTREAM_LOCAL_ADDRESS": lambda info: str(local_address(info)),
    "DOWNSTREAM_LOCAL_ADDRESS_WITHOUT_PORT": lambda info: _host(local_address(info)),
    "DOWNSTREAM_LOCAL_PORT": lambda info: _port(local_address(info)),
    "DOWNSTREAM_REMOTE_ADDRESS": lambda info: info.downstream_remote,
    "DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT": lambda info: info.remote_text or info.source.host,
    "DOWNSTREAM_REMOTE_PORT": lambda info: None if info.remote_text else str(info.source.port),
    "DOWNSTREAM_DIRECT_REMOTE_ADDRESS": lambda info: info.remote_text or str(info.facts.direct_source),
    "DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT": lambda info: (
        info.remote_text or info.facts.direct_source.host
    ),
    "DOWNSTREAM_DIRECT_REMOTE_PORT": lambda info: None if info.remote_text else str(info.facts.direct_source.port),
    "DOWNSTREAM_PEER_URI_SAN": lambda info: _sans(info.tls.peer_uri_sans) if info.tls else None,
    "DOWNSTREAM_PEER_DNS_SAN": lambda info: _sans(info.tls.peer_dns_sans) if info.tls else None,
    "DOWNSTREAM_LOCAL_URI_SAN": lambda info: _sans(info.tls.local_uri_sans) if info.tls else None,
    "DOWNSTREAM_PEER_SUBJECT": lambda info: info.tls.peer_subject if info.tls else None,
    "DOWNSTREAM_TLS_VERSION": lambda info: info.tls.version if info.tls else None,
    "DOWNSTREAM_TLS_CIPHER": lambda info: info.tls.cipher if info.tls else None,
    "DOWNSTREAM_TRANSPORT_FAILURE_REASON": lambda info: _underscored(info.downstream_failure),
    "REQUESTED_SERVER_NAME": lambda info: info.facts.server_name or None,
    "ROUTE_NAME": lambda info: info.route or None,
    "VIRTUAL_CLUSTER_NAME": lambda info: None,
    "FILTER_CHAIN_NAME": lambda info: info.chain or None,
    "CONNECTION_ID": lambda info: str(info.connection_id),
    "STREAM_ID": stream_id,
    "UNIQUE_ID": lambda info: str(uuid.uuid4()),
    "ACCESS_LOG_TYPE": lambda info: "DownstreamEnd" if info.method else "TcpConnectionEnd",
    "LISTENER_NAME": lambda info: info.listener or None,
    "UPSTREAM_CLUSTER_RAW": lambda info: info.cluster if info.upstream_cluster else None,
    "UPSTREAM_TLS_VERSION": lambda info: info.upstream_tls.version if info.upstream_tls else None,
    "UPSTREAM_TLS_CIPHER": lambda info: info.upstream_tls.cipher if info.upstream_tls else None,
    **dict.fromkeys(_NEVER, lambda info: None),
    **dict.fromkeys(_ALWAYS_EMPTY, lambda info: _EMPTY),
    **dict.fromkeys(_ALWAYS_ZERO, lambda info: "0"),
    "UPSTREAM_CONNECTION_POOL_READY_DURATION": lambda info: (
        None if info.ready_s is None else str(int(info.ready_s * 1000))
    ),
    # Like in Envoy, only requests have a value. It is the time until the upstream connection is established, a
    # tunnel's first upstream event.
    "RESPONSE_DURATION": lambda info: (
        str(int(info.ready_s * 1000)) if info.method and info.connected and info.ready_s is not None else None
    ),
    "DOWNSTREAM_DIRECT_LOCAL_ADDRESS": lambda info: str(info.direct_local) if info.direct_local else None,
    "DOWNSTREAM_DIRECT_LOCAL_ADDRESS_WITHOUT_PORT": lambda info: _host(info.direct_local),
    "DOWNSTREAM_DIRECT_LOCAL_PORT": lambda info: _port(info.direct_local),
    "DOWNSTREAM_LOCAL_ADDRESS_ENDPOINT_ID": _local_endpoint_id,
    "UPSTREAM_REMOTE_ADDRESS_ENDPOINT_ID": _remote_endpoint_id,
    "UPSTREAM_HOSTS_ATTEMPTED": _attempted(lambda endpoint: endpoint.key),
    "UPSTREAM_HOSTS_ATTEMPTED_WITHOUT_PORT": _attempted(_address_without_port),
    "UPSTREAM_HOST_NAME": _last(_name),
    "UPSTREAM_HOST_NAME_WITHOUT_PORT": _last(_name_without_port),
    "UPSTREAM_HOST_NAMES_ATTEMPTED": _attempted(_name),
    "UPSTREAM_HOST_NAMES_ATTEMPTED_WITHOUT_PORT": _attempted(_name_without_port),
    "UPSTREAM_SERVER_NAME": lambda info: info.upstream_sni or None,
    **{name: _of_chain(name) for name in _OF_CHAINS},
    "HOSTNAME": lambda info: _HOSTNAME,
}


def _plain_pattern(pattern: str) -> str:
    """Replace ``%E3S``, ``%E*f``, ``%E4Y`` and ``%f`` in a time pattern by ``%3f`` and codes of ``strftime``."""

    def plain(found: re.Match[str]) -> str:
        digits, kind, year = found.groups()
        if year:
            return "%Y"
        if kind is None:
            return "%9f"
        fraction = "" if digits == "0" else f"%{'6' if digits == '*' else digits}f"
        if kind == "f":
            return fraction
        return f"%S.{fraction}" if fraction else "%S"

    return _EXTENDED.sub(plain, pattern)


def _times(moment_of: Callable[[StreamInfo], float | None]) -> Callable[[str], Reader]:
    """Return a function that makes a reader from a time format. The reader prints a wall clock time in UTC."""
    return partial(_time, moment_of)


def _time(moment_of: Callable[[StreamInfo], float | None], argument: str) -> Reader:
    pattern = argument or "%Y-%m-%dT%H:%M:%S.%3fZ"

    pieces = _FRACTION.split(_plain_pattern(pattern))
    scales = [10 ** int(digits) for digits in pieces[1::2]]
    last: tuple[int, str] = (-1, "")

    def read(info: StreamInfo) -> str | None:
        nonlocal last
        moment = moment_of(info)
        if moment is None:
            return None
        second = int(moment)
        if second != last[0]:  # within a second, only the fractions of times differ
            parts = [
                f"%0{piece}d" if index % 2 else _whole_seconds(piece, second).replace("%", "%%")
                for index, piece in enumerate(pieces)
            ]
            last = second, "".join(parts)
        fraction = moment - second
        if len(scales) == 1:
            return last[1] % int(fraction * scales[0])
        return last[1] % tuple([int(fraction * scale) for scale in scales])

    return read


def _local_times(moment_of: Callable[[StreamInfo], float]) -> Callable[[str], Reader]:
    """Return a function that makes a reader from a time format. The reader prints a time in this machine's time
    zone.
    """

    def make(argument: str) -> Reader:
        pieces = _FRACTION.split(_plain_pattern(argument or "%Y-%m-%dT%H:%M:%S.%3f%z"))

        def read(info: StreamInfo) -> str:
            moment = moment_of(info)
            local = datetime.fromtimestamp(moment, UTC).astimezone()
            fraction = moment - int(moment)
            return "".join(
                [
                    f"{int(fraction * 10 ** int(piece)):0{piece}d}" if index % 2 else local.strftime(piece)
                    for index, piece in enumerate(pieces)
                ]
            )

        return read

    return make


def _emitted(info: StreamInfo) -> float:
    return info.started_at + (info.duration_s or 0.0)


def _validity(end: str, moment_of: Callable[[Chain], float]) -> Callable[[str], Reader]:
    def of(info: StreamInfo) -> float | None:
        chain = _CHAINS[end](info)
        return moment_of(chain) if chain else None

    return _times(of)


def _whole_seconds(pattern: str, second: int) -> str:
    if pattern == "%s":
        return str(second)
    if "%Z" in pattern:
        return datetime.fromtimestamp(second, UTC).strftime(pattern)
    return utc(pattern, second)


_PSEUDO: dict[str, Reader] = {
    ":method": lambda info: info.method,
    ":authority": lambda info: info.authority,
    ":path": lambda info: info.path,
}


def _header(name: str) -> Reader:
    def read_written(info: StreamInfo) -> str | None:
        values = header_values(info, name)
        return ",".join(values) or None if values else None

    def read(info: StreamInfo) -> str | None:
        found = None
        for key, value in info.request_headers:
            if key == name:
                found = value if found is None else f"{found},{value}"
        return found or None

    return _PSEUDO.get(name) or (read_written if name in WRITTEN else read)


def _request_headers(argument: str) -> Reader:
    """Return a reader for ``REQ(X?Y)``: the value of header X, or of header Y if X is absent."""
    readers = [_header(name.lower()) for name in argument.split("?")]
    if len(readers) == 1:
        return readers[0]

    def read_first(info: StreamInfo) -> str | None:
        for read in readers:
            value = read(info)
            if value:
                return value
        return None

    return read_first


def _response_headers(argument: str) -> Reader:
    names = [name.lower() for name in argument.split("?")]

    def read(info: StreamInfo) -> str | None:
        for name in names:
            values = [value for key, value in info.response_headers if key == name]
            if values:
                return ",".join(values)
        return None

    return read


_Struct = Callable[[StreamInfo], Metadata]
STRUCTS: dict[str, _Struct] = {
    "DYNAMIC_METADATA": lambda info: info.facts.metadata,
    "UPSTREAM_METADATA": lambda info: info.upstream_metadata,
    "CLUSTER_METADATA": lambda info: info.cluster_metadata,
    "LISTENER_METADATA": lambda info: info.listener_metadata,
    "LISTENER_FILTER_CHAIN_METADATA": lambda info: info.chain_metadata,
    "ROUTE_METADATA": lambda info: info.route_metadata,
    "VIRTUAL_HOST_METADATA": lambda info: info.virtual_host_metadata,
}


def metadata_value(of: _Struct, argument: str) -> Callable[[StreamInfo], Any]:
    """Return a reader for the value at ``namespace:key:key`` in a hop's metadata. It returns None if there is no
    value.
    """
    namespace, *keys = argument.split(":")

    def read(info: StreamInfo) -> Any:
        value: object = of(info).get(namespace)
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return plain_numbers(value)

    return read


def _metadata(of: _Struct) -> Callable[[str], Reader]:
    def make(argument: str) -> Reader:
        value_of = metadata_value(of, argument)

        def read(info: StreamInfo) -> str | None:
            value = value_of(info)
            return value if value is None or isinstance(value, str) else json_text(value)

        return read

    return make


def _filter_state(argument: str) -> Reader:
    key = argument.removesuffix(":PLAIN").removesuffix(":TYPED")
    return lambda info: info.facts.filter_state.get(key)


def _environment(argument: str) -> Reader:
    import os

    value = os.environ.get(argument, "-")
    return lambda _: value


def _path(argument: str) -> Reader:
    if argument == "NQ":
        return lambda info: info.path.partition("?")[0] or None
    return lambda info: info.path or None


def _query_parameter(argument: str) -> Reader:
    def read(info: StreamInfo) -> str | None:
        pairs = parse_qsl(info.path.partition("?")[2], keep_blank_values=True)
        return next((value for name, value in pairs if name == argument), None)

    return read


_READERS_WITH_ARGUMENT: dict[str, Callable[[str], Reader]] = {
    "START_TIME": _times(lambda info: info.started_at),
    "START_TIME_LOCAL": _local_times(lambda info: info.started_at),
    "EMIT_TIME": _times(_emitted),
    "EMIT_TIME_LOCAL": _local_times(_emitted),
    "DOWNSTREAM_PEER_CERT_V_START": _validity("DOWNSTREAM_PEER_", start_s),
    "DOWNSTREAM_PEER_CERT_V_END": _validity("DOWNSTREAM_PEER_", end_s),
    "UPSTREAM_PEER_CERT_V_START": _validity("UPSTREAM_PEER_", start_s),
    "UPSTREAM_PEER_CERT_V_END": _validity("UPSTREAM_PEER_", end_s),
    "REQ": _request_headers,
    "REQUEST_HEADER": _request_headers,
    "RESP": _response_headers,
    "RESPONSE_HEADER": _response_headers,
    "RESPONSE_TRAILER": lambda _: lambda info: None,
    "GRPC_STATUS": lambda _: lambda info: None,
    "PATH": _path,
    "QUERY_PARAM": _query_parameter,
    "TRAILER": lambda _: lambda info: None,
    "QUERY_PARAMS": _query,
    **{name: _metadata(of) for name, of in STRUCTS.items()},
    "FILTER_STATE": _filter_state,
    "ENVIRONMENT": _environment,
}
