"""When a tunnel between two chains of this process may skip its handshake: as the configuration would judge it."""

import base64
import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from hbone.settings import Role
from tests.hbone.certificates import Authority
from xds.dialects.envoy import Surroundings
from xds.model.secret import Certificate, SanMatch, Validation
from xds.model.string_match import StringMatch
from xds.model.tls import TlsContext
from ztunnel.proxy.envoy.config.sources import Sources
from ztunnel.proxy.envoy.secrets.contexts import LiveContext, agree
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.runtime.clock import SystemClock

ROOT, OTHER = Authority(), Authority("other")
CLIENT, SERVER = "spiffe://td/ns/a/sa/client", "spiffe://td/ns/a/sa/server"
NOW = datetime.now(UTC)


def trusting(authority: Authority = ROOT, *names: str, crl_pem: bytes | None = None) -> Validation:
    """Believes an authority, and only peers with one of these names if there are any."""
    matches = tuple(SanMatch("uri", StringMatch("exact", name)) for name in names)
    return Validation(trusted_ca_pem=authority.pem, san_matches=matches, crl_pem=crl_pem)


def context(
    role: Role,
    name: str,
    validation: Validation | None,
    authority: Authority = ROOT,
    *,
    from_day: float = -1,
    to_day: float = 1,
) -> LiveContext:
    leaf = authority.issue(name, from_day=from_day, to_day=to_day)
    surroundings = Surroundings(read_file=lambda path: b"", environment={}, cluster_id="c")
    stats, clock = Stats(), SystemClock()

    def none(source: object) -> object:
        raise LookupError

    secrets = SecretStore(Sources(None, none, none), surroundings, stats, clock)  # type: ignore[arg-type]
    own = Certificate(chain_pem=leaf.chain_pem, key_pem=leaf.key_pem)
    model = TlsContext(certificate=own, validation=validation)
    return LiveContext(role, model, secrets, lambda: None)


def client(validation: Validation | None = None, **more: object) -> LiveContext:
    return context(Role.CLIENT, CLIENT, validation or trusting(ROOT, SERVER), **more)  # type: ignore[arg-type]


def server(validation: Validation | None = None, **more: object) -> LiveContext:
    return context(Role.SERVER, SERVER, validation or trusting(ROOT, CLIENT), **more)  # type: ignore[arg-type]


def test_contexts_that_accept_each_other_agree() -> None:
    assert agree(client(), server(), NOW)
    assert agree(client(trusting()), server(trusting()), NOW)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (client(to_day=-0.5, from_day=-2), server()),
        (client(), server(to_day=-0.5, from_day=-2)),
        (client(from_day=0.5, to_day=2), server()),
        (client(authority=OTHER), server()),
        (client(), server(authority=OTHER)),
        (client(trusting(OTHER)), server()),
        (client(trusting(ROOT, "spiffe://td/ns/a/sa/another")), server()),
        (client(), server(trusting(ROOT, "spiffe://td/ns/a/sa/another"))),
    ],
    ids=[
        "expired client",
        "expired server",
        "client of the future",
        "client of another root",
        "server of another root",
        "client that believes another root",
        "client that expects another",
        "server that expects another",
    ],
)
def test_contexts_that_would_refuse_each_other_do_not(ours: LiveContext, theirs: LiveContext) -> None:
    assert not agree(ours, theirs, NOW)


def test_the_last_second_is_part_of_the_validity() -> None:
    ours, theirs = client(to_day=1), server(to_day=2)
    assert ours.party is not None
    last = ours.party.credentials.chain[0].not_valid_after_utc
    assert agree(ours, theirs, last)
    assert not agree(ours, theirs, last + timedelta(seconds=1))


def test_a_server_that_verifies_no_client_agrees_with_none() -> None:
    assert not agree(client(), context(Role.SERVER, SERVER, None), NOW)


def test_client_without_validation_accepts_every_server() -> None:
    assert agree(context(Role.CLIENT, CLIENT, None), server(authority=OTHER), NOW)


def test_context_with_handshake_only_rules_has_no_agreement() -> None:
    shown = server()
    assert shown.party is not None
    leaf = shown.party.credentials.chain[0]
    pin = hashlib.sha256(leaf.public_bytes(Encoding.DER)).hexdigest()
    key = leaf.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    spki = base64.b64encode(hashlib.sha256(key).digest()).decode()
    for validation in (
        Validation(trusted_ca_pem=ROOT.pem, certificate_hashes=(pin,)),
        Validation(trusted_ca_pem=ROOT.pem, spki_hashes=(spki,)),
        trusting(crl_pem=ROOT.revoke()),
    ):
        assert not agree(client(validation), shown, NOW)
