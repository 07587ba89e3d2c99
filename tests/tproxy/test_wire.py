"""Attributes both ways, and dumps that lie about their lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tproxy.wire import MalformedDump, attribute, attributes, be32, nest, read_be32, read_text, text

kinds = st.integers(1, 0x3FFF)


@given(st.lists(st.tuples(kinds, st.binary(max_size=40))))
def test_attributes_come_back(items: list[tuple[int, bytes]]) -> None:
    assert list(attributes(b"".join(attribute(kind, payload) for kind, payload in items))) == items


@given(st.binary(max_size=64))
def test_any_bytes_are_attributes_or_malformed(data: bytes) -> None:
    try:
        for _, payload in attributes(data):
            assert len(payload) <= len(data)
    except MalformedDump:
        pass


WIRE = nest(1, text(2, "table"), be32(3, -150))


@pytest.mark.parametrize("cut", range(1, len(WIRE)))
def test_a_cut_dump_is_malformed(cut: int) -> None:
    with pytest.raises(MalformedDump):
        list(attributes(WIRE[:cut]))


def test_nesting_flag_is_removed() -> None:
    [(kind, inner)] = attributes(WIRE)
    assert kind == 1
    assert [(number, len(payload)) for number, payload in attributes(inner)] == [(2, 6), (3, 4)]


def test_numbers_and_text() -> None:
    [(_, network)] = attributes(be32(1, 0x100))
    [(_, name)] = attributes(text(1, "eth0"))
    assert (read_be32(network), read_text(name)) == (0x100, "eth0")
    assert network == b"\0\0\1\0"
    with pytest.raises(MalformedDump):
        read_be32(b"\0")
