"""Open connections move to the proxy that replaces another one, without any effect for clients and servers."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.handover import generations
from tests.handover.generations import NODES, PAIRS, replaced, said
from tests.netns.istio import HELLO, AmbientMesh, NodeProxy, eventually, mesh_of
from tests.netns.test_istio_policy import held, lives
from tests.netns.test_istio_shutdown import exited
from tests.netns.toys import app

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]


@contextlib.asynccontextmanager
async def running(tmp_path: Path, **env: str) -> AsyncIterator[AmbientMesh]:
    async with generations.running(tmp_path, **env) as mesh, contextlib.AsyncExitStack() as stack:
        for name in ("near", "far", "outside"):
            await stack.enter_async_context(app(mesh.lab.pod(name)))
        yield mesh


def lines(proxy: NodeProxy, text: str) -> list[dict[str, Any]]:
    return [line for line in proxy.log() if text in str(line.get("message"))]


def test_no_connection_breaks_when_proxies_are_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as mesh:
            old = []
            async with contextlib.AsyncExitStack() as stack:
                socks = [await stack.enter_async_context(held(mesh, *pair)) for pair in PAIRS]
                for _ in range(2):
                    for node in NODES:
                        before = await replaced(mesh, node)
                        assert await exited(before.process) == 0  # at once: nothing is left
                        old.append(before)
                        for sock in socks:
                            await lives(sock)
            for before in old:
                assert before.access() == []
                (line,) = said(before, "connections handed over")
                assert "stayed=0" in line, line
            # One line for each, by the process that ended it, about the whole connection.
            size = 5 * len(HELLO)
            for node, counts in (("w1", {"outbound": 3, "inbound": 3}), ("w2", {"outbound": 1, "inbound": 1})):
                for direction, count in counts.items():
                    lines = await mesh.proxies[node].lines(direction, count)
                    assert len(lines) == count
                    for each in lines:
                        assert "error" not in each
                        assert int(each["duration"].removesuffix("ms")) > 2000
                        assert min(each["bytes_sent"], each["bytes_recv"]) >= size

    asyncio.run(main())


@pytest.mark.parametrize("dedicated", [False, True], ids=["node", "dedicated"])
def test_a_proxy_is_replaced_in_place(tmp_path: Path, dedicated: bool) -> None:
    """``--replace``: in the same network namespace, on the same ports, without a word to the old process."""

    async def main() -> None:
        nodes = {"w1": ["client"], "w2": ["far"]}
        for name in nodes:
            (tmp_path / f"handover-{name}").mkdir()
        env = {"ZTUNNEL_HANDOVER_DIR": f"{tmp_path}/handover-{{node}}", "ZTUNNEL_WORKER_THREADS": "1"}
        async with mesh_of(nodes, tmp_path, env=env, dedicated=dedicated) as mesh, app(mesh.lab.pod("far")):
            async with held(mesh, "client", "far") as sock:
                for name, before in list(mesh.proxies.items()):
                    node = name if not dedicated else {"client": "w1", "far": "w2"}[name]
                    more = {}
                    if dedicated:
                        more = {
                            "PROXY_MODE": "dedicated",
                            "PROXY_WORKLOAD_INFO": f"default/{name}/{name}",
                            "PACKET_MARK": "1337",
                        }
                    path = tmp_path / f"next-{name}.log"
                    with path.open("wb") as output:
                        process = mesh.start_proxy(
                            mesh.lab.worker(node), before.place, stdout=output, ZTUNNEL_REPLACE="true", **more
                        )
                    after = NodeProxy(before.place, tmp_path, process, before.agent, before.pods)
                    after.log_path = path
                    assert await exited(before.process) == 0
                    (line,) = await eventually(
                        lambda after=after: lines(after, "connections taken over"), "a line"
                    )
                    assert (line["taken"], line["stayed"]) == (1, 0)
                    await lives(sock)
                    mesh.proxies[name] = after
            for after in mesh.proxies.values():
                (line,) = await after.lines("", 1)
                assert "error" not in line

    asyncio.run(main())


def has_ended(pid: int) -> bool:
    """Return whether a process that is not our child has ended. A zombie, which an init without reaping leaves,
    counts as ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


def test_a_signal_starts_the_successor(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as mesh:
            before = mesh.proxies["w1"]
            pid = 0
            try:
                async with held(mesh, "client", "far") as sock:
                    before.process.send_signal(signal.SIGUSR2)
                    (line,) = await eventually(lambda: lines(before, "a successor starts"), "a successor")
                    pid = line["pid"]
                    assert await exited(before.process) == 0
                    await lives(sock)
                    # Its standard output is that of the process that has started it.
                    assert await eventually(
                        lambda: lines(before, "connections taken over"), "connections taken over"
                    )
            finally:
                if pid:
                    os.kill(pid, signal.SIGTERM)
                    await eventually(lambda: has_ended(pid), "the successor has ended")

    asyncio.run(main())


def test_workers_hand_over_to_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, ZTUNNEL_WORKER_THREADS="2") as mesh, contextlib.AsyncExitStack() as stack:
            socks = [await stack.enter_async_context(held(mesh, *pair)) for pair in 2 * PAIRS]
            for node in NODES:
                proxy = await generations.started(mesh, node)
                await eventually(lambda proxy=proxy: len(said(proxy, "waiting for the connections")) == 3, "met")
                before, mesh.proxies[node] = mesh.proxies[node], proxy
                before.process.send_signal(signal.SIGTERM)
                assert await exited(before.process) == 0
                assert before.access() == []
                for sock in socks:
                    await lives(sock)
            moved = {"result": "taken", "reason": ""}
            taken = {
                node: mesh.proxies[node].metric("ztunnel_handover_connections_total", **moved) for node in NODES
            }
            # Outbound and inbound connections of both halves, and tunnel connections.
            assert taken["w1"] >= 12
            assert taken["w2"] >= 4

    asyncio.run(main())
