"""Reads the bootstrap: the configuration that the proxy starts with."""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from xds.dialects.envoy.dns import compile_bootstrap_resolver
from xds.dialects.envoy.reading import (
    api_config_source,
    at,
    config_source,
    fetch_timeout,
    only,
    socket_address,
    string_match,
    struct,
    unpack,
    unpack_as,
)
from xds.errors import ConfigError, Unsupported
from xds.grpc.address import host_and_port
from xds.model.address import SocketAddress
from xds.model.dns import HOSTS_RESOLVER, DnsResolver
from xds.model.string_match import StringMatch
from xds.model.tls import AdsSource, ConfigSource, GrpcSource
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.extensions.access_loggers.file.v3.file_pb2 import FileAccessLog
from xds.proto.envoy.extensions.bootstrap.internal_listener.v3.internal_listener_pb2 import InternalListener
from xds.proto.json import parse_text
from xds.proto.well_known import Struct
from ztunnel.runtime.formats.file_kinds import FileKind, belongs_elsewhere
from ztunnel.runtime.text_file import read_text

_NOWHERE = "/dev/null"


@dataclass(frozen=True, slots=True)
class Discovery:
    """The config source of LDS or CDS, and the time limit for its first response (0: no limit)."""

    source: ConfigSource
    timeout_s: float


@dataclass(frozen=True, slots=True)
class GrpcTarget:
    """A static cluster with one endpoint that gRPC streams can connect to.

    Attributes:
        address: ``host:port`` or ``unix:/path``.
        index: the cluster's position among the static clusters.
        cluster: the cluster's configuration.
        dns_resolver: the DNS resolver that the bootstrap configures.
    """

    address: str
    index: int
    cluster: Cluster
    dns_resolver: DnsResolver = HOSTS_RESOLVER


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapConfig:
    """A parsed bootstrap.

    Attributes:
        message: the bootstrap as given, for the dump.
        ads: the aggregated stream; ``None`` without ``ads_config``.
        admin: the admin address, if the bootstrap has one.
        admin_allow_paths: the admin server answers only request targets (path and query) that match one of these
            patterns. If empty, it answers all.
        dns_resolver: the resolver for clusters that do not configure one.
        targets: static clusters that gRPC streams can connect to.
    """

    message: Bootstrap
    ads: GrpcSource | None
    node_on_first_only: bool
    lds: Discovery | None
    cds: Discovery | None
    admin: SocketAddress | None
    admin_allow_paths: tuple[StringMatch, ...]
    targets: Mapping[str, GrpcTarget]
    dns_resolver: DnsResolver = HOSTS_RESOLVER

    def check(self, source: ConfigSource) -> None:
        """Refuse a config source that this bootstrap does not define. A missing file is accepted: it can appear
        later.

        Raises:
            ConfigError: the source is not defined. The text is meant for operators.
        """
        if isinstance(source, AdsSource) and self.ads is None:
            raise ConfigError("the configuration requests ADS, but the bootstrap has no ads_config")
        if isinstance(source, GrpcSource) and source.cluster not in self.targets:
            raise ConfigError(f"no static cluster '{source.cluster}' with one endpoint for its stream")


def load_bootstrap(path: str) -> BootstrapConfig:
    """Read a bootstrap file, YAML or JSON.

    Raises:
        ConfigError: the file is unreadable or malformed, or has a field that this proxy does not implement.
    """
    with at(path):
        return read_bootstrap(parse_bootstrap(path))


