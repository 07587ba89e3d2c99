"""Header blocks, by the ``hpack`` library behind caches of what recurs (RFC 7541).

Ours are written without dynamic table: every field is a static index or a never-indexed literal. That costs
a couple of hundred bytes per tunnel and makes a field's encoding depend on nothing, so that it is encoded
once. A peer's block may be remembered only while its dynamic table stands still, which it does with peers
that repeat themselves (Envoy indexes all its fields after the first request).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hpack import Decoder, Encoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from hbone.events import Header, Headers

_MAX_ENTRIES = 256  # of each cache; a guess: enough for the handful of blocks and fields that recur
_MAX_CACHED_BYTES = 512

T = TypeVar("T")


class HeaderBlockError(Exception):
    """The block cannot be decoded: COMPRESSION_ERROR, or the decoded list is over the limit."""

    def __init__(self, detail: str, *, oversized: bool) -> None:
        super().__init__(detail)
        self.oversized = oversized


class _WatchedTable(HeaderTable):
    """A dynamic table that counts its changes."""

    changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    def _shrink(self) -> None:
        self.changes += 1
        super()._shrink()


class BlockDecoder(Generic[T]):
    """Decodes and parses the header blocks of one direction of one connection, in their order.

    ``parse`` sees the decoded fields; what it returns is remembered with the block.
    """

    __slots__ = ("_blocks", "_changes", "_decoder", "_parse", "_table")

    def __init__(self, max_list_bytes: int, parse: Callable[[Headers], T]) -> None:
        self._decoder = Decoder(max_header_list_size=max_list_bytes)
        self._table = _WatchedTable()
        self._decoder.header_table = self._table
        self._changes = self._table.changes
        self._parse = parse
        self._blocks: dict[bytes, T] = {}

    def decode(self, block: bytes) -> T:
        """The parsed block; must see every block of the peer, wanted or not (RFC 7541, 2.2).

        Raises:
            HeaderBlockError: the connection cannot go on.
        """
        known = self._blocks.get(block)
        if known is not None:
            return known
        try:
            fields = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise HeaderBlockError(str(error), oversized=True) from error
        except HPACKError as error:
            raise HeaderBlockError(str(error), oversized=False) from error
        parsed = self._parse(fields)
        if self._table.changes != self._changes:
            self._changes = self._table.changes
            self._blocks.clear()
        elif len(self._blocks) < _MAX_ENTRIES and len(block) <= _MAX_CACHED_BYTES:
            self._blocks[block] = parsed
        return parsed


class BlockEncoder:
    """Encodes our header blocks; holds no state that a peer could grow, and may serve many connections."""

    __slots__ = ("_blocks", "_encoder", "_fields")

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._fields: dict[Header, bytes] = {}
        self._blocks: dict[Headers, bytes] = {}

    def encode(self, headers: Iterable[Header]) -> bytes:
        """One header block; names in lower case."""
        key = tuple(headers)
        known = self._blocks.get(key)
        if known is not None:
            return known
        encoded = self._encode(key)
        if len(self._blocks) >= _MAX_ENTRIES:
            self._blocks.clear()
        if len(encoded) <= _MAX_CACHED_BYTES:
            self._blocks[key] = encoded
        return encoded

    def _encode(self, headers: Headers) -> bytes:
        fields = self._fields
        block = []
        for header in headers:
            encoded = fields.get(header)
            if encoded is None:
                # sensitive=True is the library's only literal that leaves the peer's table alone.
                encoded = self._encoder.add(header, sensitive=True, huffman=False)
                if len(fields) >= _MAX_ENTRIES:
                    fields.clear()
                if len(encoded) <= _MAX_CACHED_BYTES:
                    fields[header] = encoded
            block.append(encoded)
        return b"".join(block)
