"""Who gets through a handshake between workloads, and everybody who does not, each for its own reason."""

from collections.abc import Callable

import pytest

from hbone.errors import TlsReason
from hbone.settings import Role
from hbone.tls import TlsSession, sealed_bytes
from hbone.tls_context import TlsContext, TlsSettings, TlsVersion
from tests.hbone.certificates import Authority, Leaf
from tests.ztunnel.proxy.identity.material import CART, WEB, End, certificate, handshake, issued
from xds.model.identity import SpiffeId
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.certificates.manager import TlsPolicy, WorkloadCertificate

ROOT = Authority()
MIDDLE = Authority("middle", ROOT)
STRANGER = Authority("stranger")
REVOKED = ROOT.issue(str(CART))
REVOKED_MIDDLE = Authority("revoked middle", ROOT)
CRL = ROOT.revoke(REVOKED.certificate, REVOKED_MIDDLE.certificate)

_TD = "identity verification error: peer did not present the expected trustdomain (cluster.local), got "
_SAN = f"identity verification error: peer did not present the expected SAN ({CART}), got "

#: A peer's leaf; the reason and words a server gives; the reason and words a client that expects CART gives.
Refusal = tuple[TlsReason, str]
BAD: dict[str, tuple[Callable[[], Leaf], Refusal, Refusal]] = {
    "foreign root": (
        lambda: STRANGER.issue(str(CART)),
        (TlsReason.CHAIN, "unable to get local issuer certificate"),
        (TlsReason.CHAIN, "unable to get local issuer certificate"),
    ),
    "expired": (
        lambda: ROOT.issue(str(CART), from_day=-3, to_day=-1),
        (TlsReason.EXPIRED, "has expired"),
        (TlsReason.EXPIRED, "has expired"),
    ),
    "not yet valid": (
        lambda: ROOT.issue(str(CART), from_day=1, to_day=2),
        (TlsReason.EXPIRED, "not yet valid"),
        (TlsReason.EXPIRED, "not yet valid"),
    ),
    "revoked": (lambda: REVOKED, (TlsReason.REVOKED, "revoked"), (TlsReason.REVOKED, "revoked")),
    "revoked intermediate": (
        lambda: REVOKED_MIDDLE.issue(str(CART)),
        (TlsReason.REVOKED, "revoked"),
        (TlsReason.REVOKED, "revoked"),
    ),
    "missing intermediate": (
        lambda: MIDDLE.issue(str(CART), intermediates=False),
        (TlsReason.CHAIN, "unable to get local issuer certificate"),
        (TlsReason.CHAIN, "unable to get local issuer certificate"),
    ),
    "foreign trust domain": (
        lambda: ROOT.issue("spiffe://other.example/ns/shop/sa/cart"),
        (TlsReason.SAN, _TD + "spiffe://other.example/ns/shop/sa/cart"),
        (TlsReason.SAN, _SAN + "spiffe://other.example/ns/shop/sa/cart"),
    ),
    "trust domain that only begins alike": (
        lambda: ROOT.issue("spiffe://cluster.local.evil/ns/shop/sa/cart"),
        (TlsReason.SAN, _TD + "spiffe://cluster.local.evil/ns/shop/sa/cart"),
        (TlsReason.SAN, _SAN + "spiffe://cluster.local.evil/ns/shop/sa/cart"),
    ),
    "no name": (lambda: ROOT.issue(), (TlsReason.SAN, _TD + "none"), (TlsReason.SAN, _SAN + "none")),
    "no workload's name": (
        lambda: ROOT.issue("https://cluster.local/ns/shop/sa/cart"),
        (TlsReason.SAN, _TD + "none"),
        (TlsReason.SAN, _SAN + "none"),
    ),
    "name with more behind it": (
        lambda: ROOT.issue(f"{CART}/more", f"{CART}\x00"),
        (TlsReason.SAN, _TD),
        (TlsReason.SAN, _SAN),
    ),
    "several names, none right": (
        lambda: ROOT.issue("spiffe://a/ns/shop/sa/cart", "spiffe://b/ns/shop/sa/cart"),
        (TlsReason.SAN, _TD + "2 URI names, where one is allowed"),
        (TlsReason.SAN, _SAN + "2 URI names, where one is allowed"),
    ),
}


def workload(leaf: Leaf | None = None, policy: TlsPolicy | None = None) -> WorkloadCertificate:
    """Return the workload WEB, which has revocation lists."""
    own = certificate(ROOT) if leaf is None else issued(leaf, ROOT.pem)
    return WorkloadCertificate(own, 1, policy or TlsPolicy(), RevocationLists.parse(CRL))


def lax(role: Role, leaf: Leaf | None, **changes: object) -> TlsContext:
    """A peer that trusts everybody, so that only the end under test refuses."""
    return TlsContext(
        role,
        TlsSettings(
            certificate_chain_pem=leaf.chain_pem if leaf else None,
            private_key_pem=leaf.key_pem if leaf else None,
            **changes,  # type: ignore[arg-type]
        ),
    )


