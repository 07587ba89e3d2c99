"""Leaves out modules that libraries import and a proxy never uses: about 6 MiB in an Istio mesh.

``asyncio`` and ``uvloop`` import ``ssl``, and ``hashlib`` imports ``_hashlib``. Both load the interpreter's
OpenSSL, although a proxy does all TLS with the OpenSSL in ``cryptography``. protobuf's descriptor pool imports the
message classes in pure Python, although the compiled ones are used. ``prometheus_client`` imports HTTP servers and
clients for functions that send and serve metrics.

While such a library is imported, placeholders stand for those modules. Afterwards ``import ssl`` returns the real
module again, but asyncio refuses TLS in this process.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any, Final, NoReturn

#: The command-line argument for a worker whose main process leaves the modules out.
WITHOUT_SSL: Final = "without-ssl"
_ERRORS: Final = ("SSLError", "SSLWantReadError", "SSLSyscallError", "SSLZeroReturnError", "CertificateError")
_CONSTANTS: Final = {"SSL_ERROR_WANT_READ": 2, "SSL_ERROR_WANT_WRITE": 3, "SSL_ERROR_SYSCALL": 5}
#: The interpreter's own hash functions. If one were missing, ``hashlib`` would log an error.
_HASHES: Final = ("_md5", "_sha1", "_sha3", "_blake2")
_MESSAGES: Final = "google.protobuf.internal.python_message"
_SERVERS: Final = ("http.server", "socketserver", "urllib.error", "urllib.request", "wsgiref.simple_server")

_left_out = False


def leave_out() -> None:
    """Import asyncio, uvloop, hashlib and protobuf without the modules that a proxy never uses.

    This has no effect in a process that has already imported asyncio.
    """
    global _left_out
    if "asyncio" in sys.modules:
        return
    _left_out = True
    replaced = ("_hashlib",) if all(map(importlib.util.find_spec, _HASHES)) else ()
    with _placeholders("ssl", missing=replaced):
        for name in ("asyncio", "uvloop", "hashlib", "hmac"):
            importlib.import_module(name)
    from google.protobuf.internal import api_implementation

    if api_implementation.Type() == "upb":
        with _placeholders(_MESSAGES):
            importlib.import_module("google.protobuf.internal.builder")


def left_out() -> bool:
    """Return whether :func:`leave_out` had an effect in this process."""
    return _left_out


@contextlib.contextmanager
def without_servers() -> Iterator[None]:
    """While entered, ``prometheus_client`` is imported without its HTTP servers and clients.

    This has an effect only in a process where :func:`leave_out` had one.
    """
    with _placeholders("ssl", *_SERVERS) if _left_out else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _placeholders(*names: str, missing: tuple[str, ...] = ()) -> Iterator[None]:
    """Replace modules by placeholders while entered. Imports of the ``missing`` modules fail."""
    absent = [name for name in (*names, *missing) if name not in sys.modules]
    for name in absent:
        sys.modules[name] = _Placeholder(name) if name in names else None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


class _Placeholder(types.ModuleType):
    """A module that has any name which an importing library looks up: as an exception, a constant, or else a
    class.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in _ERRORS:
            return type(name, (OSError,), {})
        return type(name, (), {"__init__": _refuse})


def _refuse(self: object, *args: object, **options: object) -> NoReturn:
    raise RuntimeError(f"this process leaves out {type(self).__name__}; for TLS use hbone.tls")
