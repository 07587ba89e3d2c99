"""Ages in tables, as kubectl shows them: a table for people has ``11m6s`` where a page has ``666.769s``. Pure."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

Row = tuple[str, ...]

#: The column of a table, and the first cell of a row of ``ztunnel status``.
AGE: Final = "AGE"
_UP_FOR: Final = "up for"

_SECONDS: Final = re.compile(r"(\d{1,15}(?:\.\d+)?)s", re.ASCII)
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def shown_age(seconds: float) -> str:
    """Return an age in its largest unit and the next one, if that is not 0; parts of a second are left out."""
    rest = int(seconds)
    for place, (size, unit) in enumerate(_UNITS):
        if rest >= size:
            whole, rest = divmod(rest, size)
            lesser_size, lesser = _UNITS[min(place + 1, len(_UNITS) - 1)]
            return f"{whole}{unit}" + (f"{rest // lesser_size}{lesser}" if rest >= lesser_size else "")
    return "0s"


def for_people(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows of a table, with or without a heading, with their ages in the form of :func:`shown_age`."""
    column: int | None = None
    for number, row in enumerate(rows):
        if number == 0 and AGE in row:
            column = row.index(AGE)
        elif column is not None:
            yield (*row[:column], _shown(row[column]), *row[column + 1 :])
            continue
        elif row[0] == _UP_FOR:
            yield (_UP_FOR, *map(_shown, row[1:]))
            continue
        yield row


def _shown(cell: str) -> str:
    found = _SECONDS.fullmatch(cell)
    return cell if found is None else shown_age(float(found[1]))
