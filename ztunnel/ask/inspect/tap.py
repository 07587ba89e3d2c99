"""``ztunnel tap``: writes a packet capture of one pod's traffic, made by its proxy, to a file or a pipe.

Exit status: 0; 2 if the capture cannot start or breaks off.
"""

import argparse
import contextlib
import os
import select
import signal
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import urlencode

import h11

from ztunnel.proxy.tap.request import (
    DROPPED,
    DROPPED_BYTES,
    ENDED,
    MOST_S,
    OPEN,
    PACKETS,
    PATH,
    STREAMS,
    VARIABLE,
    BadRequest,
    TapRequest,
)
from ztunnel.runtime.console.arguments import add_flags
from ztunnel.runtime.settings import plain_reason

DEFAULT_SOCKET: Final = "/run/ztunnel/tap.sock"
_READ_BYTES: Final = 256 * 1024


class TapFailed(Exception):
    """A capture could not start, or it ended early. The text has the reason and a remedy."""


def add_arguments(subparsers: Any) -> None:
    """Add the command to ``argparse``'s sub-commands; ``args.run`` runs it."""
    tap = subparsers.add_parser(
        "tap",
        help="write the decrypted streams of a pod as a capture for Wireshark",
        description="Write the decrypted streams of one pod as pcapng, both directions, for Wireshark and tshark. "
        "This needs root on the node of the pod, and a proxy whose configuration permits it "
        f"({VARIABLE}). It captures only connections that begin while it runs. Interrupt it to end it early.",
        epilog="ztunnel tap default/web --port 8080 -w - | tshark -r -",
    )
    add_flags(
        tap,
        ("pod", "POD", "NAMESPACE/NAME; in Envoy's dialect the pod's address"),
        ("--port", "N", "only connections to this port"),
        ("--peer", "ADDR|NAME",
         "only connections with this address, workload, service or SPIFFE id (Envoy's dialect: address or id)"),
        ("--for", "TIME", f"duration (default 60s, at most {MOST_S:g}s)", {"dest": "duration", "default": "60s"}),
        ("--limit", "SIZE", "size at which the capture ends (default 64MiB, at most 1GiB)", {"default": "64MiB"}),
        ("-w --write", "FILE", "the capture file; - is standard output", {"required": True}),
        ("--socket", "PATH", f"the proxy's socket (default ${VARIABLE}, else {DEFAULT_SOCKET})",
         {"default": os.environ.get(VARIABLE) or DEFAULT_SOCKET}),
    )  # fmt: skip
    tap.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    asked = {"pod": args.pod, "port": args.port, "peer": args.peer, "for": args.duration, "limit": args.limit}
    given = {name: value for name, value in asked.items() if value is not None}
    try:
        request = TapRequest.parse(given)
        with _connected(args.socket) as sock, _interruptible(sock), _output(args.write) as output:
            for line in _captured(sock, args.socket, given, request, output):
                print(f"ztunnel tap: {line}", file=sys.stderr, flush=True)
    except (BadRequest, TapFailed) as error:
        print(f"ztunnel tap: {error}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _connected(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(path)
        except PermissionError:
            raise TapFailed(f"{path}: permission denied; a tap is for root only") from None
        except (FileNotFoundError, ConnectionRefusedError):
            hint = f"is a proxy here, and does its configuration permit taps ({VARIABLE})? --socket names another"
            raise TapFailed(f"{path}: no proxy listens there; {hint}") from None
        except OSError as error:
            raise TapFailed(f"{path}: {error.strerror or error}") from None
        yield sock


@contextlib.contextmanager
def _interruptible(sock: socket.socket) -> Iterator[None]:
    """Let the first interrupt end the tap gracefully, so that its last packets and the trailers still arrive."""

    def interrupted(number: int, frame: object) -> None:
        signal.signal(number, signal.default_int_handler)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    except KeyboardInterrupt:
        raise TapFailed("interrupted twice; the capture is not complete") from None
    finally:
        signal.signal(signal.SIGINT, before)


_STDOUT: Final = 1
_LOOK_S: Final = 0.5


class _Output:
    """The output of a capture. An existing file keeps its content until the first bytes of the new capture arrive.

    It is unbuffered, because another program can follow it, and because the interpreter must not flush into a pipe
    whose reader has closed.
    """

    def __init__(self, descriptor: int, *, is_file: bool) -> None:
        self._descriptor = descriptor
        self._is_file = is_file
        self.written = 0

    def write(self, data: bytes) -> None:
        """Write all bytes.

        Raises:
            OSError: see write(2); BrokenPipeError when the reader has closed the pipe.
        """
        if self._is_file and not self.written:
            os.ftruncate(self._descriptor, 0)
        left = memoryview(data)
        while left:
            size = os.write(self._descriptor, left)
            self.written += size
            left = left[size:]


@contextlib.contextmanager
def _output(name: str) -> Iterator[_Output]:
    """Open the output of the capture: a file that only its owner can read, or standard output."""
    if name == "-":
        if sys.stdout.isatty():
            raise TapFailed("a capture is nothing for a terminal: -w FILE, or pipe it into tshark -r -")
        yield _Output(_STDOUT, is_file=False)
        return
    was_there = os.path.lexists(name)
    try:
        # An existing file keeps its mode, which its owner has chosen.
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TapFailed(f"{name}: {error.strerror or error}") from None
    output = _Output(descriptor, is_file=stat.S_ISREG(os.fstat(descriptor).st_mode))
    try:
        yield output
    finally:
        os.close(descriptor)
        if not was_there and not output.written:
            os.unlink(name)


def _captured(
    sock: socket.socket, path: str, given: dict[str, str], request: TapRequest, output: _Output
) -> Iterator[str]:
    """Write a capture. Yield messages for the user, one line each.

    Raises:
        TapFailed: the capture is refused, or breaks off.
    """
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=64 * 1024)
    size = 0
    try:
        head = h11.Request(method="GET", target=f"{PATH}?{urlencode(given)}", headers=[("host", "localhost")])
        sock.sendall((http.send(head) or b"") + (http.send(h11.EndOfMessage()) or b""))
        response = _event(http, sock)
        if not isinstance(response, h11.Response):
            raise TapFailed(f"{path}: no answer")
        if response.status_code != 200:
            raise TapFailed(_refusal(http, sock).strip() or f"{path}: {response.status_code}")
        number = _fields(response.headers).get(OPEN, "0")
        yield f"{request} for {request.for_s:g}s; {_not_seen(number)}"
        while isinstance(event := _event(http, sock), h11.Data):
            size += len(event.data)
            try:
                output.write(event.data)
            except BrokenPipeError:
                return  # the reader needs no more, like tshark -c 10
    except (OSError, h11.RemoteProtocolError) as error:
        raise TapFailed(f"the capture broke off after {size} bytes: {plain_reason(error)}") from None
    if not isinstance(event, h11.EndOfMessage):
        raise TapFailed(f"the capture broke off after {size} bytes")
    found = _fields(event.headers)
    yield f"{found.get(STREAMS)} connections, {found.get(PACKETS)} packets, {size} bytes; {found.get(ENDED)}"
    if found.get(DROPPED, "0") != "0":
        yield f"{found[DROPPED]} packets with {found.get(DROPPED_BYTES)} bytes are missing: this end was too slow"


def _not_seen(number: str) -> str:
    if number == "0":
        return "no connection is open yet"
    return f"{number} connection{'s are' if number != '1' else ' is'} open already and will not be seen"


def _event(http: h11.Connection, sock: socket.socket) -> Any:
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(_received(sock))
    return event


def _received(sock: socket.socket) -> bytes:
    """Return the next bytes. An interrupt is handled within half a second, because this polls.

    A signal just before recv(2) does not interrupt that call, so a blocking tap would run until the next packet.
    """
    while not select.select((sock,), (), (), _LOOK_S)[0]:
        pass
    return sock.recv(_READ_BYTES)


def _refusal(http: h11.Connection, sock: socket.socket) -> str:
    text = b""
    while isinstance(event := _event(http, sock), h11.Data):
        text += event.data
    return text.decode(errors="replace")


def _fields(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}
