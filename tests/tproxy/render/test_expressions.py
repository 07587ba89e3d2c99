"""Every expression survives encoding and decoding; unknown expressions stay visible."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tproxy import expressions as e
from tproxy.expressions import Expression, Family, Opaque
from tproxy.render.expressions import decode_list, encode
from tproxy.wire import attribute, attributes, be32, nest, text

register = st.integers(1, 4)
data = st.binary(min_size=1, max_size=16)
small = st.integers(0, 40)
expressions: st.SearchStrategy[Expression] = st.one_of(
    st.builds(e.Meta, key=small, dreg=register),
    st.builds(e.Meta, key=small, sreg=register),
    st.builds(e.Ct, key=small, dreg=register),
    st.builds(e.Ct, key=small, sreg=register),
    st.builds(e.Payload, base=small, offset=small, length=small, dreg=register),
    st.builds(e.Bitwise, mask=data, xor=data, length=small, sreg=register, dreg=register),
    st.builds(e.Compare, data=data, op=small, sreg=register),
    st.builds(
        e.Lookup, set_name=st.sampled_from(["a", "mesh_pods4"]), sreg=register, flags=st.sampled_from([None, 1])
    ),
    st.builds(e.Lookup, set_name=st.just("m"), sreg=register, dreg=st.sampled_from([0, 1])),
    st.builds(e.Counter),
    st.builds(e.Immediate, data=data, dreg=register),
    st.builds(e.Verdict, code=st.sampled_from([0, 1, -3, -4, -5]), chain=st.sampled_from(["", "save"])),
    st.builds(e.Tproxy, family=small, reg_port=register, reg_addr=st.none() | register),
    st.builds(e.Nat, kind=small, family=small, reg_addr_min=register, reg_addr_max=register),
    st.builds(e.Redirect, reg_proto_min=register, reg_proto_max=register),
    st.builds(e.Fib, result=small, flags=small, dreg=register),
    st.builds(e.SocketLookup, key=small, dreg=register),
)


@given(st.lists(expressions, max_size=8))
def test_a_phrase_comes_back(phrase: list[Expression]) -> None:
    assert decode_list(b"".join(map(encode, phrase))) == tuple(phrase)


def element(name: str, *attributes: bytes) -> bytes:
    return nest(1, text(1, name), nest(2, *attributes))


def test_a_counter_says_what_it_counted_and_is_equal_all_the_same() -> None:
    counted = element("counter", attribute(1, (6000).to_bytes(8, "big")), attribute(2, (100).to_bytes(8, "big")))
    [found] = decode_list(counted)
    assert isinstance(found, e.Counter)
    assert (found.packets, found.octets) == (100, 6000)
    assert found == e.Counter()


def test_an_unknown_expression_is_opaque_and_cannot_be_written() -> None:
    [found] = decode_list(element("limit", be32(1, 5)))
    assert isinstance(found, Opaque)
    assert found.name == "limit"
    with pytest.raises(ValueError, match="limit"):
        encode(found)


@pytest.mark.parametrize(
    ("extra", "known"), [(be32(6, 0), True), (be32(6, 1), False), (attribute(7, b"\0\0\0\7"), False)]
)
def test_an_attribute_that_says_more_makes_it_opaque(extra: bytes, known: bool) -> None:
    """NFTA_BITWISE_OP 0 is added by newer kernels themselves; 1 would be a shift."""
    whole = encode(e.Bitwise(bytes(4), bytes(4)))
    [(_, inner)] = attributes(whole)
    parts = dict(attributes(inner))
    [found] = decode_list(nest(1, text(1, "bitwise"), nest(2, parts[2], extra)))
    assert isinstance(found, e.Bitwise) == known


@pytest.mark.parametrize(("flags", "known"), [(1, True), (3, True), (4, False), (8, False)])
def test_range_flags_that_the_kernel_derives_are_not_more(flags: int, known: bool) -> None:
    """4 is "random", 8 "persistent". The kernel does not set these by itself."""
    found = decode_list(element("nat", be32(1, 1), be32(2, 2), be32(3, 1), be32(4, 1), be32(7, flags)))
    assert (found == (e.Nat(1, 2, 1, 1),)) == known


def test_an_incomplete_expression_is_not_filled_with_defaults() -> None:
    [found] = decode_list(element("payload", be32(1, 1), be32(2, 1)))
    assert isinstance(found, Opaque)


def test_phrases_of_the_other_family_never_match() -> None:
    first = e.source_is(ip_address("fd00::1"), negate=True)[:2]
    assert first == e.family_is(Family.IPV6)
