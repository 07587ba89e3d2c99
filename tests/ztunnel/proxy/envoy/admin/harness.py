"""A whole proxy from files, and a client that asks it."""

import asyncio
import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from tests.limits import WAIT_S
from tests.ztunnel.proxy.envoy.admin.reference import Reference
from xds.model.address import SocketAddress
from ztunnel.proxy.envoy.app import Proxy
from ztunnel.proxy.envoy.config.bootstrap import load_bootstrap
from ztunnel.proxy.envoy.config.settings import Settings
from ztunnel.proxy.envoy.config.state import State

_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Client:
    """Sends requests to one server over one connection."""

    port: int
    connection: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)

    def get(self, path: str, **parameters: str) -> Answer:
        return self.ask("GET", path, parameters)

    def post(self, path: str, **parameters: str) -> Answer:
        return self.ask("POST", path, parameters)

    def ask(
        self, method: str, path: str, parameters: dict[str, str], headers: dict[str, str] | None = None
    ) -> Answer:
        query = f"?{urlencode(parameters)}" if parameters else ""
        self.connection.request(method, path + query, headers=headers or {})
        response = self.connection.getresponse()
        body = response.read()
        return Answer(response.status, [(k.lower(), v) for k, v in response.getheaders()], body)

    def until(self, condition: Callable[["Client"], bool]) -> None:
        """Ask again until a change that travels through the file system has arrived."""
        deadline = time.monotonic() + WAIT_S
        while not condition(self):
            assert time.monotonic() < deadline, "the change did not arrive"
            time.sleep(_POLL_S)

    def close(self) -> None:
        self.connection.close()


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy that runs while a test asks it."""

    proxy: Proxy
    admin: Client
    readiness: Client
    metrics: Client


def serve(
    reference: Reference, check: Callable[[Running], None], *, until: State = State.LIVE, drain_s: float = 0.2
) -> Proxy:
    """Run a proxy of ``reference``, call ``check`` in a thread once the proxy is in state ``until``, shut down."""

    async def main() -> Proxy:
        settings = Settings(
            bootstrap=str(reference.bootstrap),
            readiness=SocketAddress("127.0.0.1", reference.readiness),
            metrics=SocketAddress("127.0.0.1", reference.metrics),
            shutdown_s=0.2,
            drain_s=drain_s,
        )
        proxy = Proxy(settings, load_bootstrap(str(reference.bootstrap)))
        running = Running(proxy, Client(reference.admin), Client(reference.readiness), Client(reference.metrics))
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(proxy.run())
            try:
                async with asyncio.timeout(WAIT_S):
                    while proxy.state is not until or (until is not State.LIVE and not proxy.clusters.warming):
                        await asyncio.sleep(_POLL_S)
                await asyncio.to_thread(check, running)
            finally:
                for client in (running.admin, running.readiness, running.metrics):
                    client.close()
                proxy.shut_down()
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(run)
        return proxy

    return asyncio.run(main())
