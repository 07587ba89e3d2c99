"""Compares chains judged without a handshake with real handshakes, for every way in which a chain can be
invalid.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given
from hypothesis import strategies as st

from hbone.settings import Role
from hbone.tls import TlsSession
from hbone.tls_context import ClientCertificate, TlsContext, TlsSettings
from hbone.verification import accepted_until, verified_chain
from tests.hbone.certificates import Authority
from tests.hbone.test_tls import Outcome

NAME = "spiffe://td/ns/a/sa/b"
PEER_ROOT = Authority("peer's")


@dataclass(frozen=True, kw_only=True)
class Link:
    """One certificate of a chain, as far as tests change it."""

    ca: bool | None = None
    path_length: int | None = None
    usages: tuple[x509.ObjectIdentifier, ...] = ()
    key_usage: tuple[str, ...] | None = None
    permitted: str = ""
    digest: type[hashes.HashAlgorithm] = hashes.SHA256
    key: str = "ec"
    wrong_signature: bool = False


def new_key(kind: str) -> Any:
    match kind:
        case "ec":
            return ec.generate_private_key(ec.SECP256R1())
        case "small ec":
            return ec.generate_private_key(ec.SECP192R1())
        case "rsa":
            return rsa.generate_private_key(65537, 2048)
        case "small rsa":
            return rsa.generate_private_key(65537, 1024)
    return ed25519.Ed25519PrivateKey.generate()


USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


class Chain:
    """A chain of links, root first."""

    def __init__(self, links: Sequence[Link]) -> None:
        now = datetime.datetime.now(datetime.UTC)
        issuer_key, issuer = None, None
        self.certificates: list[x509.Certificate] = []
        for depth, link in enumerate(links):
            is_leaf = depth == len(links) - 1
            key = new_key(link.key)
            name = x509.Name([] if is_leaf else [x509.NameAttribute(NameOID.COMMON_NAME, f"ca{depth}")])
            builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer or name)
            builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
            builder = builder.not_valid_before(now - datetime.timedelta(days=1))
            builder = builder.not_valid_after(now + datetime.timedelta(days=1))
            ca = link.ca if link.ca is not None else not is_leaf
            if ca or link.ca is not None:
                length = link.path_length if ca else None
                builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=length), critical=True)
            if link.usages:
                builder = builder.add_extension(x509.ExtendedKeyUsage(link.usages), critical=False)
            if link.key_usage is not None:
                said = {usage: usage in link.key_usage for usage in USAGES}
                builder = builder.add_extension(x509.KeyUsage(**said), critical=True)
            if link.permitted:
                names = [x509.UniformResourceIdentifier(link.permitted)]
                builder = builder.add_extension(x509.NameConstraints(names, None), critical=True)
            if is_leaf:
                names = [x509.UniformResourceIdentifier(NAME)]
                builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
            signer = new_key("ec") if link.wrong_signature else issuer_key or key
            digest = None if isinstance(signer, ed25519.Ed25519PrivateKey) else link.digest()
            self.certificates.append(builder.sign(signer, digest))
            issuer_key, issuer = key, name
        self.leaf_key = issuer_key

    @property
    def shown(self) -> list[x509.Certificate]:
        """Return the certificates that are sent: leaf first, without the root."""
        return self.certificates[:0:-1]

    def settings(self) -> TlsSettings:
        assert self.leaf_key is not None
        return TlsSettings(
            certificate_chain_pem=b"".join(each.public_bytes(Encoding.PEM) for each in self.shown),
            private_key_pem=self.leaf_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            trusted_ca_pem=PEER_ROOT.pem,
        )


def handshake_accepts(chain: Chain, anchors: Sequence[x509.Certificate], role: Role) -> bool:
    """Return whether a real handshake accepts the chain. The other side's certificate is valid."""
    peer = PEER_ROOT.issue("spiffe://td/ns/a/sa/peer")
    judge = TlsSettings(
        certificate_chain_pem=peer.chain_pem,
        private_key_pem=peer.key_pem,
        trusted_ca_pem=b"".join(each.public_bytes(Encoding.PEM) for each in anchors),
        client_certificate=ClientCertificate.REQUIRED,
    )
    try:
        own = TlsContext(role, chain.settings())
    except ValueError:
        return False  # OpenSSL does not even show it
    other = Role.SERVER if role is Role.CLIENT else Role.CLIENT
    by_role = {role: TlsSession(own), other: TlsSession(TlsContext(other, judge))}
    return Outcome(by_role[Role.CLIENT], by_role[Role.SERVER]).reasons == (None, None)


