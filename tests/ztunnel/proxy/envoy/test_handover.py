"""A proxy replaces another one (Envoy's dialect) without any effect for clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from hbone.aio.connection import connect
from hbone.aio.connection_settings import default_client
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    WAIT_S,
    Harness,
    Identities,
    Open,
    application,
    ask,
    chain,
    cluster,
    connect_route,
    inbound,
    listener,
    run,
)
from tests.ztunnel.proxy.envoy.test_attacks import context

GENERATIONS = 3
#: What starting a process may take where others keep the machine busy.
_START_S = 40.0


def bootstrap(folder: Path, admin: int, port: int, application_port: int) -> Path:
    """Static: one listener that leads to one application."""
    _, served = listener(chain())
    served["address"]["socket_address"]["port_value"] = port
    document = {
        "node": {"id": "n", "cluster": "c"},
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}},
        "static_resources": {"listeners": [served], "clusters": [cluster(application_port)[1]]},
    }
    path = folder / "bootstrap.json"
    path.write_text(json.dumps(document))
    return path


@contextlib.asynccontextmanager
async def generation(path: Path, epoch: int) -> AsyncIterator[asyncio.subprocess.Process]:
    words = ["proxy", "--bootstrap", str(path), "--restart-epoch", str(epoch), "--shutdown", "20s"]
    off = ["--readiness", "off", "--metrics", "off"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ztunnel", *words, *off), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def info(admin: int) -> dict[str, object]:
    """``/server_info``, empty while nobody answers."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", admin)
        with contextlib.closing(writer):
            writer.write(b"GET /server_info HTTP/1.0\r\n\r\n")
            answer = await reader.read()
    except OSError:
        return {}
    found = json.loads(answer.partition(b"\r\n\r\n")[2])
    return {"state": found["state"], "epoch": found["command_line_options"]["restart_epoch"]}


async def live(admin: int, epoch: int) -> None:
    async with asyncio.timeout(_START_S):
        while await info(admin) != {"state": "LIVE", "epoch": epoch}:
            await asyncio.sleep(0.02)


class Clients:
    """Connect and ask all the time, while entered."""

    def __init__(self, port: int) -> None:
        self.done = 0
        self.failures: list[object] = []
        self._port = port
        self._stopped = False
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Clients:
        await self._tasks.__aenter__()
        for _ in range(8):
            self._tasks.create_task(self._run())
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self._stopped = True
        await self._tasks.__aexit__(*exception)

    async def _run(self) -> None:
        while not self._stopped:
            try:
                answer = await ask(self._port)
            except OSError as error:
                self.failures.append(error)
            else:
                if answer != b"ping":
                    self.failures.append(answer)
            self.done += 1

    async def more(self, count: int = 50) -> None:
        wanted = self.done + count
        async with asyncio.timeout(WAIT_S):
            while self.done < wanted:
                await asyncio.sleep(0.01)


def test_restart_epochs_follow_each_other_without_failed_connections(tmp_path: Path) -> None:
    async def main() -> None:
        async with application() as application_port, contextlib.AsyncExitStack() as stack:
            admin, port = free_port(), free_port()
            path = bootstrap(tmp_path, admin, port, application_port)
            running = await stack.enter_async_context(generation(path, 0))
            await live(admin, 0)
            async with Clients(port) as clients:
                for epoch in range(1, GENERATIONS):
                    before = running
                    held = await Open.to(port)
                    assert await held.say(b"one") == b"one"
                    running = await stack.enter_async_context(generation(path, epoch))
                    await live(admin, epoch)  # the newest process answers
                    await clients.more()
                    before.send_signal(signal.SIGTERM)
                    await clients.more()
                    assert await info(admin) == {"state": "LIVE", "epoch": epoch}
                    assert await held.say(b"two") == b"two"
                    await held.close()
                    assert await asyncio.wait_for(before.wait(), WAIT_S) == 0
                    await clients.more()
            assert clients.failures == []

    asyncio.run(main())


def test_second_proxy_without_restart_epoch_names_the_flag(tmp_path: Path) -> None:
    async def main() -> None:
        admin, port = free_port(), free_port()
        path = bootstrap(tmp_path, admin, port, 1)
        async with generation(path, 0):
            await live(admin, 0)
            async with generation(path, 0) as second:
                _, told = await asyncio.wait_for(second.communicate(), WAIT_S)
            assert second.returncode == 1
            (line,) = [line for line in told.decode().splitlines() if line.startswith("ztunnel: ")]
            assert f"127.0.0.1:{admin}" in line
            assert line.endswith("to take the place of a proxy that runs, start with --restart-epoch 1")

    asyncio.run(main())


def test_queued_connections_are_served_when_a_listener_stops(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(), cluster(port))
            await harness.until(lambda: harness.proxy.listeners.active)
            with contextlib.ExitStack() as stack:
                connect_now = partial(socket.create_connection, ("127.0.0.1", harness.port("l")), 5)
                waiting = [stack.enter_context(connect_now()) for _ in range(10)]  # nobody accepts meanwhile
                harness.proxy.listeners.stop()
                for sock in waiting:
                    sock.setblocking(False)
                    await asyncio.get_running_loop().sock_sendall(sock, b"ping")
                    answer = asyncio.get_running_loop().sock_recv(sock, 10)
                    assert await asyncio.wait_for(answer, WAIT_S) == b"ping"

    run(tmp_path, body)


def test_running_handshake_completes_and_gets_goaway(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        identities = Identities()
        end = inbound({"route_config": connect_route("app")})
        await harness.published(end, cluster(1), *_secrets(identities))
        await harness.until(lambda: harness.proxy.listeners.active)
        sock = socket.create_connection(("127.0.0.1", harness.port("inbound")))
        sock.setblocking(False)
        await harness.until(lambda: len(harness.proxy.connections) == 1)
        harness.proxy.shut_down()
        await harness.until(lambda: _nobody_listens(harness))
        client = context(identities.authority, identities.authority.issue(CLIENT), alpn=(b"h2",))
        connection = await connect(sock, client, default_client(), harness.proxy.poller)
        async with asyncio.timeout(WAIT_S):
            await connection.wait_closed()
        assert connection.engine.going_away

    run(tmp_path, body)


def _secrets(identities: Identities) -> list[tuple[str, dict[str, object]]]:
    return [identities.secret("spiffe://td/ns/a/sa/server"), identities.root()]


def _nobody_listens(harness: Harness) -> bool:
    return not any(found.sockets for found in harness.proxy.listeners.active)
