"""One process of Go's readers for all tests of a worker."""

from collections.abc import Iterator

import pytest

from tests.golang.oracle import Oracle

#: A limit for hangs. The first test builds the program, which takes minutes if Go's cache is empty and the machine
#: busy.
BUILD_S = 900


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give the tests of this folder the time to build; any of them can be the first."""
    item.add_marker(pytest.mark.timeout(BUILD_S))


@pytest.fixture(scope="session")
def go() -> Iterator[Oracle]:
    running = Oracle()
    yield running
    running.close()
