import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "istiod" in item.path.parts:
            item.add_marker(pytest.mark.kube)
