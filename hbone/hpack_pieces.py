"""Cuts a long header block into pieces of whole fields, so that no peer can make one decoding step take long.

The ``hpack`` library decodes a block in one call, and copies the remaining block for each field: 32,000 short
fields took a quarter of a second. A piece is decoded as fast as it is read, and other connections run between two
pieces. This module only reads the lengths of fields (RFC 7541, 5.1, 5.2 and 6), and long strings in Huffman codes.
The library decodes the fields.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE

PIECE_FIELDS: Final = 64
PIECE_OCTETS: Final = 1024
"""A piece ends after the field that reaches this length, or after :data:`PIECE_FIELDS` fields."""
HUFFMAN_OCTETS: Final = 2048
"""A longer Huffman-coded value is decoded here, in steps of this many octets, which take half a millisecond each.
A block with a field name longer than this is refused as unreadable, because no real field has one.
"""

_LONGEST_INTEGER: Final = 10  # octets after the prefix, as in the library


class Unreadable(Exception):
    """A header block ends inside a field, has too long an integer, or begins with too many table size updates."""


class Piece(NamedTuple):
    """A piece of a header block, which consists of whole fields.

    Attributes:
        end: the position after the piece.
        value: if the piece is a single field with a long Huffman-coded value, the positions of the value's length
            and of its octets. Otherwise two zeros.
    """

    end: int
    value: tuple[int, int] = (0, 0)


def next_piece(block: bytes, start: int) -> Piece:
    """Return the piece that begins at ``start``, the beginning of a field.

    Dynamic table size updates are accepted only at the start of the block, at most two. In other places they are
    left within a piece, so that the library reports them as an error (RFC 7541, 4.2).

    Raises:
        Unreadable: the first field of the piece cannot be read. Later unreadable fields are left to the next
            piece.
    """
    position, end, fields = start, len(block), 0
    while position < end:
        try:
            after, value = _field(block, position)
        except Unreadable:
            if position == start:
                raise
            return Piece(position)
        if value[0]:
            return Piece(after, value) if position == start else Piece(position)
        position = after
        fields += 1
        if fields >= PIECE_FIELDS or position - start >= PIECE_OCTETS:
            if position == end or block[position] & 0xE0 != 0x20:
                break
            if fields > 2 * PIECE_FIELDS:
                raise Unreadable
    return Piece(position)


class HuffmanString:
    """A long string in Huffman codes (RFC 7541, 5.2), decoded in steps by the library's table of states.

    Args:
        block: the header block.
        start, end: the positions of the string's first octet and after its last octet.
    """

    __slots__ = ("_block", "_end", "_position", "_state", "decoded")

    def __init__(self, block: bytes, start: int, end: int) -> None:
        self._block = block
        self._position = start
        self._end = end
        self._state = 0
        self.decoded = bytearray()
        """The octets of the string decoded so far."""

    def advance(self) -> int:
        """Decode some more octets and return their number, 0 at the end.

        Raises:
            Unreadable: the string is not valid.
        """
        start = self._position
        stop = min(start + HUFFMAN_OCTETS, self._end)
        state, flags, table, append = self._state, HUFFMAN_COMPLETE, HUFFMAN_TABLE, self.decoded.append
        for octet in self._block[start:stop]:
            for nibble in (octet >> 4, octet & 0x0F):
                state, flags, symbol = table[state * 16 + nibble]
                if flags & HUFFMAN_FAIL:
                    raise Unreadable
                if flags & HUFFMAN_EMIT_SYMBOL:
                    append(symbol)
        self._state = state
        self._position = stop
        if start < stop == self._end and not flags & HUFFMAN_COMPLETE:
            raise Unreadable
        return stop - start


def plain_length(length: int) -> bytes:
    """Return the length of a string that is written without Huffman codes."""
    if length < 0x7F:
        return bytes((length,))
    octets = bytearray((0x7F,))
    length -= 0x7F
    while length >= 0x80:
        octets.append(length & 0x7F | 0x80)
        length >>= 7
    octets.append(length)
    return bytes(octets)


def _field(block: bytes, position: int) -> tuple[int, tuple[int, int]]:
    """Return the position after a field, and the position of its value if this is a long string in Huffman codes.

    Raises:
        Unreadable: the field is malformed, or its name is a long string in Huffman codes, which no real field has.
    """
    first = block[position]
    if first & 0x80:
        return _integer(block, position, 0x7F)[1], (0, 0)
    if first & 0xE0 == 0x20:
        return _integer(block, position, 0x1F)[1], (0, 0)
    index, position = _integer(block, position, 0x3F if first & 0x40 else 0x0F)
    value = (0, 0)
    for is_name in (False,) if index else (True, False):
        if position >= len(block):
            raise Unreadable
        is_huffman = block[position] & 0x80
        begins = position
        length, position = _integer(block, position, 0x7F)
        if is_huffman and length > HUFFMAN_OCTETS:
            if is_name:
                raise Unreadable
            value = (begins, position)
        position += length
        if position > len(block):
            raise Unreadable
    return position, value


def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Parse an integer (RFC 7541, 5.1). Return the integer and the position of the next byte."""
    value = block[position] & mask
    position += 1
    if value < mask:
        return value, position
    for shift in range(0, 7 * _LONGEST_INTEGER, 7):
        if position >= len(block):
            raise Unreadable
        octet = block[position]
        position += 1
        value += (octet & 0x7F) << shift
        if octet < 0x80:
            return value, position
    raise Unreadable
