"""Rebuilds the configuration in a ``config_dump`` of Envoy's dialect, so that
:mod:`ztunnel.proxy.envoy.path.explain` works without the proxy.

Listeners and clusters are compiled and created by the code of a proxy. They open no socket, no log file and no
subscription. A dump has no private keys, so no TLS context can be built. Answers describe the certificates of the
dump's secrets instead.
"""

from __future__ import annotations

import random
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from cryptography import x509
from google.protobuf.message import Message

from hbone.x509_errors import UNREADABLE
from xds.dialects.envoy import (
    Surroundings,
    compile_assignment,
    compile_chain_filter,
    compile_cluster,
    compile_listener,
    compile_listener_filter,
    compile_route_table,
)
from xds.errors import ConfigError
from xds.model.access_log import AnyAccessLog
from xds.model.cluster import Discovery, LoadAssignment
from xds.model.listener import DiscoveredFilter
from xds.model.secret import Secret
from xds.model.tls import SecretRef
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import TypedExtensionConfig
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.envoy.config.route.v3.route_pb2 import RouteConfiguration
from xds.proto.json import parse_value
from ztunnel.proxy.dataplane.resolver import Resolver
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.path.explain import Configuration, SavedSecrets
from ztunnel.proxy.envoy.path.terminate import TunnelRules
from ztunnel.proxy.envoy.secrets.files import SecretFiles
from ztunnel.proxy.envoy.secrets.store import SecretHandle, SecretStore, SecretUser
from ztunnel.proxy.envoy.secrets.verify import subject_alt_names
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.telemetry.access_log import AccessLogs, Sink
from ztunnel.proxy.envoy.telemetry.decisions import Decisions
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, Surround
from ztunnel.runtime.clock import Clock

#: Lines about the facts that no dump contains.
_LACKS: Final = ("the proxy's flags: --tunnel-source is taken for its default", "Calico's policies")
_NO_ENDPOINTS: Final = "endpoints: save it from /config_dump?include_eds"
_MOST_TOLD: Final = 8

Made = TypeVar("Made", bound=Message)


