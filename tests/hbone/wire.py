"""Frames and engines that the tests of the engine share."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from hpack import Encoder

from hbone import frames
from hbone.engine import Engine
from hbone.events import ConnectionFailed, DataReceived, Event
from hbone.frames import frame
from hbone.settings import Http2Settings, Role, client_settings

CONNECT = ((b":method", b"CONNECT"), (b":authority", b"10.0.0.2:8080"))
OPENING = frames.PREFACE + frame(frames.SETTINGS, 0, 0)


def block(*headers: tuple[bytes, bytes]) -> bytes:
    return Encoder().encode(headers, huffman=False)


def request(stream_id: int, *headers: tuple[bytes, bytes], flags: int = frames.END_HEADERS) -> bytes:
    return frame(frames.HEADERS, flags, stream_id, block(*(headers or CONNECT)))


def take(engine: Engine) -> bytes:
    data = b"".join(engine.output.views())
    engine.output.taken()
    return data


def split(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of whole frames."""
    out, position = [], 0
    while position < len(data):
        high, low, kind, flags, stream = struct.unpack_from(">HBBBL", data, position)
        size = high << 8 | low
        out.append((kind, flags, stream, data[position + 9 : position + 9 + size]))
        position += 9 + size
    return out


def plain(events: Iterable[Event]) -> list[object]:
    """Events with payload as bytes, neighbours merged: what must not depend on how bytes were cut."""
    out: list[object] = []
    for event in events:
        if isinstance(event, DataReceived):
            data = b"".join(event.chunks)
            assert len(data) == event.size
            if out and isinstance(out[-1], tuple) and out[-1][0] == event.stream_id:
                out[-1] = (event.stream_id, out[-1][1] + data)
            else:
                out.append((event.stream_id, data))
        else:
            out.append(event)
    return out


def server(**settings: object) -> Engine:
    engine = Engine(Role.SERVER, Http2Settings(**settings))  # type: ignore[arg-type]
    engine.start()
    take(engine)
    return engine


def opened(**settings: object) -> Engine:
    engine = server(**settings)
    engine.receive_data(OPENING)
    take(engine)
    return engine


def client() -> Engine:
    engine = Engine(Role.CLIENT, client_settings())
    engine.start()
    engine.receive_data(frame(frames.SETTINGS, 0, 0))
    return engine


def failure(events: list[Event]) -> int | None:
    return events[-1].code if events and isinstance(events[-1], ConnectionFailed) else None
