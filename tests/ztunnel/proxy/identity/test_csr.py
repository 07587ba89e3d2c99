"""Requests for certificates as other implementations send them, and every answer that must be refused."""

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from hbone.settings import Role
from hbone.verification import verified_chain
from tests.hbone.certificates import Authority
from xds.model.identity import SpiffeId
from ztunnel.proxy.identity.csr import IdentityError, issued_certificate, signing_request

WEB = SpiffeId("cluster.local", "shop", "web")
KEY = ec.generate_private_key(ec.SECP256R1())
ROOT = Authority("root")
MIDDLE = Authority("middle", ROOT)


def leaf_for(*uris: str, key: ec.EllipticCurvePrivateKey = KEY) -> str:
    """A leaf for our key, signed by the intermediate."""
    template = MIDDLE.issue(*uris).certificate
    builder = x509.CertificateBuilder(
        template.issuer,
        template.subject,
        key.public_key(),
        template.serial_number,
        template.not_valid_before_utc,
        template.not_valid_after_utc,
        list(template.extensions),
    )
    return builder.sign(MIDDLE.key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def test_signing_request_has_one_critical_san_and_no_subject() -> None:
    request = x509.load_pem_x509_csr(signing_request(WEB, KEY))
    assert request.is_signature_valid
    assert isinstance(request.signature_hash_algorithm, hashes.SHA256)
    assert request.public_key() == KEY.public_key()
    assert len(request.subject) == 0
    (extension,) = request.extensions
    assert extension.critical
    assert isinstance(extension.value, x509.SubjectAlternativeName)
    assert [name.value for name in extension.value] == ["spiffe://cluster.local/ns/shop/sa/web"]


def test_leaf_intermediates_and_a_bundle_of_roots() -> None:
    other = Authority("other")
    answer = [leaf_for(str(WEB)), MIDDLE.pem.decode(), (ROOT.pem + other.pem).decode()]
    issued = issued_certificate(WEB, KEY, answer, exact=True)
    assert issued.identity == WEB
    assert [c.public_bytes(Encoding.PEM).decode() for c in issued.chain] == answer[:2]
    assert issued.roots == (ROOT.certificate, other.certificate)
    assert issued.chain_pem.decode() == answer[0] + answer[1]
    assert issued.roots_pem.decode() == answer[2]
    assert issued.not_before < issued.not_after
    assert b"PRIVATE KEY" in issued.key_pem
    assert "PRIVATE" not in repr(issued)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], f"chain returned from CA is empty for: {WEB}"),
        ([leaf_for(str(WEB))], "no root certificate present"),
        ([leaf_for(str(WEB)), "nonsense"], "certificate 1 returned from CA"),
        (["nonsense", ROOT.pem.decode()], "certificate 0 returned from CA"),
        ([leaf_for("spiffe://cluster.local/ns/shop/sa/cart"), ROOT.pem.decode()], "did not find expected SAN"),
        ([leaf_for(), ROOT.pem.decode()], f"did not find expected SAN: {WEB}"),
        ([leaf_for("spiffe://x/ns/a/sa/b", str(WEB)), ROOT.pem.decode()], "has 2 URI names, not one"),
        ([leaf_for(str(WEB)), ROOT.pem.decode()], "does not lead to its roots"),
        ([leaf_for(str(WEB)), MIDDLE.pem.decode(), Authority("root").pem.decode()], "does not lead to its roots"),
        ([MIDDLE.issue(str(WEB)).chain_pem.decode(), ROOT.pem.decode()], "is for another key"),
    ],
)
def test_ca_answer_with_a_wrong_certificate_is_refused(answer: list[str], words: str) -> None:
    with pytest.raises(IdentityError, match=words):
        issued_certificate(WEB, KEY, answer, exact=True)


def test_intermediates_are_accepted_in_any_order() -> None:
    lower = Authority("lower", MIDDLE)
    leaf = lower.issue(str(WEB)).certificate
    role = Role.SERVER
    assert verified_chain([leaf, MIDDLE.certificate, lower.certificate], [ROOT.certificate], role)
    assert verified_chain([leaf, lower.certificate], [MIDDLE.certificate], role)
    assert not verified_chain([leaf, MIDDLE.certificate], [ROOT.certificate], role)
    assert not verified_chain([], [ROOT.certificate], role)


def test_without_impersonation_the_identity_comes_from_the_issued_leaf() -> None:
    rest = [MIDDLE.pem.decode(), ROOT.pem.decode()]
    answer = [leaf_for("spiffe://cluster.local/ns/shop/sa/cart"), *rest]
    issued = issued_certificate(WEB, KEY, answer, exact=False)
    assert issued.identity == SpiffeId("cluster.local", "shop", "cart")
    with pytest.raises(IdentityError, match="has 2 URI names"):
        issued_certificate(WEB, KEY, [leaf_for("https://x", "spiffe://x/ns/a/sa/b"), *rest], exact=False)
    with pytest.raises(IdentityError, match="names no workload"):
        issued_certificate(WEB, KEY, [leaf_for("https://x"), ROOT.pem.decode()], exact=False)
