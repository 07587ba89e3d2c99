"""Formats the log lines of every process like the Rust ztunnel: plain, or as JSON with ``LOG_FORMAT=json``.

The proxy of an Istio mesh writes its lines itself (``ztunnel.proxy.istio.accounting.logs``), in the same form.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, TextIO

_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LEVELS: Final = {"WARNING": "warn", "CRITICAL": "error"}


class LineFormatter(logging.Formatter):
    """Formats ``TIME LEVEL SCOPE MESSAGE``, separated by tabs, or an object with these keys.

    Args:
        as_json: whether each line is a JSON object.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the traceback after the message."""
        time = f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S.%f}Z"
        level = _LEVELS.get(record.levelname, record.levelname.lower())
        scope = record.name.replace(".", "::")
        message = record.getMessage()
        if not self._as_json:
            message = one_line(message)
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        if self._as_json:
            fields = {"level": level, "time": time, "scope": scope, "message": message}
            return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        return f"{time}\t{level}\t{scope.removeprefix('ztunnel::')}\t{message}"


def one_line(message: str) -> str:
    """Return a message with escaped control characters.

    Parts of messages come from peers. These must neither forge a line nor send codes to a terminal.
    """
    return message if message.isprintable() else _UNSAFE.sub(_escaped, message)


def _escaped(char: re.Match[str]) -> str:
    return repr(char[0])[1:-1]


def install(level: int | str, *, out: TextIO | None = None, env: Mapping[str, str] = os.environ) -> None:
    """Write this process's log lines to standard error, starting with a level, in the form that ``LOG_FORMAT``
    names.
    """
    handler = logging.StreamHandler(out if out is not None else sys.stderr)
    handler.setFormatter(LineFormatter(as_json=env.get("LOG_FORMAT", "").lower() == "json"))
    logging.basicConfig(level=level, handlers=[handler])
