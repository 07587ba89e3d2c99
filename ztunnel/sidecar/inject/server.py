"""The webhook's server: HTTPS for the API server, with its certificate and configuration reloaded from files.

uvicorn serves HTTP. The loaded files stay in use until valid ones replace them: a certificate whose key does not
match yet, or a faulty configuration, is logged once and has no effect.
"""

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from uvicorn.protocols.http.h11_impl import H11Protocol

from ztunnel.runtime.clock import Clock, SystemClock
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.tasks import Tasks
from ztunnel.runtime.text_file import read_again, read_text
from ztunnel.runtime.watched_file import FileState, InPlaceEdits, file_state
from ztunnel.sidecar.inject.config import ConfigFaults, InjectConfig, parse_config
from ztunnel.sidecar.inject.review import MAX_BODY, answer

log = logging.getLogger(__name__)

_POLL_S: Final = 1.0
#: The API server reuses connections, and each one keeps the certificate of its handshake. So for this long after a
#: certificate change, each connection is closed after its response. No connection then uses the old certificate
#: when its CA is removed.
_CLOSE_AFTER_ROTATION_S: Final = 60.0
_SHUTDOWN_S: Final = 5
#: The most connections. An API server needs a few. Beyond this number, the oldest connection without a request in
#: progress is closed.
_CONNECTIONS: Final = 256
#: The time limit for sending a whole request: twice the API server's own limit.
_PATIENCE_S: Final = 10.0

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]


class BadCertificate(Exception):
    """The serving certificate cannot be used at the start; the text names its file."""


