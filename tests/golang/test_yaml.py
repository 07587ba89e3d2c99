"""Compares our YAML with sigs.k8s.io/yaml: the reader accepts the same, and Go reads the writer's text as the same
value.
"""

import json
import math
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.golang.oracle import Oracle, Refused
from xds.errors import ConfigError
from ztunnel.runtime.formats.go_yaml import dump, dump_json, load, resolve
from ztunnel.sidecar.inject.config import InjectConfig
from ztunnel.sidecar.inject.manual import inject_text

_WORDS = (
    "= =~ != y Y n N yes No ON off On TRUE true False ~ null Null NULL nUll .inf .Inf -.inf +.inf .nan .NaN . "
    ".. ... 10:00 22:15 12:30:45 1:2 190:20:30.15 2025-01-01 2025-01-01T00:00:00Z "
    "2001-12-14t21:59:43.10-05:00 2025-1-1 0 -0 +0 00 -0.0 0644 0o17 0O17 -0o17 0o8 08 09.5 -08 0_8 1_000 "
    "1__0 _1 1_ 0x1F 0X1f -0x1F +0x1f 0x 0xg 0b101 0B1 -0b101 0b 0b2 0b+1 0b-1 -0b+1 1e3 1E3 1e-5 1e+5 1.5e3 "
    "1234e56 1e400 -1e400 1e999999 1e21 1e20 123e18 .5 .5e1 -.5 +.5 5. 5.e3 .5_0 1.5_0 1.10 "
    "9223372036854775807 9223372036854775808 18446744073709551615 18446744073709551616 -9223372036854775808 "
    "-9223372036854775809 +9223372036854775807 +9223372036854775808 12345678901234567890123 "
    "0777777777777777777777777 0xffffffffffffffff 0x1ffffffffffffffff 1.2.3 1-2 1,2 << <<<"
)
SCALARS = _WORDS.split()

DOCUMENTS = [
    "",
    "# nothing",
    "a: &x {b: 1}\nc: *x\nd:\n  <<: *x\n  e: 2\n",
    "b: &x {a: 1, c: 9}\nd: {a: 2, <<: *x}\n",
    "b: &x {a: 1}\nd: {<<: *x, a: 2}\n",
    "b: &x {a: 1}\nc: &y {a: 2, e: 3}\nd: {<<: [*x, *y]}\n",
    "<<: {a: 1}\nb: 2\n",
    "<<: 3",
    "<<: [3]",
    "'<<': 3",
    "a: &x 1\nb: &x 2\nc: *x",
    "a: *none",
    "a: &x [*x]",
    "1: x\n2.5: y\ntrue: z\nno: w\n0x10: v\n1e30: u\n08: t\n",
    "~: x",
    "[a]: x",
    "{a: b}: x",
    "2025-01-01: x",
    "a: !foo 1\nb: ! 2\nc: !!str 3\nd: !!int 4\ne: !!float 5\nf: !!bool yes\ng: !!null ~\nh: !!binary aGk=\n",
    "a: !!int x",
    "a: !!bool 1",
    "a: !!int '3'",
    "a: !!float 3",
    "a: !!str yes",
    "a: !!timestamp 2025-01-01",
    "a: !!seq [1]\nb: !!map {c: 1}\nd: !foo {e: 1}\n",
    "a: |\n  x\n   y\n\nb: >-\n  x\n  y\n",
    "a: 'it''s'\nb: \"\\u00e9\\x41\\t\"\n",
    "\ufeffa: 1",
    "%YAML 1.1\n---\na: 1",
    "a: [1, 2,]\nb: {c, d: }\n",
    "a:\n- 1\n- - 2\n  - 3\n",
    "a: b: c",
    "\ta: 1",
    "a: 1\n b: 2",
    "a: @x",
    "a: `x`",
    "a: 1 # c\nb: x#y\n",
    "? a\n: b\n",
    "a: x\u2028y",
    "a: \x07",
    "- 1\n- .inf",
    "just text",
    "3",
    "{a: 1}",
    '{"a": 1}',
]


def both(go: Oracle, text: str) -> tuple[Any, Any]:
    """Return a document's value as read by Go and by our reader. If it is refused, the value is the class
    Refused.
    """
    try:
        theirs = go.ask("yaml", text)
    except Refused:
        theirs = Refused
    try:
        ours = load(text)
    except ConfigError:
        ours = Refused
    return theirs, ours


