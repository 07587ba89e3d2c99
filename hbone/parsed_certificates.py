"""Caches parsed peer certificates for later handshakes with the same certificates.

A peer presents the same chain in each handshake, and peers share their issuers. Encoding and parsing a certificate
takes seven times as long as its digest. Only a few certificates are kept, because each takes some 10 KiB.
"""

from typing import Any, Final

from cryptography import x509
from OpenSSL import crypto

from hbone.openssl import ffi as _ffi
from hbone.openssl import lib as _lib

_MOST: Final = 32
_DIGEST_BYTES: Final = 32
_SHA256: Final = _lib.EVP_get_digestbyname(b"sha256")
_parsed: Final[dict[bytes, x509.Certificate]] = {}


def parsed(raw: Any) -> x509.Certificate:
    """Return the certificate at an ``X509 *`` that OpenSSL owns.

    Raises:
        UNREADABLE: see :mod:`hbone.x509_errors`.
    """
    # Each call has its own buffer, because other threads can run handshakes at the same time.
    octets = _ffi.new("unsigned char[]", _DIGEST_BYTES)
    if _lib.X509_digest(raw, _SHA256, octets, _ffi.NULL) != 1:
        _lib.ERR_clear_error()
        return _parse(raw)
    digest: bytes = _ffi.buffer(octets)[:]
    known = _parsed.get(digest)
    if known is None:
        known = _parse(raw)
        if len(_parsed) >= _MOST:
            _parsed.pop(next(iter(_parsed)), None)
        _parsed[digest] = known
    return known


def _parse(raw: Any) -> x509.Certificate:
    _lib.X509_up_ref(raw)
    return crypto.X509._from_raw_x509_ptr(raw).to_cryptography()
