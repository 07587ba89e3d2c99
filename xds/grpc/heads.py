"""Writes the header fields of gRPC requests, and checks the header fields of responses ("Requests" and "Responses"
in the protocol).
"""

import math
import re
from collections.abc import Iterable
from typing import Final

from xds.grpc.status import Header, Headers, RpcFailed, Status, failure_of_http

CONTENT_TYPE: Final[Header] = (b"content-type", b"application/grpc")
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MOST: Final = 99_999_999  # the largest number of eight digits
#: Header fields that callers must not set, because the transport sets them.
_NO_METADATA: Final = frozenset((b"te", b"content-type", b"user-agent", b"content-length"))


def request_fields(
    path: str,
    authority: str,
    *,
    secure: bool,
    metadata: Iterable[tuple[str, str]] = (),
    timeout_s: float | None = None,
    user_agent: str = "",
) -> Headers:
    """Return the header fields of a request, in the order that the protocol requires.

    Raises:
        ValueError: metadata outside HTTP/2's syntax, or reserved for the transport. The text names fields
        only, because values can be secrets.
    """
    fields: list[Header] = [
        (b":method", b"POST"),
        (b":scheme", b"https" if secure else b"http"),
        (b":path", path.encode("ascii")),
        (b":authority", authority.encode("ascii")),
        (b"te", b"trailers"),
    ]
    if timeout_s is not None:
        fields.append((b"grpc-timeout", encode_timeout(timeout_s)))
    fields.append(CONTENT_TYPE)
    if user_agent:
        fields.append((b"user-agent", user_agent.encode("ascii")))
    for name, value in metadata:
        if not re.fullmatch(r"[0-9a-z_.-]+", name) or name.startswith("grpc-") or name.encode() in _NO_METADATA:
            raise ValueError(f"{name!r} cannot be the name of metadata")
        if not re.fullmatch(r"[!-~]([ -~]*[!-~])?|", value):
            raise ValueError(f"the value of metadata {name!r} is not printable ASCII, or has blanks at its ends")
        fields.append((name.encode(), value.encode()))
    return tuple(fields)


def failure_of_answer(status: int, fields: Headers) -> RpcFailed | None:
    """Return the failure if the header fields of a response are not valid gRPC, otherwise None. Valid header
    fields can also contain the call's status.
    """
    if status != 200:
        return failure_of_http(status)
    content_type = dict(fields).get(b"content-type", b"")
    if not is_grpc(content_type):
        shown = content_type.decode("ascii", "replace")
        return RpcFailed(Status.UNKNOWN, f"the answer has content-type {shown!r}: no gRPC server is there")
    return None


def is_grpc(content_type: bytes) -> bool:
    """Return whether the content type is ``application/grpc``, optionally with ``+proto`` or parameters."""
    kind, rest = content_type[: len(CONTENT_TYPE[1])].lower(), content_type[len(CONTENT_TYPE[1]) :]
    return kind == CONTENT_TYPE[1] and (not rest or rest[:1] in (b"+", b";"))


def encode_timeout(seconds: float) -> bytes:
    """Return the value of ``grpc-timeout``: up to eight digits and a unit, rounded up. The unit is microseconds if
    the number fits.
    """
    for unit in (b"u", b"m", b"S", b"M"):
        count = max(math.ceil(seconds / _UNIT_S[unit] - 1e-6), 0)
        if count <= _MOST:
            return b"%d%b" % (count, unit)
    return b"%dH" % min(math.ceil(seconds / 3600), _MOST)
