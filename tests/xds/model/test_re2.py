"""Regular expressions mean what they mean to RE2, or are refused."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.model.re2 import Re2Error, compiled
from xds.model.string_match import StringMatch, ascii_lower

#: Pattern, texts that match as a whole, texts that do not. What RE2 says was taken from Envoy 1.40.
ROWS = (
    (r"[[:alpha:]]+", ("abC",), ("a:]", "é", "1")),
    (r"[[:^alpha:]x]+", ("1x-é",), ("a",)),
    (r"[^[:space:]]+", ("ab",), ("a b", "\x0b")),
    (r"\d+", ("09",), ("٣",)),
    (r"\w+", ("a_9",), ("é", "ß")),
    (r"[\w.]+", ("a.b",), ("é",)),
    (r"\W", ("é", "-"), ("a", "_")),
    (r"\s", (" ", "\t"), ("\x0b", "\u00a0")),
    (r"\S+", ("é",), (" ",)),
    (r".", ("a", "é"), ("\n",)),
    (r"(?s).", ("\n",), ()),
    (r"(?s-s).", (), ("\n",)),
    (r"a(?i)b|c", ("aB", "C"), ("Ab",)),
    (r"(?:a(?i)b)c", ("aBc",), ("abC",)),
    (r"(?i:a)b", ("Ab",), ("AB",)),
    (r"(?U)a+", ("aa",), ()),
    (r"a{2}", ("aa",), ("a",)),
    (r"a{,2}", ("a{,2}",), ("a", "aa")),
    (r"a{x}", ("a{x}",), ("a",)),
    (r"x{2,}?y", ("xxxy",), ("xy",)),
    (r"\Qa.b\E+", ("a.b", "a.bb"), ("axb",)),
    (r"\Qa.b", ("a.b",), ()),
    (r"\x41\x{e9}\n", ("Aé\n",), ()),
    (r"\0\07", ("\x00\x07",), ()),
    (r"a$\n?", ("a",), ("a\n",)),
    (r"(?m)a$\nb", ("a\nb",), ()),
    (r"(?P<x>a)(?<y>b)", ("ab",), ()),
    (r"[]a-c]+", ("]b",), ("d",)),
    (r"[a\-z]+", ("a-z",), ("b",)),
    (r"[a-]+", ("a-",), ()),
    (r"[a&&b]+", ("&a",), ()),
    (r"[[a]+", ("[a",), ()),
    (r"a|", ("a", ""), ()),
    (r"()*b", ("b",), ()),
    (r"\.\-\/", (".-/",), ()),
    (r"a\b-", ("a-",), ()),
    (r"\Aa\z", ("a",), ()),
    (r"x#y z", ("x#y z",), ()),
    (r"\pL\p{Greek}", ("éλ",), ("1λ", "λé")),
    (r"[\PL]", ("1",), ("é",)),
    (r"\_", ("_",), ()),
)
REFUSED = (
    "(",
    ")",
    "a)",
    "(?",
    "(?P<n",
    "(?P<>a)",
    "[",
    "[]",
    "[z-a]",
    "[[:nope:]]",
    "*",
    "a**",
    "a+*",
    "a++",
    "a{2}{3}",
    "a{3,2}",
    "a{1001}",
    "(*a)",
    "|*",
    "(?=a)",
    "(?!a)",
    "(?<=a)",
    "(?<!a)",
    "(?>a)",
    "(?#c)a",
    "(?x)a",
    "(?a)a",
    "(?L)a",
    "(?u)a",
    "(?P=n)",
    "(a)\\1",
    "(?(1)a)",
    "\\",
    "\\8",
    "\\y",
    "\\Z",
    "\\u0041",
    "\\N{DIGIT ONE}",
    "\\x4",
    "\\x{110000}",
    "[\\b]",
    "(?i)*",
    "[a-\\d]",
    "((a{100}){10}){10}",
    r"(\pL{500}){2}",  # too large
)


@pytest.mark.parametrize(("pattern", "matching", "others"), ROWS, ids=[row[0] for row in ROWS])
def test_pattern_matches_the_texts_that_re2_matches(
    pattern: str, matching: tuple[str, ...], others: tuple[str, ...]
) -> None:
    match = StringMatch("regex", pattern)
    assert [text for text in matching if not match.matches(text)] == []
    assert [text for text in others if match.matches(text)] == []


@pytest.mark.parametrize("pattern", REFUSED)
def test_expression_that_re2_refuses_is_refused(pattern: str) -> None:
    with pytest.raises(Re2Error):
        compiled(pattern)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(a*)*b", ".*.*.*.*=.*c"])
def test_time_is_linear_in_the_text(pattern: str) -> None:
    """Python's ``re`` would take longer than the tests' limit for hangs."""
    text = "a" * 100_000 + "!"
    assert not compiled(pattern).fullmatch(text)
    assert not compiled(pattern).search(text)


def test_reason_is_re2s() -> None:
    with pytest.raises(Re2Error) as caught:
        compiled("a(é")
    assert str(caught.value) == "missing ): a(é"


@pytest.mark.parametrize("text", ["\ud800", "a\udcff"])
def test_texts_that_are_not_unicode_are_read(text: str) -> None:
    assert compiled(".*").fullmatch(text)
    assert not compiled("a").fullmatch(text)


@pytest.mark.filterwarnings("error")
@given(st.text(alphabet=r"ab0_-.*+?{}[]()|^$\:,&~#1dwsQExzpPi <=!é", max_size=12))
def test_any_text_is_read_or_refused(pattern: str) -> None:
    try:
        compiled(pattern).fullmatch("ab0")
    except Re2Error:
        return


@given(st.text(max_size=20))
def test_a_quoted_text_matches_itself(text: str) -> None:
    escaped = "".join(f"\\{char}" if char in string.punctuation and char != "_" else char for char in text)
    assert compiled(escaped).fullmatch(text)


@given(st.text(max_size=20))
def test_only_ascii_letters_lose_their_case(text: str) -> None:
    assert ascii_lower(text) == re.sub("[A-Z]", lambda found: found[0].lower(), text)


def test_case_beyond_ascii_is_not_ignored() -> None:
    assert not StringMatch("exact", "k", ignore_case=True).matches("\u212a")  # the Kelvin sign
