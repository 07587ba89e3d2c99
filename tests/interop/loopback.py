"""Rows that need no namespaces: one Envoy or one proxy of ours on loopback, the same bootstrap for both.

Each behaviour has a listener, a cluster and a log of its own in one bootstrap: a proxy starts once per column.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from tests.commands import Ztunnel
from tests.interop.case import Case, Opened
from tests.interop.proxies import ENVOY, WAIT_S
from tests.interop.refusals import ROWS, Row, accepted, word
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.config.test_bootstrap_fields import FILE_LOG
from tests.ztunnel.proxy.envoy.harness import Json, connect_route, connection_manager, http2, tcp

COLUMNS = ("envoy", "ours")
HEADINGS = COLUMNS
Serve = Callable[[socket.socket], None]
Client = Callable[[socket.socket], None]


class Running(Opened):
    """A folder, and a proxy once :meth:`start` was called; the site of the tables without a bootstrap."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def _open(self) -> None:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))

    def start(self, bootstrap: Json, ports: list[int]) -> None:
        """Start a proxy and wait until it listens on ``ports``."""
        path = self.folder / "bootstrap.json"
        path.write_text(json.dumps(bootstrap))
        self._stack.enter_context(serving(self.kind, path))
        until(lambda: all(map(listening, ports)))


@contextlib.contextmanager
def serving(kind: str, path: Path, *, admin: bool = False) -> Iterator[None]:
    """Run a proxy with a bootstrap file; ``admin``: it has an admin server, at the address in the file."""
    off = dict.fromkeys(("ZTUNNEL_READINESS_ADDRESS", "ZTUNNEL_METRICS_ADDRESS"), "off")
    if not admin:
        off["ZTUNNEL_ADMIN_ADDRESS"] = "off"
    with open(os.devnull, "wb") as output:
        if kind == "envoy":
            command = [str(ENVOY), "-c", str(path), "-l", "off", "--disable-hot-restart", "--concurrency", "1"]
            command += ["--file-flush-interval-msec", "50"]
            process: subprocess.Popen[bytes] = subprocess.Popen(command, stdout=output, stderr=output)
        else:
            env = {**os.environ, **off, "ZTUNNEL_LOG_FLUSH_INTERVAL": "50ms"}
            process = Ztunnel(["proxy", "--bootstrap", str(path)], stdout=output, stderr=output, env=env)
        with process:
            try:
                yield
            finally:
                process.kill()


