"""Returns the current configuration as messages of ``envoy.admin.v3``, the content of ``/config_dump``.

:mod:`ztunnel.proxy.envoy.admin.config_dump` selects and prints the messages. The order is that of Envoy's page
(alphabetical by internal keys). Every call creates new messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.message import Message

from xds.model.address import EndpointAddress, InternalAddress, NamedAddress, PipeAddress, SocketAddress
from xds.model.cluster import Discovery, Endpoint, Health
from xds.model.listener import DiscoveredFilter
from xds.model.metadata import Metadata
from xds.model.secret import Validation
from xds.proto import registry
from xds.proto.envoy.admin.v3 import admin_pb2 as admin
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.config.endpoint.v3 import endpoint_pb2
from xds.proto.envoy.config.listener.v3 import listener_pb2
from xds.proto.envoy.config.route.v3 import route_pb2
from xds.proto.envoy.extensions.filters.network.http_connection_manager.v3 import (
    http_connection_manager_pb2 as hcm,
)
from xds.proto.envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from xds.proto.well_known import Any as AnyMessage
from xds.proto.well_known import Timestamp
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, live_assignment
from ztunnel.proxy.envoy.upstream.host import Host

if TYPE_CHECKING:
    from ztunnel.proxy.envoy.listeners.listener import LiveListener
    from ztunnel.proxy.envoy.listeners.manager import Delivered
    from ztunnel.proxy.envoy.secrets.store import SecretHandle
    from ztunnel.proxy.envoy.upstream.manager import Failure

#: Returns whether to show the object with the given name.
Shown = Callable[[str], bool]

_HEALTH = {
    Health.UNKNOWN: core.HEALTHY,
    Health.HEALTHY: core.HEALTHY,
    Health.UNHEALTHY: core.UNHEALTHY,
    Health.DRAINING: core.UNHEALTHY,
    Health.TIMEOUT: core.UNHEALTHY,
    Health.DEGRADED: core.DEGRADED,
}


def everything(_: str) -> bool:
    """Accept every name."""
    return True


@dataclass(frozen=True, slots=True)
class Dump:
    """A top-level dump with lists created on demand.

    Attributes:
        message: the dump without ``lists``.
        lists: pairs of a field's name and its elements, in the order of field numbers. All of these come after the
            fields in ``message``. Elements are created on demand, so that thousands of elements do not block the
            event loop.
    """

    message: Message
    lists: tuple[tuple[str, Iterable[Message]], ...] = ()

    def complete(self) -> Message:
        """Return the complete message. This consumes the lists' elements, so it can be called only once."""
        for name, elements in self.lists:
            getattr(self.message, name).extend(elements)
        return self.message


def dumps(proxy: InspectedProxy, *, include_eds: bool, shown: Shown = everything) -> Iterator[Dump]:
    """Return all top-level dumps, in the order of Envoy's page."""
    yield Dump(bootstrap(proxy))
    yield Dump(clusters(proxy, shown))
    if _wanted_extensions(proxy):
        yield Dump(extensions(proxy, shown))
    if include_eds:
        yield endpoints(proxy, shown)
    yield Dump(listeners(proxy, shown))
    yield Dump(admin.ScopedRoutesConfigDump())
    yield routes(proxy, shown)
    yield Dump(secrets(proxy, shown))


def bootstrap(proxy: InspectedProxy) -> admin.BootstrapConfigDump:
    """Return the dump of the bootstrap, which is shown as it was given."""
    return admin.BootstrapConfigDump(bootstrap=proxy.bootstrap.message, last_updated=timestamp(proxy.started_at))


# Clusters and endpoints


