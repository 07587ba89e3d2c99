"""What is known about a connection when a filter chain is chosen and when a policy is judged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xds.model.address import SocketAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCertificate:
    """Names in the verified leaf certificate of a peer."""

    uri_sans: tuple[str, ...] = ()
    dns_sans: tuple[str, ...] = ()
    subject: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names an identity is looked up in: URI SANs, then DNS SANs, else the subject."""
        return (self.uri_sans + self.dns_sans) or (self.subject,)


@dataclass(slots=True, kw_only=True)
class ConnectionFacts:
    """Inputs of matchers and policies. Filled in as listener filters and the handshake find out.

    Attributes:
        source: the peer, after a PROXY header if one was believed.
        direct_source: the socket's peer.
        destination: where the connection was going, before any interception rewrote it.
        transport_protocol: ``tls`` or ``raw_buffer``; empty when nothing looked.
        metadata: dynamic metadata, namespace to struct.
        filter_state: objects by key.
    """

    source: SocketAddress
    direct_source: SocketAddress
    destination: SocketAddress
    transport_protocol: str = ""
    server_name: str = ""
    application_protocols: tuple[str, ...] = ()
    peer: PeerCertificate | None = None
    metadata: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    filter_state: dict[str, str] = field(default_factory=dict)
