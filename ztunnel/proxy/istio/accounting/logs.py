"""Logs in the format of Rust ztunnel: one stream on standard output, plain or JSON, filtered by target.

Operational lines come from :mod:`logging`. :mod:`ztunnel.proxy.istio.accounting.access_record` makes the access
lines, if this module's filter enables their level. The thread of :mod:`ztunnel.runtime.log_writer` writes both
kinds of lines, off the data path.
"""

import logging
import re
from collections.abc import Callable
from functools import lru_cache

from ztunnel.proxy.istio.accounting.line_rendering import (
    Field,
    Fields,
    Recurring,
    encode,
    json_field,
    plain_field,
    timestamp,
)
from ztunnel.runtime.console.log_form import one_line
from ztunnel.runtime.line_queue import LineQueue
from ztunnel.runtime.log_writer import LogFile, LogWriter

#: The Rust ztunnel begins every log filter with this clause.
ALWAYS = "hickory_server::server=off"
TRACE = 5
_LEVELS = {
    "off": logging.CRITICAL + 10,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": TRACE,
}
#: Maps this project's logger names to the log targets used in filters. The first matching prefix wins.
_TARGETS = (
    ("ztunnel.proxy.istio.path.outbound", "ztunnel::proxy::outbound"),
    ("ztunnel.proxy.istio.path.inbound", "ztunnel::proxy::inbound"),
    ("ztunnel.proxy.istio.path.early_denials", "ztunnel::proxy::inbound"),
    ("ztunnel.proxy.istio.xds.mesh_feed", "ztunnel::xds"),
    ("ztunnel.proxy.istio.app", "ztunnel::app"),
    ("ztunnel.proxy.istio.readiness", "ztunnel::readiness"),
    ("ztunnel.proxy.istio.zds", "ztunnel::inpod"),
    ("ztunnel.proxy.istio.dns", "ztunnel::dns"),
    ("ztunnel.proxy.istio.certificates", "ztunnel::identity"),
    ("ztunnel.proxy.istio", "ztunnel::proxy"),
    ("ztunnel.runtime", "ztunnel"),
    ("ztunnel.", "ztunnel::"),
    ("xds", "ztunnel::xds"),
    ("hbone", "ztunnel::hbone"),
    ("tproxy", "ztunnel::tproxy"),
)


_FIELDS_AT_END = re.compile(r"(?: [a-z][a-z_.]*=%[sdrg])+$")
_NAME = re.compile(r"([a-z_.]+)=%")


class InvalidLevel(ValueError):
    """A clause of a filter is neither a level nor ``target=level``.

    Attributes:
        clause: the clause as given.
    """

    def __init__(self, clause: str) -> None:
        super().__init__(clause)
        self.clause = clause

    def __str__(self) -> str:
        return f"Invalid level provided: {self.clause}"


class LogFilter:
    """A log filter such as ``error,ztunnel::proxy=warn``: a default level, and levels by target prefix. The
    longest matching prefix wins.
    """

    def __init__(self, text: str = "info") -> None:
        self.default = "error"  # like a Rust filter without a default
        self.targets: dict[str, str] = {}
        self.add(ALWAYS)
        self.add(text)

    def add(self, text: str) -> None:
        """Add clauses, which replace earlier clauses for the same target.

        Raises:
            InvalidLevel: a clause is neither a level nor ``target=level``. The filter is then unchanged.
        """
        default, targets = self.default, dict(self.targets)
        for clause in filter(None, (part.strip() for part in text.split(","))):
            target, equals, level = clause.partition("=")
            if not equals:
                if clause.lower() not in _LEVELS:
                    raise InvalidLevel(clause)
                default = clause.lower()
            elif not target or level.lower() not in _LEVELS:
                raise InvalidLevel(clause)
            else:
                targets[target] = level.lower()
        self.default, self.targets = default, targets

    def level(self, target: str) -> int:
        """Return the lowest level that is printed for a target."""
        found, length = self.default, -1
        for prefix, level in self.targets.items():
            if len(prefix) > length and (target == prefix or target.startswith(prefix + "::")):
                found, length = level, len(prefix)
        return _LEVELS[found]

    @property
    def least(self) -> int:
        """The lowest level of all targets."""
        return min(_LEVELS[level] for level in (self.default, *self.targets.values()))

    def __str__(self) -> str:
        ordered = sorted(self.targets.items(), key=lambda item: (-len(item[0]), item[0]))
        return ",".join([*(f"{target}={level}" for target, level in ordered), self.default])


def target_of(logger: str) -> str:
    """Return the target of a logger, by the name of its module."""
    for prefix, target in _TARGETS:
        if logger == prefix or logger.startswith(prefix.rstrip(".") + "."):
            rest = logger[len(prefix) :].lstrip(".")
            base = target.rstrip(":")
            return f"{base}::{rest.replace('.', '::')}" if rest else base
    return logger.replace(".", "::")


class Bare(str):
    """A field value, such as an address, that plain lines print without quotes."""

    __slots__ = ()


def plain_line(time: str, level: str, target: str, message: str, fields: Fields) -> str:
    """Return a line ``TIME LEVEL TARGET MESSAGE k=v k=v``, separated by tabs, with texts quoted."""
    shown = " ".join(
        [
            (part.plain or part.render_plain()) if isinstance(part, Recurring) else plain_field(*part)
            for part in fields
        ]
    )
    return f"{time}\t{level}\t{target.removeprefix('ztunnel::')}\t{message}\t{shown}\n"