def clusters(proxy: InspectedProxy, shown: Shown) -> admin.ClustersConfigDump:
    """Return the dump of static, active and warming clusters. A refused version is shown with the last accepted
    version.
    """
    manager = proxy.clusters
    dump = admin.ClustersConfigDump(version_info=manager.version)
    failures = dict(manager.failures)
    for cluster in manager.active:
        name = cluster.model.name
        if not shown(name):
            continue
        if cluster.added_via_api:
            _dynamic_cluster(dump.dynamic_active_clusters.add(), cluster, failures.pop(name, None))
        else:
            dump.static_clusters.add(cluster=cluster.body, last_updated=timestamp(cluster.last_updated))
    for cluster in manager.warming:
        if shown(cluster.model.name):
            failure = failures.pop(cluster.model.name, None)
            _dynamic_cluster(dump.dynamic_warming_clusters.add(), cluster, failure)
    for failure in failures.values():
        # Only refused versions of this cluster exist: no version was ever accepted.
        if shown(failure.name):
            dump.dynamic_warming_clusters.add(error_state=_error_state(failure))
    return dump


def _dynamic_cluster(
    entry: admin.ClustersConfigDump.DynamicCluster, cluster: LiveCluster, failure: Failure | None
) -> None:
    entry.version_info = cluster.version
    entry.cluster.CopyFrom(cluster.body)
    entry.last_updated.CopyFrom(timestamp(cluster.last_updated))
    if failure is not None:
        entry.error_state.CopyFrom(_error_state(failure))


def endpoints(proxy: InspectedProxy, shown: Shown) -> Dump:
    """Return the dump of all active clusters' endpoints. Like in Envoy, it has no versions and times."""
    wanted = [cluster for cluster in proxy.clusters.active if shown(cluster.model.name)]
    static = (
        admin.EndpointsConfigDump.StaticEndpointConfig(endpoint_config=registry.pack(assignment_message(cluster)))
        for cluster in wanted
        if not cluster.added_via_api
    )
    dynamic = (
        admin.EndpointsConfigDump.DynamicEndpointConfig(endpoint_config=registry.pack(assignment_message(cluster)))
        for cluster in wanted
        if cluster.added_via_api
    )
    lists = (("static_endpoint_configs", static), ("dynamic_endpoint_configs", dynamic))
    return Dump(admin.EndpointsConfigDump(), lists)


def assignment_message(cluster: LiveCluster) -> endpoint_pb2.ClusterLoadAssignment:
    """Return a cluster's current hosts by priority and locality, or by address for ORIGINAL_DST."""
    shown = cluster.hosts_shown
    assignment = live_assignment(cluster, shown)
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=assignment.cluster_name)
    hosts = {host.endpoint.key: host for host in (*shown.hosts, *cluster.original)}
    for group in assignment.groups:
        if not group.endpoints:
            continue
        block = message.endpoints.add()
        locality = group.locality
        # Like in Envoy, this field is present in the dump even if it is empty.
        block.locality.SetInParent()
        for name in ("region", "zone", "sub_zone"):
            setattr(block.locality, name, getattr(locality, name))
        if cluster.model.discovery is not Discovery.ORIGINAL_DST:
            block.load_balancing_weight.value = group.weight
        block.priority = group.priority
        for endpoint in group.endpoints:
            _endpoint(block.lb_endpoints.add(), endpoint, hosts.get(endpoint.key))
    message.policy.overprovisioning_factor.value = round(shown.overprovisioning * 100)
    return message


def _endpoint(entry: endpoint_pb2.LbEndpoint, endpoint: Endpoint, host: Host | None) -> None:
    address_message(entry.endpoint.address, endpoint.address)
    entry.endpoint.health_check_config.SetInParent()
    entry.endpoint.hostname = endpoint.hostname
    entry.health_status = health_of(endpoint, host)
    _metadata(entry.metadata, endpoint.metadata)
    entry.load_balancing_weight.value = endpoint.weight


def health_of(endpoint: Endpoint, host: Host | None) -> core.HealthStatus.ValueType:
    """Return a host's effective health: an ejected host is unhealthy, and unknown health counts as healthy."""
    return core.UNHEALTHY if host is not None and host.ejected else _HEALTH[endpoint.health]


