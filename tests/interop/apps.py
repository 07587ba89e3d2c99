"""Applications of pods, and the clients that talk to them: blocking sockets, one thread per connection.

Port 9080 speaks HTTP/1.1 and says which pod answered and whom it sees. Port 9000 takes one line that says what
to do with the rest of the connection:

===================  =======================================================================
``echo``             sends back what comes; ends when the client has ended
``sum``              reads to the end, then says ``<bytes> <sha256>``: the client ends first
``send <n> [<key>]`` sends ``n`` bytes of :func:`pattern` and ends, then reads to the client's end; what came
                     is in :attr:`Apps.endings` under the key
``keep``             sends a byte each 100 ms, also after the client has ended
``reset``            resets the connection
``ended <key>``      as ``echo``; how it ended is in :attr:`Apps.endings` under the key
===================  =======================================================================

Port 9001 speaks first: a banner, then as ``echo``.
"""

import contextlib
import hashlib
import itertools
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Self

from deploy.lab import Place
from xds.model.address import canonical

HTTP, COMMAND, BANNER = 9080, 9000, 9001
WAIT_S = 10.0
GREETING = b"220 ready\r\n"
_BLOCK = bytes(range(256)) * 1024
_CHUNK = 1 << 18
_ports = itertools.cycle(range(16384, 32768))
"""Of clients, below the kernel's own choice: access logs are searched by them, so none may come twice soon."""


