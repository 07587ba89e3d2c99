"""Converts ``ext_authz`` requests to flows, and verdicts to responses.

The services v3, v2 and v2alpha are handled in the same way, because their messages have the same fields and
numbers.
"""

from google.protobuf.message import DecodeError

from xds.errors import ConfigError
from xds.model import calico as c
from xds.model.address import canonical
from xds.proto.envoy.config.core.v3.core_pb2 import Address, HeaderValue, SocketAddress
from xds.proto.envoy.service.auth.v3.external_auth_pb2 import AttributeContext, CheckRequest, CheckResponse

_UDP = 17
_TCP = 6
_MOST_PORT = 65_535


def decode_request(data: bytes) -> c.Flow:
    """Decode a ``CheckRequest``.

    In a request without HTTP, for example from Envoy's network filter, method and path are None. An absent peer
    becomes a peer without address and principal.

    Raises:
        ConfigError: the bytes are not a ``CheckRequest``, or a port is above 65535, which Envoy's API forbids.
    """
    request = CheckRequest()
    try:
        request.ParseFromString(data)
    except DecodeError as error:
        raise ConfigError(f"not a CheckRequest: {error}") from error
    attributes = request.attributes
    source, destination = attributes.source, attributes.destination
    http = attributes.request.http if attributes.request.HasField("http") else None
    return c.Flow(
        source_ip=_host(source.address),
        destination_ip=_host(destination.address),
        source_port=_port(source.address.socket_address),
        destination_port=_port(destination.address.socket_address),
        protocol=_UDP if destination.address.socket_address.protocol == SocketAddress.UDP else _TCP,
        source_principal=source.principal,
        destination_principal=destination.principal,
        source_labels=_labels(source),
        destination_labels=_labels(destination),
        method=http.method if http is not None else None,
        path=http.path if http is not None else None,
    )


def _port(address: SocketAddress) -> int:
    if address.port_value > _MOST_PORT:
        raise ConfigError(f"a port must be at most {_MOST_PORT}, not {address.port_value}", "port_value")
    return address.port_value


def encode_request(flow: c.Flow) -> bytes:
    """Return a ``CheckRequest`` about a flow; the inverse of :func:`decode_request`."""
    request = CheckRequest()
    attributes = request.attributes
    for peer, host, port, principal, labels in (
        (attributes.source, flow.source_ip, flow.source_port, flow.source_principal, flow.source_labels),
        (
            attributes.destination,
            flow.destination_ip,
            flow.destination_port,
            flow.destination_principal,
            flow.destination_labels,
        ),
    ):
        peer.principal = principal
        peer.labels.update(dict(labels))
        if host is not None:
            peer.address.socket_address.address = host
            peer.address.socket_address.port_value = port
            peer.address.socket_address.protocol = (
                SocketAddress.UDP if flow.protocol == _UDP else SocketAddress.TCP
            )
    if flow.method is not None or flow.path is not None:
        attributes.request.http.method = flow.method or ""
        attributes.request.http.path = flow.path or ""
    return request.SerializeToString()


def encode_response(
    code: int, message: str = "", *, explained: tuple[tuple[str, str], ...] | None = None
) -> bytes:
    """Return a ``CheckResponse``.

    Args:
        code: gRPC's status code. 0 allows.
        message: the reason for a denial, for the proxy's log.
        explained: names and values that explain the decision. They are sent as dynamic metadata and, for a denial,
            as headers and body of the response to the client. None leaves the explanation to the proxy.
    """
    response = CheckResponse()
    response.status.code = code
    response.status.message = message
    if explained is not None:
        for name, value in explained:
            response.dynamic_metadata[name] = value
        if code:
            denied = response.denied_response
            denied.status.code = 403
            denied.body = f"{message}\n"
            for name, value in explained:
                denied.headers.add().header.MergeFrom(HeaderValue(key=f"x-policy-{name}", value=value))
    return response.SerializeToString()


def decode_response(data: bytes) -> tuple[int, str]:
    """Return the status code and the message of a ``CheckResponse``.

    Raises:
        ConfigError: the bytes are not a ``CheckResponse``.
    """
    try:
        response = CheckResponse.FromString(data)
    except DecodeError as error:
        raise ConfigError(f"not a CheckResponse: {error}") from error
    return response.status.code, response.status.message


def _host(address: Address) -> str | None:
    """Return the IP address in canonical form. Return None for a pipe and for an unreadable text."""
    try:
        return canonical(address.socket_address.address)
    except ValueError:
        return None


def _labels(peer: AttributeContext.Peer) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(peer.labels.items())) if peer.labels else ()
