"""Builds the identity checks that handshakes run after verifying a peer's chain. Pure.

A leaf must have exactly one URI name (X509-SVID, 2). With two, the handshake could check one name while policies
and logs use the other. Expected names that are not workload identities are ignored.
"""

from collections.abc import Callable, Iterable, Sequence

from cryptography import x509

from hbone.errors import TlsReason
from hbone.tls import uri_sans
from hbone.tls_context import Refusal, Verify
from xds.model.identity import SpiffeId
from ztunnel.proxy.identity.crl import RevocationLists

_REFUSED = "identity verification error: peer did not present the expected"


def identities_of(names: Iterable[str]) -> tuple[SpiffeId, ...]:
    """Return the workload identities among a leaf certificate's URI names.

    Policies and logs use the first, which :class:`~xds.model.facts.PeerCertificate` has.
    """
    found = []
    for name in names:
        try:
            found.append(SpiffeId.parse(name))
        except ValueError:
            continue
    return tuple(found)


def is_of_trust_domain(trust_domain: str) -> Callable[[Sequence[str]], bool]:
    """Return a check that a leaf's only URI name is an identity in exactly this trust domain."""

    def accepts(names: Sequence[str]) -> bool:
        found = identities_of(names)
        return len(names) == len(found) == 1 and found[0].trust_domain == trust_domain

    return accepts


def is_one_of(identities: Sequence[str]) -> Callable[[Sequence[str]], bool]:
    """Return a check that a leaf's only URI name is one of these identities. Without identities it always
    fails.
    """
    expected = frozenset(identities)

    def accepts(names: Sequence[str]) -> bool:
        found = identities_of(names)
        return len(names) == len(found) == 1 and str(found[0]) in expected

    return accepts


def of_trust_domain(trust_domain: str) -> Verify:
    """Return a server's check that the peer has an identity in exactly this trust domain."""

    def verify(chain: Sequence[x509.Certificate]) -> str | None:
        return foreign(trust_domain, uri_sans(chain[0]))

    return verify


def foreign(trust_domain: str, names: Sequence[str]) -> str | None:
    """Return why a server of this trust domain refuses a leaf with these URI names, or ``None``."""
    if is_of_trust_domain(trust_domain)(names):
        return None
    return f"{_REFUSED} trustdomain ({trust_domain}), got {_listed(names)}"


def one_of(identities: Sequence[str]) -> Verify:
    """Return a client's check that the peer has one of these identities. Without identities, every peer is
    refused.
    """
    accepts = is_one_of(identities)

    def verify(chain: Sequence[x509.Certificate]) -> str | None:
        names = uri_sans(chain[0])
        if accepts(names):
            return None
        return f"{_REFUSED} SAN ({','.join(identities)}), got {_listed(names)}"

    return verify


def none_revoked(lists: RevocationLists, verify: Verify) -> Verify:
    """Return a check that refuses chains with a revoked certificate, and passes all others to ``verify``."""

    def verify_both(chain: Sequence[x509.Certificate]) -> str | Refusal | None:
        if lists.is_revoked(chain):
            return Refusal(TlsReason.REVOKED, "certificate revoked by a revocation list")
        return verify(chain)

    return verify_both


def _listed(names: Sequence[str]) -> str:
    if len(names) > 1:
        return f"{len(names)} URI names, where one is allowed"
    return ",".join(map(str, identities_of(names))) or "none"
