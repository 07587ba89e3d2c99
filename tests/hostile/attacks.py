"""The attackers: scripts of one connection, begun anew when the server has ended it, and storms of many."""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path

import dns.message
from hpack import Encoder

from hbone import frames
from hbone.errors import ErrorCode
from hbone.frames import frame
from tests.hostile.target import ATTACKER, Target
from tests.hostile.wire import Ended, Wire

FAILED_PROBE = "probe failed"
_SPAWN = multiprocessing.get_context("spawn")
_HEAD = [(b":method", b"CONNECT"), (b":authority", b"refused:1")]
Script = Callable[[Wire], Iterator[bytes]]
Storm = Callable[[Target, float, "Seen"], None]


@dataclass(slots=True)
class Seen:
    """The results of an attacker: connections begun, bytes sent, how connections ended, answers."""

    connections: int = 0
    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)

    def told(self) -> str:
        """The ends of connections as text."""
        return ", ".join(f"{end} x{count}" for end, count in self.ends.most_common(3)) or "-"


@dataclass(frozen=True, slots=True)
class Attack:
    """One row of a table.

    Attributes:
        row: of the list of attacks.
        name: in the table.
        script: yields bytes to send.
        storm: instead of a script, attacks until a time by itself.
        ours_only: Envoy has no such port.
        files: descriptors that the server may have.
        calm: the server must end it with ENHANCE_YOUR_CALM.
        connections: at once.
        most_growth: of the server's memory, in bytes.
        window: of each stream of ours.
    """

    row: str
    name: str
    script: Script | None = None
    calm: bool = True
    connections: int = 1
    most_growth: int = 20 << 20
    window: int = 1 << 20
    storm: Storm | None = None
    ours_only: bool = False
    files: int | None = None


# What is dear to read


def inserts(wire: Wire) -> Iterator[bytes]:
    """Each field is an insert into the dynamic table; the requests are refused."""
    block = Encoder().encode(_HEAD) + b"\x40\x01a\x00" * 1700
    while True:
        yield _headers(wire, block)


def huffman(wire: Wire) -> Iterator[bytes]:
    """Values of 60 kB in Huffman codes."""
    value = Encoder().encode([(b"x", b"0" * 59_000)])
    while True:
        yield _headers(wire, Encoder().encode(_HEAD) + value)


def one_byte(wire: Wire) -> Iterator[bytes]:
    """Send DATA frames of one byte each."""
    stream_id = wire.open("sink:1")
    yield from _data(wire, stream_id, frame(frames.DATA, 0, stream_id, b"x"), 1)


def padded(wire: Wire) -> Iterator[bytes]:
    """Send DATA frames of one byte and five bytes of padding."""
    stream_id = wire.open("sink:1")
    yield from _data(wire, stream_id, frame(frames.DATA, frames.PADDED, stream_id, b"\x05x" + bytes(5)), 7)


def settings(wire: Wire) -> Iterator[bytes]:
    """682 values for the window of 199 streams in each SETTINGS."""
    for _ in range(199):
        wire.open("sink:1")
    entries = b"".join(frames.SETTING.pack(4, 65_535 + number) for number in range(682))
    while True:
        yield frame(frames.SETTINGS, 0, 0, entries)


def data_on_reset(wire: Wire) -> Iterator[bytes]:
    """DATA for a stream that the server was made to reset."""
    stream_id = wire.open("sink:1")
    yield frame(frames.HEADERS, frames.END_HEADERS, stream_id, Encoder().encode(_HEAD))
    wire.wait(lambda: stream_id in wire.ended)
    piece = frame(frames.DATA, 0, stream_id, b"x") * 1000
    while True:
        if wire.credit[0] < 1000:
            wire.wait(lambda: wire.credit[0] >= 1000)
        wire.credit[0] -= 1000
        yield piece


def refused(wire: Wire) -> Iterator[bytes]:
    """CONNECTs with END_STREAM that are refused."""
    while True:
        yield b"".join(wire.connect(ended=True)[1] for _ in range(50))
        wire.wait(lambda: len(wire.answered) * 2 + 300 > wire.next_stream)  # below the stream limit


def opened_and_reset(wire: Wire) -> Iterator[bytes]:
    """CONNECT, 200, RST_STREAM."""
    while True:
        streams = []
        heads = b""
        for _ in range(20):
            stream_id, head = wire.connect("sink:1")
            streams.append(stream_id)
            heads += head
        yield heads
        wire.wait(lambda streams=streams: wire.answered.issuperset(streams))
        yield b"".join(frame(frames.RST_STREAM, 0, each, frames.U32.pack(8)) for each in streams)


