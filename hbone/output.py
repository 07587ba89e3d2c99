"""Queues the engine's output frames in order. Payload is read from a socket directly into the output buffer.

Frames are written consecutively into a buffer that is borrowed while there is output. A frame is queued as a bytes
object if it does not fit, or must wait until the network has accepted the buffer.
"""

from __future__ import annotations

from typing import Final, Protocol

from hbone.frames import DATA, END_STREAM, HEADER, HEADER_BYTES

BUFFER_BYTES: Final = 256 * 1024
_LEAST_ROOM: Final = 4096  # a smaller remainder is not used for a read


class Buffers(Protocol):
    """Lends output buffers, so that an idle connection does not hold one."""

    def acquire(self) -> memoryview:
        """Lend a writable buffer of at least 64 KiB."""

    def release(self, buffer: memoryview) -> None:
        """Take back a buffer that ``acquire`` has returned."""


class OwnBuffers:
    """A source that allocates a new buffer each time, for tests and for engines without a poller."""

    def acquire(self) -> memoryview:
        return memoryview(bytearray(BUFFER_BYTES))

    def release(self, buffer: memoryview) -> None:
        """No-op: the buffer is freed with its last reference."""


class Output:
    """The queue of frames that wait to be sent, in order."""

    __slots__ = ("_buffer", "_buffers", "_end", "_overflow", "frames", "full")

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._buffer: memoryview | None = None
        self._end = 0
        self._overflow: list[bytes] = []
        self.frames = 0
        """The number of frames other than DATA queued since the last ``taken``."""
        self.full = False
        """Whether the last ``reserve`` found no room."""

    def __bool__(self) -> bool:
        return self._end > 0

    @property
    def borrows(self) -> bool:
        """Whether this object holds a borrowed buffer, possibly an empty one. :meth:`taken` returns it."""
        return self._buffer is not None

    def __len__(self) -> int:
        return self._end + sum(map(len, self._overflow))

    def append(self, frames: bytes) -> None:
        """Queue one or more complete frames."""
        self.frames += 1
        if not self._overflow:
            if self._buffer is None:
                self._buffer = self._buffers.acquire()
            end = self._end + len(frames)
            if end <= len(self._buffer):
                self._buffer[self._end : end] = frames
                self._end = end
                return
        self._overflow.append(frames)

    def reserve(self, limit: int) -> memoryview | None:
        """Return room for up to ``limit`` payload bytes of one DATA frame. Space for the frame header is left in
        front of the room.
        """
        buffer = self._buffer
        if buffer is None:
            buffer = self._buffer = self._buffers.acquire()
        start = self._end + HEADER_BYTES
        room = len(buffer) - start
        if self._overflow or (room < _LEAST_ROOM and room < limit):
            self.full = True
            return None
        return buffer[start : start + limit] if limit < room else buffer[start:]

    def reserve_many(self, limit: int, frame_bytes: int) -> list[memoryview] | None:
        """Return room like :meth:`reserve`, but for several frames of ``frame_bytes``, with one view for each
        payload.
        """
        buffer = self._buffer
        if buffer is None:
            buffer = self._buffer = self._buffers.acquire()
        start = self._end + HEADER_BYTES
        capacity = len(buffer)
        if self._overflow or (capacity - start < _LEAST_ROOM and capacity - start < limit):
            self.full = True
            return None
        views = []
        while limit > 0 and start < capacity:
            stop = min(start + min(frame_bytes, limit), capacity)
            views.append(buffer[start:stop])
            limit -= stop - start
            start = stop + HEADER_BYTES
        return views

    def commit(self, stream_id: int, size: int, frame_bytes: int, *, ended: bool = False) -> None:
        """Complete the frames: write the headers in front of the ``size`` bytes that were written to the reserved
        views.
        """
        buffer = self._buffer
        assert buffer is not None
        end = self._end
        while size > frame_bytes:
            HEADER.pack_into(buffer, end, frame_bytes >> 8, frame_bytes & 0xFF, DATA, 0, stream_id)
            end += HEADER_BYTES + frame_bytes
            size -= frame_bytes
        HEADER.pack_into(buffer, end, size >> 8, size & 0xFF, DATA, END_STREAM if ended else 0, stream_id)
        self._end = end + HEADER_BYTES + size

    def views(self) -> list[memoryview | bytes]:
        """Return all queued output in order. It is valid until :meth:`taken`."""
        if self._buffer is None:
            return []
        return [self._buffer[: self._end], *self._overflow] if self._end else []

    def taken(self) -> None:
        """Drop the data that :meth:`views` has returned, because it was sent, and release the
        buffer. Idempotent.
        """
        if self._buffer is not None:
            self._buffers.release(self._buffer)
            self._buffer = None
        self._end = 0
        self._overflow.clear()
        self.frames = 0
        self.full = False