def assert_refused(judge: End, peer: End, reason: TlsReason, words: str) -> None:
    assert judge.error is not None
    assert (judge.error.reason, judge.error.by_peer) == (reason, False)
    assert words in judge.error.detail
    assert judge.received == b""
    assert peer.received == b""
    assert not judge.session.established
    assert peer.error is not None, "the peer gets an alert"
    assert peer.error.by_peer


def test_workloads_with_valid_certificates_connect() -> None:
    cart = WorkloadCertificate(certificate(ROOT, CART), 1, TlsPolicy(), RevocationLists.parse(CRL))
    client, server = handshake(workload().client_context((str(CART),)), cart.server_context())
    assert (client.error, server.error) == (None, None)
    assert (client.received, server.received) == (b"hello", b"hello")
    facts = server.session.facts()
    assert (facts.version, facts.cipher, facts.group, facts.alpn) == (
        "TLSv1.3",
        "TLS_AES_128_GCM_SHA256",
        "x25519",
        b"h2",
    )
    assert facts.uri_sans == (str(WEB),)


@pytest.mark.parametrize("name", BAD)
def test_server_refuses_a_bad_client_certificate(name: str) -> None:
    make, (reason, words), _ = BAD[name]
    client, server = handshake(lax(Role.CLIENT, make()), workload().server_context())
    assert_refused(server, client, reason, words)


@pytest.mark.parametrize("name", BAD)
def test_client_refuses_a_bad_server_certificate(name: str) -> None:
    make, _, (reason, words) = BAD[name]
    client, server = handshake(workload().client_context((str(CART),)), lax(Role.SERVER, make()))
    assert_refused(client, server, reason, words)


_ROOTS = {"ours": ROOT, "foreign": STRANGER}
_DATES = {"now": (-1, 1), "over": (-3, -1), "to come": (1, 3)}
_NAMES: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    # URI names; whether a server accepts them; whether a client that expects CART accepts them
    "right": ((str(CART),), True, True),
    "another of the domain": ((str(WEB),), True, False),
    "another domain's": (("spiffe://other.example/ns/shop/sa/cart",), False, False),
    "none": ((), False, False),
    "no workload's": (("https://cluster.local/ns/shop/sa/cart",), False, False),
    "several, one right": (("spiffe://a/ns/b/sa/c", str(CART)), False, False),
    "several, none right": (("spiffe://a/ns/b/sa/c", "spiffe://cluster.local/cart"), False, False),
}


@pytest.mark.parametrize("revoked", [False, True])
@pytest.mark.parametrize("dates", _DATES)
@pytest.mark.parametrize("root", _ROOTS)
@pytest.mark.parametrize("names", _NAMES)
def test_a_single_certificate_fault_refuses_the_handshake(
    names: str, root: str, dates: str, revoked: bool
) -> None:
    uris, server_takes, client_takes = _NAMES[names]
    start, end = _DATES[dates]
    leaf = _ROOTS[root].issue(*uris, from_day=start, to_day=end)
    lists = _ROOTS[root].revoke(*([leaf.certificate] if revoked else []))
    ours = WorkloadCertificate(certificate(ROOT), 1, TlsPolicy(), RevocationLists.parse(CRL + lists))
    trusted = root == "ours" and dates == "now" and not revoked
    client, server = handshake(lax(Role.CLIENT, leaf), ours.server_context())
    _assert_verdict(server, client, trusted and server_takes)
    client, server = handshake(ours.client_context((str(CART),)), lax(Role.SERVER, leaf))
    _assert_verdict(client, server, trusted and client_takes)


def _assert_verdict(judge: End, peer: End, accepted: bool) -> None:
    if accepted:
        assert (judge.error, peer.error, judge.received) == (None, None, b"hello")
    else:
        assert judge.error is not None
        assert_refused(judge, peer, judge.error.reason, "")
        if judge.error.reason is TlsReason.REVOKED:
            assert peer.error is not None
            assert "certificate revoked" in peer.error.detail, "the alert says so"


def test_a_server_refuses_a_client_without_certificate() -> None:
    client, server = handshake(lax(Role.CLIENT, None), workload().server_context())
    assert_refused(server, client, TlsReason.NO_CERT, "did not return a certificate")


def test_client_refuses_unexpected_server_identities() -> None:
    for leaf in (ROOT.issue(str(WEB)), ROOT.issue("spiffe://cluster.local/ns/shop/sa/cart2")):
        client, server = handshake(workload().client_context((str(CART),)), lax(Role.SERVER, leaf))
        assert_refused(
            client, server, TlsReason.SAN, f"the expected SAN ({CART}), got spiffe://cluster.local/ns/shop"
        )


def test_client_without_expected_identities_refuses_every_server() -> None:
    client, server = handshake(workload().client_context(()), lax(Role.SERVER, ROOT.issue(str(CART))))
    assert_refused(client, server, TlsReason.SAN, f"the expected SAN (), got {CART}")


def test_one_of_several_expected_names_is_enough() -> None:
    expected = ("spiffe://cluster.local/ns/x/sa/y", str(CART))
    leaf = ROOT.issue(str(CART))
    assert handshake(workload().client_context(expected), lax(Role.SERVER, leaf))[0].error is None


