"""One process of Go's readers for all tests of a worker."""

from collections.abc import Iterator

import pytest

from tests.golang.oracle import Oracle


@pytest.fixture(scope="session")
def go() -> Iterator[Oracle]:
    running = Oracle()
    yield running
    running.close()
