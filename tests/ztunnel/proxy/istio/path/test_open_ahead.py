"""Tunnel connections to new endpoints, which are open before the first client needs them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ztunnel.proxy.istio.outbound_case import POD
from tests.ztunnel.proxy.istio.path.test_planned import steps_taken
from tests.ztunnel.proxy.istio.pods import ELSEWHERE, OTHER, SERVER, VIP, Cluster, Peer, endpoint, play, shop
from xds.model.address import SocketAddress
from ztunnel.proxy.istio.path.planned import PlannedConnection
from ztunnel.proxy.istio.settings.config import HBONE_PORT

THIRD = "127.0.1.9"
ON = {"ZTUNNEL_OPEN_AHEAD": "2"}


async def used(cluster: Cluster) -> Peer:
    """A pod that uses a service with one endpoint."""
    cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE)])
    await cluster.start(POD)
    peer = cluster.peer("server", SERVER)
    assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
    await cluster.until(lambda: cluster.is_idle)
    return peer


async def calm(cluster: Cluster) -> None:
    """Wait until nothing is opened ahead any more."""
    end_s = cluster.node.clock.monotonic() + 3
    await cluster.until(lambda: cluster.node.clock.monotonic() > end_s)


def test_new_endpoint_is_dialled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = steps_taken(monkeypatch)

    async def body(cluster: Cluster) -> None:
        before = await used(cluster)
        new = cluster.peer("other", OTHER)
        cluster.mesh.apply([endpoint("other", OTHER, node=ELSEWHERE)])
        await cluster.until(lambda: new.connections)
        assert new.requests == []
        await calm(cluster)
        cluster.mesh.apply([], ["Kubernetes//Pod/default/server"])
        for _ in range(2):
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        assert (len(before.connections), len(new.connections), len(new.requests)) == (1, 1, 2)
        assert taken[PlannedConnection] == 2  # neither waited for a handshake

    play(tmp_path, body, ON)


@pytest.mark.parametrize("env", [{}, {"ZTUNNEL_OPEN_AHEAD": "1"}], ids=["off", "bound reached"])
def test_no_endpoint_is_dialled_ahead_above_the_limit(tmp_path: Path, env: dict[str, str]) -> None:
    async def body(cluster: Cluster) -> None:
        await used(cluster)  # one connection is idle
        new = cluster.peer("other", OTHER)
        cluster.mesh.apply([endpoint("other", OTHER, node=ELSEWHERE)])
        await calm(cluster)
        assert new.connections == []

    play(tmp_path, body, env)


def test_unresponsive_endpoint_does_not_block_opening_ahead(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await used(cluster)
        new = cluster.peer("third", THIRD)  # nothing listens at the other
        cluster.mesh.apply([endpoint("other", OTHER, node=ELSEWHERE), endpoint("third", THIRD, node=ELSEWHERE)])
        await cluster.until(lambda: new.connections)
        await calm(cluster)
        assert len(cluster.lines()) == 1  # no line, no counter: nobody wanted it
        assert cluster.closed() == {"-": 1}

    play(tmp_path, body, ON)


def test_unused_services_are_not_dialled_ahead(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await used(cluster)
        new = cluster.peer("other", OTHER)
        unused = replace(endpoint("other", OTHER, node=ELSEWHERE), services={})
        cluster.mesh.apply([unused])
        await calm(cluster)
        assert new.connections == []

    play(tmp_path, body, ON)


def test_change_while_an_endpoint_is_dialled_ahead_is_followed(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await used(cluster)
        address = SocketAddress(OTHER, HBONE_PORT)
        cluster.wire.gates[address] = asyncio.Event()  # the other does not answer
        cluster.mesh.apply([endpoint("other", OTHER, node=ELSEWHERE)])
        await cluster.until(lambda: (address, None) in cluster.wire.dialled)
        new = cluster.peer("third", THIRD)
        cluster.mesh.apply([endpoint("third", THIRD, node=ELSEWHERE)])
        await calm(cluster)
        assert not new.connections  # they are dialled one at a time
        cluster.wire.gates[address].set()
        await cluster.until(lambda: new.connections)
        await calm(cluster)

    play(tmp_path, body, ON)
