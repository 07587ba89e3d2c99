"""Judging a peer's certificate beyond its chain, and refusing unusable key material early. Pure."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from xds.errors import ConfigError
from xds.model.secret import Certificate, SanMatch, Secret, Validation
from xds.model.strings import StringMatch

Names = tuple[tuple[str, str], ...]


@lru_cache(maxsize=1024)  # a mesh's workloads come again and again
def subject_alt_names(certificate: x509.Certificate) -> Names:
    """The (type, text) of each subject alternative name; types as in :class:`SanMatch`.

    Raises:
        ValueError: the extension does not parse.
    """
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    names: list[tuple[str, str]] = []
    for name in extension.value:
        match name:
            case x509.UniformResourceIdentifier():
                names.append(("uri", name.value))
            case x509.DNSName():
                names.append(("dns", name.value))
            case x509.IPAddress():
                names.append(("ip", str(name.value)))
            case x509.RFC822Name():
                names.append(("email", name.value))
            case _:
                names.append(("other", ""))
    return tuple(names)


def peer_verifier(validation: Validation) -> Callable[[Sequence[x509.Certificate]], str | None] | None:
    """A hook for the handshake: the reason to refuse a chain (leaf first) that OpenSSL found trusted, or ``None``.

    Returns ``None`` when ``validation`` says nothing beyond trusted roots.
    """
    if not validation.restricts:
        return None
    matches, hashes, spki = validation.san_matches, validation.certificate_hashes, validation.spki_hashes

    def verify(chain: Sequence[x509.Certificate]) -> str | None:
        leaf = chain[0]
        try:
            names = subject_alt_names(leaf)
        except ValueError as error:
            return f"malformed subject alternative name: {error}"
        if matches and not any(san_matches(match, kind, text) for match in matches for kind, text in names):
            shown = ", ".join(text for _, text in names)
            return f"SAN matcher, certificate SANs are [{shown}]"
        if (hashes or spki) and not _pinned(leaf, hashes, spki):
            return "certificate hash or SPKI does not match"
        return None

    return verify


def _pinned(leaf: x509.Certificate, hashes: Sequence[str], spki: Sequence[str]) -> bool:
    der = leaf.public_bytes(Encoding.DER)
    key = leaf.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    by_hash = hashlib.sha256(der).hexdigest() in hashes
    return by_hash or base64.b64encode(hashlib.sha256(key).digest()).decode() in spki


def san_matches(match: SanMatch, kind: str, text: str) -> bool:
    """Whether one name of a certificate satisfies one matcher; a wildcard DNS name stands for one label."""
    if "\x00" in text or match.san_type not in (kind, "any"):
        return False
    if kind == "dns" and text.startswith("*.") and match.match.kind == "exact":
        label, _, rest = match.match.value.partition(".")
        return bool(label) and rest.lower() == text[2:].lower()
    if kind == "dns" and match.match.kind != "regex":
        insensitive = StringMatch(match.match.kind, match.match.value.lower(), ignore_case=True)
        return insensitive.matches(text)
    return match.match.matches(text)


def check_secret(secret: Secret) -> None:
    """Refuse key material that no handshake could use.

    Raises:
        ConfigError: unreadable PEM, a key that is not the certificate's, no certificate at all.
    """
    if isinstance(secret, Certificate):
        _check_certificate(secret)
        return
    if secret.trusted_ca_pem is not None:
        _certificates(secret.trusted_ca_pem, "trusted_ca")
    if secret.crl_pem is not None:
        try:
            x509.load_pem_x509_crl(secret.crl_pem)
        except ValueError as error:
            raise ConfigError(f"not a certificate revocation list in PEM: {error}", "crl") from None


def _check_certificate(secret: Certificate) -> None:
    leaf = _certificates(secret.chain_pem, "certificate_chain")[0]
    try:
        key = load_pem_private_key(secret.key_pem, secret.password)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Never the library's words: they may quote the input.
        raise ConfigError("not a private key in PEM, or the wrong password", "private_key") from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise ConfigError("the private key is not that of the certificate", "private_key")


def _certificates(pem: bytes, field: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"no certificate in PEM: {error}", field) from None


def leaf_of(secret: Certificate) -> x509.Certificate:
    """The certificate itself, without its chain."""
    return x509.load_pem_x509_certificates(secret.chain_pem)[0]