# Floods


def rapid_reset(wire: Wire) -> Iterator[bytes]:
    """Send HEADERS and RST_STREAM in one write."""
    while True:
        piece = b""
        for _ in range(100):
            stream_id, head = wire.connect("sink:1")
            piece += head + frame(frames.RST_STREAM, 0, stream_id, frames.U32.pack(8))
        yield piece


def made_you_reset(wire: Wire) -> Iterator[bytes]:
    """Streams that the server must reset: WINDOW_UPDATE of 0."""
    while True:
        piece = b""
        for _ in range(100):
            stream_id, head = wire.connect("sink:1")
            piece += head + frame(frames.WINDOW_UPDATE, 0, stream_id, bytes(4))
        yield piece


def continuation(wire: Wire) -> Iterator[bytes]:
    """A header block without end."""
    stream_id, _ = wire.connect()
    yield frame(frames.HEADERS, 0, stream_id, Encoder().encode(_HEAD))
    while True:
        yield frame(frames.CONTINUATION, 0, stream_id, b"\x00\x01a\x01b" * 1000)


def pings(wire: Wire) -> Iterator[bytes]:
    """PINGs."""
    while True:
        yield frame(frames.PING, 0, 0, bytes(8)) * 1000


def empty_settings(wire: Wire) -> Iterator[bytes]:
    """SETTINGS without values."""
    while True:
        yield frame(frames.SETTINGS, 0, 0) * 1000


def empty_data(wire: Wire) -> Iterator[bytes]:
    """DATA of no byte."""
    stream_id = wire.open("sink:1")
    while True:
        yield frame(frames.DATA, 0, stream_id) * 1000


def window_updates(wire: Wire) -> Iterator[bytes]:
    """Send WINDOW_UPDATE frames that grant one byte."""
    while True:
        yield frame(frames.WINDOW_UPDATE, 0, 0, frames.U32.pack(1)) * 1000


# Memory


def unread(wire: Wire) -> Iterator[bytes]:
    """200 streams to applications that do not read, each filled."""
    streams = [wire.open("unread:1") for _ in range(100)]
    while True:
        moved = False
        for stream_id in streams:
            size = min(wire.credit[0], wire.credit[stream_id], 16_384)
            if size > 0:
                moved = True
                wire.credit[0] -= size
                wire.credit[stream_id] -= size
                yield frame(frames.DATA, 0, stream_id, bytes(size))
        if not moved:
            before = sum(wire.credit.values())
            wire.wait(lambda before=before: sum(wire.credit.values()) > before)


def zero_window(wire: Wire) -> Iterator[bytes]:
    """Streams from applications that send without end, with a window that stays shut."""
    wire.returns_credit = False
    for _ in range(199):
        wire.open("speaks:1")
    while True:
        wire.wait(lambda: False)
        yield b""


def drip(wire: Wire) -> Iterator[bytes]:
    """A header block, a byte at a time."""
    wire.returns_credit = False  # an answer would land inside the frame
    head = wire.connect()[1]
    for number in range(len(head) - 1):
        yield head[number : number + 1]
        wire.wait(_after(time.monotonic() + 0.02))
    while True:
        wire.wait(lambda: False)
        yield b""


# Noisy neighbours


def bulk(wire: Wire) -> Iterator[bytes]:
    """Send as much as the window allows, all the time."""
    stream_id = wire.open("sink:1")
    while True:
        size = min(wire.credit[0], wire.credit[stream_id], 16_384)
        if size <= 0:
            before = wire.credit[0] + wire.credit[stream_id]
            wire.wait(lambda before=before: wire.credit[0] + wire.credit[stream_id] > before)
            continue
        wire.credit[0] -= size
        wire.credit[stream_id] -= size
        yield frame(frames.DATA, 0, stream_id, bytes(size))


def comes_and_goes(wire: Wire) -> Iterator[bytes]:
    """A whole handshake, a tunnel, and another connection."""
    wire.open("echo:1")
    yield b""


