"""How calls end."""

import pytest
from h2.errors import ErrorCodes

from xds.grpc.status import RpcFailed, Status, failure_of_fields, failure_of_http, failure_of_reset


def test_a_message_as_other_implementations_write_it() -> None:
    fields = ((b"grpc-status", b"5"), (b"grpc-message", b"kein Dienst %E2%80%9Ea%E2%80%9C%0A100 %25"))
    failure = failure_of_fields(fields)
    assert failure is not None
    assert (failure.status, failure.details) == (Status.NOT_FOUND, "kein Dienst „a“\n100 %")
    assert str(failure) == "NOT_FOUND: kein Dienst „a“\n100 %"


@pytest.mark.parametrize("status", list(Status)[1:])
def test_every_status_is_read(status: Status) -> None:
    failure = failure_of_fields(((b"grpc-status", b"%d" % status),))
    assert failure is not None
    assert (failure.status, str(failure)) == (status, status.name)


def test_ok_is_no_failure() -> None:
    assert failure_of_fields(((b"grpc-status", b"0"),)) is None


def test_no_trailers_at_all_are_a_failure() -> None:
    failure = failure_of_fields(None)
    assert failure is not None
    assert failure.status is Status.INTERNAL


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
def test_http_statuses_become_grpc_statuses(code: int, status: Status) -> None:
    failure = failure_of_http(code)
    assert (failure.status, str(code) in failure.details) == (status, True)


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        (ErrorCodes.CANCEL, Status.CANCELLED, "CANCEL"),
        (ErrorCodes.REFUSED_STREAM, Status.UNAVAILABLE, "REFUSED_STREAM"),
        (ErrorCodes.ENHANCE_YOUR_CALM, Status.RESOURCE_EXHAUSTED, "ENHANCE_YOUR_CALM"),
        (ErrorCodes.INADEQUATE_SECURITY, Status.PERMISSION_DENIED, "INADEQUATE_SECURITY"),
        (ErrorCodes.PROTOCOL_ERROR, Status.INTERNAL, "PROTOCOL_ERROR"),
        (0x63, Status.INTERNAL, "0x63"),
    ],
)
def test_reset_codes_become_grpc_statuses(code: int, status: Status, name: str) -> None:
    failure = failure_of_reset(code)
    assert (failure.status, failure.details) == (status, f"stream reset with {name}")
