"""Makes the CONNECT request that opens a connection's tunnel: authority, headers and encoding."""

from __future__ import annotations

from functools import lru_cache

from hbone.events import Header
from hbone.sender import fields
from xds.model.listener import AppendAction
from ztunnel.proxy.envoy.listeners.chains import LiveTcpProxy
from ztunnel.proxy.envoy.listeners.plans import TunnelRequest
from ztunnel.proxy.envoy.stream.outcome import UpstreamFailed
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo


@lru_cache(maxsize=4096)
def _header_block(request: tuple[Header, ...]) -> bytes:
    return fields(request)


def request_for(proxy: LiveTcpProxy, info: StreamInfo) -> TunnelRequest:
    """Return the encoded CONNECT request for a connection's tunnel.

    Raises:
        UpstreamFailed: see :func:`tunnel_request`.
    """
    authority, headers = tunnel_request(proxy, info)
    request: list[Header] = [(b":method", b"CONNECT"), (b":authority", authority.encode())]
    trace = ""
    for name, value in headers:
        request.append((name.encode(), value.encode("utf-8", "replace")))
        if name == "traceparent" and not trace:
            trace = value
    encoded = tuple(request)
    return TunnelRequest(authority, headers, encoded, _header_block(encoded), trace)


def tunnel_request(proxy: LiveTcpProxy, info: StreamInfo) -> tuple[str, list[tuple[str, str]]]:
    """Return the ``:authority`` and the added headers of a tunnel request, in order.

    Raises:
        UpstreamFailed: the host name evaluates to the empty string.
    """
    assert proxy.hostname is not None
    authority = proxy.hostname(info)
    if not authority:
        raise UpstreamFailed("tunnel hostname is empty")
    # Like in Envoy, "exists" in an append action means that the original request has the header. A CONNECT has
    # none of these headers. Overwriting headers are set first, then the other headers are added.
    overwritten: dict[str, str] = {}
    added: list[tuple[str, str]] = []
    for header in proxy.headers:
        value = header.render(info)
        if not value and not header.keep_empty:
            continue
        if header.action == AppendAction.OVERWRITE_IF_EXISTS_OR_ADD:
            overwritten[header.name] = value
        elif header.action != AppendAction.OVERWRITE_IF_EXISTS:
            added.append((header.name, value))
    return authority, [*overwritten.items(), *added]