def _half_open(first: bytes, *, most: int, per_s: float, readiness: bool = False) -> Storm:
    """Open ``per_s`` connections a second that send ``first`` and stop; keep the newest ``most`` open."""

    def storm(target: Target, until_s: float, seen: Seen) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        held: deque[socket.socket] = deque()
        due_s = probe_s = time.monotonic()
        while (now_s := time.monotonic()) < until_s:
            sock = socket.socket()
            sock.settimeout(2.0)
            with suppress(OSError):
                sock.connect(("127.0.0.1", target.port))
                sock.sendall(first)
                seen.connections += 1
                seen.sent += len(first)
            held.append(sock)
            if len(held) > most:
                held.popleft().close()
            if readiness and target.pages_port and now_s >= probe_s:
                probe_s = now_s + 0.5
                _probe(target, seen)
            due_s = max(due_s + 1 / per_s, now_s - 0.1)
            time.sleep(max(0.0, due_s - now_s))  # the attack has a rate
        for sock in held:
            sock.setblocking(False)
            try:
                while sock.recv(65_536):
                    pass
                seen.ends["closed"] += 1
            except BlockingIOError:
                seen.ends["open"] += 1
            except OSError:
                seen.ends["closed"] += 1
            sock.close()

    return storm


def slow_clients(target: Target, until_s: float, seen: Seen) -> None:
    """70 clients of the pages with half a request each, and probes beside them."""
    held: list[socket.socket] = []
    while time.monotonic() < until_s:
        while len(held) < 70:
            held.append(socket.create_connection(("127.0.0.1", target.pages_port)))
            held[-1].sendall(b"GET /healthz/ready HTT")
            seen.connections += 1
        _probe(target, seen)
        gone = [sock for sock in held if _is_over(sock)]
        for sock in gone:
            held.remove(sock)
            sock.close()
        time.sleep(0.05)  # probes come some twenty times a second, as from several kubelets
    for sock in held:
        sock.close()


def queries(target: Target, until_s: float, seen: Seen) -> None:
    """Send queries for a name of the mesh without a pause, and malformed responses."""
    query = dns.message.make_query("cart.shop.svc.cluster.local", "A").to_wire()
    response = query[:2] + b"\x80" + query[3:]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        while time.monotonic() < until_s:
            for _ in range(50):
                with suppress(OSError):
                    seen.sent += sock.sendto(query, ("127.0.0.1", target.dns_port))
                    sock.sendto(response, ("127.0.0.1", target.dns_port))
            with suppress(OSError):
                while sock.recv(4096):
                    seen.answers["answer"] += 1
    seen.connections = 1


def pushes(target: Target, until_s: float, seen: Seen) -> None:
    """A control plane that sends 20,000 services, again and again."""
    while time.monotonic() < until_s:
        _get(target, "/push")
        seen.connections += 1
        time.sleep(0.2)  # between two pushes, as a control plane debounces


def _get(target: Target, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", target.pages_port), timeout=1.0) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".encode())
        return sock.recv(100)


def _probe(target: Target, seen: Seen) -> None:
    """Ask for readiness as a kubelet does, which waits a second."""
    try:
        seen.answers["probed" if _get(target, "/healthz/ready").startswith(b"HTTP/1.1 ") else FAILED_PROBE] += 1
    except OSError:
        seen.answers[FAILED_PROBE] += 1


