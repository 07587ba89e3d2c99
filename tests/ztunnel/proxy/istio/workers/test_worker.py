"""A worker's answers stay within the limit of the main process, whatever texts peers choose."""

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from typing import Any
from unittest import mock

from tests.limits import WAIT_S
from ztunnel.proxy.istio.accounting.metrics import TRAFFIC_LABELS, Counts, Metrics, TrafficCounts
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.settings.config import PodName
from ztunnel.proxy.istio.workers.channel import IpcChannel
from ztunnel.proxy.istio.workers.connection_counts import ConnectionCounts
from ztunnel.proxy.istio.workers.messages import (
    MAX_WORKER_BYTES,
    Barrier,
    Begin,
    ConnectionsPart,
    CountsPart,
    Response,
    StartPod,
    encode,
    pickled,
)
from ztunnel.proxy.istio.workers.worker import _connections

#: A request's header list has at most 64 KiB.
LONG = 60_000


def frame_bytes(value: ConnectionsPart | CountsPart) -> int:
    return len(encode(Response(number=1, value=value, more=True)))


def test_connections_whose_peers_sent_long_service_names_are_split() -> None:
    shown = [{"originalDst": f"{number}{'x' * LONG}", "src": "10.0.0.1:1"} for number in range(500)]
    pods: Any = {7: mock.Mock(**{"proxy.dump.return_value": {"inbound": shown, "outbound": []}})}
    parts = list(_connections(pods))
    assert [each for part in parts for each in part.entries] == shown
    assert all(frame_bytes(part) < MAX_WORKER_BYTES for part in parts)


def test_counts_of_series_with_many_workloads_are_split() -> None:
    metrics = Metrics("v", 100)
    for number in range(60):
        metrics.add(Counts(traffic=(_series(str(number), 2000),)), lost=True)
    parts = list(metrics.counts())
    assert sorted(series.labels for part in parts for series in part.traffic) == sorted(
        (str(number),) * len(TRAFFIC_LABELS) for number in range(60)
    )
    assert all(frame_bytes(CountsPart(part)) < MAX_WORKER_BYTES for part in parts)


def _series(label: str, workloads: int) -> TrafficCounts:
    uids = tuple(f"Kubernetes//Pod/{'n' * 63}/{'d' * 40}-{number}" for number in range(workloads))
    return TrafficCounts((label,) * len(TRAFFIC_LABELS), 1, (), 0, 0, uids, 0, 0, False)


def test_other_workers_do_not_wait_for_one_that_has_no_pods_yet() -> None:
    """A worker that replaces another first copies the mesh, which takes seconds if the mesh is large."""

    async def body() -> None:
        counts, memory = ConnectionCounts.create(2)
        counts.set(1, 5)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        child = await create_subprocess_exec(
            *(sys.executable, "-m", "ztunnel", "worker", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdout=DEVNULL,
        )
        theirs.close()
        channel = IpcChannel(ours, mock.Mock(), mock.Mock())
        config = config_from({}, cpus=2, read_file=lambda path: None)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            run = group.create_task(channel.run())
            begin = Begin(pickled_config=pickled(config), index=0, workers=2, log_filter=config.log_filter)
            channel.notify(begin, [memory])
            await channel.request(Barrier())
            assert counts.is_turn_of(1)
            name = PodName(name="a", namespace="shop", service_account="default")
            await channel.request(StartPod(number=1, name=name, has_namespace=False, listening=()))
            assert counts.is_turn_of(0)
            assert not counts.is_turn_of(1)
            channel.disconnect()
            await run
        await channel.close()
        assert await child.wait() == 0
        counts.close()
        os.close(memory)

    asyncio.run(body())
