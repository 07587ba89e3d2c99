"""Messages out of DATA, cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.grpc.messages import MessageReader, prefix
from xds.grpc.status import RpcFailed, Status


def wire(*messages: bytes) -> bytes:
    return b"".join(prefix(message) + message for message in messages)


def test_every_cut_of_three_messages() -> None:
    messages = [b"first", b"", b"third one"]
    data = wire(*messages)
    for one in range(len(data) + 1):
        for two in range(one, len(data) + 1):
            reader = MessageReader(None)
            pieces = (data[:one], data[one:two], data[two:])
            assert [m for piece in pieces for m in reader.feed(piece)] == messages
            assert reader.between


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 60), max_size=40))
def test_chunks_of_any_size(messages: list[bytes], sizes: list[int]) -> None:
    left, reader, got = memoryview(wire(*messages)), MessageReader(40), []
    for size in (*sizes, len(left)):
        got += reader.feed(left[:size])
        left = left[size:]
    assert got == messages
    assert reader.between


@pytest.mark.parametrize("held", [1, 4, 5, 7])
def test_an_unfinished_message_shows(held: int) -> None:
    reader = MessageReader(None)
    assert reader.feed(wire(b"abc")[:held]) == []
    assert not reader.between


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"\x01\0\0\0\x01x", Status.UNIMPLEMENTED, "compressed"),
        (b"\x02\0\0\0\x01x", Status.INTERNAL, "0x02"),
        (b"\0\0\0\0\x0b", Status.RESOURCE_EXHAUSTED, "11 bytes is over the limit of 10"),
        (b"\0\xff\xff\xff\xff", Status.RESOURCE_EXHAUSTED, "4294967295"),
    ],
)
def test_refused_as_soon_as_the_prefix_is_there(data: bytes, status: Status, words: str) -> None:
    reader = MessageReader(10)
    with pytest.raises(RpcFailed, match=words) as caught:
        reader.feed(data)
    assert caught.value.status is status


def test_the_limit_itself_is_allowed() -> None:
    assert MessageReader(3).feed(wire(b"abc")) == [b"abc"]
