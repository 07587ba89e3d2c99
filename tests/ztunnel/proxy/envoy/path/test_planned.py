"""Connections with a plan against equal ones without: the same bytes, lines, counters and entries.

Both ends of the tunnel are in one proxy. The client's side is a planned connection, the server's a planned
request.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_S
from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    Harness,
    Identities,
    Json,
    Open,
    access_log,
    application,
    ask,
    chain,
    listener,
    rbac,
    run,
    tcp,
    tunnel,
)
from tests.ztunnel.proxy.envoy.test_proxy import internal_cluster
from tproxy.aio import sockets
from ztunnel.proxy.dataplane.life_table import Event
from ztunnel.proxy.envoy.config.settings import Switches
from ztunnel.proxy.envoy.listeners.connections import LiveConnection
from ztunnel.proxy.envoy.listeners.plans import Plans
from ztunnel.proxy.envoy.path import dial
from ztunnel.proxy.envoy.path.planned import PlannedConnection
from ztunnel.proxy.envoy.path.planned_request import PlannedRequest
from ztunnel.proxy.envoy.path.tcp_proxy import TcpProxies
from ztunnel.proxy.envoy.path.tunnel_server import TunnelServer
from ztunnel.proxy.envoy.stats.stats import Counter, Gauge
from ztunnel.proxy.envoy.stream.outcome import POLICY_CHANGE, STOPPED

KINDS = ("listener.", "cluster.", "http.", "tcp.")


class Steps:
    """Switches plans on and off, and counts the connections and requests that begin as steps.

    Attributes:
        begun: the numbers of planned connections and of planned requests.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = [0, 0]
        self.planned = True
        plan, take_now = Plans.plan, TunnelServer._take_now
        monkeypatch.setattr(Plans, "plan", lambda plans, key: plan(plans, key) if self.planned else None)
        monkeypatch.setattr(
            TunnelServer,
            "_take_now",
            lambda server, served, request: take_now(server, served, request) if self.planned else None,
        )
        for place, kind in enumerate((PlannedConnection, PlannedRequest)):
            monkeypatch.setattr(kind, "begin", self._counted(place, kind.begin))

    def _counted(self, place: int, begin: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.begun[place] += 1
            return begin(*arguments)

        return counted


def numbers(harness: Harness) -> dict[str, float]:
    return {
        each.name: each.value
        for each in harness.proxy.stats
        if isinstance(each, Counter | Gauge) and each.name.startswith(KINDS)
    }


async def idle(harness: Harness) -> None:
    """Wait until only the tunnel connection is left."""
    connections = harness.proxy.connections
    await harness.until(lambda: not len(connections.hops) and all(each.tunnels for each in connections))


async def one(harness: Harness, work: Callable[[], Any]) -> tuple[Any, dict[str, float], list[Json]]:
    """Return the result of a connection, what it changed in the counters, and its lines."""
    before, lines = numbers(harness), written(harness)
    result = await work()
    await idle(harness)
    after = numbers(harness)
    changed = {name: value - before.get(name, 0) for name, value in after.items()}
    return (
        result,
        {name: value for name, value in changed.items() if value},
        written(harness)[len(lines) :],
    )


def written(harness: Harness) -> list[Json]:
    """Return every line of the access log."""
    harness.proxy.logs.writer.flush()
    harness.proxy.logs.writer.drain()
    path = harness.folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def serve(
    harness: Harness,
    folder: Path,
    port: int,
    *filters: Json,
    service: bool,
    behind: Json | None = None,
    **more: Any,
) -> None:
    """Publish a tunnel, for ``service`` behind an internal listener; ``more`` are fields of its TCP proxies, and
    ``behind`` of the internal listener's only.
    """
    log = access_log(folder)
    everything = await tunnel(harness, port, Identities(), *filters, access_log=log, **more)
    if service:
        _, inner = listener(
            chain(
                tcp("tunnel", tunneling_config={"hostname": "app:80"}, access_log=log, **more, **(behind or {}))
            ),
            name="inner",
            internal_listener={},
        )
        del inner["address"]
        rest = [entry for entry in everything if entry[1].get("name") != "l"]
        outer = listener(chain(tcp("service", access_log=log, **more)))
        everything = [*rest, outer, ("listener", inner), internal_cluster("service", "inner")]
        harness.publish(*everything)
        await harness.until(lambda: len(harness.proxy.listeners.active) == 3)
        await harness.until(lambda: harness.count("listener_manager.total_listeners_draining") == 0)


@pytest.mark.parametrize("service", [False, True], ids=["tunnel", "service"])
@pytest.mark.parametrize("case", ["carried", "refused"])
def test_steps_leave_the_lines_and_counters_of_coroutines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, service: bool
) -> None:
    steps = Steps(monkeypatch)

    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            await serve(harness, tmp_path, port, rbac(CLIENT), service=service)

            async def work() -> bytes:
                return await ask(harness.port("l"), b"there")

            assert await work() == b"hi there"  # opens the tunnel connection, and makes the plan
            await idle(harness)
            if case == "refused":
                cluster = harness.proxy.clusters.get("app")
                assert cluster is not None
                cluster.breaker.connections += 1_000_000
            first = steps.begun.copy()
            planned = await one(harness, work)
            assert [now - then for now, then in zip(steps.begun, first, strict=True)] == [1, 1]
            steps.planned = False
            assert planned == await one(harness, work)
            assert planned[0] == (b"hi there" if case == "carried" else b"")
            assert planned[1].get("cluster.tunnel.upstream_rq_total", 0) == (case == "carried")
            assert planned[2][-1]["flags"] == ("-" if case == "carried" else "UF,URX")

    # An attempt that first bytes went along with is final, and whether they do depends on when they come.
    run(tmp_path, body, switches=Switches(early_data=False))


