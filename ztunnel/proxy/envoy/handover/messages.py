"""The messages that a process sends to offer its connections to another process, in Envoy's dialect; see
:mod:`ztunnel.proxy.dataplane.handover.messages`. Pure.

Messages refer to configuration by name: listeners, filter chains, clusters and hosts. The taker looks the names up
in its own configuration, and declines units with unknown names.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, TypeAlias

from msgspec import Struct

from hbone.tls_state import FactsState
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from ztunnel.proxy.dataplane.handover import messages
from ztunnel.proxy.envoy.stream.stream_info import UpstreamOptions

AddressValue: TypeAlias = tuple[str, ...]
"""A serialized endpoint address: its kind, then its parts."""
Plain: TypeAlias = dict[str, dict[str, Any]]
"""Metadata in plain dictionaries."""


class Kind(StrEnum):
    """The kind of a hop: an accepted connection, a request, or a hop within the process."""

    CONNECTION = "connection"  # accepted by a listener
    INNER = "inner"  # behind an internal listener
    JOINED = "joined"  # the inbound half of a tunnel within the node
    REQUEST = "request"  # of an accepted tunnel connection


class TlsValue(Struct, frozen=True, kw_only=True):
    """A serialized :class:`~ztunnel.proxy.envoy.stream.stream_info.TlsFacts`: the peer's certificates in DER, ours
    in PEM.
    """

    version: str
    cipher: str
    peer_subject: str
    peer_chain: tuple[bytes, ...]
    local_pem: bytes | None
    peer_uri_sans: tuple[str, ...]
    peer_dns_sans: tuple[str, ...]
    local_uri_sans: tuple[str, ...]


class InfoValue(Struct, frozen=True, kw_only=True):
    """A serialized :class:`~ztunnel.proxy.envoy.stream.stream_info.StreamInfo`, without byte counts and
    configuration.

    Attributes:
        age_s: the time since the hop's start.
        texts: the non-empty text attributes of the hop.
        endpoint: the last attempt's host address.
        failed: the host addresses of earlier attempts.
        upstream_pem: the certificate that we present to the host, without its key.
    """

    age_s: float
    started_at: float
    facts: ConnectionFacts
    texts: dict[str, str]
    options: UpstreamOptions
    restored: bool
    attempts: int
    connected: bool
    response_code: int
    ready_s: float | None
    flags: tuple[str, ...]
    request_headers: tuple[tuple[str, str], ...]
    response_headers: tuple[tuple[str, str], ...]
    direct_local: AddressValue | None
    endpoint: AddressValue | None
    failed: tuple[AddressValue, ...]
    tls: TlsValue | None
    upstream_tls: FactsState | None
    upstream_uri_sans: tuple[str, ...]
    upstream_own_uri_sans: tuple[str, ...]
    tunnelled: bool
    failure: str
    upstream_pem: bytes | None
    upstream_metadata: Plain
    route_metadata: Plain
    virtual_host_metadata: Plain


class HopValue(Struct, frozen=True, kw_only=True):
    """A serialized :class:`~ztunnel.proxy.envoy.listeners.connections.LiveHop`.

    Attributes:
        pod: for an accepted connection, its pod's address.
        application: the application named by a tunnel's request.
    """

    kind: Kind
    info: InfoValue
    pod: str = ""
    application: SocketAddress | None = None


class DialledValue(Struct, frozen=True, kw_only=True, tag="dialled"):
    """A serialized tunnel connection that was dialled for a cluster's pool.

    Attributes:
        address, options: the address and the socket options in the connection's pool key.
        idle_s: the seconds since the connection's last tunnel ended.
        age_s: the seconds since the connection's first SYN.
    """

    cluster: str
    address: SocketAddress
    options: UpstreamOptions
    idle_s: float
    age_s: float


class AcceptedValue(Struct, frozen=True, kw_only=True, tag="accepted"):
    """A serialized tunnel connection that a listener has accepted."""

    hop: HopValue


class Offer(messages.Offer, frozen=True, kw_only=True, tag=True):
    """The offer of one unit. Its connections move together: a tunnel connection with its relays, or a relay
    without a tunnel.

    Attributes:
        carrier: the unit's tunnel connection, if it has one.
        relays: the hops of each relay, the outermost first.
    """

    carrier: DialledValue | AcceptedValue | None
    relays: tuple[tuple[HopValue, ...], ...]


from_giver: Final = messages.reader_of(Offer)
