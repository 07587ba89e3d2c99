"""Header fields of calls: requests written and read, answers judged ("Requests", "Responses" of the protocol)."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from hbone.events import Header, Headers, RequestHead
from rpc.status import RpcFailed, Status, failure_of_http

CONTENT_TYPE: Final[Header] = (b"content-type", b"application/grpc")
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])\Z")
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MOST: Final = 99_999_999  # eight digits
#: Of the transport, not of the caller.
_NO_METADATA: Final = frozenset((b"te", b"content-type", b"user-agent", b"content-length"))


class NotGrpc(Exception):
    """A request that is none of gRPC: answered with HTTP's own status.

    Attributes:
        http_status: such as 415.
    """

    def __init__(self, http_status: int) -> None:
        super().__init__(http_status)
        self.http_status = http_status


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHead:
    """What a request asks for.

    Attributes:
        path: ``/package.Service/Method``.
        metadata: names in lower case; values that came under one name are joined with commas.
        timeout_s: the caller waits so long; None: for ever.
    """

    path: str
    metadata: Mapping[str, str]
    timeout_s: float | None


def request_fields(
    path: str,
    authority: str,
    *,
    secure: bool,
    metadata: Iterable[tuple[str, str]] = (),
    timeout_s: float | None = None,
    user_agent: str = "",
) -> Headers:
    """The head of a request, in the protocol's order.

    Raises:
        ValueError: metadata that HTTP/2 cannot carry, or that belongs to the transport; names only, values may be
            secrets.
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


def call_head(head: RequestHead) -> CallHead:
    """Read a request.

    Raises:
        NotGrpc: it is none of gRPC.
        RpcFailed: it is, and cannot be served.
    """
    if head.method != b"POST" or head.path is None:
        raise NotGrpc(405)
    metadata: dict[str, str] = {}
    content_type, encoding, timeout = b"", b"identity", None
    for name, value in head.headers:
        if name == b"content-type":
            content_type = value
        elif name == b"grpc-encoding":
            encoding = value
        elif name == b"grpc-timeout":
            timeout = value
        elif name not in _NO_METADATA and not name.startswith(b"grpc-"):
            key, text = name.decode("ascii"), value.decode("utf-8", "replace")
            metadata[key] = f"{metadata[key]},{text}" if key in metadata else text
    if not is_grpc(content_type):
        raise NotGrpc(415)
    if encoding != b"identity":
        shown = encoding.decode("ascii", "replace")
        raise RpcFailed(Status.UNIMPLEMENTED, f"grpc-encoding {shown} is not supported, only identity")
    path = head.path.decode("ascii", "replace")
    return CallHead(path=path, metadata=metadata, timeout_s=None if timeout is None else decode_timeout(timeout))


def failure_of_answer(status: int, fields: Headers) -> RpcFailed | None:
    """Judge the head of an answer; None: it is one of gRPC (the call's own status may still come in it)."""
    if status != 200:
        return failure_of_http(status)
    content_type = dict(fields).get(b"content-type", b"")
    if not is_grpc(content_type):
        shown = content_type.decode("ascii", "replace")
        return RpcFailed(Status.UNKNOWN, f"the answer has content-type {shown!r}: no gRPC server is there")
    return None


def is_grpc(content_type: bytes) -> bool:
    """``application/grpc``, alone or with ``+proto`` or parameters after it."""
    kind, rest = content_type[: len(CONTENT_TYPE[1])].lower(), content_type[len(CONTENT_TYPE[1]) :]
    return kind == CONTENT_TYPE[1] and (not rest or rest[:1] in (b"+", b";"))


def encode_timeout(seconds: float) -> bytes:
    """``grpc-timeout``: up to eight digits and a unit, rounded up; microseconds where they fit."""
    for unit in (b"u", b"m", b"S", b"M"):
        count = max(math.ceil(seconds / _UNIT_S[unit] - 1e-6), 0)
        if count <= _MOST:
            return b"%d%b" % (count, unit)
    return b"%dH" % min(math.ceil(seconds / 3600), _MOST)


def decode_timeout(value: bytes) -> float:
    """Seconds.

    Raises:
        RpcFailed: INTERNAL, as the protocol's servers answer it.
    """
    found = _TIMEOUT.match(value)
    if found is None:
        raise RpcFailed(Status.INTERNAL, f"malformed grpc-timeout {value.decode('ascii', 'replace')!r}")
    return int(found[1]) * _UNIT_S[found[2]]