def json_line(time: str, level: str, target: str, message: str, fields: Fields) -> str:
    """Return a line as a JSON object; numbers stay numbers."""
    shown = "".join(
        [
            f",{part.json or part.render_json()}" if isinstance(part, Recurring) else f",{json_field(*part)}"
            for part in fields
        ]
    )
    head = f'"level":"{level}","time":"{time}","scope":{encode(target)},"message":{encode(message)}'
    return f"{{{head}{shown}}}\n"


def message_and_fields(record: logging.LogRecord) -> tuple[str, list[Field]]:
    """Split a record into its message and the fields at its end: ``fetched identity=%s`` has one field.

    JSON lines have the fields as keys, as in the Rust ztunnel. Plain lines leave the fields inside the message.
    """
    head, names = _parts(str(record.msg))
    args = record.args
    if not names or not isinstance(args, tuple) or len(args) < len(names):
        return record.getMessage(), []
    first = len(args) - len(names)
    values = [value if type(value) is int else str(value) for value in args[first:]]
    return head % args[:first], list(zip(names, values, strict=True))


@lru_cache(maxsize=512)  # one entry per log format in the sources
def _parts(text: str) -> tuple[str, tuple[str, ...]]:
    found = _FIELDS_AT_END.search(text)
    if found is None:
        return text, ()
    return text[: found.start()], tuple(_NAME.findall(found[0]))


def _level_name(number: int) -> str:
    if number >= logging.ERROR:
        return "error"
    if number >= logging.WARNING:
        return "warn"
    if number >= logging.INFO:
        return "info"
    return "debug" if number >= logging.DEBUG else "trace"


class LogStream(logging.Handler):
    """Formats and filters all log lines of this process, and passes them to the writer.

    Args:
        writer: writes in its own thread.
        file: one of the writer's files.
        filter_text: the filter to start with, see :class:`LogFilter`.
        json_lines: whether lines are JSON instead of plain text.

    Attributes:
        export: called with every access line (wall clock, level, message, fields, ``traceparent``), if not None.
        queue: accepts complete lines from every thread.
        is_plain: whether lines are plain text, not JSON.
    """

    def __init__(self, writer: LogWriter, file: LogFile, filter_text: str, *, json_lines: bool) -> None:
        super().__init__()
        self.queue = LineQueue(writer, file)
        self._start_filter = filter_text
        self._line = json_line if json_lines else plain_line
        self.is_plain = not json_lines
        self.export: Callable[[float, str, str, Fields, bytes], None] | None = None
        self.levels = LogFilter(filter_text)
        self._targets: dict[str, tuple[str, int]] = {}
        self.access_level = self.levels.level("access")
        self.dns_level = self.levels.level("dns")

    def change(self, text: str, *, reset: bool = False) -> None:
        """Add clauses to the current filter, or with ``reset`` to the filter that the process started with.

        Raises:
            InvalidLevel: a clause is invalid. Nothing is changed.
        """
        wanted = LogFilter(self._start_filter if reset else str(self.levels))
        wanted.add(text)
        self.levels = wanted
        self._targets.clear()
        self.access_level, self.dns_level = wanted.level("access"), wanted.level("dns")
        logging.getLogger().setLevel(wanted.least)

    def install(self) -> None:
        """Replace all handlers of the root logger by this one."""
        root = logging.getLogger()
        for handler in list(root.handlers):
            root.removeHandler(handler)
        root.addHandler(self)
        root.setLevel(self.levels.least)
        logging.addLevelName(TRACE, "TRACE")
        # These libraries would log every header field and event at levels that operators enable for our own lines.
        for library in ("hpack", "asyncio"):
            logging.getLogger(library).setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Format a :mod:`logging` record and queue the line for the writer; see :class:`logging.Handler`."""
        known = self._targets.get(record.name)
        if known is None:
            target = target_of(record.name)
            known = self._targets[record.name] = (target, self.levels.level(target))
        target, least = known
        if record.levelno < least:
            return
        fields: Fields = ()
        try:
            if self._line is json_line and record.args:
                message, fields = message_and_fields(record)
            else:
                message = record.getMessage()
            if record.exc_info:
                message += "\n" + (self.formatter or logging.Formatter()).formatException(record.exc_info)
        except Exception:  # noqa: BLE001  a wrong log format must not fail the caller
            self.handleError(record)
            return
        message = one_line(message) if self.is_plain else message.replace("\n", "\\n")
        self.write(record.created, _level_name(record.levelno), target, message, fields)

    def write(self, time_s: float, level: str, target: str, message: str, fields: Fields) -> None:
        """Format one line and queue it for the writer. The caller has checked the level."""
        self.queue.pass_on(
            self._line(timestamp(time_s), level, target, message, fields).encode(errors="backslashreplace")
        )

    def write_access(self, time_s: float, level: str, message: str, fields: Fields, trace: bytes) -> None:
        """Format and queue an access line, like :meth:`write`. ``trace`` is the ``traceparent`` of the
        connection's tunnel.
        """
        self.write(time_s, level, "access", message, fields)
        if self.export is not None:
            self.export(time_s, level, message, fields, trace)

    def flush(self) -> None:
        """Pass queued lines to the writer now; idempotent."""
        self.queue.flush()
