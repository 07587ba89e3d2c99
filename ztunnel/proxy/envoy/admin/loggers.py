"""Makes ``/logging``: shows and changes Python's loggers in Envoy's terms."""

import logging
from collections.abc import Iterable

from ztunnel.runtime.http.page import Page, Query, text

#: The packages whose loggers the page sets.
PACKAGES = ("hbone", "tproxy", "xds", "ztunnel")
OFF = logging.CRITICAL + 10
LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": OFF,
}
_USAGE = f"""\

usage: /logging?<name>=<level> (change single level)
usage: /logging?paths=name1:level1,name2:level2,... (change multiple levels)
usage: /logging?level=<level> (change all levels)
levels: {" ".join(LEVELS)}{" "}
"""


def page(query: Query) -> Page:
    """Change log levels as the request's parameter says, and return the page."""
    try:
        change(query)
    except ValueError as error:
        return text(f"error: {error}\n{_USAGE}{active()}", 400)
    return text(active())


def change(query: Query) -> None:
    """Apply one parameter: ``level``, ``paths`` or the name of a logger. An invalid value changes no logger.

    Raises:
        ValueError: an unknown logger or level.
    """
    if not query.pairs:
        return
    name, value = query.pairs[0]
    if name == "level":
        level = _level(value)
        for package in PACKAGES:
            _set_all(package, level)
    elif name == "paths":
        wanted = []
        for part in value.split(","):
            logger, colon, word = part.rpartition(":")
            if not colon:
                raise ValueError("empty logger name or empty logger level")
            wanted.append((_known(logger), _level(word)))
        for logger, level in wanted:
            _set_all(logger, level)
    else:
        _set_all(_known(name), _level(value))


def _level(word: str) -> int:
    level = LEVELS.get(word)
    if level is None:
        raise ValueError("unknown logger level")
    return level


def _known(name: str) -> str:
    if name not in names():
        raise ValueError("unknown logger name")
    return name


def _set_all(name: str, level: int) -> None:
    """Set a logger's level, and let all loggers below it inherit this level."""
    logging.getLogger(name).setLevel(level)
    for below in names():
        if below.startswith(f"{name}."):
            logging.getLogger(below).setLevel(logging.NOTSET)


def names() -> list[str]:
    """Return the names of our loggers, sorted, always including :data:`PACKAGES`."""
    known: Iterable[str] = list(logging.root.manager.loggerDict)
    return sorted({*PACKAGES, *(name for name in known if name.partition(".")[0] in PACKAGES)})


def active() -> str:
    """Return the page ``/logging``, which lists all loggers with their current levels."""
    lines = [f"  {name}: {level_name(logging.getLogger(name).getEffectiveLevel())}\n" for name in names()]
    return "active loggers:\n" + "".join(lines)


def level_name(level: int) -> str:
    """Return the name of a logging level. A number between two levels gets the name of the more severe level."""
    return next((word for word, bound in LEVELS.items() if level <= bound), "off")