class _NoSecrets(SecretStore):
    """A secret store without secrets."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.movable = False
        self.files = SecretFiles()

    def find(self, ref: SecretRef) -> Secret | None:
        return None

    def acquire(self, ref: SecretRef, user: SecretUser) -> SecretHandle:
        return SecretHandle(ref, self._clock)


class _NoLogs(AccessLogs):
    """A sink of access logs that opens no file."""

    def __init__(self) -> None:
        pass

    def sinks(self, logs: Iterable[AnyAccessLog]) -> tuple[Sink, ...]:
        return ()


class _NoProbes:
    """A health checker that sends no probes."""

    async def ask(self, *_: object) -> Any:
        raise AssertionError("nothing starts health checks")


def read_configuration(dump: Mapping[str, Any], clock: Clock) -> tuple[Configuration, list[str]]:
    """Return the configuration of a dump, and what the dump lacks, a line each.

    An unreadable resource is skipped and named: it can come from a later Envoy, or need files of the proxy's node.

    Raises:
        ConfigError: it is not a dump of Envoy's dialect.
    """
    sections = dump.get("configs")
    if not isinstance(sections, list) or not all(isinstance(each, dict) for each in sections):
        raise ConfigError("configs: must be a list of mappings")
    lacks = list(_LACKS)
    reader = _Reader(clock, lacks)
    found = {kind: list(_resources(sections, *where)) for kind, where in _PLACES.items()}
    assignments = reader.assignments(found["endpoints"])
    if not any(str(each.get("@type")).endswith("EndpointsConfigDump") for each in sections):
        lacks.append(_NO_ENDPOINTS)
    clusters = reader.clusters(found["clusters"], assignments)
    extensions = reader.extensions(found["extensions"])
    listeners = reader.listeners(found["listeners"], found["routes"], extensions)
    secrets = reader.certificates(found["secrets"])
    more = len(lacks) - _MOST_TOLD
    if more > 0:
        lacks[_MOST_TOLD:] = [f"and {more} entries more that cannot be read"]
    ports = {address.port for listener in listeners for address in listener.model.addresses}
    rules = TunnelRules(own_ports=lambda: ports)
    return Configuration(listeners, clusters.get, clock.wall(), tunnel_rules=rules, saved=secrets), lacks


#: For each kind of resource: its section of the dump, the lists in that section, and where an entry contains the
#: resource.
_PLACES: Final[Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "listeners": (
        "ListenersConfigDump",
        ("static_listeners", "dynamic_listeners"),
        ("active_state.listener", "listener"),
    ),
    "clusters": ("ClustersConfigDump", ("static_clusters", "dynamic_active_clusters"), ("cluster",)),
    "endpoints": (
        "EndpointsConfigDump",
        ("static_endpoint_configs", "dynamic_endpoint_configs"),
        ("endpoint_config",),
    ),
    "extensions": ("EcdsConfigDump", ("ecds_filters",), ("ecds_filter",)),
    "routes": ("RoutesConfigDump", ("dynamic_route_configs",), ("route_config",)),
    "secrets": ("SecretsConfigDump", ("static_secrets", "dynamic_active_secrets"), ("secret",)),
}


def _resources(
    sections: list[Mapping[str, Any]], kind: str, lists: tuple[str, ...], places: tuple[str, ...]
) -> Iterator[Mapping[str, Any]]:
    for section in sections:
        if not str(section.get("@type")).endswith(f".{kind}"):
            continue
        for entry in (entry for name in lists for entry in section.get(name) or []):
            for place in places:
                value: Any = entry
                for key in place.split("."):
                    value = value.get(key) if isinstance(value, dict) else None
                if isinstance(value, dict):
                    yield {key: inner for key, inner in value.items() if key != "@type"}
                    break


def _no_file(path: str) -> bytes:
    raise OSError(f"{path} is a file of the proxy's node")


class _Reader:
    """Creates the objects that the answers describe. For an unreadable resource, ``lacks`` gets a line."""

    def __init__(self, clock: Clock, lacks: list[str]) -> None:
        self._clock = clock
        self._lacks = lacks
        self._stats = Stats()
        self._surroundings = Surroundings(read_file=_no_file, environment={})
        self._secrets = _NoSecrets(clock)

    def _message(self, kind: str, value: Mapping[str, Any], message_type: type[Made]) -> Made | None:
        try:
            parsed = parse_value(value, message_type)
        except ConfigError as error:
            self._unread(kind, value, error)
            return None
        if parsed.unknown_fields:
            self._unread(kind, value, f"{parsed.unknown_fields[0]}; passed over")
        return parsed.message

    def _unread(self, kind: str, value: Mapping[str, Any], error: object) -> None:
        name = value.get("name") or value.get("cluster_name")
        self._lacks.append(f"{kind} {name}: {error}")

    def assignments(self, values: list[Mapping[str, Any]]) -> dict[str, LoadAssignment]:
        """Return the endpoints by the name of their ClusterLoadAssignment."""
        found = {}
        for value in values:
            message = self._message("endpoints", _without_zero_weights(value), ClusterLoadAssignment)
            try:
                if message is not None:
                    found[message.cluster_name] = compile_assignment(message)
            except ConfigError as error:
                self._unread("endpoints", value, error)
        return found

    def clusters(
        self, values: list[Mapping[str, Any]], assignments: Mapping[str, LoadAssignment]
    ) -> dict[str, LiveCluster]:
        """Return the clusters by name, with the endpoints that the dump has."""
        surround = Surround(
            sources=None,  # type: ignore[arg-type]  # nothing subscribes: clusters are not started
            secrets=self._secrets,
            stats=self._stats,
            clock=self._clock,
            rng=random.Random(),
            resolver=Resolver(),
            prober=_NoProbes(),
            strict_tls=True,
        )
        found = {}
        for value in values:
            message = self._message("cluster", value, Cluster)
            if message is None:
                continue
            try:
                model = compile_cluster(message, self._surroundings)
                cluster = LiveCluster(model, registry.pack(message), surround)
            except ConfigError as error:
                self._unread("cluster", value, error)
                continue
            # Endpoints of the dump replace configured ones, because they include the addresses that DNS returned.
            assignment = assignments.get(model.eds_name) or assignments.get(model.name) or model.assignment
            if assignment is not None and model.discovery is not Discovery.ORIGINAL_DST:
                cluster.preset(assignment)
            found[model.name] = cluster
        return found

    def extensions(self, values: list[Mapping[str, Any]]) -> dict[str, Message]:
        """Return the filter configurations that were received by ECDS, by name."""
        found = {}
        for value in values:
            message = self._message("extension", value, TypedExtensionConfig)
            try:
                if message is not None:
                    found[message.name] = registry.unpack(message.typed_config)
            except (registry.UnknownType, registry.MalformedMessage) as error:
                self._unread("extension", value, error)
        return found

    def _discover(self, listener: LiveListener, extensions: Mapping[str, Message]) -> None:
        """Insert the filters received by ECDS into a listener and its chains. A filter that the dump lacks stays
        missing.
        """
        for entry in listener.model.listener_filters:
            if isinstance(entry.filter, DiscoveredFilter) and entry.filter.name in extensions:
                found = compile_listener_filter(extensions[entry.filter.name], self._surroundings)
                listener.discover(entry.name, found)
        for chain in listener.live_chains:
            for place, wanted in enumerate(chain.model.discovered):
                if wanted.name in extensions:
                    chain.discover(place, compile_chain_filter(extensions[wanted.name], self._surroundings))

    def listeners(
        self,
        values: list[Mapping[str, Any]],
        routes: list[Mapping[str, Any]],
        extensions: Mapping[str, Message],
    ) -> list[LiveListener]:
        """Return the listeners with their filter chains, including configuration received by RDS and ECDS."""
        tables = {}
        for value in routes:
            message = self._message("route", value, RouteConfiguration)
            try:
                if message is not None:
                    tables[message.name] = compile_route_table(message, self._surroundings)
            except ConfigError as error:
                self._unread("route", value, error)
        found = []
        for value in values:
            listener = self._message("listener", value, Listener)
            if listener is None:
                continue
            try:
                made = LiveListener(
                    compile_listener(listener, self._surroundings),
                    registry.pack(listener),
                    version="",
                    stats=self._stats,
                    logs=_NoLogs(),
                    secrets=self._secrets,
                    clock=self._clock,
                    decisions=Decisions(self._stats, self._clock),
                )
                self._discover(made, extensions)
            except ConfigError as error:
                self._unread("listener", value, error)
                continue
            for chain in made.live_chains:
                wanted = chain.manager.wanted_routes if chain.manager is not None else None
                if chain.manager is not None and wanted is not None:
                    chain.manager.routes = tables.get(wanted.name)
            found.append(made)
        return found

    def certificates(self, values: list[Mapping[str, Any]]) -> SavedSecrets:
        """Return a description of the certificates in the dump's secrets, for answers."""
        identities, ends = {}, {}
        for value in values:
            chain = (value.get("tls_certificate") or {}).get("certificate_chain") or {}
            try:
                pem = str(chain.get("inline_string") or "").encode() or b64decode(chain.get("inline_bytes") or "")
                if pem:
                    leaf, name = x509.load_pem_x509_certificates(pem)[0], str(value.get("name"))
                    identities[name] = tuple(text for kind, text in subject_alt_names(leaf) if kind == "uri")
                    ends[name] = leaf.not_valid_after_utc
            except UNREADABLE as error:
                self._unread("secret", value, error)
        return SavedSecrets(identities, ends)


def _without_zero_weights(value: Any) -> Any:
    """Return an assignment without its weights of 0, which a dump shows where no weight was set."""
    if isinstance(value, dict):
        return {
            key: _without_zero_weights(inner)
            for key, inner in value.items()
            if key != "load_balancing_weight" or inner not in (0, "0")
        }
    return [_without_zero_weights(each) for each in value] if isinstance(value, list) else value
