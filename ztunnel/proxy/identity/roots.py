"""Reads files of root certificates as OpenSSL does, one certificate at a time. Pure.

An unreadable certificate is omitted, which reduces trust, and is reported by name. All other certificates are
used. A block with the label ``TRUSTED CERTIFICATE`` (``openssl x509 -addtrust``) has a list of uses after the
certificate: its root counts if it is trusted for TLS servers or clients, and none of its uses is rejected.
"""

import base64
import binascii
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.utils import CryptographyDeprecationWarning

from hbone.x509_errors import UNREADABLE

_BEGIN: Final = re.compile(rb"-----BEGIN (X509 |TRUSTED |)CERTIFICATE-----")
_BLOCK: Final = re.compile(
    rb"-----BEGIN (X509 |TRUSTED |)CERTIFICATE-----(.*?)-----END \1CERTIFICATE-----", re.DOTALL
)
#: The uses that make a root trusted for TLS, in DER: serverAuth, clientAuth, anyExtendedKeyUsage.
_USES: Final = (
    b"\x06\x08+\x06\x01\x05\x05\x07\x03\x01",
    b"\x06\x08+\x06\x01\x05\x05\x07\x03\x02",
    b"\x06\x04U\x1d%\x00",
)
_SEQUENCE, _REJECTED = 0x30, 0xA0


class _Unusable(Exception):
    """A certificate in the file is not used; the text is the reason."""


@dataclass(frozen=True, slots=True)
class RootFile:
    """The content of a root certificate file.

    Attributes:
        certificates: the usable certificates, in the file's order.
        faults: why other certificates are unusable. Each names the certificate's number in the file, from 1.
        plain: whether every certificate is usable and has the usual label, so that other programs can also read
            the file.
    """

    certificates: tuple[x509.Certificate, ...]
    faults: tuple[str, ...]
    plain: bool

    @property
    def pem(self) -> bytes:
        """The usable certificates in PEM."""
        return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in self.certificates)


def read_roots(pem: bytes) -> RootFile:
    """Read the certificates of a text in PEM. Other blocks, and text between blocks, are skipped."""
    found, faults = [], []
    plain = True
    for number, (label, content) in enumerate(_blocks(pem), start=1):
        plain = plain and not label
        try:
            if content is None:
                raise _Unusable("its END line is missing")
            try:
                der = base64.b64decode(b"".join(content.split()), validate=True)
            except binascii.Error:
                raise _Unusable("it is not base64") from None
            found.append(_certificate(der, trusted=label == b"TRUSTED "))
        except _Unusable as error:
            faults.append(f"certificate {number} is left out: {error}")
    return RootFile(tuple(found), tuple(faults), plain and not faults)


def _blocks(pem: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield each block's label and content. The content is None if the block has no end."""
    at = 0
    while begin := _BEGIN.search(pem, at):
        block = _BLOCK.match(pem, begin.start())
        if block is None or _BEGIN.search(block[2]):
            yield begin[1], None
            at = begin.end()
        else:
            yield block[1], block[2]
            at = block.end()


def _certificate(der: bytes, *, trusted: bool) -> x509.Certificate:
    if trusted:
        end = _end(der, 0)
        der, uses = der[:end], der[end:]
        _check_uses(uses)
    with warnings.catch_warnings():
        # A root with a serial number that is not positive is still trusted. If a later release of the library
        # refuses such numbers, only this root is lost.
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)
        try:
            return x509.load_der_x509_certificate(der)
        except UNREADABLE:
            raise _Unusable("it cannot be read") from None


def _check_uses(uses: bytes) -> None:
    """Refuse a root that is not trusted for TLS, or is rejected for any use (OpenSSL's X509_CERT_AUX: the trusted
    uses, then the rejected uses as [0]).
    """
    if not uses:
        return
    if uses[0] != _SEQUENCE or _end(uses, 0) != len(uses):
        raise _Unusable("its uses cannot be read")
    at = _start(uses, 0)
    trusted = b""
    if at < len(uses) and uses[at] == _SEQUENCE:
        trusted, at = uses[_start(uses, at) : _end(uses, at)], _end(uses, at)
        if not any(use in trusted for use in _USES):
            raise _Unusable("it is not trusted for TLS")
    if at < len(uses) and uses[at] == _REJECTED:
        raise _Unusable("it is rejected for a use")


def _start(der: bytes, at: int) -> int:
    """Return the index where the content of a DER element begins."""
    if at + 2 > len(der):
        raise _Unusable("it is cut off")
    return at + 2 + (der[at + 1] & 0x7F if der[at + 1] & 0x80 else 0)


def _end(der: bytes, at: int) -> int:
    """Return the index after the end of a DER element."""
    start = _start(der, at)
    length = der[at + 1]
    if length & 0x80:
        length = int.from_bytes(der[at + 2 : start])
    if start + length > len(der):
        raise _Unusable("it is cut off")
    return start + length
