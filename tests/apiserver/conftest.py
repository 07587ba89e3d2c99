"""One API server for all tests of a process: it takes some seconds to start."""

from collections.abc import Iterator

import pytest

from tests.apiserver.server import ApiServer, api_server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("apiserver")) as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "apiserver" in item.path.parts:
            item.add_marker(pytest.mark.kube)
