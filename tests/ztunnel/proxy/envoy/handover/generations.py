"""Two generations of one proxy of Envoy's dialect in this process, which meet in a folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import pytest

from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Json,
    Open,
    access_log,
    application,
    chain,
    cluster,
    listener,
    outbound_cluster,
    rbac,
    tcp,
)
from tests.ztunnel.proxy.envoy.test_lives import AnyPort, free_port, inbound_for_pod
from tests.ztunnel.proxy.envoy.test_proxy import internal_cluster
from ztunnel.policy.calico.settings import PolicySettings
from ztunnel.proxy.dataplane.handover.giver import Result
from ztunnel.proxy.dataplane.handover.service import Handover
from ztunnel.proxy.envoy import app
from ztunnel.proxy.envoy.config.settings import Switches
from ztunnel.proxy.envoy.stats.stats import Histogram
from ztunnel.runtime import accepting

#: Listeners, and how a connection to each goes on.
PLACES = ("plain", "tunnel", "behind")


class Generations:
    """The proxy that is replaced, and its successor.

    Attributes:
        old, new: each with its own control plane, statistics and log. ``new`` runs after :meth:`meet`.
        resources: the resources of both, by name; tests change the successor's before :meth:`meet`.
    """

    def __init__(
        self, folder: Path, port: int, stack: contextlib.AsyncExitStack, policies: Mapping[str, str]
    ) -> None:
        self.folder, self.port = folder, port
        self._stack = stack
        self.old, self.new = (self._harness(name, policies.get(name)) for name in ("old", "new"))
        identities = Identities()
        self._secrets = [identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
        self.policy = rbac(CLIENT)

    def _harness(self, name: str, text: str | None) -> Harness:
        (self.folder / name).mkdir()
        policies = None
        if text is not None:
            directory = self.folder / f"policies-{name}"
            directory.mkdir()
            (directory / "all.yaml").write_text(text)
            policies = PolicySettings(directory=str(directory))
        return Harness(self.folder / name, Switches(), None, policies, handover_dir=str(self.folder))

    def resources(self, harness: Harness) -> dict[str, tuple[str, Json]]:
        """Return listeners: plain, into a tunnel, into one through an internal listener, and the tunnels' end."""
        log = access_log(harness.folder)
        host = f"127.0.0.1:{self.port}"
        tunnelling = tcp("tunnel", tunneling_config={"hostname": host}, access_log=log)
        inner = listener(chain(tunnelling), name="inner", internal_listener={})
        del inner[1]["address"]
        return {
            "inbound": inbound_for_pod(free_port(), self.policy, log=log),
            "plain": listener(chain(tcp(access_log=log)), name="plain"),
            "tunnel": listener(chain(tunnelling), name="tunnel"),
            "behind": listener(chain(tcp("within", access_log=log)), name="behind"),
            "inner": inner,
            "app": cluster(self.port),
            "within": internal_cluster("within", "inner"),
        }

    async def start(
        self, harness: Harness, *without: str, more: dict[str, tuple[str, Json]] | None = None
    ) -> None:
        """Run a proxy with all resources but some."""
        found = {**self.resources(harness), **(more or {})}
        first = [found["inbound"], found["app"], *self._secrets]
        if harness is self.new:
            first.append(outbound_cluster(self.old.port("inbound")))
        harness.publish(*first)
        await self._stack.enter_async_context(harness.server)
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        running = tasks.create_task(harness.proxy.run())
        self._stack.push_async_callback(self._end, harness, running)
        await harness.live()
        served = [each for name, each in found.items() if name not in without]
        await harness.published(*served, outbound_cluster(self.old.port("inbound")), *self._secrets)
        listeners = sum(kind == "listener" for kind, _ in served)
        await harness.until(lambda: len(harness.proxy.listeners.active) == listeners)

    @staticmethod
    async def _end(harness: Harness, running: asyncio.Task[None]) -> None:
        with mock.patch.object(accepting, "_HANDOVER_S", 0.0):
            harness.proxy.shut_down()
            await running

    @property
    def before(self) -> Handover:
        """The hand-over of the old proxy."""
        assert self.old.proxy.handover is not None
        return self.old.proxy.handover

    @property
    def after(self) -> Handover:
        """The hand-over of the new proxy."""
        assert self.new.proxy.handover is not None
        return self.new.proxy.handover

    async def meet(self, *without: str, more: dict[str, tuple[str, Json]] | None = None) -> None:
        """Start the successor, without some resources or with others."""
        await self.start(self.new, *without, more=more)
        await self.new.until(lambda: self.before.successor_waits)

    async def give(self, seconds: float = 2.0) -> Result:
        """Have the old proxy give everything."""
        result = await self.before.give(seconds)
        assert result is not None
        return result

    def swap(self) -> None:
        """Exchange the roles: the proxy that has given becomes the next successor."""
        self.old, self.new = self.new, self.old

    async def meet_again(self) -> None:
        """After a hand-over, have the first proxy wait for the connections of the second."""
        await self.before.close()
        await self.new.until(lambda: self.after.status()["listening"])
        proxy = self.old.proxy
        proxy.handover = proxy._build_handover(proxy.listeners._table)
        self.before.begin()
        self.swap()
        await self.new.until(lambda: self.before.successor_waits)

    async def opened(self) -> dict[str, Open]:
        """One connection of each kind, which has carried something."""
        found = {name: await Open.to(self.old.port(name)) for name in PLACES}
        for each in found.values():
            assert await each.say(b"hello") == b"hello"
        return found

    async def log(self, lines: int) -> list[Json]:
        """Return both access logs, once they have so many lines together."""
        paths = [harness.folder / "log" for harness in (self.old, self.new)]

        def found() -> list[str]:
            return [line for path in paths if path.exists() for line in path.read_text().splitlines(keepends=True)]

        await self.new.until(lambda: sum(line.endswith("\n") for line in found()) >= lines)
        return [json.loads(line) for line in found()]

    def counts(self) -> dict[str, float]:
        """Return both proxies' counters of connections, by name without ports.

        Without the verdicts of RBAC filters, because a successor judges again.
        """
        found: dict[str, float] = {}
        for harness in (self.old, self.new):
            for metric in harness.proxy.stats:
                if metric.name.startswith(("listener.", "cluster.", "tcp.p.", "http.")):
                    name = re.sub(r"\d{4,}", "#", metric.name)
                    number = metric.count if isinstance(metric, Histogram) else metric.value
                    found[name] = found.get(name, 0) + number
            times = harness.proxy.account.times
            for table in (times.lengths, times.connects):
                for key, durations in table.items():
                    found["/".join(key)] = found.get("/".join(key), 0) + durations.count
        return {name: number for name, number in found.items() if number}


@contextlib.asynccontextmanager
async def generations(folder: Path, policies: Mapping[str, str]) -> AsyncIterator[Generations]:
    """Yield both proxies. The old one runs, with an application. ``policies`` are Calico's, by ``old`` and
    ``new``.
    """
    async with application() as port, contextlib.AsyncExitStack() as stack:
        made = Generations(folder, port, stack, policies)
        await made.start(made.old)
        yield made


def play(
    folder: Path,
    body: Callable[[Generations], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    joined: bool = False,
    policies: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run ``body`` with two generations; ``joined``: tunnels do not leave the process."""
    monkeypatch.setattr(app, "_SHORTCUT_PORTS", AnyPort() if joined else {})

    async def main() -> None:
        async with generations(folder, policies) as made:
            await body(made)

    asyncio.run(main())
