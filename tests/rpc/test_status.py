"""How calls end, as fields and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone.errors import ErrorCode
from rpc.status import (
    RpcFailed,
    Status,
    decode_details,
    encode_details,
    failure_of_fields,
    failure_of_http,
    failure_of_reset,
    status_fields,
)


def test_fields_as_other_implementations_write_them() -> None:
    assert status_fields(Status.OK) == ((b"grpc-status", b"0"),)
    assert status_fields(Status.NOT_FOUND, "kein Dienst „a“\n100 %") == (
        (b"grpc-status", b"5"),
        (b"grpc-message", b"kein Dienst %E2%80%9Ea%E2%80%9C%0A100 %25"),
    )


@given(st.sampled_from(list(Status)[1:]), st.text(max_size=200))
def test_a_status_comes_back(status: Status, details: str) -> None:
    readable = details.encode("utf-8", "replace").decode()
    failure = failure_of_fields(status_fields(status, details))
    assert failure is not None
    assert (failure.status, failure.details) == (status, readable)
    assert str(failure) == (f"{status.name}: {readable}" if readable else status.name)


def test_ok_is_no_failure() -> None:
    assert failure_of_fields(status_fields(Status.OK)) is None


@pytest.mark.parametrize(
    ("fields", "status", "details"),
    [
        ((), Status.INTERNAL, "the server ended the stream without grpc-status"),
        (((b"grpc-status", b"99"),), Status.UNKNOWN, "grpc-status is 99"),
        (((b"grpc-status", b"-1"),), Status.UNKNOWN, "grpc-status is b'-1'"),
        (((b"grpc-status", b"1" * 5000),), Status.UNKNOWN, None),
        (((b"grpc-status", b"14"), (b"grpc-message", b"%zz%4")), Status.UNAVAILABLE, "%zz%4"),
        (((b"grpc-status", b"14"), (b"grpc-message", b"%FF")), Status.UNAVAILABLE, "\ufffd"),
    ],
)
def test_bad_trailers_are_failures(
    fields: tuple[tuple[bytes, bytes], ...], status: Status, details: str | None
) -> None:
    failure = failure_of_fields(fields)
    assert isinstance(failure, RpcFailed)
    assert failure.status is status
    assert details is None or failure.details == details


def test_long_details_are_cut_between_characters() -> None:
    encoded = encode_details("a" * 4094 + "\n\n")
    assert len(encoded) <= 4096
    assert decode_details(encoded) == "a" * 4094


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (400, Status.INTERNAL),
        (401, Status.UNAUTHENTICATED),
        (403, Status.PERMISSION_DENIED),
        (404, Status.UNIMPLEMENTED),
        (429, Status.UNAVAILABLE),
        (503, Status.UNAVAILABLE),
        (500, Status.UNKNOWN),
        (302, Status.UNKNOWN),
    ],
)
def test_http_status(code: int, status: Status) -> None:
    failure = failure_of_http(code)
    assert (failure.status, str(code) in failure.details) == (status, True)


@pytest.mark.parametrize(
    ("code", "unprocessed", "status"),
    [
        (ErrorCode.CANCEL, False, Status.CANCELLED),
        (ErrorCode.REFUSED_STREAM, False, Status.UNAVAILABLE),
        (ErrorCode.ENHANCE_YOUR_CALM, False, Status.RESOURCE_EXHAUSTED),
        (ErrorCode.INADEQUATE_SECURITY, False, Status.PERMISSION_DENIED),
        (ErrorCode.PROTOCOL_ERROR, False, Status.INTERNAL),
        (0x63, False, Status.INTERNAL),
        (ErrorCode.PROTOCOL_ERROR, True, Status.UNAVAILABLE),
    ],
)
def test_resets(code: int, unprocessed: bool, status: Status) -> None:
    assert failure_of_reset(code, unprocessed=unprocessed).status is status
