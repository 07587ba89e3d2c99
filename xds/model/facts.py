"""Facts about a connection at the time when its filter chain is chosen and its policy is evaluated."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCertificate:
    """The names in the verified leaf certificate of a peer.

    Attributes:
        subject: the subject's name, as OpenSSL writes it in the form of RFC 2253.
    """

    uri_sans: tuple[str, ...] = ()
    dns_sans: tuple[str, ...] = ()
    subject: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names to display for a peer: URI SANs, then DNS SANs, else the subject."""
        return (self.uri_sans + self.dns_sans) or (self.subject,)

    @property
    def principals(self) -> tuple[str, ...]:
        """The names that Envoy's ``principal_name`` is compared with: URI SANs, DNS SANs and the subject."""
        return (*self.uri_sans, *self.dns_sans, self.subject)

    @property
    def identity(self) -> SpiffeId | None:
        """The mesh identity: the first URI SAN that is a valid SPIFFE id."""
        return _identified(self.uri_sans)[0]

    @property
    def principal(self) -> str:
        """The mesh identity in the form of Istio's policies, ``td/ns/N/sa/S``, or the empty string."""
        return _identified(self.uri_sans)[1]


# Cached, because policies read the identity several times per connection, and a few peers open most connections.
@lru_cache(maxsize=16384)
def _identified(uri_sans: tuple[str, ...]) -> tuple[SpiffeId | None, str]:
    for text in uri_sans:
        try:
            identity = SpiffeId.parse(text)
        except ValueError:
            continue
        return identity, text.removeprefix("spiffe://")
    return None, ""


_NO_CERTIFICATE = PeerCertificate()


@dataclass(slots=True, kw_only=True)
class ConnectionFacts:
    """The inputs of matchers and policies. Listener filters and the handshake fill them in.

    Attributes:
        source: the peer, or the source in an accepted PROXY header.
        direct_source: the socket's peer.
        destination: the destination before any interception rewrote it.
        secured: whether the connection passed a TLS handshake with this proxy, with or without a client
            certificate.
        transport_protocol: ``tls`` or ``raw_buffer``. Like in Envoy, it is ``raw_buffer`` until a filter has
            inspected the bytes.
        metadata: dynamic metadata, namespace to struct.
        filter_state: objects by key.
        shared_state: keys of the filter state that an internal connection inherits (``shared_with_upstream``).
            True means that its own upstream inherits the key, too. This is a tuple, because most connections have
            no such keys and should not pay for a dictionary.
    """

    source: SocketAddress
    direct_source: SocketAddress
    destination: SocketAddress
    transport_protocol: str = "raw_buffer"
    server_name: str = ""
    application_protocols: tuple[str, ...] = ()
    peer: PeerCertificate | None = None
    secured: bool = False
    metadata: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    filter_state: dict[str, str] = field(default_factory=dict)
    shared_state: tuple[tuple[str, bool], ...] = ()

    @property
    def certificate(self) -> PeerCertificate | None:
        """The names in the peer's certificate, or no names if the peer presented no certificate. ``None`` without
        a handshake.
        """
        return self.peer if self.peer is not None or not self.secured else _NO_CERTIFICATE