def never_connects(
    monkeypatch: pytest.MonkeyPatch, dials: asyncio.Semaphore, error: Exception | None = None
) -> None:
    """Have every dial of an application wait from now on, and count in ``dials``; with ``error``, end with it."""
    connecting = dial._connect_now

    def slow(cluster: Any, address: Any, options: Any) -> tuple[socket.SocketType, bool]:
        return connecting(cluster, address, options)[0], False

    async def never(sock: socket.SocketType, address: tuple[str, int], timeout_s: float) -> None:
        dials.release()
        if error is not None:
            raise error
        await asyncio.Event().wait()

    monkeypatch.setattr(dial, "_connect_now", slow)
    monkeypatch.setattr(sockets, "finish_connect", never)


@pytest.mark.parametrize("service", [False, True], ids=["tunnel", "service"])
@pytest.mark.parametrize("end", ["policy", "stop", "refused"])
def test_steps_and_coroutines_end_alike_while_the_answer_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, service: bool
) -> None:
    steps, dials = Steps(monkeypatch), asyncio.Semaphore(0)

    async def work(harness: Harness) -> tuple[bool, str]:
        opened = await Open.to(harness.port("l"))
        await asyncio.wait_for(dials.acquire(), WAIT_S)
        (waiting,) = [each for each in harness.proxy.connections if each.tunnels is None]
        assert isinstance(waiting, PlannedConnection) == steps.planned
        if end == "refused":
            harness.proxy.connections.hops.review(Event.STOP, "over", concerned=lambda hop: hop.info.method != "")
        else:
            waiting.end(f"{POLICY_CHANGE}: x" if end == "policy" else STOPPED)
        reset = await opened.was_reset()
        await opened.close()
        cluster = harness.proxy.clusters.get("tunnel")
        assert cluster is not None
        await idle(harness)
        assert cluster.breaker.requests == 0
        return reset, waiting.info.termination_details

    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            await serve(harness, tmp_path, port, service=service)
            assert await ask(harness.port("l"), b"there") == b"hi there"
            await idle(harness)
            never_connects(monkeypatch, dials)
            ends = []
            for planned in (True, False):
                steps.planned = planned
                ends.append(await one(harness, lambda: work(harness)))
            assert ends[0] == ends[1]

    run(tmp_path, body, switches=Switches(early_data=False))


