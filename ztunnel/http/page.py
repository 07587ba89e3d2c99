"""What a page is: an answer as a value, made without I/O, sent by :mod:`ztunnel.http.server`.

A body is a sequence of pieces, so that a long page never holds the event loop for long: between pieces the data
path gets its turn. A piece that takes long by itself may be a :class:`Deferred`, which the server runs in a
thread; it must read nothing that the event loop changes.
"""

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

TEXT = "text/plain; charset=UTF-8"
#: Envoy's ``/config_dump`` answers errors without a character set.
PLAIN = "text/plain"
JSON = "application/json"
HTML = "text/html; charset=UTF-8"


@dataclass(frozen=True, slots=True)
class Deferred:
    """A piece whose making may run outside the event loop's thread."""

    make: Callable[[], str]


Piece = str | bytes | Deferred


@dataclass(frozen=True, slots=True)
class Query:
    """Parameters of a request. Of one given several times the first counts (as Envoy)."""

    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Query":
        """Read ``a=1&b``; a parameter without a value has an empty one."""
        return cls(tuple(parse_qsl(text, keep_blank_values=True, encoding="utf-8", errors="replace")))

    def get(self, name: str) -> str | None:
        """The value of a parameter, ``None`` when it is not there."""
        return next((value for key, value in self.pairs if key == name), None)

    def __contains__(self, name: object) -> bool:
        return any(key == name for key, _ in self.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """One request, its body read. ``path`` is decoded and has no query; ``target`` is both as sent."""

    method: str
    path: str
    target: str = ""
    query: Query = Query()
    accept: str = ""
    accept_encoding: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One answer."""

    status: int = 200
    content_type: str = TEXT
    body: Iterable[Piece] = field(default=())
    headers: tuple[tuple[str, str], ...] = ()


def text(body: str, status: int = 200, content_type: str = TEXT) -> Page:
    """A short page."""
    return Page(status=status, content_type=content_type, body=(body,))


def printable(name: str) -> str:
    """``name`` for a page of lines: characters that would break a line or speak to a terminal are escaped.

    Names come from control planes and certificates; none of them may forge a line or colour a terminal.
    """
    if name.isprintable():
        return name
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else _escaped(char) for char in name
    )


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
