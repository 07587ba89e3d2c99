"""Whether a chain of certificates leads to a root. Pure."""

from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Return whether the issuer's name and key are those that a certificate was signed with."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def leads_to(chain: Sequence[x509.Certificate], roots: Sequence[x509.Certificate]) -> bool:
    """Return whether the first certificate of a chain was issued, directly or not, by one of the roots.

    The others of the chain may be in any order, as OpenSSL takes them; each is used once.
    """
    if not chain:
        return False
    leaf, *left = chain
    while True:
        if any(leaf == root or is_issued_by(leaf, root) for root in roots):
            return True
        issuer = next((each for each in left if is_issued_by(leaf, each)), None)
        if issuer is None:
            return False
        left.remove(issuer)
        leaf = issuer
