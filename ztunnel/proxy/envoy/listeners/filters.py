"""Runs listener filters, which change the facts about a connection before its filter chain is chosen."""

import re
from collections.abc import Iterable, Iterator, Mapping

from hbone.aio.socket import PlainSocket
from tproxy.aio import sockets
from xds.model import listener as model
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from ztunnel.proxy.dataplane import client_hello, proxy_protocol
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.stats.stats import Scope
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo, UpstreamOptions
from ztunnel.proxy.envoy.upstream.original_dst import ORIGINAL_DST_OVERRIDE

_LOCAL_METADATA = "envoy.filters.listener.original_dst"
_BAGGAGE_METADATA = "envoy.filters.listener.workload_metadata"
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: An HTTP method can be any token, in upper or lower case (RFC 9110, 9.1).
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class FilterClosed(Exception):
    """A listener filter closes the connection. The error's text is the reason.

    Attributes:
        failure: the reason in metrics.
    """

    failure = Reason.BAD_REQUEST

    def __init__(self, text: str, failure: Reason | None = None) -> None:
        super().__init__(text)
        if failure is not None:
            self.failure = failure


class NotArrived(FilterClosed):
    """The configuration of a listener filter from ECDS has not arrived."""

    failure = Reason.CONTROL_PLANE


#: Listener filters that wait for the client's first bytes.
ReadsBytes = model.TlsInspector | model.HttpInspector | model.ProxyProtocol


def due(
    filters: Iterable[tuple[model.ListenerFilterEntry, model.ListenerFilter | None]],
    info: StreamInfo,
    notes: list[str] | None = None,
) -> Iterator[tuple[str, model.ListenerFilter]]:
    """Yield the enabled listener filters of a connection with their names, in order.

    The caller runs each filter before taking the next, because a filter can change the port, and other filters can
    be disabled for the changed port.

    Args:
        filters: the listener's filters. ``None`` stands for a filter not yet delivered by ECDS.
        info: the connection.
        notes: receives a line for each disabled filter, for an explanation.

    Raises:
        NotArrived: a filter has no configuration yet. Like in Envoy, connections are refused until it arrives.
    """
    for entry, found in filters:
        port = info.facts.destination.port
        if entry.disabled is not None and entry.disabled.holds(port):
            if notes is not None:
                notes.append(f"{entry.name}: disabled for port {port}")
        elif found is None:
            raise NotArrived(f"the configuration of filter {entry.name} has not arrived")
        else:
            yield entry.name, found


def annotate(entry: model.ListenerFilter, info: StreamInfo, name: str) -> None:
    """Run a filter that reads no bytes, for an accepted or an internal connection.

    ``OriginalDst`` is implemented by :func:`restore` for a socket, and here for an internal connection: this
    function reads the metadata and filter state that an ``internal_upstream`` transport socket passed on. Like in
    Envoy, missing and unparsable values are ignored.

    Raises:
        FilterClosed: the filter needs bytes, but an internal connection has none.
    """
    facts = info.facts
    match entry:
        case model.OriginalDst():
            local = _text(facts.metadata, _LOCAL_METADATA, "local")
            address = SocketAddress.parse_or_none(local or facts.filter_state.get(f"{_LOCAL_METADATA}.local_ip"))
            if address is not None:
                facts.destination = address
                info.restored = True
            remote = SocketAddress.parse_or_none(facts.filter_state.get(f"{_LOCAL_METADATA}.remote_ip"))
            if remote is not None:
                facts.source = remote
                info.remote_text = ""
        case model.SetDstAddress():
            destination = SocketAddress.parse_or_none(_text(facts.metadata, "tunnel", "destination"))
            if destination is not None:
                facts.destination = destination
                info.restored = True
            via = _text(facts.metadata, "tunnel", "address")
            if via is not None:
                facts.filter_state[ORIGINAL_DST_OVERRIDE] = via
        case model.OriginalSrc():
            info.options = UpstreamOptions(source=facts.source.host, mark=entry.mark)
        case model.WorkloadMetadata():
            value = entry.baggage.get(facts.source.host)
            if value is not None:
                facts.metadata[_BAGGAGE_METADATA] = {"baggage": value}
        case _:
            raise FilterClosed(f"filter {name} reads bytes, which an internal connection does not have yet")


