"""Tunnels made by hand, by a TLS library and an HTTP/2 library that neither proxy uses.

:class:`TunnelClient` is a node's client, with any faults that a case needs. :class:`TunnelServer` is a node's
server with scripted answers. Both block.
"""

import contextlib
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import hyperframe.frame

from deploy.lab import Place
from tests.interop.apps import WAIT_S
from xds.model.secret import Certificate

ODH = "x-envoy-original-dst-host"
PORT = 15008
Headers = Sequence[tuple[str, str]]


def connect_headers(authority: str, destination: str | None = "") -> list[tuple[str, str]]:
    """A CONNECT as the generated configuration sends it; ``destination`` None leaves the header out."""
    headers = [(":method", "CONNECT"), (":authority", authority)]
    if destination is not None:
        headers.append((ODH, destination or authority))
    return headers


@dataclass
class Answer:
    """The answer to a request.

    Attributes:
        reset: error code of RST_STREAM, None without.
        ended: whether END_STREAM came.
        closed: how the connection ended meanwhile, empty if it did not.
    """

    status: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    reset: int | None = None
    ended: bool = False
    closed: str = ""

    def __str__(self) -> str:
        if not self.status:
            return self.closed or (f"reset {self.reset}" if self.reset is not None else "no answer")
        words = [self.status]
        if self.body:
            words.append(repr(self.body.decode()))
        if self.ended:
            words.append("end")
        if self.reset is not None:
            words.append(f"reset {self.reset}")
        return " ".join(words)


class TunnelClient:
    """``with TunnelClient(place, address, root_pem, certificate) as client: ...``.

    Args:
        place: the client's place.
        address: the server's, port 15008.
        root: CA of the server.
        certificate: the certificate to present; None presents none.
        version: the only TLS version offered.
        silent: send nothing after the handshake, so that no reset overtakes the server's alert.
    """

    def __init__(
        self,
        place: Place,
        address: str,
        root: bytes,
        certificate: Certificate | None,
        version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
        *,
        silent: bool = False,
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cadata=root.decode())
        # OpenSSL wants the host's usage in the certificate, which SPIFFE leaves have, but no host name.
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        if certificate is not None:
            _load(context, certificate)
        self._raw = place.socket()
        self._raw.settimeout(WAIT_S)
        self._raw.connect((address, PORT))
        self._context = context
        self._silent = silent
        self._sock: ssl.SSLSocket | None = None
        self.own_port = self._raw.getsockname()[1]
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.failure = ""
        self._answers: dict[int, Answer] = {}

    def __enter__(self) -> Self:
        try:
            self._sock = self._context.wrap_socket(self._raw)
        except OSError as error:
            self.failure = _failure(error)
            return self
        if not self._silent:
            self._h2.initiate_connection()
            self._flush()
        return self

    def __exit__(self, *_: object) -> None:
        (self._sock or self._raw).close()

    @property
    def tls(self) -> tuple[str | None, str | None]:
        """Version and protocol agreed on."""
        assert self._sock is not None
        return self._sock.version(), self._sock.selected_alpn_protocol()

    def request(self, headers: Headers, *, end: bool = False) -> int:
        """Send a request; return the id of its stream."""
        stream = self._h2.get_next_available_stream_id()
        self._answers[stream] = Answer()
        if not self.failure:
            self._h2.send_headers(stream, headers, end_stream=end)
            self._flush()
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """Send bytes of a tunnel (within the windows: tests send little)."""
        self._h2.send_data(stream, data, end_stream=end)
        self._flush()

    def answer(self, stream: int, until: Callable[[Answer], bool] | None = None) -> Answer:
        """Read until the condition holds: by default until the answer is complete or the tunnel is open."""
        answer = self._answers[stream]
        ready = until or (lambda a: a.status == "200" or a.reset is not None or a.ended)
        while not answer.closed and not ready(answer):
            self._read(answer)
        return answer

    def ask(self, headers: Headers, *, end: bool = False) -> Answer:
        """A request and its answer, with what follows at once (RST_STREAM after END_STREAM)."""
        stream = self.request(headers, end=end)
        answer = self.answer(stream)
        if answer.ended and answer.reset is None and not end:
            answer = self.answer(stream, lambda a: a.reset is not None)
        return answer

    def talk(self, stream: int, data: bytes, length: int) -> bytes:
        """Send through a tunnel, read ``length`` bytes."""
        answer = self._answers[stream]
        self.send(stream, data)
        before = len(answer.body)
        self.answer(stream, lambda a: len(a.body) >= before + length or a.ended or a.reset is not None)
        return answer.body[before:]

    def wait_closed(self) -> str:
        """Read until the connection ends; how it did."""
        answer = Answer(closed=self.failure)
        while not answer.closed:
            self._read(answer)
        return answer.closed

    def _read(self, current: Answer) -> None:
        if self.failure:
            current.closed = self.failure
            return
        assert self._sock is not None
        try:
            data = self._sock.recv(65536)
        except OSError as error:
            current.closed = self.failure = _failure(error)
            return
        if not data:
            current.closed = self.failure = "closed"
            return
        for event in self._h2.receive_data(data):
            self._take(event)
        self._flush()

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                answer = self._answers[event.stream_id]
                answer.headers = {str(name): str(value) for name, value in event.headers}
                answer.status = answer.headers.pop(":status")
            case h2.events.DataReceived():
                self._answers[event.stream_id].body += event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self._answers[event.stream_id].ended = True
            case h2.events.StreamReset():
                self._answers[event.stream_id].reset = int(event.error_code)

    def _flush(self) -> None:
        assert self._sock is not None
        try:
            self._sock.sendall(self._h2.data_to_send())
        except OSError as error:
            self.failure = _failure(error)


