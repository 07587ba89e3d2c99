from hypothesis import given
from hypothesis import strategies as st

from ztunnel.runtime.http.page import Query, printable


@given(st.text())
def test_printable_names_stay_on_one_line(name: str) -> None:
    shown = printable(name)
    assert len(f"{shown}.".splitlines()) == 1
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in shown)


def test_printable_names_are_left_alone() -> None:
    assert printable("spiffe://cluster.local/ns/é ü") == "spiffe://cluster.local/ns/é ü"
    assert printable("a\nb\x1b[1m\u2028c\x85") == "a\\x0ab\\x1b[1m\\u2028c\\x85"


def test_first_of_several_parameters_counts() -> None:
    query = Query.parse("a=1&a=2&flag&b=%0A+x")
    assert query.get("a") == "1"
    assert "flag" in query
    assert query.get("flag") == ""
    assert query.get("b") == "\n x"
    assert query.get("none") is None
