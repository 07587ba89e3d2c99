"""Manages the certificates of one TLS context. If there are several, a server chooses one in each handshake.

First, the names in the certificates narrow the choice by Envoy's rules: to certificates whose subject alternative
names include the client's server name (RFC 6066, 3), or else to certificates with a matching wildcard, or else to
the first certificate. Without a server name, all certificates are considered. Then OpenSSL chooses by the client's
signature algorithms among the first certificate of each key type, and prefers the shorter elliptic-curve key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from OpenSSL import SSL

from hbone.x509_errors import UNREADABLE

_MAX_NAMES: Final = 256
"""The largest number of names in all certificates of one context. Each name needs an OpenSSL context of 20 KiB."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate chain, leaf first, and its private key, both in PEM."""

    chain_pem: bytes
    private_key_pem: bytes = field(repr=False)

    @property
    def leaf(self) -> x509.Certificate:
        """The leaf certificate, without its issuers."""
        return x509.load_pem_x509_certificates(self.chain_pem)[0]


def completed(identity: Identity, trusted_pem: bytes | None) -> Identity:
    """Return the identity. If its chain has no issuers, add them from the trusted certificates.

    A peer that trusts only the root needs the intermediates. If they were not added, OpenSSL would search them in
    each handshake, verify the resulting chain, and send the root, too.

    Args:
        identity: the identity, whose chain can be the leaf alone.
        trusted_pem: roots and intermediates, or ``None``.

    Raises:
        ValueError: a PEM cannot be read.
    """
    last, *issuers = x509.load_pem_x509_certificates(identity.chain_pem)
    if issuers or trusted_pem is None:
        return identity
    left = [each for each in x509.load_pem_x509_certificates(trusted_pem) if each.issuer != each.subject]
    chain_pem = identity.chain_pem
    # If there are two certificates for an intermediate's key, the certificate that expires last is the renewed
    # one, and is used.
    left.sort(key=lambda each: each.not_valid_after_utc, reverse=True)
    while issuer := next((each for each in left if _has_issued(each, last)), None):
        left.remove(issuer)
        chain_pem += b"\n" + issuer.public_bytes(Encoding.PEM)
        last = issuer
    return Identity(chain_pem, identity.private_key_pem)


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    if issuer.subject != certificate.issuer:
        return False
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, *UNREADABLE):
        return False
    return True


def load(raw: SSL.Context, identity: Identity) -> None:
    """Make a context present one certificate.

    Raises:
        SSL.Error: OpenSSL refuses the certificate or the key, or the key belongs to another certificate.
        ValueError: a PEM cannot be read.
    """
    leaf, *issuers = x509.load_pem_x509_certificates(identity.chain_pem)
    raw.use_certificate(leaf)
    for issuer in issuers:
        raw.add_extra_chain_cert(issuer)
    _load_key(raw, identity)


def load_each(raw: SSL.Context, identities: Iterable[Identity]) -> None:
    """Make a context present the first certificate of each key type, with its own issuers. Raises the errors of
    :func:`load`.
    """
    seen: set[type] = set()
    for identity in identities:
        kind = type(identity.leaf.public_key())
        if kind not in seen:
            seen.add(kind)
            _load_chain(raw, identity.chain_pem)
            _load_key(raw, identity)


def by_server_name(
    identities: Sequence[Identity], context_of: Callable[[Sequence[Identity]], SSL.Context]
) -> Callable[[SSL.Connection], None]:
    """Return a server's SNI callback, which selects the certificates for the server name that the client requests.

    Args:
        identities: the identities, in order of preference.
        context_of: builds a context that differs only in its certificates.

    Raises:
        ValueError: the certificates have too many names.
    """
    named: dict[str, list[Identity]] = {}
    for identity in identities:
        for name in _dns_names(identity.leaf):
            named.setdefault(name, []).append(identity)
    if len(named) > _MAX_NAMES:
        raise ValueError(
            f"the certificates of one context have {len(named)} DNS names; {_MAX_NAMES} are supported"
        )
    contexts = {name: context_of(those) for name, those in named.items()}
    first = context_of(identities[:1])

    def choose(connection: SSL.Connection) -> None:
        asked = (connection.get_servername() or b"").decode("ascii", "replace").lower()
        if asked:
            connection.set_context(contexts.get(asked) or contexts.get(f"*.{asked.partition('.')[2]}") or first)

    return choose


def _dns_names(leaf: x509.Certificate) -> set[str]:
    """Return a certificate's host names: its DNS names, or, if it has none, the subject's common name."""
    try:
        extension = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = extension.value.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        names = [
            str(attribute.value) for attribute in leaf.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        ]
    return {name.lower() for name in names}


def _load_chain(raw: SSL.Context, pem: bytes) -> None:
    """Load a certificate chain into a context, so that its issuers are sent only with this certificate. pyOpenSSL
    reads chains only from files, so this passes an in-memory file.
    """
    descriptor: Any = os.memfd_create("certificate chain")
    try:
        os.write(descriptor, pem)
        raw.use_certificate_chain_file(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _load_key(raw: SSL.Context, identity: Identity) -> None:
    key: Any = load_pem_private_key(identity.private_key_pem, None)
    raw.use_privatekey(key)
    raw.check_privatekey()
