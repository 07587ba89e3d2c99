"""Formats ages for tables like kubectl: ``11m6s`` where JSON has ``666.769``; reads times of flows. Pure."""

import re
from datetime import datetime
from typing import Final

_SECONDS: Final = re.compile(r"(\d{1,15}(?:\.\d+)?)s", re.ASCII)
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def shown_age(seconds: float) -> str:
    """Return an age in its largest unit and, if not 0, the next smaller unit. Fractions of a second are
    dropped."""
    rest = int(seconds)
    for place, (size, unit) in enumerate(_UNITS):
        if rest >= size:
            whole, rest = divmod(rest, size)
            lesser_size, lesser = _UNITS[min(place + 1, len(_UNITS) - 1)]
            return f"{whole}{unit}" + (f"{rest // lesser_size}{lesser}" if rest >= lesser_size else "")
    return "0s"


def shown_span(text: str) -> str:
    """Return a duration of JSON such as ``666.769s`` in the form of :func:`shown_age`. Other texts are returned
    unchanged."""
    found = _SECONDS.fullmatch(text)
    return text if found is None else shown_age(float(found[1]))


def time_ns(text: str) -> int:
    """Parse a flow's time to nanoseconds, which ``datetime`` cannot represent."""
    whole, _, rest = text.rstrip("Z").partition(".")
    seconds = datetime.fromisoformat(f"{whole}+00:00").timestamp()
    return int(seconds) * 1_000_000_000 + int(rest.ljust(9, "0")[:9] or 0)
