"""Encodes and decodes header blocks by the ``hpack`` library (RFC 7541), with caches of recurring blocks.

Our blocks do not use the dynamic table: every field is a static index or a never-indexed literal. This costs about
two hundred bytes per tunnel, but makes a field's encoding independent of other fields, so that each field is
encoded only once. A value that never recurs (``traceparent``) is appended to its name's encoding. A peer's block
can be cached only while its dynamic table does not change. This is the case for peers with recurring requests
(Envoy has indexed all its fields after the first request).

:func:`plain_fields` decodes blocks that, like ours, neither read nor change the dynamic table, in a fifth of the
library's time. The library decodes all other blocks, including Huffman codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hpack import Decoder, Encoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from hbone.events import Header, Headers
from hbone.hpack_pieces import HuffmanString, Unreadable, next_piece, plain_length

_MAX_ENTRIES = 256  # entries per cache; a guess: enough for the few blocks and fields that recur
_MAX_CACHED_BYTES = 512
TOLERATED_LIST_BYTES = 131_072
"""An oversized header list up to this size ends only its stream. A larger list ends the connection."""
LONG_BLOCK_BYTES = 1024
"""Header blocks longer than this are decoded in pieces (:mod:`hbone.hpack_pieces`)."""
#: Fields with values that never recur (a trace's identifier, a client's port) or are secrets. Blocks with these
#: fields are not cached.
_ONE_OFF = (b"traceparent", b"forwarded", b"authorization")
#: Fields whose values recur only within a second. The cache keeps only the latest block that has one of these
#: fields.
_OF_THE_MOMENT = b"date"

T = TypeVar("T")


_STATIC: tuple[Header, ...] = tuple((name, value) for name, value in HeaderTable.STATIC_TABLE)
_STATIC_FIELDS = frozenset(_STATIC)
EMPTY_TABLE = b"\x20"
"""Dynamic table size update to 0 (RFC 7541, 6.3)."""
_SIZE_UPDATE, _SIZE_UPDATE_MASK = 0x20, 0xE0
_LITERALS = (0x00, 0x10)  # without indexing, never indexed (RFC 7541, 6.2.2 and 6.2.3)


def plain_fields(block: bytes, max_list_bytes: int) -> Headers | None:
    """Decode a block that uses neither the dynamic table nor Huffman codes. Return None for any other block.

    Args:
        block: a whole header block.
        max_list_bytes: limit of the list's size (RFC 9113, 6.5.2: each field counts 32 bytes more than its
            octets).

    Returns:
        The fields. None if the library must decode the block, which can be malformed.
    """
    fields: list[Header] = []
    position, end, size = 0, len(block), 0
    while position < end:
        byte = block[position]
        position += 1
        if byte & 0x80:
            index = byte & 0x7F
            if not 0 < index <= len(_STATIC):
                return None
            name, value = _STATIC[index - 1]
        else:
            if byte & 0xF0 not in _LITERALS:
                return None
            index = byte & 0x0F
            if index == 0x0F:  # 15 and more: one more byte
                if position >= end or block[position] & 0x80:
                    return None
                index += block[position]
                position += 1
            if index:
                if index > len(_STATIC):
                    return None
                name = _STATIC[index - 1][0]
            else:
                length = block[position] if position < end else 0x80
                if length >= 0x7F:  # Huffman, or a length of several bytes
                    return None
                position += 1
                name = block[position : position + length]
                position += length
            length = block[position] if position < end else 0x80
            position += 1
            if length >= 0x7F:
                if length != 0x7F or position >= end or block[position] & 0x80:
                    return None
                length += block[position]
                position += 1
            value = block[position : position + length]
            position += length
            if position > end:
                return None
        size += len(name) + len(value) + 32
        fields.append((name, value))
    return tuple(fields) if size <= max_list_bytes else None


def list_bytes(fields: Headers) -> int:
    """Return the size of a header list as RFC 9113, 6.5.2 counts it."""
    return sum([len(name) + len(value) + 32 for name, value in fields])


class HeaderBlockError(Exception):
    """A header block cannot be decoded: it is malformed (COMPRESSION_ERROR), or the decoded list exceeds the
    limit.
    """

    def __init__(self, detail: str, *, oversized: bool) -> None:
        super().__init__(detail)
        self.oversized = oversized


class _WatchedTable(HeaderTable):
    """A decoder's dynamic table that counts its changes."""

    changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    def _shrink(self) -> None:
        self.changes += 1
        super()._shrink()


