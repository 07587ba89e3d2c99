"""The tables of cases as tests: one per case and column."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.interop.case import Case, Runner
from tests.interop.site import available
from tests.interop.tables import TABLES, Table

pytestmark = [pytest.mark.interop, pytest.mark.netns]

Column = tuple[Table, Any]
_ROWS = [
    pytest.param(
        (table, column),
        case,
        id=f"{table.title}-{case.number}-{column}".replace(" ", "_"),
        marks=pytest.mark.group(f"{table.title}-{column}".replace(" ", "_")),
    )
    for table in TABLES
    for column in table.tested
    # Early cases come last, because by then their waits are over.
    for case in sorted(table.cases, key=lambda case: case.early)
    if column in case.expected
]


@pytest.fixture(scope="module")
def runner_of() -> Iterator[Callable[[Column], Runner[Any]]]:
    """Return the runner of a column. Its site stays until another column is requested."""
    reason = available()
    if reason is not None:
        pytest.skip(f"NOT TESTED: {reason}")
    with contextlib.ExitStack() as stack:
        current: tuple[Column, Runner[Any]] | None = None

        def open_column(column: Column) -> Runner[Any]:
            nonlocal current
            if current is None or current[0] != column:
                stack.close()
                current = None
                site = stack.enter_context(column[0].site(column[1]))
                runner = Runner(site, column[0].cases, column[1])
                stack.callback(runner.close)
                current = column, runner
            return current[1]

        yield open_column


@pytest.mark.parametrize(("column", "case"), _ROWS)
def test_each_row_of_the_interop_tables_passes(
    runner_of: Callable[[Column], Runner[Any]], column: Column, case: Case[Any]
) -> None:
    assert runner_of(column).run(case) == case.expected[column[1]]
