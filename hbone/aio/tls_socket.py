"""A TLS byte stream without HTTP/2, client or server, as one end of a relay."""

from __future__ import annotations

import socket

from hbone.aio import waits
from hbone.aio.end import CHUNK_BYTES, End, failure_after_end
from hbone.aio.fiber import OneShotFuture
from hbone.aio.link import Link, LinkClosed
from hbone.aio.poller import BULK_BYTES, FAILED, HUNG_UP, READABLE, READS_PER_TURN, WRITABLE, Poller
from hbone.aio.socket import abort_on_close
from hbone.end_state import SINK_OPEN, SOURCE_OPEN, EndEvent, SinkState, SourceState
from hbone.errors import ConnectionBroken, TlsError, TunnelClosed, bare
from hbone.tls import PeerFacts, TlsSession
from hbone.tls_context import TlsContext

_LEAST_ROOM = 16 * 1024


def _broken(error: OSError | LinkClosed) -> ConnectionBroken:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return ConnectionBroken(f"during the TLS handshake: {reason}")


class TlsSocket(End):
    """One end of a relay: a connected, non-blocking socket with TLS, owned by this object. Call :meth:`establish`
    before the relay.

    All output of a loop iteration is sent in one TLS write. Plaintext that arrived with the handshake is kept for
    the relay, and no further bytes are read before the relay starts. Incoming records are decrypted into the
    poller's buffer and passed at once to the other end of the relay. While the other end has no room, the socket
    is not read.
    """

    __slots__ = (
        "_bulk",
        "_early",
        "_established",
        "_failed",
        "_filled",
        "_in_flight",
        "_output",
        "_owed",
        "_paused",
        "_waiting",
        "broken",
        "closed",
        "dirty",
        "facts",
        "link",
    )

    def __init__(self, sock: socket.SocketType, tls_context: TlsContext, poller: Poller) -> None:
        self.poller = poller
        self.link = Link(sock, TlsSession(tls_context), poller)
        self.peer = None
        self.relay = None
        self.source = SourceState.OPEN
        self.sink = SinkState.OPEN
        self.read_bytes = 0
        self.facts: PeerFacts | None = None
        self.broken: Exception | None = None
        self.closed = False
        self.dirty = False
        self._established: OneShotFuture[None] = OneShotFuture(poller)
        self._early = b""
        self._failed = False  # the poller reported an error
        self._paused = False
        self._bulk = False  # read much at once; see Poller.defers_bulk
        self._waiting = False
        self._output: memoryview | None = None
        self._filled = 0
        self._in_flight = 0
        self._owed = 0
        poller.adopt(sock, self)

    async def establish(self, timeout_s: float = 10.0) -> PeerFacts:
        """Finish the handshake.

        Raises:
            TlsError: either side refused the handshake.
            PeerSilent: the handshake did not finish within ``timeout_s``.
            ConnectionBroken: the network ended the connection.
        """
        await waits.handshake(self._handshake_step, self._established, timeout_s, self._give_up)
        assert self.facts is not None
        return self.facts

    def _give_up(self, error: Exception) -> None:
        self.close()

    def _handshake_step(self) -> None:
        tls = self.link.tls
        assert tls is not None
        if self._established.done():
            return
        try:
            try:
                finished = tls.handshake()
            finally:
                self.link.send_tls()
            if not finished:
                return
            self.facts = tls.facts()
            self._early = bytes(self.link.left_over())
        except OSError as error:  # the peer has sent RST meanwhile
            self._established.set_exception(_broken(error))
            self._established.exception()
            return
        except Exception as error:  # noqa: BLE001  the verify hook can raise any error
            self._established.set_exception(error)
            self._established.exception()
            return
        self._established.set_result(None)

    # Events

    def on_event(self, mask: int) -> None:
        if self.closed:
            return
        if mask & WRITABLE and self.link.blocked:
            self._unblock()
        if mask & HUNG_UP:
            self.link.hang_up_seen()
            if mask & FAILED:
                self._failed = True
                if self._paused or self.source is not SOURCE_OPEN:  # as for a plain socket
                    self._fail_after_end()
        if mask & READABLE or not mask:
            self.link.readable = True
            if not self._established.done():
                self._receive_handshake()
            elif not self._paused:
                if mask and self._bulk and self.poller.defers_bulk():
                    self.poller.requeue(self)
                else:
                    self._pump()

    def on_bug(self, error: Exception) -> None:
        self.close(error)

    def _receive_handshake(self) -> None:
        link, tls = self.link, self.link.tls
        assert tls is not None
        try:
            while not self._established.done():
                size = link.receive_raw(self.poller.ciphertext)
                if not size:
                    return
                tls.receive(self.poller.ciphertext[:size])
                self._handshake_step()
        except (OSError, LinkClosed) as error:
            self._established.set_exception(_broken(error))
            self._established.exception()

    # As a source

    def start(self) -> None:
        early, self._early = self._early, b""
        peer = self.peer
        if early and peer is not None:
            self._give(peer, memoryview(early))
        self._pump()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self.link.readable:
                self.poller.requeue(self)  # not at once: the scratch buffers may be in use

    def delivered(self, size: int) -> None:
        """Resume reading when all bytes passed to the peer have been sent; see :meth:`End.delivered`."""
        self._in_flight -= size
        if self._in_flight <= 0:
            self.resume()

    def _pump(self) -> None:
        if self.source is not SOURCE_OPEN or self.closed:
            return
        before, self._bulk = self.link.read_bytes, True
        for _ in range(READS_PER_TURN):
            peer = self.peer
            if peer is None:
                return
            if self._in_flight > 0:
                self._paused = True
                return
            try:
                plain = self.link.receive()
            except (OSError, TlsError, LinkClosed) as error:
                self._end(bare(error))
                return
            if plain is not None and len(plain):
                self._give(peer, plain)
            tls = self.link.tls
            if tls is not None and tls.peer_closed:
                self._end(LinkClosed(notified=True))
                return
            if not self.link.readable:
                self._send_tls()  # a key update can require an answer
                self._bulk = self.link.read_bytes - before >= BULK_BYTES
                return
        self.poller.requeue(self)

    def _give(self, peer: End, plain: memoryview) -> None:
        self.read_bytes += len(plain)
        self._in_flight += len(plain)
        peer.write([plain], len(plain))
        peer.flush()

    def _end(self, error: Exception) -> None:
        if not isinstance(error, LinkClosed):
            self.broken = bare(error)
            self.advance(EndEvent.READ_RESET, error, clean=isinstance(error, OSError))
        elif error.notified:
            self.advance(EndEvent.READ_EOF)
        else:
            # After a FIN without close_notify, the stream was possibly truncated by an attacker (RFC 8446, 6.1).
            # But many applications close like this. So the relay's other end gets an EOF, and the relay gets the
            # error.
            truncated = ConnectionBroken("peer ended TLS without close_notify")
            self.advance(EndEvent.READ_EOF, truncated, clean=False)
        if self._failed:
            self._fail_after_end()

    def lingered(self) -> None:
        if self.broken is not None:
            self.advance(EndEvent.READ_RESET, self.broken)

    def _fail_after_end(self) -> None:
        if not self.closed and self.broken is None and (error := failure_after_end(self.link.sock)):
            self._break(error)

    def _send_tls(self) -> None:
        try:
            self.link.send_tls()
        except (OSError, TlsError) as error:
            self._break(error)

    # As a sink

    def reserve(self, limit: int) -> memoryview | None:
        if self.broken is not None:
            return self.poller.plaintext[:CHUNK_BYTES]
        if self._output is not None and len(self._output) - self._filled < _LEAST_ROOM:
            self.flush()
        if self.link.blocked:
            self._waiting = True
            return None
        if self._output is None:
            self._output = self.poller.acquire()
        self.poller.schedule_flush(self)  # needed even if the read returns no bytes: flush() releases the buffer
        return self._output[self._filled : self._filled + limit]

    def commit(self, size: int) -> None:
        if self.broken is None:
            self._filled += size

    def write(self, chunks: list[memoryview], size: int) -> None:
        """The chunks are encrypted at once, so that no view of the caller's buffer is kept."""
        if self.broken is None:
            try:
                self.link.send(list(chunks))
            except (OSError, TlsError) as error:
                self._break(error)
        if self.link.blocked:
            self._owed += size  # credit returns when the network has accepted the bytes
        elif self.peer is not None:
            self.peer.delivered(size)

    def flush(self) -> None:
        """Encrypt and send the collected bytes. Called at the end of an iteration."""
        self.dirty = False
        output = self._output
        if output is None or self.link.blocked:
            return
        filled, self._filled, self._output = self._filled, 0, None
        if filled:
            try:
                self.link.send([output[:filled]])
            except (OSError, TlsError) as error:
                self._break(error)
        self.poller.release(output)

    def write_eof(self) -> None:
        """Send close_notify, then end the TCP direction."""
        self.advance(EndEvent.WRITE_EOF)
        self.flush()
        self._drained()

    def write_reset(self) -> None:
        """Reset the socket. No close_notify is sent, because it would declare the stream complete."""
        if not self.closed:
            abort_on_close(self.link.sock)
        self.advance(EndEvent.WRITE_RESET)
        self.flush()
        self._drained()

    def _drained(self) -> None:
        """Continue a requested shutdown as far as the network accepts output. Idempotent."""
        if self.sink is SinkState.EOF_PENDING and not self.link.blocked:
            # This makes the close_notify alert pending output. A later call sends the FIN, once the network has
            # accepted the alert.
            assert self.link.tls is not None
            self.link.tls.close()
            self._send_tls()
        if self.sink is not SINK_OPEN and not self.link.blocked:
            self.advance(EndEvent.DRAINED)

    def _unblock(self) -> None:
        try:
            if not self.link.retry():
                return
        except OSError as error:
            self._break(error)
        self.flush()
        if self.link.blocked:
            return
        owed, self._owed = self._owed, 0
        if owed and self.peer is not None:
            self.peer.delivered(owed)
        self._drained()
        if self._waiting and self.peer is not None:
            self._waiting = False
            self.peer.resume()

    def _break(self, error: Exception) -> None:
        self.broken = bare(error)
        self.advance(EndEvent.BREAK, error)

    def _drop_pending(self) -> int:
        self.link.discard()
        self._waiting = False
        self._filled = 0
        owed, self._owed = self._owed, 0
        return owed

    def _send_eof(self) -> None:
        if self.broken is None and not self.closed:
            try:
                self.link.sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self.broken = bare(error)

    def _send_reset(self) -> None:
        """No-op: SO_LINGER makes the kernel send RST when the owner closes the socket right after this."""

    def close(self, error: Exception | None = None) -> None:
        """Send close_notify if the network accepts it, and close. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self.relay is not None:
            self.relay.fail(self, error or TunnelClosed("socket closed during a relay"))
        orderly = self.sink is SINK_OPEN or self.sink is SinkState.EOF_PENDING
        if self._established.done() and self.broken is None and orderly:
            assert self.link.tls is not None
            self.link.tls.close()
            self._send_tls()
        if not self._established.done():
            self._established.set_exception(TunnelClosed("socket closed"))
            self._established.exception()
        if self._output is not None:
            self.poller.release(self._output)
            self._output = None
        self.link.close()
