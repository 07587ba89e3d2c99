"""The cost of single endpoint changes for a proxy: 1,000 changes over delta xDS, ours beside Envoy.

``python -m bench.changes`` prints CPU seconds of each process, from the first change until the last is applied.
There are 100 clusters of 10 endpoints. A push replaces one endpoint of one cluster, and carries all ten endpoints
of the cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc

from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.service.discovery.v3 import discovery_pb2 as proto
from xds.protocol.types import CDS, EDS

_SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"
_CLUSTERS, _ENDPOINTS = 100, 10
_BIN = Path(sys.executable).parent
_LIMIT_S = 60.0


class Server:
    """A control plane with delta streams. It sends initial resources, then the resources of each :meth:`push`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._server = grpc.server(ThreadPoolExecutor(4))
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "DeltaAggregatedResources": grpc.stream_stream_rpc_method_handler(self._stream)
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(lambda: self._queue.put(None))
        threading.Thread(target=self._answer, args=(requests,), daemon=True).start()
        while (message := self._queue.get()) is not None:
            yield message

    def _answer(self, requests: Iterator[bytes]) -> None:
        with contextlib.suppress(grpc.RpcError):
            for data in requests:
                request = proto.DeltaDiscoveryRequest.FromString(data)
                if request.response_nonce:
                    continue
                if request.type_url == CDS:
                    self.push(CDS, {f"c{number}": _cluster(number) for number in range(_CLUSTERS)}, "0")
                elif request.type_url == EDS:
                    asked = [int(name[1:]) for name in request.resource_names_subscribe]
                    self.push(EDS, {f"c{number}": _endpoints(number, 0) for number in asked}, "0")
                else:
                    self.push(request.type_url, {}, "0")

    def push(self, type_url: str, resources: dict[str, Any], version: str) -> None:
        """Send resources by name."""
        message = proto.DeltaDiscoveryResponse(type_url=type_url, system_version_info=version, nonce=version)
        for name, body in resources.items():
            message.resources.add(name=name, version=version, resource=registry.pack(body))
        self._queue.put(message.SerializeToString())

    def close(self) -> None:
        """End every stream."""
        self._queue.put(None)
        self._server.stop(None)


def _cluster(number: int) -> Cluster:
    cluster = Cluster(name=f"c{number}", type=Cluster.EDS)
    cluster.connect_timeout.seconds = 1
    cluster.eds_cluster_config.eds_config.ads.SetInParent()
    cluster.eds_cluster_config.eds_config.resource_api_version = 2  # type: ignore[assignment]  # V3
    return cluster


def _endpoints(number: int, change: int) -> ClusterLoadAssignment:
    load = ClusterLoadAssignment(cluster_name=f"c{number}")
    group = load.endpoints.add()
    for index in range(_ENDPOINTS):
        address = group.lb_endpoints.add().endpoint.address.socket_address
        address.address = f"10.{number}.{index}.{change % 250}" if not index else f"10.{number}.{index}.1"
        address.port_value = 80
    return load


def _bootstrap(port: int, admin: int) -> dict[str, Any]:
    def address(number: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    http2: dict[str, Any] = {"explicit_http_config": {"http2_protocol_options": {}}}
    kind = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    load = {"cluster_name": "xds", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(port)}}]}]}
    cluster = {
        "name": "xds",
        "type": "STATIC",
        "load_assignment": load,
        "typed_extension_protocol_options": {kind.rpartition("/")[2]: {"@type": kind, **http2}},
    }
    service = {"envoy_grpc": {"cluster_name": "xds"}}
    ads = {"api_type": "DELTA_GRPC", "transport_api_version": "V3", "grpc_services": [service]}
    return {
        "node": {"id": "n", "cluster": "c"},
        "admin": {"address": address(admin)},
        "static_resources": {"clusters": [cluster]},
        "dynamic_resources": {"ads_config": ads, "cds_config": {"ads": {}, "resource_api_version": "V3"}},
    }


def _successes(admin: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/stats?filter=update_success", timeout=10) as page:
            lines = page.read().decode().splitlines()
    except OSError:
        return 0
    return sum(int(line.rpartition(" ")[2]) for line in lines if line.startswith("cluster.c"))


def _until(admin: int, count: int) -> None:
    limit = time.monotonic() + _LIMIT_S
    while _successes(admin) < count:
        assert time.monotonic() < limit, f"{_successes(admin)} of {count} updates"
        time.sleep(0.2)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def cost(kind: str, changes: int, rate: float) -> float:
    """Return the CPU seconds that ``envoy`` or ``ours`` needs for ``changes`` changes of one endpoint each."""
    server, admin = Server(), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bootstrap.json"
        path.write_text(json.dumps(_bootstrap(server.port, admin)))
        command: list[str | Path] = [_BIN / "envoy", "-c", path, "--disable-hot-restart", "--concurrency", "1"]
        if kind == "ours":
            command = [_BIN / "ztunnel", "proxy", "--bootstrap", path]
        off = dict.fromkeys(("ZTUNNEL_READINESS_ADDRESS", "ZTUNNEL_METRICS_ADDRESS"), "off")
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, **off}) as process:
            try:
                _until(admin, _CLUSTERS)
                before, begun = _cpu_s(process.pid), time.monotonic()
                for change in range(1, changes + 1):
                    number = change % _CLUSTERS
                    server.push(EDS, {f"c{number}": _endpoints(number, change)}, str(change))
                    time.sleep(max(0.0, begun + change / rate - time.monotonic()))
                _until(admin, _CLUSTERS + changes)
                return _cpu_s(process.pid) - before
            finally:
                server.close()
                process.kill()


def main() -> None:
    """Print a line per round."""
    parser = argparse.ArgumentParser(prog="python -m bench.changes", description=__doc__)
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=500.0, help="changes a second")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for number in range(1, args.rounds + 1):
        ours, envoy = (cost(kind, args.changes, args.rate) for kind in ("ours", "envoy"))
        print(f"round {number}: {args.changes} changes, ours {ours:.2f} s of CPU, Envoy {envoy:.2f} s")


if __name__ == "__main__":
    main()
