"""Compiles listener filters."""

from typing import Any

from google.protobuf.message import Message

from xds.dialects.envoy.reading import Surroundings, at, config_source, constraint, fetch_timeout, only, unpack
from xds.errors import ConfigError, Unsupported
from xds.model import listener as model
from xds.model.address import canonical
from xds.proto.envoy.config.listener.v3 import listener_pb2 as proto
from xds.proto.envoy.extensions.filters.listener.http_inspector.v3.http_inspector_pb2 import HttpInspector
from xds.proto.envoy.extensions.filters.listener.original_dst.v3.original_dst_pb2 import OriginalDst
from xds.proto.envoy.extensions.filters.listener.original_src.v3.original_src_pb2 import OriginalSrc
from xds.proto.envoy.extensions.filters.listener.proxy_protocol.v3.proxy_protocol_pb2 import ProxyProtocol
from xds.proto.envoy.extensions.filters.listener.tls_inspector.v3.tls_inspector_pb2 import TlsInspector
from xds.proto.istio.set_internal_dst_address.v1.set_internal_dst_address_pb2 import Config as SetDstAddress
from xds.proto.istio.telemetry.workloadmetadata.v1 import workloadmetadata_pb2 as workloads

_WORKLOAD_TYPES = {0: "deployment", 1: "cronjob", 2: "pod", 3: "job"}


def compile_entry(message: proto.ListenerFilter, surroundings: Surroundings) -> model.ListenerFilterEntry:
    """Compile an entry of ``listener_filters``, which is configured inline or by ECDS."""
    disabled = None
    if message.HasField("filter_disabled"):
        with at("filter_disabled"):
            disabled = _disabled(message.filter_disabled)
    kind = message.WhichOneof("config_type")
    if kind == "config_discovery":
        with at("config_discovery"):
            found: model.ListenerFilter = _discovered(message, surroundings)
    elif kind == "typed_config":
        with at("typed_config"):
            found = compile_listener_filter(unpack(message.typed_config, message.name), surroundings)
    else:
        raise constraint(message, "config_type", "value is required")
    return model.ListenerFilterEntry(message.name, found, disabled)


def _discovered(message: proto.ListenerFilter, surroundings: Surroundings) -> model.DiscoveredFilter:
    found, default = discovered(message)
    if default is None:
        return model.DiscoveredFilter(**found)
    with at("default_config"):
        return model.DiscoveredFilter(**found, default=compile_listener_filter(default, surroundings))


def discovered(message: proto.ListenerFilter | proto.Filter) -> tuple[dict[str, Any], Message | None]:
    """Return the fields of a :class:`~xds.model.listener.Discovered`, and the default configuration as an
    uncompiled message.
    """
    discovery = message.config_discovery
    with at("config_source"):
        source = config_source(discovery.config_source)
    default = None
    if discovery.HasField("default_config"):
        with at("default_config"):
            default = unpack(discovery.default_config, message.name)
    found = {
        "name": message.name,
        "source": source,
        "type_urls": tuple(url.rpartition("/")[2] for url in discovery.type_urls),
        "initial_fetch_timeout_s": fetch_timeout(discovery.config_source),
        "without_warming": discovery.apply_default_config_without_warming,
    }
    return found, default


def compile_listener_filter(message: Message, surroundings: Surroundings) -> model.ListenerFilter:
    """Compile a listener filter from its configuration message.

    Raises:
        Unsupported: the type is not a listener filter that we support.
    """
    match message:
        case OriginalDst():
            return model.OriginalDst()
        case OriginalSrc():
            only(message, "mark")  # Envoy has never implemented bind_port either
            return model.OriginalSrc(message.mark)
        case SetDstAddress():
            return model.SetDstAddress()
        case TlsInspector():
            only(message, "initial_read_buffer_size")  # the whole ClientHello is read in any case
            return model.TlsInspector()
        case HttpInspector():
            return model.HttpInspector()
        case ProxyProtocol():
            only(message, "allow_requests_without_proxy_protocol", "disallowed_versions", "stat_prefix")
            versions = tuple(version + 1 for version in message.disallowed_versions)
            if {1, 2}.issubset(versions):
                raise ConfigError("all versions of the header are disallowed", "disallowed_versions")
            return model.ProxyProtocol(message.allow_requests_without_proxy_protocol, versions)
        case workloads.WorkloadMetadataResources():
            return model.WorkloadMetadata(_baggage(message, surroundings.cluster_id))
        case _:
            raise Unsupported(f"no such listener filter: {message.DESCRIPTOR.full_name}")


def _baggage(message: workloads.WorkloadMetadataResources, cluster: str) -> dict[str, str]:
    baggage = {}
    for index, workload in enumerate(message.workload_metadata_resources):
        kind = _WORKLOAD_TYPES.get(workload.workload_type)
        with at("workload_metadata_resources", index):
            if kind is None:
                raise Unsupported(f"unknown workload type {workload.workload_type}", "workload_type")
            value = ",".join(
                (
                    f"k8s.cluster.name={cluster}",
                    f"k8s.namespace.name={workload.namespace_name}",
                    f"k8s.{kind}.name={workload.workload_name}",
                    f"service.name={workload.canonical_name}",
                    f"service.version={workload.canonical_revision}",
                )
            )
            for address in workload.ip_addresses:
                try:
                    baggage[canonical(address)] = value
                except ValueError:
                    raise Unsupported(f"malformed IP address: {address}", "ip_addresses") from None
    return baggage


def _disabled(message: proto.ListenerFilterChainMatchPredicate) -> model.FilterDisabled:
    kind = message.WhichOneof("rule")
    match kind:
        case "any_match":
            return model.FilterDisabled("any")
        case "destination_port_range":
            window = message.destination_port_range
            return model.FilterDisabled("port", start=window.start, end=window.end)
        case "not_match":
            with at(kind):
                return model.FilterDisabled("not", (_disabled(message.not_match),))
        case "or_match" | "and_match":
            rules = message.or_match if kind == "or_match" else message.and_match
            inner = []
            for index, rule in enumerate(rules.rules):
                with at(kind, "rules", index):
                    inner.append(_disabled(rule))
            return model.FilterDisabled(kind.removesuffix("_match"), tuple(inner))
        case _:
            raise constraint(message, "rule", "value is required")
