"""Secrets as SDS delivers them: certificates with keys, and validation contexts. ``repr`` never shows a key."""

from dataclasses import dataclass, field

from xds.model.string_match import StringMatch


@dataclass(frozen=True, slots=True)
class SanMatch:
    """A matcher for subject alternative names of one type: ``uri``, ``dns``, ``ip``, ``email`` or ``other``.

    ``any`` is Envoy's deprecated form without a type.
    """

    san_type: str
    match: StringMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A certificate chain, leaf first, with its private key; both PEM.

    Attributes:
        chain_file, key_file, password_file: the source files, for error messages. Empty means inline.
    """

    chain_pem: bytes
    key_pem: bytes = field(repr=False)
    password: bytes | None = field(default=None, repr=False)
    chain_file: str = field(default="", compare=False, repr=False)
    key_file: str = field(default="", compare=False, repr=False)
    password_file: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A validation context: how to verify a peer's certificate.

    Attributes:
        trusted_ca_pem: trusted roots. ``None`` disables chain verification (like the Envoy of 2022 towards
            servers).
        san_matches: unless empty, at least one of these matchers must match a SAN.
        certificate_hashes: lower-case hex SHA-256 of acceptable leaf certificates (DER).
        spki_hashes: base64 SHA-256 of acceptable public keys (SubjectPublicKeyInfo).
        trusted_ca_file, crl_file: the source files, for error messages. Empty means inline.
    """

    trusted_ca_pem: bytes | None = None
    crl_pem: bytes | None = None
    san_matches: tuple[SanMatch, ...] = ()
    certificate_hashes: tuple[str, ...] = ()
    spki_hashes: tuple[str, ...] = ()
    allow_expired: bool = False
    trusted_ca_file: str = field(default="", compare=False, repr=False)
    crl_file: str = field(default="", compare=False, repr=False)

    @property
    def pins(self) -> bool:
        """Whether the context pins certificates or keys, which identifies a peer even without trusted roots."""
        return bool(self.certificate_hashes or self.spki_hashes)

    @property
    def restricts(self) -> bool:
        """Whether the context constrains the peer's name or key."""
        return self.pins or bool(self.san_matches)

    def merged(self, dynamic: "Validation") -> "Validation":
        """Merge ``dynamic`` (from SDS) into this default for a ``combined_validation_context``. Repeated fields
        are joined.
        """
        return Validation(
            trusted_ca_pem=dynamic.trusted_ca_pem or self.trusted_ca_pem,
            crl_pem=dynamic.crl_pem or self.crl_pem,
            san_matches=self.san_matches + dynamic.san_matches,
            certificate_hashes=self.certificate_hashes + dynamic.certificate_hashes,
            spki_hashes=self.spki_hashes + dynamic.spki_hashes,
            allow_expired=self.allow_expired or dynamic.allow_expired,
            trusted_ca_file=dynamic.trusted_ca_file if dynamic.trusted_ca_pem else self.trusted_ca_file,
            crl_file=dynamic.crl_file if dynamic.crl_pem else self.crl_file,
        )


Secret = Certificate | Validation
