"""TLS of calls, by the interpreter's ``ssl``: one side proves itself, and both speak HTTP/2 or nothing."""

import os
import ssl


class BadCertificate(Exception):
    """Certificates or a key that cannot be used; the text says why."""


def client_tls(root_pem: bytes) -> ssl.SSLContext:
    """Verify servers by ``root_pem``, one or more certificates, and by their name; TLS 1.2 or newer.

    Raises:
        BadCertificate: it holds no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        # Bundles have comments between the certificates, of any encoding.
        context.load_verify_locations(cadata=root_pem.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise BadCertificate(f"unusable root certificates: {error}") from error
    return context


def server_tls(key_pem: bytes, chain_pem: bytes) -> ssl.SSLContext:
    """Show ``chain_pem``, the leaf first; TLS 1.2 or newer.

    Raises:
        BadCertificate: key and certificate do not go together, or one of them is none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    descriptor = os.memfd_create("serving-certificate")  # ssl reads files only; this one is in memory
    try:
        os.write(descriptor, key_pem + b"\n" + chain_pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except ssl.SSLError as error:
        raise BadCertificate(f"unusable key or certificate: {error}") from error
    finally:
        os.close(descriptor)
    return context
