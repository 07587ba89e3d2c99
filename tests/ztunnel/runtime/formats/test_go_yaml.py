"""YAML as Kubernetes reads it; tests/golang holds the same beside Go's own reader."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xds.errors import ConfigError
from ztunnel.runtime.formats.go_yaml import (
    Part,
    dump,
    dump_all,
    dump_json,
    json_items,
    load,
    load_all,
    load_documents,
    load_each,
    load_json,
)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("=", "="),
        ("10:00", "10:00"),
        ("2025-01-01T00:00:00Z", "2025-01-01T00:00:00Z"),
        ("0o17", 15),
        ("0644", 420),
        ("08", 8),
        ("1e3", 1000),
        ("1_000", 1000),
        ("1e400", "1e400"),
        ("~", None),
        ("y", True),
        ("no", False),
        ("0x1F", 31),
        ("'08'", "08"),
        ("! 08", "08"),
        ("!!str 08", "08"),
        ("!!int '8'", 8),
        ("12345678901234567890", 12345678901234567890),
        ("-0b101", -5),
        ("1.10", 1.1),
    ],
)
def test_plain_scalars(scalar: str, value: Any) -> None:
    found = load(f"a: {scalar}\n")
    assert found == {"a": value}
    assert isinstance(found, dict)
    assert type(found["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "duplicate key 'c' at line 4, column 3"),
        ('{"a": 1, "a": 2}', "duplicate key 'a' in an object with the keys a"),
        ('{"a": 1e400}', "1e400 is beyond the range"),
        ("a: .inf", r"\.inf has no equivalent in JSON at line 1, column 4"),
        ("a: *x", "unknown anchor 'x' at line 1"),
        ("a: &x [*x]", "contains itself by an alias at line 1"),
        ("[a]: 1", "a key must be text"),
        ("~: 1", "a key must be text"),
        ("<<: 1", "a merge needs a mapping"),
        ("a: [", "while parsing a flow node"),
        ("a: \x07", "not valid YAML"),
        ("a: " + "[" * 20000, "nested too deeply|not valid YAML"),
        ("a: 1\n---\nb: 2\n", "more than one document"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load(text)


def test_aliases_cannot_make_a_document_far_larger_than_it_is() -> None:
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    with pytest.raises(ConfigError, match="its aliases would make more than"):
        load(f"a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n{levels}")
    assert load("a: &x 1\nb: &x 2\nc: *x\n") == {"a": 1, "b": 2, "c": 2}


def test_json_is_read_as_json_where_it_is_that() -> None:
    assert load_all('{"a": "\\ud83d\\ude00"}\n\t{"b": 1}') == [{"a": "😀"}, {"b": 1}]
    assert load_all("{a: 1}\n---\n{b: 010}\n") == [{"a": 1}, {"b": 8}]
    assert load_json("{a: 1}") is None
    text = '{ "x": [1] , "items" :[ {"a": 1}, 2 ,"three"] }'
    assert [text[first:last] for first, last in json_items(text, 0, "items")] == ['{"a": 1}', "2", '"three"']
    assert json_items('{"a": {"items": [1]}}', 0, "items") == []


def test_documents_tell_where_their_parts_are() -> None:
    text = "\ufeff# first\na:\n- b: 1\n- {c: 2} # two\n--- \nd: |\n  text\n\n--- # empty\n"
    first, second, third = load_documents(text)
    assert isinstance(first.value, dict)
    spans = [first.spans[id(each)] for each in first.value["a"]]
    assert [text[span.start : span.end] for span in spans] == ["b: 1", "{c: 2}"]
    assert [span.flow for span in spans] == [False, True]
    assert text[second.start :].startswith("--- \nd")
    assert second.root is not None
    assert text[second.root.start : second.root.end].startswith("d: |\n  text\n")
    assert (third.value, third.root, third.aliased) == (None, None, False)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("1e3", "'1e3'\n"),
        ("on", "'on'\n"),
        ("12:30", "'12:30'\n"),
        ("plain", "plain\n...\n"),
        ("two\nlines\n", "|\n  two\n  lines\n"),
        ("ends  \n", None),
        ("\u2028", '"\\L"\n'),
        (1.0, "1.0\n...\n"),
        (10**30, "1e+30\n...\n"),
        (math.inf, ".inf\n...\n"),
        (None, "null\n...\n"),
    ],
)
def test_writer_quotes_what_a_reader_could_take_for_something_else(value: Any, written: str | None) -> None:
    made = dump(value)
    if written is not None:
        assert made == written
    if value != math.inf:
        assert load(made) == (value if value != 10**30 else 1e30)


def test_several_documents_are_written_with_markers_between() -> None:
    assert dump_all([{"a": 1}, {"b": "2"}]) == "a: 1\n---\nb: '2'\n"
    with pytest.raises(ConfigError, match="without an equivalent in JSON"):
        dump_json({"a": math.nan})


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load_all(text), list)


DOCUMENTS = ("a: 1\n", "- {b: [x, y]}\n", "# empty\n", "c: |\n  text\n  --- text\n", "d: 'it''s'\n", "? e\n: ~\n")
DAMAGED = (
    "a: [\n", 'b: "x\n', "\tc: 1\n", "d: 1\nd: 2\n", "e: *none\n", "f: .inf\n", "{g: 1\n", "h: 'x\n", "i: {\n",
    "\x00\n", "j: 1\n k: 2\n",
)  # fmt: skip
SEPARATORS = st.sampled_from(("---\n", "--- # next\n", "...\n---\n", "...\n%YAML 1.1\n---\n"))


@settings(max_examples=300)
@given(
    st.lists(st.tuples(SEPARATORS, st.sampled_from(DOCUMENTS)), max_size=4),
    st.tuples(SEPARATORS, st.sampled_from(DAMAGED)),
    st.lists(st.tuples(SEPARATORS, st.sampled_from(DOCUMENTS)), max_size=4),
)
def test_a_damaged_document_costs_no_other_and_is_named_by_its_line(
    before: list[tuple[str, str]], damaged: tuple[str, str], after: list[tuple[str, str]]
) -> None:
    def joined(documents: list[tuple[str, str]]) -> str:
        return "".join(map("".join, documents))

    [(_, first), *others] = [*before, damaged, *after]
    parts = load_each(joined([("---\n", first), *others]))
    [number] = [number for number, part in enumerate(parts) if part.fault]
    assert number == len(before)
    assert [part.value for part in parts if not part.fault] == [load(text) for _, text in (*before, *after)]
    lines = first.count("\n") + 1 + joined(before[1:]).count("\n") if before else 0
    ended = bool(before) and damaged[0].startswith("...")  # the document before it, on a line of its own
    assert parts[number].line == lines + ended + 1


def test_values_of_a_file_without_a_fault_have_their_lines() -> None:
    assert load_each("a: 1\n---\nb: 2\n") == [Part(1, {"a": 1}), Part(2, {"b": 2})]
    assert load_each('{"a": 1}\n{"b": 2}\n') == [Part(1, {"a": 1}), Part(2, {"b": 2})]
    assert load_each("") == []


def test_places_of_a_fault_are_those_of_the_file() -> None:
    [_, part] = load_each("a: 1\n---\nb: 2\nb: 3\n")
    assert part.fault == "not valid YAML: duplicate key 'b' at line 4, column 1"
