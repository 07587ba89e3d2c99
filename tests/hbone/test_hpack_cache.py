"""Header blocks: what we read and write ourselves, held to the library."""

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given
from hypothesis import strategies as st

from hbone.hpack_cache import BlockDecoder, BlockEncoder, HeaderBlockError, plain_fields

NAMES = st.one_of(
    st.sampled_from([b":method", b":authority", b":status", b"baggage", b"forwarded", b"traceparent", b"via"]),
    st.binary(min_size=1, max_size=140),
)
VALUES = st.one_of(st.sampled_from([b"", b"CONNECT", b"200", b"GET"]), st.binary(max_size=300))
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=8)
LIMIT = 65_536


def by_library(block: bytes) -> list[tuple[bytes, bytes]]:
    decoded = Decoder(max_header_list_size=LIMIT).decode(block, raw=True)
    return [(bytes(name), bytes(value)) for name, value in decoded]


@given(FIELDS)
def test_encoded_blocks_decode_alike_in_every_implementation(fields: list[tuple[bytes, bytes]]) -> None:
    encoder = BlockEncoder()
    for _ in range(2):  # the second time from the caches
        block = encoder.encode(fields)
        assert by_library(block) == fields
        plain = plain_fields(block, LIMIT)
        assert plain is None or list(plain) == fields


@given(FIELDS)
def test_our_own_requests_never_need_the_library(fields: list[tuple[bytes, bytes]]) -> None:
    short = [(name[:100], value[:200]) for name, value in fields]
    assert plain_fields(BlockEncoder().encode(short), LIMIT) == tuple(short)


@given(st.binary(max_size=64))
def test_any_block_decodes_as_in_the_hpack_library(block: bytes) -> None:
    plain = plain_fields(block, LIMIT)
    if plain is not None:
        assert list(plain) == by_library(block)


@given(FIELDS, st.data())
def test_a_block_that_is_cut_is_never_read_as_a_whole_one(
    fields: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    block = BlockEncoder().encode(fields)
    cut = block[: data.draw(st.integers(0, max(0, len(block) - 1)))]
    plain = plain_fields(cut, LIMIT)
    if plain is None:
        return
    assert list(plain) == by_library(cut)


def test_the_dynamic_table_goes_to_the_library() -> None:
    theirs, ours = Encoder(), BlockDecoder(LIMIT, lambda fields: fields, ())
    fields = [(b":method", b"CONNECT"), (b"baggage", b"k8s.cluster.name=a"), (b"forwarded", b"for=x")]
    for huffman in (False, True, False):
        block = theirs.encode(fields, huffman=huffman)
        assert plain_fields(block, LIMIT) is None
        assert ours.decode(block) == tuple(fields)


@pytest.mark.parametrize("name", [b"traceparent", b"authorization"])
def test_traceparent_and_authorization_are_not_cached_and_dates_only_in_the_last_block(name: bytes) -> None:
    encoder, decoder = BlockEncoder(), BlockDecoder(LIMIT, lambda fields: list(fields), [])
    for number in range(300):
        once = [(b":method", b"CONNECT"), (name, b"%d" % number)]
        assert decoder.decode(encoder.encode(once)) == once
        dated = [(b":status", b"200"), (b"date", b"%d" % number)]
        block = encoder.encode(dated)
        first = decoder.decode(block)
        assert first == dated
        assert encoder.encode(dated) is block
        assert decoder.decode(block) is first
    assert not encoder._blocks
    assert not decoder._blocks
    assert set(encoder._fields) == {(b":method", b"CONNECT"), (b":status", b"200")}


def test_the_last_block_of_the_moment_is_forgotten_when_the_table_changes() -> None:
    theirs, decoder = Encoder(), BlockDecoder(LIMIT, lambda fields: list(fields), [])
    assert decoder.decode(theirs.encode([(b"date", b"now")])) == [(b"date", b"now")]
    indexed = theirs.encode([(b"date", b"now")])
    assert len(indexed) == 1
    assert decoder.decode(indexed) == [(b"date", b"now")]
    assert decoder.decode(theirs.encode([(b"date", b"then")])) == [(b"date", b"then")]
    assert decoder.decode(indexed) == [(b"date", b"then")]


def test_blocks_of_both_kinds_may_alternate() -> None:
    theirs, ours, decoder = Encoder(), BlockEncoder(), BlockDecoder(LIMIT, lambda fields: fields, ())
    for number in range(20):
        fields = [(b":status", b"200"), (b"baggage", b"b"), (b"traceparent", b"%d" % number)]
        assert decoder.decode(theirs.encode(fields)) == tuple(fields)
        assert decoder.decode(ours.encode(fields)) == tuple(fields)


@pytest.mark.parametrize("limit", [0, 31, 64])
def test_the_limit_of_the_list_holds(limit: int) -> None:
    block = BlockEncoder().encode([(b"a", b"b"), (b"c", b"d")])
    assert plain_fields(block, limit) is None
    with pytest.raises(HPACKError):
        Decoder(max_header_list_size=limit).decode(block)
    assert plain_fields(block, 68) is not None


def test_a_block_that_empties_the_table_is_not_remembered() -> None:
    """A size update to 0 and back (RFC 7541, 4.2) must reach the table each time it comes."""
    theirs, decoder = Encoder(), BlockDecoder(LIMIT, lambda fields: fields, ())
    fields = ((b"baggage", b"a=b"),)
    emptied = b"\x20\x3f\xe1\x1f\x88"  # size 0, size 4096, :status 200
    for _ in range(2):
        indexing = theirs.encode(fields)
        indexed = theirs.encode(fields)
        assert decoder.decode(indexing) == decoder.decode(indexed) == fields
        assert decoder.decode(emptied) == ((b":status", b"200"),)
        with pytest.raises(HeaderBlockError):
            decoder.decode(indexed)
        theirs = Encoder()


@pytest.mark.parametrize("indexing", [True, False])
def test_a_list_over_the_limit_is_decoded_for_the_tables_sake(indexing: bool) -> None:
    """A placeholder reports the excess. The list is decoded nevertheless, because the next block can refer to the
    table entries that it added.
    """
    theirs, decoder = Encoder(), BlockDecoder(100, lambda fields: fields, None)
    long = ((b"a", b"v" * 200),)
    for _ in range(2):
        assert decoder.decode(theirs.encode(long) if indexing else BlockEncoder().encode(long)) is None
    assert decoder.decode(theirs.encode([(b"b", b"c")])) == ((b"b", b"c"),)


def test_a_list_that_takes_too_long_to_decode_ends_the_connection() -> None:
    theirs, decoder = Encoder(), BlockDecoder(100, lambda fields: fields, None)
    once = theirs.encode([(b"a", b"v" * 3000)])
    again = theirs.encode([(b"a", b"v" * 3000)])
    assert decoder.decode(once + again * 40) is None
    with pytest.raises(HeaderBlockError) as caught:
        decoder.decode(again * 50)
    assert caught.value.oversized
