"""Checks, by OpenSSL, whether a TLS handshake would accept a certificate chain, without a handshake.

The checks are the same as in the handshakes of :mod:`hbone.tls_context`: basic constraints, key usage, extended
key usage, path length and name constraints (RFC 5280, 6.1). A trusted intermediate can be the anchor. Validity
periods are left to the caller, which checks them repeatedly, unless it passes a time.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from OpenSSL import crypto

from hbone.openssl import lib as _lib
from hbone.settings import Role
from hbone.x509_errors import UNREADABLE

_NO_CHECK_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of openssl/x509_vfy.h
#: The minimum security strength, in bits, at OpenSSL's security level 2, which handshakes use.
_RSA_BITS, _EC_BITS, _DIGEST_BYTES = 2048, 224, 28


def verified_chain(
    chain: Sequence[x509.Certificate],
    anchors: Sequence[x509.Certificate],
    shown_by: Role,
    *,
    at: datetime | None = None,
) -> tuple[x509.Certificate, ...] | None:
    """Return the verified chain, leaf first and anchor last, or ``None`` if a handshake would refuse the chain.

    Args:
        chain: the presented chain: the leaf first, then other certificates in any order.
        anchors: the trust anchors, roots or intermediates.
        shown_by: the side that presents the chain. The leaf must be valid for this side's purpose (client or
            server).
        at: the time of the handshake, in UTC. None: periods of validity are not checked.
    """
    if not chain or not anchors:
        return None
    store = crypto.X509Store()
    for anchor in anchors:
        store.add_cert(crypto.X509.from_cryptography(anchor))
    store.set_flags(crypto.X509StoreFlags.PARTIAL_CHAIN | (_NO_CHECK_TIME if at is None else 0))
    if at is not None:
        store.set_time(at)
    client = shown_by is Role.CLIENT
    _lib.X509_STORE_set_purpose(
        store._store, _lib.X509_PURPOSE_SSL_CLIENT if client else _lib.X509_PURPOSE_SSL_SERVER
    )
    leaf, *others = (crypto.X509.from_cryptography(each) for each in chain)
    try:
        found = crypto.X509StoreContext(store, leaf, others).get_verified_chain()
        path = tuple(each.to_cryptography() for each in found)
        return path if all(map(_is_strong, path)) and all(map(_is_strongly_signed, path[:-1])) else None
    except (crypto.X509StoreContextError, *UNREADABLE):
        return None


def accepted_until(chain: Sequence[x509.Certificate], anchors: Sequence[x509.Certificate]) -> datetime:
    """Return when handshakes begin to refuse a server's chain. This is the end of the leaf's validity, or the end
    of an issuer's certificate that ends sooner, unless another certificate of the same issuer replaces it.

    The arguments are as for :func:`verified_chain`.
    """
    leaf_ends = chain[0].not_valid_after_utc
    ends = {certificate.not_valid_after_utc for certificate in (*chain, *anchors)}
    if leaf_ends == min(ends):
        return leaf_ends
    for end in sorted(ends, reverse=True):
        # OpenSSL refuses a certificate already at the second of its end.
        if end <= leaf_ends and verified_chain(chain, anchors, Role.SERVER, at=end - timedelta(seconds=1)):
            return end
    return min(ends)


def _is_strong(certificate: x509.Certificate) -> bool:
    key = certificate.public_key()
    if isinstance(key, rsa.RSAPublicKey):
        return key.key_size >= _RSA_BITS
    return not isinstance(key, ec.EllipticCurvePublicKey) or key.key_size >= _EC_BITS


def _is_strongly_signed(certificate: x509.Certificate) -> bool:
    digest = certificate.signature_hash_algorithm  # None: the algorithm has its own digest, such as Ed25519
    return digest is None or digest.digest_size >= _DIGEST_BYTES
