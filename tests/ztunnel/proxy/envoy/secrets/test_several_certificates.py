"""A server with several certificates chooses by the client's server name and by the algorithms it can verify, like
Envoy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hbone.settings import Role
from hbone.tls_context import TlsContext as HboneContext
from hbone.tls_context import TlsSettings, TlsVersion
from tests.hbone.certificates import Authority, Leaf
from tests.ztunnel.proxy.envoy.harness import Harness, T, application, chain, cluster, listener, run, tcp
from tests.ztunnel.proxy.envoy.secrets.test_build import certificate, own, secret
from tests.ztunnel.proxy.identity.material import handshake
from xds.errors import ConfigError
from xds.model.secret import Certificate, Secret
from xds.model.tls import AdsSource, SecretRef, TlsContext
from ztunnel.proxy.envoy.secrets.build import build

ROOT = Authority()
LEFT, RIGHT = Authority("left", parent=ROOT), Authority("right", parent=ROOT)
NAME = "spiffe://td/ns/a/sa/b"
ELLIPTIC = LEFT.issue(NAME, dns=["a.example", "*.wild.example"])
RSA = RIGHT.issue(NAME, dns=["a.example", "rsa.example"], rsa_key=True)
LATER = LEFT.issue(NAME, dns=["later.example", "x.wild.example"])


def server(*leaves: Leaf) -> HboneContext:
    first, *further = [own(leaf) for leaf in leaves]
    model = TlsContext(certificate=first, further_certificates=tuple(further))
    built = build(Role.SERVER, model, lambda ref: None)
    assert built is not None
    return built[0]


def client(name: str | None = None, **more: Any) -> HboneContext:
    return HboneContext(Role.CLIENT, TlsSettings(trusted_ca_pem=ROOT.pem, alpn=(), server_name=name, **more))


ONLY_RSA = {
    "min_version": TlsVersion.TLS_1_2,
    "max_version": TlsVersion.TLS_1_2,
    "ciphers_1_2": ("ECDHE-RSA-AES128-GCM-SHA256",),
}


@pytest.mark.parametrize(
    ("leaves", "name", "limits", "shown"),
    [
        ((RSA, ELLIPTIC), None, {}, ELLIPTIC),
        ((ELLIPTIC, RSA), None, {}, ELLIPTIC),
        ((ELLIPTIC, RSA), None, ONLY_RSA, RSA),
        ((ELLIPTIC, LATER), None, {}, ELLIPTIC),
        ((LATER, ELLIPTIC), None, {}, LATER),
        ((ELLIPTIC, LATER, RSA), "later.example", {}, LATER),
        ((ELLIPTIC, LATER, RSA), "LATER.example", {}, LATER),
        ((ELLIPTIC, LATER, RSA), "rsa.example", {}, RSA),
        ((ELLIPTIC, LATER, RSA), "a.example", ONLY_RSA, RSA),
        ((LATER, ELLIPTIC, RSA), "y.wild.example", {}, ELLIPTIC),
        ((ELLIPTIC, LATER, RSA), "x.wild.example", {}, LATER),
        ((LATER, ELLIPTIC), "x.y.wild.example", {}, LATER),
        ((RSA, LATER), "unknown.example", {}, RSA),
        ((LATER, RSA), "unknown.example", {}, LATER),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_certificate_is_chosen_by_name_and_by_key(
    leaves: Sequence[Leaf], name: str | None, limits: dict[str, Any], shown: Leaf
) -> None:
    asking, answering = handshake(client(name, **limits), server(*leaves))
    assert (asking.error, answering.error) == (None, None)
    seen = asking.session.facts()
    assert seen.certificate == shown.certificate
    # Leaf, its own issuer and the root: not the issuers of the others.
    assert len(seen.chain) == 3
    assert seen.chain[1] == (RIGHT if shown is RSA else LEFT).certificate
    assert answering.session.facts().presented == shown.certificate


def test_only_the_issuers_of_the_certificate_are_sent() -> None:
    asking, _ = handshake(client(), server(RSA, ELLIPTIC))
    sent = asking.session._connection.get_peer_cert_chain(as_cryptography=True)
    assert sent == [ELLIPTIC.certificate, LEFT.certificate]


def test_client_is_verified_with_each_server_certificate() -> None:
    """Each certificate has its own OpenSSL context, which must have the same rules for clients."""
    both = HboneContext(
        Role.SERVER,
        TlsSettings(
            certificate_chain_pem=ELLIPTIC.chain_pem,
            private_key_pem=ELLIPTIC.key_pem,
            further=server(ELLIPTIC, RSA).settings.further,
            trusted_ca_pem=ROOT.pem,
            alpn=(),
        ),
    )
    stranger = Authority("stranger").issue(NAME)
    for name in (None, "rsa.example"):
        for leaf, refused in ((ELLIPTIC, False), (stranger, True)):
            asking = client(name, certificate_chain_pem=leaf.chain_pem, private_key_pem=leaf.key_pem)
            _, answering = handshake(asking, both)
            assert (answering.error is not None) == refused, (name, refused)


def test_fault_of_the_second_certificate_names_the_second() -> None:
    wrong = Certificate(chain_pem=RSA.chain_pem, key_pem=ELLIPTIC.key_pem)
    with pytest.raises(ConfigError, match=r"tls_certificates\[1\]\.private_key: "):
        build(Role.SERVER, TlsContext(certificate=own(ELLIPTIC), further_certificates=(wrong,)), lambda ref: None)
    refs = SecretRef("one", AdsSource()), SecretRef("two", AdsSource())
    model = TlsContext(certificate=refs[0], further_certificates=refs[1:])
    secrets: dict[str, Secret] = {"one": own(ELLIPTIC)}
    assert build(Role.SERVER, model, lambda ref: secrets.get(ref.name)) is None, "the second has not arrived"


def test_too_many_names_are_refused() -> None:
    many = LEFT.issue(dns=[f"{number}.example" for number in range(300)])
    with pytest.raises(ConfigError, match="have 302 DNS names; 256 are supported"):
        server(ELLIPTIC, many)


def test_secrets_of_two_certificates_renew_independently(tmp_path: Path) -> None:
    """Over SDS, the server serves when both have arrived. Renewing one leaves the other. ``/certs`` shows both."""
    sds = {"ads": {}}
    common = {"tls_certificate_sds_secret_configs": [{"name": name, "sds_config": sds} for name in ("one", "two")]}
    context = {
        "@type": f"{T}envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": common,
    }
    over_tls = chain(tcp(), transport_socket={"name": "tls", "typed_config": context})

    def pair(name: str, leaf: Leaf) -> Any:
        return secret(name, tls_certificate=certificate(leaf.chain_pem, leaf.key_pem))

    async def body(harness: Harness) -> None:
        async with application(b"good") as port:
            harness.publish(listener(over_tls), cluster(port), pair("one", RSA), pair("two", LATER))
            await harness.until(lambda: harness.proxy.listeners.active)
            (live,) = harness.proxy.listeners.active[0].live_chains
            assert live.tls is not None

            def shown(name: str) -> Any:
                assert live.tls is not None
                assert live.tls.current is not None
                asking, answering = handshake(client(name), live.tls.current)
                facts = answering.session.facts()
                assert facts.presented == live.tls.presented_in(facts).leaf
                return asking.session.facts().certificate

            await harness.until(lambda: live.tls is not None and live.tls.current is not None)
            assert (shown("rsa.example"), shown("later.example")) == (RSA.certificate, LATER.certificate)
            harness.publish(listener(over_tls), cluster(port), pair("one", RSA), pair("two", ELLIPTIC))
            await harness.until(lambda: shown("y.wild.example") == ELLIPTIC.certificate)
            assert shown("rsa.example") == RSA.certificate

    run(tmp_path, body)
