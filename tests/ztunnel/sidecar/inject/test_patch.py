"""Patches, applied by an independent implementation of RFC 6902."""

import copy
import json
from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.sidecar.inject.patch import diff, pointer, same

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("a~/0é", max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text("a~/01 é", max_size=3), inner, max_size=4),
    max_leaves=12,
)


def applied(patch: list[dict[str, Any]], before: Any) -> Any:
    return jsonpatch.apply_patch(copy.deepcopy(before), json.loads(json.dumps(patch)))


@given(before=JSON, after=JSON)
def test_a_patch_makes_the_second_of_the_first(before: Any, after: Any) -> None:
    original = copy.deepcopy(before)
    assert same(applied(diff(before, after), before), after)
    assert same(before, original)


@given(value=JSON)
def test_nothing_changed_is_no_operation(value: Any) -> None:
    assert diff(value, copy.deepcopy(value)) == []


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ([1, 2], [0, 1, 2], [{"op": "add", "path": "/0", "value": 0}]),
        ([1, 2, 3], [1, 3], [{"op": "remove", "path": "/1"}]),
        ([1, 2, 3], [1, 4, 3], [{"op": "replace", "path": "/1", "value": 4}]),
        ({"a/b": 1}, {"a/b": 2}, [{"op": "replace", "path": "/a~1b", "value": 2}]),
        ({"a~b": 1}, {}, [{"op": "remove", "path": "/a~0b"}]),
        ({"a": True}, {"a": 1}, [{"op": "replace", "path": "/a", "value": 1}]),
        ({"a": None}, {}, [{"op": "remove", "path": "/a"}]),
        ([{"n": 1, "m": 2}], [{"n": 1, "m": 3}], [{"op": "replace", "path": "/0/m", "value": 3}]),
    ],
)
def test_the_operations_are_the_smallest(before: Any, after: Any, patch: list[dict[str, Any]]) -> None:
    assert diff(before, after) == patch


def test_pointers_are_escaped() -> None:
    assert pointer("metadata", "annotations", "a.io/~x", 3) == "/metadata/annotations/a.io~1~0x/3"
