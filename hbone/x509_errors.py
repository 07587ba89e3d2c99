"""Lists the errors that ``cryptography`` raises for unreadable certificates, keys, requests and
revocation lists.
"""

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
"""The errors to catch around all parsing, and around uses of ``extensions``, which are parsed only then. Bad PEM
and DER raise ValueError, and so do some other faults. Otherwise well-formed input with an unknown version or
algorithm, or with an extension that occurs twice, raises other errors.
"""
