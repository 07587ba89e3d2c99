"""Skip loudly where namespaces cannot be made."""

import pytest

from tproxy.aio.lab import may_make_namespaces


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if may_make_namespaces():
        return
    skip = pytest.mark.skip(reason="NOT TESTED: network namespaces need root (CAP_SYS_ADMIN, CAP_NET_ADMIN)")
    for item in items:
        if item.get_closest_marker("netns"):
            item.add_marker(skip)
