"""Compiles LDS listeners."""

import itertools
from collections.abc import Sequence, Sized
from sys import intern

from xds.dialects.envoy.access_log import compile_access_logs
from xds.dialects.envoy.filters import compile_chain_filter, compile_filter
from xds.dialects.envoy.listener_filters import compile_entry, discovered
from xds.dialects.envoy.matcher import compile_matcher
from xds.dialects.envoy.parts import Parts
from xds.dialects.envoy.reading import (
    Renamed,
    Surroundings,
    at,
    constraint,
    digest,
    digest_of,
    enum_name,
    metadata,
    network,
    nothing_unknown,
    only,
    required,
    seconds,
    socket_address,
    unpack,
    unpack_as,
    with_values,
    wrapped,
)
from xds.dialects.envoy.tls import compile_downstream
from xds.errors import ConfigError, Unsupported
from xds.model import listener as model
from xds.model.address import IpNetwork, SocketAddress
from xds.model.chain_match import ChainMatch, SourceType
from xds.model.http import HttpConnectionManager
from xds.model.matcher import Matcher
from xds.model.tls import TlsContext
from xds.model.weighted_cluster import WeightedCluster
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.config.listener.v3 import listener_pb2 as proto
from xds.proto.envoy.extensions.transport_sockets.raw_buffer.v3.raw_buffer_pb2 import RawBuffer
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import DownstreamTlsContext
from xds.proto.well_known import Any as AnyMessage

_STATES = {
    core.SocketOption.STATE_PREBIND: "prebind",
    core.SocketOption.STATE_BOUND: "bound",
    core.SocketOption.STATE_LISTENING: "listening",
}
#: The listener fields that an update can change in place, without a new listener.
_IN_PLACE = ("filter_chains", "default_filter_chain", "filter_chain_matcher")
#: The match criteria of filter chains that a ``filter_chain_matcher`` selects: none.
_ANY = ChainMatch()
_IPPROTO_TCP, _TCP_FASTOPEN = 6, 23  # linux/tcp.h


