"""Certificates as old authorities make them, which today's libraries do not."""

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.hbone.certificates import Authority, Leaf, _builder

_PRINTABLE, _T61 = b"\x13", b"\x14"
_ECDSA_SHA256 = bytes.fromhex("300a06082a8648ce3d040302")


def with_latin_subject(authority: Authority, *uris: str) -> Leaf:
    """Issue a leaf whose subject is ``CN=Grün`` as a T61String of Latin-1 letters."""
    key = ec.generate_private_key(ec.SECP256R1())
    kind = x509.name._ASN1Type.PrintableString
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Gr?n", _type=kind)])
    builder = _builder(subject, authority.name, key, -1, 1)
    names = [x509.UniformResourceIdentifier(uri) for uri in uris]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    plain = builder.sign(authority.key, hashes.SHA256()).tbs_certificate_bytes
    body = plain.replace(_PRINTABLE + b"\x04Gr?n", _T61 + b"\x04Gr\xfcn")
    assert body != plain
    signature = authority.key.sign(body, ec.ECDSA(hashes.SHA256()))
    der = _sequence(body + _ECDSA_SHA256 + _tagged(b"\x03", b"\x00" + signature))
    certificate = x509.load_der_x509_certificate(der)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Leaf(certificate.public_bytes(Encoding.PEM), private, certificate)


def _sequence(content: bytes) -> bytes:
    return _tagged(b"\x30", content)


def _tagged(tag: bytes, content: bytes) -> bytes:
    size = len(content)
    if size < 128:
        return tag + bytes([size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return tag + bytes([0x80 | len(length)]) + length + content
