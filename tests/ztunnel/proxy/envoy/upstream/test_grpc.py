"""Streams to clusters of the bootstrap use TLS as configured by their transport socket, or fail."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.hbone.certificates import Authority
from tests.ztunnel.proxy.envoy.harness import T
from xds.aio.client import AdsClient
from xds.aio.file import FileSource
from xds.aio.server import SnapshotServer
from xds.dialects.envoy import Surroundings
from xds.errors import ConfigError
from xds.model.dns import DnsResolver
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.json import parse_value
from xds.protocol.backoff import JitteredBackoff
from xds.protocol.resource import Update
from xds.protocol.snapshot import Snapshot
from xds.protocol.types import CDS
from ztunnel.proxy.envoy.config.bootstrap import read_bootstrap
from ztunnel.proxy.envoy.config.sources import Sources
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.upstream.grpc import GrpcClusters, tls_of
from ztunnel.runtime.clock import SystemClock

AUTHORITY, STRANGER = Authority(), Authority("stranger")
SERVER, CLIENT = "spiffe://td/ns/i/sa/istiod", "spiffe://td/ns/i/sa/node"
SURROUNDINGS = Surroundings(read_file=lambda path: Path(path).read_bytes(), environment={})
LIMIT_S = 20.0
Json = dict[str, Any]


def transport_socket(**common: Any) -> Json:
    kind = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    return {"name": "tls", "typed_config": {"@type": T + kind, "common_tls_context": common}}


def inline(data: bytes) -> Json:
    return {"inline_string": data.decode()}


def validation(authority: Authority = AUTHORITY, name: str = SERVER) -> Json:
    names = [{"san_type": "URI", "matcher": {"exact": name}}]
    return {"trusted_ca": inline(authority.pem), "match_typed_subject_alt_names": names}


def own_certificate() -> Json:
    leaf = AUTHORITY.issue(CLIENT)
    return {"certificate_chain": inline(leaf.chain_pem), "private_key": inline(leaf.key_pem)}


def control_plane() -> SnapshotServer:
    """Run a control plane that admits authenticated clients."""
    leaf = AUTHORITY.issue(SERVER)
    shown = [(leaf.key_pem, leaf.chain_pem)]
    tls = grpc.ssl_server_credentials(shown, root_certificates=AUTHORITY.pem, require_client_auth=True)
    return SnapshotServer(["127.0.0.1:0"], tls=tls)


class Around:
    """The parts of a proxy that the clusters need."""

    def __init__(self, address: str, **cluster: Any) -> None:
        host, _, port = address.rpartition(":")
        there = {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        document = {
            "name": "xds",
            "type": "STATIC",
            "load_assignment": {"cluster_name": "xds", "endpoints": [{"lb_endpoints": [there]}]},
            **cluster,
        }
        bootstrap = parse_value({"static_resources": {"clusters": [document]}}, Bootstrap).message
        stats = Stats()
        self.files = FileSource()
        sources = Sources(None, lambda source: self.files.at(source.path, None), lambda _: self.files)  # type: ignore[arg-type, return-value]
        secrets = SecretStore(sources, SURROUNDINGS, stats, SystemClock())
        self.targets = read_bootstrap(bootstrap).targets
        self.clusters = GrpcClusters(self.targets, SURROUNDINGS, stats, lambda: secrets)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    asyncio.run(limited())


async def first_update(around: Around, address: str) -> Update:
    updates: asyncio.Queue[Update] = asyncio.Queue()

    async def receive(update: Update) -> None:
        updates.put_nowait(update)

    backoff = JitteredBackoff(base_s=0.02, max_s=0.1)
    async with AdsClient(address, Node(id="n"), backoff=backoff, connect=around.clusters.connect("xds")) as ads:
        ads.subscribe(CDS, None, receive)
        return await updates.get()


def test_a_control_plane_over_mutual_tls() -> None:
    async def main() -> None:
        async with control_plane() as server:
            server.publish("n", Snapshot.of([Cluster(name="a")]))
            address = server.addresses[0]
            tls = transport_socket(tls_certificates=[own_certificate()], validation_context=validation())
            around = Around(address, transport_socket=tls)
            assert [resource.name for resource in (await first_update(around, address)).resources] == ["a"]

    run(main)


@pytest.mark.parametrize(
    ("common", "words"),
    [
        ({"validation_context": validation(STRANGER)}, "TLS failed (chain)"),
        ({"validation_context": validation(name="spiffe://td/ns/i/sa/else")}, "SAN matcher"),
        ({"validation_context": validation()}, "took no calls"),  # the server wants a certificate, and closes
        (None, "UNAVAILABLE: "),  # plain text, where there is TLS
    ],
)
def test_untrusted_control_plane_is_named(
    caplog: pytest.LogCaptureFixture, common: Json | None, words: str
) -> None:
    async def main() -> None:
        async with control_plane() as server:
            address = server.addresses[0]
            more = {} if common is None else {"transport_socket": transport_socket(**common)}
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await first_update(Around(address, **more), address)

    run(main)
    assert words in caplog.text


def test_secrets_may_come_from_files(tmp_path: Path) -> None:
    async def main() -> None:
        def reference(name: str) -> Json:
            return {"name": name, "sds_config": {"path_config_source": {"path": str(tmp_path / name)}}}

        def write(name: str, secret: Json) -> None:
            import json

            kind = T + "envoy.extensions.transport_sockets.tls.v3.Secret"
            body = {"resources": [{"@type": kind, "name": name, **secret}]}
            (tmp_path / "new").write_text(json.dumps(body))
            (tmp_path / "new").rename(tmp_path / name)

        async with control_plane() as server:
            server.publish("n", Snapshot.of([Cluster(name="a")]))
            address = server.addresses[0]
            tls = transport_socket(
                tls_certificate_sds_secret_configs=[reference("own")],
                validation_context_sds_secret_config=reference("roots"),
            )
            around = Around(address, transport_socket=tls)
            write("own", {"tls_certificate": own_certificate()})
            write("roots", {"validation_context": validation()})
            async with around.files:
                assert (await first_update(around, address)).resources
                around.clusters.close()

    run(main)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (
            {"transport_socket": transport_socket(validation_context={})},
            "transport_socket: without trusted_ca any server would be accepted",
        ),
        ({"transport_socket": transport_socket()}, "transport_socket: without trusted_ca any server"),
        (
            {
                "transport_socket": transport_socket(
                    validation_context_sds_secret_config={"name": "r", "sds_config": {"ads": {}}}
                )
            },
            "transport_socket: the stream's own secrets cannot be fetched over ADS",
        ),
        (
            {"transport_socket": {"name": "x", "typed_config": {"@type": T + "google.protobuf.Empty"}}},
            "transport_socket",
        ),
    ],
)
def test_tls_without_verification_is_refused_by_place(cluster: Json, words: str) -> None:
    target = Around("127.0.0.1:1", **cluster).targets["xds"]
    with pytest.raises(ConfigError) as refused:
        tls_of(target, SURROUNDINGS)
    assert str(refused.value).startswith("static_resources.clusters[0].transport_socket")
    assert words in str(refused.value)


def test_resolver_that_streams_to_a_control_plane_would_ignore_is_refused() -> None:
    servers = {"resolvers": [{"socket_address": {"address": "192.0.2.53", "port_value": 53}}]}
    for own in ({"dns_resolution_config": servers}, {}):
        target = Around("xds.test:1", type="STRICT_DNS", **own).targets["xds"]
        if not own:
            assert tls_of(target, SURROUNDINGS) is None
            target = replace(target, dns_resolver=DnsResolver(tcp=True))
        with pytest.raises(ConfigError, match="the host itself resolves names of gRPC servers"):
            tls_of(target, SURROUNDINGS)


@pytest.mark.parametrize("keepalive", [None, {"interval": "7s", "timeout": "3s"}])
def test_pings_follow_the_clusters_setting(keepalive: dict[str, str] | None) -> None:
    options = {"http2_protocol_options": {"connection_keepalive": keepalive} if keepalive else {}}
    kind = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    typed = {kind: {"@type": f"type.googleapis.com/{kind}", "explicit_http_config": options}}
    clusters = Around("127.0.0.1:1", typed_extension_protocol_options=typed).clusters
    found = clusters.keepalive("xds")
    assert (found.interval_s, found.timeout_s) == ((7.0, 3.0) if keepalive else (330.0, 20.0))
    found.back_off()
    assert clusters.keepalive("xds") is found
