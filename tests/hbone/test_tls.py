"""TLS sessions by bytes: what is negotiated, and every refusal with its reason, on both sides."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from OpenSSL import SSL

from hbone.errors import TlsError, TlsReason
from hbone.settings import Role
from hbone.tls import TlsSession, _uri_sans, sealed_bytes, uri_sans
from hbone.tls_context import ClientCertificate, Refusal, TlsContext, TlsSettings, TlsVersion
from hbone.tls_identities import Identity
from tests.hbone.certificates import Authority, Leaf, of_unknown_version

ROOT = Authority()
LEAF = ROOT.issue("spiffe://cluster.local/ns/a/sa/b")
OUT = memoryview(bytearray(sealed_bytes(300_000)))
GREETING = b"welcome, whoever you are"
half_rtt_data = b""  # of every server here


@pytest.fixture(autouse=True, params=[b"", GREETING], ids=["", "half_rtt_data"])
def _half_rtt_data(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever is proved or refused does not depend on it."""
    global half_rtt_data
    half_rtt_data = request.param
    yield
    half_rtt_data = b""


def settings(leaf: Leaf | None = LEAF, trusted: bytes | None = ROOT.pem) -> TlsSettings:
    return TlsSettings(
        certificate_chain_pem=leaf.chain_pem if leaf else None,
        private_key_pem=leaf.key_pem if leaf else None,
        trusted_ca_pem=trusted,
    )


def sessions(client: TlsSettings, server: TlsSettings) -> tuple[TlsSession, TlsSession]:
    return TlsSession(TlsContext(Role.CLIENT, client)), TlsSession(TlsContext(Role.SERVER, server), half_rtt_data)


class Outcome:
    """A handshake by bytes: the first error of each side, and what the client heard behind it."""

    def __init__(self, client: TlsSession, server: TlsSession, piece: int = 1 << 20) -> None:
        self.client: TlsError | None = None
        self.server: TlsError | None = None
        self.heard = b""
        room = memoryview(bytearray(100))
        waiting = {client: b"", server: b""}
        other = {client: server, server: client}
        for _ in range(8):
            for session, name in ((client, "client"), (server, "server")):
                data, waiting[session] = waiting[session], b""
                pieces = [data[i : i + piece] for i in range(0, len(data), piece)] or [b""]
                for part in pieces:
                    if getattr(self, name) is not None:
                        break
                    try:
                        if part:
                            session.receive(memoryview(part))
                        if not session.established:
                            session.handshake()
                        if session.established:
                            said = bytes(room[: session.read_into(room)])
                            assert session is client or not said
                            self.heard += said
                    except TlsError as error:
                        setattr(self, name, error)
                waiting[other[session]] += bytes(OUT[: session.seal(b"", OUT)])
        assert self.heard == (half_rtt_data if server.half_rtt_sent and client.established else b"")

    @property
    def reasons(self) -> tuple[TlsReason | None, TlsReason | None]:
        return (
            self.client.reason if self.client else None,
            self.server.reason if self.server else None,
        )


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
def test_handshake_in_pieces_and_facts(piece: int) -> None:
    client, server = sessions(settings(), settings())
    assert Outcome(client, server, piece).reasons == (None, None)
    for session in (client, server):
        facts = session.facts()
        assert facts.certificate == LEAF.certificate
        assert facts.chain == (LEAF.certificate, ROOT.certificate)
        assert facts.uri_sans == ("spiffe://cluster.local/ns/a/sa/b",)
        assert (facts.version, facts.cipher, facts.alpn) == ("TLSv1.3", "TLS_AES_128_GCM_SHA256", b"h2")


def test_half_rtt_data_arrives_before_the_client_is_authenticated() -> None:
    client, server = sessions(settings(), settings())
    flights_until_established(client, server, 1)
    assert server.half_rtt_sent == bool(half_rtt_data)
    room = memoryview(bytearray(100))
    assert bytes(room[: client.read_into(room)]) == half_rtt_data
    assert not server.established


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_a_hello_retry_gets_no_half_rtt_data(piece: int) -> None:
    """OpenSSL stops behind a HelloRetryRequest, too, where nothing could be encrypted, and then no more."""
    other = replace(settings(), groups=("secp384r1",))  # of which the client sends no share at first
    client, server = sessions(settings(), other)
    flights_until_established(client, server, 2)
    assert not server.half_rtt_sent
    client, server = sessions(settings(), other)
    assert Outcome(client, server, piece).reasons == (None, None)
    assert server.facts().group == "secp384r1"
    assert not server.half_rtt_sent
    assert Outcome(*sessions(settings(None), other)).reasons == (TlsReason.NO_CERT, TlsReason.NO_CERT)


