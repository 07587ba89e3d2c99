"""The errors that ``cryptography`` raises for unreadable certificates, keys, requests and revocation lists."""

from __future__ import annotations

from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""To be caught around every parsing, and around ``extensions``, which are parsed later: bad PEM and DER are
ValueErrors, and so are some other faults. An unknown version, an algorithm, or an extension that stands twice, in
input that is well-formed otherwise, are not.
"""
