"""Watching a table: the changes, on a pipe, as JSON and on a terminal; and the command as a process."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.ztunnel.ask.inspect.harness import pages
from ztunnel.ask.inspect.source import AskFailed
from ztunnel.ask.inspect.watch import changes, watch
from ztunnel.cli import main
from ztunnel.runtime.console import jsonpath
from ztunnel.runtime.console.output import JSON, TABLE, Answer, Column, Format, Item, Kind, Silent

ROOT = Path(__file__).parents[4]


class End(Item, frozen=True, kw_only=True):
    source: str
    destination: str
    age_seconds: float | None = None


ENDS: Kind[End] = Kind(
    name="End",
    several="ends",
    item=End,
    columns=(Column("SOURCE", "source"), Column("DESTINATION", "destination")),
    identity=lambda item: item.source,
    volatile=("age_seconds",),
)
A, B, C = (
    End(source=source, destination=destination)
    for source, destination in (("10.0.0.1:1", "x"), ("10.0.0.2:2", "y"), ("10.0.0.333:3", "z"))
)


def test_items_that_came_and_went() -> None:
    assert list(changes(ENDS, [A, B], [B, C])) == [("-", A), ("+", C)]
    assert list(changes(ENDS, [A, A], [A])) == [("-", A)]
    assert list(changes(ENDS, [], [A, A])) == [("+", A), ("+", A)]


def test_fields_that_change_by_time_do_not_count_as_changes() -> None:
    older = msgspec.structs.replace(A, age_seconds=2.0)
    assert list(changes(ENDS, [A], [older])) == []


class Looks:
    """Returns answers one after the other, or raises errors. After the last one it raises KeyboardInterrupt."""

    def __init__(self, *found: Sequence[End] | Answer[End] | Exception) -> None:
        self.left = list(found)

    def look(self) -> Answer[End]:
        found = self.left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, Answer) else Answer(kind=ENDS, items=found)

    def pause(self, seconds: float) -> None:
        assert seconds == 5.0
        if not self.left:
            raise KeyboardInterrupt


def watched(
    *found: Sequence[End] | Answer[End] | Exception, form: Format = TABLE, out: io.StringIO | None = None
) -> list[str]:
    looks, out = Looks(*found), out or io.StringIO()
    assert watch(looks.look, 5.0, form, command="connections", out=out, pause=looks.pause) == 0
    return out.getvalue().splitlines()


def test_a_pipe_gets_what_changes() -> None:
    assert watched([A], [A], [B, C]) == [
        "  SOURCE      DESTINATION",
        "  10.0.0.1:1  x",
        "- 10.0.0.1:1    x",
        "+ 10.0.0.2:2    y",
        "+ 10.0.0.333:3  z",
    ]


def test_lines_of_json() -> None:
    def line(change: str, item: End) -> dict[str, object]:
        ends = {"source": item.source, "destination": item.destination}
        return {"change": change, "node": None, **ends, "ageSeconds": None}

    assert list(map(json.loads, watched([A], [B], form=JSON))) == [
        line("open", A),
        line("closed", A),
        line("opened", B),
    ]


def test_items_of_a_silent_node_stay(capsys: pytest.CaptureFixture[str]) -> None:
    here, there = msgspec.structs.replace(A, node="n1"), msgspec.structs.replace(B, node="n2")
    silent = [Silent(node="n2", reason="no answer")]
    lines = watched([here, there], Answer(kind=ENDS, items=[here], silent=silent, across=True))
    assert not [line for line in lines if line.startswith(("-", "+"))]
    assert capsys.readouterr().err == "ztunnel connections: node n2: no answer; waiting\n"


class Shared(Item, frozen=True, kw_only=True):
    name: str
    seen_by: tuple[str, ...] = ()


SHARED: Kind[Shared] = Kind(
    name="Shared",
    several="shared",
    item=Shared,
    columns=(Column("NAME", "name"),),
    identity=lambda item: item.name,
)


def test_a_silent_node_changes_no_item_that_nodes_report_together() -> None:
    """While a node restarts, its view of the mesh is unknown: nothing has come or gone."""
    everywhere, first, second = (
        Shared(name="a"),
        Shared(name="b", seen_by=("n1",)),
        Shared(name="c", seen_by=("n2",)),
    )
    whole = Answer(kind=SHARED, items=[everywhere, first, second])
    # Of the nodes that answer, all report "b".
    partly = Answer(
        kind=SHARED, items=[everywhere, Shared(name="b")], silent=[Silent(node="n2", reason="no answer")]
    )
    spread = Answer(kind=SHARED, items=[everywhere, Shared(name="b"), second])
    looks, out = Looks(whole, partly, whole, spread), io.StringIO()  # type: ignore[arg-type]  # another kind
    assert watch(looks.look, 5.0, TABLE, command="workloads", out=out, pause=looks.pause) == 0
    assert out.getvalue().splitlines() == ["  NAME", "  a", "  b", "  c", "- b", "+ b"]


def test_items_are_sorted() -> None:
    for form in (TABLE, JSON):
        lines = watched([B, A], [C, B, A], form=replace(form, sort=jsonpath.path(".source")))
        assert [line.partition("10.0.0.")[2][:1] for line in lines if "10.0.0." in line] == ["1", "2", "3"]
    by_source = replace(TABLE, sort=jsonpath.path(".source"))
    first = "\n".join(watched([B, A], form=by_source, out=Terminal())).splitlines()
    assert [line.split()[0] for line in first[-2:]] == ["10.0.0.1:1", "10.0.0.2:2"]


@pytest.mark.parametrize("form", ["yaml", "name", "jsonpath={.items}", "custom-columns=A:.source"])
def test_other_forms_are_refused(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["connections", "-w"], ["nodes", "-w"], ["top"], ["stat", "-w"], ["flows", "-f"]):
        assert main([*words, "--address", "127.0.0.1:1", "-o", form]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert f"-o {form.partition('=')[0]} does not repeat" in said.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_redrawn_and_not_overfilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "8")
    monkeypatch.setenv("COLUMNS", "30")
    first, second = "\n".join(watched([A], [A] * 9, out=Terminal())).split("\x1b[H\x1b[2J\x1b[3J")[1:]
    assert first.splitlines()[0][8:] == "Z, 1 ends, every 5 s; "
    assert first.splitlines()[2:] == ["SOURCE      DESTINATION", "10.0.0.1:1  x"]
    assert len(second.splitlines()) == 7
    assert second.splitlines()[-1] == "and 6 more"


def test_a_proxy_that_goes_away_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    gone = AskFailed("127.0.0.1:1: Connection refused")
    assert watched([A], gone, gone, [A, B], gone)[2:] == ["+ 10.0.0.2:2  y"]
    assert capsys.readouterr().err == (
        "ztunnel connections: 127.0.0.1:1: Connection refused; waiting\n" * 2  # once each time
    )
    with pytest.raises(AskFailed):
        watched(gone)


def test_a_closed_pipe_ends_the_watch() -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    assert watched([A], out=Closed())[-1] == "  10.0.0.1:1  x"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--watch", "0"], "must be more than 0 seconds"),
        (["--watch", "x"], "must be a number of seconds"),
        (["--watch", "-f", "x"], ""),
    ],
)
def test_bad_watches(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    run: Callable[[], int] = lambda: main(["connections", *words])  # noqa: E731
    if error:
        with pytest.raises(SystemExit):
            run()
    else:
        assert run() == 2
    assert (error or "not with --file") in capsys.readouterr().err


def test_the_command_ends_at_ctrl_c() -> None:
    live = {"src": "10.0.0.1:4000", "originalDst": None, "actualDst": "10.0.0.2:80", "protocol": "TCP"}
    table = {"uid": {"info": {"name": "a", "namespace": "b"}, "connections": {"inbound": [live], "outbound": []}}}
    with pages({"/connections": json.dumps(table).encode()}) as address:
        words = [sys.executable, "-m", "ztunnel", "connections", "--watch", "0.01", "--json", "--address", address]
        with subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout is not None
            first = json.loads(running.stdout.readline())  # at once, also through a pipe
            running.send_signal(signal.SIGINT)
            rest, errors = running.communicate(timeout=30)
    assert (first["change"], first["pod"], first["remote"]) == ("open", "a", "10.0.0.1:4000")
    assert (running.returncode, rest, errors) == (0, "", "")
