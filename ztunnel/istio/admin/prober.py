"""Answers kubelet's probes by those that the application has: one connection each, nothing is remembered.

As in Istio's sidecar: the status is the application's, the body's first 10 KiB come along, TLS is not verified (as
kubelet does not), and a redirect to another host counts as success. HTTPS is asked in HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable
from typing import Final
from urllib.parse import urljoin, urlsplit

import h11

from xds.aio.channel import Channel
from xds.aio.health import serves
from xds.grpc.status import RpcFailed
from ztunnel.http.page import PLAIN, Page, text
from ztunnel.istio.app_probes import AppProbe
from ztunnel.runtime.settings import plain_reason

_BODY: Final = 10 * 1024
#: As kubelet.
_REDIRECTS: Final = 10
_READ: Final = 8 * 1024


class _Failed(Exception):
    """No answer; the text says why."""


async def answer(probe: AppProbe, address: str, source: str | None) -> Page:
    """Probe the application, and return the page for kubelet: 500 with the reason if it does not answer.

    Args:
        probe: what to ask.
        address: of the application, unless the probe names another host.
        source: where to connect to that address from, so that the pod's rules leave the connection alone.
    """
    host = probe.host or address
    if host != address:
        # Only a connection to the pod's own address could be taken for the application's call of itself.
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
    except (_Failed, OSError, h11.RemoteProtocolError) as error:
        return text(f"the application cannot be asked: {plain_reason(error)}\n", 500, PLAIN)


@contextlib.asynccontextmanager
async def _connection(
    host: str, port: int, source: str | None, tls: ssl.SSLContext | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    local = None if source is None else (source, 0)
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, local_addr=local)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _http(probe: AppProbe, host: str, source: str | None) -> Page:
    scheme: str = probe.kind
    port, path = probe.port, probe.path
    for _ in range(_REDIRECTS):
        page, location = await _asked(scheme, host, port, path, probe.headers, source)
        if location is None:
            return page
        where = urlsplit(urljoin(f"{scheme}://{_authority(host, port)}{path}", location))
        if where.hostname != host or where.scheme not in ("http", "https"):
            return text("", content_type=PLAIN)
        scheme = where.scheme
        port = where.port or (443 if scheme == "https" else 80)
        path = (where.path or "/") + (f"?{where.query}" if where.query else "")
    raise _Failed(f"it redirects more than {_REDIRECTS} times")


async def _asked(
    scheme: str, host: str, port: int, path: str, headers: Iterable[tuple[str, str]], source: str | None
) -> tuple[Page, str | None]:
    """Ask once; the page, and where a redirect points."""
    fields = [("Host", _authority(host, port)), ("User-Agent", "kube-probe/ztunnel"), ("Accept", "*/*")]
    given = {name.lower() for name, _ in headers}
    fields = [each for each in fields if each[0].lower() not in given]
    http = h11.Connection(h11.CLIENT)
    async with _connection(host, port, source, _trusting() if scheme == "https" else None) as (reader, writer):
        request = h11.Request(method="GET", target=path, headers=[*fields, *headers, ("Connection", "close")])
        writer.write((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
        response: h11.Response | None = None
        body = b""
        while len(body) < _BODY:
            event = http.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(_READ)
                if not data and response is None:
                    raise _Failed("it closed the connection without an answer")
                http.receive_data(data)
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                break
    assert response is not None  # the loop ends behind it
    said = {name: value.decode("latin-1") for name, value in response.headers}
    redirect = said.get(b"location") if response.status_code in (301, 302, 303, 307, 308) else None
    kept = () if response.status_code in (204, 304) else (body[:_BODY],)
    kind = said.get(b"content-type", PLAIN)
    return Page(status=response.status_code, content_type=kind, body=kept), redirect


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
