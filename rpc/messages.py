"""Messages in DATA: a flag and a length in front of each ("Length-Prefixed-Message" of the protocol)."""

from collections.abc import Iterable
from io import BytesIO
from struct import Struct
from typing import Final

from rpc.status import RpcFailed, Status

_PREFIX: Final = Struct(">BL")
PREFIX_BYTES: Final = _PREFIX.size


def prefix(message: bytes) -> bytes:
    """What goes in front of ``message``, uncompressed.

    Raises:
        RpcFailed: RESOURCE_EXHAUSTED, it is longer than the prefix can say (4 GiB).
    """
    if len(message) >= 2**32:
        raise RpcFailed(Status.RESOURCE_EXHAUSTED, f"message of {len(message)} bytes cannot be sent")
    return _PREFIX.pack(0, len(message))


class MessageReader:
    """Puts messages together, however DATA frames cut them; holds one unfinished message at most.

    ``limit_bytes`` is for one message, None for any.
    """

    __slots__ = ("_begun", "_head", "_limit_bytes", "_missing")

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._head = b""
        self._begun: BytesIO | None = None
        self._missing = 0

    @property
    def between(self) -> bool:
        """No message is unfinished: the stream may end here."""
        return not self._head

    def feed(self, chunks: Iterable[memoryview]) -> list[bytes]:
        """Return the messages that ``chunks`` complete; the views are not kept.

        Raises:
            RpcFailed: RESOURCE_EXHAUSTED for a message over the limit, as soon as it says its length;
                UNIMPLEMENTED for a compressed one, INTERNAL for a flag that the protocol does not know.
        """
        complete: list[bytes] = []
        for chunk in chunks:
            while chunk or (len(self._head) == PREFIX_BYTES and not self._missing):
                if len(self._head) < PREFIX_BYTES:
                    take = PREFIX_BYTES - len(self._head)
                    self._head += bytes(chunk[:take])
                    chunk = chunk[take:]
                    if len(self._head) == PREFIX_BYTES:
                        self._missing = self._length()
                    continue
                piece, chunk = chunk[: self._missing], chunk[self._missing :]
                self._missing -= len(piece)
                if self._begun is not None:
                    self._begun.write(piece)
                elif self._missing:
                    # Its value is taken without a copy: a join of 78 MB holds the loop up for 50 ms.
                    self._begun = BytesIO()
                    self._begun.write(piece)
                if not self._missing:
                    complete.append(bytes(piece) if self._begun is None else self._begun.getvalue())
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
