"""A client of a tunnel server as frames over TLS: blocking, one thread, and without any checks of its own."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hpack import Encoder

from hbone import frames
from hbone.errors import ErrorCode
from hbone.frames import frame

_PIECE = 64 * 1024
_WAIT_S = 10.0


class Ended(Exception):
    """The server has ended the connection, or the time is up."""


class Wire:
    """One connection.

    Attributes:
        goaway: the code of the last GOAWAY; None: there was none.
        credit: the bytes that can be sent, by stream; 0 is the connection.
        next_stream: number of the next stream.
        answers: statuses of answers (as their encoded blocks), and ``RST`` with its code.
        received: payload by stream.
        returns_credit: windows and PINGs are answered, as by an honest client.
    """

    def __init__(self, port: int, folder: Path, name: str, until_s: float, *, window: int = 1 << 20) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(folder / "root.pem")
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
        context.set_alpn_protocols(["h2"])
        self.until_s = until_s
        self.goaway: int | None = None
        self.sent = 0
        self.initial = 65_535
        self.credit: dict[int, int] = {0: 65_535}
        self.received: Counter[int] = Counter()
        self.answers: Counter[str] = Counter()
        self.ended: set[int] = set()
        self.answered: set[int] = set()
        self._rest = b""
        self._answers = b""  # sent between frames: what :meth:`send` sends can end in the middle of one
        self.next_stream = 1
        self.returns_credit = True
        sock = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = context.wrap_socket(sock)
        self.sock.setblocking(False)
        settings = frames.settings_frame({frames.Setting.INITIAL_WINDOW_SIZE: window})
        self.send(frames.PREFACE + settings + frame(frames.WINDOW_UPDATE, 0, 0, frames.U32.pack(1 << 24)))

    # Frames

    def connect(self, authority: str = "refused:1", *, ended: bool = False) -> tuple[int, bytes]:
        """Return the next stream's number and its CONNECT."""
        stream_id, self.next_stream = self.next_stream, self.next_stream + 2
        block = Encoder().encode([(b":method", b"CONNECT"), (b":authority", authority.encode())])
        self.credit[stream_id] = self.initial
        flags = frames.END_HEADERS | (frames.END_STREAM if ended else 0)
        return stream_id, frame(frames.HEADERS, flags, stream_id, block)

    def open(self, authority: str) -> int:
        """Open a tunnel and wait for its answer."""
        stream_id, head = self.connect(authority)
        self.send(head)
        self.wait(lambda: stream_id in self.answered)
        return stream_id

    # Bytes

    def send(self, data: bytes) -> None:
        """Send all of it, reading meanwhile.

        Raises:
            Ended: see there.
        """
        view, self._answers = memoryview(self._answers + data), b""
        while view:
            self.poll()
            try:
                sent = self.sock.send(view[:_PIECE])
            except ssl.SSLWantWriteError:
                self._idle(writes=True)
            except ssl.SSLWantReadError:
                self._idle(writes=False)
            except OSError as error:
                self._drain()
                raise Ended(f"{error}, GOAWAY {self.goaway}") from error
            else:
                self.sent += sent
                view = view[sent:]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Read until ``condition()`` holds.

        Raises:
            Ended: see there.
        """
        while not condition():
            if self._answers:
                self.send(b"")
            elif not self.poll():
                self._idle(writes=False)

    def poll(self) -> bool:
        """Read available frames. Return whether there were any.

        Raises:
            Ended: the connection has ended.
        """
        if time.monotonic() > self.until_s:
            raise Ended("the time is up")
        try:
            data = self.sock.recv(1 << 20)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            raise Ended(f"{error}, GOAWAY {self.goaway}") from error
        if not data:
            raise Ended(f"end of the bytes, GOAWAY {self.goaway}")
        self._take(data)
        return True

    def _idle(self, *, writes: bool) -> None:
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise Ended("the time is up")
        select.select([self.sock], [self.sock] if writes else [], [], min(left_s, 0.05))

    def _drain(self) -> None:
        """Read the frames sent before the end, which include the GOAWAY."""
        try:
            while data := self.sock.recv(1 << 20):
                self._take(data)
        except OSError:
            pass

    def _take(self, data: bytes) -> None:
        data = self._rest + data
        position, end = 0, len(data)
        while end - position >= frames.HEADER_BYTES:
            high, low, kind, flags, stream_id = frames.HEADER.unpack_from(data, position)
            start = position + frames.HEADER_BYTES
            size = high << 8 | low
            if end - start < size:
                break
            self._frame(kind, flags, stream_id, data[start : start + size])
            position = start + size
        self._rest = data[position:]

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.WINDOW_UPDATE:
            self.credit[stream_id] = self.credit.get(stream_id, 0) + frames.U32.unpack(payload)[0]
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            for key, value in frames.SETTING.iter_unpack(payload):
                if key == frames.Setting.INITIAL_WINDOW_SIZE:
                    for each in self.credit:
                        if each:
                            self.credit[each] += value - self.initial
                    self.initial = value
        elif kind == frames.HEADERS:
            self.answered.add(stream_id)
            self.answers["200" if payload[:1] == b"\x88" or b"200" in payload else "refused"] += 1
        elif kind == frames.DATA:
            self.received[stream_id] += len(payload)
            if self.returns_credit and payload:
                grant = frames.U32.pack(len(payload))
                self._answers += frame(frames.WINDOW_UPDATE, 0, 0, grant)
                self._answers += frame(frames.WINDOW_UPDATE, 0, stream_id, grant)
        elif kind == frames.PING and not flags & frames.ACK:
            if self.returns_credit:  # otherwise the server closes the connection after a while
                self._answers += frame(frames.PING, frames.ACK, 0, payload)
        elif kind == frames.RST_STREAM:
            self.ended.add(stream_id)
            self.answered.add(stream_id)
            self.answers[f"RST {ErrorCode(frames.U32.unpack(payload)[0]).name}"] += 1
        elif kind == frames.GOAWAY:
            self.goaway = frames.TWO_U32.unpack_from(payload)[1]

    def close(self) -> None:
        """Close at once."""
        self.sock.close()
