"""Decides whether two certificates of this process would accept each other in a handshake. Pure.

A tunnel between two pods of one node can skip TLS and HTTP/2, but only if a TLS handshake would succeed. If not,
the caller connects over the network, where the handshake fails with the right alert and counter. OpenSSL verifies
both certificate chains, as it does in handshakes (:mod:`hbone.verification`). If a rule cannot be checked without
a handshake, this must assume that the handshake would fail.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple
from weakref import WeakKeyDictionary

from cryptography import x509

from hbone.settings import Role
from hbone.tls import uri_sans
from hbone.verification import verified_chain

Chain = Sequence[x509.Certificate]


def none_revoked(chain: Chain) -> bool:
    """Return False: no certificate counts as revoked. Used for credentials without revocation lists."""
    return False


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Credentials:
    """One side's certificate in a handshake, and this side's rules to verify the other side. Create one object per
    certificate and keep it: the results are cached for each pair of objects.

    Attributes:
        chain: this side's certificates, the leaf first.
        anchors: the roots trusted for the other side's chain. ``None``: the other side is not verified.
        is_revoked: returns whether a verified chain (leaf first, root last) contains a revoked certificate.
        names: the URI subject alternative names of the leaf.
    """

    chain: tuple[x509.Certificate, ...]
    anchors: tuple[x509.Certificate, ...] | None
    is_revoked: Callable[[Chain], bool] = none_revoked
    names: tuple[str, ...] = field(init=False)
    # The keys are the other sides' credentials, as weak references. Strong references would keep expired
    # certificates in memory long after they were renewed.
    _verified: "WeakKeyDictionary[Credentials, dict[Role, Verified | str]]" = field(
        init=False, repr=False, default_factory=WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", uri_sans(self.chain[0]) if self.chain else ())

    def verified(self, shown: "Credentials", shown_by: Role, at: datetime | None = None) -> "Verified | str":
        """Verify the other side's chain. Return the verified chain, or why it is refused.

        Args:
            at: if an issuer has several certificates, those valid at this time are preferred. If no chain is valid
                at this time, a chain that is not valid is returned.
        """
        by_role = self._verified.setdefault(shown, {})
        known = by_role.get(shown_by)
        if isinstance(known, str) or (known is not None and (at is None or known.first <= at <= known.last)):
            return known  # verify each pair only once, because each signature takes 0.1 ms
        anchors = self.anchors or ()
        path = None if at is None else verified_chain(shown.chain, anchors, shown_by, at=at)
        if path is None:
            path = verified_chain(shown.chain, anchors, shown_by)
        found: Verified | str
        if path is None:
            found = "is not of a trusted root"
        elif self.is_revoked(path):
            found = "is revoked by the revocation lists"
        else:
            found = Verified(
                path,
                max(certificate.not_valid_before_utc for certificate in path),
                min(certificate.not_valid_after_utc for certificate in path),
            )
        by_role[shown_by] = found
        return found


class Party(NamedTuple):
    """One side of a handshake.

    Attributes:
        credentials: this side's chain, trust anchors and revocation check.
        accepts: returns whether the URI names of the other side's leaf certificate are accepted.
    """

    credentials: Credentials
    accepts: Callable[[tuple[str, ...]], bool]


class Verified(NamedTuple):
    """A chain verified up to a trust anchor, and its period of validity, both limits included."""

    path: Chain
    first: datetime
    last: datetime


def would_shake_hands(client: Party, server: Party, now: datetime) -> bool:
    """Return whether a TLS handshake between two parties would succeed at ``now`` (aware, UTC)."""
    return not disagreement(client, server, now)


def disagreement(client: Party, server: Party, now: datetime) -> str:
    """Return why a TLS handshake between two parties would fail at ``now`` (aware, UTC), or the empty string if it
    would succeed.

    If the server does not verify client certificates, this returns a reason, because its policies could not
    evaluate a client without an identity.
    """
    if server.credentials.anchors is None:
        return "the server verifies no client"
    # A certificate is valid from notBefore through notAfter, inclusive, in whole seconds (RFC 5280, 4.1.2.5).
    # OpenSSL refuses it already during the last second, but this has no effect on when a tunnel ends.
    second = now.replace(microsecond=0)
    refused = _refusal(server, client.credentials, Role.CLIENT, second)
    if refused:
        return f"the client's certificate {refused}"
    refused = _refusal(client, server.credentials, Role.SERVER, second)
    return f"the server's certificate {refused}" if refused else ""


def _refusal(judge: Party, shown: Credentials, shown_by: Role, second: datetime) -> str:
    """Return why the party ``judge`` refuses the other side's certificate, or the empty string if it accepts."""
    if judge.credentials.anchors is None:
        return ""
    found = judge.credentials.verified(shown, shown_by, second)
    if isinstance(found, str):
        return found
    if not found.first <= second <= found.last:
        return "is not valid yet" if second < found.first else "has expired"
    return "" if judge.accepts(shown.names) else "has none of the expected names"
