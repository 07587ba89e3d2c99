"""``ztunnel proxy --validate``: finds every fault of a configuration without serving it."""

import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import Message

from hbone.settings import Role
from xds.dialects.envoy import (
    Surroundings,
    compile_assignment,
    compile_chain_filter,
    compile_cluster,
    compile_listener,
    compile_listener_filter,
    compile_route_table,
    compile_secret,
)
from xds.dialects.envoy.reading import at, every_fault, unpack
from xds.errors import ConfigError
from xds.model.cluster import Discovery
from xds.model.listener import Discovered, DiscoveredFilter, Listener
from xds.model.secret import Secret
from xds.model.tls import ConfigSource, FileSource, SecretRef
from xds.model.tls import TlsContext as ContextModel
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3 import cluster_pb2
from xds.proto.envoy.config.core.v3 import core_pb2
from xds.proto.envoy.config.endpoint.v3 import endpoint_pb2
from xds.proto.envoy.config.listener.v3 import listener_pb2
from xds.proto.envoy.config.route.v3 import route_pb2
from xds.proto.envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryResponse
from xds.proto.json import parse_text
from xds.proto.well_known import Any as AnyMessage
from ztunnel.proxy.envoy.config.bootstrap import BootstrapConfig, GrpcTarget, parse_bootstrap, read_bootstrap
from ztunnel.proxy.envoy.listeners.listener import chain_places
from ztunnel.proxy.envoy.listeners.manager import refuse_taken, wanted_sources
from ztunnel.proxy.envoy.secrets.build import build
from ztunnel.proxy.envoy.secrets.verify import check_secret
from ztunnel.proxy.envoy.upstream.cluster import tls_contexts
from ztunnel.proxy.envoy.upstream.grpc import tls_of
from ztunnel.runtime.text_file import read_text

Model = TypeVar("Model")

