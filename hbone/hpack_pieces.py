"""Cuts a long header block into pieces of whole fields, so that no peer decides how long one decoding takes.

The ``hpack`` library decodes a block in one call, and copies what is left of it for each field: 32,000 short
fields took a quarter of a second. A piece is decoded as fast as it is read; between two of them other connections
get their turn. Only the lengths of fields are read here (RFC 7541, 5.1, 5.2 and 6), their meaning is the
library's.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PIECE_FIELDS: Final = 64
PIECE_OCTETS: Final = 1024
"""A piece ends with the field that reaches one of the two."""
HUFFMAN_OCTETS: Final = 15_360
"""Huffman codes have at most 30 bits, so a longer string has over 4,096 octets when decoded: more than the dynamic
table may hold. Such a field empties the table, whatever it says (RFC 7541, 4.4), and need not be decoded."""

_LONGEST_INTEGER: Final = 10  # octets after the prefix, as in the library


class Unreadable(Exception):
    """The block ends inside of a field, has too long an integer, or begins with too many table size updates."""


class Piece(NamedTuple):
    """A run of fields.

    Attributes:
        end: position behind it.
        skipped: it is one field with a Huffman string of over :data:`HUFFMAN_OCTETS`.
    """

    end: int
    skipped: bool


def next_piece(block: bytes, start: int) -> Piece:
    """Return the piece that begins at ``start``, the beginning of a field.

    A piece never begins with a dynamic table size update but at the start of the block: inside it is an error (RFC
    7541, 4.2), which the library finds when it sees what was before. Two are all that a block needs there.

    Raises:
        Unreadable: by the first field of the piece. Others are left to the next piece.
    """
    position, end, fields = start, len(block), 0
    while position < end:
        try:
            after, longest = _field(block, position)
        except Unreadable:
            if position == start:
                raise
            return Piece(position, skipped=False)
        if longest > HUFFMAN_OCTETS:
            return Piece(after, skipped=True) if position == start else Piece(position, skipped=False)
        position = after
        fields += 1
        if fields >= PIECE_FIELDS or position - start >= PIECE_OCTETS:
            if position == end or block[position] & 0xE0 != 0x20:
                break
            if fields > 2 * PIECE_FIELDS:
                raise Unreadable
    return Piece(position, skipped=False)


def name_index(block: bytes, position: int) -> int:
    """Return the index that a literal field has as its name; 0: it is written out."""
    return _integer(block, position, 0x3F if block[position] & 0x40 else 0x0F)[0]


def _field(block: bytes, position: int) -> tuple[int, int]:
    """Return the position behind a field, and the length of its longest Huffman string."""
    first = block[position]
    if first & 0x80:
        return _integer(block, position, 0x7F)[1], 0
    if first & 0xE0 == 0x20:
        return _integer(block, position, 0x1F)[1], 0
    index, position = _integer(block, position, 0x3F if first & 0x40 else 0x0F)
    longest = 0
    for _ in range(1 if index else 2):
        if position >= len(block):
            raise Unreadable
        is_huffman = block[position] & 0x80
        length, position = _integer(block, position, 0x7F)
        if is_huffman and length > longest:
            longest = length
        position += length
        if position > len(block):
            raise Unreadable
    return position, longest


def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Return an integer and the position behind it (RFC 7541, 5.1)."""
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
