"""Reads and writes bytes on a socket, with TLS or without, for HTTP/2 connections and TLS relay ends."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios

from hbone.aio.poller import BULK_BYTES, Poller
from hbone.errors import ConnectionBroken, HboneError, TlsError
from hbone.output import BUFFER_BYTES
from hbone.tls import TlsStream

_MOST_OVERHEAD = 2 * 16_384  # an incomplete record, and some margin


class LinkClosed(Exception):
    """The remote side ended the byte stream, with close_notify (``notified``) or only with a FIN."""

    def __init__(self, *, notified: bool) -> None:
        super().__init__(notified)
        self.notified = notified


def network_error(error: Exception, when: str) -> HboneError:
    """Convert an error of a :class:`Link` to the error that its connection reports. ``when`` is appended to the
    text.
    """
    if isinstance(error, HboneError):
        return error
    what = "peer closed the connection" if isinstance(error, LinkClosed) else f"network failed: {error}"
    return ConnectionBroken(f"{what} {when}".rstrip())


class Link:
    """Owns the socket. It reads into the poller's scratch buffers, and stores output only while the network
    accepts no more.
    """

    __slots__ = (
        "_hung_up",
        "_most",
        "_unsent",
        "held",
        "overhead",
        "poller",
        "read_bytes",
        "readable",
        "sock",
        "tls",
    )

    def __init__(self, sock: socket.SocketType, tls: TlsStream | None, poller: Poller) -> None:
        self.sock = sock
        self.tls = tls
        self.poller = poller
        self.readable = True
        """Whether the socket can have bytes to read. If not, it is empty until the next event."""
        self.overhead = 0
        """The TLS overhead of the last read in octets, or 0 if it is at most an eighth of the payload."""
        self.read_bytes = 0
        """The number of bytes read until now."""
        self.held = False
        """Whether all output is kept unsent, because another process is about to take over the connection."""
        self._hung_up = False
        self._most = BUFFER_BYTES
        self._unsent = bytearray()

    @property
    def blocked(self) -> bool:
        """Whether some output still waits for the network, so that no more should be produced now."""
        return bool(self._unsent)

    @property
    def unsent_bytes(self) -> int:
        """The number of output bytes that wait for the network."""
        return len(self._unsent)

    @property
    def in_flight(self) -> int:
        """The number of output bytes still waiting for the network, or not acknowledged by the remote kernel.

        Closing the socket can destroy such bytes: the kernel answers bytes that arrive for a closed socket, such
        as a WINDOW_UPDATE, with a reset.
        """
        try:
            queued = fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, bytes(4))  # SIOCOUTQ of tcp(7)
        except (OSError, ValueError):
            return 0  # the connection has ended, or its socket is closed
        return len(self._unsent) + int(struct.unpack("i", queued)[0])

    def hang_up_seen(self) -> None:
        """Record that the poller has reported the end of the byte stream. From now on, a short read does not mean
        that the socket is empty.
        """
        self._hung_up = True

    def receive_raw(self, into: memoryview) -> int:
        """Read from the socket once. Return the number of bytes, 0 if none have arrived.

        Raises:
            LinkClosed: EOF.
            OSError: the network failed.
        """
        try:
            size = self.sock.recv_into(into)
        except BlockingIOError:
            self.readable = False
            return 0
        if not size:
            raise LinkClosed(notified=False)
        self.poller.read_bytes += size
        self.read_bytes += size
        # After a short read, a stream socket is empty, so another read, which would fail with EAGAIN, is omitted
        # (epoll(7)). But if the end was already reported, epoll reports no further edge, so the socket must be
        # read until EOF.
        if size < len(into) and not self._hung_up:
            self.readable = False
        return size

    def receive(self) -> memoryview | None:
        """Read once and decrypt. The view is valid until the next read and can be empty. Return None if no bytes
        have arrived.

        Raises:
            LinkClosed: EOF or close_notify.
            TlsError: a bad record, or an alert.
            OSError: the network failed.
        """
        poller, tls = self.poller, self.tls
        plain = poller.plaintext
        if tls is None:
            size = self.receive_raw(plain[: self._most])
            return plain[:size] if size else None
        if tls.peer_closed:
            raise LinkClosed(notified=True)
        size = self.receive_raw(poller.ciphertext[: self._most])
        if not size:
            return None
        tls.receive(poller.ciphertext[:size])
        overhead, size = size, self._decrypt(tls, plain)
        # Many records of a few bytes are expensive to decrypt, so their overhead is charged. The overhead of a
        # single record that is split over two reads does not count.
        overhead -= size
        self.overhead = overhead if overhead > _MOST_OVERHEAD and overhead > size >> 3 else 0
        if tls.peer_closed:
            # A close_notify alert was in the bytes just read. Read again to process the alert, because a further
            # event is not certain: some peers send their FIN only after our close_notify.
            self.readable = True
        return plain[:size]

    def receive_missing(self) -> memoryview | None:
        """Read and decrypt like :meth:`receive`, but only the rest of the current TLS record."""
        poller, tls = self.poller, self.tls
        missing = 0 if tls is None else tls.missing
        if tls is None or not missing:
            return None
        size = self.receive_raw(poller.ciphertext[:missing])
        if not size:
            return None
        tls.receive(poller.ciphertext[:size])
        self.readable = True
        plain = poller.plaintext
        size = self._decrypt(tls, plain)
        return plain[:size]

    def _decrypt(self, tls: TlsStream, plain: memoryview) -> int:
        try:
            return tls.read_into(plain)
        except TlsError:
            # The session holds the alert that tells the peer why the connection ends (RFC 8446, section 6.2).
            with contextlib.suppress(OSError, TlsError):
                self.send_tls()
            raise

    @property
    def unsent(self) -> bytes:
        """The output bytes that wait for the network."""
        return bytes(self._unsent)

    def continue_with(self, unsent: bytes) -> None:
        """Begin with the encrypted bytes that another process could not send."""
        self._unsent += unsent

    def fit(self, size: int, took_s: float, wanted_s: float) -> None:
        """Adapt the size of later reads so that each takes about ``wanted_s``, after a read of ``size`` bytes took
        ``took_s``.

        256 KiB for one application take a quarter of a millisecond, but in frames for sixteen applications up to
        three milliseconds, during which other connections wait.
        """
        if size < BULK_BYTES:
            return
        fitting = int(size * wanted_s / took_s) if took_s > wanted_s else BUFFER_BYTES
        # The size shrinks by half at most, because the measured time can include other processes.
        smaller = max(BULK_BYTES, fitting, self._most >> 1)
        self._most = smaller if fitting < self._most else min(BUFFER_BYTES, 2 * self._most)

    def left_over(self) -> memoryview:
        """Return the plaintext that arrived with the last bytes of the handshake. Called once, after the
        handshake.
        """
        plain, tls = self.poller.plaintext, self.tls
        assert tls is not None
        size = self._decrypt(tls, plain)
        if tls.peer_closed:
            self.readable = True  # as in receive()
        return plain[:size]

    def send(self, views: list[memoryview | bytes]) -> None:
        """Encrypt and send. Bytes that the network does not accept are kept here.

        Raises:
            TlsError: the session cannot send.
            OSError: the network failed.
        """
        tls = self.tls
        if tls is None:
            for view in views:
                self._put(memoryview(view))
            return
        sealed = self.poller.sealed
        for view in views:
            for start in range(0, len(view), BUFFER_BYTES):
                size = tls.seal(view[start : start + BUFFER_BYTES], sealed)
                self._put(sealed[:size])

    def send_tls(self) -> None:
        """Send records that TLS itself has produced: handshake, key updates, alerts, close_notify."""
        if self.tls is not None:
            size = self.tls.seal(b"", self.poller.sealed)
            if size:
                self._put(self.poller.sealed[:size])

    def retry(self) -> bool:
        """Send the bytes that waited for the network. Return whether all were sent."""
        if self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return False
            del self._unsent[:sent]
            if self._unsent:
                return False
            self._unsent = bytearray()
        return True

    def _put(self, data: memoryview) -> None:
        if self._unsent or self.held:
            self._unsent += data
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._unsent += data[sent:]
            self.poller.watch_writable(self.sock.fileno())

    def discard(self) -> None:
        """Drop unsent output, because the network connection is gone; idempotent."""
        self._unsent = bytearray()

    def close(self, *, lingers: bool = False) -> None:
        """Close the socket. With ``lingers`` it stays open for a limited time, but is not read."""
        self.poller.unregister(self.sock.fileno())
        if lingers:
            self.poller.lingering.keep(self.sock)
        else:
            self.sock.close()
        self._unsent = bytearray()
