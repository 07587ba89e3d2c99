"""Renders format strings: turns a parsed format into a function of a :class:`StreamInfo`."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from xds.model.access_log import AccessLog, JsonValue
from xds.model.format_string import Command, FormatString
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.telemetry.command_values import (
    STRUCTS,
    Reader,
    json_text,
    local_address,
    metadata_value,
    plain_numbers,
    value_reader,
)

Renderer = Callable[[StreamInfo], str]

_UNSAFE = re.compile(r"[\x00-\x1f\x7f]")


def renderer(text: FormatString, *, missing: str = "-") -> Renderer:
    """Return a function that renders ``text`` for a hop.

    Args:
        text: the parsed format.
        missing: the text for missing values.
    """
    literal = text.literal
    if literal is not None:
        return lambda _: literal
    commands = tuple([part for part in text.parts if not isinstance(part, str)])
    if len(text.parts) == 1:
        return _alone(value_reader(commands[0]), missing)
    return Line(text, _values(commands, missing))


def _alone(read: Reader, missing: str) -> Renderer:
    def render(info: StreamInfo) -> str:
        value = read(info) or missing
        return value if value.isprintable() else _UNSAFE.sub(_escaped, value)

    return render


class Line:
    """A compiled text format, which renders a hop's log line in two steps: read the values, then insert them.

    A line takes 5 microseconds, with one call per command and one check for unprintable characters per line. With
    a call per part and a check per value, it took 20 (twice per connection; ``bench.compare --only crr``).

    Attributes:
        values: returns the commands' values for a hop. Formats with the same commands have the same function.
    """

    __slots__ = ("_line_end", "_plain", "_template", "values")

    def __init__(self, text: FormatString, values: Callable[[StreamInfo], tuple[str, ...]]) -> None:
        self.values = values
        template = "".join([part.replace("%", "%%") if isinstance(part, str) else "%s" for part in text.parts])
        self._line_end = "\n" if template.endswith("\n") else ""
        self._template = template.removesuffix(self._line_end)
        literals = "".join([part for part in text.parts if isinstance(part, str)])
        self._plain = literals.removesuffix(self._line_end).isprintable()

    def __call__(self, info: StreamInfo) -> str:
        """Return the access log line of a hop."""
        return self.of(self.values(info))

    def of(self, values: tuple[str, ...]) -> str:
        """Return the log line with ``values``, a result of :attr:`values`."""
        line = self._template % values
        if not (self._plain and line.isprintable()):
            # Escape unprintable characters in values, so that a text from the network cannot forge a line or send
            # codes to a terminal.
            line = self._template % tuple([_UNSAFE.sub(_escaped, value) for value in values])
        return line + self._line_end


@lru_cache(maxsize=256)
def _values(commands: tuple[Command, ...], missing: str) -> Callable[[StreamInfo], tuple[str, ...]]:
    """Return one function that reads the values of all commands in a line.

    The function is compiled from source text, like a dataclass's ``__init__``. In it, frequent values are
    expressions instead of calls to readers. This saves 45 of 55 calls per connection (``DIALECT=envoy make
    bench-instructions``).
    """
    names: dict[str, Any] = {"missing": missing, "local_address": local_address}
    parts = []
    for place, command in enumerate(commands):
        known = None if command.max_length is not None else _expression(command)
        if known is None or "read" in known:
            names[f"read{place}"] = value_reader(command)
        read = f"(read{place}(info) or missing)"
        parts.append(read if known is None else known.replace("read", read))
    values: Callable[[StreamInfo], tuple[str, ...]] = eval(f"lambda info: ({', '.join(parts)},)", names)
    return values


def _without_spaces(name: str) -> str:
    return f'(info.{name}.replace(" ", "_") if info.{name} else missing)'


#: Python expressions for frequent commands. An expression has the value that the command's reader returns for the
#: hop ``info``, or ``missing``.
_EXPRESSIONS: Mapping[str, str] = {
    "BYTES_RECEIVED": 'f"{info.bytes_received}"',
    "BYTES_SENT": 'f"{info.bytes_sent}"',
    "CONNECTION_TERMINATION_DETAILS": _without_spaces("termination_details"),
    "DOWNSTREAM_LOCAL_ADDRESS": 'f"{local_address(info)}"',
    "DOWNSTREAM_REMOTE_ADDRESS": '(info.remote_text or f"{info.facts.source}")',
    "DURATION": '(missing if info.duration_s is None else f"{int(info.duration_s * 1000)}")',
    "PROTOCOL": "(info.protocol or missing)",
    "REQUESTED_SERVER_NAME": "(info.facts.server_name or missing)",
    "RESPONSE_CODE": 'f"{info.response_code}"',
    "RESPONSE_CODE_DETAILS": _without_spaces("response_details"),
    "RESPONSE_FLAGS": '(read if info.flags else "-")',
    "ROUTE_NAME": "(info.route or missing)",
    "UPSTREAM_CLUSTER": "(info.upstream_cluster or missing)",
    "UPSTREAM_HOST": "(info.upstream_host or missing)",
    "UPSTREAM_LOCAL_ADDRESS": "(info.upstream_local or missing)",
    "UPSTREAM_TRANSPORT_FAILURE_REASON": _without_spaces("upstream_failure"),
}


def _expression(command: Command) -> str | None:
    """Return the Python expression for a command, if there is one."""
    if command.name in ("RESP", "RESPONSE_HEADER"):
        return "(read if info.response_headers else missing)"
    if command.name in ("REQ", "REQUEST_HEADER"):
        pseudo = _PSEUDO_FIELDS.get(command.argument.lower())
        return pseudo or f"(read if {_IS_REQUEST} else missing)"
    return _EXPRESSIONS.get(command.name)


#: An expression for whether a hop is a request. Plain connections have no request headers and no connection
#: manager.
_IS_REQUEST = "info.method or info.path or info.authority or info.request_headers or info.manager is not None"
_PSEUDO_FIELDS = {f":{name}": f"(info.{name} or missing)" for name in ("method", "authority", "path")}


def log_renderer(log: AccessLog) -> Renderer:
    """Return a function that renders one line of an access log, with its newline."""
    missing = "" if log.omit_empty else "-"
    if isinstance(log.format, FormatString):
        return renderer(log.format, missing=missing)
    template = {key: _json(value, missing) for key, value in log.format.fields.items()}
    return partial(_render_json, template, log.omit_empty)


def _escaped(char: "re.Match[str]") -> str:
    return f"\\x{ord(char[0]):02x}"


def _json(value: JsonValue, missing: str) -> Any:
    """Return the template of a JSON log line. Callables in it are called with the hop, and other values are
    printed unchanged.
    """
    if isinstance(value, FormatString):
        if len(value.parts) == 1 and isinstance(value.parts[0], Command):
            return _typed(value.parts[0])
        return renderer(value, missing=missing)
    if isinstance(value, Mapping):
        return {key: _json(inner, missing) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner, missing) for inner in value]
    return plain_numbers(value)


_NUMERIC = frozenset(
    (
        "BYTES_RECEIVED",
        "BYTES_SENT",
        "DURATION",
        "RESPONSE_CODE",
        "CONNECTION_ID",
        "UPSTREAM_REQUEST_ATTEMPT_COUNT",
        "DOWNSTREAM_LOCAL_PORT",
        "DOWNSTREAM_REMOTE_PORT",
        "DOWNSTREAM_DIRECT_REMOTE_PORT",
        "UPSTREAM_LOCAL_PORT",
        "UPSTREAM_REMOTE_PORT",
        "DOWNSTREAM_DIRECT_LOCAL_PORT",
        "UPSTREAM_CONNECTION_POOL_READY_DURATION",
        "RESPONSE_DURATION",
        "BYTES_RETRANSMITTED",
        "PACKETS_RETRANSMITTED",
        "RESPONSE_TRAILERS_BYTES",
    )
)


def _typed(command: Command) -> Callable[[StreamInfo], Any]:
    """Return a reader for a JSON field that is a single command. The value keeps its JSON type, and a missing
    value becomes null.
    """
    if command.name in STRUCTS and command.max_length is None:
        return metadata_value(STRUCTS[command.name], command.argument)
    read = value_reader(command)
    if command.name not in _NUMERIC:
        return read

    def number(info: StreamInfo) -> int | None:
        value = read(info)
        return None if value is None else int(value)

    return number


def _render_json(template: Mapping[str, Any], omit_empty: bool, info: StreamInfo) -> str:
    return json_text(_fill(template, info, omit_empty)) + "\n"


def _fill(value: Any, info: StreamInfo, omit_empty: bool) -> Any:
    """Return a template's values for a hop. With ``omit_empty``, missing values are left out at any depth."""
    if callable(value):
        return value(info)
    if isinstance(value, dict):
        filled = {key: _fill(inner, info, omit_empty) for key, inner in value.items()}
        return {key: inner for key, inner in filled.items() if inner is not None} if omit_empty else filled
    if isinstance(value, list):
        items = [_fill(inner, info, omit_empty) for inner in value]
        return [item for item in items if item is not None] if omit_empty else items
    return value
