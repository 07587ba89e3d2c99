"""Files of roots: usable roots are used, others are named, and a faulty one does not affect the rest."""

import base64
import datetime
import subprocess
import sys
import warnings

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from tests.hbone.certificates import of_unknown_version
from ztunnel.proxy.identity.roots import read_roots

SERVER, CLIENT, ANY, MAIL = (
    "06082b06010505070301",
    "06082b06010505070302",
    "0604551d2500",
    "06082b06010505070304",
)


def der(name: str = "root") -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = datetime.datetime(2026, 1, 1)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(0x55).not_valid_before(start).not_valid_after(start.replace(year=2036))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def pem(content: bytes, label: str = "CERTIFICATE") -> bytes:
    return f"-----BEGIN {label}-----\n{base64.encodebytes(content).decode()}-----END {label}-----\n".encode()


def aux(trusted: str = "", rejected: str = "") -> bytes:
    """Return the uses behind a trusted certificate."""
    made = b""
    for tag, uses in ((0x30, bytes.fromhex(trusted)), (0xA0, bytes.fromhex(rejected))):
        made += bytes([tag, len(uses)]) + uses if uses else b""
    return bytes([0x30, len(made)]) + made


ROOT, OTHER = der(), der("other")


def names(data: bytes) -> list[str]:
    return [each.subject.rfc4514_string() for each in read_roots(data).certificates]


def test_plain_root_file_is_used_unchanged() -> None:
    found = read_roots(b"# a comment\n" + pem(ROOT) + b"\n" + pem(OTHER))
    assert (found.faults, found.plain, len(found.certificates)) == ((), True, 2)
    assert found.pem == b"".join(each.public_bytes(Encoding.PEM) for each in found.certificates)
    assert read_roots(b"").certificates == ()


@pytest.mark.parametrize(
    "odd",
    [
        pem(b"\x30\x03\x02\x01\x01"),
        pem(b""),
        pem(ROOT[:-5]),
        of_unknown_version(pem(ROOT)),
        b"-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\n" + base64.b64encode(ROOT) + b"\n",
        pem(ROOT + aux(MAIL), "TRUSTED CERTIFICATE"),
        pem(ROOT + aux(SERVER, MAIL), "TRUSTED CERTIFICATE"),
        pem(ROOT + aux("", SERVER), "TRUSTED CERTIFICATE"),
        pem(ROOT + b"\x30\x05\x30", "TRUSTED CERTIFICATE"),
        pem(ROOT + b"\x04\x00", "TRUSTED CERTIFICATE"),
    ],
)
def test_unreadable_root_is_left_out_and_the_others_are_used(odd: bytes) -> None:
    for data in (odd + pem(OTHER), pem(OTHER) + odd):
        found = read_roots(data)
        assert [each.subject.rfc4514_string() for each in found.certificates] == ["CN=other"]
        assert len(found.faults) == 1
        number = 1 if data.startswith(odd) else 2
        assert found.faults[0].startswith(f"certificate {number} is left out: ")
        assert not found.plain


@pytest.mark.parametrize("uses", [b"", aux(), aux(SERVER), aux(MAIL + CLIENT), aux(ANY)])
def test_trusted_certificate_is_used_if_trusted_for_tls(uses: bytes) -> None:
    found = read_roots(pem(ROOT + uses, "TRUSTED CERTIFICATE") + pem(OTHER, "X509 CERTIFICATE"))
    assert (len(found.certificates), found.faults, found.plain) == (2, (), False)
    assert b"TRUSTED" not in found.pem


@pytest.mark.parametrize("serial", [b"\x00", b"\xff"])
def test_serial_number_that_is_not_positive_is_no_reason_to_leave_a_root_out(serial: bytes) -> None:
    odd = pem(ROOT.replace(b"\x02\x01\x55", b"\x02\x01" + serial, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_roots(odd + pem(OTHER))
    assert (len(found.certificates), found.faults) == (2, ())


def test_commands_print_no_warning_of_serial_numbers() -> None:
    odd = ROOT.replace(b"\x02\x01\x55", b"\x02\x01\x00", 1)
    program = (
        "import sys; from ztunnel.cli import main; main(['version']);"
        "from cryptography import x509; x509.load_der_x509_certificate(sys.stdin.buffer.read())"
    )
    done = subprocess.run([sys.executable, "-c", program], input=odd, capture_output=True, check=True)
    assert done.stderr == b""


@given(
    st.lists(st.sampled_from([pem(ROOT), pem(OTHER), b"text\n", pem(b"junk")]), max_size=6), st.integers(0, 4000)
)
def test_truncated_root_file_yields_its_whole_certificates(parts: list[bytes], cut: int) -> None:
    data = b"".join(parts)[:cut]
    found = read_roots(data)
    whole = [pem(der) for der in (ROOT, OTHER)]
    assert len(found.certificates) == sum(data.count(each.rstrip()) for each in whole)
    assert len(found.certificates) + len(found.faults) == data.count(b"-----BEGIN CERTIFICATE-----")
