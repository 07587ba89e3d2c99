"""Long header blocks in pieces, held to the library that decodes them in one."""

import pytest
from hpack import Decoder, Encoder, HPACKError
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st

from hbone.events import Header
from hbone.hpack_cache import LONG_BLOCK_BYTES, TOLERATED_LIST_BYTES, BlockDecoder, HeaderBlockError
from hbone.hpack_pieces import HUFFMAN_OCTETS, PIECE_FIELDS, PIECE_OCTETS, Unreadable, next_piece, plain_length

LIMIT = 65_536
#: Recurring names and values, so that blocks refer to the dynamic table, and new ones.
FIELDS = st.lists(
    st.tuples(
        st.sampled_from([b":method", b"via", b"baggage", b"x" * 200]),
        st.one_of(st.sampled_from([b"", b"GET", b"v" * 300]), st.binary(max_size=60)),
    ),
    max_size=3 * PIECE_FIELDS,
)
INSERT = b"\x40\x01a\x00"


def decoder(limit: int = LIMIT) -> BlockDecoder[tuple[Header, ...] | None]:
    return BlockDecoder(limit, lambda fields: fields, None)


def library() -> Decoder:
    return Decoder(max_header_list_size=TOLERATED_LIST_BYTES)


def by_library(theirs: Decoder, block: bytes) -> tuple[Header, ...]:
    return tuple((bytes(name), bytes(value)) for name, value in theirs.decode(block, raw=True))


@given(st.lists(st.tuples(FIELDS, st.booleans()), max_size=3))
def test_a_block_in_pieces_decodes_like_the_whole(blocks: list[tuple[list[Header], bool]]) -> None:
    encoder, ours, theirs = Encoder(), decoder(), library()
    for fields, huffman in blocks:
        block = encoder.encode(fields, huffman=huffman)
        assert by_library(theirs, block) == tuple(fields)
        assert ours.decode(block) == tuple(fields)
        assert list(ours._table.dynamic_entries) == list(theirs.header_table.dynamic_entries)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_block_in_pieces_is_read_or_refused_as_by_the_hpack_library(tail: bytes, before: int) -> None:
    block = INSERT * (LONG_BLOCK_BYTES // 4 + before) + tail
    try:
        wanted = by_library(library(), block)
    except HPACKError:
        with pytest.raises(HeaderBlockError):
            decoder().decode(block)
    else:
        assert decoder().decode(block) == wanted


@given(st.binary(min_size=1, max_size=3000))
def test_pieces_are_short_and_cover_the_block(block: bytes) -> None:
    position = 0
    while position < len(block):
        try:
            piece = next_piece(block, position)
        except Unreadable:
            return
        assert position < piece.end <= len(block)
        position = piece.end


def test_a_piece_ends_by_its_fields_or_its_octets() -> None:
    assert next_piece(b"\x82" * 1000, 0).end == PIECE_FIELDS
    value = b"\x00\x01a\x7f\x81\x03" + bytes(512)  # 127 + 1 + 3 * 128
    assert next_piece(value * 4, 0).end == 2 * len(value) >= PIECE_OCTETS


def test_a_table_size_update_in_a_block_is_no_new_beginning() -> None:
    block = b"\x82" * PIECE_FIELDS + b"\x20" + b"\x82" * LONG_BLOCK_BYTES
    with pytest.raises(HeaderBlockError):
        decoder().decode(block)
    assert decoder().decode(b"\x20\x3f\xe1\x1f" + b"\x82" * LONG_BLOCK_BYTES) is not None


def test_table_size_updates_without_end_are_refused() -> None:
    with pytest.raises(HeaderBlockError, match="not readable"):
        decoder().decode(b"\x20" * 100_000)


@pytest.mark.parametrize("indexing", [b"\x40", b"\x00", b"\x10"])
@pytest.mark.parametrize("length", [3000, 5000, 38_000])
def test_a_long_huffman_string_is_decoded_in_steps(indexing: bytes, length: int) -> None:
    """The table is as if the library had read it."""
    ours, theirs = decoder(), library()
    before = Encoder().encode([(b"a", b"b")])
    value = bytes(32 + number % 90 for number in range(length))
    string = encoded(value)
    assert len(string) > HUFFMAN_OCTETS
    block = b"\x82" + indexing + b"\x01n" + string + before
    for each in (before, block, before):
        assert ours.decode(each) == by_library(theirs, each)
        assert list(ours._table.dynamic_entries) == list(theirs.header_table.dynamic_entries)


def encoded(value: bytes) -> bytes:
    """A string in Huffman codes with its length."""
    codes = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(value)
    length = bytearray(plain_length(len(codes)))
    length[0] |= 0x80
    return bytes(length) + codes


@pytest.mark.parametrize("damage", ["cut", "padding", "name"])
def test_a_long_huffman_string_that_is_wrong_ends_the_connection(damage: str) -> None:
    good = encoded(b"x" * 4000)
    wrong = {
        "cut": b"\x00\x01n" + good[:-5],
        "padding": b"\x00\x01n" + good[:-1] + b"\x00",
        "name": b"\x00" + good + b"\x00",
    }[damage]
    with pytest.raises(HeaderBlockError, match="not readable"):
        decoder().decode(wrong)


@given(st.binary(min_size=2100, max_size=4000))
def test_any_octets_as_a_huffman_string_are_read_or_refused_as_by_the_library(octets: bytes) -> None:
    length = bytearray(plain_length(len(octets)))
    length[0] |= 0x80
    block = b"\x00\x01n" + bytes(length) + octets
    try:
        wanted = by_library(library(), block)
    except HPACKError:
        with pytest.raises(HeaderBlockError):
            decoder().decode(block)
    else:
        assert decoder().decode(block) == wanted


def test_the_limits_of_lists_hold_for_pieces() -> None:
    field = b"\x00\x01a\x64" + b"v" * 100  # 133 octets in a list
    most = 100 * 133
    assert decoder(most).decode(field * 100) is not None
    assert decoder(most).decode(field * 101) is None
    with pytest.raises(HeaderBlockError) as caught:
        decoder(most).decode(field * (TOLERATED_LIST_BYTES // 133 + 1))
    assert caught.value.oversized
