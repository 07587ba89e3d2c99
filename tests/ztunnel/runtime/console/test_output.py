"""The output layer: every form of ``-o``, the exit status, and the schemas of documents."""

import argparse
import io
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from deploy.schemas import FOLDER, kinds, texts
from ztunnel.runtime.console.output import (
    Answer,
    Column,
    Item,
    Kind,
    Silent,
    add_output,
    emit,
    parse_format,
    table,
)


class Thing(Item, frozen=True, kw_only=True):
    name: str
    seconds: float | None = None
    parts: tuple[str, ...] = ()


THING: Kind[Thing] = Kind(
    name="Thing",
    several="things",
    item=Thing,
    identity=lambda item: item.name,
    columns=(Column("NAME", "name"), Column("S", "seconds"), Column("PARTS", "parts", wide=True)),
)
THINGS = Answer(kind=THING, items=[Thing(name="a", seconds=1.5, parts=("x", "y")), Thing(name="b")])


def printed(answer: Answer[Thing], form: str) -> str:
    out = io.StringIO()
    assert emit(answer, parse_format(form), out) == answer.status
    return out.getvalue()


def test_wide_tables_have_more_columns() -> None:
    assert printed(THINGS, "table").splitlines() == ["NAME  S", "a     1.5", "b     -"]
    assert printed(THINGS, "wide").splitlines() == ["NAME  S    PARTS", "a     1.5  x, y", "b     -    -"]


def test_an_empty_table_says_so_and_is_an_empty_list_for_programs() -> None:
    assert printed(Answer(kind=THING, items=[]), "table") == "No things found.\n"
    assert json.loads(printed(Answer(kind=THING, items=[]), "json"))["items"] == []


def test_documents_have_numbers_and_nulls() -> None:
    wanted = {
        "apiVersion": "ztunnel/v1",
        "kind": "ThingList",
        "items": [
            {"node": None, "name": "a", "seconds": 1.5, "parts": ["x", "y"]},
            {"node": None, "name": "b", "seconds": None, "parts": []},
        ],
    }
    assert json.loads(printed(THINGS, "json")) == wanted
    assert yaml.safe_load(printed(THINGS, "yaml")) == wanted


def test_forms_for_shells() -> None:
    assert printed(THINGS, "name") == "thing/a\nthing/b\n"
    assert printed(THINGS, "jsonpath={.items[*].name}") == "a b\n"
    assert printed(THINGS, "custom-columns=N:.name,P:.parts[0]").splitlines() == ["N  P", "a  x", "b  <none>"]


@pytest.mark.parametrize("text", ["xml", "jsonpath", "jsonpath={", "custom-columns=N", "custom-columns="])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_format(text)


def test_silent_nodes_are_named_and_are_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    silent = [Silent(node="n2", reason="no answer")]
    answer = Answer(kind=THING, items=[Thing(node="n1", name="a")], silent=silent, across=True, bad=True)
    assert answer.status == 2
    assert printed(answer, "table").splitlines() == ["NODE  NAME  S", "n1    a     -"]
    assert capsys.readouterr().err == "no answer from node n2: no answer\n"
    assert json.loads(printed(answer, "json"))["silent"] == [{"node": "n2", "reason": "no answer"}]
    assert Answer(kind=THING, items=[], bad=True).status == 1


def test_a_kind_can_take_several_rows_for_an_item() -> None:
    several: Kind[Thing] = Kind(
        name="Thing",
        several="things",
        item=Thing,
        identity=THING.identity,
        columns=(Column("PART", "parts"),),
        rows=lambda item: [Thing(name=item.name, parts=(part,)) for part in item.parts],
    )
    assert table(Answer(kind=several, items=THINGS.items)) == [("PART",), ("x",), ("y",)]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--sort-by", ".seconds"], "b a c"),
        (["--sort-by", ".name", "-o", "name"], "a b c"),
        (["--json", "--sort-by", "{.parts[0]}"], "a c b"),
    ],
)
def test_items_are_sorted_by_a_field_whatever_the_form(words: list[str], names: str) -> None:
    parser = argparse.ArgumentParser()
    add_output(parser)
    args = parser.parse_args(words)
    items = [Thing(name="a", seconds=10, parts=("x",)), Thing(name="c", parts=("y",)), Thing(name="b", seconds=9)]
    out = io.StringIO()
    emit(Answer(kind=THING, items=items), args.output, out)
    text = out.getvalue()
    assert sorted(names.split(), key=lambda name: re.search(rf"\b{name}\b", text).start()) == names.split()  # type: ignore[union-attr]  # each is there
    assert args.output.form == ("json" if "--json" in words else "name" if "-o" in words else "table")


def test_an_order_that_is_no_path_is_refused() -> None:
    parser = argparse.ArgumentParser()
    add_output(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--sort-by", "a b"])


# Schemas


def test_the_schemas_are_those_of_the_kinds() -> None:
    wanted = texts()
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == wanted
    assert len(wanted) == len(list(kinds()))


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_each_schema_is_one(path: Path) -> None:
    found = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    empty = {"apiVersion": "ztunnel/v1", "kind": path.stem, "items": []}
    jsonschema.validate(empty, found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**empty, "items": [{}]}, found)
