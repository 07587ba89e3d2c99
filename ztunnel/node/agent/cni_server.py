"""Answers the CNI plugin of container runtimes: ``POST /cmdadd`` over a Unix socket, as istio-cni's agent does.

The plugin announces each sandbox before a process starts in it, and fails the sandbox unless the answer is 200.
The body is istio-cni's, so its plugin can use this socket (``cni_agent_run_dir``)::

    {"Netns": "/var/run/netns/cni-...", "PodName": "web", "PodNamespace": "shop",
     "IPs": [{"Interface": 0, "Address": {"IP": "10.0.0.7", "Mask": "////AA=="}, "Gateway": "10.0.0.1"}]}

Ours adds ``PodUID``, which distinguishes a pod of a StatefulSet from its predecessor. Other members are ignored:
the addresses are read from the namespace itself.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Self

import h11
import msgspec

from ztunnel.node.agent.enroller import Added
from ztunnel.node.agent.errors import CannotAdd
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

Add = Callable[[Added], Awaitable[str]]
_MOST_BODY: Final = 64 * 1024
_REQUEST_S: Final = 5.0
_READ: Final = 8 * 1024


class BadEvent(ValueError):
    """A body that announces no sandbox; the text says why."""


class _Event(msgspec.Struct):
    netns: str = msgspec.field(name="Netns")
    name: str = msgspec.field(name="PodName")
    namespace: str = msgspec.field(name="PodNamespace")
    uid: str = msgspec.field(name="PodUID", default="")


_decoder: Final = msgspec.json.Decoder(_Event)


def read_event(body: bytes) -> Added:
    """Return what a plugin announces.

    Raises:
        BadEvent: the body is not JSON, lacks a member, or names a path that is not absolute.
    """
    try:
        event = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise BadEvent(str(error)) from None
    for member, value in (("PodName", event.name), ("PodNamespace", event.namespace)):
        if not value:
            raise BadEvent(f"{member} is empty")
    if not event.netns.startswith("/"):
        raise BadEvent(f"Netns is {event.netns!r}, which is no absolute path")
    return Added(namespace=event.namespace, name=event.name, netns=event.netns, uid=event.uid)


class CniServer:
    """Listens for the plugin while entered.

    Args:
        path: of the socket. Its mode is 0600: only root's processes, such as container runtimes, can connect.
        add: called with each sandbox.

    Attributes:
        answers: how often each status was the answer.

    Raises:
        OSError: on entering, the socket cannot be bound.
    """

    def __init__(self, path: Path, add: Add) -> None:
        self.path = path
        self._add = add
        self._tasks = Tasks("cni")
        self._server: asyncio.Server | None = None
        self.answers: Counter[int] = Counter()

    async def __aenter__(self) -> Self:
        # Created under another name and then moved: a plugin never finds a socket without a listener, and a
        # successor takes over without a gap.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        making = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        making.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, making)
        making.chmod(0o600)
        making.rename(self.path)
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._server is not None:
            self._server.close()
        await self._tasks.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.start(self._serve(reader, writer), "request")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection, as the plugin expects."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=16 * 1024)
        try:
            try:
                async with asyncio.timeout(_REQUEST_S):
                    request, body = await _request(connection, reader)
                status, text = await self._answer(request, body)
            except h11.RemoteProtocolError as error:
                status, text = error.error_status_hint, str(error)
            except TimeoutError:
                status, text = 408, "the request is not complete"
            self.answers[status] += 1
            data = text.encode() + b"\n"
            headers = [("content-length", str(len(data))), ("connection", "close")]
            if connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                for event in (
                    h11.Response(status_code=status, headers=headers),
                    h11.Data(data=data),
                    h11.EndOfMessage(),
                ):
                    writer.write(connection.send(event) or b"")
                await writer.drain()
        except (OSError, h11.LocalProtocolError) as error:
            log.info("a plugin went away error=%s", plain_reason(error))
        finally:
            writer.close()

    async def _answer(self, request: h11.Request, body: bytes) -> tuple[int, str]:
        if request.target != b"/cmdadd":
            return 404, "no such page; this socket has /cmdadd"
        if request.method != b"POST":
            return 405, "/cmdadd takes POST"
        try:
            event = read_event(body)
        except BadEvent as error:
            log.error("a plugin's message is not usable error=%s", error)
            return 400, f"bad event: {error}"
        try:
            done = await self._add(event)
        except CannotAdd as error:
            log.error("sandbox refused netns=%s: %s", event.netns, error)
            return 500, str(error)
        log.info("sandbox netns=%s: %s", event.netns, done)
        return 200, done


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> tuple[h11.Request, bytes]:
    """Return the request and its whole body.

    Raises:
        h11.RemoteProtocolError: it is none, or too large.
    """
    request: h11.Request | None = None
    body = bytearray()
    while True:
        event: Any = connection.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(_READ)
            connection.receive_data(data)
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > _MOST_BODY:
                raise h11.RemoteProtocolError(f"a body of more than {_MOST_BODY} bytes", error_status_hint=413)
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            return request, bytes(body)
        else:
            raise h11.RemoteProtocolError("the connection ended before the request")