@pytest.mark.parametrize("service", [False, True], ids=["tunnel", "service"])
def test_the_opening_limit_of_a_planned_attempt_covers_later_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: bool
) -> None:
    """Envoy's timers run from the beginning of the connection, however many attempts there are."""
    limit_s = 100 * WAIT_S
    steps, dials = Steps(monkeypatch), asyncio.Semaphore(0)

    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            more = {"max_connect_attempts": 2, "idle_timeout": f"{limit_s}s"}
            await serve(harness, tmp_path, port, service=service, **more)
            assert await ask(harness.port("l"), b"there") == b"hi there"
            await idle(harness)
            never_connects(monkeypatch, dials)
            opened = await Open.to(harness.port("l"))
            async with asyncio.timeout(WAIT_S):
                await dials.acquire()
                (waiting,) = [each for each in harness.proxy.connections if each.tunnels is None]
                assert isinstance(waiting, PlannedConnection)
                assert waiting._opening is not None
                assert waiting._opening.began_s is not None
                waiting._opening.began_s -= limit_s  # so much time has passed
                refused = Event.STOP, "over"
                harness.proxy.connections.hops.review(*refused, concerned=lambda hop: hop.info.method != "")
                assert await opened.ended()
            await opened.close()
            await idle(harness)
            lines = [each for each in written(harness) if each["details"] == "tcp_session_idle_timeout"]
            assert lines
            assert steps.begun[0] == 1

    run(tmp_path, body, switches=Switches(early_data=False))


@pytest.mark.parametrize("service", [False, True], ids=["tunnel", "service"])
def test_longest_duration_of_a_planned_connection_counts_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: bool
) -> None:
    limit_s = 100 * WAIT_S
    steps, aged = Steps(monkeypatch), TcpProxies.relays

    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            more = {"max_downstream_connection_duration": f"{limit_s}s"}
            await serve(harness, tmp_path, port, service=service, **more)
            assert await ask(harness.port("l"), b"there") == b"hi there"
            await idle(harness)

            def relays(connection: LiveConnection, *more: Any) -> None:
                connection.info.started -= limit_s  # as if the tunnel had opened after so much time
                aged(connection, *more)

            monkeypatch.setattr(TcpProxies, "relays", staticmethod(relays))
            opened = await Open.to(harness.port("l"))
            async with asyncio.timeout(WAIT_S):
                assert await opened.ended()
            await opened.close()
            await idle(harness)
            assert [each["flags"] for each in written(harness)].count("DT") == 1 + service
            assert steps.begun[0] == 1

    run(tmp_path, body, switches=Switches(early_data=False))


@pytest.mark.parametrize("limit", ["idle_timeout", "max_downstream_connection_duration"])
def test_time_limits_behind_an_internal_listener_end_a_planned_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    steps = Steps(monkeypatch)

    async def body(harness: Harness) -> None:
        async with application() as port:
            await serve(harness, tmp_path, port, service=True, behind={limit: "0.2s"})
            await ask(harness.port("l"), b"there")  # opens the tunnel connection, and makes the plan
            await idle(harness)
            before = harness.count(f"tcp.p.{limit}")  # on a busy machine, it can reach the limit, too
            opened = await Open.to(harness.port("l"))
            assert await opened.ended()
            await opened.close()
            await idle(harness)
            assert steps.begun[0] == 1
            assert harness.count(f"tcp.p.{limit}") == before + 1

    run(tmp_path, body)


def test_an_unexpected_error_while_the_application_is_dialled_ends_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, dials = Steps(monkeypatch), asyncio.Semaphore(0)

    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            await serve(harness, tmp_path, port, service=False)
            assert await ask(harness.port("l"), b"there") == b"hi there"
            await idle(harness)
            never_connects(monkeypatch, dials, RuntimeError("a bug"))
            before = steps.begun[1]
            async with asyncio.timeout(WAIT_S):
                opened = await Open.to(harness.port("l"))
                await dials.acquire()
                assert await opened.ended()
                await opened.close()
                await idle(harness)
            assert steps.begun[1] == before + 1

    run(tmp_path, body, switches=Switches(early_data=False))