class Apps:
    """The applications of some pods.

    Attributes:
        endings: how connections of the command ``ended`` went: ``fin`` or ``reset``.
    """

    def __init__(self, pods: dict[str, Place]) -> None:
        self._pods = pods
        self._stack = contextlib.ExitStack()
        self._closing = threading.Event()
        self.endings: dict[str, str] = {}
        self._ended = threading.Condition()

    def __enter__(self) -> Self:
        for name, place in self._pods.items():
            for port, serve in ((HTTP, self._http), (COMMAND, self._command), (BANNER, self._banner)):
                self._serve(name, place, port, serve)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._stack.close()

    def ending(self, key: str) -> str:
        """Wait for the end of the connection with this key; return how it ended."""
        with self._ended:
            self._ended.wait_for(lambda: key in self.endings, WAIT_S)
            return self.endings.get(key, "still open")

    def _serve(self, name: str, place: Place, port: int, serve: Callable[[str, socket.socket], None]) -> None:
        listener = place.socket(socket.AF_INET6)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", port))
        listener.listen(512)

        def one(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                serve(name, sock)

        def accept() -> None:
            while not self._closing.is_set():
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=one, args=(sock,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()

        def stop() -> None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            listener.close()

        self._stack.callback(stop)

    @staticmethod
    def _http(name: str, sock: socket.socket) -> None:
        with sock.makefile("rb") as reader:
            while len((line := reader.readline()).split()) == 3:
                while reader.readline().strip():
                    pass
                body = json.dumps(
                    {
                        "pod": name,
                        "peer": canonical(sock.getpeername()[0]),
                        "path": line.split()[1].decode("latin-1"),
                    }
                )
                head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                sock.sendall((head + body).encode())

    def _command(self, name: str, sock: socket.socket) -> None:
        line = b""
        while not line.endswith(b"\n"):
            more = sock.recv(1)
            if not more:
                return
            line += more
        words = line.split()
        match words[0]:
            case b"echo":
                _echo(sock)
            case b"sum":
                sock.sendall("{} {}\n".format(*digest(sock)).encode())
            case b"send":
                for block in pattern(int(words[1])):
                    sock.sendall(block)
                sock.shutdown(socket.SHUT_WR)
                after = digest(sock)
                if len(words) > 2:
                    self._ended_as(words[2].decode(), str(after))
            case b"keep":
                while not self._closing.wait(0.1):
                    sock.sendall(b".")
            case b"reset":
                reset(sock)
            case b"ended":
                self._note(words[1].decode(), sock)

    def _note(self, key: str, sock: socket.socket) -> None:
        try:
            _echo(sock)
            how = "fin"
        except ConnectionError:
            how = "reset"
        self._ended_as(key, how)

    def _ended_as(self, key: str, how: str) -> None:
        with self._ended:
            self.endings[key] = how
            self._ended.notify_all()

    @staticmethod
    def _banner(name: str, sock: socket.socket) -> None:
        sock.sendall(GREETING)
        _echo(sock)


def pattern(length: int) -> Iterator[memoryview]:
    """``length`` bytes that differ at every multiple of 256 KiB, so that a lost or repeated block shows."""
    sent = 0
    number = 0
    while sent < length:
        block = bytearray(_BLOCK)
        struct.pack_into("!Q", block, 0, number)
        part = memoryview(block)[: min(len(block), length - sent)]
        yield part
        sent += len(part)
        number += 1


def pattern_digest(length: int) -> str:
    """Return the SHA-256 digest of what :func:`pattern` returns."""
    state = hashlib.sha256()
    for block in pattern(length):
        state.update(block)
    return state.hexdigest()


def digest(sock: socket.socket) -> tuple[int, str]:
    """Read to the end: how many bytes, and their SHA-256."""
    state, total = hashlib.sha256(), 0
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    while size := sock.recv_into(buffer):
        state.update(view[:size])
        total += size
    return total, state.hexdigest()


def reset(sock: socket.socket) -> None:
    """Close with RST (SO_LINGER of no time)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def _echo(sock: socket.socket) -> None:
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    while size := sock.recv_into(buffer):
        sock.sendall(view[:size])


# Clients


def dial(
    place: Place, address: str, port: int, timeout_s: float = WAIT_S, *, own_port: int | None = None
) -> socket.socket:
    """Return a connection from a pod. The caller closes it."""
    sock = place.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    sock.settimeout(timeout_s)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", own_port if own_port is not None else next(_ports)))
        sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return sock


def rest(sock: socket.socket) -> str:
    """Read to the end; return the data and how the connection ended, as ``b"..." fin``."""
    data = b""
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionError:
        return f"{data.decode()} reset".strip()
    except TimeoutError:
        return f"{data.decode()} still open".strip()
    return f"{data.decode()} closed".strip()


class Reply:
    """An application's HTTP response, or the reason for its absence.

    Attributes:
        status: as text; ``closed``, ``reset`` or ``still open`` without an answer.
        pod, peer: the application that answered, and the client's address as it saw it.
        port: the client's port, to find the connection in access logs.
    """

    def __init__(self, status: str, pod: str, peer: str, port: int) -> None:
        self.status = status
        self.pod = pod
        self.peer = peer
        self.port = port


def get(place: Place, address: str, port: int = HTTP, timeout_s: float = WAIT_S) -> Reply:
    """Send one request on a new connection."""
    own = next(_ports)
    try:
        sock = dial(place, address, port, timeout_s, own_port=own)
    except ConnectionRefusedError:
        return Reply("refused", "", "", own)
    except ConnectionResetError:
        return Reply("reset", "", "", own)  # before we looked
    except TimeoutError:
        return Reply("timeout", "", "", own)
    with sock:
        try:
            sock.sendall(b"GET / HTTP/1.1\r\nhost: app\r\n\r\n")
            with sock.makefile("rb") as reader:
                line = reader.readline()
                if not line:
                    return Reply("closed", "", "", own)
                length = 0
                while header := reader.readline().strip().lower():
                    if header.startswith(b"content-length:"):
                        length = int(header.partition(b":")[2])
                body = json.loads(reader.read(length))
        except ConnectionError:
            return Reply("reset", "", "", own)
        except TimeoutError:
            return Reply("still open", "", "", own)
    return Reply(line.split()[1].decode(), body["pod"], body["peer"], own)
