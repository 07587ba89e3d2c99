"""What a ``traceparent`` names, by the examples and rules of W3C trace context, 3.2 and 3.3."""

import pytest

from ztunnel.proxy.otlp.trace import Trace, parse_traceparent

IDS = b"4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"
NAMED = (0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)


@pytest.mark.parametrize(
    ("value", "flags", "sampled"),
    [
        (b"00-" + IDS + b"-01", 1, True),
        (b"00-" + IDS + b"-00", 0, False),
        (b"00-" + IDS + b"-03", 3, True),
        (b"00-" + IDS + b"-02", 2, False),
        (b"cc-" + IDS + b"-01", 1, True),
        (b"cc-" + IDS + b"-01-what-will-be", 1, True),
    ],
)
def test_valid_traceparent_is_parsed(value: bytes, flags: int, sampled: bool) -> None:
    found = parse_traceparent(value)
    assert found == Trace(*NAMED, flags)
    assert found.sampled is sampled


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        b"ff-" + IDS + b"-01",
        b"00-" + IDS + b"-01-more",
        b"00-" + IDS + b"-01-",
        b"cc-" + IDS + b"-01.more",
        b"00-" + IDS.upper() + b"-01",
        b"00-" + bytes(32).replace(bytes(1), b"0") + b"-00f067aa0ba902b7-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        b"00-" + IDS + b"-1",
        b" 00-" + IDS + b"-01",
        b"00-" + IDS + b"-01\n",
    ],
)
def test_invalid_traceparent_is_ignored(value: bytes) -> None:
    assert parse_traceparent(value) is None