def parse_bootstrap(path: str, faults: list[ConfigError] | None = None) -> Bootstrap:
    """Return the message in a bootstrap file.

    Args:
        path: the file.
        faults: collects every fault of the text. Faulty parts are then omitted. ``None``: raise the first fault.

    Raises:
        ConfigError: the file is unreadable, malformed, or not YAML.
    """
    try:
        text = read_text(Path(path))
    except OSError as error:
        raise ConfigError(f"cannot read: {error.strerror}") from None
    found: list[ConfigError] = []
    message = Bootstrap()
    try:
        parsed = parse_text(text, Bootstrap, name=path, faults=found)
        message = parsed.message
        # Like in Envoy, fields unknown to our version of the messages are faults.
        found += [ConfigError(field.reason, field.path) for field in parsed.unknown_fields]
    except ConfigError as error:
        found.append(error)
    if found and (elsewhere := belongs_elsewhere(text, FileKind.BOOTSTRAP)):
        found = [ConfigError(elsewhere)]
    if found and faults is None:
        raise found[0]
    if faults is not None:
        faults += found
    return message


def read_bootstrap(message: Bootstrap, faults: list[ConfigError] | None = None) -> BootstrapConfig:
    """Parse a bootstrap message, and return the parts that the proxy uses.

    Args:
        message: the bootstrap.
        faults: collects every fault. Faulty parts are then omitted. ``None``: raise the first fault.

    Raises:
        ConfigError: a part is invalid. The error contains the field path.
    """
    found: list[ConfigError] = [] if faults is None else faults

    @contextmanager
    def noting(*steps: str | int) -> Iterator[None]:
        try:
            with at(*steps):
                yield
        except ConfigError as error:
            if faults is None:
                raise
            found.append(error)

    for listener in message.static_resources.listeners:
        if not listener.name:  # like Envoy, which also shows a generated name in its dumps
            listener.name = str(uuid.uuid4())
    _refuse_ignored(message, noting)
    dynamic = message.dynamic_resources
    with noting("dynamic_resources"):
        only(dynamic, "lds_config", "cds_config", "ads_config")
    ads = lds = cds = None
    if dynamic.HasField("ads_config"):
        with noting("dynamic_resources", "ads_config"):
            source = api_config_source(_as_plain(dynamic.ads_config))
            assert isinstance(source, GrpcSource)
            ads = source
    admin, allow_paths = None, []
    if message.admin.HasField("address"):
        with noting("admin", "address", "socket_address"):
            admin = socket_address(message.admin.address.socket_address)
    for index, matcher in enumerate(message.admin.allow_paths):
        with noting("admin", "allow_paths", index):
            allow_paths.append(string_match(matcher))
    dns_resolver = HOSTS_RESOLVER
    with noting():
        dns_resolver = compile_bootstrap_resolver(message)
    targets: dict[str, GrpcTarget] = {}
    for index, cluster in enumerate(message.static_resources.clusters):
        address = _target(cluster)
        if address is not None:
            targets.setdefault(cluster.name, GrpcTarget(address, index, cluster, dns_resolver))
    with noting():
        cds = _discovery(dynamic, "cds_config")
    with noting():
        lds = _discovery(dynamic, "lds_config")
    config = BootstrapConfig(
        message=message,
        ads=ads,
        node_on_first_only=dynamic.ads_config.set_node_on_first_message_only,
        lds=lds,
        cds=cds,
        admin=admin,
        admin_allow_paths=tuple(allow_paths),
        targets=targets,
        dns_resolver=dns_resolver,
    )
    if ads is not None and ads.cluster not in targets:
        with noting("dynamic_resources", "ads_config", "grpc_services", 0, "envoy_grpc", "cluster_name"):
            raise ConfigError(f"no static cluster '{ads.cluster}' with one endpoint")
    for field, discovery in (("cds_config", cds), ("lds_config", lds)):
        if discovery is not None:
            with noting("dynamic_resources", field):
                config.check(discovery.source)
    return config


