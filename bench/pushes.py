"""Measures our client against 5,000 pushes a second for ten seconds, by state of the world and by delta.

``python -m bench.pushes`` prints the received updates, the number of lost streams, and the cost; ``--rate 0``
pushes as fast as the server can. The server is grpcio's, in a process of its own; every push changes one cluster.
Pushes that arrive while one is being applied are applied together, so there are fewer updates than pushes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from xds.aio.client import AdsClient
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3 import discovery_pb2 as proto
from xds.protocol.resource import Update
from xds.protocol.types import CDS

_SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"


def push_all(count: int, rate: float) -> tuple[grpc.Server, int, list[str]]:
    """Start a server that sends ``count`` pushes on each stream, ``rate`` a second (0: as fast as it can).

    Returns:
        The server, its port, and a list that receives the name of each requested stream.
    """
    streams: list[str] = []

    def stream(name: str, messages: list[bytes]) -> grpc.RpcMethodHandler[Any, Any]:
        def push(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[bytes]:
            streams.append(name)
            gone = threading.Event()
            context.add_callback(gone.set)
            next(requests)
            threading.Thread(target=_read_all, args=(requests,), daemon=True).start()
            begun = time.monotonic()
            for number, message in enumerate(messages):
                if rate and number % 50 == 0:
                    time.sleep(max(0.0, begun + number / rate - time.monotonic()))
                yield message
            gone.wait()  # the client ends the stream

        return grpc.stream_stream_rpc_method_handler(push)

    methods = {
        "StreamAggregatedResources": stream("sotw", [_sotw(str(number)) for number in range(count)]),
        "DeltaAggregatedResources": stream("delta", [_delta(str(number)) for number in range(count)]),
    }
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port, streams


def _read_all(requests: Iterator[Any]) -> None:
    with contextlib.suppress(grpc.RpcError):  # the client has left
        for _ in requests:
            pass


def _sotw(version: str) -> bytes:
    message = proto.DiscoveryResponse(
        type_url=CDS, version_info=version, nonce=version, resources=[registry.pack(_cluster(version))]
    )
    return message.SerializeToString()


def _delta(version: str) -> bytes:
    changed = proto.Resource(name="a", version=version, resource=registry.pack(_cluster(version)))
    message = proto.DeltaDiscoveryResponse(
        type_url=CDS, system_version_info=version, nonce=version, resources=[changed]
    )
    return message.SerializeToString()


def _cluster(version: str) -> Cluster:
    return Cluster(name="a", alt_stat_name=version)


@dataclass(frozen=True, slots=True)
class Received:
    """The results of a client: the number of updates, the last value, ended streams, seconds and CPU seconds."""

    updates: int
    last: str
    ended: int
    took_s: float
    cpu_s: float


async def receive(port: int, count: int, *, delta: bool) -> Received:
    """Subscribe to clusters until the last of ``count`` pushes has arrived."""
    updates, last, done = 0, "", asyncio.Event()

    async def take(update: Update) -> None:
        nonlocal updates, last
        updates += 1
        cluster = registry.unpack(update.resources[0].body)
        assert isinstance(cluster, Cluster)
        last = cluster.alt_stat_name
        if last == str(count - 1):
            done.set()

    begun, cpu = time.monotonic(), _cpu_s()
    async with AdsClient(f"127.0.0.1:{port}", Node(id="n"), delta=delta) as ads:
        ads.subscribe(CDS, None, take)
        await done.wait()
        ended = sum(ads.stats.ended.values())
    return Received(updates, last, ended, time.monotonic() - begun, _cpu_s() - cpu)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _serve(count: int, rate: float, port_of: Any) -> None:
    server, port, streams = push_all(count, rate)
    port_of.send(port)
    port_of.recv()
    port_of.send(streams)
    server.stop(None)


def main() -> None:
    """Print a line per variant."""
    parser = argparse.ArgumentParser(prog="python -m bench.pushes", description=__doc__)
    parser.add_argument("--rate", type=float, default=5000.0, help="pushes a second; 0: as fast as it can")
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    count = int((args.rate or 5000.0) * args.seconds)
    for delta in (False, True):
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(target=_serve, args=(count, args.rate, theirs))
        server.start()
        got = asyncio.run(receive(ours.recv(), count, delta=delta))
        ours.send(None)
        streams = ours.recv()
        server.join()
        name, rate = "delta" if delta else "sotw", count / got.took_s
        print(
            f"{name}: {count} pushes in {got.took_s:.1f} s ({rate:.0f} a second), {got.updates} updates, "
            f"the last one {got.last}, {len(streams)} stream, {got.ended} lost, {got.cpu_s:.1f} s of CPU"
        )


if __name__ == "__main__":
    main()
