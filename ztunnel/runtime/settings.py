"""Parses values of flags and environment variables, for the settings of both dialects."""

import re
from typing import Final

#: The default of ``ZTUNNEL_SPIN_US``, which is long enough for the answer of a nearby peer. Longer polling had no
#: benefit (``bench.compare --only "rr, 1"``).
SPIN_US: Final = 200

#: The names of duration units, and each unit's seconds, as in the Rust ztunnel's parser (crate ``duration-str``).
_UNITS: Final = {
    name: seconds
    for seconds, names in (
        (1e-9, ("ns", "nsec", "nanosecond")),
        (1e-6, ("us", "usec", "microsecond")),
        (1e-3, ("ms", "msec", "millisecond")),
        (1.0, ("s", "sec", "second", "seconds")),
        (60.0, ("m", "min", "minute", "minutes")),
        (3600.0, ("h", "hr", "hour", "hours")),
        (86400.0, ("d", "day", "days")),
        (604800.0, ("w", "week", "weeks")),
    )
    for name in names
}
#: The longest path of a Unix socket: ``sun_path`` of unix(7) has 108 bytes, and ends with a zero.
_LONGEST_SOCKET_PATH: Final = 107
_PIECE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)", re.ASCII)
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


#: Matches the variables that Kubernetes sets for a Service ``ztunnel`` or ``ztunnel-*``. A name in the group
#: ``url`` could also be a setting's name, so its value must be a URL.
_SERVICE_LINK: Final = re.compile(
    r"ZTUNNEL(_[A-Z0-9_]+?)??_"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|(?P<url>PORT))"
)
_SERVICE_URL: Final = re.compile(r"(tcp|udp|sctp)://")


class SettingsError(Exception):
    """Settings are unusable; this lists their faults.

    Attributes:
        faults: one line each, naming the variable or flag.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(self.faults)


def plain_reason(error: Exception) -> str:
    """Return an error as a text for people: the file or socket, and the kernel's message without the errno."""
    if not isinstance(error, OSError):
        return str(error)
    inner = getattr(error, "reason", None)  # the cause of a urllib.error.URLError
    if isinstance(inner, OSError):
        return plain_reason(inner)
    words = (error.strerror or str(error) or "no answer in time").lower()
    return f"{error.filename}: {words}" if error.filename else words


def is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes has set this variable for a Service ``ztunnel`` or ``ztunnel-*``."""
    found = _SERVICE_LINK.fullmatch(name)
    return found is not None and (found["url"] is None or _SERVICE_URL.match(value) is not None)


def count(text: str) -> int:
    """Parse a number that is not negative.

    Raises:
        ValueError: the text has another form.
    """
    if not (text.isascii() and text.isdigit()):
        raise ValueError("must be a whole number, not negative")
    return int(text)


def boolean(text: str) -> bool:
    """Parse ``true`` or ``false``.

    Raises:
        ValueError: the text has another form.
    """
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


def socket_path(text: str) -> str:
    """Parse the absolute path of a Unix socket. An empty text stays empty, which means none.

    Raises:
        ValueError: the path is relative, or longer than an address of unix(7).
    """
    if text and not text.startswith("/"):
        raise ValueError("must be an absolute path")
    if len(text.encode()) > _LONGEST_SOCKET_PATH:
        raise ValueError(f"must be at most {_LONGEST_SOCKET_PATH} bytes long")
    return text


#: The name of the socket, in the handover folder, where a proxy meets its successor.
HANDOVER_SOCKET = "handover.sock"


def handover_dir(text: str) -> str:
    """Parse the absolute path of the folder with :data:`HANDOVER_SOCKET`. An empty text stays empty, which means
    none.

    Raises:
        ValueError: see :func:`socket_path`.
    """
    socket_path(f"{text}/{HANDOVER_SOCKET}" if text else "")
    return text


def duration_s(text: str) -> float:
    """Parse a duration such as ``90``, ``10s``, ``1500ms``, ``24hour``, ``1h30m`` or ``1h 30m`` as seconds.

    Raises:
        ValueError: the text has another form.
    """
    if _NUMBER.fullmatch(text):
        return float(text)
    total, end = 0.0, 0
    while (piece := _PIECE.match(text, end)) is not None and piece[2] in _UNITS:
        total += float(piece[1]) * _UNITS[piece[2]]
        end = piece.end()
    if not end or end != len(text):
        raise ValueError("must be a duration such as 90, 10s, 500ms or 1h30m")
    return total