#: Returns a context manager that adds a field path in front of each error raised inside. It raises the error
#: again, or stores the error if faults are collected.
_Noting = Callable[..., AbstractContextManager[None]]
#: The accepted fields of a bootstrap. Each field is either implemented (some fields where static resources are
#: served) or has no effect in this proxy.
_BOOTSTRAP = (
    "node",
    "static_resources",
    "dynamic_resources",
    "admin",
    "bootstrap_extensions",
    "layered_runtime",
    "use_tcp_for_dns_lookups",
    "dns_resolution_config",
    "typed_dns_resolver_config",
    "stats_flush_interval",  # the interval of stats sinks, which are refused
)
_ADMIN = (
    "address",
    "allow_paths",
    "access_log",
    "access_log_path",
    "profile_path",  # of Envoy's CPU profiler
    "ignore_global_conn_limit",  # exempts a listener from a limit that does not exist here
)
#: Runtime keys that are accepted without effect. In Envoy, they select between old and new code or limit the size
#: of regular expressions.
_INERT_KEYS = (
    "envoy.reloadable_features.",
    "envoy.restart_features.",
    "envoy.deprecated_features",
    "re2.max_program_size.",
)
_CONNECTION_LIMIT = "overload.global_downstream_max_connections"
_NO_LIMIT = 2**31 - 1


def _refuse_ignored(message: Bootstrap, noting: _Noting) -> None:
    """Refuse bootstrap settings that Envoy implements but this proxy does not. Each error names the setting."""
    for field, _ in message.ListFields():
        with noting(field.name):
            if field.name not in _BOOTSTRAP:
                raise Unsupported("this proxy does not support this field")
    for field, _ in message.admin.ListFields():
        with noting("admin", field.name):
            if field.name not in _ADMIN:
                raise Unsupported("this proxy does not support this field")
    with noting("admin", "access_log_path"):
        if message.admin.access_log_path not in ("", _NOWHERE):
            raise Unsupported(f"requests to the admin server are not logged; only {_NOWHERE} is possible")
    for index, log in enumerate(message.admin.access_log):
        with noting("admin", "access_log", index):
            logger = unpack(log.typed_config, log.name)
            if not isinstance(logger, FileAccessLog) or logger.path != _NOWHERE:
                raise Unsupported(f"requests to the admin server are not logged; only {_NOWHERE} is possible")
    for index, extension in enumerate(message.bootstrap_extensions):
        with noting("bootstrap_extensions", index, "typed_config"):
            # Accepted without effect: this proxy has internal listeners without an extension, and gives their
            # buffers the size of socket buffers.
            only(unpack_as(extension.typed_config, InternalListener, extension.name))
    for index, layer in enumerate(message.layered_runtime.layers):
        with noting("layered_runtime", "layers", index):
            only(layer, "name", "static_layer", "admin_layer")  # admin_layer stays empty: no page changes it
        _refuse_runtime(layer.static_layer, noting, ("layered_runtime", "layers", index, "static_layer"))
    seen: set[str] = set()
    for index, cluster in enumerate(message.static_resources.clusters):
        with noting("static_resources", "clusters", index, "name"):
            if cluster.name in seen:
                raise ConfigError(f"cluster manager: duplicate cluster '{cluster.name}'")
            seen.add(cluster.name)


def _refuse_runtime(layer: Struct, noting: _Noting, path: tuple[str | int, ...]) -> None:
    """Refuse runtime keys (nested, or with dots in their names) that change Envoy's behaviour."""
    for key, value in _flat(struct(layer), ""):
        with noting(*path):
            if key.startswith(_INERT_KEYS):
                continue
            if key == _CONNECTION_LIMIT and isinstance(value, float) and value >= _NO_LIMIT:
                continue
            raise Unsupported("this proxy does not obey this runtime key", f"[{json.dumps(key)}]")


def _flat(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _as_plain(source: core.ApiConfigSource) -> core.ApiConfigSource:
    """Return ``ads_config`` with api_type GRPC instead of AGGREGATED_GRPC. In this field, both mean the aggregated
    stream.
    """
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
    """Return the address of a static cluster in the syntax of gRPC targets."""
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
    """Generate a bootstrap from only the control plane's address and the node's name."""
    message = Bootstrap()
    message.node.id = f"sidecar~0.0.0.0~ztunnel-{node}.istio-system~istio-system.svc.cluster.local"
    message.node.cluster = "ztunnel.proxy.istio-system"
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