class BlockDecoder(Generic[T]):
    """Decodes and parses a connection's header blocks of one direction, in order.

    ``parse`` gets the decoded fields. Its result is cached with the block.

    Args:
        max_list_bytes: the largest list passed to ``parse``, counted as in RFC 9113, 6.5.2.
        parse: converts the decoded fields to the result.
        oversized: the result for a larger list. Lists up to :data:`TOLERATED_LIST_BYTES` are decoded without using
            the result, which keeps the dynamic tables of both sides equal. So an oversized request ends only its
            stream.
    """

    __slots__ = (
        "_before_string",
        "_blocks",
        "_changes",
        "_decoder",
        "_last",
        "_list_bytes",
        "_long",
        "_long_fields",
        "_max_list_bytes",
        "_oversized",
        "_parse",
        "_position",
        "_string",
        "_table",
        "_tolerated",
        "decoded_fields",
        "decoded_octets",
    )

    def __init__(self, max_list_bytes: int, parse: Callable[[Headers], T], oversized: T) -> None:
        self._max_list_bytes = max_list_bytes
        self._tolerated = max(TOLERATED_LIST_BYTES, max_list_bytes)
        self._oversized = oversized
        self._decoder = Decoder(max_header_list_size=self._tolerated)
        self._table = _WatchedTable()
        self._decoder.header_table = self._table
        self._changes = self._table.changes
        self._parse = parse
        self._blocks: dict[bytes, T] = {}
        self._last: tuple[bytes, T] | None = None
        # The part of a long header block that was decoded so far.
        self._long = b""
        self._position = 0
        self._long_fields: list[Header] = []
        self._list_bytes = 0
        self._string: HuffmanString | None = None
        self._before_string = b""
        self.decoded_octets = 0
        """The number of octets that the last call had to decode, or 0 if the block was cached."""
        self.decoded_fields = 0
        """The number of fields in the block that the last call decoded."""

    def decode(self, block: bytes) -> T:
        """Decode and parse a header block. This must be called for every block of the peer, even if unused (RFC
        7541, 2.2).

        Decoding more than :data:`LONG_BLOCK_BYTES` can take long; :meth:`begin` and :meth:`advance` decode in
        pieces.

        Raises:
            HeaderBlockError: the connection must end, because the dynamic tables of both sides can differ now.
        """
        if len(block) > LONG_BLOCK_BYTES:
            self.begin(block)
            while not self.advance():
                pass
            return self.finish()
        self.decoded_octets = self.decoded_fields = 0
        known = self._blocks.get(block)
        if known is not None:
            return known
        last = self._last
        if last is not None and last[0] == block:
            return last[1]
        self.decoded_octets = len(block)
        plain = plain_fields(block, self._max_list_bytes)
        if plain is not None:
            self.decoded_fields = len(plain)
            parsed = self._parse(plain)
            self._remember(block, plain, parsed)
            return parsed
        fields = self._decoded(block)
        self.decoded_fields = len(fields)
        if list_bytes(fields) > self._max_list_bytes:
            self._forget()  # the block can have changed the table, as below
            return self._oversized
        parsed = self._parse(fields)
        # A block with a size update is not cached. A size update to 0 and back empties the table without counting
        # as a change, but a cached result would not empty it.
        if self._table.changes != self._changes or block[0] & _SIZE_UPDATE_MASK == _SIZE_UPDATE:
            self._forget()
        else:
            self._remember(block, fields, parsed)
        return parsed

    def begin(self, block: bytes) -> None:
        """Begin to decode a long block in pieces, by :meth:`advance`. No other block can be decoded before
        :meth:`finish`.
        """
        self._long = block
        self._position = 0
        self._string = None
        self._long_fields = []
        self._list_bytes = 0

    def advance(self) -> bool:
        """Decode the next piece of the block. Return whether it was the last piece.

        Raises:
            HeaderBlockError: see :meth:`decode`.
        """
        block = self._long
        try:
            if self._string is None:
                start = self._position
                piece = next_piece(block, start)
                self._position = piece.end
                self.decoded_octets = piece.end - start
                begins, octets = piece.value
                if not octets:
                    self._take(block[start : piece.end])
                else:
                    self._string = HuffmanString(block, octets, piece.end)
                    self._before_string = block[start:begins]
                    self.decoded_fields = 0
                return piece.end == len(block) and not octets
            self.decoded_fields = 0
            self.decoded_octets = self._string.advance()
            if self.decoded_octets:
                return False
        except Unreadable:
            raise HeaderBlockError("header block not readable", oversized=False) from None
        # Replace the Huffman-coded field by an uncoded copy for the library, which decides whether the field
        # enters the table.
        value = bytes(self._string.decoded)
        self._string = None
        self._take(self._before_string + plain_length(len(value)) + value)
        return self._position == len(block)

    def _take(self, piece: bytes) -> None:
        fields = self._decoded(piece)
        self.decoded_fields = len(fields)
        self._list_bytes += list_bytes(fields)
        if self._list_bytes > self._tolerated:
            raise HeaderBlockError(f"header list of more than {self._tolerated} octets", oversized=True)
        if self._list_bytes <= self._max_list_bytes:
            self._long_fields += fields

    def finish(self) -> T:
        """Return the parsed block after :meth:`advance` has decoded its last piece."""
        fields, self._long_fields, self._long = tuple(self._long_fields), [], b""
        self._forget()
        return self._parse(fields) if self._list_bytes <= self._max_list_bytes else self._oversized

    def _decoded(self, block: bytes) -> Headers:
        try:
            return tuple([(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)])
        except OversizedHeaderListError as error:
            raise HeaderBlockError(str(error), oversized=True) from error
        except HPACKError as error:
            # The error text contains only the type, because some of the library's messages contain a memory
            # address.
            raise HeaderBlockError(type(error).__name__, oversized=False) from error

    def _forget(self) -> None:
        """Drop the cache after a change of the dynamic table, because blocks then have another meaning."""
        self._changes = self._table.changes
        self._blocks.clear()
        self._last = None

    def _remember(self, block: bytes, fields: Headers, parsed: T) -> None:
        if len(block) > _MAX_CACHED_BYTES:
            return
        of_the_moment = False
        for name, _ in fields:
            if name in _ONE_OFF:
                return
            if name == _OF_THE_MOMENT:
                of_the_moment = True
        if of_the_moment:
            self._last = block, parsed
        elif len(self._blocks) < _MAX_ENTRIES:
            self._blocks[block] = parsed


