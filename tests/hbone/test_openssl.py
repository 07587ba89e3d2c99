"""The names of pyOpenSSL without a promise: each is checked at import, and none is used unchecked."""

import re
from pathlib import Path

from OpenSSL import SSL, crypto

import hbone
from hbone.openssl import (
    CERTIFICATE_NAMES,
    CONNECTION_NAMES,
    CONTEXT_NAMES,
    LIBRARY_NAMES,
    STORE_NAMES,
    lib,
    missing_names,
)

FOLDER = Path(hbone.__file__).parent
SOURCE = "".join(path.read_text() for path in FOLDER.rglob("*.py") if path.name != "openssl.py")


def test_every_name_that_is_used_is_checked() -> None:
    assert set(re.findall(r"\b_lib\.(\w+)", SOURCE)) == set(LIBRARY_NAMES)
    assert set(re.findall(r"\braw\.(_\w+)", SOURCE)) == set(CONTEXT_NAMES)
    of_connections = set(re.findall(r"\b_?connection\.(_\w+)", SOURCE)) | set(
        re.findall(r"\bSSL\.Connection\.(_\w+)", SOURCE)
    )
    assert of_connections == set(CONNECTION_NAMES)
    assert set(re.findall(r"\bcrypto\.X509\.(_\w+)", SOURCE)) == set(CERTIFICATE_NAMES)
    assert set(re.findall(r"\bstore\.(_\w+)", SOURCE)) == set(STORE_NAMES)


def test_a_missing_openssl_name_is_reported() -> None:
    context = SSL.Context(SSL.TLS_METHOD)
    assert missing_names(lib, context, SSL.Connection(context), crypto.X509, crypto.X509Store()) == []
    assert missing_names(object(), context, object(), object(), object()) == [
        *(f"OpenSSL binding.{name}" for name in LIBRARY_NAMES),
        *(f"SSL.Connection.{name}" for name in CONNECTION_NAMES),
        *(f"crypto.X509.{name}" for name in CERTIFICATE_NAMES),
        *(f"crypto.X509Store.{name}" for name in STORE_NAMES),
    ]
