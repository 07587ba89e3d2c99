"""Small certificate authorities for tests: elliptic keys, SPIFFE leaves, revocation lists."""

from __future__ import annotations

import base64
import copy
import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Leaf:
    chain_pem: bytes
    key_pem: bytes
    certificate: x509.Certificate


class Authority:
    """A self-signed root, or an intermediate of one."""

    def __init__(self, name: str = "root", parent: Authority | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.parent = parent
        self.certificate = self._certificate(to_day=10)

    def _certificate(self, to_day: float) -> x509.Certificate:
        issuer = self if self.parent is None else self.parent
        builder = _builder(self.name, issuer.name, self.key, -1, to_day)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        return builder.sign(issuer.key, hashes.SHA256())

    def reissued(self, to_day: float) -> Authority:
        """Return the same authority with another certificate of its key."""
        other = copy.copy(self)
        other.certificate = self._certificate(to_day)
        return other

    def signed_by(self, parent: Authority) -> Authority:
        """Return the same authority with a certificate of another authority for its key."""
        other = copy.copy(self)
        other.parent = parent
        return other.reissued(to_day=10)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def issue(
        self,
        *uris: str,
        from_day: float = -1,
        to_day: float = 1,
        intermediates: bool = True,
        dns: Sequence[str] = (),
        rsa_key: bool = False,
    ) -> Leaf:
        key: Key = ec.generate_private_key(ec.SECP256R1())
        if rsa_key:
            key = rsa.generate_private_key(65537, 2048)
        builder = _builder(x509.Name([]), self.name, key, from_day, to_day)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [x509.DNSName(name) for name in dns]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        certificate = builder.sign(self.key, hashes.SHA256())
        chain = certificate.public_bytes(Encoding.PEM)
        if self.parent is not None and intermediates:
            chain += self.pem
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Leaf(chain, private, certificate)

    def revoke(self, *certificates: x509.Certificate, expired: bool = False) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.name)
        builder = builder.last_update(now - 2 * _DAY).next_update(now - _DAY if expired else now + _DAY)
        for certificate in certificates:
            revoked = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number)
            builder = builder.add_revoked_certificate(revoked.revocation_date(now - _DAY).build())
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Key, from_day: float, to_day: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now + from_day * _DAY).not_valid_after(now + to_day * _DAY)


def of_unknown_version(pem: bytes) -> bytes:
    """Return a certificate, signing request or revocation list with a version that no standard defines."""
    _, begin, content, end, _ = pem.strip().split(b"-----")
    der = base64.b64decode(content)
    at = re.search(rb"\x02\x01[\x00-\x02]", der)  # the first small integer
    assert at is not None
    changed = der[: at.end() - 1] + b"\x07" + der[at.end() :]
    return b"-----%s-----\n%s-----%s-----\n" % (begin, base64.encodebytes(changed), end)
