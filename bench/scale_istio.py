"""The Istio part of ``make bench-scale``: measures the cost of a mesh in this dialect, without sockets.

    python -m bench.scale_istio [--quick] [--json FILE] [--services N ...] [--workloads N]

Each size runs in a process of its own, so that its memory can be measured. The mesh arrives as one packed response
and is processed like a response of istiod. A ticker measures the longest time without other work in the loop.

Environment: ``QUICK=1`` (stops at 1,000 services).
"""

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.chain import version
from xds.aio.feed import Feed, GrpcSubscription
from xds.dialects.istio.authorization import compile_authorization
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.mesh import Mesh
from xds.model.workload import Workload, WorkloadUid
from xds.proto import registry
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryResponse, Resource
from xds.proto.istio.security import authorization_pb2 as security
from xds.proto.istio.workload import workload_pb2 as wds
from xds.protocol.client_state import ISTIO, ClientOptions, Received
from xds.protocol.delta import DeltaClient
from xds.protocol.types import ADDRESS
from ztunnel.policy.engine import judge
from ztunnel.proxy.istio.path.route import Client, Route, route_for
from ztunnel.proxy.istio.xds.mesh_feed import MeshFeed
from ztunnel.runtime import heap

_SIZES = (10, 1000, 20_000)
_ENDPOINTS = (10, 1000, 10_000)
_POLICIES, _RULES = 10_000, 10
#: Loop iterations that suffice to free the resources of a response.
_LET_GO = 100
_FIRST_POD = int(ipaddress.ip_address("10.0.0.0"))
_FIRST_VIP = int(ipaddress.ip_address("172.16.0.0"))


def packed_address(number: int) -> bytes:
    return number.to_bytes(4, "big")


def service_message(number: int) -> Resource:
    hostname = f"service-{number}.ns-{number % 100}.svc.cluster.local"
    message = wds.Service(
        name=f"service-{number}",
        namespace=f"ns-{number % 100}",
        hostname=hostname,
        addresses=[wds.NetworkAddress(address=packed_address(_FIRST_VIP + number))],
        ports=[wds.Port(service_port=80, target_port=8080), wds.Port(service_port=443, target_port=8443)],
    )
    name = f"ns-{number % 100}/{hostname}"
    return Resource(name=name, version="v1", resource=registry.pack(wds.Address(service=message)))


def workload_message(service: int, number: int, place: int, **more: Any) -> Resource:
    namespace = f"ns-{service % 100}"
    name = f"service-{service}-6d4cf56db6-{place:05d}"
    message = wds.Workload(
        uid=f"Kubernetes//Pod/{namespace}/{name}",
        name=name,
        namespace=namespace,
        addresses=[packed_address(_FIRST_POD + number)],
        tunnel_protocol=wds.HBONE,
        service_account=f"service-{service}",
        node=f"node-{number % 500}",
        canonical_name=f"service-{service}",
        canonical_revision="v1",
        workload_name=f"service-{service}",
        cluster_id="Kubernetes",
        locality=wds.Locality(region="region", zone=f"zone-{number % 3}"),
        services={
            f"{namespace}/service-{service}.{namespace}.svc.cluster.local": wds.PortList(
                ports=[
                    wds.Port(service_port=80, target_port=8080),
                    wds.Port(service_port=443, target_port=8443),
                ]
            )
        },
        **more,
    )
    return Resource(name=message.uid, version="v1", resource=registry.pack(wds.Address(workload=message)))


def packed(*resources: Resource) -> bytes:
    return DeltaDiscoveryResponse(type_url=ADDRESS, nonce="n", resources=resources).SerializeToString()


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Stall:
    """Measures the longest time without other work in the loop."""

    longest_s = 0.0

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async def tick() -> None:
            last_s = time.perf_counter()
            while True:
                await asyncio.sleep(0)
                now_s = time.perf_counter()
                self.longest_s = max(self.longest_s, now_s - last_s)
                last_s = now_s

        self.longest_s = 0.0
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(tick())
            await asyncio.sleep(0)
            yield
            ticking.cancel()


def timed_us(run: Callable[[], object], times: int) -> float:
    """Return the median time of a call, over five runs of this many calls."""
    samples = []
    for _ in range(5):
        begun_s = time.perf_counter()
        for _ in range(times):
            run()
        samples.append((time.perf_counter() - begun_s) / times * 1e6)
    return round(statistics.median(samples), 2)


