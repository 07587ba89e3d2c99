"""A plain TCP (or Unix) stream socket as one end of a relay."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from typing import Final

from hbone.aio.end import CHUNK_BYTES, End, failure_after_end
from hbone.aio.poller import BULK_BYTES, FAILED, HUNG_UP, READABLE, READS_PER_TURN, WRITABLE, Poller
from hbone.aio.splice import SPLICE_AFTER_BYTES, SplicePipe
from hbone.end_state import SINK_OPEN, SOURCE_OPEN, EndEvent, SinkState, SourceState
from hbone.errors import TunnelClosed, bare

CROWD_SOCKETS: Final = 128
CROWDED_UNSENT_BYTES: Final = 128 * 1024
"""The limit of unsent bytes in the kernel, besides bytes in flight, while :data:`CROWD_SOCKETS` sockets are open.
Without this limit, the kernel's buffer for an application that does not read grows up to 4 MiB (tcp_wmem), charged
to our cgroup: 2,000 such streams took 1.3 GB.
"""
LASTING_S: Final = 10.0
"""A connection of this age gets socket options that few connections need, see :meth:`PlainSocket.when_lasting`."""
_MOST_DISCARDS: Final = 256  # reads of 256 KiB each, together more than any receive buffer
#: The errors of splice(2) that do not mean that the connection has failed: a kernel or a sandbox (seccomp) does
#: not permit it for these sockets, or has no memory. The relay then copies, like HAProxy.
_SPLICE_ERRORS: Final = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ENOMEM)
_MOST_CHUNKS = 64  # buffers of one sendmsg; more are joined first (the kernel's limit is 1024)


def abort_on_close(sock: socket.SocketType) -> None:
    """Make the socket's close send RST instead of FIN (SO_LINGER of socket(7), zero seconds)."""
    with contextlib.suppress(OSError):  # the socket has already ended
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class PlainSocket(End):
    """One end of a relay: a connected, non-blocking stream socket, owned by this object from now on.

    Bytes that arrive before a relay starts stay in the kernel, unless :meth:`read` takes them and
    :meth:`push_back` returns them. The poller watches the socket from the first wait or from the relay's start.

    Args:
        fresh: whether the socket was just connected, so that no bytes can have arrived. A relay then waits for the
            first event.
    """

    __slots__ = (
        "_bulk",
        "_can_splice",
        "_gather",
        "_gathered",
        "_hung_up",
        "_lasting",
        "_paused",
        "_pending",
        "_pipe",
        "_pushed",
        "_readable",
        "_starving",
        "_unsent_bounded",
        "_waiter",
        "_watched",
        "broken",
        "closed",
        "sock",
    )

    def __init__(self, sock: socket.SocketType, poller: Poller, *, fresh: bool = False) -> None:
        self.sock = sock
        self.poller = poller
        self.peer = None
        self.relay = None
        self.source = SourceState.OPEN
        self.sink = SinkState.OPEN
        self.read_bytes = 0
        self.broken: OSError | None = None
        self.closed = False
        self._readable = not fresh  # perhaps: the first read will show
        self._watched = False
        self._hung_up = 0  # the bits of HUNG_UP that were reported
        self._paused = False
        self._bulk = False  # whether the last reads were large; see Poller.defers_bulk
        self._pending = bytearray()
        self._pushed = b""
        self._pipe: SplicePipe | None = None  # as a source, once the flow is large
        self._can_splice = True
        self._unsent_bounded = False
        self._starving = False  # as a sink: whether the peer's pipe waits for room in our socket
        self._gather: list[memoryview] = []
        self._gathered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._lasting: Callable[[socket.SocketType], None] | None = None

    def when_lasting(self, action: Callable[[socket.SocketType], None]) -> None:
        """Call ``action`` with the socket once, :data:`LASTING_S` from now, if it is still open."""
        self._lasting = action
        self.poller.interval_timer(LASTING_S).register(self, self.poller.now_s)

    def on_interval(self) -> None:
        action, self._lasting = self._lasting, None
        self.poller.interval_timer(LASTING_S).unregister(self)
        if action is not None:
            action(self.sock)

    # Before a relay

    async def peek(self, size: int, *, seen: int = 0) -> bytes:
        """Return up to ``size`` bytes and leave them in the kernel. Wait for more than ``seen`` bytes, or for EOF.

        Raises:
            OSError: the connection was reset.
        """
        while True:
            data = self._receive_now(size, socket.MSG_PEEK)
            if data is not None and (len(data) > seen or self._hung_up or not data or len(data) == size):
                return data
            await self._next_event()

    async def read(self, size: int) -> bytes:
        """Consume and return up to ``size`` bytes. Wait for at least one byte. Return no bytes at EOF.

        Raises:
            OSError: the connection was reset.
        """
        if self._pushed:
            data, self._pushed = self._pushed[:size], self._pushed[size:]
            return data
        while True:
            received = self._receive_now(size, 0)
            if received is not None:
                return received
            await self._next_event()

    def _receive_now(self, size: int, flags: int) -> bytes | None:
        try:
            return self.sock.recv(size, flags)
        except BlockingIOError:
            return None

    def push_back(self, data: bytes) -> None:
        """Put back bytes that :meth:`read` has consumed. The next read or the relay gets these bytes first."""
        self._pushed = data + self._pushed

    def peek_into(self, room: memoryview) -> int:
        """Copy received bytes into ``room`` without consuming them, and return their number. Never blocks."""
        if self._pushed:
            size = min(len(self._pushed), len(room))
            room[:size] = self._pushed[:size]
            return size
        return self._peek_into(room) or 0

    def _peek_into(self, room: memoryview) -> int | None:
        """Peek at received bytes in the kernel. Return how many were copied: 0 at an EOF or a reset, None if none
        have arrived.
        """
        try:
            return self.sock.recv_into(room, 0, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError as error:
            self.broken = bare(error)  # the kernel reports a reset once, and EOF from then on: see _end
            return 0

    def discard(self, size: int) -> None:
        """Consume bytes that :meth:`peek_into` has shown, as if a relay had read them."""
        self.read_bytes += size
        if self._pushed:
            self._pushed = self._pushed[size:]
        elif not self.closed:
            try:
                # The peeked bytes are still in the kernel, even after a reset. MSG_TRUNC makes TCP discard them
                # without a copy (tcp(7)).
                self.sock.recv(size, socket.MSG_TRUNC)
            except OSError as error:
                self.broken = bare(error)  # an error of this socket, not of the tunnel connection that called this
            if not self._watched:
                self._readable = False  # registering reports the remaining bytes as the first event

    def send_first(self, data: bytes) -> None:
        """Queue bytes to send before the relay's, such as a PROXY header. They are not counted."""
        self._send(memoryview(data))

    def _watch(self) -> None:
        if not self._watched:
            self.poller.register(self.sock.fileno(), self)
            self._watched = True
            if self.poller.registered >= CROWD_SOCKETS:
                self._bound_unsent()

    def _next_event(self) -> asyncio.Future[None]:
        self._watch()
        waiter = self._waiter = self.poller.loop.create_future()
        return waiter

    # Events

    def on_event(self, mask: int) -> None:
        if mask & HUNG_UP:
            self._hung_up |= mask & HUNG_UP
            # While the other end has no room, nothing is read, so a reset must be noticed here. Bytes that arrived
            # before it are still delivered if there is room again within the relay's linger time.
            if mask & FAILED and (self._paused or self.source is not SOURCE_OPEN):
                self._fail_after_end()
        if mask & READABLE or not mask:
            self._readable = True
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
            if not self._paused:
                if mask and self._bulk and self.poller.defers_bulk():
                    self.poller.requeue(self)
                else:
                    self._pump()
        if mask & WRITABLE and not self.closed:
            if self._pending:
                self._drain()
            elif self._starving:
                self._starving = False
                if self.peer is not None:
                    self.peer.resume()

    def on_bug(self, error: Exception) -> None:
        if self.relay is not None:
            self.relay.fail(self, error)
        self.close(error)

    # As a source

    def start(self) -> None:
        peer = self.peer
        if self._pushed and peer is not None:
            pushed, self._pushed = self._pushed, b""
            self.read_bytes += len(pushed)
            peer.write([memoryview(pushed)], len(pushed))
            peer.flush()
        if not self.closed:
            self._watch()
            if self._readable:
                self._pump()

    def restart(self) -> None:
        self._watch()
        if self._pending:
            self._watch_writable()
        self._pump()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._readable or self._pipe is not None:
                self._pump()

    def delivered(self, size: int) -> None:
        """No-op, because the kernel's buffers need no credit."""

    def _pump(self) -> None:
        if self.source is not SOURCE_OPEN or self.closed:
            return
        if self.poller.lent:  # the read that ended this stream still uses the scratch buffers
            self.poller.requeue(self)
            return
        if self._pipe is not None or (self.read_bytes > SPLICE_AFTER_BYTES and self._begin_splicing()):
            self._bulk = True
            self._splice()
            return
        before, self._bulk = self.read_bytes, True
        for _ in range(READS_PER_TURN):
            peer = self.peer
            if peer is None:
                return
            try:
                if peer.scatters:
                    rooms = peer.reserve_many(CHUNK_BYTES)
                    if rooms is None:
                        self._paused = True
                        return
                    size, most = self.sock.recvmsg_into(rooms)[0], sum(map(len, rooms))
                else:
                    room = peer.reserve(CHUNK_BYTES)
                    if room is None:
                        self._paused = True
                        return
                    size, most = self.sock.recv_into(room), len(room)
            except BlockingIOError:
                self._readable = False
                self._bulk = self.read_bytes - before >= BULK_BYTES
                return
            except OSError as error:
                self._end(bare(error))
                return
            if not size:
                self._end(self.broken)
                return
            self.read_bytes += size
            self.poller.read_bytes += size
            peer.commit(size)
            if size < most and not self._hung_up:
                # After a short read the socket is empty. A later EOF is a new edge (epoll(7)).
                self._readable = False
                self._bulk = self.read_bytes - before >= BULK_BYTES
                return
        self.poller.requeue(self)

    def _begin_splicing(self) -> bool:
        """Create the pipe for splicing if the peer is a plain socket, too, so that the flow can stay in the
        kernel. Return whether it was created.
        """
        peer = self.peer
        if (
            not self._can_splice
            or type(peer) is not PlainSocket
            or peer._pending
            or peer.broken is not None
            or peer.closed
        ):
            return False
        try:
            self._pipe = SplicePipe()
        except OSError:
            return False  # out of descriptors: copy, which needs none, and try again with the next chunk
        return True

    def _splice(self) -> None:
        """Move bytes to the peer through the pipe, once per iteration, because a pipe has the capacity of several
        reads.
        """
        pipe, peer = self._pipe, self.peer
        assert pipe is not None
        if type(peer) is not PlainSocket or not self._empty_pipe(pipe, peer):
            return
        # The pipe is empty here, so EAGAIN can only mean that the socket is empty.
        try:
            size = pipe.fill(self.sock.fileno())
        except BlockingIOError:
            self._readable = False
            return
        except OSError as error:
            if error.errno in _SPLICE_ERRORS:
                self._copy_from_now_on()
            else:
                self._end(bare(error))
            return
        if not size:
            self._end(self.broken)
            return
        self.read_bytes += size
        self.poller.read_bytes += size
        if self._empty_pipe(pipe, peer):
            self.poller.requeue(self)

    def _empty_pipe(self, pipe: SplicePipe, peer: PlainSocket) -> bool:
        """Move the pipe's bytes into the sink. Return False if the sink is full. It then resumes this source
        later."""
        try:
            if pipe.empty(peer.sock.fileno()):
                return True
            peer._starving = self._paused = True
            peer._watch_writable()
        except OSError as error:
            if error.errno in _SPLICE_ERRORS:
                self._copy_from_now_on()
            else:
                self._stop_splicing()
                peer._break(error)
                self._pump()  # copy again, into a sink that now discards
        return False

    def _copy_from_now_on(self) -> None:
        """Continue without splicing, because the kernel cannot splice these sockets."""
        self._can_splice = False
        self.leave_splicing()
        self._pump()

    def _stop_splicing(self) -> None:
        assert self._pipe is not None
        self._pipe.close()
        self._pipe = None

    # Moving the socket to another process: see hbone.aio.handover

    def leave_splicing(self) -> None:
        """Stop splicing: read the pipe's bytes into this process, where they wait for the sink."""
        pipe, peer = self._pipe, self.peer
        if pipe is None:
            return
        held = pipe.take() if pipe.held else b""
        self._stop_splicing()
        if held and type(peer) is PlainSocket:
            peer._pending += held
            peer._starving = False
            self._paused = True
            peer._watch_writable()

    def suspend(self) -> None:
        """Stop reading until :meth:`wake_up` or :meth:`move_away`: received bytes stay in the kernel."""
        if self._lasting is not None:
            self.on_interval()
        self.poller.suspend(self.sock.fileno(), self)
        self._watched = False

    def wake_up(self) -> None:
        """Read and write again after :meth:`suspend`."""
        if not self.closed:
            self._readable = True
            try:
                self._watch()
            except OSError as error:  # meanwhile other sockets have used up the watches: epoll_ctl(2), ENOSPC
                self.close(bare(error))
                return
            if self._pending:
                self._watch_writable()
            self.poller.requeue(self)

    def move_away(self) -> None:
        """Close our descriptor without sending, because another process has the socket. Idempotent."""
        if not self.closed:
            self.closed = True
            self.poller.suspend(self.sock.fileno(), self)
            self.sock.close()
            self._pending = bytearray()

    def leave_relay(self) -> None:
        self.relay = None
        self.peer = None
        if self._pipe is not None:
            self._stop_splicing()

    def _end(self, error: OSError | None) -> None:
        self._readable = False
        # The kernel reports a reset only once, to a send or a receive, and after that EOF. So if a send has
        # failed, callers pass its error. EPIPE means that a FIN came before the reset (tcp(7)): all bytes were
        # read, and only our direction is broken.
        if error is None:
            self.advance(EndEvent.READ_EOF)
            if self._hung_up & FAILED:
                self._fail_after_end()
        elif isinstance(error, BrokenPipeError):
            self.advance(EndEvent.READ_EOF, error)
            self._break(error)
        else:
            self.broken = bare(error)
            self.advance(EndEvent.READ_RESET, error)

    def lingered(self) -> None:
        if self.broken is not None:
            self.advance(EndEvent.READ_RESET, self.broken)

    def _fail_after_end(self) -> None:
        if not self.closed and self.broken is None and (error := failure_after_end(self.sock)):
            self._break(error)

    # As a sink

    def reserve(self, limit: int) -> memoryview | None:
        if self._pending:
            return None
        return self.poller.plaintext[:limit]

    def commit(self, size: int) -> None:
        self._send(self.poller.plaintext[:size])

    def write(self, chunks: list[memoryview], size: int) -> None:
        self._gather += chunks
        self._gathered += size

    def flush(self) -> None:
        chunks, size = self._gather, self._gathered
        if not size:
            return
        self._gather, self._gathered = [], 0
        if self._pending:
            for chunk in chunks:
                self._pending += chunk
            return
        if self.broken is not None or self.closed:
            sent = size
        else:
            try:
                if len(chunks) == 1:
                    sent = self.sock.send(chunks[0])
                else:
                    if len(chunks) > _MOST_CHUNKS:
                        chunks = [memoryview(b"".join(chunks))]
                    sent = self.sock.sendmsg(chunks)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._break(error)
                sent = size
        if sent < size:
            skip = sent
            for chunk in chunks:
                if skip < len(chunk):
                    self._pending += chunk[skip:]
                    skip = 0
                else:
                    skip -= len(chunk)
            self._watch_writable()
        peer = self.peer
        if peer is not None and sent:
            peer.delivered(sent)

    def write_eof(self) -> None:
        self.advance(EndEvent.WRITE_EOF)
        if not self._pending:
            self.advance(EndEvent.DRAINED)

    def write_reset(self) -> None:
        if not self.closed:
            abort_on_close(self.sock)
        self.advance(EndEvent.WRITE_RESET)
        if not self._pending:
            self.advance(EndEvent.DRAINED)

    def _send(self, data: memoryview) -> None:
        if self._pending:
            self._pending += data
            return
        if self.broken is not None or self.closed:
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._break(error)
            return
        if sent < len(data):
            self._pending += data[sent:]
            self._watch_writable()

    @property
    def blocked(self) -> bool:
        """Whether bytes for this socket wait for room, in this object or in the pipe of the source."""
        return bool(self._pending) or self._starving

    def _watch_writable(self) -> None:
        self._watch()  # a header can be sent before the relay
        if not self._unsent_bounded and self.poller.registered >= CROWD_SOCKETS:
            self._bound_unsent()  # the number of open sockets has grown since
        self.poller.watch_writable(self.sock.fileno())

    def _bound_unsent(self) -> None:
        self._unsent_bounded = True
        with contextlib.suppress(OSError):  # a Unix socket
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CROWDED_UNSENT_BYTES)

    def _drain(self) -> None:
        try:
            sent = self.sock.send(self._pending)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(error)
            return
        del self._pending[:sent]
        peer = self.peer
        if peer is not None and sent:
            peer.delivered(sent)
        if not self._pending:
            self._pending = bytearray()  # frees the memory used while the network accepted no bytes
            if self.sink is not SINK_OPEN:
                self.advance(EndEvent.DRAINED)
            elif peer is not None:
                peer.resume()

    def _break(self, error: OSError) -> None:
        """Discard all further output, because the socket accepts none. The other direction ends separately."""
        self.broken = bare(error)
        self.advance(EndEvent.BREAK, error)

    def _drop_pending(self) -> int:
        dropped, self._pending = len(self._pending), bytearray()
        return dropped

    def _send_eof(self) -> None:
        if self.broken is None and not self.closed:
            try:
                self.sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self.broken = bare(error)

    def _send_reset(self) -> None:
        """No-op: SO_LINGER makes the kernel send RST when the owner closes the socket right after this."""

    def end_in_order(self) -> None:
        """Send FIN now, because the kernel would reset a socket that is closed with unread bytes."""
        if self.closed or self.broken is not None or self._pending:
            return
        with contextlib.suppress(OSError):  # the socket has ended, or all bytes are read
            self.sock.shutdown(socket.SHUT_WR)
            # Discard received bytes, so that the close sends no reset. Bytes received after the close are answered
            # with a reset, but an application that has already ended does not notice this reset.
            room = self.poller.ciphertext  # stays unchanged, because TCP discards without a copy (MSG_TRUNC)
            for _ in range(_MOST_DISCARDS):
                if self.sock.recv_into(room, 0, socket.MSG_TRUNC) < len(room):
                    break

    def detach(self) -> socket.SocketType:
        """Release the socket to a new owner. Allowed only before a relay, and without pushed-back bytes."""
        assert self.relay is None
        assert not self._pushed
        self.closed = True
        if self._watched:
            self.poller.unregister(self.sock.fileno())
        return self.sock

    def close(self, error: Exception | None = None) -> None:
        """Close the socket. The kernel sends RST after :meth:`write_reset`, and if unread data is left."""
        if not self.closed:
            self.closed = True
            if self.relay is not None:
                self.relay.fail(self, error or TunnelClosed("socket closed during a relay"))
            if self._lasting is not None:
                self._lasting = None
                self.poller.interval_timer(LASTING_S).unregister(self)
            self.poller.unregister_closing(self.sock.fileno())
            self.sock.close()
            if self._pipe is not None:
                self._stop_splicing()
            self._pending = bytearray()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(TunnelClosed("socket closed"))
