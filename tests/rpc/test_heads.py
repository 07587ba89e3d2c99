"""Requests as fields and back; answers judged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone.events import Headers, RequestHead
from hbone.head import parse_request
from rpc.heads import NotGrpc, call_head, decode_timeout, encode_timeout, failure_of_answer, request_fields
from rpc.status import RpcFailed, Status

GRPC = (b"content-type", b"application/grpc")


def head(*headers: tuple[bytes, bytes], method: bytes = b"POST") -> RequestHead:
    return RequestHead(method=method, path=b"/a.B/C", scheme=b"http", headers=headers)


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


def test_a_request_comes_back() -> None:
    fields = request_fields("/a.B/C", "h:1", secure=False, metadata=[("x-a", "1"), ("x-a", "2")], timeout_s=2)
    parsed = parse_request(fields)
    assert isinstance(parsed, RequestHead)
    call = call_head(parsed)
    assert (call.path, dict(call.metadata), call.timeout_s) == ("/a.B/C", {"x-a": "1,2"}, 2.0)


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


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (head(GRPC, method=b"GET"), 405),
        (head(), 415),
        (head((b"content-type", b"application/json")), 415),
        (head((b"content-type", b"application/grpc-web")), 415),
        (RequestHead(method=b"CONNECT", authority=b"a:1"), 405),
    ],
)
def test_what_is_not_grpc(asked: RequestHead, status: int) -> None:
    with pytest.raises(NotGrpc) as caught:
        call_head(asked)
    assert caught.value.http_status == status


@pytest.mark.parametrize("kind", [b"application/grpc", b"application/grpc+proto", b"application/grpc;charset=x"])
def test_content_types_of_grpc(kind: bytes) -> None:
    assert call_head(head((b"content-type", kind))).path == "/a.B/C"
    assert failure_of_answer(200, ((b"content-type", kind),)) is None


@pytest.mark.parametrize(
    ("field", "status"),
    [((b"grpc-encoding", b"gzip"), Status.UNIMPLEMENTED), ((b"grpc-timeout", b"1x"), Status.INTERNAL)],
)
def test_calls_that_cannot_be_served(field: tuple[bytes, bytes], status: Status) -> None:
    with pytest.raises(RpcFailed) as caught:
        call_head(head(GRPC, field))
    assert caught.value.status is status


def test_reserved_fields_are_no_metadata() -> None:
    call = call_head(head(GRPC, (b"grpc-accept-encoding", b"gzip"), (b"user-agent", b"u"), (b"te", b"trailers")))
    assert dict(call.metadata) == {}


@pytest.mark.parametrize(
    ("status", "fields", "found"),
    [
        (404, (), Status.UNIMPLEMENTED),
        (200, (), Status.UNKNOWN),
        (200, ((b"content-type", b"text/html"),), Status.UNKNOWN),
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


@given(st.floats(0, 3e11))
def test_a_timeout_comes_back_rounded_up(seconds: float) -> None:
    assert seconds - 1e-6 <= decode_timeout(encode_timeout(seconds)) <= seconds * 1.001 + 1e-3