class Stream:
    """The client's half of a stream, without a connection."""

    def __init__(self, feed: MeshFeed, tasks: asyncio.TaskGroup) -> None:
        self._client = DeltaClient(ClientOptions(node=Node(), dialect=ISTIO))
        self._feed = Feed(ADDRESS, self._client, lambda: None, keeps_bodies=False)
        self._feed.set(GrpcSubscription(self._feed, feed.receive_addresses, 0, None), None)
        self._feed.tell()
        self._client.stream_opened()
        self._client.requests_to_send()
        self._delivering = tasks.create_task(self._feed.deliver_forever())

    async def arrives(self, data: bytes) -> None:
        """Process a serialized response until its ACK is ready to send."""
        for event in self._client.receive_in_steps(data, 0.0):
            if isinstance(event, Received):
                self._feed.arrived(event)
            del event
            await asyncio.sleep(0)
        while not self._client.requests_to_send():
            await asyncio.sleep(0)

    def end(self) -> None:
        self._delivering.cancel()


@contextlib.asynccontextmanager
async def streaming(mesh: Mesh) -> AsyncIterator[Stream]:
    async with asyncio.TaskGroup() as tasks:
        stream = Stream(MeshFeed(mesh), tasks)
        yield stream
        stream.end()


async def measure_mesh(services: int, workloads: int) -> dict[str, Any]:
    """Measure a mesh with these numbers of services and of workloads per service."""
    mesh = Mesh(node="node-1")
    async with streaming(mesh) as stream:
        return await _measure_mesh(mesh, stream, services, workloads)


