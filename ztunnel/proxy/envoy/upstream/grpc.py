"""Connects gRPC to the static clusters of a bootstrap, in plain text or with the clusters' TLS."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from hbone.settings import Role
from xds.aio.channel import Channel, Keepalive
from xds.dialects.envoy import Surroundings, compile_cluster
from xds.errors import ConfigError, XdsError
from xds.model.address import NamedAddress
from xds.model.cluster import RawBuffer
from xds.model.dns import HOSTS_RESOLVER, DnsResolver
from xds.model.tls import AdsSource
from xds.model.tls import TlsContext as ContextModel
from ztunnel.proxy.envoy.config.bootstrap import GrpcTarget
from ztunnel.proxy.envoy.secrets.contexts import LiveContext
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Stats, cluster_scope

_GETADDRINFO = DnsResolver(has_ttls=False)


def tls_of(target: GrpcTarget, surroundings: Surroundings) -> ContextModel | None:
    """Return the TLS context of a cluster, or None for plain text.

    Raises:
        ConfigError: the context is unusable, or would accept any server. The error contains the field path in the
            bootstrap.
    """
    try:
        cluster = compile_cluster(target.cluster, surroundings)
        if cluster.socket_matches:
            raise ConfigError("a gRPC cluster has one transport_socket", "transport_socket_matches")
        named = cluster.assignment is not None and any(
            isinstance(each.address, NamedAddress) for each in cluster.assignment.endpoints
        )
        if named and (cluster.dns_resolver or target.dns_resolver) not in (HOSTS_RESOLVER, _GETADDRINFO):
            raise ConfigError("the host itself resolves names of gRPC servers", "typed_dns_resolver_config")
        transport = cluster.transport_socket
        if isinstance(transport, RawBuffer):
            return None
        if not isinstance(transport, ContextModel):
            raise ConfigError("gRPC can use plain text or TLS only", "transport_socket")
        if any(isinstance(ref.source, AdsSource) for ref in transport.secret_refs):
            raise ConfigError("the stream's own secrets cannot be fetched over ADS", "transport_socket")
        validation = transport.validation
        if transport.validation_ref is None and (validation is None or validation.trusted_ca_pem is None):
            raise ConfigError("without trusted_ca any server would be accepted", "transport_socket")
    except ConfigError as error:
        raise error.under(f"static_resources.clusters[{target.index}]") from error
    return replace(transport, alpn=("h2",))


class GrpcClusters:
    """Opens gRPC channels to clusters, chosen by name.

    Args:
        targets: see :class:`~ztunnel.proxy.envoy.config.bootstrap.BootstrapConfig`.
        surroundings: the files and variables that the configuration refers to.
        stats: counts renewed TLS contexts, per cluster.
        secrets: returns the source of certificates and roots that are not inline. Called only when the first
            channel opens, because an SDS server can itself be one of these clusters.
    """

    def __init__(
        self,
        targets: Mapping[str, GrpcTarget],
        surroundings: Surroundings,
        stats: Stats,
        secrets: Callable[[], SecretStore],
    ) -> None:
        self._targets = targets
        self._surroundings = surroundings
        self._stats = stats
        self._secrets = secrets
        self._contexts: dict[str, LiveContext] = {}
        self._keepalives: dict[str, Keepalive] = {}

    def connect(self, name: str) -> Callable[[], AbstractAsyncContextManager[Channel]]:
        """Return the function that connects to a cluster; see :data:`xds.aio.client.Connect`."""

        @asynccontextmanager
        async def connect() -> AsyncIterator[Channel]:
            live = self._live(name)
            if live is not None:
                await live.settled()
                if live.current is None:
                    raise XdsError(f"no TLS with cluster {name}: its secrets have not arrived or are unusable")
            tls = None if live is None else live.current
            keepalive = self.keepalive(name)
            async with Channel(self._targets[name].address, tls=tls, keepalive=keepalive) as channel:
                yield channel

        return connect

    def keepalive(self, name: str) -> Keepalive:
        """Return the keepalive settings for a cluster's gRPC server: ``connection_keepalive`` or the default."""
        keepalive = self._keepalives.get(name)
        if keepalive is None:
            keepalive = self._keepalives[name] = Keepalive()
            http2 = compile_cluster(self._targets[name].cluster, self._surroundings).http2
            if http2 is not None and http2.keepalive_interval_s is not None:
                keepalive.interval_s = http2.keepalive_interval_s
                keepalive.timeout_s = http2.keepalive_timeout_s or keepalive.timeout_s
        return keepalive

    def _live(self, name: str) -> LiveContext | None:
        live = self._contexts.get(name)
        if live is None:
            model = tls_of(self._targets[name], self._surroundings)
            if model is None:
                return None
            scope = cluster_scope(self._stats, name)
            updates = scope.counter("client_ssl_socket_factory.ssl_context_update_by_sds")

            def updated() -> None:
                updates.value += 1

            live = LiveContext(Role.CLIENT, model, self._secrets(), updated, owner=f"cluster {name}")
            self._contexts[name] = live
        return live

    def close(self) -> None:
        """Release the secrets; idempotent."""
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()