def compile_listener(
    message: proto.Listener,
    surroundings: Surroundings,
    parts: Parts | None = None,
    packed: AnyMessage | None = None,
) -> model.Listener:
    """Compile one listener with its chains.

    Args:
        message: the listener.
        surroundings: the files and environment variables that the message can refer to.
        parts: the previous version's compiled parts, from ``Parts(earlier)``. The call adds this version's parts.
        packed: the packed form that the message was parsed from.

    Raises:
        ConfigError: with the path of the first field that is not supported or not valid.
    """
    nothing_unknown(message, packed)
    only(
        message,
        "name",
        "address",
        "additional_addresses",
        "internal_listener",
        "filter_chains",
        "default_filter_chain",
        "filter_chain_matcher",
        "use_original_dst",
        "per_connection_buffer_limit_bytes",  # a soft limit of Envoy's buffers; ours hold less than its default
        "metadata",
        "drain_type",  # failed health checks do not drain here, so both kinds are equal
        "listener_filters",
        "transparent",
        "freebind",
        "tcp_fast_open_queue_length",
        "socket_options",
        "listener_filters_timeout",
        "traffic_direction",
        "continue_on_listener_filters_timeout",
        "connection_balance_config",  # distributes connections over threads; here one thread accepts
        "access_log",
        "tcp_backlog_size",
        "bind_to_port",
        "deprecated_v1",
        "stat_prefix",
        "enable_reuse_port",
        "ignore_global_conn_limit",  # this proxy has no such limit
        "max_connections_to_accept_per_socket_event",  # the number accepted in one iteration is always bounded
        "bypass_overload_manager",  # this proxy has no overload manager
    )
    required(message, "name")
    if message.connection_balance_config.HasField("extend_balance"):
        raise Unsupported("extensions that balance connections are not supported", "connection_balance_config")
    if not message.filter_chains and not message.HasField("default_filter_chain"):
        raise ConfigError(f"error adding listener '{message.name}': no filter chains specified", "filter_chains")
    parts = parts if parts is not None else Parts()
    noted, asked = surroundings.noted()
    chains = []
    for index, chain in enumerate(message.filter_chains):
        with at("filter_chains", index):
            chains.append(_chain_or_kept(chain, noted, asked, parts))
    default = None
    if message.HasField("default_filter_chain"):
        with at("default_filter_chain"):
            default = _chain_or_kept(message.default_filter_chain, noted, asked, parts)
    matcher = _matcher(message, chains, parts)
    filters = []
    for index, entry in enumerate(message.listener_filters):
        with at("listener_filters", index):
            filters.append(compile_entry(entry, surroundings))
    options = []
    for index, option in enumerate(message.socket_options):
        with at("socket_options", index):
            options.append(_socket_option(option))
    if message.HasField("tcp_fast_open_queue_length"):
        queue = message.tcp_fast_open_queue_length.value
        options.append(model.SocketOption(_IPPROTO_TCP, _TCP_FASTOPEN, queue, "bound"))
    internal = message.HasField("internal_listener")
    reading = (model.ProxyProtocol, model.TlsInspector, model.HttpInspector)
    if internal and any(isinstance(entry.filter, reading) for entry in filters):
        raise Unsupported("an internal listener passes no bytes to listener filters", "listener_filters")
    parts.complete()
    return model.Listener(
        name=message.name,
        metadata=metadata(message.metadata),
        addresses=() if internal else _addresses(message),
        internal=internal,
        chains=tuple(chains),
        default_chain=default,
        matcher=matcher,
        use_original_dst=wrapped(message, "use_original_dst", False),
        transparent=wrapped(message, "transparent", False),
        freebind=wrapped(message, "freebind", False),
        ipv4_compat=message.address.socket_address.ipv4_compat,
        bind_to_port=wrapped(message, "bind_to_port", wrapped(message.deprecated_v1, "bind_to_port", True)),
        reuse_port=wrapped(message, "enable_reuse_port", True),
        backlog=wrapped(message, "tcp_backlog_size", 4096),
        socket_options=tuple(options),
        listener_filters=tuple(filters),
        listener_filters_timeout_s=seconds(message, "listener_filters_timeout", 15.0),
        continue_on_filter_timeout=message.continue_on_listener_filters_timeout,
        access_log=compile_access_logs(message.access_log, surroundings),
        direction=enum_name(message, "traffic_direction").lower(),
        stat_prefix=message.stat_prefix,
        content=_frame_digest(message),
    )


def _frame_digest(message: proto.Listener) -> str:
    """Return a digest of the fields that cannot change in place: all except filter chains and their matcher."""
    frame = proto.Listener()
    for field, value in message.ListFields():
        if field.name in _IN_PLACE:
            continue  # not copied, because chains are nearly all of a big listener
        if field.is_repeated:
            getattr(frame, field.name).MergeFrom(value)
        elif field.message_type is not None:
            getattr(frame, field.name).CopyFrom(value)
        else:
            setattr(frame, field.name, value)
    return digest(frame)


def _addresses(message: proto.Listener) -> tuple[SocketAddress, ...]:
    if not message.HasField("address"):
        raise ConfigError(f"error adding listener named '{message.name}': address is necessary", "address")
    addresses = []
    wanted = [("address", message.address)]
    for index, extra in enumerate(message.additional_addresses):
        if extra.HasField("socket_options"):
            raise Unsupported("per-address socket options are not supported", f"additional_addresses[{index}]")
        wanted.append((f"additional_addresses[{index}].address", extra.address))
    for path, address in wanted:
        with at(path):
            if address.WhichOneof("address") != "socket_address":
                raise Unsupported("listeners bind to IP addresses only")
            with at("socket_address"):
                addresses.append(socket_address(address.socket_address))
    return tuple(addresses)


