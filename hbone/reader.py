"""Parses received bytes into HTTP/2 frames, no matter how the network split them. The reading half of the engine.

Control frames are collected in full. DATA payload is passed on in the chunks that arrived. Header blocks are
assembled from HEADERS and CONTINUATION. Unknown frames are skipped without being collected. A frame whose nine
header bytes are invalid is refused here, before its payload is collected (RFC 9113, 4 and 6).

The reader also counts the frames' costs (:mod:`hbone.frame_costs`). When the costs exceed the caller's limit, it
stops at the end of a frame, so that a read with many frames does not delay other connections for long.
"""

from __future__ import annotations

from typing import Final, Protocol

from hbone import frames
from hbone.errors import ErrorCode
from hbone.frame_costs import FRAME_UNITS, SMALL_DATA_BYTES, SMALL_DATA_UNITS, SPLIT_DATA_UNITS
from hbone.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADER_BYTES,
    MAX_STREAM_ID,
    PADDED,
    PREFACE,
    PRIORITY_FLAG,
)
from hbone.settings import Http2Settings

_FIXED_LENGTH: Final = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_CONNECTION_ONLY: Final = frozenset((frames.SETTINGS, frames.PING, frames.GOAWAY))
_STREAM_ONLY: Final = frozenset((frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.CONTINUATION))


class Failure(Exception):
    """A connection error (RFC 9113, 5.4.1). ``Engine.receive_data`` catches it and reports
    :class:`ConnectionFailed`.
    """

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail


