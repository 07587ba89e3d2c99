"""Names in certificates as OpenSSL writes them; a test of interop compares them with Envoy's."""

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from ztunnel.proxy.envoy.secrets.names import distinguished_name, subject_of

CN, ORG = x509.NameOID.COMMON_NAME, x509.NameOID.ORGANIZATION_NAME


def parts_of(name: x509.Name) -> bytes:
    der = name.public_bytes()
    return der[2 if der[1] < 0x80 else der[1] - 0x80 + 2 :]


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ([], ""),
        ([(CN, "web")], "CN=web"),
        ([(ORG, "a"), (CN, "b")], "CN=b,O=a"),
        ([(CN, ' #,+"\\<>; ')], 'CN=\\ #\\,\\+\\"\\\\\\<\\>\\;\\ '),
        ([(CN, "#a=b")], "CN=\\#a=b"),
        ([(CN, "ä\n")], "CN=\\C3\\A4\\0A"),
        ([(x509.NameOID.EMAIL_ADDRESS, "a@b")], "emailAddress=a@b"),
        ([(x509.ObjectIdentifier("2.5.4.97"), "x")], "2.5.4.97=#0C0178"),
        ([(x509.ObjectIdentifier("1.2.3"), "x" * 200)], "1.2.3=#0C81C8" + "78" * 200),
    ],
)
def test_name_is_written_as_openssl_does(attributes: list[tuple[x509.ObjectIdentifier, str]], text: str) -> None:
    name = x509.Name([x509.NameAttribute(oid, value) for oid, value in attributes])
    assert distinguished_name(parts_of(name)) == text


def test_attributes_of_one_rdn_are_joined_by_a_plus() -> None:
    rdn = x509.RelativeDistinguishedName([x509.NameAttribute(CN, "a"), x509.NameAttribute(ORG, "b")])
    assert distinguished_name(parts_of(x509.Name([rdn]))) in ("CN=a+O=b", "O=b+CN=a")


def test_latin_1_in_a_t61string_is_taken_for_latin_1() -> None:
    now = datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(ORG, "Muenchen"), x509.NameAttribute(CN, "web")])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    der = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
    # The signature no longer fits, which reading does not mind.
    odd = x509.load_der_x509_certificate(der.replace(b"\x0c\x08Muenchen", b"\x14\x08M\xfcnchen!"))
    assert subject_of(odd) == "CN=web,O=M\\C3\\BCnchen!"