def _socket_option(option: core.SocketOption) -> model.SocketOption:
    if option.type.HasField("datagram"):
        raise Unsupported("listeners have stream sockets only", "type.datagram")
    enum_name(option, "state")
    if option.WhichOneof("value") is None:
        raise constraint(option, "value", "value is required")
    value: int | bytes = option.buf_value if option.WhichOneof("value") == "buf_value" else option.int_value
    return model.SocketOption(option.level, option.name, value, _STATES[option.state])


def _matcher(message: proto.Listener, chains: Sequence[model.FilterChain], parts: Parts) -> Matcher | None:
    if not message.HasField("filter_chain_matcher"):
        _refuse_overlap(message.name, chains)
        return None
    names: set[str] = set()
    for index, chain in enumerate(chains):
        if not chain.name:
            raise ConfigError(
                "filter chain matcher requires a name for each filter chain", f"filter_chains[{index}]"
            )
        if chain.name in names:
            raise ConfigError(
                f"error adding listener '{message.name}': \"name\" field is not unique: '{chain.name}'",
                f"filter_chains[{index}].name",
            )
        names.add(chain.name)
    with at("filter_chain_matcher"):
        return compile_matcher(message.filter_chain_matcher, parts)


def _refuse_overlap(listener: str, chains: Sequence[model.FilterChain]) -> None:
    seen: dict[tuple[object, ...], int] = {}
    for index, chain in enumerate(chains):
        match = chain.match
        for key in itertools.product(
            (match.destination_port,),
            match.destination or (None,),
            match.server_names or (None,),
            (match.transport_protocol,),
            match.application_protocols or (None,),
            match.direct_source or (None,),
            (match.source_type,),
            match.source or (None,),
            match.source_ports or (None,),
        ):
            if key in seen:
                raise ConfigError(
                    f"error adding listener '{listener}': filter chain '{chain.name}' has the same matching rules "
                    f"defined as '{chains[seen[key]].name}'. multiple filter chains with overlapping matching "
                    "rules are defined",
                    f"filter_chains[{index}].filter_chain_match",
                )
            seen[key] = index


def _chain_or_kept(
    message: proto.FilterChain, noted: Surroundings, asked: Sized, parts: Parts
) -> model.FilterChain:
    packed = message.SerializeToString(deterministic=True)
    content = digest_of(packed)
    chain = parts.chain(content)
    if chain is not None:
        return chain
    key = _named.key(packed, message.name)
    found = None if key is None else _named.get(key)
    renamed = None if found is None else _renamed(found, intern(message.name), content)
    if renamed is not None:
        parts.keep_chain(renamed)
        return renamed
    before = len(asked)
    chain = _chain(message, noted, content)
    if len(asked) == before:  # with other surroundings, equal bytes can have another meaning
        parts.keep_chain(chain)
        if _renamed(chain, chain.name, content) == chain:
            _named.keep_named(key, chain.name, 3, chain)  # the chain's name, its statistics and its cluster
    return chain


_named: Renamed[model.FilterChain] = Renamed()


def _renamed(chain: model.FilterChain, name: str, content: str) -> model.FilterChain | None:
    """Return a copy of a filter chain, with its name replaced by another one everywhere. ``None`` if the chain has
    TLS or no TCP proxy.
    """
    if not isinstance(chain.terminal, model.TcpProxy) or chain.tls is not None:
        return None
    terminal = with_values(chain.terminal, stat_prefix=name, clusters=(WeightedCluster(name, 1),))
    return with_values(chain, name=name, content=content, terminal=terminal)