def test_an_intermediate_that_is_sent_is_used() -> None:
    leaf = MIDDLE.issue(str(CART))
    assert handshake(lax(Role.CLIENT, leaf), workload().server_context())[1].error is None


@pytest.mark.parametrize(
    ("alpn", "accepted"), [((), True), ((b"h2",), True), ((b"http/1.1", b"h2"), True), ((b"http/1.1",), False)]
)
def test_server_accepts_alpn_with_h2_only(alpn: tuple[bytes, ...], accepted: bool) -> None:
    client, server = handshake(lax(Role.CLIENT, ROOT.issue(str(CART)), alpn=alpn), workload().server_context())
    if accepted:
        assert server.error is None
    else:
        assert_refused(server, client, TlsReason.ALPN, "client offered only")


def test_tls_1_2_needs_the_setting() -> None:
    old = {"min_version": TlsVersion.TLS_1_2, "max_version": TlsVersion.TLS_1_2}
    peer = ROOT.issue(str(CART))
    client, server = handshake(lax(Role.CLIENT, peer, **old), workload().server_context())
    assert_refused(server, client, TlsReason.VERSION, "protocol")
    lenient = workload(policy=TlsPolicy(tls_1_2=True))
    _, server = handshake(lax(Role.CLIENT, peer, **old), lenient.server_context())
    assert server.session.facts().version == "TLSv1.2"
    client, _ = handshake(lenient.client_context((str(CART),)), lax(Role.SERVER, peer, **old))
    assert client.session.facts().version == "TLSv1.2"


def test_post_quantum_policy_accepts_only_its_group() -> None:
    strict = workload(policy=TlsPolicy.for_compliance("pqc"))
    peer = ROOT.issue(str(CART))
    client, server = handshake(lax(Role.CLIENT, peer), strict.server_context())
    assert server.error is None
    assert server.session.facts().group == "X25519MLKEM768"
    client, server = handshake(lax(Role.CLIENT, peer, groups=("X25519",)), strict.server_context())
    assert_refused(server, client, TlsReason.OTHER, "no suitable")
    client, server = handshake(strict.client_context((str(CART),)), lax(Role.SERVER, peer, groups=("X25519",)))
    assert client.error is not None
    assert client.error.by_peer
    for wrong in ("fips", "PQC"):
        with pytest.raises(ValueError, match="unknown compliance policy"):
            TlsPolicy.for_compliance(wrong)
    with pytest.raises(ValueError, match="excludes TLS12_ENABLED"):
        TlsPolicy.for_compliance("pqc", tls_1_2=True)


def test_server_accepts_only_clients_of_its_trust_domain() -> None:
    other = SpiffeId("other.example", "shop", "web")
    server_certificate = WorkloadCertificate(certificate(ROOT, other), 1, TlsPolicy())
    ours = lax(Role.CLIENT, ROOT.issue(str(CART)))
    client, server = handshake(ours, server_certificate.server_context())
    assert_refused(server, client, TlsReason.SAN, f"the expected trustdomain (other.example), got {CART}")


def test_cache_of_client_contexts_is_bounded() -> None:
    own = workload()
    first = own.client_context((str(CART),))
    assert own.client_context((str(CART),)) is first
    assert own.client_context((str(CART), str(CART))) is not first
    for number in range(254):
        own.client_context((f"spiffe://td/ns/a/sa/{number}",))
    assert own.client_context((str(CART),)) is first, "what is used stays"
    own.client_context(("spiffe://td/ns/a/sa/one-more",))
    own.client_context(("spiffe://td/ns/a/sa/and-more",))
    assert own.client_context((str(CART),)) is first
    assert len(own._clients) == 256
    assert own.server_context() is own.server_context()


def test_client_hello_offers_the_expected_parameters() -> None:
    session = TlsSession(workload().client_context((str(CART),)))
    room = memoryview(bytearray(sealed_bytes(1000)))
    assert not session.handshake()
    offered = _extensions(bytes(room[: session.seal(b"", room)]))
    assert 0 not in offered, "no server name"
    groups = offered[10][2:]
    assert [groups[i : i + 2].hex() for i in range(0, len(groups), 2)] == ["001d", "0017", "0018", "11ec"]
    assert offered[51][2:4].hex() == "001d", "one key share, X25519"
    assert len(offered[51]) == 2 + 4 + 32
    assert offered[43] == b"\x02\x03\x04", "TLS 1.3 and nothing else"
    assert offered[16] == b"\x00\x03\x02h2"


def _extensions(record: bytes) -> dict[int, bytes]:
    """Return the extensions of a ClientHello in one record (RFC 8446, 4.1.2)."""
    position = 5 + 4 + 2 + 32
    position += 1 + record[position]  # session id
    position += 2 + int.from_bytes(record[position : position + 2], "big")  # cipher suites
    position += 1 + record[position] + 2  # compression methods; length of the extensions
    found = {}
    while position < len(record):
        kind, length = (int.from_bytes(record[position + i : position + i + 2], "big") for i in (0, 2))
        found[kind] = record[position + 4 : position + 4 + length]
        position += 4 + length
    return found
