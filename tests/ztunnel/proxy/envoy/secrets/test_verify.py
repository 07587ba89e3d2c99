"""Judging a peer's names, and refusing key material that no handshake could use."""

import base64
import datetime
import hashlib
import ipaddress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID, ObjectIdentifier

from tests.hbone.certificates import Authority, of_unknown_version
from xds.errors import ConfigError
from xds.model.identity import SpiffeId
from xds.model.secret import Certificate, SanMatch, Validation
from xds.model.string_match import StringMatch
from ztunnel.proxy.envoy.secrets.verify import check_secret, peer_verifier, san_matches

KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = ec.generate_private_key(ec.SECP256R1())
REVIEWS = "spiffe://cluster.local/ns/default/sa/reviews"


def certificate(*names: x509.GeneralName) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(KEY.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    return builder.sign(KEY, hashes.SHA256())


def uri(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text)


def refusal(validation: Validation, leaf: x509.Certificate) -> str | None:
    verify = peer_verifier(validation)
    assert verify is not None
    return verify([leaf])


def wants(kind: str, value: str, match: str = "exact") -> Validation:
    return Validation(trusted_ca_pem=b"", san_matches=(SanMatch(kind, StringMatch(match, value)),))


@pytest.mark.parametrize(
    ("validation", "names", "accepted"),
    [
        (wants("uri", "spiffe://cluster.local/", "prefix"), (uri(REVIEWS),), True),
        (
            wants("uri", "spiffe://cluster.local/", "prefix"),
            (uri("spiffe://cluster.local.evil/ns/a/sa/b"),),
            False,
        ),
        (wants("uri", "spiffe://other/", "prefix"), (uri(REVIEWS),), False),
        (wants("uri", REVIEWS), (), False),
        (wants("uri", REVIEWS), (x509.DNSName("a"), uri(REVIEWS)), True),
        (wants("uri", REVIEWS), (x509.DNSName(REVIEWS.replace("/", "")),), False),
        (wants("any", "a"), (x509.DNSName("a"),), True),
        (wants("dns", "A.Example"), (x509.DNSName("a.example"),), True),
        (wants("dns", "a.example"), (x509.DNSName("*.example"),), True),
        (wants("dns", "a.b.example"), (x509.DNSName("*.example"),), False),
        (wants("dns", "example"), (x509.DNSName("*.example"),), False),
        (wants("ip", "10.0.0.1"), (x509.IPAddress(ipaddress.ip_address("10.0.0.1")),), True),
        (wants("email", "a@b"), (x509.RFC822Name("a@b"),), True),
        (wants("uri", REVIEWS), (x509.OtherName(ObjectIdentifier("1.2.3"), b"\x0c\x01a"),), False),
    ],
)
def test_one_matcher_must_fit_one_name_of_its_type(
    validation: Validation, names: tuple[x509.GeneralName, ...], accepted: bool
) -> None:
    answer = refusal(validation, certificate(*names))
    assert (answer is None) is accepted
    if not accepted:
        assert answer is not None
        assert answer.startswith("SAN matcher, certificate SANs are [")


def test_a_nul_in_a_name_matches_nothing() -> None:
    match = SanMatch("dns", StringMatch("prefix", "good"))
    assert san_matches(match, "dns", "good.example")
    assert not san_matches(match, "dns", "good.example\x00.evil")


def test_pins_on_certificate_and_key() -> None:
    leaf = certificate(uri(REVIEWS))
    digest = hashlib.sha256(leaf.public_bytes(Encoding.DER)).hexdigest()
    spki = KEY.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    pin = base64.b64encode(hashlib.sha256(spki).digest()).decode()
    assert refusal(Validation(certificate_hashes=(digest,)), leaf) is None
    assert refusal(Validation(spki_hashes=(pin,)), leaf) is None
    assert refusal(Validation(certificate_hashes=("0" * 64,)), leaf) == "certificate hash or SPKI does not match"


def test_roots_alone_need_no_hook() -> None:
    assert peer_verifier(Validation(trusted_ca_pem=b"x")) is None


def pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


CHAIN = certificate(uri(REVIEWS)).public_bytes(Encoding.PEM)


def test_usable_material_is_accepted() -> None:
    check_secret(Certificate(chain_pem=CHAIN, key_pem=pem(KEY)))
    check_secret(Certificate(chain_pem=CHAIN, key_pem=pem(KEY, b"pw"), password=b"pw"))
    check_secret(Validation(trusted_ca_pem=CHAIN))
    check_secret(Validation())


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        (Certificate(chain_pem=b"x", key_pem=pem(KEY)), "certificate_chain: no certificate in PEM"),
        (
            Certificate(chain_pem=of_unknown_version(CHAIN), key_pem=pem(KEY)),
            "certificate_chain: no certificate in PEM",
        ),
        (
            Validation(trusted_ca_pem=CHAIN, crl_pem=of_unknown_version(Authority().revoke())),
            "crl: not a certificate revocation list in PEM",
        ),
        (
            Certificate(chain_pem=CHAIN, key_pem=b"s3cret"),
            "private_key: not a private key in PEM, or the wrong password",
        ),
        (
            Certificate(chain_pem=CHAIN, key_pem=pem(OTHER_KEY)),
            "private_key: the private key is not that of the certificate",
        ),
        (Certificate(chain_pem=CHAIN, key_pem=pem(KEY, b"pw"), password=b"no"), "wrong password"),
        (Certificate(chain_pem=CHAIN, key_pem=pem(KEY, b"pw")), "wrong password"),
        (Validation(trusted_ca_pem=b"x"), "trusted_ca: no certificate in PEM"),
        (Validation(crl_pem=b"x"), "crl: no certificate revocation list in PEM"),
        (
            Validation(crl_pem=b"-----BEGIN X509 CRL-----\nx"),
            "crl: a certificate revocation list in PEM does not end",
        ),
    ],
)
def test_unusable_material_is_named_and_never_quoted(secret: Certificate | Validation, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_secret(secret)
    assert words in str(error.value)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "spiffe://cluster.local/ns/a/sa/",
        "spiffe:///ns/a/sa/b",
        "spiffe://td/ns/a/sa/b/c",
        "spiffe://td/sa/b/ns/a",
        "https://td/ns/a/sa/b",
        "",
    ],
)
def test_invalid_workload_identity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a workload identity"):
        SpiffeId.parse(text)


def test_workload_identity_parses_its_own_text() -> None:
    assert str(SpiffeId.parse(REVIEWS)) == REVIEWS