class FrameSink(Protocol):
    """Receives the frames from a :class:`FrameReader`; implemented by the engine."""

    def full_data(self, stream_id: int, payload: memoryview, size: int, *, ended: bool) -> None:
        """Handle a DATA frame without padding that has arrived completely. All other DATA frames are passed on by
        the next three methods.
        """

    def data_started(self, stream_id: int, length: int, payload: int, *, ended: bool) -> None:
        """Begin a DATA frame. ``length`` bytes count against the windows, and ``payload`` bytes follow."""

    def data_chunk(self, chunk: memoryview, size: int) -> None:
        """Handle a piece of the current DATA frame's payload."""

    def data_done(self) -> None:
        """Finish the current DATA frame, whose payload is complete."""

    def header_block(self, stream_id: int, block: bytes, *, ended: bool) -> None:
        """Handle a complete header block."""

    def control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle any other frame with its payload. The payload of an unknown frame is empty."""


class FrameReader:
    """Parses frames and passes them to a :class:`FrameSink`. The sink is an argument of each call, to avoid a
    reference cycle.
    """

    __slots__ = (
        "_block",
        "_block_ended",
        "_block_frames",
        "_block_stream",
        "_left",
        "_padding",
        "_partial",
        "_preface",
        "_settings",
        "_settings_next",
        "_skip",
        "work",
    )

    def __init__(self, settings: Http2Settings, *, expect_preface: bool) -> None:
        self._settings = settings
        self.work = 0
        """Units of work since the caller last set it to 0. The sink adds the cost of its own work."""
        self._preface = PREFACE if expect_preface else b""
        self._settings_next = True
        self._partial = bytearray()
        # The number of payload bytes still to pass on, and of bytes to skip (padding, or an unknown frame).
        self._left = 0
        self._skip = 0
        self._block = bytearray()
        self._block_stream = 0
        self._block_ended = False
        self._block_frames = 0

    def feed(self, view: memoryview, sink: FrameSink, most_work: int) -> int:
        """Parse ``view`` until it is used up, or :attr:`work` exceeds ``most_work``.

        Returns:
            The number of parsed bytes of ``view``. Later bytes were not examined.

        Raises:
            Failure: the connection cannot continue.
        """
        end = len(view)
        position = 0
        if self._preface:
            position = min(len(self._preface), end)
            if view[:position] != self._preface[:position]:
                raise Failure(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
            self._preface = self._preface[position:]
        unpack = HEADER.unpack_from
        while position < end and self.work <= most_work:
            if self._left:
                size = end - position
                if size > self._left:
                    size = self._left
                self._left -= size
                sink.data_chunk(view[position : position + size], size)
                position += size
                if not self._left:
                    sink.data_done()
                continue
            if self._skip:
                size = min(self._skip, end - position)
                self._skip -= size
                position += size
                continue
            if self._partial:
                position = self._complete(view, position, end, sink)
                continue
            if end - position < HEADER_BYTES:
                self._partial += view[position:]
                return end
            high, low, kind, flags, stream_id = unpack(view, position)
            length = high << 8 | low
            if kind == DATA and not flags & PADDED:
                position += HEADER_BYTES
                stream_id &= MAX_STREAM_ID
                stop = position + length
                if length and stop <= end:
                    self._admit_data(stream_id, length)
                    if length < SMALL_DATA_BYTES:
                        self.work += SMALL_DATA_UNITS
                    sink.full_data(stream_id, view[position:stop], length, ended=flags & END_STREAM != 0)
                    position = stop
                else:
                    self._data(flags, stream_id, length, length, sink)
                continue
            self._check_header(kind, length, stream_id & MAX_STREAM_ID)
            need = self._needed(kind, flags, length)
            if end - position < need:
                self._partial += view[position:]
                return end
            payload = bytes(view[position + HEADER_BYTES : position + need])
            position += need
            self._frame(kind, flags, stream_id & MAX_STREAM_ID, length, payload, sink)
        return position

    def _complete(self, view: memoryview, position: int, end: int, sink: FrameSink) -> int:
        """Continue an incomplete frame. Collect its header first, and then the number of bytes that
        :meth:`_needed` returns.
        """
        partial = self._partial
        if len(partial) < HEADER_BYTES:
            take = min(HEADER_BYTES - len(partial), end - position)
            partial += view[position : position + take]
            position += take
            if len(partial) < HEADER_BYTES:
                return position
            high, low, kind, _, stream_id = HEADER.unpack_from(partial)
            self._check_header(kind, high << 8 | low, stream_id & MAX_STREAM_ID)
        high, low, kind, flags, stream_id = HEADER.unpack_from(partial)
        length = high << 8 | low
        need = self._needed(kind, flags, length)
        take = min(need - len(partial), end - position)
        partial += view[position : position + take]
        if len(partial) == need:
            payload = bytes(partial[HEADER_BYTES:])
            self._partial = bytearray()
            self._frame(kind, flags, stream_id & MAX_STREAM_ID, length, payload, sink)
        return position + take

    def _needed(self, kind: int, flags: int, length: int) -> int:
        """Return how many bytes of a frame to collect: the whole frame, but only the header of DATA and unknown
        frames.
        """
        if kind == DATA:
            return HEADER_BYTES + (1 if flags & PADDED and length else 0)
        if kind > frames.CONTINUATION:
            return HEADER_BYTES
        return HEADER_BYTES + length

    def _check_header(self, kind: int, length: int, stream_id: int) -> None:
        """Refuse a frame whose header is invalid, before its payload is collected."""
        limits = self._settings.limits
        if length > self._settings.max_frame_bytes:
            raise Failure(ErrorCode.FRAME_SIZE_ERROR, "frame longer than announced")
        if self._settings_next and kind != frames.SETTINGS:
            raise Failure(ErrorCode.PROTOCOL_ERROR, "the first frame was not SETTINGS")
        if self._block_stream and (kind != frames.CONTINUATION or stream_id != self._block_stream):
            raise Failure(ErrorCode.PROTOCOL_ERROR, "a header section was interrupted")
        if (kind in _CONNECTION_ONLY and stream_id) or (kind in _STREAM_ONLY and not stream_id):
            raise Failure(ErrorCode.PROTOCOL_ERROR, "frame on the wrong stream")
        if _FIXED_LENGTH.get(kind, length) != length:
            raise Failure(ErrorCode.FRAME_SIZE_ERROR, "frame of wrong length")
        if kind in (frames.HEADERS, frames.CONTINUATION):
            if len(self._block) + length > limits.header_block_bytes:
                raise Failure(ErrorCode.ENHANCE_YOUR_CALM, "header section over the limit")
        elif kind == frames.SETTINGS:
            if length > limits.settings_bytes:
                raise Failure(ErrorCode.ENHANCE_YOUR_CALM, "SETTINGS over the limit")
        elif kind == frames.GOAWAY and length > limits.goaway_bytes:
            raise Failure(ErrorCode.ENHANCE_YOUR_CALM, "GOAWAY over the limit")

    def _frame(self, kind: int, flags: int, stream_id: int, length: int, payload: bytes, sink: FrameSink) -> None:
        if kind == DATA:
            self._data_head(flags, stream_id, length, payload, sink)
            return
        self.work += FRAME_UNITS
        if kind == frames.HEADERS:
            self._headers(flags, stream_id, payload, sink)
        elif kind == frames.CONTINUATION:
            self._continuation(flags, payload, sink)
        elif kind == frames.PUSH_PROMISE:
            raise Failure(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE was not allowed")
        else:
            if kind == frames.SETTINGS and self._settings_next:
                if flags & frames.ACK:
                    raise Failure(ErrorCode.PROTOCOL_ERROR, "the first SETTINGS was an ACK")
                self._settings_next = False
            elif kind > frames.CONTINUATION:
                self._skip = length
            sink.control(kind, flags, stream_id, payload)

    def _data_head(self, flags: int, stream_id: int, length: int, payload: bytes, sink: FrameSink) -> None:
        if not flags & PADDED:
            self._data(flags, stream_id, length, length, sink)
            return
        if not length:
            raise Failure(ErrorCode.FRAME_SIZE_ERROR, "padded DATA without pad length")
        padding = payload[0]
        if padding >= length:
            raise Failure(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
        self._skip = padding
        self._data(flags, stream_id, length, length - 1 - padding, sink)

    def _admit_data(self, stream_id: int, length: int) -> None:
        if length > self._settings.max_frame_bytes:
            raise Failure(ErrorCode.FRAME_SIZE_ERROR, "frame longer than announced")
        if self._settings_next or self._block_stream or not stream_id:
            self._check_header(DATA, length, stream_id)  # raises the precise error
            raise Failure(ErrorCode.PROTOCOL_ERROR, "frame on the wrong stream")

    def _data(self, flags: int, stream_id: int, length: int, payload: int, sink: FrameSink) -> None:
        self._admit_data(stream_id, length)
        if payload < SMALL_DATA_BYTES:
            self.work += SPLIT_DATA_UNITS
        sink.data_started(stream_id, length, payload, ended=flags & END_STREAM != 0)
        self._left = payload
        if not payload:
            sink.data_done()

    def _headers(self, flags: int, stream_id: int, payload: bytes, sink: FrameSink) -> None:
        padding = start = 0
        if flags & PADDED:
            if not payload:
                raise Failure(ErrorCode.FRAME_SIZE_ERROR, "padded HEADERS without pad length")
            padding, start = payload[0], 1
        dependency = None
        if flags & PRIORITY_FLAG:
            if len(payload) < start + 5:
                raise Failure(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            dependency = frames.U32.unpack_from(payload, start)[0] & MAX_STREAM_ID
            start += 5
        if start + padding > len(payload):
            raise Failure(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
        if dependency == stream_id:
            raise Failure(ErrorCode.PROTOCOL_ERROR, "stream depends on itself")
        self._block += payload[start : len(payload) - padding]
        self._block_ended = flags & END_STREAM != 0
        if flags & END_HEADERS:
            self._header_block_done(stream_id, sink)
        else:
            self._block_stream = stream_id
            self._block_frames = 0

    def _continuation(self, flags: int, payload: bytes, sink: FrameSink) -> None:
        stream_id = self._block_stream
        if not stream_id:
            raise Failure(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block_frames += 1
        if self._block_frames > self._settings.limits.continuation_frames:
            raise Failure(ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION frames")
        self._block += payload
        if flags & END_HEADERS:
            self._block_stream = 0
            self._header_block_done(stream_id, sink)

    def _header_block_done(self, stream_id: int, sink: FrameSink) -> None:
        block = bytes(self._block)
        self._block.clear()
        sink.header_block(stream_id, block, ended=self._block_ended)
