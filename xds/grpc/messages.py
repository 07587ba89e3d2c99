"""Reads and writes gRPC messages in DATA frames. A flag and a length precede each message
("Length-Prefixed-Message" of the protocol).
"""

from io import BytesIO
from struct import Struct
from typing import Final

from xds.grpc.status import RpcFailed, Status

_PREFIX: Final = Struct(">BL")
PREFIX_BYTES: Final = _PREFIX.size


def prefix(message: bytes) -> bytes:
    """Return the length prefix of an uncompressed ``message``.

    Raises:
        RpcFailed: RESOURCE_EXHAUSTED, the message is longer than the prefix can express (4 GiB).
    """
    if len(message) >= 2**32:
        raise RpcFailed(Status.RESOURCE_EXHAUSTED, f"message of {len(message)} bytes cannot be sent")
    return _PREFIX.pack(0, len(message))


class MessageReader:
    """Assembles messages from DATA frames, which can split them at any point. Keeps at most one unfinished
    message.

    Args:
        limit_bytes: the longest message. None allows any length.
    """

    __slots__ = ("_begun", "_head", "_limit_bytes", "_missing")

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._head = b""
        self._begun: BytesIO | None = None
        self._missing = 0

    @property
    def between(self) -> bool:
        """Whether there is no unfinished message, so that the stream can properly end now."""
        return not self._head

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Return the messages that ``data`` completes. No reference to ``data`` is kept.

        Raises:
            RpcFailed: RESOURCE_EXHAUSTED for a message over the limit, as soon as its length is read;
                UNIMPLEMENTED for a compressed message; INTERNAL for a flag that the protocol does not define.
        """
        complete: list[bytes] = []
        chunk = memoryview(data)
        while chunk or (len(self._head) == PREFIX_BYTES and not self._missing):
            if len(self._head) < PREFIX_BYTES:
                take = PREFIX_BYTES - len(self._head)
                self._head += bytes(chunk[:take])
                chunk = chunk[take:]
                if len(self._head) == PREFIX_BYTES:
                    self._missing = self._length()
                continue
            part, chunk = chunk[: self._missing], chunk[self._missing :]
            self._missing -= len(part)
            if self._begun is not None:
                self._begun.write(part)
            elif self._missing:
                # BytesIO returns its value without a copy. Joining 78 MB of parts blocked the event loop for 50
                # ms.
                self._begun = BytesIO()
                self._begun.write(part)
            if not self._missing:
                complete.append(bytes(part) if self._begun is None else self._begun.getvalue())
                self._begun, self._head = None, b""
        return complete

    def _length(self) -> int:
        flag, length = _PREFIX.unpack(self._head)
        if flag == 1:
            raise RpcFailed(Status.UNIMPLEMENTED, "compressed messages are not supported, and were not asked for")
        if flag:
            raise RpcFailed(Status.INTERNAL, f"message with the unknown flag {flag:#04x}")
        if self._limit_bytes is not None and length > self._limit_bytes:
            text = f"message of {length} bytes is over the limit of {self._limit_bytes}"
            raise RpcFailed(Status.RESOURCE_EXHAUSTED, text)
        return int(length)
