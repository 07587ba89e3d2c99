"""Edits of followed files, as polls see them."""

from pathlib import Path

import pytest

from ztunnel.runtime.watched_file import FileState, InPlaceEdits, file_state

FILE = Path("a.yaml")
OLD: FileState = (1, 10, 100, 5)
EMPTIED: FileState = (1, 10, 0, 6)
HALF: FileState = (1, 10, 50, 7)
WHOLE: FileState = (1, 10, 99, 8)
ANOTHER: FileState = (1, 11, 99, 8)


@pytest.mark.parametrize(
    ("polls", "written"),
    [
        ([WHOLE, WHOLE], [True, False]),
        ([EMPTIED, HALF, WHOLE, WHOLE], [True, True, True, False]),
        ([HALF, HALF, WHOLE, WHOLE], [True, False, True, False]),
        ([ANOTHER], [False]),
        ([HALF, ANOTHER], [True, False]),
        ([HALF, None], [True, False]),
    ],
    ids=["at once", "in parts", "with a long pause", "replaced", "replaced meanwhile", "removed meanwhile"],
)
def test_a_file_is_complete_once_two_polls_agree_or_it_was_replaced(
    polls: list[FileState], written: list[bool]
) -> None:
    edits, read = InPlaceEdits(), OLD
    found = []
    for now in polls:
        found.append(edits.is_written(FILE, read, now))
        if not found[-1]:
            read = now
    assert found == written


def test_edits_of_several_files_are_told_apart() -> None:
    edits, other = InPlaceEdits(), Path("b.yaml")
    assert edits.is_written(FILE, OLD, HALF)
    assert edits.is_written(other, OLD, HALF)
    assert not edits.is_written(FILE, OLD, HALF)
    assert edits.is_written(other, OLD, WHOLE)


def test_a_new_file_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    assert file_state(path) is None
    path.write_text("a")
    assert not InPlaceEdits().is_written(path, None, file_state(path))


def test_files_are_complete_once_none_of_them_is_written() -> None:
    edits, other, new = InPlaceEdits(), Path("b.yaml"), Path("c.yaml")
    read = {FILE: OLD, other: OLD}
    assert not edits.are_complete(read, {FILE: HALF, other: HALF})
    assert not edits.are_complete(read, {FILE: HALF, other: WHOLE, new: WHOLE})
    assert not edits.are_complete(read, {FILE: WHOLE, other: WHOLE})
    assert not edits.are_complete(read, {FILE: WHOLE, other: HALF})
    for _ in range(2):
        assert edits.are_complete(read, {FILE: WHOLE, other: HALF})
    assert edits.are_complete(read, {FILE: ANOTHER})
