"""Compiles the DNS resolvers of a cluster and of the bootstrap."""

from collections.abc import Iterable

from xds.dialects.envoy.reading import at, constraint, only, unpack, wrapped
from xds.errors import ConfigError, Unsupported
from xds.model.address import SocketAddress, canonical
from xds.model.dns import DnsResolver
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.extensions.network.dns_resolver.cares.v3.cares_dns_resolver_pb2 import CaresDnsResolverConfig
from xds.proto.envoy.extensions.network.dns_resolver.getaddrinfo.v3.getaddrinfo_dns_resolver_pb2 import (
    GetAddrInfoDnsResolverConfig,
)

_PORT = 53


def compile_cluster_resolver(message: Cluster) -> DnsResolver | None:
    """Return the DNS resolver that a cluster configures, or ``None`` if it uses the bootstrap's resolver.

    Like in Envoy, the newest field wins, and ``use_tcp_for_dns_lookups`` has no effect without ``dns_resolvers``.

    Raises:
        ConfigError: another kind of resolver, or a name server without an IP address.
    """
    older = _resolution(message.dns_resolution_config) if message.HasField("dns_resolution_config") else None
    if message.typed_dns_resolver_config.HasField("typed_config"):
        return _typed(message.typed_dns_resolver_config)
    if older is not None:
        return older
    if message.dns_resolvers:
        servers = _servers(message.dns_resolvers, "dns_resolvers")
        return DnsResolver(servers=servers, tcp=message.use_tcp_for_dns_lookups)
    return None


def compile_bootstrap_resolver(message: Bootstrap) -> DnsResolver:
    """Return the bootstrap's DNS resolver, for clusters that configure none.

    Raises:
        ConfigError: see :func:`compile_cluster_resolver`.
    """
    older = _resolution(message.dns_resolution_config) if message.HasField("dns_resolution_config") else None
    if message.typed_dns_resolver_config.HasField("typed_config"):
        return _typed(message.typed_dns_resolver_config)
    return older or DnsResolver(tcp=message.use_tcp_for_dns_lookups)


def _resolution(message: core.DnsResolutionConfig) -> DnsResolver:
    with at("dns_resolution_config"):
        if not message.resolvers:
            raise constraint(message, "resolvers", "value must contain at least 1 item(s)")
        options = message.dns_resolver_options
        return DnsResolver(
            servers=_servers(message.resolvers, "resolvers"),
            tcp=options.use_tcp_for_dns_lookups,
            search=not options.no_default_search_domain,
        )


def _typed(message: core.TypedExtensionConfig) -> DnsResolver:
    with at("typed_dns_resolver_config", "typed_config"):
        config = unpack(message.typed_config, message.name)
        match config:
            case CaresDnsResolverConfig():
                return _cares(config)
            case GetAddrInfoDnsResolverConfig():
                only(config, "num_resolver_threads")  # our look-ups use no threads
                return DnsResolver(has_ttls=False)
            case _:
                raise Unsupported(f"no such resolver: {config.DESCRIPTOR.full_name}")


def _cares(message: CaresDnsResolverConfig) -> DnsResolver:
    only(
        message,
        "resolvers",
        "dns_resolver_options",
        "use_resolvers_as_fallback",
        "udp_max_queries",  # a limit per socket; here each query has its own socket
        "query_timeout_seconds",
        "query_tries",
        "rotate_nameservers",
    )
    for field in ("query_timeout_seconds", "query_tries"):
        if wrapped(message, field, 1) < 1:
            raise constraint(message, field, "value must be greater than or equal to 1")
    timeout = wrapped(message, "query_timeout_seconds", None)
    return DnsResolver(
        servers=_servers(message.resolvers, "resolvers"),
        servers_are_fallback=message.use_resolvers_as_fallback,
        tcp=message.dns_resolver_options.use_tcp_for_dns_lookups,
        search=not message.dns_resolver_options.no_default_search_domain,
        query_timeout_s=None if timeout is None else float(timeout),
        tries=wrapped(message, "query_tries", None),
        rotate=message.rotate_nameservers,
    )


def _servers(addresses: Iterable[core.Address], field: str) -> tuple[SocketAddress, ...]:
    servers = []
    for index, address in enumerate(addresses):
        with at(field, index):
            if address.WhichOneof("address") != "socket_address":
                raise Unsupported("a name server has an IP address")
            with at("socket_address"):
                found = address.socket_address
                only(found, "protocol", "address", "port_value", "ipv4_compat")
                if found.port_value > 65535:
                    raise constraint(found, "port_value", "value must be less than or equal to 65535")
                try:
                    host = canonical(found.address)
                except ValueError:
                    raise ConfigError(f"malformed IP address: {found.address}", "address") from None
                servers.append(SocketAddress(host, found.port_value or _PORT))
    return tuple(servers)