def flights_until_established(client: TlsSession, server: TlsSession, flights: int) -> None:
    """Exchange flights until the client is established; the server has not seen its Finished."""
    for _ in range(flights):
        assert not client.handshake()
        server.receive(memoryview(bytes(OUT[: client.seal(b"", OUT)])))
        assert not server.handshake()
        client.receive(memoryview(bytes(OUT[: server.seal(b"", OUT)])))
    assert client.handshake()


@pytest.mark.parametrize("size", [1, 16_384, 16_385, 262_144])
def test_payload_in_any_pieces(size: int) -> None:
    client, server = sessions(settings(), settings())
    Outcome(client, server)
    data = bytes(range(256)) * (size // 256 + 1)
    sealed = bytes(OUT[: client.seal(data[:size], OUT)])
    plain = memoryview(bytearray(size + 100))
    got = b""
    for start in range(0, len(sealed), 10_000):
        server.receive(memoryview(sealed[start : start + 10_000]))
        got += bytes(plain[: server.read_into(plain)])
    assert got == data[:size]


def test_reading_into_little_room_goes_on() -> None:
    client, server = sessions(settings(), settings())
    Outcome(client, server)
    sealed = memoryview(bytes(OUT[: client.seal(b"x" * 50_000, OUT)]))
    server.receive(sealed)
    room, total = memoryview(bytearray(777)), 0
    while (count := server.read_into(room)) == 777:
        total += count
    assert total + count == 50_000


def test_close_notify_is_seen_and_reading_goes_on_until_then() -> None:
    client, server = sessions(settings(), settings())
    Outcome(client, server)
    first = bytes(OUT[: client.seal(b"bye", OUT)])
    client.close()
    server.receive(memoryview(first + bytes(OUT[: client.seal(b"", OUT)])))
    plain = memoryview(bytearray(100))
    assert server.read_into(plain) == 3
    assert server.peer_closed
    back = bytes(OUT[: server.seal(b"still there", OUT)])
    client.receive(memoryview(back))
    assert client.read_into(plain) == 11
    assert not client.peer_closed


def test_a_tampered_record_ends_the_session() -> None:
    client, server = sessions(settings(), settings())
    Outcome(client, server)
    sealed = bytearray(OUT[: client.seal(b"payload", OUT)])
    sealed[-1] ^= 1
    server.receive(memoryview(sealed))
    with pytest.raises(TlsError) as caught:
        server.read_into(memoryview(bytearray(100)))
    assert caught.value.reason is TlsReason.OTHER
    assert not caught.value.by_peer


def test_other_sessions_are_not_disturbed_by_a_failed_one() -> None:
    good = sessions(settings(), settings())
    Outcome(*good)
    stranger = Authority("stranger")
    Outcome(*sessions(settings(stranger.issue("spiffe://x/ns/a/sa/b")), settings()))
    sealed = bytes(OUT[: good[0].seal(b"fine", OUT)])
    good[1].receive(memoryview(sealed))
    assert good[1].read_into(memoryview(bytearray(10))) == 4


def test_a_client_without_a_certificate_is_refused() -> None:
    outcome = Outcome(*sessions(settings(None), settings()))
    assert outcome.reasons == (TlsReason.NO_CERT, TlsReason.NO_CERT)
    assert outcome.client is not None
    assert outcome.client.by_peer


@pytest.mark.parametrize("mode", [ClientCertificate.OPTIONAL, ClientCertificate.NONE])
def test_a_certificate_may_be_optional(mode: ClientCertificate) -> None:
    client, server = sessions(settings(None), replace(settings(), client_certificate=mode))
    assert Outcome(client, server).reasons == (None, None)
    assert server.facts().certificate is None


def test_a_certificate_of_another_root_is_refused_by_either_side() -> None:
    stranger = Authority("stranger").issue("spiffe://cluster.local/ns/a/sa/b")
    outcome = Outcome(*sessions(settings(stranger), settings()))
    assert outcome.reasons == (TlsReason.CHAIN, TlsReason.CHAIN)
    assert Outcome(*sessions(settings(), settings(stranger))).reasons[0] is TlsReason.CHAIN


@pytest.mark.parametrize(("start", "end", "bound"), [(-3, -1, "valid until"), (1, 3, "valid from")])
def test_an_expired_or_future_certificate_is_refused_with_both_times(start: float, end: float, bound: str) -> None:
    leaf = ROOT.issue("spiffe://cluster.local/ns/a/sa/b", from_day=start, to_day=end)
    outcome = Outcome(*sessions(settings(leaf), settings()))
    assert outcome.reasons[1] is TlsReason.EXPIRED
    # The error names both times: only together do they show whose clock is wrong.
    end_of_it = leaf.certificate.not_valid_before_utc if start > 0 else leaf.certificate.not_valid_after_utc
    assert f"{bound} {end_of_it:%Y-%m-%dT%H:%M:%SZ}, and here it is 20" in str(outcome.server)
    lenient = replace(settings(), allow_expired=True)
    assert Outcome(*sessions(settings(leaf), lenient)).reasons == (None, None)


def test_intermediates_must_be_sent_unless_trusted() -> None:
    middle = Authority("middle", ROOT)
    assert Outcome(*sessions(settings(middle.issue("spiffe://a/ns/a/sa/b")), settings())).reasons == (None, None)
    bare = middle.issue("spiffe://a/ns/a/sa/b", intermediates=False)
    assert Outcome(*sessions(settings(bare), settings())).reasons[1] is TlsReason.CHAIN
    assert Outcome(*sessions(settings(bare), settings(trusted=middle.pem))).reasons[1] is None


@pytest.mark.parametrize("further", [0, 1], ids=["one certificate", "several"])
def test_the_root_is_not_sent_and_issuers_that_we_trust_are(further: int) -> None:
    middle = Authority("middle", ROOT)
    bare = middle.issue("spiffe://a/ns/a/sa/b", intermediates=False)
    for leaf, trusted, sent in ((LEAF, ROOT.pem, 1), (bare, middle.pem + ROOT.pem, 2)):
        server = replace(settings(leaf, trusted), further=(Identity(leaf.chain_pem, leaf.key_pem),) * further)
        client, other = sessions(settings(), server)
        assert Outcome(client, other).client is None
        assert len(client._connection.get_peer_cert_chain() or ()) == sent


@pytest.mark.parametrize("order", [1, -1], ids=["expired first", "renewed first"])
def test_a_renewed_intermediate_is_sent_instead_of_the_expired_one(order: int) -> None:
    middle = Authority("middle", ROOT)
    bare = middle.issue("spiffe://a/ns/a/sa/b", intermediates=False)
    both = [middle.reissued(to_day=-0.5).pem, middle.pem][::order]
    client, server = sessions(settings(), settings(bare, b"".join([*both, ROOT.pem])))
    assert Outcome(client, server).reasons == (None, None)


def test_a_listed_certificate_or_intermediate_is_refused() -> None:
    other = ROOT.issue("spiffe://cluster.local/ns/a/sa/c")
    for listed, expired, reason in (
        (LEAF, False, TlsReason.REVOKED),
        (LEAF, True, TlsReason.REVOKED),
        (other, True, None),
    ):
        crl = ROOT.revoke(listed.certificate, expired=expired)
        outcome = Outcome(*sessions(settings(), replace(settings(), crl_pem=b"junk\n" + crl)))
        assert outcome.reasons[1] is reason
    middle = Authority("middle", ROOT)
    crl = ROOT.revoke(middle.certificate)  # and no list of the intermediate itself: unknown is allowed
    leaf = middle.issue("spiffe://a/ns/a/sa/b")
    assert Outcome(*sessions(settings(leaf), replace(settings(), crl_pem=crl))).reasons[1] is TlsReason.REVOKED
    crl = ROOT.revoke(other.certificate)
    assert Outcome(*sessions(settings(leaf), replace(settings(), crl_pem=crl))).reasons == (None, None)


def test_lists_can_be_required_for_every_certificate_of_the_chain() -> None:
    middle = Authority("middle", ROOT)
    leaf = middle.issue("spiffe://a/ns/a/sa/b")

    def refused(crl: bytes) -> str:
        required = replace(settings(), crl_pem=crl, crl_required=True)
        return str(Outcome(*sessions(settings(leaf), required)).server or "")

    assert refused(ROOT.revoke() + middle.revoke()) == ""
    assert "unable to get certificate CRL (certificate 0 of the chain" in refused(ROOT.revoke())
    assert "unable to get certificate CRL" in refused(Authority().revoke())
    assert "CRL has expired" in refused(ROOT.revoke(expired=True) + middle.revoke())


@pytest.mark.parametrize("side", ["client", "server"])
def test_the_verify_hook_refuses_inside_the_handshake(side: str) -> None:
    seen: list[Sequence[x509.Certificate]] = []

    def judge(chain: Sequence[x509.Certificate]) -> str | None:
        seen.append(chain)
        return "nobody we know"

    strict = replace(settings(), verify=judge)
    pair = sessions(strict, settings()) if side == "client" else sessions(settings(), strict)
    outcome = Outcome(*pair)
    mine, peer = (outcome.client, outcome.server) if side == "client" else (outcome.server, outcome.client)
    assert mine is not None
    assert (mine.reason, mine.detail, mine.by_peer) == (TlsReason.SAN, "nobody we know", False)
    assert peer is not None
    assert peer.by_peer
    assert "bad certificate" in peer.detail
    assert [list(chain) for chain in seen] == [[LEAF.certificate, ROOT.certificate]]


def test_contexts_with_different_expected_peers_share_one_openssl_context() -> None:
    """Their handshakes run at the same time, and each asks its own."""

    def expecting(name: str) -> Callable[[Sequence[x509.Certificate]], str | None]:
        return lambda chain: None if name == "the leaf" else f"not {name}"

    base = TlsContext(Role.CLIENT, replace(settings(), verify=expecting("nobody")))
    names = ("the leaf", "another", "the leaf", "a third")
    pairs = [
        (TlsSession(base.expecting(expecting(name))), TlsSession(TlsContext(Role.SERVER, settings())))
        for name in names
    ]
    assert {pair[0]._context.raw for pair in pairs} == {base.raw}
    for client, _ in pairs:
        client.handshake()  # each has begun before the first goes on
    outcomes = [Outcome(client, server) for client, server in pairs]
    assert [each.client and each.client.detail for each in outcomes] == [None, "not another", None, "not a third"]
    assert Outcome(*sessions(replace(settings(), verify=expecting("nobody")), settings())).client is not None
    with pytest.raises(ValueError, match="without verify"):
        TlsContext(Role.CLIENT, settings()).expecting(expecting("the leaf"))


def test_the_verify_hook_may_say_that_the_peer_is_revoked() -> None:
    strict = replace(settings(), verify=lambda chain: Refusal(TlsReason.REVOKED, "on our list"))
    outcome = Outcome(*sessions(settings(), strict))
    assert outcome.reasons == (TlsReason.REVOKED, TlsReason.REVOKED)
    assert outcome.server is not None
    assert outcome.server.detail == "on our list"


def test_a_bug_in_the_hook_is_raised() -> None:
    def broken(chain: Sequence[x509.Certificate]) -> str | None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Outcome(*sessions(settings(), replace(settings(), verify=broken)))


def test_a_certificate_that_only_openssl_can_read_is_refused(tmp_path: Path) -> None:
    """Without trusted roots, where the hook alone judges, as for pinned certificates."""
    pinned = replace(settings(), trusted_ca_pem=None, any_chain=True, verify=lambda chain: None)
    server = TlsSession(TlsContext(Role.SERVER, pinned))
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_alpn_protos(list(pinned.alpn))
    odd = tmp_path / "odd.pem"
    odd.write_bytes(of_unknown_version(LEAF.chain_pem) + LEAF.key_pem)
    context.use_certificate_file(str(odd))
    context.use_privatekey_file(str(odd))
    client = SSL.Connection(context)
    client.set_connect_state()
    room = memoryview(bytearray(sealed_bytes(1 << 16)))

    def step() -> bool:
        with contextlib.suppress(SSL.WantReadError):
            client.do_handshake()
        server.receive(memoryview(client.bio_read(1 << 16)))
        return server.handshake()

    assert not step()
    client.bio_write(bytes(room[: server.seal(b"", room)]))
    with pytest.raises(TlsError, match="certificate 0 of the chain cannot be read") as refused:
        step()
    assert refused.value.reason is TlsReason.CHAIN


def test_tls_versions_are_negotiated_within_the_configured_range() -> None:
    old = replace(settings(), min_version=TlsVersion.TLS_1_2, max_version=TlsVersion.TLS_1_2)
    assert Outcome(*sessions(old, settings())).reasons == (TlsReason.VERSION, TlsReason.VERSION)
    both = replace(settings(), min_version=TlsVersion.TLS_1_2)
    client, server = sessions(old, both)
    assert Outcome(client, server).reasons == (None, None)
    assert server.facts().version == "TLSv1.2"
    assert not server.half_rtt_sent
    data = bytes(OUT[: client.seal(b"x" * 70_000, OUT)])
    server.receive(memoryview(data))
    assert server.read_into(memoryview(bytearray(80_000))) == 70_000


def test_alpn_is_required_only_where_configured() -> None:
    strict = replace(settings(), alpn_required=True)
    assert Outcome(*sessions(replace(settings(), alpn=()), strict)).reasons == (None, None)
    other = replace(settings(), alpn=(b"http/1.1",))
    assert Outcome(*sessions(other, strict)).reasons == (TlsReason.ALPN, TlsReason.ALPN)
    client, server = sessions(other, settings())
    assert Outcome(client, server).reasons == (None, None)
    assert server.facts().alpn is None
    assert Outcome(*sessions(strict, replace(settings(), alpn=()))).reasons[0] is TlsReason.ALPN


def test_groups_and_suites() -> None:
    client, server = sessions(
        replace(settings(), groups=("X25519MLKEM768",), suites=("TLS_AES_256_GCM_SHA384",)), settings()
    )
    assert Outcome(client, server).reasons == (None, None)
    assert server.facts().group == "X25519MLKEM768"
    assert server.facts().cipher == "TLS_AES_256_GCM_SHA384"
    classic = replace(settings(), groups=("X25519",))
    hybrid = replace(settings(), groups=("X25519MLKEM768",))
    assert Outcome(*sessions(classic, hybrid)).reasons[1] is TlsReason.OTHER
    with pytest.raises(ValueError, match="NoSuchGroup"):
        TlsContext(Role.CLIENT, replace(settings(), groups=("NoSuchGroup",)))


def test_key_log_lines() -> None:
    lines: list[bytes] = []
    Outcome(*sessions(replace(settings(), key_log=lines.append), settings()))
    assert any(line.startswith(b"CLIENT_TRAFFIC_SECRET_0 ") for line in lines)


@pytest.mark.parametrize(
    "broken",
    [
        {"certificate_chain_pem": b"no pem"},
        {"private_key_pem": b"no pem"},
        {"trusted_ca_pem": b""},
        {"private_key_pem": ROOT.issue().key_pem},
        {"suites": ("NO_SUCH_SUITE",)},
        {"crl_pem": b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n"},
        {"crl_pem": b"nonsense"},
        {"crl_pem": b""},
        {"crl_pem": ROOT.revoke()[:-30]},
    ],
)
def test_unusable_material_is_a_value_error(broken: dict[str, bytes]) -> None:
    with pytest.raises(ValueError):
        TlsContext(Role.SERVER, replace(settings(), **broken))


def test_keys_are_not_shown() -> None:
    assert b"PRIVATE" not in repr(settings()).encode()


def test_sessions_are_never_resumed() -> None:
    context_client, context_server = TlsContext(Role.CLIENT, settings()), TlsContext(Role.SERVER, settings())
    client, server = TlsSession(context_client), TlsSession(context_server, half_rtt_data)
    Outcome(client, server)
    session = client._connection.get_session()
    assert session is not None
    client, server = TlsSession(context_client), TlsSession(context_server, half_rtt_data)
    client._connection.set_session(session)
    assert Outcome(client, server).reasons == (None, None)
    assert server.facts().chain  # verified anew
    assert isinstance(client._connection, SSL.Connection)


def test_cached_names_do_not_keep_certificates_alive() -> None:
    """Peers rotate certificates. The cache of names keeps neither a certificate nor its parsed form alive."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), None, now, now + timedelta(hours=1))
    for number in range(1, 400):
        san = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://td/ns/a/sa/{number}")])
        made = builder.serial_number(number).add_extension(san, critical=True).sign(key, hashes.SHA256())
        references = sys.getrefcount(made)
        assert uri_sans(made) == uri_sans(made) == (f"spiffe://td/ns/a/sa/{number}",)
        assert sys.getrefcount(made) == references
    assert _uri_sans.cache_info().currsize <= 256
