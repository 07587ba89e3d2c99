"""A small certificate authority: one self-signed root, short-lived leaves that name one SPIFFE identity each.

P-256 throughout. The root lives in a directory of its own, the key readable by its owner only; leaves exist in
memory only.
"""

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from xds.model.identity import SpiffeId
from xds.model.secret import Certificate

_ROOT_LIFE = timedelta(days=3650)
#: Leaves begin a little in the past: the clocks of two hosts never agree.
_SKEW = timedelta(minutes=2)


class CaError(Exception):
    """The root cannot be read, is not safe, or does not fit."""


class CertificateAuthority:
    """Signs leaves.

    Attributes:
        root_pem: the root certificate.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, root: x509.Certificate) -> None:
        self._key = key
        self._root = root
        self.root_pem = root.public_bytes(Encoding.PEM)

    @classmethod
    def open(cls, directory: Path, trust_domain: str, now: datetime) -> "CertificateAuthority":
        """The authority of a directory; its root is made when there is none.

        Raises:
            CaError: unreadable, readable by others, expired, or of another trust domain.
        """
        key_file, root_file = directory / "root-key.pem", directory / "root-cert.pem"
        try:
            if not key_file.exists():
                return cls._create(key_file, root_file, trust_domain, now)
            mode = stat.S_IMODE(key_file.stat().st_mode)
            if mode & 0o077:
                raise CaError(
                    f"{key_file} is readable by others (mode {mode:o}): chmod 600 it, or make a new root"
                )
            key = load_pem_private_key(key_file.read_bytes(), None)
            root = x509.load_pem_x509_certificate(root_file.read_bytes())
        except (OSError, ValueError) as error:
            raise CaError(f"cannot use the root in {directory}: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != root.public_key():
            raise CaError(f"{key_file} is not the key of {root_file}")
        if root.not_valid_after_utc <= now:
            raise CaError(
                f"{root_file} expired at {root.not_valid_after_utc:%Y-%m-%d}: remove it to make a new root"
            )
        return cls(key, root)

    @classmethod
    def _create(cls, key_file: Path, root_file: Path, trust_domain: str, now: datetime) -> "CertificateAuthority":
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, trust_domain)])
        subject_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        root = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + _ROOT_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(ca=True), critical=True)
            .add_extension(subject_key, critical=False)
            .sign(key, hashes.SHA256())
        )
        key_file.parent.mkdir(parents=True, exist_ok=True)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        root_file.write_bytes(root.public_bytes(Encoding.PEM))
        return cls(key, root)

    def issue(self, identity: SpiffeId, now: datetime, lifetime: timedelta) -> Certificate:
        """A leaf for an identity: empty subject, one critical URI name, usable at both ends of TLS."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(identity))])
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer = self._root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        leaf = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._root.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + lifetime)
            .add_extension(name, critical=True)
            .add_extension(_usage(ca=False), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Certificate(
            chain_pem=leaf.public_bytes(Encoding.PEM) + self.root_pem,
            key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_encipherment=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def now() -> datetime:
    """The time certificates are dated by."""
    return datetime.now(UTC)
