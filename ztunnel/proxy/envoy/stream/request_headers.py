"""A request's headers as seen by logs and routes: the client's headers, and headers that a connection manager
writes.

Envoy writes its own headers into each request before routing. Here, these headers are computed on demand, because
most routes and logs do not read them.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from xds.model.http import HttpConnectionManager
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo

REQUEST_ID: Final = "x-request-id"

#: Returns the values of a header, given the request, its connection manager and the values that the client sent.
_Writes = Callable[[StreamInfo, HttpConnectionManager, Sequence[str]], Sequence[str]]


def header_values(info: StreamInfo, name: str) -> Sequence[str]:
    """Return the values of a request header. Empty if the hop is not a request. ``name`` is in lower case."""
    sent: Sequence[str] = ()
    for key, value in info.request_headers:
        if key == name:
            sent = (*sent, value)
    if info.manager is not None and name in WRITTEN:
        return WRITTEN[name](info, info.manager, sent)
    return sent


def traceparent(headers: Iterable[tuple[str, str]]) -> str:
    """Return the value of the header ``traceparent``, or an empty text."""
    for name, value in headers:
        if name == "traceparent":
            return value
    return ""


def stream_id(info: StreamInfo) -> str | None:
    """Return the identifier of a hop, created on first use. For a request, it is the request id, if any."""
    if info.manager is not None:
        return ",".join(header_values(info, REQUEST_ID)) or None
    return _made(info)


def _made(info: StreamInfo) -> str:
    if not info.stream_id:
        # Make a random UUID (RFC 9562, 5.4) with 2 function calls. uuid.uuid4 and str together need 12.
        digits = os.urandom(16).hex()
        variant = "89ab"[int(digits[16], 16) & 3]
        info.stream_id = f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
    return info.stream_id


def _request_id(info: StreamInfo, manager: HttpConnectionManager, sent: Sequence[str]) -> Sequence[str]:
    if not manager.generates_request_id:
        return sent
    # A request id from the client is replaced at the edge of a mesh, so that clients cannot choose ids in logs.
    believed = manager.preserves_request_id or not manager.uses_remote_address
    return sent if believed and any(sent) else (_made(info),)


def _scheme(info: StreamInfo, manager: HttpConnectionManager, sent: Sequence[str]) -> Sequence[str]:
    if sent and not manager.uses_remote_address:
        return sent
    return ("http" if info.tls is None else "https",)


def _forwarded_for(info: StreamInfo, manager: HttpConnectionManager, sent: Sequence[str]) -> Sequence[str]:
    # For a client on loopback, Envoy writes its own address, which is the first address of its interfaces.
    return (*sent, info.source.host) if manager.uses_remote_address else sent


def _external_address(info: StreamInfo, manager: HttpConnectionManager, sent: Sequence[str]) -> Sequence[str]:
    return (info.source.host,) if manager.uses_remote_address else sent


def _internal(info: StreamInfo, manager: HttpConnectionManager, sent: Sequence[str]) -> Sequence[str]:
    return ()  # without ``internal_address_config`` no client is internal, whatever its headers claim


#: The headers that a connection manager writes, and the functions for their values.
WRITTEN: Final[Mapping[str, _Writes]] = {
    REQUEST_ID: _request_id,
    "x-forwarded-proto": _scheme,
    "x-forwarded-for": _forwarded_for,
    "x-envoy-external-address": _external_address,
    "x-envoy-internal": _internal,
}
