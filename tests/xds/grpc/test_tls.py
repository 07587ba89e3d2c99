"""The names that a certificate is valid for, and texts that cannot be a name."""

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from xds.grpc.tls import client_tls, named
from ztunnel.proxy.identity.authority import CertificateAuthority

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
AUTHORITY = CertificateAuthority.in_memory("test", NOW)


def certificate(*names: x509.GeneralName) -> x509.Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "istiod.example")])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(NOW).not_valid_after(NOW + DAY)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, hashes.SHA256())


@pytest.mark.parametrize(
    ("pattern", "name", "is_it"),
    [
        ("istiod.example", "istiod.example", True),
        ("ISTIOD.example", "istiod.EXAMPLE.", True),
        ("istiod.example", "x.istiod.example", False),
        ("*.example", "istiod.example", True),
        ("*.example", "a.istiod.example", False),
        ("*.example", "example", False),
        ("*.example", ".example", False),
        ("i*.example", "istiod.example", False),
        ("*", "istiod", False),
        ("127.0.0.1", "127.0.0.1", False),
        ("*.0.0.1", "127.0.0.1", False),
    ],
)
def test_dns_sans_match_exactly_or_by_one_wildcard_label(pattern: str, name: str, is_it: bool) -> None:
    refused = named([name])([certificate(x509.DNSName(pattern))])
    assert (refused is None) is is_it
    assert is_it or (refused is not None and pattern in refused and name in refused)


@pytest.mark.parametrize(
    ("own", "name", "is_it"),
    [("127.0.0.1", "127.0.0.1", True), ("127.0.0.1", "127.0.0.2", False), ("fd00::1", "fd00:0::1", True)],
)
def test_ip_sans_match_addresses(own: str, name: str, is_it: bool) -> None:
    import ipaddress

    refused = named([name])([certificate(x509.IPAddress(ipaddress.ip_address(own)))])
    assert (refused is None) is is_it


def test_any_of_several_expected_names_suffices() -> None:
    check = named(["127.0.0.1", "istiod.example"])
    assert check([certificate(x509.DNSName("other.example"), x509.DNSName("istiod.example"))]) is None
    refused = check([certificate(x509.UniformResourceIdentifier("spiffe://td/ns/a/sa/b"))])
    assert refused == "the certificate is for no host, not for 127.0.0.1 or istiod.example"


def test_a_common_name_is_no_name() -> None:
    assert named(["istiod.example"])([certificate()]) == "the certificate has no subject alternative names"


def test_malformed_certificates_are_refused() -> None:
    with pytest.raises(ValueError, match=r".+"):
        client_tls(b"nothing", ["a"])
    with pytest.raises(ValueError, match="unknown key exchange group"):
        client_tls(AUTHORITY.root_pem, ["a"], groups=("x",))
