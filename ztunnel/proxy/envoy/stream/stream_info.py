"""The facts about one hop of a connection, from accept to its log line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from cryptography import x509

from hbone.tls import PeerFacts
from xds.model.address import InternalAddress, SocketAddress
from xds.model.cluster import Endpoint
from xds.model.facts import ConnectionFacts
from xds.model.http import HttpConnectionManager
from xds.model.metadata import NO_METADATA, Metadata
from xds.model.secret import Certificate
from ztunnel.proxy.dataplane.reasons import Reason


class Flag(StrEnum):
    """Envoy's response flags, in the order that logs use."""

    NO_HEALTHY_UPSTREAM = "UH"
    UPSTREAM_CONNECT_FAILURE = "UF"
    UPSTREAM_OVERFLOW = "UO"
    NO_ROUTE = "NR"
    UPSTREAM_RETRY_EXHAUSTED = "URX"
    NO_CLUSTER = "NC"
    DURATION_TIMEOUT = "DT"
    DOWNSTREAM_TERMINATED = "DC"
    LOCAL_RESET = "LR"
    UPSTREAM_RESET = "UR"
    UPSTREAM_TERMINATED = "UC"
    UPSTREAM_TIMEOUT = "UT"
    STREAM_IDLE = "SI"
    DOWNSTREAM_RESET = "DR"
    EXTERNAL_AUTH = "UAEX"
    DOWNSTREAM_PROTOCOL_ERROR = "DPE"
    UPSTREAM_PROTOCOL_ERROR = "UPE"
    OVERLOAD = "OM"


#: The long names of response flags, for RESPONSE_FLAGS_LONG (see Envoy's documentation of access logs).
LONG_NAMES: dict[Flag, str] = {
    Flag.NO_HEALTHY_UPSTREAM: "NoHealthyUpstream",
    Flag.UPSTREAM_CONNECT_FAILURE: "UpstreamConnectionFailure",
    Flag.UPSTREAM_OVERFLOW: "UpstreamOverflow",
    Flag.NO_ROUTE: "NoRouteFound",
    Flag.UPSTREAM_RETRY_EXHAUSTED: "UpstreamRetryLimitExceeded",
    Flag.NO_CLUSTER: "NoClusterFound",
    Flag.DURATION_TIMEOUT: "DurationTimeout",
    Flag.DOWNSTREAM_TERMINATED: "DownstreamConnectionTermination",
    Flag.LOCAL_RESET: "LocalReset",
    Flag.UPSTREAM_RESET: "UpstreamRemoteReset",
    Flag.UPSTREAM_TERMINATED: "UpstreamConnectionTermination",
    Flag.UPSTREAM_TIMEOUT: "UpstreamRequestTimeout",
    Flag.STREAM_IDLE: "StreamIdleTimeout",
    Flag.DOWNSTREAM_RESET: "DownstreamRemoteReset",
    Flag.EXTERNAL_AUTH: "UnauthorizedExternalService",
    Flag.DOWNSTREAM_PROTOCOL_ERROR: "DownstreamProtocolError",
    Flag.UPSTREAM_PROTOCOL_ERROR: "UpstreamProtocolError",
    Flag.OVERLOAD: "OverloadManagerTerminated",
}


class UpstreamOptions(NamedTuple):
    """Options of a connection's upstream sockets: those set by ``original_src``, and a PROXY header.

    Only connections with equal options share pooled connections. This is a tuple for speed, because the options
    are created and hashed for every connection.

    Attributes:
        source: the address to connect from. ``None``: any.
        mark: the socket's mark.
        first_bytes: bytes to send before all others, even before the TLS handshake.
    """

    source: str | None = None
    mark: int = 0
    first_bytes: bytes = b""