class InjectServer:
    """Answers the API server while entered.

    Args:
        listener: a bound socket; closed at the end.
        certificate: PEM, the leaf first.
        key: PEM.
        config: the configuration's file. None uses the defaults.
        connections: the largest number of connections.
        patience_s: a connection that sends no whole request for this long is closed.

    Raises:
        BadCertificate, ConfigFaults, OSError: on entering.
    """

    def __init__(
        self,
        listener: socket.socket,
        certificate: Path,
        key: Path,
        config: Path | None,
        clock: Clock | None = None,
        *,
        connections: int = _CONNECTIONS,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._connections = connections
        self._patience_s = patience_s
        self._listener = listener
        self._certificate = certificate
        self._key = key
        self._config_file = config
        self._edits = InPlaceEdits()
        self._clock = clock or SystemClock()
        self._config = InjectConfig()
        self._rotated_s = -_CLOSE_AFTER_ROTATION_S
        self._tasks = Tasks("inject")
        self._said: dict[str, str] = {}
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "ztunnel_inject_requests", "Answered requests of the API server.", ["result"], registry=self._registry
        )
        self._current = Gauge(
            "ztunnel_inject_file_current",
            "1 while the file's content is in use. 0: it is faulty, and the last good content is in use.",
            ["file"],
            registry=self._registry,
        )
        self._stack = contextlib.AsyncExitStack()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    async def __aenter__(self) -> "InjectServer":
        states = self._states()
        if self._config_file is not None:
            self._config = parse_config(read_text(self._config_file))
        try:
            self._load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except OSError as error:
            raise BadCertificate(_certificate_fault(self._certificate, self._key, error)) from error
        for name in ("certificate", "config"):
            self._current.labels(name).set(1)
        settings = uvicorn.Config(
            self._handle,
            interface="asgi3",
            http=_protocol(self._connections, self._patience_s),
            ws="none",
            lifespan="off",
            ssl_certfile=self._certificate,
            ssl_keyfile=self._key,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        settings.load()
        assert settings.ssl is not None
        server = _Server(settings)
        serving = self._tasks.start(server.serve(sockets=[self._listener]), "server")
        self._tasks.keep(functools.partial(self._follow, settings.ssl, states), "files")
        self._stack.push_async_callback(self._tasks.close)
        self._stack.push_async_callback(_stop, server, serving)
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has a flag and no event
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _states(self) -> tuple[FileState, FileState, FileState]:
        config = None if self._config_file is None else file_state(self._config_file)
        return file_state(self._certificate), file_state(self._key), config

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._certificate, self._key)

    async def _follow(self, context: ssl.SSLContext, loaded: tuple[FileState, FileState, FileState]) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            states = self._states()
            if states[:2] != loaded[:2] and self._reload_certificate(context):
                loaded = (*states[:2], loaded[2])
            if states[2] != loaded[2] and self._is_complete(loaded[2], states[2]) and self._reload_config():
                loaded = (*loaded[:2], states[2])

    def _is_complete(self, loaded: FileState, now: FileState) -> bool:
        assert self._config_file is not None
        return not self._edits.is_written(self._config_file, loaded, now)

    def _reload_certificate(self, context: ssl.SSLContext) -> bool:
        try:
            # The certificate is loaded into a separate context first, because a chain that fails half-way would
            # change the context in use.
            self._load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load_certificate(context)
        except OSError as error:
            # The files of certificate and key are never replaced at the same moment. The next check can find a
            # matching pair.
            self._faulty("certificate", _certificate_fault(self._certificate, self._key, error))
            return False
        self._rotated_s = self._clock.monotonic()
        self._good("certificate")
        return True

    def _reload_config(self) -> bool:
        assert self._config_file is not None
        try:
            self._config = parse_config(read_again(self._config_file, holds=self._config != InjectConfig()))
        except OSError as error:
            self._faulty("config", plain_reason(error))
            return False
        except ConfigFaults as error:
            self._faulty("config", f"{self._config_file}: {error}")
            return False
        self._good("config")
        return True

    def _faulty(self, what: str, fault: str) -> None:
        self._current.labels(what).set(0)
        if self._said.get(what) != fault:
            log.error("inject: %s; the last good %s stays in use", fault, what)
        self._said[what] = fault

    def _good(self, what: str) -> None:
        self._current.labels(what).set(1)
        self._said.pop(what, None)
        log.info("inject: a new %s is in use", what)

    async def _handle(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        if path == "/inject" or path.startswith("/inject/"):
            if method != "POST":
                await self._send(send, 405, "text/plain", b"POST an AdmissionReview\n")
                return
            await self._inject(scope, receive, send)
        elif path in ("/healthz", "/readyz"):
            await self._send(send, 200, "text/plain", b"ok\n")
        elif path == "/metrics":
            await self._send(send, 200, "text/plain; version=0.0.4", generate_latest(self._registry))
        else:
            await self._send(send, 404, "text/plain", b"there is /inject, /healthz, /readyz and /metrics\n")

    async def _inject(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        body = b""
        async for piece in _body(receive):
            body += piece
            if len(body) > MAX_BODY:
                break
        path = str(scope["path"]).removeprefix("/inject")
        answered = answer(body, headers.get("content-type", ""), self._config, path)
        self._requests.labels(answered.result).inc()
        level = logging.INFO if answered.status == 200 else logging.WARNING
        log.log(level, "inject: %s: %s", answered.result, answered.about)
        await self._send(send, answered.status, answered.content_type, answered.body, close=len(body) > MAX_BODY)

    async def _send(self, send: Send, status: int, content_type: str, body: bytes, *, close: bool = False) -> None:
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        if close or self._clock.monotonic() - self._rotated_s < _CLOSE_AFTER_ROTATION_S:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _protocol(most: int, patience_s: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with additional limits, because any pod of the cluster can reach this port.

    At its own limit of connections uvicorn answers 503 to every client, and no pod of the mesh could be created.
    At the limit here, the oldest connection without a request in progress is closed instead.
    """
    opened: dict[H11Protocol, None] = {}

    class Bounded(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._seen: object = None
            opened[self] = None
            if len(opened) > most:
                # The oldest connection is closed first. One with a request in progress is left alone, because its
                # answer takes milliseconds.
                idle = (each for each in opened if not each.busy())  # type: ignore[attr-defined]
                next(idle, self).transport.abort()
            self._look = self.loop.call_later(patience_s, self._check)

        def connection_lost(self, exc: Exception | None) -> None:
            self._look.cancel()
            opened.pop(self, None)
            super().connection_lost(exc)

        def busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

        def _check(self) -> None:
            # No request has started since the last check, so no complete request arrived in between.
            if self.cycle is self._seen and not self.busy():
                self.transport.abort()
                return
            self._seen = self.cycle
            self._look = self.loop.call_later(patience_s, self._check)

    return Bounded


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to our command. uvicorn would handle them, and raise them again at its
    end.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _stop(server: uvicorn.Server, serving: asyncio.Task[Any]) -> None:
    server.should_exit = True
    await asyncio.wait((serving,), timeout=_SHUTDOWN_S + 2)


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


def _certificate_fault(certificate: Path, key: Path, error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        return f"{certificate} with {key}: cannot be used as a certificate and its key ({reason})"
    return f"{certificate} or {key}: {error.strerror or error}"
