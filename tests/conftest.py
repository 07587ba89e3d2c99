"""What holds for every test."""

import pytest

import hbone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if hbone.build() == "pure":
        return
    skip = pytest.mark.skip(reason="replaces a method, which a compiled class does not allow")
    for item in items:
        if item.get_closest_marker("pure") is not None:
            item.add_marker(skip)
