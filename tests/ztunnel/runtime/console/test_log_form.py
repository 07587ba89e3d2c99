"""Log lines of every process have one form, plain or JSON."""

import json
import logging
import re
import subprocess
import sys

import pytest

from ztunnel.proxy.istio.accounting.logs import json_line, plain_line
from ztunnel.runtime.console.log_form import LineFormatter


def formatted(*, as_json: bool, name: str = "ztunnel.node.agent", exc: bool = False) -> str:
    failure = None
    if exc:
        try:
            raise OSError("no")
        except OSError:
            failure = sys.exc_info()
    record = logging.LogRecord(name, logging.WARNING, "f", 1, "pod %s", ("a/b",), failure)
    record.created = 1795694400.25
    return LineFormatter(as_json=as_json).format(record)


def test_the_forms_are_those_of_the_proxy_of_an_istio_mesh() -> None:
    time = "2026-11-26T12:00:00.250000Z"
    line = ("warn", "ztunnel::node::agent", "pod a/b", ())
    assert formatted(as_json=False) == plain_line(time, *line).rstrip("\t\n")
    assert formatted(as_json=True) == json_line(time, *line).rstrip("\n")


def test_a_traceback_stays_in_the_object() -> None:
    found = json.loads(formatted(as_json=True, exc=True))
    assert found["message"].startswith("pod a/b\nTraceback")


def test_text_of_a_peer_cannot_forge_a_line_or_send_codes_to_a_terminal() -> None:
    said = "x\n2026-11-26T12:00:00.250000Z\tinfo\troot\tforged\r\x1b[2J\u2028\x85"
    record = logging.LogRecord("root", logging.WARNING, "f", 1, "refused: %s", (said,), None)
    line = LineFormatter(as_json=False).format(record)
    assert len(line.splitlines()) == 1
    assert line.split("\t")[1:] == ["warn", "root", "refused: " + said.encode("unicode_escape").decode()]


@pytest.mark.parametrize("form", ["plain", "json"])
def test_a_command_that_serves_obeys_the_format(form: str) -> None:
    code = "import logging; from ztunnel.runtime.console.serving import log_lines; log_lines(); logging.info('up')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"LOG_FORMAT": form},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    if form == "json":
        assert json.loads(done.stderr)["message"] == "up"
    else:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\tinfo\troot\tup\n", done.stderr)
