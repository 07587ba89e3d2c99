"""Certificate values as access logs print them. They are read only when a line is written, because most formats
use no such values.
"""

from collections.abc import Callable, Sequence
from datetime import UTC
from functools import lru_cache
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA1, SHA256, HashAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from ztunnel.proxy.envoy.secrets.names import issuer_of, subject_of
from ztunnel.proxy.envoy.secrets.verify import subject_alt_names

Chain = Sequence[x509.Certificate]
ChainReader = Callable[[Chain], str | None]


def names(kind: str) -> ChainReader:
    """Return a reader of the leaf's subject alternative names of a kind (``uri``, ``dns``, ``ip``, ``email``)."""

    def read(chain: Chain) -> str | None:
        try:
            found = subject_alt_names(chain[0])
        except ValueError:
            return None
        return ",".join([text for each, text in found if each == kind]) or None

    return read


def subject(chain: Chain) -> str | None:
    """Return the leaf's subject (RFC 2253)."""
    return subject_of(chain[0]) or None


def issuer(chain: Chain) -> str | None:
    """Return the leaf's issuer (RFC 2253)."""
    return issuer_of(chain[0]) or None


def serials(chain: Chain) -> str:
    """Return every certificate's serial number, in hexadecimal."""
    return ",".join([f"{each.serial_number:x}" for each in chain])


def fingerprints(algorithm: HashAlgorithm) -> ChainReader:
    """Return a reader of every certificate's fingerprint."""
    return lambda chain: ",".join([each.fingerprint(algorithm).hex() for each in chain])


def leaf(read: ChainReader) -> ChainReader:
    """Turn a reader of a certificate chain into a reader of the leaf alone."""
    return lambda chain: read(chain[:1])


@lru_cache(maxsize=64)
def _quoted(certificate: x509.Certificate) -> str:
    return quote(certificate.public_bytes(Encoding.PEM).decode(), safe="")


def pem(chain: Chain) -> str:
    """Return the leaf's PEM, percent-encoded."""
    return _quoted(chain[0])


def start_s(chain: Chain) -> float:
    """Return the start of the leaf's validity."""
    return chain[0].not_valid_before_utc.astimezone(UTC).timestamp()


def end_s(chain: Chain) -> float:
    """Return the time until which the leaf is valid."""
    return chain[0].not_valid_after_utc.astimezone(UTC).timestamp()


#: The readers of certificate values, by the suffix of the command operator (``..._URI_SAN``). Peer certificates
#: have operators with all of these suffixes.
VALUES: dict[str, ChainReader] = {
    "URI_SAN": names("uri"),
    "DNS_SAN": names("dns"),
    "IP_SAN": names("ip"),
    "EMAIL_SAN": names("email"),
    "OTHERNAME_SAN": names("othername"),
    "SUBJECT": subject,
    "ISSUER": issuer,
    "SERIAL": leaf(serials),
    "FINGERPRINT_1": leaf(fingerprints(SHA1())),
    "FINGERPRINT_256": leaf(fingerprints(SHA256())),
    "CHAIN_SERIALS": serials,
    "CHAIN_FINGERPRINTS_1": fingerprints(SHA1()),
    "CHAIN_FINGERPRINTS_256": fingerprints(SHA256()),
    "CERT": pem,
}