#: Matches the name of the resource at the beginning of a field path.
_RESOURCE = re.compile(r"(?:static_resources\.\w+|resources)\[\d+\]")


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a check.

    Attributes:
        faults: one line per fault, with its field path.
        resources, contexts: the numbers of checked resources and TLS contexts.
        files: the resource files that were read.
    """

    faults: list[str]
    resources: int = 0
    contexts: int = 0
    files: tuple[str, ...] = ()

    def checked(self) -> str:
        """Return a readable summary of the checked configuration."""
        files = f", and {', '.join(self.files)}" if self.files else ""
        return f"{self.resources} resources, {self.contexts} TLS contexts{files}"


def findings_of_file(path: str) -> Findings:
    """Check a bootstrap file and every file that it refers to."""
    faults: list[ConfigError] = []
    try:
        message = parse_bootstrap(path, faults)
    except ConfigError as error:
        return Findings([f"{path}: {error}"])
    read = len(faults)  # despite these faults, the parts that could be read are checked
    bootstrap = read_bootstrap(message, faults)
    found = findings_of(bootstrap, path, unread=faults[:read])
    return replace(found, faults=[*(f"{path}: {fault}" for fault in faults), *found.faults])


def findings_of(
    bootstrap: BootstrapConfig, place: str = "bootstrap", *, unread: Collection[ConfigError] = ()
) -> Findings:
    """Check a bootstrap's static resources and every file that it refers to.

    Args:
        bootstrap: the bootstrap.
        place: the name of the bootstrap in faults.
        unread: the faults found when reading the text. Static resources with such faults are not checked further,
            because parts that could not be read would be reported as missing.
    """
    check = _Check(bootstrap)
    static = bootstrap.message.static_resources
    for field, messages in (
        ("secrets", static.secrets),
        ("clusters", static.clusters),
        ("listeners", static.listeners),
    ):
        check.resources(f"{place}: static_resources.{field}", map(registry.pack, messages), _at_fault(unread))
    for discovery in (bootstrap.cds, bootstrap.lds):
        if discovery is not None and isinstance(discovery.source, FileSource):
            check.file(discovery.source.path)
    check.follow()
    if bootstrap.ads is not None and bootstrap.ads.cluster in bootstrap.targets:
        check.control_plane(bootstrap.targets[bootstrap.ads.cluster], place)
    check.contexts()
    return check.findings()


def _at_fault(faults: Collection[ConfigError]) -> frozenset[str]:
    """Return the resources with faults, in the form ``static_resources.clusters[0]`` or ``resources[3]``."""
    return frozenset(found[0] for fault in faults if (found := _RESOURCE.match(fault.path)))


class _Check:
    def __init__(self, bootstrap: BootstrapConfig) -> None:
        self.faults: list[str] = []
        self._bootstrap = bootstrap
        self._static_secrets = {secret.name for secret in bootstrap.message.static_resources.secrets}
        self._surroundings = Surroundings(lambda path: Path(path).read_bytes(), os.environ)
        self._listeners: list[Listener] = []
        self._resources = 0
        self._files: dict[str, None] = {}
        self._wanted: dict[str, None] = {}
        self._static: dict[str, Secret] = {}
        self._by_file: dict[tuple[str, str], Secret] = {}
        self._contexts: list[tuple[str, Role, ContextModel]] = []
        #: For each file and filter name: each place with this filter from this file, and the function that reads
        #: the filter there.
        self._extensions: dict[tuple[str, str], list[tuple[Discovered, Callable[..., object]]]] = {}

    def findings(self) -> Findings:
        """Return the findings so far."""
        faults = list(dict.fromkeys(self.faults))  # without duplicates: a control plane's cluster is checked twice
        return Findings(faults, self._resources, len(self._contexts), tuple(self._files))

    def control_plane(self, target: GrpcTarget, place: str) -> None:
        """Check the TLS configuration of the streams to control planes."""
        try:
            tls_of(target, self._surroundings)
        except ConfigError as error:
            cluster = f"static_resources.clusters[{target.index}]"
            named = f"{cluster} ({target.cluster.name}): {str(error).removeprefix(cluster).lstrip('.: ')}"
            self.faults.append(f"{place}: {named}")

    def follow(self) -> None:
        """Check the files that resources refer to: endpoints and secrets."""
        while left := [path for path in self._wanted if path not in self._files]:
            for path in left:
                self.file(path)

    def file(self, path: str) -> None:
        """Check one file of resources."""
        if path in self._files:
            return
        self._files[path] = None
        faults: list[ConfigError] = []
        try:
            parsed = parse_text(read_text(Path(path)), DiscoveryResponse, name=path, faults=faults)
        except OSError as error:
            self.faults.append(f"{path}: cannot read: {error.strerror}")
            return
        except ConfigError as error:
            self.faults.append(f"{path}: {error}")
            return
        self.faults.extend(f"{path}: {fault}" for fault in (*faults, *parsed.unknown_fields))
        self.resources(f"{path}: resources", parsed.message.resources, _at_fault(faults), path)

    def resources(
        self, place: str, bodies: Iterable[AnyMessage], at_fault: Collection[str], file: str = ""
    ) -> None:
        """Check resources of any type, except those with known faults.

        Args:
            place: the path of the list, without the index.
            bodies: the resources.
            at_fault: see :func:`_at_fault`.
            file: the file of the resources, for secrets. Empty for static resources.
        """
        for index, body in enumerate(bodies):
            if f"{place.rpartition(': ')[2]}[{index}]" in at_fault:
                continue
            name = _name(body)
            where = f"{place}[{index}]{f' ({name})' if name else ''}"
            try:
                self._resource(registry.unpack(body), where, file)
            except (ConfigError, registry.UnknownType, registry.MalformedMessage) as error:
                self.faults.append(f"{where}: {error}")

    def contexts(self) -> None:
        """Build every TLS context with the secrets found in files. Secrets from a stream are not available."""
        for place, role, model in self._contexts:
            try:
                build(role, model, self._find)
            except ConfigError as error:
                separator = ": " if place.endswith(")") else "."
                self.faults.append(f"{place}{separator}{error}")

    def _find(self, ref: SecretRef) -> Secret | None:
        if ref.name in self._static_secrets:
            return self._static.get(ref.name)
        return self._by_file.get((ref.source.path, ref.name)) if isinstance(ref.source, FileSource) else None

    def _resource(self, message: Message, place: str, file: str) -> None:
        self._resources += 1
        match message:
            case listener_pb2.Listener():
                self._listener(message, place)
            case cluster_pb2.Cluster():
                self._cluster(message, place)
            case endpoint_pb2.ClusterLoadAssignment():
                self._compiled(lambda: compile_assignment(message), place)
            case route_pb2.RouteConfiguration():
                self._compiled(lambda: compile_route_table(message, self._surroundings), place)
            case core_pb2.TypedExtensionConfig():
                with at("typed_config"):
                    self._extension(message, file)
            case tls_pb2.Secret():
                secret = compile_secret(message, self._surroundings)
                with at(str(message.WhichOneof("type"))):
                    check_secret(secret)
                if file:
                    self._by_file[file, message.name] = secret
                else:
                    self._static[message.name] = secret
            case _:
                raise ConfigError(f"no resource of this proxy: {message.DESCRIPTOR.full_name}")

    def _extension(self, message: core_pb2.TypedExtensionConfig, file: str) -> None:
        """Check a filter delivered by ECDS, once for each listener that references the filter."""
        body = unpack(message.typed_config, message.name)
        kind = body.DESCRIPTOR.full_name
        for wanted, read in self._extensions.get((file, message.name), ()):
            if wanted.type_urls and kind not in wanted.type_urls:
                raise ConfigError(f"type {kind} is not among the listener's type_urls")
            read(body, self._surroundings)

    def _compiled(self, compiles: Callable[[], Model], place: str) -> Model | None:
        """Call ``compiles`` and return its result. If there are faults, record them and return None."""
        model, faults = every_fault(compiles)
        self.faults.extend(f"{place}: {fault}" for fault in faults)
        return model

    def _listener(self, message: listener_pb2.Listener, place: str) -> None:
        model = self._compiled(lambda: compile_listener(message, self._surroundings), place)
        if model is None:
            return
        try:
            refuse_taken(model, self._listeners)
        except ConfigError as error:
            self.faults.append(f"{place}: {error}")
        self._listeners.append(model)
        for source in wanted_sources(model):
            self._source(source)
        for entry in model.listener_filters:
            if isinstance(entry.filter, DiscoveredFilter):
                self._awaited(entry.filter, compile_listener_filter)
        for _, chain in chain_places(model):
            for wanted in chain.discovered:
                self._awaited(wanted, compile_chain_filter)
        for inner, chain in chain_places(model):
            self._secrets(chain.secret_refs)
            if chain.tls is not None:
                context = f"{place}: {inner}.transport_socket.typed_config"
                self._contexts.append((context, Role.SERVER, chain.tls))

    def _awaited(self, wanted: Discovered, read: Callable[[Message, Surroundings], object]) -> None:
        if isinstance(wanted.source, FileSource):
            self._extensions.setdefault((wanted.source.path, wanted.name), []).append((wanted, read))

    def _cluster(self, message: cluster_pb2.Cluster, place: str) -> None:
        model = self._compiled(lambda: compile_cluster(message, self._surroundings), place)
        if model is None:
            return
        self._secrets(model.secret_refs)
        self._contexts += [(f"{place}: {inner}", Role.CLIENT, context) for inner, context in tls_contexts(model)]
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


def _name(body: AnyMessage) -> str:
    try:
        return str(getattr(registry.unpack(body), "name", ""))
    except (registry.UnknownType, registry.MalformedMessage):
        return ""