async def _measure_mesh(mesh: Mesh, stream: Stream, services: int, workloads: int) -> dict[str, Any]:
    if os.environ.get("BENCH_SERVICES_ONLY"):
        workloads = 0
    parts = packed(*(service_message(number) for number in range(services)))
    parts += b"".join(
        packed(*(workload_message(number, number * workloads + place, place) for place in range(workloads)))
        for number in range(services)
    )
    gc.collect()
    heap.trim()
    heap.expect_growth()
    before = rss()
    stall = Stall()
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    async with stall.watched():
        await stream.arrives(parts)
        applied_s, applied_cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
        for _ in range(_LET_GO):
            await asyncio.sleep(0)
    gc.collect()
    heap.trim()
    grown = rss() - before
    record: dict[str, Any] = {
        "services": services,
        "workloads": services * workloads,
        "wire_bytes": len(parts),
        "apply_s": round(applied_s, 3),
        "apply_cpu_s": round(applied_cpu_s, 3),
        "apply_stall_ms": round(stall.longest_s * 1000, 1),
        "grown_bytes": grown,
    }
    if not workloads:
        return record
    changes = [packed(workload_message(0, place, place, capacity={"value": place + 2})) for place in range(5)]
    samples = []
    for change in changes:
        begun_s = time.perf_counter()
        await stream.arrives(change)
        samples.append(time.perf_counter() - begun_s)
    record["change_us"] = round(statistics.median(samples) * 1e6, 1)
    client = Client(workload=next(mesh.workloads()), host="10.0.0.0")
    rng = random.Random(1)
    near = [SocketAddress(str(ipaddress.ip_address(_FIRST_VIP + n % services)), 80) for n in range(10)]
    every = [
        SocketAddress(str(ipaddress.ip_address(_FIRST_VIP + rng.randrange(services))), 80) for _ in range(2000)
    ]
    for name, destinations in (("route_us", near), ("route_all_us", every)):
        turn = iter(destinations * (200_000 // len(destinations)))
        for destination in destinations:
            route_for(client, destination, mesh, rng.randrange)
        record[name] = timed_us(partial(_route_to_next, turn, client, mesh, rng), 2000)
    return record


def _route_to_next(turn: Iterator[SocketAddress], client: Client, mesh: Mesh, rng: random.Random) -> Route:
    return route_for(client, next(turn), mesh, rng.randrange)


async def measure_endpoints(count: int) -> dict[str, Any]:
    """Measure one service with this number of endpoints."""
    mesh = Mesh()
    async with streaming(mesh) as stream:
        return await _measure_endpoints(mesh, stream, count)


async def _measure_endpoints(mesh: Mesh, stream: Stream, count: int) -> dict[str, Any]:
    await stream.arrives(packed(service_message(0), *(workload_message(0, n, n) for n in range(count))))
    client = Client(workload=next(mesh.workloads()), host="10.0.0.0")
    destination = SocketAddress("172.16.0.0", 80)
    rng = random.Random(1)

    def route() -> object:
        return route_for(client, destination, mesh, rng.randrange)

    begun_s = time.perf_counter()
    route()
    first_s = time.perf_counter() - begun_s
    record = {"endpoints": count, "first_ms": round(first_s * 1000, 2), "route_us": timed_us(route, 2000)}
    changes = [packed(workload_message(0, n, n, capacity={"value": n + 2})) for n in range(10)]
    samples = []
    for change in changes:
        begun_s = time.perf_counter()
        await stream.arrives(change)
        route()
        samples.append(time.perf_counter() - begun_s)
    record["change_and_route_us"] = round(statistics.median(samples) * 1e6, 1)
    return record


def _rule(match: dict[str, Any]) -> security.Rule:
    return security.Rule(clauses=[security.Clause(matches=[security.Match(**match)])])


def measure_policies(kind: str) -> dict[str, Any]:
    """Measure many policies for the whole mesh that do not match the connection."""
    heap.expect_growth()
    mesh = Mesh()
    policies = []
    for number in range(_POLICIES):
        matches: list[dict[str, Any]] = []
        for rule in range(_RULES):
            text = f"cluster.local/ns/none/sa/account-{number}-{rule}"
            match kind:
                case "exact":
                    matches.append({"principals": [{"exact": text}]})
                case "prefix":
                    matches.append({"principals": [{"prefix": text}]})
                case _:
                    matches.append({"source_ips": [{"address": bytes([192, 0, number % 256, 0]), "length": 24}]})
        message = security.Authorization(
            name=f"p{number}",
            namespace="istio-system",
            scope=security.GLOBAL,
            action=security.DENY,
            rules=[_rule(match) for match in matches],
        )
        policies.append(compile_authorization(message.SerializeToString()))
    begun_s = time.perf_counter()
    mesh.apply(policies)
    put_s = time.perf_counter() - begun_s
    workload = Workload(uid=WorkloadUid("w"), namespace="shop")
    facts = ConnectionFacts(
        source=SocketAddress("10.0.0.1", 40000),
        direct_source=SocketAddress("10.0.0.1", 40000),
        destination=SocketAddress("10.0.0.2", 8080),
        peer=PeerCertificate(uri_sans=("spiffe://cluster.local/ns/shop/sa/front",)),
    )

    def decide() -> object:
        return judge(mesh.policies_for(workload).enforced, facts)

    begun_s = time.perf_counter()
    decide()
    first_s = time.perf_counter() - begun_s
    record = {"kind": kind, "put_ms": round(put_s * 1000, 1), "first_ms": round(first_s * 1000, 1)}
    record["judge_us"] = timed_us(decide, 2000 if kind == "exact" else 20)
    changed = security.Authorization(name="p0", namespace="istio-system", action=security.DENY)
    mesh.apply([compile_authorization(changed.SerializeToString())])
    begun_s = time.perf_counter()
    decide()
    record["after_change_ms"] = round((time.perf_counter() - begun_s) * 1000, 1)
    return record


def apart(*arguments: str, **environment: str) -> dict[str, Any]:
    """Run one measurement in its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.scale_istio", "--one", *arguments],
        stdout=subprocess.PIPE,
        check=True,
        env=os.environ | environment,
    )
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def one(kind: str, *arguments: str) -> dict[str, Any]:
    match kind:
        case "mesh":
            return asyncio.run(measure_mesh(int(arguments[0]), int(arguments[1])))
        case "endpoints":
            return asyncio.run(measure_endpoints(int(arguments[0])))
        case _:
            return measure_policies(arguments[0])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale_istio", description=__doc__)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--services", type=int, nargs="+")
    parser.add_argument("--workloads", type=int, default=10, help="of each service (default 10)")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return 0
    records: list[dict[str, Any]] = []
    print(f"\nIstio dialect, {version()}, {args.workloads} workloads per service\n")
    for services in args.services or (_SIZES[:2] if args.quick else _SIZES):
        record = apart("mesh", str(services), str(args.workloads))
        alone = apart("mesh", str(services), "0", BENCH_SERVICES_ONLY="1")
        record["bytes_per_service"] = round(alone["grown_bytes"] / services)
        record["bytes_per_workload"] = round((record["grown_bytes"] - alone["grown_bytes"]) / record["workloads"])
        records.append(record)
        print(
            f"{services:>7,} services: {record['apply_s']:.2f} s to apply {record['wire_bytes'] / 1e6:.1f} MB, "
            f"longest stall {record['apply_stall_ms']} ms; {record['bytes_per_service']:,} B per service, "
            f"{record['bytes_per_workload']:,} B per workload; one endpoint changed {record['change_us']} us; "
            f"route {record['route_us']} us, to all of them {record['route_all_us']} us"
        )
    for count in _ENDPOINTS:
        record = apart("endpoints", str(count))
        records.append(record)
        print(
            f"{count:>7,} endpoints: route {record['route_us']} us, the first {record['first_ms']} ms, "
            f"one changed and routed {record['change_and_route_us']} us"
        )
    for kind in ("exact", "prefix", "cidr"):
        record = apart("policies", kind)
        records.append(record)
        print(
            f"{_POLICIES:,} policies of {_RULES} rules ({kind}): put in {record['put_ms']} ms, judged in "
            f"{record['judge_us']} us, the first {record['first_ms']} ms, after one changed "
            f"{record['after_change_ms']} ms"
        )
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