@dataclass(frozen=True)
class Script:
    """The behaviour of a :class:`TunnelServer`.

    Attributes:
        status: the status of its answers; None answers with RST_STREAM ``reset``.
        settings: its SETTINGS frame.
        window: WINDOW_UPDATE of the connection that follows.
        goaway_after: bytes of a tunnel after which GOAWAY is sent; the tunnel continues.
    """

    status: int | None = 200
    reset: int = 0
    settings: tuple[tuple[int, int], ...] = ()
    window: int = 0
    goaway_after: int | None = None
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    body: bytes = b""


class TunnelServer:
    """A server of tunnels on port 15008 of a place: refuses or echoes.

    Attributes:
        requests: headers of every request, in order.
        connections: how many TLS handshakes succeeded.
        peers: URI names of the clients.
    """

    def __init__(self, place: Place, root: bytes, certificate: Certificate, script: Script) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = context.maximum_version = script.version
        context.load_verify_locations(cadata=root.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2"])
        _load(context, certificate)
        self._context = context
        self._script = script
        self.requests: list[dict[str, str]] = []
        self.connections = 0
        self.peers: list[str] = []
        self._listener = place.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("0.0.0.0", PORT))
        self._listener.listen(64)
        self._threads: list[threading.Thread] = []
        self._socks: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._threads.append(threading.Thread(target=self._accept, daemon=True))
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            self._socks.append(raw)
            thread = threading.Thread(target=self._one, args=(raw,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _one(self, raw: socket.socket) -> None:
        try:
            sock = self._context.wrap_socket(raw, server_side=True)
        except OSError:
            raw.close()
            return
        self._socks.append(sock)
        self.connections += 1
        names = (sock.getpeercert() or {}).get("subjectAltName", ())
        self.peers += [str(name[1]) for name in names]
        with sock, contextlib.suppress(OSError, h2.exceptions.ProtocolError):
            self._serve(sock)

    def _serve(self, sock: ssl.SSLSocket) -> None:
        connection = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="utf-8", validate_inbound_headers=False)
        )
        # update_settings() would announce the defaults first, and the new values only then.
        values = {h2.settings.SettingCodes(key): value for key, value in self._script.settings}
        connection.local_settings = h2.settings.Settings(client=False, initial_values=values)
        connection.initiate_connection()
        if self._script.window:
            connection.increment_flow_control_window(self._script.window)
        sock.sendall(connection.data_to_send())
        received = 0
        echoes: dict[int, _Echo] = {}
        while data := sock.recv(65536):
            for event in connection.receive_data(data):
                match event:
                    case h2.events.RequestReceived():
                        self._answer(connection, event)
                    case h2.events.DataReceived():
                        connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                        if self._script.status == 200:
                            echoes.setdefault(event.stream_id, _Echo()).data += event.data
                        before, received = received, received + len(event.data)
                        limit = self._script.goaway_after
                        if limit is not None and before < limit <= received:
                            # By hand: the library would take the connection for closed.
                            goodbye = hyperframe.frame.GoAwayFrame(0, last_stream_id=event.stream_id)
                            sock.sendall(connection.data_to_send() + goodbye.serialize())
                    case h2.events.StreamEnded() if self._script.status == 200:
                        echoes.setdefault(event.stream_id, _Echo()).ended = True
                    case h2.events.StreamReset():
                        echoes.pop(event.stream_id, None)
                if not isinstance(event, h2.events.ConnectionTerminated):
                    _send_echoes(connection, echoes)
            sock.sendall(connection.data_to_send())

    def _answer(self, connection: h2.connection.H2Connection, event: h2.events.RequestReceived) -> None:
        self.requests.append({str(name): str(value) for name, value in event.headers})
        script = self._script
        if script.status is None:
            connection.reset_stream(event.stream_id, script.reset)
            return
        refused = script.status != 200
        connection.send_headers(
            event.stream_id, [(":status", str(script.status))], end_stream=refused and not script.body
        )
        if script.body:
            connection.send_data(event.stream_id, script.body, end_stream=refused)


@dataclass(slots=True)
class _Echo:
    """The bytes that one stream has not got back yet."""

    data: bytearray = field(default_factory=bytearray)
    ended: bool = False


def _send_echoes(connection: h2.connection.H2Connection, echoes: dict[int, _Echo]) -> None:
    """Send as much as the client's windows allow; its WINDOW_UPDATE brings the next call."""
    for stream, echo in list(echoes.items()):
        while echo.data:
            size = min(
                len(echo.data), connection.local_flow_control_window(stream), connection.max_outbound_frame_size
            )
            if size <= 0:
                break
            connection.send_data(stream, bytes(echo.data[:size]))
            del echo.data[:size]
        if echo.ended and not echo.data:
            connection.end_stream(stream)
            del echoes[stream]


def _load(context: ssl.SSLContext, certificate: Certificate) -> None:
    with _as_file(certificate.chain_pem + certificate.key_pem) as path:
        context.load_cert_chain(path)


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        yield Path(file.name)


def _failure(error: OSError) -> str:
    """An error of TLS in the words of RFC 8446's alerts."""
    text = str(error).lower()
    for name in (
        "certificate_required",
        "protocol_version",
        "unknown_ca",
        "certificate_unknown",
        "bad_certificate",
        "access_denied",
    ):
        if name in text or name.replace("_", " ") in text:
            return f"alert {name}"
    if isinstance(error, TimeoutError):
        return "still open"
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):  # the latter by Python 3.11.2
        return "closed"
    if isinstance(error, ssl.SSLError):
        return f"tls {error.reason}".lower()
    if isinstance(error, ConnectionError):
        return "reset"
    return text