def until(ready: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def listening(port: int) -> bool:
    """Return whether anything listens on a port of loopback. It opens no connection, which would be logged."""
    wanted = f"0100007F:{port:04X} 00000000:0000 0A"
    return any(wanted in line for line in Path("/proc/net/tcp").read_text().splitlines())


def cut(sock: socket.socket) -> None:
    """Close with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def application(serve: Serve, stack: contextlib.ExitStack) -> int:
    """Serve each connection on loopback in a thread until ``stack`` ends; the port."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def handle(sock: socket.socket) -> None:
        sock.settimeout(WAIT_S)
        with contextlib.suppress(OSError, h2.exceptions.ProtocolError), sock:
            serve(sock)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=handle, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    stack.callback(server.shutdown, socket.SHUT_RDWR)  # wakes accept()
    port: int = server.getsockname()[1]
    return port


# Behaviours


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """One connection: the behaviour of its application and its client, and the settings of the proxy.

    Attributes:
        envoy, ours: the client's result and the log line.
        why: the reason for a difference.
        tunnel: terminated here (a connection manager) or opened here (``tunneling_config``).
    """

    serve: Serve
    client: Client
    envoy: str
    ours: str = ""
    why: str = ""
    tunnel: str = ""
    more: Json = field(default_factory=dict)


_TCP = "%RESPONSE_FLAGS% %UPSTREAM_TRANSPORT_FAILURE_REASON% in=%BYTES_RECEIVED% out=%BYTES_SENT%\n"
_REQUEST = "%RESPONSE_CODE% %RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS% in=%BYTES_RECEIVED% out=%BYTES_SENT%\n"


def text_log(path: Path, text: str) -> list[Json]:
    """A file logger with a text format."""
    form = {"text_format_source": {"inline_string": text}}
    return [{"name": "file", "typed_config": {"@type": FILE_LOG, "path": str(path), "log_format": form}}]


class Behaviours(Running):
    """One proxy with a listener and a cluster per behaviour."""

    def _open(self) -> None:
        super()._open()
        self.ports: dict[str, int] = {}
        listeners, clusters = [], []
        for number, (name, row) in enumerate(BEHAVIOURS.items()):
            self.ports[name] = free_port()
            listeners.append(self._listener(name, row, f"c{number}"))
            address = {
                "socket_address": {"address": "127.0.0.1", "port_value": application(row.serve, self._stack)}
            }
            load = {"cluster_name": "c", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}
            options = {"typed_extension_protocol_options": http2()} if row.tunnel == "begins" else {}
            clusters.append({"name": f"c{number}", "type": "STATIC", "load_assignment": load, **options})
        self.start({"static_resources": {"listeners": listeners, "clusters": clusters}}, list(self.ports.values()))

    def log(self, name: str) -> Path:
        """The log of a behaviour."""
        return self.folder / f"log {list(BEHAVIOURS).index(name)}"

    def _listener(self, name: str, row: Behaviour, cluster: str) -> Json:
        if row.tunnel == "ends":
            filters = connection_manager({"route_config": connect_route(cluster)})
            filters["typed_config"]["access_log"] = text_log(self.log(name), _REQUEST)
        else:
            filters = tcp(cluster, access_log=text_log(self.log(name), _TCP), **row.more)
        address = {"socket_address": {"address": "127.0.0.1", "port_value": self.ports[name]}}
        return {"name": cluster, "address": address, "filter_chains": [{"filters": [filters]}]}


def behave(site: Behaviours, name: str) -> str:
    """Run one behaviour. Return how it ended for the client, and the lines of the log."""
    row = BEHAVIOURS[name]
    _said.clear()
    with socket.create_connection(("127.0.0.1", site.ports[name])) as sock:
        sock.settimeout(WAIT_S)
        seen = ""
        if row.tunnel == "ends":
            tunnels = Tunnels(sock)
            with contextlib.suppress(OSError):
                row.client(tunnels)  # type: ignore[arg-type]
            seen = " ".join(tunnels.seen)
        else:
            row.client(sock)
            if sock.fileno() >= 0:
                seen = _read_to_the_end(sock)
    until(lambda: site.log(name).exists() and site.log(name).read_text().count("\n") >= 1)
    lines = site.log(name).read_text().splitlines()
    return "; ".join(filter(None, [seen, *lines]))


def _read_to_the_end(sock: socket.socket) -> str:
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return "reset"
    return "end"


class Tunnels:
    """A client of tunnels: a socket with HTTP/2, and what it saw in words."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.http2 = h2.connection.H2Connection(h2.config.H2Configuration(validate_outbound_headers=False))
        self.http2.initiate_connection()
        self.seen: list[str] = []

    def send(self) -> None:
        self.sock.sendall(self.http2.data_to_send())

    def connect(self, stream: int, *more: tuple[str, str]) -> None:
        self.http2.send_headers(stream, [(":method", "CONNECT"), (":authority", "x:1"), *more])
        self.send()

    def say(self, stream: int, data: bytes, *, ended: bool = False) -> None:
        self.http2.send_data(stream, data, end_stream=ended)
        self.send()

    def until(self, *words: str) -> None:
        """Read until one of these words appears or the connection ends."""
        while not any(word in self.seen for word in words):
            data = self.sock.recv(65536)
            if not data:
                self.seen.append("end")
                return
            for event in self.http2.receive_data(data):
                self._note(event)
            self.send()

    def _note(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                self.seen.append(f"{event.stream_id}:{dict(event.headers)[b':status'].decode()}")
            case h2.events.DataReceived() if event.data:
                self.seen.append(f"{event.stream_id}:{len(event.data)} bytes")
            case h2.events.StreamReset() if f"{event.stream_id}:end" not in self.seen:
                self.seen.append(f"{event.stream_id}:reset")
            case h2.events.StreamEnded():
                self.seen.append(f"{event.stream_id}:end")
            case h2.events.ConnectionTerminated():
                self.seen.append("goaway")


# What applications do


def to_the_end(sock: socket.socket) -> None:
    while sock.recv(4096):
        pass


def echoes(sock: socket.socket) -> None:
    while data := sock.recv(4096):
        sock.sendall(data)


def closes(sock: socket.socket) -> None:
    sock.recv(10)


def resets(sock: socket.socket) -> None:
    sock.recv(10)
    cut(sock)


def resets_after_the_end(sock: socket.socket) -> None:
    to_the_end(sock)
    cut(sock)


def half_closes(sock: socket.socket) -> None:
    sock.recv(10)
    sock.shutdown(socket.SHUT_WR)
    to_the_end(sock)


Then = Callable[[h2.connection.H2Connection, h2.events.Event, socket.socket], object]


def tunnels_then(then: Then, *, answers: bool = True) -> Serve:
    """A server of tunnels: answers 200 if it ``answers``, and asks ``then`` about each event."""

    def serve(sock: socket.socket) -> None:
        http2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        http2.initiate_connection()
        sock.sendall(http2.data_to_send())
        while data := sock.recv(65536):
            for event in http2.receive_data(data):
                if answers and isinstance(event, h2.events.RequestReceived):
                    http2.send_headers(event.stream_id, [(":status", "200")])
                then(http2, event, sock)
            sock.sendall(http2.data_to_send())

    return serve


#: Set once the client of a tunnel has written. A refusal waits for it: closing a socket is a reset to its client
#: only while bytes of it are unread, so that a refusal that came first would look like an end.
_said = threading.Event()


def resets_on(kind: type[h2.events.Event], code: int) -> Then:
    def then(http2: h2.connection.H2Connection, event: h2.events.Event, sock: socket.socket) -> None:
        if isinstance(event, kind):
            _said.wait(WAIT_S)
            http2.reset_stream(event.stream_id, code)  # type: ignore[attr-defined]

    return then


def leaves_on(kind: type[h2.events.Event], leave: Callable[[socket.socket], None]) -> Then:
    def then(http2: h2.connection.H2Connection, event: h2.events.Event, sock: socket.socket) -> None:
        if isinstance(event, kind):
            leave(sock)

    return then


def answers_503(http2: h2.connection.H2Connection, event: h2.events.Event, sock: socket.socket) -> None:
    if isinstance(event, h2.events.RequestReceived):
        _said.wait(WAIT_S)
        http2.send_headers(event.stream_id, [(":status", "503")], end_stream=True)


def nothing(http2: h2.connection.H2Connection, event: h2.events.Event, sock: socket.socket) -> None:
    pass


# What clients do


def says(sock: socket.socket) -> None:
    sock.sendall(b"hi")
    _said.set()


def says_all(sock: socket.socket) -> None:
    sock.sendall(b"hi")
    sock.shutdown(socket.SHUT_WR)
    _said.set()


def says_and_cuts(sock: socket.socket) -> None:
    sock.sendall(b"hi")
    sock.recv(2)
    cut(sock)


def tunnelled(*, ended: bool = False, leave: Callable[[Tunnels], object] = lambda client: None) -> Any:
    """A client that opens one tunnel, sends, and leaves in some way."""

    def client(tunnels: Tunnels) -> None:
        tunnels.connect(1)
        tunnels.until("1:200", "1:503")
        tunnels.say(1, b"hi", ended=ended)
        leave(tunnels)

    return client


def waits_for_its_end(tunnels: Tunnels) -> None:
    tunnels.until("1:end", "1:reset")


def resets_its_stream(tunnels: Tunnels) -> None:
    tunnels.until("1:2 bytes")
    tunnels.http2.reset_stream(1, 8)
    tunnels.send()


def disconnects(tunnels: Tunnels) -> None:
    tunnels.until("1:2 bytes")


def with_a_long_head(size: int, count: int) -> Any:
    """A client whose second request is too long. The first tunnel and a third one must be unaffected."""

    def client(tunnels: Tunnels) -> None:
        tunnels.connect(1)
        tunnels.until("1:200")
        tunnels.connect(3, *[(f"x-{number}", "y" * size) for number in range(count)])
        tunnels.until("3:reset", "3:200", "goaway")
        tunnels.say(1, b"hi")
        tunnels.until("1:2 bytes")
        tunnels.connect(5)
        tunnels.until("5:200")

    return client


DATA, ENDED = h2.events.DataReceived, h2.events.StreamEnded
REQUESTED = h2.events.RequestReceived
TUNNELLING: Json = {"tunneling_config": {"hostname": "x:1"}}
_RUST = "as the Rust ztunnel: NO_ERROR and CANCEL end in order, anything else is a reset (docs/relay.md)"
_WORDS = "the reason is named"


def _begins(
    then: Then, client: Client, envoy: str, ours: str = "", why: str = "", *, answers: bool = True, **more: Any
) -> Behaviour:
    serve = tunnels_then(then, answers=answers)
    settings = {**TUNNELLING, **more}
    return Behaviour(serve=serve, client=client, envoy=envoy, ours=ours, why=why, tunnel="begins", more=settings)


def _ends(serve: Serve, client: Any, envoy: str, ours: str = "", why: str = "") -> Behaviour:
    return Behaviour(serve=serve, client=client, envoy=envoy, ours=ours, why=why, tunnel="ends")


BEHAVIOURS: dict[str, Behaviour] = {
    "tcp, echo and half-close": Behaviour(serve=echoes, client=says_all, envoy="end; - - in=2 out=2"),
    "tcp, application closes": Behaviour(serve=closes, client=says, envoy="end; - - in=2 out=0"),
    "tcp, application half-closes, then the client resets": Behaviour(
        serve=half_closes, client=says_and_cuts, envoy="- - in=2 out=0"
    ),
    "tcp, application resets": Behaviour(serve=resets, client=says, envoy="reset; UR - in=2 out=0"),
    "tcp, application resets after the client's end": Behaviour(
        serve=resets_after_the_end, client=says_all, envoy="reset; UR - in=2 out=0"
    ),
    "tcp, client resets": Behaviour(serve=echoes, client=says_and_cuts, envoy="- - in=2 out=2"),
    "tcp, idle": Behaviour(
        serve=to_the_end, client=says, envoy="end; - - in=2 out=0", more={"idle_timeout": "0.3s"}
    ),
    "tcp, longest duration": Behaviour(
        serve=to_the_end,
        client=says,
        envoy="end; DT - in=2 out=0",
        more={"max_downstream_connection_duration": "0.3s"},
    ),
    "tunnel, far end closes": _begins(leaves_on(DATA, socket.socket.close), says, "end; - - in=2 out=0",
        "reset; UC - in=2 out=0", "what was cut short must not look complete"),
    "tunnel, far end is cut": _begins(leaves_on(DATA, cut), says, "end; - - in=2 out=0",
        "reset; UC - in=2 out=0", "what was cut short must not look complete"),
    "tunnel, far end is cut after the client's end": _begins(leaves_on(ENDED, cut), says_all,
        "end; - - in=2 out=0",
        "reset; UC - in=2 out=0", "what was cut short must not look complete"),
    "tunnel, reset with CONNECT_ERROR": _begins(resets_on(DATA, 10), says, "end; - - in=2 out=0",
        "reset; UR - in=2 out=0", _RUST),
    "tunnel, reset with CONNECT_ERROR after the client's end": _begins(
        resets_on(ENDED, 10), says_all, "end; - - in=2 out=0", "reset; UR - in=2 out=0", _RUST),
    "tunnel, reset with CANCEL": _begins(resets_on(DATA, 8), says, "reset; UR - in=2 out=0",
        "end; - - in=2 out=0", _RUST),
    "tunnel, reset with NO_ERROR": _begins(resets_on(DATA, 0), says, "reset; UR - in=2 out=0",
        "end; - - in=2 out=0", _RUST),
    "tunnel, refused": _begins(answers_503, says, "reset; UF,URX tunnel_response:503 in=0 out=0", answers=False),
    "tunnel, reset before the answer": _begins(resets_on(REQUESTED, 8), says, "reset; UF,URX - in=0 out=0",
        "reset; UF,URX tunnel_failed:_peer_reset_the_stream_(CANCEL) in=0 out=0", _WORDS, answers=False),
    "tunnel, no answer within the idle timeout": _begins(
        nothing, says, "reset; UF - in=0 out=0", answers=False, idle_timeout="0.3s"),
    "tunnel, no answer within the longest duration": _begins(
        nothing, says, "reset; DT,UF - in=0 out=0", "reset; UF,DT - in=0 out=0",
        "flags have one order", answers=False, max_downstream_connection_duration="0.3s"),
    "tunnel, idle": _begins(nothing, says, "end; - - in=2 out=0", idle_timeout="0.3s"),
    "request, echo and half-close": _ends(echoes, tunnelled(ended=True, leave=waits_for_its_end),
        "1:200 1:2 bytes 1:end; 200 - via_upstream in=2 out=2"),
    "request, application closes": _ends(closes, tunnelled(leave=waits_for_its_end),
        "1:200 1:end; 200 - via_upstream in=2 out=0"),
    "request, application resets": _ends(resets, tunnelled(leave=waits_for_its_end),
        "1:200 1:reset; 200 UC upstream_reset_after_response_started{connection_termination} in=2 out=0"),
    "request, application resets after the client's end": _ends(
        resets_after_the_end, tunnelled(ended=True, leave=waits_for_its_end),
        "1:200 1:reset; 200 UC upstream_reset_after_response_started{connection_termination} in=2 out=0"),
    "request, client resets": _ends(echoes, tunnelled(leave=resets_its_stream),
        "1:200 1:2 bytes; 200 DR http2.remote_reset in=2 out=2"),
    "request, client disconnects": _ends(echoes, tunnelled(leave=disconnects),
        "1:200 1:2 bytes; 200 DC downstream_remote_disconnect in=2 out=2"),
    "request, head of 61 KB": _ends(echoes, with_a_long_head(61_000, 1), "1:200 3:200 1:2 bytes 5:200"),
    "request, head of 70 KB": _ends(echoes, with_a_long_head(70_000, 1), "1:200 3:reset 1:2 bytes 5:200"),
    "request, head of 70 fields": _ends(echoes, with_a_long_head(1000, 70), "1:200 3:reset 1:2 bytes 5:200"),
}  # fmt: skip


def _behaviour_cases() -> tuple[Case[Behaviours], ...]:
    def run(name: str) -> Callable[[Behaviours], str]:
        def case(site: Behaviours) -> str:
            seen = behave(site, name)
            # With concurrent tunnels only the client's results have a fixed order.
            return seen.partition(";")[0] if "head of" in name else seen

        return case

    return tuple(
        Case(
            number=f"b{number}",
            stimulus=name + (f" ({row.why})" if row.why else ""),
            run=run(name),
            expected={"envoy": row.envoy, "ours": row.ours or row.envoy},
        )
        for number, (name, row) in enumerate(BEHAVIOURS.items(), 1)
    )


def _refusal_cases() -> tuple[Case[Running], ...]:
    def run(row: Row) -> Callable[[Running], str]:
        return lambda site: accepted(row, site.kind, site.folder)

    return tuple(
        Case(
            number=f"r{number}",
            stimulus=name + (f" ({row.why})" if row.why else ""),
            run=run(row),
            expected={"envoy": word(row.envoy), "ours": word(row.ours)},
        )
        for number, (name, row) in enumerate(ROWS.items(), 1)
    )


BEHAVIOUR_CASES = _behaviour_cases()
REFUSAL_CASES = _refusal_cases()
