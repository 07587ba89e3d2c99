"""The names of pyOpenSSL without a promise: each is checked at import, and none is used unchecked."""

import re
from pathlib import Path

from OpenSSL import SSL

import hbone
from hbone.openssl import CONNECTION_NAMES, CONTEXT_NAMES, LIBRARY_NAMES, lib, missing_names

FOLDER = Path(hbone.__file__).parent
SOURCE = "".join(path.read_text() for path in FOLDER.rglob("*.py") if path.name != "openssl.py")


def test_every_name_that_is_used_is_checked() -> None:
    assert set(re.findall(r"\b_lib\.(\w+)", SOURCE)) == set(LIBRARY_NAMES)
    assert set(re.findall(r"\braw\.(_\w+)", SOURCE)) == set(CONTEXT_NAMES)
    assert set(re.findall(r"\b_?connection\.(_\w+)", SOURCE)) == set(CONNECTION_NAMES)


def test_what_is_missing_is_named() -> None:
    context = SSL.Context(SSL.TLS_METHOD)
    assert missing_names(lib, context, SSL.Connection(context)) == []
    assert missing_names(object(), context, object()) == [
        *(f"OpenSSL binding.{name}" for name in LIBRARY_NAMES),
        *(f"SSL.Connection.{name}" for name in CONNECTION_NAMES),
    ]
