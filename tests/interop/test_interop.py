"""The tables of cases as tests: one per case and column."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.interop.case import Case, Runner
from tests.interop.site import Pairing, Site, available
from tests.interop.tables import TABLES, Table

pytestmark = [pytest.mark.interop, pytest.mark.netns]

Column = tuple[Table, Pairing]
_ROWS = [
    pytest.param((table, pairing), case, id=f"{table.title}-{case.number}-{pairing}".replace(" ", "_"))
    for table in TABLES
    for pairing in table.columns
    # The early ones last: by then their wait is over.
    for case in sorted(table.cases, key=lambda case: case.early)
    if pairing in case.expected
]


@pytest.fixture(scope="module")
def runner_of() -> Iterator[Callable[[Column], Runner]]:
    """The runner of a column; its site stays until another column is asked for."""
    reason = available()
    if reason is not None:
        pytest.skip(f"NOT TESTED: {reason}")
    with contextlib.ExitStack() as stack:
        current: tuple[Column, Runner] | None = None

        def open_column(column: Column) -> Runner:
            nonlocal current
            if current is None or current[0] != column:
                stack.close()
                current = None
                site = stack.enter_context(Site(column[1]))
                runner = Runner(site, column[0].cases)
                stack.callback(runner.close)
                current = column, runner
            return current[1]

        yield open_column


@pytest.mark.parametrize(("column", "case"), _ROWS)
def test_case(runner_of: Callable[[Column], Runner], column: Column, case: Case) -> None:
    assert runner_of(column).run(case) == case.expected[column[1]]
