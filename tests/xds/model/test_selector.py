"""Calico's selector language: what is accepted, its canonical text and id, and what it selects."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.xds.model.selector_grammar import NoSelector, read
from xds.model import selector as s
from xds.model.selector import SelectorError, parse_selector

CANONICAL = [
    ("", "all()", "s:5y5I3VdRZfDU01O--xXAPx2yxCQQqMf0M6IWug"),
    (" \t", "all()", "s:5y5I3VdRZfDU01O--xXAPx2yxCQQqMf0M6IWug"),
    (" (all() )", "all()", "s:5y5I3VdRZfDU01O--xXAPx2yxCQQqMf0M6IWug"),
    ("! (has( b)||! has(a ))", "!(has(b) || !has(a))", "s:Iss0uCleLYv1GSv_pNm7hAO58kE9jAx1NKyG3Q"),
    ('! (a == "b"&&! c != "d")', '!(a == "b" && !c != "d")', "s:lh3haoY1ikTRkd4UZu0nWSaIBknYLPJLX16d-w"),
    ("app == 'backend'", 'app == "backend"', "s:QL5hieZDqLpDn8HEiauxHuEKQb1Ex9d3LSKt3g"),
    (
        "projectcalico.org/serviceaccount in {'frontend'}",
        'projectcalico.org/serviceaccount in {"frontend"}',
        "s:VNLdcOoPMaX5XnpB--WpVTCNRriaI7PMMonHug",
    ),
]


@pytest.mark.parametrize(("text", "canonical", "identity"), CANONICAL)
def test_canonical_text_and_id_are_calicos(text: str, canonical: str, identity: str) -> None:
    found = parse_selector(text)
    assert (str(found), found.identity) == (canonical, identity)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("!!a == 'b'", 'a == "b"'),
        ("!!!has(a)", "!has(a)"),
        ("!(!has(a))", "has(a)"),
        ("a notin{'b' , \"a\", 'b',}", 'a not in {"a", "b"}'),
        ("a not in {}", "a not in {}"),
        ("a in{}", "a in {}"),
        ("a startswith 'b' || a ends with 'c'", '(a starts with "b" || a ends with "c")'),
        ("a contains'\"'", "a contains '\"'"),
        ("in in {'in'} && has == 'x' && all != ''", '(in in {"in"} && has == "x" && all != "")'),
        ("a == 'x' || b == 'y' && c == 'z'", '(a == "x" || (b == "y" && c == "z"))'),
        ("global()", "global()"),
    ],
)
def test_spellings_of_one_selector_have_one_text(text: str, canonical: str) -> None:
    assert str(parse_selector(text)) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "b == b",
        "b contains b",
        "'b1' == b",
        "b",
        "a b",
        "!",
        'foo == "bar" &',
        'foo in ""',
        'foo in {"", ||',
        '"FOO',
        "\"FOO'",
        "(",
        ")",
        "()",
        '(a == "foo"',
        "%",
        'a == "b" && %',
        "a ",
        "has(foo) &&",
        "has (a)",
        "all ()",
        'a == "b"\n',
        "a in {,}",
        "a in {'b' 'c'}",
        'a inside {"b"}',
        "(" * 65 + "all()" + ")" * 65,
    ],
)
def test_other_texts_are_refused_with_the_place(text: str) -> None:
    with pytest.raises(SelectorError) as refused:
        parse_selector(text)
    assert 0 <= refused.value.at <= len(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "labels", "expected"),
    [
        ("k == 'v'", {"k": "v"}, True),
        ("k == 'v'", {}, False),
        ("k != 'v'", {}, True),
        ("k != 'v'", {"k": "v"}, False),
        ("k in {'v', 'w'}", {"k": "w"}, True),
        ("k in {}", {"k": "v"}, False),
        ("k not in {}", {}, True),
        ("k not in {'v'}", {}, True),
        ("k not in {'v'}", {"k": "v"}, False),
        ("k contains 'b'", {"k": "abc"}, True),
        ("k contains ''", {}, False),
        ("k starts with 'a'", {"k": "abc"}, True),
        ("k ends with 'a'", {"k": "abc"}, False),
        ("has(k)", {"k": ""}, True),
        ("!k == 'v'", {"k": "w"}, True),
        ("!has(a) && !has(b)", {"a": ""}, False),
        ("global()", {}, True),
    ],
)
def test_what_is_selected(text: str, labels: dict[str, str], expected: bool) -> None:
    assert parse_selector(text).matches(labels) is expected


def test_a_prefix_goes_before_every_label() -> None:
    found = parse_selector("(a == 'a' || has(b)) && !c in {'c'} && all()").prefixed("pcns.")
    assert str(found) == '((pcns.a == "a" || has(pcns.b)) && !pcns.c in {"c"} && all())'


NAMES = st.sampled_from(("a", "b", "in", "has", "x.y/z-_"))
TEXTS = st.text(alphabet="ab \"(){}&|!'", max_size=4).filter(lambda text: not ('"' in text and "'" in text))
LEAVES = st.one_of(
    st.just(s.All()),
    st.builds(s.Has, NAMES),
    st.builds(s.Compare, NAMES, st.sampled_from(("==", "!=", "contains", "starts with", "ends with")), TEXTS),
    st.builds(s.In, NAMES, st.sets(TEXTS, max_size=3).map(lambda values: tuple(sorted(values))), st.booleans()),
)


def groups(inner: st.SearchStrategy[s.Node]) -> st.SearchStrategy[s.Node]:
    several = st.lists(inner, min_size=2, max_size=3).map(tuple)
    return st.one_of(
        inner.map(lambda node: node if isinstance(node, s.Not) else s.Not(node)),
        st.builds(s.And, several),
        st.builds(s.Or, several),
    )


@given(
    st.recursive(LEAVES, groups, max_leaves=8).map(s.Selector),
    st.dictionaries(NAMES, TEXTS, max_size=3),
)
def test_the_canonical_text_is_a_fixed_point_and_selects_the_same(
    selector: s.Selector, labels: dict[str, str]
) -> None:
    again = parse_selector(str(selector))
    assert again == selector
    assert str(again) == str(selector)
    assert again.matches(labels) is selector.matches(labels)


@given(st.text(alphabet="ab()!&|={}'\" \tinhas,", max_size=30))
def test_any_text_is_a_selector_or_refused(text: str) -> None:
    try:
        found = parse_selector(text)
    except SelectorError:
        return
    assert str(parse_selector(str(found))) == str(found)


PIECES = (
    "a", "b.c/d-e", "in", "not", "has", "all", "starts", "with", "contains", "x" * 600,
    "has(a)", "has( a\t)", "has()", "has (a)", "all()", "all( )", "all(\t)", "all(a)",
    "global()", "global(  )", "global (",
    "==", "!=", "=", "!", "&&", "||", "&", "|", "(", ")", "{", "}", ",",
    "'v'", '"v"', "\"it's\"", "''", "'", '"', " ", "\t", "\n", "%",
    "not in", "notin", "starts with", "startswith", "starts \t with", "ends with", "endswith",
    "a == 'v'", "a in {'v', \"w\",}", "a not in {}", "a in{'v'}", "b.c/d-e contains'v'",
)  # fmt: skip
LABELLED = st.dictionaries(
    st.sampled_from(("a", "b.c/d-e", "in", "has", "all")), st.sampled_from(("v", "w", "")), max_size=2
)


@settings(max_examples=examples(2000))
@given(st.lists(st.sampled_from(PIECES), max_size=9), st.sampled_from(("", " ", " \t")), LABELLED)
def test_texts_are_selectors_where_the_grammar_says_so_and_mean_the_same(
    pieces: list[str], between: str, labels: dict[str, str]
) -> None:
    text = between.join(pieces)
    try:
        meaning = read(text)
    except NoSelector:
        with pytest.raises(SelectorError):
            parse_selector(text)
        return
    assert parse_selector(text).matches(labels) is meaning(labels)


@pytest.mark.parametrize("text", ["all( )", "all(\t)", "global( )", " all(  ) ", "! all( )", "(global( ))"])
def test_space_may_stand_in_the_parentheses_of_a_word(text: str) -> None:
    assert str(parse_selector(text)).strip("!") in ("all()", "global()")
