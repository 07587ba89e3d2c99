"""The hosts of an ORIGINAL_DST cluster, and the choice of the address that a connection is sent to."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from xds.model.address import SocketAddress
from xds.model.cluster import Cluster, Endpoint
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.upstream.cluster_stats import ClusterStats
from ztunnel.proxy.envoy.upstream.host import Host, HostSet

ORIGINAL_DST_OVERRIDE = "envoy.network.transport_socket.original_dst_address"


class OriginalHosts:
    """The hosts of an ORIGINAL_DST cluster, one for each dialled address."""

    __slots__ = ("_found", "_hosts", "_model", "_stats")

    def __init__(self, model: Cluster, hosts: HostSet, stats: ClusterStats) -> None:
        self._model = model
        self._hosts = hosts
        self._stats = stats
        self._found: dict[str, tuple[Host, float]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Host]:
        """Iterate over a copy of the hosts. Pages are made in steps, and connections add and remove hosts between
        the steps.
        """
        return iter([host for host, _ in self._found.values()])

    def choose(self, info: StreamInfo, now: float) -> Host | None:
        """Return the host for a connection, or None if the connection has no original destination. A new address
        gets a new host.
        """
        address = self.address(info)
        if address is None:
            return None
        key = str(address)
        found = self._found.get(key)
        if found is None:
            endpoint = Endpoint(address=address, hostname=f"{self._model.name}{key}")
            found = (Host(endpoint, added_at=now), now)
            self._hosts.changes += 1
        self._found[key] = (found[0], now)
        return found[0]

    def address(self, info: StreamInfo) -> SocketAddress | None:
        """Return the address that an ORIGINAL_DST cluster sends a connection to, or None.

        The first available source is used: filter state, metadata, request header, restored destination. The port
        can be overridden. A header that is not ``ip:port`` is counted and ignored, like in Envoy.
        """
        config = self._model.original_dst
        assert config is not None
        address = None
        if info.facts.filter_state:
            address = SocketAddress.parse_or_none(info.facts.filter_state.get(ORIGINAL_DST_OVERRIDE))
        if address is None and config.metadata_key is not None:
            address = SocketAddress.parse_or_none(_metadata_text(info, *config.metadata_key))
        if address is None and config.use_http_header:
            for name, value in info.request_headers:
                if name == config.http_header_name:
                    address = SocketAddress.parse_or_none(value)
                    if address is None:
                        self._stats.original_dst_host_invalid.value += 1
                    break
        if address is None and info.restored:
            address = info.facts.destination
        if address is not None and config.port_override:
            address = SocketAddress(address.host, config.port_override)
        return address

    def host_at(self, endpoint: Endpoint, now: float) -> Host:
        """Return the host at an endpoint's address. A new address gets a new host."""
        found, _ = self._found.get(endpoint.key, (None, now))
        if found is None:
            found = Host(replace(endpoint, hostname=f"{self._model.name}{endpoint.key}"), added_at=now)
            self._hosts.changes += 1
        self._found[endpoint.key] = (found, now)
        return found

    def remove_unused(self, now: float) -> None:
        """Remove hosts that were unused for the clean-up interval and have no open connection."""
        before = len(self._found)
        for key, (host, used) in list(self._found.items()):
            if now - used >= self._model.cleanup_interval_s and not host.active:
                del self._found[key]
        self._hosts.changes += len(self._found) < before


def _metadata_text(info: StreamInfo, namespace: str, path: tuple[str, ...]) -> str | None:
    value: object = info.facts.metadata.get(namespace)
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else None
