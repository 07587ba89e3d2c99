"""The normal form of paths, and matches by prefix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.policy.calico.http_path import is_below, normal_path


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("/", "/"),
        ("/public/", "/public"),
        ("/public/.", "/public"),
        ("/..", "/"),
        ("//public", "/public"),
        ("/public%2F..%2Fadmin", "/admin"),
        ("/public/%66ile", "/public/file"),
        ("/public/..;x/admin", "/admin"),
        ("/public/..%3Bx/admin", "/admin"),
        ("/a;p=1/b;q=2/c;r=3", "/a/b/c"),
        ("\\public\\..\\admin", "/admin"),
        ("/public%5C..%5Cadmin", "/admin"),
        ("/public%3Ffoo", "/public?foo"),
        ("/public?x=/../admin", "/public"),
        ("/public#/../admin", "/public"),
        ("/a+b", "/a+b"),
    ],
)
def test_paths_that_mean_the_same_have_one_form(path: str, normal: str) -> None:
    assert normal_path(path) == normal.encode()


@pytest.mark.parametrize(
    "path",
    [
        "/public/%252e%252e/admin",
        "/public/%252E",
        "/a%252fb",
        "/a%255Cb",
        "/public%00/admin",
        "/%XY/admin",
        "/%",
        "/%2",
        "relative",
        "",
        "?x",
        "http://h/p",
    ],
)
def test_ambiguous_paths_have_no_normal_form(path: str) -> None:
    assert normal_path(path) is None


@pytest.mark.parametrize("path", ["/public", "/public/", "/public//x", "/public/foo\\bar", "/public/foo;x=1/bar"])
def test_below_a_prefix(path: str) -> None:
    assert is_below(normal_path(path) or b"", b"/public")


@pytest.mark.parametrize("path", ["/public/../admin", "/public-leak", "/public/a/../../admin", "/"])
def test_not_below_a_prefix(path: str) -> None:
    assert not is_below(normal_path(path) or b"", b"/public")


@given(st.one_of(st.text(), st.text(alphabet="/.%25cCfF;\\?#a\0\udc80", max_size=30)))
def test_a_normal_form_is_plain(path: str) -> None:
    found = normal_path(path)
    if found is None:
        return
    assert found.startswith(b"/")
    assert found == b"/" or not found.endswith(b"/")
    assert b"\\" not in found
    assert b"//" not in found
    assert not {b".", b".."} & set(found.split(b"/"))
    assert is_below(found, b"/")