def restore(end: PlainSocket, info: StreamInfo, *, transparent: bool) -> None:
    """Run ``original_dst`` on a socket: restore the address that the client dialled, before interception.

    Args:
        end: the accepted socket.
        info: the connection, whose destination is still the socket's local address.
        transparent: whether the listener is transparent, so that without NAT the local address is the dialled one.
    """
    own = info.destination
    dialled = sockets.tracked_address(end.sock, 6 if ":" in own.host else 4)
    if dialled is not None and dialled != own:
        info.facts.destination = SocketAddress(*dialled)
        info.restored = True
        return
    info.restored = transparent


async def inspect_tls(end: PlainSocket, info: StreamInfo) -> None:
    """Run ``tls_inspector``: read server name and ALPN of a ClientHello without consuming it."""
    seen = b""
    while True:
        more = await end.peek(client_hello.MAX_BYTES, seen=len(seen))
        ended = len(more) <= len(seen)
        seen = more
        try:
            hello = client_hello.parse_client_hello(seen)
        except client_hello.NeedMore:
            if ended:
                info.facts.transport_protocol = "raw_buffer"
                return
            continue
        except client_hello.NotTls:
            info.facts.transport_protocol = "raw_buffer"
            return
        info.facts.transport_protocol = "tls"
        info.facts.server_name = hello.server_name
        info.facts.application_protocols = hello.alpn
        return


class InspectorCounts:
    """The counters of all TLS inspectors of the process (``tls_inspector.``)."""

    __slots__ = ("_alpn", "_no_alpn", "_no_sni", "_no_tls", "_sni", "_tls")

    def __init__(self, scope: Scope) -> None:
        self._tls, self._no_tls = scope.counter("tls_found"), scope.counter("tls_not_found")
        self._sni, self._no_sni = scope.counter("sni_found"), scope.counter("sni_not_found")
        self._alpn, self._no_alpn = scope.counter("alpn_found"), scope.counter("alpn_not_found")

    def count(self, facts: ConnectionFacts) -> None:
        """Count an inspected connection by result. All protocols other than TLS share one counter."""
        if facts.transport_protocol != "tls":
            self._no_tls.value += 1
            return
        self._tls.value += 1
        (self._sni if facts.server_name else self._no_sni).value += 1
        (self._alpn if facts.application_protocols else self._no_alpn).value += 1


async def inspect_http(end: PlainSocket, info: StreamInfo) -> None:
    """Run ``http_inspector``: recognise cleartext HTTP/2, HTTP/1.1 and HTTP/1.0 by the first line."""
    if info.facts.transport_protocol == "tls":
        return
    seen = b""
    while True:
        more = await end.peek(8192, seen=len(seen))
        ended = len(more) <= len(seen)
        seen = more
        if seen[: len(_HTTP2_PREFACE)] == _HTTP2_PREFACE[: len(seen)]:
            if len(seen) >= len(_HTTP2_PREFACE):
                info.facts.application_protocols = ("h2c",)
                return
        else:
            line, found, _ = seen.partition(b"\r\n")
            method, _, rest = line.partition(b" ")
            if not _METHOD.fullmatch(method):
                return
            if found:
                version = rest.rpartition(b" ")[2]
                if version in (b"HTTP/1.1", b"HTTP/1.0"):
                    info.facts.application_protocols = (version.decode().lower(),)
                return
        if ended or len(seen) >= 8192:
            return


async def take_proxy_header(entry: model.ProxyProtocol, end: PlainSocket, info: StreamInfo) -> None:
    """Run ``proxy_protocol``: apply a PROXY header and remove it from the bytes.

    Raises:
        FilterClosed: the header is malformed or disallowed, or a required header is missing.
    """
    seen = b""
    while True:
        more = await end.peek(proxy_protocol.LONGEST, seen=len(seen))
        ended = len(more) <= len(seen)
        seen = more
        try:
            header = proxy_protocol.parse_header(seen)
        except proxy_protocol.NeedMore:
            if ended:
                raise FilterClosed("PROXY header is cut off") from None
            continue
        except proxy_protocol.NoHeader:
            if entry.allow_without:
                return
            raise FilterClosed("no PROXY header") from None
        except proxy_protocol.BadHeader as error:
            raise FilterClosed(f"malformed PROXY header: {error}") from None
        break
    if header.version in entry.disallowed_versions:
        raise FilterClosed(f"PROXY version {header.version} is not allowed")
    await end.read(header.size)
    if header.source is not None and header.destination is not None:
        info.facts.source = header.source
        info.facts.destination = header.destination
        info.restored = True
        if info.options.source is not None:
            info.options = info.options._replace(source=header.source.host)


def _text(metadata: Mapping[str, object], namespace: str, key: str) -> str | None:
    found = metadata.get(namespace)
    if found is None:
        return None
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if isinstance(value, str) else None
