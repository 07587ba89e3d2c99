"""How a call ends: gRPC's status codes, their header fields, and what of HTTP becomes which."""

import re
from enum import IntEnum
from typing import Final

from hbone.errors import ErrorCode, code_name
from hbone.events import Headers

_DETAILS_BYTES: Final = 4096  # of an error's text that is sent; peers limit their header lists to 8 KiB and more


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
    """A call ended with another status than OK; a server's handler raises it to end its call so.

    Attributes:
        status: why.
        details: in words; empty if the peer gave none.
    """

    def __init__(self, status: Status, details: str = "") -> None:
        super().__init__(status, details)
        self.status = status
        self.details = details

    def __str__(self) -> str:
        return f"{self.status.name}: {self.details}" if self.details else self.status.name


#: "HTTP to gRPC Status Code Mapping" (doc/http-grpc-status-mapping.md); others are UNKNOWN.
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

#: "HTTP2 Transport Mapping" of the protocol; others are INTERNAL.
_OF_RESET: Final[dict[int, Status]] = {
    ErrorCode.REFUSED_STREAM: Status.UNAVAILABLE,
    ErrorCode.CANCEL: Status.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: Status.PERMISSION_DENIED,
}


def failure_of_http(code: int) -> RpcFailed:
    """What an HTTP status other than 200 means: something in between answered, not the service."""
    return RpcFailed(_OF_HTTP.get(code, Status.UNKNOWN), f"the answer is HTTP status {code}, not gRPC")


def failure_of_reset(code: int, *, unprocessed: bool = False) -> RpcFailed:
    """What RST_STREAM with ``code`` means; UNAVAILABLE when the peer did nothing yet (RFC 9113, 8.7)."""
    status = Status.UNAVAILABLE if unprocessed else _OF_RESET.get(code, Status.INTERNAL)
    return RpcFailed(status, f"stream reset with {code_name(code)}")


def status_fields(status: Status, details: str = "") -> Headers:
    """The trailers that end a call."""
    code = (b"grpc-status", b"%d" % status)
    return (code, (b"grpc-message", encode_details(details))) if details else (code,)


def failure_of_fields(fields: Headers) -> RpcFailed | None:
    """The verdict in trailers; None for OK.

    A missing or unreadable status is a failure: a call that was cut must not look like one that ended.
    """
    found = dict(fields)
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


def encode_details(text: str) -> bytes:
    """``grpc-message``: UTF-8 with all but printable ASCII percent-encoded; long texts are cut."""
    encoded = re.sub(rb"[^ -$&-~]", lambda found: b"%%%02X" % found[0][0], text.encode("utf-8", "replace"))
    if len(encoded) <= _DETAILS_BYTES:
        return encoded
    return re.sub(rb"%[0-9A-F]?\Z", b"", encoded[:_DETAILS_BYTES])


def decode_details(value: bytes) -> str:
    """The text of a ``grpc-message``; what is badly encoded stays as it is, as the protocol asks."""
    raw = re.sub(rb"%([0-9A-Fa-f]{2})", lambda found: bytes((int(found[1], 16),)), value)
    return raw.decode("utf-8", "replace")
