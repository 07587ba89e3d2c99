"""Renders fields of log lines in both formats (plain and JSON), and whole access lines of normally ended
connections.
"""

import json
from collections.abc import Iterable
from functools import lru_cache

from ztunnel.runtime.clock import utc

Field = tuple[str, str | int]


class Recurring:
    """Fields that recur in many log lines, and are rendered only once.

    Attributes:
        fields: names and values.
        plain, json: the fields as rendered in each format. Empty until the first line in that format.
    """

    __slots__ = ("fields", "json", "plain")

    def __init__(self, fields: Iterable[Field]) -> None:
        self.fields = tuple(fields)
        self.plain = self.json = ""

    def render_plain(self) -> str:
        """Render the fields for plain lines, store the text in :attr:`plain` and return it."""
        self.plain = " ".join([plain_field(name, value) for name, value in self.fields])
        return self.plain

    def render_json(self) -> str:
        """Render the fields for JSON lines, store the text in :attr:`json` and return it."""
        self.json = ",".join([json_field(name, value) for name, value in self.fields])
        return self.json


Fields = Iterable[Field | Recurring]


# These encoders are created once: json.dumps would create one per call, because the arguments are not its
# defaults.
_as_it_is = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_as_ascii = json.JSONEncoder(separators=(",", ":")).encode


def encode(value: str | int) -> str:
    """Return a value as JSON. Values with unprintable characters are escaped to ASCII."""
    text = _as_it_is(value)
    return text if text.isprintable() else _as_ascii(value)


def plain_field(name: str, value: str | int) -> str:
    """Return ``name=value`` for a plain line. Texts are quoted, but not numbers and :class:`Bare` values."""
    return f"{name}={encode(value)}" if type(value) is str else f"{name}={value}"


def json_field(name: str, value: str | int) -> str:
    """Return a field as a member of a JSON object, ``"name":value``."""
    return f"{encode(name)}:{encode(value)}"


def timestamp(seconds: float) -> str:
    """Return a time in RFC 3339 format, in UTC with microseconds."""
    micros = round(seconds * 1_000_000)
    return f"{_second(micros // 1_000_000)}.{micros % 1_000_000:06d}Z"


@lru_cache(maxsize=1)
def _second(second: int) -> str:
    return utc("%Y-%m-%dT%H:%M:%S", second)


def completion(
    time_s: float, source: object, shown: Recurring, sent: int, received: int, duration_ms: int, *, plain: bool
) -> bytes:
    """Return the access line of a normally ended connection, faster than ``LogStream.write_access`` formats it.

    Args:
        time_s: the wall clock.
        source: the client's address.
        shown: the connection's other fields, never empty.
        sent, received: bytes.
        duration_ms: the connection's duration.
        plain: whether the line is plain text. If not, it is JSON.
    """
    time = timestamp(time_s)
    if plain:
        line = (
            f"{time}\tinfo\taccess\tconnection complete\tsrc.addr={source} "
            f"{shown.plain or shown.render_plain()} "
            f'bytes_sent={sent} bytes_recv={received} duration="{duration_ms}ms"\n'
        )
    else:
        line = (
            f'{{"level":"info","time":"{time}","scope":"access","message":"connection complete",'
            f'"src.addr":"{source}",{shown.json or shown.render_json()},'
            f'"bytes_sent":{sent},"bytes_recv":{received},"duration":"{duration_ms}ms"}}\n'
        )
    return line.encode(errors="backslashreplace")
