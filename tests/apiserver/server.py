"""A real API server for a test, in a folder; without its programs the test is skipped, loudly."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from deploy import apiserver
from deploy.apiserver import ADMIN, NOBODY
from tests.apiserver.programs import needed
from tests.ports import free_port

__all__ = ["ADMIN", "NOBODY", "ApiServer", "api_server"]


class ApiServer(apiserver.ApiServer):
    """See :func:`api_server`."""

    def __init__(self, folder: Path) -> None:
        programs = {name: needed(name) for name in apiserver.PROGRAMS}
        super().__init__(folder, programs, [free_port() for _ in range(3)])


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Run an API server; without its programs the test is skipped, loudly."""
    server = ApiServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
