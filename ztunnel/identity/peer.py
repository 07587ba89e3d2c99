"""Makes the checks of a peer's identity that handshakes run after verifying its chain. Pure.

URI names that are no workload identity are ignored, both expected and presented ones. A leaf with several
identities has each of them.
"""

from collections.abc import Callable, Iterable, Sequence

from cryptography import x509

from hbone.errors import TlsReason
from hbone.tls import uri_sans
from hbone.tls_context import Refusal, Verify
from xds.model.identity import SpiffeId
from ztunnel.identity.crl import RevocationLists

_REFUSED = "identity verification error: peer did not present the expected"


def identities_of(names: Iterable[str]) -> tuple[SpiffeId, ...]:
    """Return the workload identities among a leaf's URI names; the first is the peer's in policies and logs."""
    found = []
    for name in names:
        try:
            found.append(SpiffeId.parse(name))
        except ValueError:
            continue
    return tuple(found)


def is_of_trust_domain(trust_domain: str) -> Callable[[Iterable[str]], bool]:
    """Return a check whether one of a leaf's URI names is an identity of exactly this trust domain."""

    def accepts(names: Iterable[str]) -> bool:
        return any(identity.trust_domain == trust_domain for identity in identities_of(names))

    return accepts


def is_one_of(identities: Sequence[str]) -> Callable[[Iterable[str]], bool]:
    """Return a check whether one of a leaf's URI names is one of these identities; without any it always fails."""
    expected = frozenset(identities)

    def accepts(names: Iterable[str]) -> bool:
        return any(str(identity) in expected for identity in identities_of(names))

    return accepts


def of_trust_domain(trust_domain: str) -> Verify:
    """Return a server's check: the peer has an identity of exactly this trust domain."""
    accepts = is_of_trust_domain(trust_domain)

    def verify(chain: Sequence[x509.Certificate]) -> str | None:
        names = uri_sans(chain[0])
        if accepts(names):
            return None
        return f"{_REFUSED} trustdomain ({trust_domain}), got {_listed(identities_of(names))}"

    return verify


def one_of(identities: Sequence[str]) -> Verify:
    """Return a client's check: the peer has one of these identities; without any, every peer is refused."""
    accepts = is_one_of(identities)

    def verify(chain: Sequence[x509.Certificate]) -> str | None:
        names = uri_sans(chain[0])
        if accepts(names):
            return None
        return f"{_REFUSED} SAN ({','.join(identities)}), got {_listed(identities_of(names))}"

    return verify


def none_revoked(lists: RevocationLists, verify: Verify) -> Verify:
    """Return a check that refuses chains with a revoked certificate and leaves others to ``verify``."""

    def verify_both(chain: Sequence[x509.Certificate]) -> str | Refusal | None:
        if lists.is_revoked(chain):
            return Refusal(TlsReason.REVOKED, "certificate revoked by a revocation list")
        return verify(chain)

    return verify_both


def _listed(identities: Iterable[SpiffeId]) -> str:
    return ",".join(str(identity) for identity in identities) or "none"
