"""The header fields of requests, and the checks of answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.grpc.heads import encode_timeout, failure_of_answer, request_fields
from xds.grpc.status import Headers, Status


def test_a_request_as_the_protocol_orders_it() -> None:
    fields = request_fields(
        "/a.B/C", "host:1", secure=True, metadata=[("authorization", "Bearer t")], timeout_s=1.5, user_agent="x"
    )
    assert fields == (
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", b"/a.B/C"),
        (b":authority", b"host:1"),
        (b"te", b"trailers"),
        (b"grpc-timeout", b"1500000u"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"x"),
        (b"authorization", b"Bearer t"),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Upper", "x"),
        ("", "x"),
        ("grpc-timeout", "1S"),
        ("te", "x"),
        ("content-type", "x"),
        (":path", "/x"),
        ("x", "a\nb"),
        ("x", " secret"),
        ("x", "ä"),
    ],
)
def test_metadata_that_cannot_be_sent(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="metadata") as caught:
        request_fields("/a.B/C", "h:1", secure=False, metadata=[(name, value)])
    assert value == "x" or value not in str(caught.value)


@pytest.mark.parametrize("kind", [b"application/grpc", b"application/grpc+proto", b"application/grpc;charset=x"])
def test_content_types_of_grpc(kind: bytes) -> None:
    assert failure_of_answer(200, ((b"content-type", kind),)) is None


@pytest.mark.parametrize(
    ("status", "fields", "found"),
    [
        (404, (), Status.UNIMPLEMENTED),
        (200, (), Status.UNKNOWN),
        (200, ((b"content-type", b"text/html"),), Status.UNKNOWN),
        (200, ((b"content-type", b"application/grpc-web"),), Status.UNKNOWN),
    ],
)
def test_answers_that_are_not_grpc(status: int, fields: Headers, found: Status) -> None:
    failure = failure_of_answer(status, fields)
    assert failure is not None
    assert failure.status is found


@pytest.mark.parametrize(
    ("seconds", "value"),
    [
        (0.2, b"200000u"),
        (0.0, b"0u"),
        (-1.0, b"0u"),
        (99.999999, b"99999999u"),
        (100.0, b"100000m"),
        (1e6, b"1000000S"),
        (1e9, b"16666667M"),
        (1e12, b"99999999H"),
    ],
)
def test_timeouts(seconds: float, value: bytes) -> None:
    assert encode_timeout(seconds) == value


UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6}


@given(st.floats(0, 3e11))
def test_a_timeout_is_rounded_up(seconds: float) -> None:
    encoded = encode_timeout(seconds)
    assert len(encoded) <= 9
    assert seconds - 1e-6 <= int(encoded[:-1]) * UNITS[encoded[-1:]] <= seconds * 1.001 + 1e-3
