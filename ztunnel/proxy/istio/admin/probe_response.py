"""Reads an HTTP response to a probe by the rules of Go's net/http, which kubelet's prober uses.

This reader accepts more than RFC 9112 permits: lines that end in LF alone, spaces in field names, folded fields,
heads of up to 10 MiB, informational responses before the final response. Like Go, it refuses field names with
other invalid characters, contradicting lengths, transfer codings other than ``chunked``, and a body shorter than
announced. h11, the HTTP/1.1 library of our other clients, cannot be used, because it refuses such spaces.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: Go's default for Transport.MaxResponseHeaderBytes, which here also limits a single line.
LONGEST_HEAD: Final = 10 << 20
#: The largest number of informational (1xx) responses before the final one, as in Go.
_MOST_INFORMATIONAL: Final = 5
_SWITCHING_PROTOCOLS: Final = 101
#: The longest accepted chunk-size line, as in Go.
_LONGEST_CHUNK_LINE: Final = 4096
_VERSION: Final = re.compile(rb"HTTP/([0-9])\.([0-9])")
_STATUS: Final = re.compile(rb"\+?[0-9]+")
#: The characters accepted in field names: token characters (RFC 9110, 5.6.2) and the space.
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z -]+")
_BAD_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_DIGITS: Final = re.compile(rb"[0-9]{1,18}")
_HEX: Final = re.compile(rb"[0-9a-fA-F]{1,16}")
_BODILESS: Final = (204, 304)


class BadResponse(Exception):
    """Kubelet's client would refuse the response, or the response is incomplete. The text states the reason."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a final response.

    Attributes:
        status: the status code.
        modern: whether the HTTP version is 1.1 or later.
        fields: the values of each field, in the order received, by field name in lower case.
    """

    status: int
    modern: bool
    fields: Mapping[str, Sequence[bytes]]

    @property
    def location(self) -> str:
        """The first ``Location`` field, or an empty string."""
        return self._first("location")

    @property
    def content_type(self) -> str:
        """The first ``Content-Type`` field, or an empty string."""
        return self._first("content-type")

    def _first(self, name: str) -> str:
        values = self.fields.get(name, ())
        return values[0].decode("latin-1") if values else ""


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Read the head of the final response.

    Raises:
        BadResponse: the bytes are not a valid head.
        OSError: the connection broke.
    """
    for _ in range(_MOST_INFORMATIONAL + 1):
        head = await _head(reader)
        if not 100 <= head.status < 200 or head.status == _SWITCHING_PROTOCOLS:
            return head
    raise BadResponse("it sends too many informational answers")


async def _head(reader: asyncio.StreamReader) -> Head:
    line = await _line(reader)
    version, space, rest = line.partition(b" ")
    code = rest.lstrip(b" ").partition(b" ")[0]
    match = _VERSION.fullmatch(version)
    if not space or match is None:
        raise BadResponse(f"its first line is no status line of HTTP: {_shown(line)}")
    if len(code) != 3 or not _STATUS.fullmatch(code):
        raise BadResponse(f"its status is no code: {_shown(line)}")
    fields: dict[str, list[bytes]] = {}
    size = 0
    for field in await _field_lines(reader):
        size += len(field)
        name, colon, value = field.partition(b":")
        value = value.lstrip(b" \t")  # like Go, keep the space that an empty continuation line leaves at the end
        if not colon or not _NAME.fullmatch(name) or _BAD_VALUE.search(value):
            raise BadResponse(f"a header field cannot be read: {_shown(field)}")
        fields.setdefault(name.decode().lower(), []).append(value)
        if size > LONGEST_HEAD:
            raise BadResponse("its head is longer than 10 MiB")
    return Head(int(code), (int(match[1]), int(match[2])) >= (1, 1), fields)


async def _field_lines(reader: asyncio.StreamReader) -> list[bytes]:
    """Return the lines of a head up to the empty line. A line that begins with whitespace is joined to the
    previous line.
    """
    found: list[bytes] = []
    size = 0
    while line := await _line(reader):
        size += len(line)
        if size > LONGEST_HEAD:
            raise BadResponse("its head is longer than 10 MiB")
        if line[:1] not in (b" ", b"\t"):
            found.append(line.rstrip(b" \t"))
        elif found:
            found[-1] += b" " + line.strip(b" \t")
        else:
            raise BadResponse(f"its first header field begins with space: {_shown(line)}")
    return found


async def read_body(reader: asyncio.StreamReader, head: Head, most: int) -> bytes:
    """Read at most ``most`` bytes of the body.

    Raises:
        BadResponse: the body is shorter than announced, or not framed as announced.
        OSError: the connection broke.
    """
    length = _length(head)
    if length is None:
        return await _chunks(reader, most)
    if length >= 0:
        wanted = min(length, most)
        body = await _exactly(reader, wanted)
        if len(body) < wanted:
            raise BadResponse(f"it ended after {len(body)} of {length} bytes")
        return body
    return await _exactly(reader, most)


def _length(head: Head) -> int | None:
    """Return the length of the body, -1 if it ends with the connection, or None if it is chunked."""
    lengths = {value.strip(b" \t") for value in head.fields.get("content-length", ())}
    codings = head.fields.get("transfer-encoding", ()) if head.modern else ()
    if len(codings) > 1 or (codings and codings[0].lower() != b"chunked"):
        raise BadResponse(f"its transfer coding is not chunked alone: {_shown(b', '.join(codings))}")
    if len(lengths) > 1:
        raise BadResponse("its lengths contradict each other")
    if any(not _DIGITS.fullmatch(value) for value in lengths):
        raise BadResponse(f"its length is no number: {_shown(b', '.join(lengths))}")
    if 100 <= head.status < 200 or head.status in _BODILESS:
        return 0
    if codings:
        return None
    return int(next(iter(lengths))) if lengths else -1


async def _chunks(reader: asyncio.StreamReader, most: int) -> bytes:
    body = b""
    while len(body) < most:
        line = await _chunk_line(reader)
        size = line.partition(b";")[0].rstrip(b" \t")
        if not _HEX.fullmatch(size):
            raise BadResponse(f"a chunk has no size: {_shown(line)}")
        left = int(size, 16)
        if left == 0:
            await _field_lines(reader)
            return body
        wanted = min(left, most - len(body))
        data = await _exactly(reader, wanted)
        body += data
        if len(data) < wanted:
            raise BadResponse("it ended within a chunk")
        if wanted == left and len(body) < most and await _exactly(reader, 2) != b"\r\n":
            raise BadResponse("a chunk is longer than its size")
    return body


async def _chunk_line(reader: asyncio.StreamReader) -> bytes:
    line = await _until_line_end(reader)
    if len(line) > _LONGEST_CHUNK_LINE:
        raise BadResponse("a chunk's size is in a line that is too long")
    if not line.endswith(b"\r\n"):
        raise BadResponse("a chunk's size is not in a line")
    return line[:-2]


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await _until_line_end(reader)
    return line[:-1].removesuffix(b"\r")


async def _until_line_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise BadResponse("it closed the connection without an answer") from None
        raise BadResponse("it closed the connection within its answer") from None
    except asyncio.LimitOverrunError:
        raise BadResponse("its head is longer than 10 MiB") from None


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    """Read ``count`` bytes. Return fewer only if the connection ends earlier."""
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError as error:
        return error.partial


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("latin-1"))
