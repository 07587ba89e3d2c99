"""The settings for DNS look-ups of host names."""

from dataclasses import dataclass

from xds.model.address import SocketAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsResolver:
    """``CaresDnsResolverConfig``, or the host's own resolver settings. The defaults are the host's.

    Attributes:
        servers: name servers. Empty means the servers in ``/etc/resolv.conf``.
        servers_are_fallback: whether to use ``servers`` only if ``/etc/resolv.conf`` has no name server.
        tcp: whether queries are sent over TCP.
        search: whether names are completed by the search list of ``/etc/resolv.conf``.
        query_timeout_s: the time limit of one query. ``None`` means our default.
        tries: the number of queries for one name. ``None`` means our default.
        rotate: use the servers in rotation.
        has_ttls: whether answers include their time to live, which getaddrinfo(3) does not return.
    """

    servers: tuple[SocketAddress, ...] = ()
    servers_are_fallback: bool = False
    tcp: bool = False
    search: bool = True
    query_timeout_s: float | None = None
    tries: int | None = None
    rotate: bool = False
    has_ttls: bool = True


HOSTS_RESOLVER = DnsResolver()
"""The default: look names up like other programs of the host."""
