"""The bootstrap: what the proxy knows before any control plane speaks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xds.dialects.envoy.reading import api_config_source, at, config_source, fetch_timeout, socket_address
from xds.errors import ConfigError
from xds.grpc.address import host_and_port
from xds.model.address import SocketAddress
from xds.model.tls import AdsSource, ConfigSource, GrpcSource
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.json import parse_text


@dataclass(frozen=True, slots=True)
class Discovery:
    """Where LDS or CDS comes from, and how long its first answer may take (0: for ever)."""

    source: ConfigSource
    timeout_s: float


@dataclass(frozen=True, slots=True)
class GrpcTarget:
    """A static cluster with one endpoint.

    Attributes:
        address: ``host:port`` or ``unix:/path``.
        index: its place among the static clusters.
        cluster: all of it.
    """

    address: str
    index: int
    cluster: Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapConfig:
    """A bootstrap, read.

    Attributes:
        message: as given, for the dump.
        ads: the aggregated stream; ``None`` without ``ads_config``.
        admin: the admin address, if the bootstrap names one.
        targets: static clusters that gRPC can reach, for streams that name one.
    """

    message: Bootstrap
    ads: GrpcSource | None
    node_on_first_only: bool
    lds: Discovery | None
    cds: Discovery | None
    admin: SocketAddress | None
    targets: Mapping[str, GrpcTarget]

    def check(self, source: ConfigSource) -> None:
        """Refuse a source that this bootstrap does not lead to; a file may still come.

        Raises:
            ConfigError: in words for the operator.
        """
        if isinstance(source, AdsSource) and self.ads is None:
            raise ConfigError("the configuration asks for ADS, but the bootstrap has no ads_config")
        if isinstance(source, GrpcSource) and source.cluster not in self.targets:
            raise ConfigError(f"no static cluster '{source.cluster}' with one endpoint for its stream")


def load_bootstrap(path: str) -> BootstrapConfig:
    """Read a bootstrap file, YAML or JSON.

    Raises:
        ConfigError: unreadable, malformed, or with a field no bootstrap has.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read: {error}", path) from None
    with at(path):
        parsed = parse_text(text, Bootstrap)
        if parsed.unknown_fields:
            # As Envoy: what is static must be understood to the last field.
            raise ConfigError("no such field", parsed.unknown_fields[0])
        return read_bootstrap(parsed.message)


def read_bootstrap(message: Bootstrap) -> BootstrapConfig:
    """What the proxy needs of a bootstrap.

    Raises:
        ConfigError: with the path of what is wrong.
    """
    dynamic = message.dynamic_resources
    ads = None
    if dynamic.HasField("ads_config"):
        with at("dynamic_resources", "ads_config"):
            source = api_config_source(_as_plain(dynamic.ads_config))
            assert isinstance(source, GrpcSource)
            ads = source
    admin = None
    if message.admin.HasField("address"):
        with at("admin", "address", "socket_address"):
            admin = socket_address(message.admin.address.socket_address)
    targets = {}
    for index, cluster in enumerate(message.static_resources.clusters):
        address = _target(cluster)
        if address is not None:
            targets[cluster.name] = GrpcTarget(address, index, cluster)
    config = BootstrapConfig(
        message=message,
        ads=ads,
        node_on_first_only=dynamic.ads_config.set_node_on_first_message_only,
        lds=_discovery(dynamic, "lds_config"),
        cds=_discovery(dynamic, "cds_config"),
        admin=admin,
        targets=targets,
    )
    if ads is not None and ads.cluster not in targets:
        raise ConfigError(
            f"no static cluster '{ads.cluster}' with one endpoint",
            "dynamic_resources.ads_config.grpc_services[0].envoy_grpc.cluster_name",
        )
    for field, discovery in (("cds_config", config.cds), ("lds_config", config.lds)):
        if discovery is not None:
            with at("dynamic_resources", field):
                config.check(discovery.source)
    return config


def _as_plain(source: core.ApiConfigSource) -> core.ApiConfigSource:
    """``ads_config`` is the aggregated stream itself: AGGREGATED_GRPC means GRPC there."""
    kinds = {
        core.ApiConfigSource.AGGREGATED_GRPC: core.ApiConfigSource.GRPC,
        core.ApiConfigSource.AGGREGATED_DELTA_GRPC: core.ApiConfigSource.DELTA_GRPC,
    }
    plain = core.ApiConfigSource()
    plain.CopyFrom(source)
    plain.api_type = kinds.get(source.api_type, source.api_type)
    return plain


def _discovery(dynamic: Bootstrap.DynamicResources, field: str) -> Discovery | None:
    if not dynamic.HasField(field):  # type: ignore[arg-type]  # the stub wants a literal
        return None
    with at("dynamic_resources", field):
        message = getattr(dynamic, field)
        return Discovery(config_source(message), fetch_timeout(message))


def _target(cluster: Cluster) -> str | None:
    """Where a static cluster leads, as gRPC names it."""
    endpoints = [e.endpoint.address for g in cluster.load_assignment.endpoints for e in g.lb_endpoints]
    if len(endpoints) != 1:
        return None
    address = endpoints[0]
    if address.WhichOneof("address") == "pipe":
        return f"unix:{address.pipe.path}"
    socket = address.socket_address
    if not socket.port_value:
        return None
    host = f"[{socket.address}]" if ":" in socket.address else socket.address
    return f"{host}:{socket.port_value}"


def bootstrap_for(control_plane: str, node: str, *, delta: bool, admin: SocketAddress | None) -> Bootstrap:
    """The bootstrap of a proxy that knows nothing but its control plane and its node's name."""
    message = Bootstrap()
    message.node.id = f"sidecar~0.0.0.0~ztunnel-{node}.istio-system~istio-system.svc.cluster.local"
    message.node.cluster = "ztunnel.istio-system"
    for key, value in {
        "GENERATOR": "ztunnel-envoy",
        "AMBIENT_TYPE": "ztunnel",
        "NODE_NAME": node,
        "CLUSTER_ID": "Kubernetes",
    }.items():
        message.node.metadata[key] = value
    if admin is not None:
        message.admin.address.socket_address.address = admin.host
        message.admin.address.socket_address.port_value = admin.port
    cluster = message.static_resources.clusters.add(name="xds-grpc")
    cluster.load_assignment.cluster_name = "xds-grpc"
    address = cluster.load_assignment.endpoints.add().lb_endpoints.add().endpoint.address
    if control_plane.startswith("unix:"):
        address.pipe.path = control_plane.removeprefix("unix:")
    else:
        try:
            host, port = host_and_port(control_plane)
        except ValueError:
            raise ConfigError(f"not host:port or unix:/path: {control_plane}", "--control-plane") from None
        cluster.type = Cluster.STRICT_DNS
        address.socket_address.address = host
        address.socket_address.port_value = port
    dynamic = message.dynamic_resources
    dynamic.ads_config.api_type = core.ApiConfigSource.DELTA_GRPC if delta else core.ApiConfigSource.GRPC
    dynamic.ads_config.transport_api_version = core.V3
    dynamic.ads_config.set_node_on_first_message_only = True
    dynamic.ads_config.grpc_services.add().envoy_grpc.cluster_name = "xds-grpc"
    for source in (dynamic.lds_config, dynamic.cds_config):
        source.ads.SetInParent()
        source.resource_api_version = core.V3
        source.initial_fetch_timeout.seconds = 0
        source.initial_fetch_timeout.SetInParent()
    return message