class BlockEncoder:
    """Encodes our header blocks. One encoder can serve many connections, and has no state that a peer could
    enlarge.
    """

    __slots__ = ("_blocks", "_encoder", "_fields", "_last", "_names")

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._last: tuple[Headers, bytes] = ((), b"")
        self._fields: dict[Header, bytes] = {}
        self._names: dict[bytes, bytes] = {}
        self._blocks: dict[Headers, bytes] = {}

    def encode(self, headers: Iterable[Header]) -> bytes:
        """Return the header block of ``headers``, whose names must be in lower case."""
        key = tuple(headers)
        known = self._blocks.get(key)
        if known is not None:
            return known
        if key == self._last[0]:
            return self._last[1]
        fields = self._fields
        block = []
        recurs, of_the_moment = True, False
        for header in key:
            encoded = fields.get(header)
            if encoded is None:
                encoded = self.field(header)
                if header[0] in _ONE_OFF:
                    recurs = False
                elif header[0] == _OF_THE_MOMENT:
                    of_the_moment = True
                elif len(encoded) <= _MAX_CACHED_BYTES:
                    if len(fields) >= _MAX_ENTRIES:
                        fields.clear()
                    fields[header] = encoded
            block.append(encoded)
        whole = b"".join(block)
        if recurs and of_the_moment:
            self._last = key, whole
        elif recurs and len(whole) <= _MAX_CACHED_BYTES:
            if len(self._blocks) >= _MAX_ENTRIES:
                self._blocks.clear()
            self._blocks[key] = whole
        return whole

    def field(self, header: Header) -> bytes:
        """Encode one field so that the peer's table does not change. The name must be in lower case."""
        name, value = header
        beginning = self._names.get(name)
        if beginning is None:
            # With sensitive=True, the library writes a literal that does not change the peer's table. The
            # placeholder "x" is not a value in the static table, so the last two bytes are always the value's
            # length and the value.
            beginning = self._encoder.add((name, b"x"), sensitive=True, huffman=False)[:-2]
            if len(self._names) >= _MAX_ENTRIES:
                self._names.clear()
            self._names[name] = beginning
        if len(value) < 0x7F and header not in _STATIC_FIELDS:
            return beginning + bytes((len(value),)) + value
        return self._encoder.add(header, sensitive=True, huffman=False)
