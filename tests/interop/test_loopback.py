"""The tables that need no namespaces as tests: one per case and column."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.interop import operators
from tests.interop.case import Case
from tests.interop.proxies import ENVOY
from tests.interop.tables import LOOPBACK, Table
from xds.dialects.envoy.access_log import parse_format
from xds.errors import ConfigError

pytestmark = pytest.mark.interop

Column = tuple[Table, Any]
_ROWS = [
    pytest.param(
        (table, column),
        case,
        id=f"{table.title}-{case.number}-{column}".replace(" ", "_"),
        marks=pytest.mark.group(f"{table.title}-{column}".replace(" ", "_")),
    )
    for table in LOOPBACK
    for column in table.tested
    for case in table.cases
]


@pytest.fixture(scope="module")
def site_of() -> Iterator[Callable[[Column], Any]]:
    """Return the site of a column. It stays until another column is requested."""
    if not ENVOY.exists():
        pytest.skip("NOT TESTED: no Envoy here")
    with contextlib.ExitStack() as stack:
        current: tuple[Column, Any] | None = None

        def open_column(column: Column) -> Any:
            nonlocal current
            if current is None or current[0] != column:
                stack.close()
                current = column, stack.enter_context(column[0].site(column[1]))
            return current[1]

        yield open_column


@pytest.mark.parametrize(("column", "case"), _ROWS)
def test_each_row_over_loopback_passes(site_of: Callable[[Column], Any], column: Column, case: Case[Any]) -> None:
    assert case.run(site_of(column)) == case.expected[column[1]]


@pytest.mark.parametrize("operator", operators.REFUSED)
def test_a_refused_operator_is_named(operator: str) -> None:
    with pytest.raises(ConfigError, match=operator.partition("(")[0]):
        parse_format(f"%{operator}%")


def test_a_difference_has_a_reason() -> None:
    from tests.interop import conditions
    from tests.interop.loopback import BEHAVIOURS
    from tests.interop.refusals import ROWS

    for name, row in ROWS.items():
        assert bool(row.why) == (row.envoy is not row.ours), name
    for name, behaviour in BEHAVIOURS.items():
        assert bool(behaviour.why) == bool(behaviour.ours and behaviour.ours != behaviour.envoy), name
    for condition in conditions.ROWS:
        assert bool(condition.why) == bool(condition.ours and condition.ours != condition.envoy), condition.text
