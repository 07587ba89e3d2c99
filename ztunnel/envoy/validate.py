"""``ztunnel proxy --validate``: every fault of a configuration, without serving it."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from google.protobuf.message import Message

from xds.dialects.envoy import (
    Surroundings,
    compile_assignment,
    compile_cluster,
    compile_listener,
    compile_secret,
)
from xds.errors import ConfigError
from xds.model.cluster import Cluster, Discovery
from xds.model.listener import Listener
from xds.model.tls import ConfigSource, FileSource, SecretRef
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3 import cluster_pb2
from xds.proto.envoy.config.endpoint.v3 import endpoint_pb2
from xds.proto.envoy.config.listener.v3 import listener_pb2
from xds.proto.envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryResponse
from xds.proto.json import parse_text
from xds.proto.well_known import Any as AnyMessage
from ztunnel.envoy.bootstrap import BootstrapConfig, GrpcTarget
from ztunnel.envoy.listeners.manager import wanted_sources
from ztunnel.envoy.secrets.verify import check_secret
from ztunnel.envoy.upstream.grpc import tls_of


def faults_of(bootstrap: BootstrapConfig) -> list[str]:
    """Everything wrong with a bootstrap's static resources and with every file it leads to, one line each."""
    check = _Check(bootstrap)
    static = bootstrap.message.static_resources
    check.resources(
        "bootstrap", (registry.pack(m) for m in (*static.secrets, *static.clusters, *static.listeners))
    )
    for discovery in (bootstrap.cds, bootstrap.lds):
        if discovery is not None and isinstance(discovery.source, FileSource):
            check.file(discovery.source.path)
    check.follow()
    if bootstrap.ads is not None:
        check.control_plane(bootstrap.targets[bootstrap.ads.cluster])
    return check.faults


class _Check:
    def __init__(self, bootstrap: BootstrapConfig) -> None:
        self.faults: list[str] = []
        self._bootstrap = bootstrap
        self._static_secrets = {secret.name for secret in bootstrap.message.static_resources.secrets}
        self._surroundings = Surroundings(lambda path: Path(path).read_bytes(), os.environ)
        self._files: dict[str, None] = {}
        self._wanted: dict[str, None] = {}

    def control_plane(self, target: GrpcTarget) -> None:
        """Check the TLS of the stream to it."""
        try:
            tls_of(target, self._surroundings)
        except ConfigError as error:
            self.faults.append(f"bootstrap: {error}")

    def follow(self) -> None:
        """Check the files that resources named: endpoints and secrets."""
        while left := [path for path in self._wanted if path not in self._files]:
            for path in left:
                self.file(path)

    def file(self, path: str) -> None:
        """Check one file of resources."""
        if path in self._files:
            return
        self._files[path] = None
        try:
            parsed = parse_text(Path(path).read_text(), DiscoveryResponse)
        except (OSError, UnicodeDecodeError) as error:
            self.faults.append(f"{path}: cannot read: {error}")
            return
        except ConfigError as error:
            self.faults.append(f"{path}: {error}")
            return
        self.faults.extend(f"{path}: {field}: no such field" for field in parsed.unknown_fields)
        self.resources(path, parsed.message.resources)

    def resources(self, place: str, bodies: Iterable[AnyMessage]) -> None:
        """Check resources of any type."""
        for index, body in enumerate(bodies):
            try:
                message = registry.unpack(body)
                self._resource(message)
            except (ConfigError, registry.UnknownType, registry.MalformedMessage) as error:
                name = _name(body)
                self.faults.append(f"{place}: resources[{index}]{f' ({name})' if name else ''}: {error}")

    def _resource(self, message: Message) -> None:
        checks: dict[type[Message], Callable[[Message], None]] = {
            listener_pb2.Listener: self._listener,
            cluster_pb2.Cluster: self._cluster,
            endpoint_pb2.ClusterLoadAssignment: lambda m: void(compile_assignment(m)),  # type: ignore[arg-type]
            tls_pb2.Secret: lambda m: check_secret(compile_secret(m, self._surroundings)),  # type: ignore[arg-type]
        }
        check = checks.get(type(message))
        if check is None:
            raise ConfigError(f"no resource of this proxy: {message.DESCRIPTOR.full_name}")
        check(message)

    def _listener(self, message: Message) -> None:
        assert isinstance(message, listener_pb2.Listener)
        model: Listener = compile_listener(message, self._surroundings)
        for source in wanted_sources(model):
            self._source(source)
        for chain in model.all_chains:
            self._secrets(chain.secret_refs)

    def _cluster(self, message: Message) -> None:
        assert isinstance(message, cluster_pb2.Cluster)
        model: Cluster = compile_cluster(message, self._surroundings)
        self._secrets(model.secret_refs)
        if model.discovery is Discovery.EDS and model.eds_source is not None:
            self._source(model.eds_source)

    def _secrets(self, refs: Iterable[SecretRef]) -> None:
        for ref in refs:
            if ref.name not in self._static_secrets:
                self._source(ref.source)

    def _source(self, source: ConfigSource) -> None:
        if isinstance(source, FileSource):
            self._wanted[source.path] = None
        else:
            self._bootstrap.check(source)


def void(_: object) -> None:
    """Drop a value: only whether it could be made counts."""


def _name(body: AnyMessage) -> str:
    try:
        return str(getattr(registry.unpack(body), "name", ""))
    except (registry.UnknownType, registry.MalformedMessage):
        return ""
