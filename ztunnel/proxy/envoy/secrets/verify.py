"""Verifies a peer's certificate beyond its chain, and refuses unusable key material early. Pure."""

import base64
import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from hbone.x509_errors import UNREADABLE
from xds.errors import ConfigError
from xds.model.secret import Certificate, SanMatch, Secret, Validation
from xds.model.string_match import ascii_lower
from ztunnel.proxy.identity.roots import read_roots

log = logging.getLogger(__name__)

_CRL = re.compile(b"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----\\n?", re.DOTALL)
Names = tuple[tuple[str, str], ...]


@lru_cache(maxsize=1024)  # the same workloads connect repeatedly
def subject_alt_names(certificate: x509.Certificate) -> Names:
    """Return (type, text) of each subject alternative name; types as in :class:`SanMatch`.

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
    """Return the check that a handshake makes of the peer's chain (leaf first): a reason to refuse it, or
    ``None``.

    Returns ``None`` instead of a check if ``validation`` requires only trusted roots.
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
    """Return whether a certificate's name satisfies a matcher. ``*`` in a DNS name matches one label."""
    if "\x00" in text or match.san_type not in (kind, "any"):
        return False
    if kind == "dns" and text.startswith("*.") and match.match.kind == "exact":
        label, _, rest = match.match.value.partition(".")
        return bool(label) and ascii_lower(rest) == ascii_lower(text[2:])
    if kind == "dns" and match.match.kind == "exact":
        return ascii_lower(match.match.value) == ascii_lower(text)
    return match.match.matches(text)


def check_secret(secret: Secret) -> None:
    """Refuse certificates and keys that no handshake could use.

    Raises:
        ConfigError: the PEM is unreadable, the key does not match the certificate, or there is no certificate. The
            error names the field, and the file if there is one.
    """
    if isinstance(secret, Certificate):
        _check_certificate(secret)
        return
    if secret.trusted_ca_pem is not None:
        with_usable_roots(secret)
    if secret.crl_pem is not None:
        _check_crl(secret.crl_pem, secret.crl_file)


def with_usable_roots(validation: Validation) -> Validation:
    """Return a validation without its unusable roots. Each unusable root is logged once.

    This is safe, because fewer roots accept fewer peers. Envoy refuses all roots if one root is unreadable.

    Raises:
        ConfigError: no root is left.
    """
    pem, file = validation.trusted_ca_pem, validation.trusted_ca_file
    if pem is None:
        return validation
    usable = _usable_roots(pem, file)
    if not usable:
        raise _unusable("no certificate in PEM", "trusted_ca", file)
    return validation if usable == pem else replace(validation, trusted_ca_pem=usable)


@lru_cache(maxsize=256)  # each renewed certificate builds contexts again, but a fault is logged once
def _usable_roots(pem: bytes, file: str) -> bytes:
    found = read_roots(pem)
    for fault in found.faults:
        log.warning("trusted_ca%s: %s", f" {file}" if file else "", fault)
    return pem if found.plain and found.certificates else found.pem


def _check_crl(pem: bytes, file: str) -> None:
    blocks = _CRL.findall(pem)
    if len(blocks) != pem.count(b"-----BEGIN X509 CRL-----"):
        raise _unusable("a certificate revocation list in PEM does not end", "crl", file)
    if not blocks:
        raise _unusable("no certificate revocation list in PEM", "crl", file)
    for block in blocks:
        try:
            x509.load_pem_x509_crl(block)
        except UNREADABLE as error:
            raise _unusable(f"not a certificate revocation list in PEM: {error}", "crl", file) from None


def _check_certificate(secret: Certificate) -> None:
    leaf = _certificates(secret.chain_pem, "certificate_chain", secret.chain_file)[0]
    try:
        key = load_pem_private_key(secret.key_pem, secret.password)
    except UNREADABLE:
        # The library's error text is not used, because it can quote the input, which is a private key.
        reason = "not a private key in PEM, or the wrong password"
        raise _unusable(reason, "private_key", secret.key_file) from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    try:
        of_leaf = leaf.public_key().public_bytes(*form)
    except UNREADABLE as error:
        raise _unusable(f"unusable public key: {error}", "certificate_chain", secret.chain_file) from None
    if key.public_key().public_bytes(*form) != of_leaf:
        raise _unusable("the private key is not that of the certificate", "private_key", secret.key_file)


def _certificates(pem: bytes, field: str, file: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except UNREADABLE:
        raise _unusable("no certificate in PEM", field, file) from None


def _unusable(reason: str, field: str, file: str) -> ConfigError:
    return ConfigError(f"{file}: {reason}" if file else reason, field)


def unlocked(certificate: Certificate) -> Certificate:
    """Return a certificate with a decrypted key, or the same certificate if its key is not encrypted."""
    if certificate.password is None:
        return certificate
    key = load_pem_private_key(certificate.key_pem, certificate.password)
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return replace(certificate, key_pem=plain, password=None)


def leaf_of(secret: Certificate) -> x509.Certificate:
    """Return the leaf certificate, without the rest of its chain."""
    return x509.load_pem_x509_certificates(secret.chain_pem)[0]