def _chain(message: proto.FilterChain, surroundings: Surroundings, content: str) -> model.FilterChain:
    only(
        message,
        "filter_chain_match",
        "filters",
        "metadata",
        "transport_socket",
        "name",
        "transport_socket_connect_timeout",
    )
    rbac: list[model.Rbac] = []
    limits: list[model.ConnectionLimit | model.LocalRateLimit] = []
    state: list[model.SetFilterState] = []
    awaited: list[model.DiscoveredChainFilter] = []
    terminal: model.TcpProxy | HttpConnectionManager | None = None
    for index, entry in enumerate(message.filters):
        with at("filters", index):
            if terminal is not None:
                raise ConfigError("a filter follows the terminal filter of its chain")
            if entry.WhichOneof("config_type") == "config_discovery":
                with at("config_discovery"):
                    awaited.append(_discovered(entry, surroundings))
                continue
            if not entry.HasField("typed_config"):
                raise constraint(entry, "config_type", "value is required")
            with at("typed_config"):
                found = compile_filter(unpack(entry.typed_config, entry.name), surroundings)
            match found:
                case model.Rbac():
                    rbac.append(found)
                case model.ConnectionLimit() | model.LocalRateLimit():
                    limits.append(found)
                case model.SetFilterState():
                    state.append(found)
                case _:
                    terminal = found
    match_ = _ANY
    if message.HasField("filter_chain_match"):
        with at("filter_chain_match"):
            match_ = _match(message.filter_chain_match)
    with at("transport_socket"):
        tls = _transport_socket(message, surroundings)
    if terminal is None:
        raise ConfigError(
            "a filter chain needs tcp_proxy or http_connection_manager as its last filter", "filters"
        )
    return model.FilterChain(
        name=intern(message.name),
        match=match_,
        tls=tls,
        rbac=tuple(rbac),
        limits=tuple(limits),
        discovered=tuple(awaited),
        filter_state=tuple(state),
        terminal=terminal,
        content=content,
        metadata=metadata(message.metadata),
        transport_connect_timeout_s=seconds(message, "transport_socket_connect_timeout", 0.0),
    )


def _discovered(entry: proto.Filter, surroundings: Surroundings) -> model.DiscoveredChainFilter:
    found, default = discovered(entry)
    if default is None:
        return model.DiscoveredChainFilter(**found)
    with at("default_config"):
        return model.DiscoveredChainFilter(**found, default=compile_chain_filter(default, surroundings))


def _transport_socket(message: proto.FilterChain, surroundings: Surroundings) -> TlsContext | None:
    if not message.HasField("transport_socket"):
        return None
    socket = message.transport_socket
    if not socket.HasField("typed_config") and socket.name == "envoy.transport_sockets.raw_buffer":
        return None
    with at("typed_config"):
        if socket.typed_config.Is(RawBuffer.DESCRIPTOR):
            return None
        return compile_downstream(unpack_as(socket.typed_config, DownstreamTlsContext, socket.name), surroundings)


def _match(message: proto.FilterChainMatch) -> ChainMatch:
    only(
        message,
        "prefix_ranges",
        "source_prefix_ranges",
        "source_ports",
        "destination_port",
        "transport_protocol",
        "application_protocols",
        "server_names",
        "source_type",
        "direct_source_prefix_ranges",
    )
    port = wrapped(message, "destination_port", None)
    if port is not None and not 1 <= port <= 65535:
        raise constraint(message, "destination_port", "value must be inside range [1, 65535]")
    if any(not 1 <= each <= 65535 for each in message.source_ports):
        raise constraint(message, "source_ports", "value must be inside range [1, 65535]")
    for name in message.server_names:
        if "*" in name.removeprefix("*."):
            raise ConfigError(
                f'error adding listener: partial wildcards are not supported in "server_names": {name}',
                "server_names",
            )
    return ChainMatch(
        destination_port=port,
        destination=_networks(message, "prefix_ranges"),
        server_names=tuple(name.lower() for name in message.server_names),
        transport_protocol=message.transport_protocol,
        application_protocols=tuple(message.application_protocols),
        direct_source=_networks(message, "direct_source_prefix_ranges"),
        source_type=SourceType[enum_name(message, "source_type")],
        source=_networks(message, "source_prefix_ranges"),
        source_ports=tuple(message.source_ports),
    )


def _networks(message: proto.FilterChainMatch, field: str) -> tuple[IpNetwork, ...]:
    networks = []
    for index, cidr in enumerate(getattr(message, field)):
        with at(field, index):
            networks.append(network(cidr))
    return tuple(networks)