_NO_OPTIONS = UpstreamOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFacts:
    """The facts about a finished TLS handshake, for access logs."""

    version: str = ""
    cipher: str = ""
    peer_subject: str = ""
    peer_chain: tuple[x509.Certificate, ...] = ()
    local: Certificate | None = None
    peer_uri_sans: tuple[str, ...] = ()
    peer_dns_sans: tuple[str, ...] = ()
    local_uri_sans: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class StreamInfo:
    """The facts about one hop of a connection. A hop behind an internal listener has its own object, but no bytes
    are copied between the two hops.

    Attributes:
        facts: addresses, metadata and identity, as matchers and policies see them.
        restored: whether the destination is the original destination, not just the socket's local address.
        started: the start in monotonic seconds; ``started_at`` is the same time by the wall clock.
        upstream_tls: the facts proven by the upstream's handshake, where we present ``upstream_certificate``.
        request_headers: the headers that the client sent. For all headers, see
            :mod:`ztunnel.proxy.envoy.stream.request_headers`.
        manager: the connection manager that received the request.
        subset: the metadata that a host of ``cluster`` must have to be chosen.
        stream_id: created when a log needs it.
        direct_local: the accepted socket's local address, or the internal address; never a restored address.
        endpoint: the host of the last attempt. Hosts of earlier attempts are in ``failed``.
        upstream_cluster: the cluster's alternative name, or its name. Empty if the cluster does not exist.
        upstream_sni: the server name that our handshake sent.
        upstream_own_uri_sans: identities that we present to the upstream.
        tunnel_authority: the authority of our CONNECT.
        tunnelled: whether the TCP proxy opens a tunnel.
        trace: the ``traceparent`` of the tunnel's request, the client's or ours. Empty without a ``traceparent``.
        behind: the last attempt's next hop: behind an internal listener, or a node-local tunnel's inbound half.
        failure: why the hop failed; ``policy`` names the policy that denied it.
        connected: whether the last attempt succeeded.
        ready_s: the time from ``started`` until the last attempt succeeded or failed. None without an attempt.
        bytes_received: bytes from downstream. ``bytes_sent``: bytes to downstream.
    """

    connection_id: int
    facts: ConnectionFacts
    started: float
    started_at: float
    listener: str = ""
    restored: bool = False
    remote_text: str = ""
    options: UpstreamOptions = _NO_OPTIONS
    chain: str = ""
    route: str = ""
    tls: TlsFacts | None = None
    protocol: str = ""
    method: str = ""
    authority: str = ""
    path: str = ""
    request_headers: tuple[tuple[str, str], ...] = ()
    manager: HttpConnectionManager | None = None
    response_headers: tuple[tuple[str, str], ...] = ()
    response_code: int = 0
    response_details: str = ""
    flags: set[Flag] = field(default_factory=set)
    termination_details: str = ""
    upstream_failure: str = ""
    downstream_failure: str = ""
    cluster: str = ""
    upstream_cluster: str = ""
    subset: Mapping[str, object] = NO_METADATA
    cluster_metadata: Metadata = NO_METADATA
    upstream_host: str = ""
    upstream_local: str = ""
    upstream_metadata: Metadata = NO_METADATA
    upstream_uri_sans: tuple[str, ...] = ()
    upstream_tls: PeerFacts | None = None
    upstream_certificate: Certificate | None = None
    stream_id: str = ""
    attempts: int = 0
    direct_local: SocketAddress | InternalAddress | None = None
    endpoint: Endpoint | None = None
    failed: tuple[Endpoint, ...] = ()
    upstream_sni: str = ""
    upstream_own_uri_sans: tuple[str, ...] = ()
    tunnel_authority: str = ""
    tunnelled: bool = False
    trace: str = ""
    behind: "StreamInfo | None" = None
    failure: Reason | None = None
    policy: str = ""
    ready_s: float | None = None
    connected: bool = False
    listener_metadata: Metadata = NO_METADATA
    chain_metadata: Metadata = NO_METADATA
    route_metadata: Metadata = NO_METADATA
    virtual_host_metadata: Metadata = NO_METADATA
    held: tuple[Callable[[], None], ...] = ()
    """Functions to call at the end of the hop, after which it no longer counts towards connection limits."""
    bytes_received: int = 0
    bytes_sent: int = 0
    duration_s: float | None = None

    @property
    def source(self) -> SocketAddress:
        """The address of the downstream peer."""
        return self.facts.source

    @property
    def destination(self) -> SocketAddress:
        """The downstream local address: the destination that the client addressed."""
        return self.facts.destination

    @property
    def downstream_remote(self) -> str:
        """The downstream peer as logs print it. Behind an internal listener, the text is not an address."""
        return self.remote_text or str(self.facts.source)

    def long_flags_text(self) -> str:
        """The response flags in the form of :meth:`flags_text`, but with long names."""
        if not self.flags:
            return "-"
        return ",".join([LONG_NAMES[flag] for flag in Flag if flag in self.flags])

    def flags_text(self) -> str:
        """The response flags, joined by commas in a fixed order. ``-`` if there are none."""
        if not self.flags:
            return "-"
        return ",".join(flag for flag in Flag if flag in self.flags)
