"""The address that a cluster's ``upstream_bind_config`` sends from."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ztunnel.proxy.envoy.harness import Harness, ask, cluster, listener, run
from tproxy.aio import socket_calls
from tproxy.errors import NeedCapability


@contextlib.asynccontextmanager
async def saying_who_calls() -> AsyncIterator[int]:
    """An application that answers with its client's address; the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.write(writer.get_extra_info("peername")[0].encode())
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def test_an_own_address_needs_no_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As where the process has no CAP_NET_ADMIN.
    def refused(*_: object) -> None:
        raise NeedCapability("CAP_NET_ADMIN", "use foreign addresses (IP_TRANSPARENT)")

    monkeypatch.setattr(socket_calls, "set_transparent", refused)

    async def body(harness: Harness) -> None:
        async with saying_who_calls() as port:
            source = {"source_address": {"address": "127.0.0.9", "port_value": 0}}
            assert (
                await harness.published(listener(name="bound"), cluster(port, upstream_bind_config=source)) is None
            )
            assert await ask(harness.port("bound")) == b"127.0.0.9"
            assert harness.count("cluster.app.bind_errors") == 0

    run(tmp_path, body, listener(), cluster(1))


def test_an_address_of_another_host_is_a_bind_error(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with saying_who_calls() as port:
            source = {"source_address": {"address": "192.0.2.9", "port_value": 0}}
            assert (
                await harness.published(listener(name="bound"), cluster(port, upstream_bind_config=source)) is None
            )
            assert await ask(harness.port("bound")) == b""
            for name in ("bind_errors", "upstream_cx_total", "upstream_cx_destroy_local"):
                assert harness.count(f"cluster.app.{name}") == 1

    run(tmp_path, body, listener(), cluster(1))