def _metadata(message: core.Metadata, metadata: Metadata) -> None:
    for namespace, struct in metadata.items():
        message.filter_metadata[namespace].SetInParent()
        message.filter_metadata[namespace].update(cast(dict[str, Any], struct))


def address_message(message: core.Address, address: EndpointAddress) -> None:
    """Write an address into a protobuf message."""
    match address:
        case InternalAddress():
            message.envoy_internal_address.server_listener_name = address.listener
            message.envoy_internal_address.endpoint_id = address.endpoint_id
        case SocketAddress():
            message.socket_address.address = address.host
            message.socket_address.port_value = address.port
        case PipeAddress():
            message.pipe.path = address.path
        case NamedAddress():
            message.socket_address.address = address.name
            message.socket_address.port_value = address.port


# Listeners, and their routes and filters from RDS and ECDS


def listeners(proxy: InspectedProxy, shown: Shown) -> admin.ListenersConfigDump:
    """Return the dump of static listeners, and of dynamic listeners by name, with their active, warming, draining
    and refused versions.
    """
    manager = proxy.listeners
    dump = admin.ListenersConfigDump(version_info=manager.version)
    by_name: dict[str, admin.ListenersConfigDump.DynamicListener] = {}

    def entry(name: str) -> admin.ListenersConfigDump.DynamicListener:
        if name not in by_name:
            by_name[name] = dump.dynamic_listeners.add(name=name)
        return by_name[name]

    for listener in manager.active:
        if not shown(listener.name):
            continue
        if manager.is_static(listener.name):
            dump.static_listeners.add(listener=listener.body, last_updated=timestamp(listener.last_updated))
        else:
            entry(listener.name).active_state.CopyFrom(_listener_state(listener))
    for listener in manager.warming:
        if shown(listener.name):
            entry(listener.name).warming_state.CopyFrom(_listener_state(listener))
    for listener in manager.draining:
        if shown(listener.name):
            entry(listener.name).draining_state.CopyFrom(_listener_state(listener))
    for failure in manager.failures.values():
        if shown(failure.name):
            entry(failure.name).error_state.CopyFrom(_error_state(failure))
    return dump


def _listener_state(listener: LiveListener) -> admin.ListenersConfigDump.DynamicListenerState:
    return admin.ListenersConfigDump.DynamicListenerState(
        version_info=listener.version,
        listener=listener.body,
        last_updated=timestamp(listener.last_updated),
    )


def extensions(proxy: InspectedProxy, shown: Shown) -> admin.EcdsConfigDump:
    """Return the dump of the extension configurations from ECDS that existing listeners use."""
    dump = admin.EcdsConfigDump()
    for name in sorted(_wanted_extensions(proxy)):
        if shown(name):
            _delivered(dump.ecds_filters.add(), "ecds_filter", proxy.listeners.extensions[name])
    return dump


def _wanted_extensions(proxy: InspectedProxy) -> set[str]:
    wanted = {
        entry.filter.name
        for listener in (*proxy.listeners.active, *proxy.listeners.warming, *proxy.listeners.draining)
        for entry in listener.model.listener_filters
        if isinstance(entry.filter, DiscoveredFilter)
    }
    wanted.update(
        each.name
        for listener in (*proxy.listeners.active, *proxy.listeners.warming, *proxy.listeners.draining)
        for chain in listener.model.all_chains
        for each in chain.discovered
    )
    return wanted & proxy.listeners.extensions.keys()


def _wanted_routes(proxy: InspectedProxy) -> set[str]:
    wanted = {
        chain.manager.wanted_routes.name
        for listener in (*proxy.listeners.active, *proxy.listeners.warming, *proxy.listeners.draining)
        for chain in listener.live_chains
        if chain.manager is not None and chain.manager.wanted_routes is not None
    }
    return wanted & proxy.listeners.route_tables.keys()


