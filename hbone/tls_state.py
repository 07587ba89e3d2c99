"""Defines the serializable state of a TLS 1.3 connection after its handshake. :mod:`hbone.tls_records` resumes
from this state.
"""

from __future__ import annotations

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from hbone.tls import PeerFacts


class KeyState(msgspec.Struct, frozen=True, kw_only=True):
    """The keys for one direction of a connection: the current traffic secret, and the number of the
    next record.
    """

    secret: bytes
    number: int

    def __repr__(self) -> str:
        return f"KeyState(number={self.number})"


class FactsState(msgspec.Struct, frozen=True, kw_only=True):
    """The :class:`hbone.tls.PeerFacts` of a connection in serializable form, with certificates in DER."""

    certificate: bytes | None = None
    chain: tuple[bytes, ...] = ()
    uri_sans: tuple[str, ...] = ()
    version: str = ""
    cipher: str = ""
    group: str | None = None
    alpn: bytes | None = None
    presented: bytes | None = None


class RecordState(msgspec.Struct, frozen=True, kw_only=True):
    """A connection of TLS 1.3 after its handshake.

    Attributes:
        suite: the cipher suite's name, as in :data:`SUITES`.
        sending: the keys of our direction.
        receiving: the keys of the peer's direction.
        partial: the received bytes of an incomplete record.
        message: the received part of a handshake message that spans several records.
        control: records that wait to be sent: alerts, key updates.
        peer_closed: whether the peer has sent close_notify.
        closed: whether we have sent close_notify.
        facts: the result of the handshake, such as the peer's identity.
    """

    suite: str
    sending: KeyState
    receiving: KeyState
    facts: FactsState
    partial: bytes = b""
    message: bytes = b""
    control: bytes = b""
    peer_closed: bool = False
    closed: bool = False


def facts_state(facts: PeerFacts) -> FactsState:
    """Return peer facts in serializable form, certificates in DER."""
    return FactsState(
        certificate=_der(facts.certificate),
        chain=tuple(certificate.public_bytes(Encoding.DER) for certificate in facts.chain),
        uri_sans=facts.uri_sans,
        version=facts.version,
        cipher=facts.cipher,
        group=facts.group,
        alpn=facts.alpn,
        presented=_der(facts.presented),
    )


def facts_of(state: FactsState) -> PeerFacts:
    """Restore the peer facts from a state.

    Raises:
        ValueError: a certificate cannot be parsed.
    """
    chain = tuple(x509.load_der_x509_certificate(each) for each in state.chain)
    leaf = chain[0] if chain and state.chain[0] == state.certificate else _certificate(state.certificate)
    return PeerFacts(
        certificate=leaf,
        chain=chain,
        uri_sans=state.uri_sans,
        version=state.version,
        cipher=state.cipher,
        group=state.group,
        alpn=state.alpn,
        presented=_certificate(state.presented),
    )


def _der(certificate: x509.Certificate | None) -> bytes | None:
    return None if certificate is None else certificate.public_bytes(Encoding.DER)


def _certificate(der: bytes | None) -> x509.Certificate | None:
    return None if der is None else x509.load_der_x509_certificate(der)
