"""HTTP requests and pages as values, without I/O; :mod:`ztunnel.runtime.http.server` sends them.

A body is a sequence of pieces, so that a long page never blocks the event loop for long: other work runs between
the pieces. A piece that takes long can be a :class:`Deferred`, which the server runs in a thread. It must not read
state that the event loop changes.
"""

import unicodedata
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import parse_qsl

from ztunnel.runtime.sockets import PeerProcess

TEXT = "text/plain; charset=UTF-8"
#: The content type of errors from Envoy's ``/config_dump``, which name no character set.
PLAIN = "text/plain"
JSON = "application/json"
HTML = "text/html; charset=UTF-8"


@dataclass(frozen=True, slots=True)
class Deferred:
    """A piece of a body that the server makes in another thread than the event loop's."""

    make: Callable[[], str]


Piece = str | bytes | Deferred


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of a request. The first of repeated parameters counts, like in Envoy."""

    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Query":
        """Parse a query such as ``a=1&b``. A parameter without a value has an empty value."""
        return cls(tuple(parse_qsl(text, keep_blank_values=True, encoding="utf-8", errors="replace")))

    def get(self, name: str) -> str | None:
        """Return the value of a parameter, or None if it is absent."""
        return next((value for key, value in self.pairs if key == name), None)

    def __contains__(self, name: object) -> bool:
        return any(key == name for key, _ in self.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A request whose body has been read.

    Attributes:
        path: the decoded path without its query.
        target: the path and the query, as sent.
        local: whether the request came from this host to a loopback address.
        host: the ``Host`` header, as sent.
        fetch_site: ``Sec-Fetch-Site``, a browser's statement about the requesting page. Empty if it is missing.
        body: at most ``MAX_BODY`` bytes.
        process: the client process on a Unix socket. None for TCP.
    """

    method: str
    path: str
    target: str = ""
    query: Query = Query()
    accept: str = ""
    accept_encoding: str = ""
    local: bool = False
    host: str = ""
    fetch_site: str = ""
    body: bytes = b""
    process: PeerProcess | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """The endless rest of a body: pieces at intervals, until the client leaves or the server closes.

    Attributes:
        make: returns the next piece. Called in the event loop, first after ``body`` was sent and then once per
            interval.
        every_s: returns the interval, which begins at the end of one piece and ends when the next is made.
        ended: called once when the answer has ended for any reason, even if no piece was made.
    """

    make: Callable[[], Awaitable[str]]
    every_s: Callable[[], float]
    ended: Callable[[], None]


class Sink(Protocol):
    """The connection of a streamed body."""

    async def data(self, data: bytes) -> None:
        """Send a non-empty piece, and return when the connection can take more. Several tasks may call this.

        Raises:
            OSError: the client is gone.
        """

    async def left(self) -> None:
        """Return when the client has closed its side of the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A body that its maker sends at its own pace, without a time limit. Trailers end it.

    Attributes:
        send: sends the body, and returns the trailers. Cancelled when the server closes.
        ended: called once when the answer has ended for any reason, even if ``send`` was not called.
    """

    send: Callable[[Sink], Awaitable[list[tuple[str, str]]]]
    ended: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """An answer to a request. If it has a ``rest``, the answer ends with the connection."""

    status: int = 200
    content_type: str = TEXT
    body: Iterable[Piece] = field(default=())
    headers: tuple[tuple[str, str], ...] = ()
    rest: Repeated | Streamed | None = None


def text(body: str, status: int = 200, content_type: str = TEXT) -> Page:
    """Return a short page of text."""
    return Page(status=status, content_type=content_type, body=(body,))


def not_found(paths: Iterable[str]) -> Page:
    """Return the 404 for an unknown path, which lists the paths of this port."""
    return text(f"no such page; this port has {', '.join(paths)}\n", 404, PLAIN)


def printable(name: str) -> str:
    """Return ``name`` with line breaks and control characters escaped, for a page of lines.

    Names come from control planes and certificates. These must neither forge a line nor send codes to a terminal.
    """
    if name.isprintable():
        return name
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else _escaped(char) for char in name
    )


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