def _is_over(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(100)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    outgoing = ssl.MemoryBIO()
    session = context.wrap_bio(ssl.MemoryBIO(), outgoing)
    with suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


HELLO = _client_hello()


def _after(moment_s: float) -> Callable[[], bool]:
    return lambda: time.monotonic() >= moment_s


ATTACKS: tuple[Attack, ...] = (
    Attack("47", "HPACK inserts, refused", inserts),
    Attack("47", "60 kB Huffman values", huffman),
    Attack("47", "DATA of 1 byte", one_byte),
    Attack("47", "padded DATA of 1 byte", padded),
    Attack("47", "SETTINGS x 682 on 199 streams", settings),
    Attack("47", "DATA on streams we reset", data_on_reset),
    Attack("47", "refused CONNECTs", refused),
    Attack("47", "CONNECT, 200, RST", opened_and_reset),
    Attack("7, 58", "rapid reset", rapid_reset),
    Attack("7", "MadeYouReset", made_you_reset),
    Attack("8", "CONTINUATION flood", continuation),
    Attack("9", "PING flood", pings),
    Attack("9", "SETTINGS flood", empty_settings),
    Attack("9", "empty DATA flood", empty_data),
    Attack("9", "WINDOW_UPDATE flood", window_updates),
    Attack("11", "zero window, 199 streams", zero_window, calm=False, most_growth=20 << 20, window=65_535),
    Attack("12", "dripped headers", drip, calm=False, connections=5),
    Attack("52", "20 connections, unread", unread, calm=False, connections=20, most_growth=96 << 20),
    Attack("49", "half-open, no byte, 2,000/s", calm=False, storm=_half_open(b"", most=5000, per_s=2000)),
    Attack("49", "half-open, ClientHello, 1,325/s", calm=False, storm=_half_open(HELLO, most=5000, per_s=1325)),
    Attack(
        "31, 50", "900 half-open, 512 descriptors", calm=False, files=512,
        storm=_half_open(b"", most=900, per_s=1000, readiness=True),
    ),
    Attack("51", "70 slow clients of pages", calm=False, storm=slow_clients, ours_only=True),
    Attack("34", "noisy: bulk", bulk, calm=False, connections=2, most_growth=64 << 20),
    Attack("29", "noisy: connection storm", comes_and_goes, calm=False, connections=4),
    Attack("34", "noisy: handshake storm", calm=False, storm=_half_open(HELLO, most=20, per_s=5000)),
    Attack("54", "noisy: DNS flood", calm=False, storm=queries, ours_only=True),
    Attack("33", "noisy: 100 slow readers", unread, calm=False, most_growth=40 << 20),
    Attack("25", "noisy: 20,000 services pushed", calm=False, storm=pushes, ours_only=True, most_growth=160 << 20),
)  # fmt: skip


def _headers(wire: Wire, block: bytes) -> bytes:
    stream_id, _ = wire.connect()
    first, rest = block[:16_384], block[16_384:]
    data = frame(frames.HEADERS, 0 if rest else frames.END_HEADERS, stream_id, first)
    while rest:
        part, rest = rest[:16_384], rest[16_384:]
        data += frame(frames.CONTINUATION, 0 if rest else frames.END_HEADERS, stream_id, part)
    return data + frame(frames.DATA, frames.END_STREAM, stream_id)


def _data(wire: Wire, stream_id: int, piece: bytes, cost: int) -> Iterator[bytes]:
    while True:
        number = min(wire.credit[0], wire.credit[stream_id]) // cost
        if not number:
            before = wire.credit[0] + wire.credit[stream_id]
            wire.wait(lambda before=before: wire.credit[0] + wire.credit[stream_id] > before)
            continue
        number = min(number, 4000)
        wire.credit[0] -= number * cost
        wire.credit[stream_id] -= number * cost
        yield piece * number


def run(attack: Attack, target: Target, seconds: float) -> Queue[Seen]:
    """Start an attack in its own process. When it is over, the process puts the results into the queue."""
    queue: Queue[Seen] = _SPAWN.Queue()
    arguments = (ATTACKS.index(attack), target, time.monotonic() + seconds, queue)
    _SPAWN.Process(target=_play, args=arguments, daemon=True).start()
    return queue


def _play(number: int, target: Target, until_s: float, queue: Queue[Seen]) -> None:
    attack, seen = ATTACKS[number], Seen()
    if not target.fair:
        # What is measured is what the server takes from its other clients, not what the attacker takes from all
        # processes of a small machine.
        os.nice(19)

    if attack.storm is not None:
        attack.storm(target, until_s, seen)
        queue.put(seen)
        return

    def again() -> None:
        while time.monotonic() < until_s:
            _one(attack, target.port, target.folder, until_s, seen)

    threads = [threading.Thread(target=again) for _ in range(attack.connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.put(seen)


def _one(attack: Attack, port: int, folder: Path, until_s: float, seen: Seen) -> None:
    wire = None
    try:
        wire = Wire(port, folder, ATTACKER, until_s, window=attack.window)
        seen.connections += 1
        assert attack.script is not None
        for piece in attack.script(wire):
            wire.send(piece)
    except (Ended, OSError, ssl.SSLError):
        pass
    finally:
        if wire is not None:
            _note(wire, until_s, seen)
            wire.close()


def _note(wire: Wire, until_s: float, seen: Seen) -> None:
    seen.sent += wire.sent
    seen.answers.update(wire.answers)
    if wire.goaway is not None:
        seen.ends[ErrorCode(wire.goaway).name] += 1
    elif time.monotonic() >= until_s:
        seen.ends["open"] += 1
    else:
        seen.ends["closed"] += 1


def reset_handshakes(target: Target, count: int) -> None:
    """Send a ClientHello and a RST right behind it, ``count`` times (row 9 of the faults seen)."""
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", target.port)) as sock:
            sock.sendall(HELLO)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