def same(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, float) or (type(ours) is int and abs(ours) >= 2**63):
        return type(theirs) in (int, float) and math.isclose(theirs, ours, rel_tol=1e-15)
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return theirs.keys() == ours.keys() and all(same(theirs[key], ours[key]) for key in theirs)
    if isinstance(theirs, list) and isinstance(ours, list):
        return len(theirs) == len(ours) and all(map(same, theirs, ours))
    return type(theirs) is type(ours) and bool(theirs == ours)


@pytest.mark.parametrize("scalar", SCALARS)
def test_plain_scalar_is_read_as_go_reads_it(go: Oracle, scalar: str) -> None:
    theirs, ours = both(go, f"a: {scalar}\n")
    assert same(theirs, ours), (theirs, ours)


@pytest.mark.parametrize("text", DOCUMENTS)
def test_document_is_read_as_go_reads_it(go: Oracle, text: str) -> None:
    theirs, ours = both(go, text)
    assert same(theirs, ours), (theirs, ours)


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", "a: {b: 1, b: 1}\n", "1: a\n'1': b\n", '{"a": 1, "a": 2}'])
def test_key_given_twice_is_refused_by_name_and_place_where_go_takes_one_of_them(go: Oracle, text: str) -> None:
    with pytest.raises(ConfigError, match=r"duplicate key '[ab1]'( at line \d, column \d| in an object)"):
        load(text)
    assert go.ask("yaml", text)


@settings(max_examples=examples(2000), deadline=None)
@given(st.from_regex(r"[-+]?[0-9._:eExXoObBnNyYaAfF~=<]{0,8}", fullmatch=True))
def test_any_number_like_scalar_is_read_as_go_reads_it(go: Oracle, scalar: str) -> None:
    theirs, ours = both(go, f"a: {scalar}\n")
    assert same(theirs, ours), (theirs, ours)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(1000), deadline=None)
@given(JSON)
def test_what_is_written_means_the_same_to_go_and_to_us(go: Oracle, value: Any) -> None:
    text = dump(value)
    assert same(go.ask("yaml", text), value), text
    assert same(load(text), value), text


TEXTS = (
    st.text()
    | st.sampled_from(SCALARS)
    | st.from_regex(r"[-+]?[0-9._:eExXoObB~=<]{0,8}", fullmatch=True)
    | st.text(" \n\t#-:?,[]{}&*!|>'\"%@`a1\u0085\u2028\ufeff")
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(TEXTS, min_size=5, max_size=15))
@example(["a\n\n", " a\nb"])
def test_any_string_is_the_same_before_and_after_inject(go: Oracle, values: list[str]) -> None:
    annotations = {f"k{at}{value}": value for at, value in enumerate(values)}
    shown = "".join(f"    ? {dump_json(key)}\n    : {dump_json(value)}\n" for key, value in annotations.items())
    text = (
        f"apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  annotations:\n{shown}"
        f"spec:\n  containers:\n  - name: app\n    image: app\n    args: [{', '.join(map(dump_json, values))}]\n"
    )
    before = go.ask("yaml", text)
    assert before["spec"]["containers"][0]["args"] == values
    for source in (text, f"apiVersion: v1\nkind: List\nitems: [{dump_json(before)}]\n", dump_json(before)):
        made = inject_text(source, "default", InjectConfig(templates=("sidecar",)), [])
        after = go.ask("yaml", made)
        pod = after["items"][0] if after["kind"] == "List" else after
        assert annotations.items() <= pod["metadata"]["annotations"].items()
        assert pod["spec"]["containers"][0]["args"] == values
        assert re.search("sidecar.istio.io/status", made)


def test_every_scalar_is_quoted_where_a_reader_could_take_it_for_something_else() -> None:
    for scalar in SCALARS:
        written = dump({"a": scalar})
        assert load(written) == {"a": scalar}
        if not isinstance(resolve(scalar), str):
            assert written != f"a: {scalar}\n"
    assert json.loads(dump_json({"a": "\ud800\u2028"})) == {"a": "\ud800\u2028"}
