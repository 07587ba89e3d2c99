"""Answers kubelet's probes by probing the application. Each probe uses a new connection, and no state is kept.

Like Istio's sidecar, the prober returns the application's status and the first 10 KiB of the body, does not verify
certificates (nor does kubelet), and counts a redirect to another host as success. HTTPS probes use HTTP/1.1.
:mod:`ztunnel.proxy.istio.admin.probe_response` accepts the same responses as kubelet's client, Go's net/http.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeAlias
from urllib.parse import urljoin, urlsplit

from xds.aio.channel import Channel
from xds.aio.health import serves
from xds.grpc.status import RpcFailed
from ztunnel.proxy.istio.admin.probe_response import LONGEST_HEAD, BadResponse, read_body, read_head
from ztunnel.proxy.istio.settings.app_probes import AppProbe
from ztunnel.runtime.http.page import PLAIN, Page, text
from ztunnel.runtime.settings import plain_reason

_BODY: Final = 10 * 1024
#: The largest number of redirects to follow, equal to kubelet's.
_REDIRECTS: Final = 10


_REDIRECTING: Final = (301, 302, 303, 307, 308)
#: The target of a probe or redirect: scheme, port, and path with query.
_Target: TypeAlias = tuple[str, int, str]


class _Failed(Exception):
    """The application did not answer. The text states the reason."""


async def answer(probe: AppProbe, address: str, source: str | None) -> Page:
    """Probe the application, and return the page for kubelet: 500 with the reason if it does not answer.

    Args:
        probe: the probe.
        address: the application's address, used unless the probe names another host.
        source: the local address for the connection, chosen so that the pod's rules do not capture it.
    """
    host = probe.host or address
    if host != address:
        # A connection to another host needs no special source address. It cannot be mistaken for a call of the
        # application to itself, like a connection to the pod's own address.
        source = None
    try:
        async with asyncio.timeout(probe.timeout_s):
            match probe.kind:
                case "tcp":
                    async with _connection(host, probe.port, source, None):
                        return text("", content_type=PLAIN)
                case "grpc":
                    return await _grpc(probe, host, source)
                case _:
                    return await _http(probe, host, source)
    except TimeoutError:
        return text(f"the application did not answer within {probe.timeout_s:g} s\n", 500, PLAIN)
    except (_Failed, BadResponse, OSError) as error:
        return text(f"the application cannot be asked: {plain_reason(error)}\n", 500, PLAIN)


@contextlib.asynccontextmanager
async def _connection(
    host: str, port: int, source: str | None, tls: ssl.SSLContext | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    local = None if source is None else (source, 0)
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, local_addr=local, limit=LONGEST_HEAD)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _http(probe: AppProbe, host: str, source: str | None) -> Page:
    scheme: str = probe.kind
    port, path = probe.port, probe.path
    for _ in range(_REDIRECTS):
        page, target = await _asked(scheme, host, port, path, probe.headers, source)
        if target is None:
            return page
        scheme, port, path = target
    raise _Failed(f"it redirects more than {_REDIRECTS} times")


async def _asked(
    scheme: str, host: str, port: int, path: str, headers: Iterable[tuple[str, str]], source: str | None
) -> tuple[Page, _Target | None]:
    """Send one request. Return the page, and the target of a redirect to the same host."""
    fields = [("Host", _authority(host, port)), ("User-Agent", "kube-probe/ztunnel"), ("Accept", "*/*")]
    given = {name.lower() for name, _ in headers}
    fields = [each for each in fields if each[0].lower() not in given]
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in (*fields, *headers))]
    request = "\r\n".join([*lines, "Connection: close", "", ""])
    async with _connection(host, port, source, _trusting() if scheme == "https" else None) as (reader, writer):
        writer.write(request.encode())
        head = await read_head(reader)
        redirects = bool(head.location) and head.status in _REDIRECTING
        if redirects:
            target = _target(f"{scheme}://{_authority(host, port)}{path}", host, head.location)
            if target is not None:
                return text("", content_type=PLAIN), target
        body = await read_body(reader, head, _BODY)
    if redirects:
        return text("", content_type=PLAIN), None
    if head.status < 200:
        raise _Failed(f"it answered {head.status}")
    kept = (body,) if body and head.status not in (204, 304) else ()
    return Page(status=head.status, content_type=head.content_type.strip() or PLAIN, body=kept), None


def _target(asked: str, host: str, location: str) -> _Target | None:
    """Return the target of a redirect, or None if it points to another host."""
    try:
        where = urlsplit(urljoin(asked, location))
        port = where.port or (443 if where.scheme == "https" else 80)
    except ValueError:
        raise _Failed(f"it redirects to {location!r}, which is no URL") from None
    if where.hostname != host:
        return None
    if where.scheme not in ("http", "https"):
        raise _Failed(f"it redirects to a URL of the scheme {where.scheme!r}")
    return where.scheme, port, (where.path or "/") + (f"?{where.query}" if where.query else "")


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _grpc(probe: AppProbe, host: str, source: str | None) -> Page:
    channel = Channel(_authority(host, probe.port), keepalive=None, source=source)
    try:
        healthy = await serves(channel, probe.service, probe.timeout_s)
    except RpcFailed as error:
        raise _Failed(str(error)) from error
    finally:
        await channel.close()
    if not healthy:
        raise _Failed("its health service says that it does not serve")
    return text("", content_type=PLAIN)
