"""Skip tests with a message if namespaces cannot be created, and let the programs under test be interrupted."""

import signal
from collections.abc import Iterator

import pytest

from deploy.lab import may_make_namespaces


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if may_make_namespaces():
        return
    skip = pytest.mark.skip(reason="NOT TESTED: network namespaces need root (CAP_SYS_ADMIN, CAP_NET_ADMIN)")
    for item in items:
        if item.get_closest_marker("netns"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def interrupts() -> Iterator[None]:
    """A shell makes what it runs in the background ignore them, which every program started from here inherits."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
