"""Parsed certificates are those that the handshake showed, and few are kept."""

from __future__ import annotations

from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import crypto

from hbone import parsed_certificates
from hbone.parsed_certificates import parsed
from tests.hbone.certificates import Authority


def test_a_known_certificate_is_not_parsed_again() -> None:
    leaf = crypto.X509.from_cryptography(Authority().issue("spiffe://a/ns/b/sa/c").certificate)
    copy = crypto.X509.from_cryptography(leaf.to_cryptography())
    assert parsed(leaf._x509) is parsed(copy._x509)


def test_certificates_are_told_apart_and_the_oldest_are_dropped() -> None:
    authority = Authority()
    most = parsed_certificates._MOST
    leaves = [authority.issue(f"spiffe://a/ns/b/sa/c{number}").certificate for number in range(2 * most + 1)]
    for _ in range(2):
        for leaf in leaves:
            raw = crypto.X509.from_cryptography(leaf)
            assert parsed(raw._x509).public_bytes(Encoding.DER) == leaf.public_bytes(Encoding.DER)
            assert len(parsed_certificates._parsed) <= most
