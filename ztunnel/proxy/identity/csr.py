"""Creates certificate signing requests, and checks the authority's answers. Pure.

A request contains one URI name and no subject, like the Rust ztunnel's. istiod takes the identity from the bearer
token or the request's metadata; other authorities take it from the URI name.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from hbone.settings import Role
from hbone.tls import uri_sans
from hbone.verification import accepted_until, verified_chain
from hbone.x509_errors import UNREADABLE
from xds.model.identity import SpiffeId
from ztunnel.proxy.identity.roots import read_roots

log = logging.getLogger(__name__)


class IdentityError(Exception):
    """No certificate is available. Access logs print this error's text after ``identity error:``."""


class AuthorityUnreachable(IdentityError):
    """The authority could not be reached, or did not answer. For a refusal or an unusable answer, another
    :class:`IdentityError` is raised.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCertificate:
    """A checked answer of an authority: the certificate chain, leaf first, and the roots. The key (``key_pem``)
    stays in memory.
    """

    identity: SpiffeId
    chain: tuple[x509.Certificate, ...]
    roots: tuple[x509.Certificate, ...]
    chain_pem: bytes
    roots_pem: bytes
    key_pem: bytes = field(repr=False)

    @property
    def not_before(self) -> datetime:
        """The beginning of the leaf's validity."""
        return self.chain[0].not_valid_before_utc

    @property
    def not_after(self) -> datetime:
        """The end of the chain's validity: peers refuse it when the leaf or an issuer's certificate has expired.
        If another certificate ends before the leaf, each read verifies the chain.
        """
        return accepted_until(self.chain, self.roots)


def signing_request(identity: SpiffeId, key: EllipticCurvePrivateKey) -> bytes:
    """Return the request for a certificate in PEM, with an empty subject and one critical URI name."""
    name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(identity))])
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.add_extension(name, critical=True).sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def issued_certificate(
    identity: SpiffeId, key: EllipticCurvePrivateKey, answer: Sequence[str], *, exact: bool
) -> IssuedCertificate:
    """Check the answer to :func:`signing_request`.

    Args:
        identity: the requested identity.
        key: the key that signed the request.
        answer: certificates in PEM: the leaf, then the intermediates one by one, then all roots in one text.
        exact: whether the leaf must name ``identity``. If not, it can have another name: without impersonation,
            the authority certifies the token's identity.

    Raises:
        IdentityError: the answer is unusable. It is not PEM, has another key or identity or several names, or its
            chain does not lead to its roots, so that no peer would accept it.
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
    roots = _roots(answer[-1], identity, len(answer) - 1)
    leaf = chain[0]
    if leaf.public_key() != key.public_key():
        raise IdentityError(f"the certificate returned from CA is for another key than was sent for: {identity}")
    names = uri_sans(leaf)
    if exact and str(identity) not in names:
        raise IdentityError(f"did not find expected SAN: {identity}")
    if not exact:
        identity = _only_identity(names, identity)
    if len(names) != 1:
        raise IdentityError(f"the certificate returned from CA for {identity} has {len(names)} URI names, not one")
    if verified_chain(chain, roots, Role.SERVER) is None or verified_chain(chain, roots, Role.CLIENT) is None:
        raise IdentityError(f"the chain returned from CA for {identity} does not lead to its roots")
    return IssuedCertificate(
        identity=identity,
        chain=chain,
        roots=roots,
        chain_pem=b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain),
        roots_pem=b"".join(root.public_bytes(Encoding.PEM) for root in roots),
        key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def _only_identity(names: Sequence[str], wanted: SpiffeId) -> SpiffeId:
    for name in names:
        try:
            return SpiffeId.parse(name)
        except ValueError:
            continue
    raise IdentityError(f"the certificate returned from CA names no workload; asked for: {wanted}")


def _roots(pem: str, identity: SpiffeId, index: int) -> tuple[x509.Certificate, ...]:
    found = read_roots(pem.encode())
    for fault in found.faults:
        log.warning("root of the CA for %s: %s", identity, fault)
    if not found.certificates:
        raise IdentityError(f"certificate {index} returned from CA for {identity} has no usable root")
    return found.certificates


def _certificates(pem: str, identity: SpiffeId, index: int) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except UNREADABLE as error:
        raise IdentityError(f"certificate {index} returned from CA for {identity} is not PEM: {error}") from error
