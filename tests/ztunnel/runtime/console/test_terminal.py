"""Tables and outlines on a terminal of any width, and through a pipe."""

import io
import re

import pytest

from ztunnel.runtime.console.terminal import print_outline, print_table, progress
from ztunnel.runtime.console.text_table import aligned

ROWS = [
    ("POD NAME", "ADDRESS", "STATUS"),
    ("productpage", "10.244.2.10", "Healthy"),
    ("reviews-v1", "fd00:10:244:1::10", "Unhealthy"),
]
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def drawn(rows: list[tuple[str, ...]], *, heading: bool = True) -> str:
    out = Terminal()
    print_table(rows, heading=heading, out=out)
    return out.getvalue()


def plain(text: str) -> list[str]:
    return _STYLE.sub("", text).splitlines()


def test_a_pipe_gets_plain_lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    print_table(ROWS, out=out)
    print_outline(["verdict: allowed"], out=out)
    assert out.getvalue().splitlines() == [*aligned(ROWS), "verdict: allowed"]


def test_a_terminal_has_colours_and_the_same_columns() -> None:
    text = drawn(ROWS)
    assert [line.rstrip() for line in plain(text)] == list(aligned(ROWS))
    assert text.startswith("\x1b[1mPOD NAME")
    assert "\x1b[32mHealthy\x1b[0m" in text
    assert "\x1b[1;31mUnhealthy\x1b[0m" in text


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    assert "\x1b[3" not in drawn(ROWS)


def test_cells_are_folded_between_words_where_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = [("NAME", "BECAUSE"), ("10.244.2.10:46268", "allow policies exist, but none allowed")]
    lines = plain(drawn(rows))
    assert max(map(len, lines)) <= 40
    assert lines[1].startswith("10.244.2.10:46268  allow policies")
    assert lines[2].startswith(" " * 19)


def test_rows_are_listed_where_no_folding_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert plain(drawn(ROWS)) == [
        "POD NAME  productpage",
        "ADDRESS   10.244.2.10",
        "STATUS    Healthy",
        "",
        "POD NAME  reviews-v1",
        "ADDRESS   fd00:10:244:1::10",
        "STATUS    Unhealthy",
    ]


def test_a_table_without_heading_folds_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text = drawn([("pods", "3 Up"), ("denied", "12 x default/a to default/b: refused")], heading=False)
    assert plain(text) == ["pods    3 Up", "denied  12 x default/a to", "        default/b: refused"]
    assert "\x1b[1;31mdenied\x1b[0m" in text


def test_an_outline_is_folded_at_its_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out = Terminal()
    lines = [
        "verdict: refused by the destination",
        "ways:",
        "  - policy: default/viewer",
        "    because: it is not so at all",
    ]
    print_outline(lines, out=out)
    assert plain(out.getvalue()) == [
        "verdict: refused by the",
        "  destination",
        "ways:",
        "  - policy: default/viewer",
        "    because: it is not so at",
        "      all",
    ]
    assert out.getvalue().startswith("\x1b[36mverdict: \x1b[0m\x1b[1;31mrefused by the\x1b[0m\n")


def test_control_characters_of_names_are_not_sent() -> None:
    out = Terminal()
    print_table([("NAME", "NODE"), ("a\x1b]0;owned\x07b", "[red]x[/red] :smile:")], out=out)
    print_outline(["workload: a\x1b[2Jb"], out=out)
    shown = plain(out.getvalue())
    assert "\x1b" not in "".join(shown)
    assert shown[1] == r"a\x1b]0;owned\x07b  [red]x[/red] :smile:"
    assert shown[2] == r"workload: a\x1b[2Jb"


def test_no_table_is_an_empty_line() -> None:
    assert drawn([]) == "\n"


def test_progress_is_shown_on_a_terminal_only() -> None:
    for out in (Terminal(), io.StringIO()):
        with progress("watching", 10.0, out=out) as advance:
            advance(4.0, "3 connections")
            advance(10.0, "5 connections")
        text = _STYLE.sub("", out.getvalue())
        assert ("watching" in text and "5 connections" in text) is out.isatty()
        assert out.isatty() or not text