CLIENT_ONLY, SERVER_ONLY = (ExtendedKeyUsageOID.CLIENT_AUTH,), (ExtendedKeyUsageOID.SERVER_AUTH,)
ROOT, MIDDLE, LEAF = Link(), Link(), Link()
CASES: dict[str, tuple[Link, ...]] = {
    "plain": (ROOT, LEAF),
    "intermediate": (ROOT, MIDDLE, LEAF),
    "issuer without CA": (ROOT, Link(ca=False), LEAF),
    "leaf for clients": (ROOT, Link(usages=CLIENT_ONLY)),
    "leaf for servers": (ROOT, Link(usages=SERVER_ONLY)),
    "leaf for both": (ROOT, Link(usages=CLIENT_ONLY + SERVER_ONLY)),
    "leaf for code": (ROOT, Link(usages=(ExtendedKeyUsageOID.CODE_SIGNING,))),
    "intermediate for servers": (ROOT, Link(usages=SERVER_ONLY), LEAF),
    "path too long": (Link(path_length=0), MIDDLE, LEAF),
    "path just long enough": (Link(path_length=1), MIDDLE, LEAF),
    "issuer that may not sign": (ROOT, Link(key_usage=("digital_signature",)), LEAF),
    "issuer that may sign": (ROOT, Link(key_usage=("key_cert_sign",)), LEAF),
    "leaf that may not sign": (ROOT, Link(key_usage=("key_encipherment",))),
    "leaf that may sign": (ROOT, Link(key_usage=("digital_signature",))),
    "name permitted": (ROOT, Link(permitted="td"), LEAF),
    "name not permitted": (ROOT, Link(permitted="elsewhere"), LEAF),
    "signature of another": (ROOT, Link(wrong_signature=True), LEAF),
    "small RSA issuer": (ROOT, Link(key="small rsa"), LEAF),
    "small leaf": (ROOT, Link(key="small ec")),
    "Ed25519 issuer": (ROOT, Link(key="ed25519"), LEAF),
    "leaf is a CA": (ROOT, Link(ca=True)),
}


@pytest.mark.parametrize("role", [Role.CLIENT, Role.SERVER])
@pytest.mark.parametrize("case", CASES)
def test_a_chain_is_judged_as_in_a_handshake(case: str, role: Role) -> None:
    chain = Chain(CASES[case])
    root = chain.certificates[:1]
    found = verified_chain(chain.shown, root, role)
    assert (found is not None) is handshake_accepts(chain, root, role)
    if found is not None:
        assert found == tuple(reversed(chain.certificates))


@pytest.mark.parametrize("role", [Role.CLIENT, Role.SERVER])
def test_an_intermediate_can_be_the_anchor(role: Role) -> None:
    chain = Chain((ROOT, MIDDLE, LEAF))
    anchors = chain.certificates[1:2]
    assert verified_chain(chain.shown, anchors, role) == tuple(chain.shown)
    assert handshake_accepts(chain, anchors, role)


def test_without_a_chain_or_anchors_nothing_is_verified() -> None:
    chain = Chain((ROOT, LEAF))
    assert verified_chain(chain.shown, (), Role.CLIENT) is None
    assert verified_chain((), chain.certificates[:1], Role.CLIENT) is None


def test_times_are_left_to_the_caller() -> None:
    root = Authority("old")
    leaf = root.issue(NAME, from_day=-3, to_day=-2).certificate
    assert verified_chain([leaf], [root.certificate], Role.CLIENT) is not None


def test_a_chain_is_accepted_until_its_first_certificate_without_replacement_ends() -> None:
    root = Authority("root")
    middle = Authority("middle", root)
    leaf = middle.issue(NAME, to_day=1).certificate
    roots = [root.certificate, Authority("other").reissued(0.2).certificate]
    sooner = middle.reissued(0.5).certificate
    assert accepted_until([leaf, middle.certificate], roots) == leaf.not_valid_after_utc
    assert accepted_until([leaf, sooner], roots) == sooner.not_valid_after_utc
    assert accepted_until([leaf, sooner, middle.certificate], roots) == leaf.not_valid_after_utc
    short_root = root.reissued(0.1).certificate
    assert accepted_until([leaf, sooner], [short_root]) == short_root.not_valid_after_utc
    assert accepted_until([leaf, middle.certificate], [short_root, root.certificate]) == leaf.not_valid_after_utc
    # An intermediate that ended before the leaf began: never accepted.
    young = middle.issue(NAME, from_day=-0.1).certificate
    ended = middle.reissued(-0.5).certificate
    assert accepted_until([young, ended], [root.certificate]) == ended.not_valid_after_utc


LINKS = st.builds(
    Link,
    ca=st.sampled_from([None, None, None, True, False]),
    path_length=st.sampled_from([None, None, 0, 1]),
    usages=st.sampled_from([(), (), CLIENT_ONLY, SERVER_ONLY]),
    key_usage=st.sampled_from([None, None, ("key_cert_sign",), ("digital_signature",)]),
    permitted=st.sampled_from(["", "", "td", "x"]),
)


@given(st.lists(LINKS, min_size=2, max_size=4), st.sampled_from([Role.CLIENT, Role.SERVER]))
def test_random_chains_are_judged_as_in_a_handshake(links: list[Link], role: Role) -> None:
    chain = Chain(links)
    root = chain.certificates[:1]
    assert (verified_chain(chain.shown, root, role) is not None) is handshake_accepts(chain, root, role)
