"""TLS contexts of listeners and clusters, which refer to secrets by name."""

from dataclasses import dataclass
from enum import IntEnum

from xds.model.secret import Certificate, Validation


class TlsVersion(IntEnum):
    """The TLS protocol versions that this proxy supports, in order."""

    TLS12 = 12
    TLS13 = 13


@dataclass(frozen=True, slots=True)
class AdsSource:
    """Resources are received on the process's aggregated stream (ADS)."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """Resources come from a watched file."""

    path: str
    watched_directory: str = ""


@dataclass(frozen=True, slots=True)
class GrpcSource:
    """Resources are received on a separate stream to ``cluster``. ``delta`` selects the incremental protocol."""

    cluster: str
    delta: bool = False


ConfigSource = AdsSource | FileSource | GrpcSource


@dataclass(frozen=True, slots=True)
class SecretRef:
    """A secret's name, its source, and the longest time to wait in seconds. 0 means no limit."""

    name: str
    source: ConfigSource
    initial_fetch_timeout_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsContext:
    """The parameters of TLS handshakes. Secrets can be inline, or references to be resolved.

    Attributes:
        certificate: our certificate, inline or by reference; ``None`` presents none (clients only).
        further_certificates: a server's other certificates. The server chooses by the client's server name and by
            the algorithms that the client can verify. All are inline, or all are references, like the first.
        validation: the inline part of the peer's verification.
        validation_ref: the part from SDS, merged over ``validation``.
        require_peer_certificate: refuse a peer without a certificate. On servers, SAN matchers and pins imply it,
            like in Envoy.
        sni: the server name that a client sends. Empty sends none (HBONE).
    """

    certificate: Certificate | SecretRef | None
    further_certificates: tuple[Certificate | SecretRef, ...] = ()
    validation: Validation | None = None
    validation_ref: SecretRef | None = None
    alpn: tuple[str, ...] = ()
    min_version: TlsVersion = TlsVersion.TLS12
    max_version: TlsVersion = TlsVersion.TLS13
    cipher_suites: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()
    require_peer_certificate: bool = False
    sni: str = ""
    key_log_path: str = ""

    @property
    def secret_refs(self) -> tuple[SecretRef, ...]:
        candidates = (self.certificate, *self.further_certificates, self.validation_ref)
        return tuple(ref for ref in candidates if isinstance(ref, SecretRef))