def _delivered(
    entry: admin.EcdsConfigDump.EcdsFilterConfig | admin.RoutesConfigDump.DynamicRouteConfig,
    field: str,
    delivered: Delivered,
) -> None:
    if delivered.good is not None:
        entry.version_info = delivered.good.version
        getattr(entry, field).CopyFrom(delivered.good.body)
        entry.last_updated.CopyFrom(timestamp(delivered.at))
    if delivered.failure is not None:
        entry.error_state.CopyFrom(_error_state(delivered.failure))


def routes(proxy: InspectedProxy, shown: Shown) -> Dump:
    """Return the dump of route tables: those inlined in listeners, once per filter chain, and those from RDS."""
    inlined = (
        admin.RoutesConfigDump.StaticRouteConfig(
            route_config=registry.pack(table), last_updated=timestamp(listener.last_updated)
        )
        for listener in (*proxy.listeners.active, *proxy.listeners.warming)
        for table in _inlined_routes(listener.body)
        if shown(table.name)
    )
    discovered = []
    for name in sorted(_wanted_routes(proxy)):
        if shown(name):
            entry = admin.RoutesConfigDump.DynamicRouteConfig()
            _delivered(entry, "route_config", proxy.listeners.route_tables[name])
            discovered.append(entry)
    lists = (("static_route_configs", inlined), ("dynamic_route_configs", discovered))
    return Dump(admin.RoutesConfigDump(), lists)


def _inlined_routes(body: AnyMessage) -> Iterable[route_pb2.RouteConfiguration]:
    message = registry.unpack(body)
    assert isinstance(message, listener_pb2.Listener)
    chains = list(message.filter_chains)
    if message.HasField("default_filter_chain"):
        chains.append(message.default_filter_chain)
    for chain in chains:
        for each in chain.filters:
            if each.typed_config.Is(hcm.HttpConnectionManager.DESCRIPTOR):
                manager = hcm.HttpConnectionManager()
                each.typed_config.Unpack(manager)
                if manager.HasField("route_config"):
                    yield manager.route_config


# Secrets


def secrets(proxy: InspectedProxy, shown: Shown) -> admin.SecretsConfigDump:
    """Return the dump of secrets by name, certificates before validation contexts. The page redacts sensitive
    fields.
    """
    dump = admin.SecretsConfigDump()
    for handle in proxy.secrets.static:
        if shown(handle.ref.name):
            dump.static_secrets.add(
                name=handle.ref.name, last_updated=timestamp(handle.last_updated), secret=handle.body
            )
    for handle in sorted(proxy.secrets.dynamic, key=lambda handle: isinstance(handle.secret, Validation)):
        if not shown(handle.ref.name):
            continue
        if handle.body is not None:
            entry = dump.dynamic_active_secrets.add(version_info=handle.version, secret=handle.body)
        else:
            awaited = registry.pack(tls_pb2.Secret(name=handle.ref.name))
            entry = dump.dynamic_warming_secrets.add(version_info="uninitialized", secret=awaited)
        entry.name = handle.ref.name
        entry.last_updated.CopyFrom(timestamp(handle.last_updated))
        _secret_error(entry, handle)
    return dump


def _secret_error(entry: admin.SecretsConfigDump.DynamicSecret, handle: SecretHandle) -> None:
    if handle.error is not None:
        details, at = handle.error
        entry.error_state.details = details
        entry.error_state.last_update_attempt.CopyFrom(timestamp(at))


# Shared


def _error_state(failure: Failure) -> admin.UpdateFailureState:
    return admin.UpdateFailureState(
        failed_configuration=failure.body,
        last_update_attempt=timestamp(failure.at),
        details=failure.details,
        version_info=failure.version,
    )


def timestamp(seconds: float) -> Timestamp:
    """Return a time for a dump, truncated to whole milliseconds."""
    message = Timestamp()
    message.FromMilliseconds(int(seconds * 1000))
    return message
