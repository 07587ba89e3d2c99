"""What is asked of a certificate authority, and what it answers, checked. Pure.

A request is one URI name and nothing else, as Rust ztunnel sends it: istiod reads the identity from the bearer
token or from the request's metadata, other authorities from the name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from hbone.tls import uri_sans
from xds.model.identity import SpiffeId


class IdentityError(Exception):
    """No certificate can be had; the text is what access logs print after ``identity error:``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCertificate:
    """What a CA answered, checked: leaf first, roots apart. ``key_pem`` never leaves memory."""

    identity: SpiffeId
    chain: tuple[x509.Certificate, ...]
    roots: tuple[x509.Certificate, ...]
    chain_pem: bytes
    roots_pem: bytes
    key_pem: bytes = field(repr=False)

    @property
    def not_before(self) -> datetime:
        """Of the leaf."""
        return self.chain[0].not_valid_before_utc

    @property
    def not_after(self) -> datetime:
        """Of the leaf."""
        return self.chain[0].not_valid_after_utc


def signing_request(identity: SpiffeId, key: EllipticCurvePrivateKey) -> bytes:
    """The request for a certificate, in PEM: empty subject, one critical URI name."""
    name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(identity))])
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.add_extension(name, critical=True).sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def issued_certificate(
    identity: SpiffeId, key: EllipticCurvePrivateKey, answer: Sequence[str], *, exact: bool
) -> IssuedCertificate:
    """Read the answer to :func:`signing_request`.

    Args:
        identity: what was asked for.
        key: what the request was signed with.
        answer: leaf, intermediates one by one, last the roots in one text, each in PEM.
        exact: the leaf must name ``identity``. Otherwise it may name another one: an authority that is not asked
            to impersonate certifies whom the token belongs to.

    Raises:
        IdentityError: nothing usable, another key, or another identity.
    """
    if not answer:
        raise IdentityError(f"chain returned from CA is empty for: {identity}")
    if len(answer) == 1:
        raise IdentityError(f"no root certificate present in the chain returned from CA for: {identity}")
    chain = tuple(
        certificate
        for index, text in enumerate(answer[:-1])
        for certificate in _certificates(text, identity, index)
    )
    roots = tuple(_certificates(answer[-1], identity, len(answer) - 1))
    leaf = chain[0]
    if leaf.public_key() != key.public_key():
        raise IdentityError(f"the certificate returned from CA is for another key than was sent for: {identity}")
    names = uri_sans(leaf)
    if exact and (not names or names[0] != str(identity)):
        raise IdentityError(f"did not find expected SAN: {identity}")
    if not exact:
        identity = _first_identity(names, identity)
    return IssuedCertificate(
        identity=identity,
        chain=chain,
        roots=roots,
        chain_pem=b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain),
        roots_pem=b"".join(root.public_bytes(Encoding.PEM) for root in roots),
        key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def _first_identity(names: Sequence[str], wanted: SpiffeId) -> SpiffeId:
    for name in names:
        try:
            return SpiffeId.parse(name)
        except ValueError:
            continue
    raise IdentityError(f"the certificate returned from CA names no workload; asked for: {wanted}")


def _certificates(pem: str, identity: SpiffeId, index: int) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError as error:
        raise IdentityError(f"certificate {index} returned from CA for {identity} is not PEM: {error}") from error
