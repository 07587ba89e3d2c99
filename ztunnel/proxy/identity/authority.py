"""A small certificate authority: one self-signed root, and short-lived leaves that name one SPIFFE identity each.

All keys are on the curve P-256. The root is stored in its own directory, with a key that only its owner can read.
Leaves exist in memory only.
"""

import ipaddress
import os
import secrets
import stat
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hbone.x509_errors import UNREADABLE
from xds.model.identity import SpiffeId
from xds.model.secret import Certificate
from ztunnel.runtime.settings import plain_reason

_ROOT_LIFE = timedelta(days=3650)
#: Certificates begin this much before now, because the clocks of two hosts can differ.
_SKEW = timedelta(minutes=2)
_SECRET_BYTES = 32


class CaError(Exception):
    """The root certificate is unreadable, readable by others or expired, or its key does not match."""


class CertificateAuthority:
    """Signs leaf certificates with its root's key.

    Attributes:
        root_pem: the root certificate.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, root: x509.Certificate) -> None:
        self._key = key
        self._root = root
        self.root_pem = root.public_bytes(Encoding.PEM)

    @classmethod
    def open(cls, directory: Path, trust_domain: str, now: datetime) -> "CertificateAuthority":
        """Return the authority whose root is in a directory. A root is created if there is none.

        Raises:
            CaError: the root is unreadable, readable by others or expired, or its key does not match.
        """
        key_file, root_file = directory / "root-key.pem", directory / "root-cert.pem"
        try:
            if not key_file.exists():
                return cls._create(key_file, root_file, trust_domain, now)
            _refuse_exposed(key_file)
            key = load_pem_private_key(key_file.read_bytes(), None)
            if isinstance(key, ec.EllipticCurvePrivateKey) and not root_file.exists():
                # There is no root: a person removed it, or an earlier process ended before writing it.
                return cls._with_root(key, root_file, trust_domain, now)
            root = x509.load_pem_x509_certificate(root_file.read_bytes())
        except OSError as error:
            raise CaError(f"cannot use the root: {plain_reason(error)}") from error
        except UNREADABLE as error:
            raise CaError(f"cannot use the root in {directory}: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != root.public_key():
            raise CaError(f"{key_file} is not the key of {root_file}")
        if root.not_valid_after_utc <= now:
            raise CaError(
                f"{root_file} expired at {root.not_valid_after_utc:%Y-%m-%d}: remove it to make a new root"
            )
        return cls(key, root)

    @classmethod
    def in_memory(cls, trust_domain: str, now: datetime) -> "CertificateAuthority":
        """Return an authority with a new root, which is not stored."""
        return cls._self_signed(ec.generate_private_key(ec.SECP256R1()), trust_domain, now)

    @classmethod
    def _self_signed(
        cls, key: ec.EllipticCurvePrivateKey, trust_domain: str, now: datetime
    ) -> "CertificateAuthority":
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
        return cls(key, root)

    @classmethod
    def _create(cls, key_file: Path, root_file: Path, trust_domain: str, now: datetime) -> "CertificateAuthority":
        key = ec.generate_private_key(ec.SECP256R1())
        key_file.parent.mkdir(parents=True, exist_ok=True)
        _write_new(key_file, _key_pem(key), 0o600)
        return cls._with_root(key, root_file, trust_domain, now)

    @classmethod
    def _with_root(
        cls, key: ec.EllipticCurvePrivateKey, root_file: Path, trust_domain: str, now: datetime
    ) -> "CertificateAuthority":
        authority = cls._self_signed(key, trust_domain, now)
        root_file.unlink(missing_ok=True)
        _write_new(root_file, authority.root_pem, 0o644)
        return authority

    def issue(self, identity: SpiffeId, now: datetime, lifetime: timedelta) -> Certificate:
        """Make a key and a leaf for an identity, and return both."""
        key = ec.generate_private_key(ec.SECP256R1())
        return self._with_key(key, self.certify(key.public_key(), identity, now, lifetime))

    def issue_for_hosts(self, hosts: Iterable[str], now: datetime, lifetime: timedelta) -> Certificate:
        """Make a key and a leaf for a server with these names and addresses, and return both."""
        key = ec.generate_private_key(ec.SECP256R1())
        return self._with_key(
            key, self._leaf(key.public_key(), [_host_name(host) for host in hosts], now, lifetime)
        )

    def certify(
        self,
        key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
        identity: SpiffeId,
        now: datetime,
        lifetime: timedelta,
    ) -> x509.Certificate:
        """Return a leaf for a given key. It is valid for both ends of TLS, with an empty subject and one critical
        URI name.
        """
        return self._leaf(key, [x509.UniformResourceIdentifier(str(identity))], now, lifetime)

    def _with_key(self, key: ec.EllipticCurvePrivateKey, leaf: x509.Certificate) -> Certificate:
        return Certificate(
            chain_pem=leaf.public_bytes(Encoding.PEM) + self.root_pem,
            key_pem=_key_pem(key),
        )

    def _leaf(
        self,
        key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
        names: Iterable[x509.GeneralName],
        now: datetime,
        lifetime: timedelta,
    ) -> x509.Certificate:
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer = self._root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._root.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + lifetime)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(_usage(ca=False), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def token_secret(directory: Path) -> bytes:
    """Return the key that signs tokens of nodes. It is created in the directory if there is none.

    Raises:
        CaError: the key is unreadable, readable by others, or of the wrong length.
    """
    path = directory / "token-key"
    try:
        if not path.exists():
            _write_new(path, secrets.token_bytes(_SECRET_BYTES), 0o600)
        _refuse_exposed(path)
        secret = path.read_bytes()
    except OSError as error:
        raise CaError(f"cannot use the key of tokens: {plain_reason(error)}") from error
    if len(secret) != _SECRET_BYTES:
        raise CaError(f"{path} is not {_SECRET_BYTES} bytes long: remove it for a new one (ends all tokens)")
    return secret


def _refuse_exposed(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise CaError(
            f"{path} is readable by others (mode {mode:o}): chmod 600 it, or remove it to make a new one"
        )


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Create a file completely or not at all, because an incomplete file would make every later start fail.

    Raises:
        FileExistsError: another process has created it.
        OSError: it cannot be written.
    """
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.unlink(missing_ok=True)  # an earlier process with this number was killed
    descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(making, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            making.rename(path)
    finally:
        making.unlink(missing_ok=True)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


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
    """Return the current time in UTC, for the validity of certificates."""
    return datetime.now(UTC)
