"""Provides the cffi binding to OpenSSL, and checks that it has all names used by this package.

pyOpenSSL wraps the OpenSSL library inside ``cryptography``. Functions that it does not wrap are called through the
cffi binding, and a few private attributes of pyOpenSSL's classes are used. Another release may rename these. The
check below then raises one clear error at import, instead of an obscure one in a handshake.
"""

from typing import Any, Final

import OpenSSL
from cryptography.hazmat.bindings.openssl.binding import Binding
from OpenSSL import SSL, crypto

#: The functions and constants that this package uses through the binding.
LIBRARY_NAMES: Final = (
    "BIO_new_mem_buf",
    "BIO_read",
    "BIO_set_mem_eof_return",
    "ERR_clear_error",
    "EVP_get_digestbyname",
    "SSL_CTX_set1_curves_list",
    "SSL_CTX_set_verify",
    "SSL_ERROR_WANT_READ",
    "SSL_do_handshake",
    "SSL_get_error",
    "SSL_get_ex_data_X509_STORE_CTX_idx",
    "SSL_read",
    "SSL_read_early_data",
    "SSL_set_bio",
    "SSL_version",
    "SSL_write",
    "SSL_write_early_data",
    "X509_PURPOSE_SSL_CLIENT",
    "X509_PURPOSE_SSL_SERVER",
    "X509_STORE_CTX_get_current_cert",
    "X509_STORE_CTX_get_error",
    "X509_STORE_CTX_get_error_depth",
    "X509_STORE_CTX_get_ex_data",
    "X509_STORE_CTX_set_error",
    "X509_STORE_set_purpose",
    "X509_digest",
    "X509_up_ref",
    "X509_verify_cert_error_string",
)
#: The undocumented attributes of pyOpenSSL's objects that this package uses.
CONTEXT_NAMES: Final = ("_context",)
CONNECTION_NAMES: Final = ("_ssl", "_from_ssl", "_raise_ssl_error", "_reverse_mapping")
CERTIFICATE_NAMES: Final = ("_from_raw_x509_ptr",)
STORE_NAMES: Final = ("_store",)

ffi: Final[Any] = Binding.ffi
lib: Final[Any] = Binding.lib


def missing_names(
    library: object, context: object, connection: object, certificate: object, store: object
) -> list[str]:
    """Return the names that this package uses but the installed releases lack."""
    return [
        f"{where}.{name}"
        for where, holder, names in (
            ("OpenSSL binding", library, LIBRARY_NAMES),
            ("SSL.Context", context, CONTEXT_NAMES),
            ("SSL.Connection", connection, CONNECTION_NAMES),
            ("crypto.X509", certificate, CERTIFICATE_NAMES),
            ("crypto.X509Store", store, STORE_NAMES),
        )
        for name in names
        if not hasattr(holder, name)
    ]


def _check() -> None:
    context = SSL.Context(SSL.TLS_METHOD)
    missing = missing_names(lib, context, SSL.Connection(context), crypto.X509, crypto.X509Store())
    if missing:
        raise ImportError(
            f"pyOpenSSL {OpenSSL.__version__} with its cryptography lacks {', '.join(missing)}; "
            "install the releases of requirements/runtime.lock"
        )


_check()
