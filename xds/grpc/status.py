"""The result of a call: gRPC's status codes, their trailers, and the mapping of HTTP and HTTP/2 errors."""

import re
from enum import IntEnum
from typing import Final, TypeAlias

from h2.errors import ErrorCodes

Header: TypeAlias = tuple[bytes, bytes]
Headers: TypeAlias = tuple[Header, ...]


class Status(IntEnum):
    """Status codes (github.com/grpc/grpc, doc/statuscodes.md)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class RpcFailed(Exception):
    """A call ended with another status than OK.

    Attributes:
        status: the status code.
        details: the peer's or our explanation. Can be empty.
    """

    def __init__(self, status: Status, details: str = "") -> None:
        super().__init__(status, details)
        self.status = status
        self.details = details

    def __str__(self) -> str:
        return f"{self.status.name}: {self.details}" if self.details else self.status.name


#: gRPC statuses for HTTP statuses ("HTTP to gRPC Status Code Mapping", doc/http-grpc-status-mapping.md). All
#: others mean UNKNOWN.
_OF_HTTP: Final = {
    400: Status.INTERNAL,
    401: Status.UNAUTHENTICATED,
    403: Status.PERMISSION_DENIED,
    404: Status.UNIMPLEMENTED,
    429: Status.UNAVAILABLE,
    502: Status.UNAVAILABLE,
    503: Status.UNAVAILABLE,
    504: Status.UNAVAILABLE,
}

#: gRPC statuses for HTTP/2 error codes ("HTTP2 Transport Mapping" in the protocol). All others mean INTERNAL.
_OF_RESET: Final[dict[int, Status]] = {
    ErrorCodes.REFUSED_STREAM: Status.UNAVAILABLE,
    ErrorCodes.CANCEL: Status.CANCELLED,
    ErrorCodes.ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED,
    ErrorCodes.INADEQUATE_SECURITY: Status.PERMISSION_DENIED,
}


def code_name(code: int) -> str:
    """Return the name of an HTTP/2 error code, such as ``CANCEL`` for 8, or ``0x63`` for a code unknown to RFC
    9113.
    """
    try:
        return ErrorCodes(code).name
    except ValueError:
        return hex(code)


def failure_of_http(code: int) -> RpcFailed:
    """Return the failure for an HTTP status other than 200. An intermediary, not the service, sends such a
    status.
    """
    return RpcFailed(_OF_HTTP.get(code, Status.UNKNOWN), f"the answer is HTTP status {code}, not gRPC")


def failure_of_reset(code: int) -> RpcFailed:
    """Return the failure for an RST_STREAM with ``code``."""
    return RpcFailed(_OF_RESET.get(code, Status.INTERNAL), f"stream reset with {code_name(code)}")


def failure_of_fields(fields: Headers | None) -> RpcFailed | None:
    """Return the failure from a call's trailers, or None for OK.

    A missing or unreadable status is a failure, because an aborted call must not be mistaken for a completed one.
    """
    found = dict(fields or ())
    code = found.get(b"grpc-status")
    if code is None:
        return RpcFailed(Status.INTERNAL, "the server ended the stream without grpc-status")
    details = decode_details(found.get(b"grpc-message", b""))
    if not code.isdigit() or len(code) > 9:
        return RpcFailed(Status.UNKNOWN, details or f"grpc-status is {code!r}")
    try:
        status = Status(int(code))
    except ValueError:
        return RpcFailed(Status.UNKNOWN, details or f"grpc-status is {int(code)}")
    return None if status is Status.OK else RpcFailed(status, details)


def decode_details(value: bytes) -> str:
    """Decode the text of a ``grpc-message``. Badly encoded parts stay as they are, as the protocol requires."""
    raw = re.sub(rb"%([0-9A-Fa-f]{2})", lambda found: bytes((int(found[1], 16),)), value)
    return raw.decode("utf-8", "replace")
