"""The request for a connection's tunnel: whether a TCP proxy makes one, its authority, headers and encoding."""

from __future__ import annotations

from functools import lru_cache

from hbone.events import Header
from hbone.sender import fields
from xds.model.listener import AppendAction
from ztunnel.proxy.envoy.listeners.chains import LiveTcpProxy
from ztunnel.proxy.envoy.listeners.plans import TunnelRequest
from ztunnel.proxy.envoy.stream.outcome import UpstreamFailed
from ztunnel.proxy.envoy.stream.request_headers import traceparent
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo

DISABLE_TUNNELING = "envoy.tcp_proxy.disable_tunneling"


def tunnels(proxy: LiveTcpProxy, info: StreamInfo) -> bool:
    """Return whether a TCP proxy filter opens a tunnel for a connection."""
    return proxy.hostname is not None and DISABLE_TUNNELING not in info.facts.filter_state


@lru_cache(maxsize=4096)
def header_block(request: tuple[Header, ...]) -> bytes:
    """Return the header block of a request."""
    return fields(request)


def request_for(proxy: LiveTcpProxy, info: StreamInfo) -> TunnelRequest:
    """Return the request for a connection's tunnel.

    Raises:
        UpstreamFailed: see :func:`tunnel_request`.
    """
    authority, headers = tunnel_request(proxy, info)
    encoded = [(name.encode(), value.encode("utf-8", "replace")) for name, value in headers]
    request = ((b":method", b"CONNECT"), (b":authority", authority.encode()), *encoded)
    return TunnelRequest(authority, headers, request, traceparent(headers))


def tunnel_request(proxy: LiveTcpProxy, info: StreamInfo) -> tuple[str, list[tuple[str, str]]]:
    """Return the ``:authority`` and the added headers of a tunnel request, in order.

    Raises:
        UpstreamFailed: the host name evaluates to the empty string.
    """
    assert proxy.hostname is not None
    authority = proxy.hostname(info)
    if not authority:
        raise UpstreamFailed("tunnel hostname is empty")
    # Like Envoy: "exists" means in the original request, which has no such headers. Headers that overwrite are set
    # first, and then headers are added.
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
