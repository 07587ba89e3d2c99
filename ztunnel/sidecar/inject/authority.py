"""The injector's own CA, in a Secret that all replicas share. It issues their serving certificates.

The first replica that finds no Secret creates the CA. A second one gets 409 and reads the first one's. Each
replica has a serving certificate in files that :class:`ztunnel.sidecar.inject.server.InjectServer` watches. To
replace the CA without failing calls of the API server, write both certificates into ``ca.crt`` of the Secret, the
new one first, and the new key into ``ca.key``. The old certificate can be removed a minute later.
"""

import asyncio
import base64
import binascii
import datetime
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hbone.x509_errors import UNREADABLE
from ztunnel.kube.client import Client
from ztunnel.kube.errors import ApiRefused, KubeError
from ztunnel.kube.kinds import SECRET

log = logging.getLogger(__name__)

_CA_LIFE: Final = datetime.timedelta(days=3650)
_LEAF_LIFE: Final = datetime.timedelta(days=90)
#: Certificates begin earlier than now by this much, because the clocks of API servers can be behind ours.
_BACKDATED: Final = datetime.timedelta(hours=1)
_LOOK_S: Final = 15.0
_RETRY_S: Final = 2.0


class BadAuthority(Exception):
    """A Secret does not contain a CA; the text names the Secret and the faulty key."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA with its key.

    Attributes:
        certificates: PEM: the CA's certificate, then other CA certificates that are still trusted.
        key: PEM.
    """

    certificates: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Leaf:
    """A serving certificate in PEM, and the time to replace it, which is half of its lifetime."""

    certificate: bytes
    key: bytes
    renew: datetime.datetime


def make_authority(now: datetime.datetime) -> Authority:
    """Return a new CA, valid for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ztunnel-py injector")])
    made = (
        _builder(name, name, key, now, _CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(made.public_bytes(serialization.Encoding.PEM), _pem(key))


def issue(authority: Authority, names: Sequence[str], now: datetime.datetime) -> Leaf:
    """Return a serving certificate for DNS names.

    Raises:
        BadAuthority: the CA cannot be read, or the key does not belong to it.
    """
    try:
        ca = x509.load_pem_x509_certificates(authority.certificates)[0]
        ca_key = serialization.load_pem_private_key(authority.key, None)
    except UNREADABLE as error:
        raise BadAuthority(f"ca.crt or ca.key is not PEM that can be read ({error})") from error
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or ca_key.public_key() != ca.public_key():
        raise BadAuthority("ca.key is not the EC key of the first certificate in ca.crt")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    made = (
        _builder(subject, ca.subject, key, now, _LEAF_LIFE)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(ca=False), critical=True)
        # This key identifier lets a verifier with two CAs find the right one during a rotation (RFC 5280,
        # 4.2.1.1).
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return Leaf(made.public_bytes(serialization.Encoding.PEM), _pem(key), now + _LEAF_LIFE / 2)


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """Return the DNS names for the certificate of a service. An API server verifies the first one."""
    short = f"{service}.{namespace}"
    return f"{short}.svc", service, short, f"{short}.svc.cluster.local"


class OwnCertificates:
    """Writes ``tls.crt``, ``tls.key`` and ``ca.crt`` into a folder, and keeps them current.

    Args:
        client: its role needs ``get`` of this Secret, and ``create`` of Secrets in its namespace.
        namespace: the Secret's namespace.
        secret: its name.
        names: DNS names of the serving certificate.
        folder: the folder for the files, which only this process can read.
    """

    def __init__(self, client: Client, namespace: str, secret: str, names: Sequence[str], folder: Path) -> None:
        self._client = client
        self._namespace = namespace
        self._secret = secret
        self._names = names
        self._folder = folder
        self._authority: Authority | None = None
        self._renew = datetime.datetime.min.replace(tzinfo=datetime.UTC)

    async def refresh(self) -> None:
        """Write the files that must change: for a new CA, or when half of the serving certificate's lifetime is
        over.

        Raises:
            BadAuthority, KubeError: the files stay as they are.
        """
        authority = await self._found()
        now = datetime.datetime.now(datetime.UTC)
        if authority == self._authority and now < self._renew:
            return
        leaf = issue(authority, self._names, now)
        # The CA is written first, to shorten the time while an API server has only the old CA for the new
        # certificate.
        self._write("ca.crt", authority.certificates)
        self._write("tls.key", leaf.key)
        self._write("tls.crt", leaf.certificate)
        self._authority, self._renew = authority, leaf.renew

    async def keep(self) -> None:
        """Refresh until cancelled. A failure is logged once, and the last certificate stays in use."""
        said = ""
        while True:
            await asyncio.sleep(_LOOK_S if not said else _RETRY_S)
            try:
                await self.refresh()
                said = ""
            except (BadAuthority, KubeError) as error:
                if str(error) != said:
                    log.error("inject: the own CA: %s; the last certificate stays in use", error)
                said = str(error)

    async def _found(self) -> Authority:
        try:
            return self._read(await self._client.get(SECRET, self._namespace, self._secret))
        except ApiRefused as error:
            if error.status != 404:
                raise
        made = make_authority(datetime.datetime.now(datetime.UTC))
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self._secret, "namespace": self._namespace},
            "type": "Opaque",
            "data": {
                "ca.crt": base64.b64encode(made.certificates).decode(),
                "ca.key": base64.b64encode(made.key).decode(),
            },
        }
        try:
            await self._client.create(SECRET, self._namespace, body)
        except ApiRefused as error:
            if error.status != 409:
                raise
            return self._read(await self._client.get(SECRET, self._namespace, self._secret))
        log.info("inject: made a CA, in Secret %s/%s", self._namespace, self._secret)
        return made

    def _read(self, secret: object) -> Authority:
        data = secret.get("data") if isinstance(secret, dict) else None
        found = []
        for name in ("ca.crt", "ca.key"):
            try:
                found.append(base64.b64decode(data[name], validate=True))  # type: ignore[index]
            except (KeyError, TypeError, binascii.Error, ValueError) as error:
                place = f"Secret {self._namespace}/{self._secret}"
                raise BadAuthority(f"{place} has no readable {name}") from error
        return Authority(*found)

    def _write(self, name: str, data: bytes) -> None:
        fresh = self._folder / f"{name}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        fresh.replace(self._folder / name)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    life: datetime.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + life)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
