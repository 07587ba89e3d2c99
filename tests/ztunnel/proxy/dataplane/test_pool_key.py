"""Dialling a tunnel connection: the ClientHello is made while TCP connects, once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.server import Request, serve_connection
from hbone.tls import TlsSession
from hbone.tls_context import TlsContext
from tests.hbone.aio.harness import contexts, polling, run, tcp_pair
from ztunnel.proxy.dataplane import pool_key
from ztunnel.proxy.dataplane.pool_key import dial_connection


@pytest.mark.parametrize("begins", [0, 1, 2])
@pytest.mark.parametrize("tls", [False, True], ids=["cleartext", "tls"])
def test_one_session_is_made_however_often_the_socket_waits(
    begins: int, monkeypatch: pytest.MonkeyPatch, *, tls: bool
) -> None:
    made: list[TlsSession] = []

    def session(context: TlsContext) -> TlsSession:
        made.append(TlsSession(context))
        return made[-1]

    async def main() -> None:
        near, far = tcp_pair()

        async def never(request: Request) -> None:
            raise AssertionError

        async def open_socket(begin: Callable[[], None]) -> socket.socket:
            for _ in range(begins):
                begin()
                await asyncio.sleep(0)
            return near

        client, server = contexts() if tls else (None, None)
        with polling() as poller:
            serving = asyncio.get_running_loop().create_task(
                serve_connection(far, server, ConnectionSettings(), poller, never)
            )
            finished: list[bool] = []
            connection = await dial_connection(
                lambda: client,
                open_socket,
                default_client(),
                poller,
                lambda _, succeeded: finished.append(succeeded),
            )
            assert (connection.facts is not None) is tls
            assert finished == [True] * tls
            assert len(made) == (tls and begins > 0)
            connection.abort("the test ends")
            await asyncio.wait([serving])

    monkeypatch.setattr(pool_key, "TlsSession", session)
    run(main)
