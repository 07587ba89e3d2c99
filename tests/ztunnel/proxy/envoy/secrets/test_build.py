"""A TLS context that no handshake could use is refused before its listener, cluster or secret is accepted."""

import base64
import hashlib
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from hbone.errors import TlsReason
from hbone.settings import Role
from tests.hbone.certificates import Authority, Leaf
from tests.ztunnel.proxy.envoy.harness import (
    Harness,
    Json,
    T,
    application,
    ask,
    chain,
    cluster,
    listener,
    run,
    tcp,
)
from tests.ztunnel.proxy.identity.material import handshake
from xds.errors import ConfigError
from xds.model.secret import Certificate, SanMatch, Secret, Validation
from xds.model.string_match import StringMatch
from xds.model.tls import AdsSource, SecretRef, TlsContext
from ztunnel.cli import main as command
from ztunnel.proxy.envoy.secrets.build import _key_log, build

ROOT, OTHER = Authority(), Authority("other")
NAME = "spiffe://td/ns/a/sa/b"
LEAF, STRANGER = ROOT.issue(NAME), OTHER.issue(NAME)
GARBAGE = "-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"


def own(leaf: Leaf = LEAF) -> Certificate:
    return Certificate(chain_pem=leaf.chain_pem, key_pem=leaf.key_pem)


def context(role: Role, model: TlsContext, **secrets: Secret) -> Any:
    built = build(role, model, lambda ref: secrets.get(ref.name))
    assert built is not None
    return built[0]


# What a context is made of


PINS = [
    Validation(certificate_hashes=(hashlib.sha256(LEAF.certificate.public_bytes(Encoding.DER)).hexdigest(),)),
    Validation(
        spki_hashes=(
            base64.b64encode(
                hashlib.sha256(
                    LEAF.certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
                ).digest()
            ).decode(),
        )
    ),
]


ODD_ROOTS = {
    "garbage": GARBAGE.encode(),
    "not for TLS": GARBAGE.replace("CERTIFICATE", "TRUSTED CERTIFICATE").encode(),
    "cut off": OTHER.pem[: len(OTHER.pem) // 2] + b"\n",
}


@pytest.mark.parametrize("odd", ODD_ROOTS.values(), ids=ODD_ROOTS)
@pytest.mark.parametrize("by_sds", [False, True])
def test_unreadable_root_is_left_out_and_others_are_used(
    odd: bytes, by_sds: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    number = itertools.count()

    def trusting(pem: bytes) -> tuple[Any, Validation]:
        validation = Validation(trusted_ca_pem=pem, trusted_ca_file=f"{tmp_path}/{next(number)}.pem")
        reference = SecretRef("roots", AdsSource())
        model = TlsContext(
            certificate=own(), alpn=("h2",), validation=None if by_sds else validation,
            validation_ref=reference if by_sds else None,
        )  # fmt: skip
        for _ in range(2):  # as after a renewed certificate
            built = build(Role.SERVER, model, lambda ref: validation)
        assert built is not None
        assert built[1] is not None
        return built[0], built[1]

    for pem, left_out in ((odd + ROOT.pem, 1), (ROOT.pem + odd, 2)):
        caplog.clear()
        server, used = trusting(pem)
        assert used.trusted_ca_pem is not None
        assert x509.load_pem_x509_certificates(used.trusted_ca_pem) == [ROOT.certificate]
        assert [message.partition(" is left out: ")[0] for message in caplog.messages] == [
            f"trusted_ca {used.trusted_ca_file}: certificate {left_out}"
        ]
        for leaf, accepted in ((LEAF, True), (STRANGER, False)):
            client = context(Role.CLIENT, TlsContext(certificate=own(leaf), alpn=("h2",)))
            assert (handshake(client, server)[1].error is None) == accepted
    with pytest.raises(ConfigError, match="no certificate in PEM"):
        trusting(odd)


@pytest.mark.parametrize("pin", PINS, ids=["certificate", "key"])
@pytest.mark.parametrize("judge", [Role.SERVER, Role.CLIENT])
def test_a_pin_needs_no_trusted_root(judge: Role, pin: Validation) -> None:
    """The chain is not verified, but the pin is, as in Envoy."""

    def between(leaf: Leaf) -> tuple[Any, Any]:
        ends = {}
        for role in Role:
            model = TlsContext(certificate=own(leaf), validation=pin if role is judge else None, alpn=("h2",))
            ends[role] = context(role, model)
        return handshake(ends[Role.CLIENT], ends[Role.SERVER])

    client, server = between(LEAF)
    assert (client.error, server.error) == (None, None)
    verified = (server if judge is Role.SERVER else client).session.facts()
    assert verified.uri_sans == (NAME,)
    assert len(verified.chain) == 1, "an issuer that was not verified is no fact"

    client, server = between(STRANGER)
    refusing = server if judge is Role.SERVER else client
    assert refusing.error is not None
    assert refusing.error.reason is TlsReason.SAN
    assert "does not match" in refusing.error.detail


def test_a_server_with_pins_demands_a_certificate() -> None:
    server = context(Role.SERVER, TlsContext(certificate=own(), validation=PINS[0], alpn=("h2",)))
    client = context(Role.CLIENT, TlsContext(certificate=None, alpn=("h2",)))
    _, refusing = handshake(client, server)
    assert refusing.error is not None
    assert refusing.error.reason is TlsReason.NO_CERT


def test_suites_of_equal_preference_are_taken_in_order() -> None:
    """BoringSSL's ``[A|B]``, which OpenSSL has no form of."""
    suites = ("[ECDHE-ECDSA-AES256-GCM-SHA384|ECDHE-ECDSA-AES128-GCM-SHA256]", "TLS_AES_256_GCM_SHA384")
    built = context(Role.SERVER, TlsContext(certificate=own(), cipher_suites=suites, curves=("P-256",)))
    assert built.settings.ciphers_1_2 == ("ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-ECDSA-AES128-GCM-SHA256")
    assert built.settings.suites == ("TLS_AES_256_GCM_SHA384",)


def test_a_key_with_a_password_serves() -> None:
    key = load_pem_private_key(LEAF.key_pem, None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    certificate = Certificate(chain_pem=LEAF.chain_pem, key_pem=locked, password=b"secret")
    server = context(Role.SERVER, TlsContext(certificate=certificate, alpn=("h2",)))
    client, answering = handshake(context(Role.CLIENT, TlsContext(certificate=None, alpn=("h2",))), server)
    assert (client.error, answering.error) == (None, None)


REF = SecretRef("s", AdsSource())
SAN = Validation(san_matches=(SanMatch("uri", StringMatch("prefix", "spiffe://")),))


@pytest.mark.parametrize(
    ("model", "secret", "words"),
    [
        (
            TlsContext(certificate=REF),
            Validation(),
            "tls_certificate_sds_secret_configs[0]: secret s is not a cert",
        ),
        (
            TlsContext(certificate=None, validation_ref=REF),
            own(),
            "validation_context_sds_secret_config: secret s is",
        ),
        (TlsContext(certificate=None, validation=SAN), None, "validation_context: SAN-based verification"),
        (
            TlsContext(certificate=None, validation=SAN, validation_ref=REF),
            Validation(),
            "combined_validation_con",
        ),
        (
            TlsContext(certificate=None, validation=Validation(allow_expired=True)),
            None,
            "validity period is always",
        ),
        (
            TlsContext(certificate=None, validation=Validation(crl_pem=ROOT.revoke())),
            None,
            "validation_context: a revocation list without trusted_ca",
        ),
        (
            TlsContext(certificate=own(), require_peer_certificate=True),
            None,
            "require_client_certificate: there is",
        ),
    ],
)
def test_unsatisfiable_tls_parameters_are_refused(model: TlsContext, secret: Secret | None, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(Role.SERVER, model, lambda ref: secret)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("crl_pem", "reason"),
    [
        (ROOT.revoke(), None),
        (OTHER.revoke(), TlsReason.CHAIN),
        (ROOT.revoke(expired=True), TlsReason.CHAIN),
        (ROOT.revoke(LEAF.certificate), TlsReason.REVOKED),
    ],
)
def test_a_chain_without_a_current_revocation_list_is_refused(crl_pem: bytes, reason: TlsReason | None) -> None:
    validation = Validation(trusted_ca_pem=ROOT.pem, crl_pem=crl_pem)
    server = context(Role.SERVER, TlsContext(certificate=own(), alpn=("h2",), validation=validation))
    client = context(Role.CLIENT, TlsContext(certificate=own(), alpn=("h2",)))
    error = handshake(client, server)[1].error
    assert (error.reason if error is not None else None) is reason


def test_a_key_log_that_fails_later_ends_no_handshake(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = _key_log(str(folder / "keys"))
    assert log is not None
    log(b"one")
    assert (folder / "keys").read_bytes() == b"one\n"
    (folder / "keys").unlink()
    folder.rmdir()
    log(b"two")
    log(b"three")
    assert [each.getMessage() for each in caplog.records] == [
        f"keys are not logged path={folder}/keys error=No such file or directory"
    ]
    folder.mkdir()
    log(b"four")
    assert (folder / "keys").read_bytes() == b"four\n"


def test_context_is_checked_as_far_as_its_secrets_have_arrived() -> None:
    waiting = TlsContext(certificate=REF, validation=SAN, validation_ref=REF)
    assert build(Role.CLIENT, waiting, lambda ref: None) is None
    bad = TlsContext(certificate=REF, curves=("nope",))
    with pytest.raises(ConfigError, match=r"ecdh_curves\[0\]: unknown key exchange group 'nope'"):
        build(Role.CLIENT, bad, lambda ref: None)


# Where it is refused


def weak() -> Json:
    """A certificate whose key OpenSSL's security level refuses, and that is well-formed."""
    authority = Authority("weak")
    key = rsa.generate_private_key(65537, 1024)
    old = authority.issue(NAME).certificate
    builder = x509.CertificateBuilder().subject_name(old.subject).issuer_name(old.issuer)
    builder = builder.serial_number(1).not_valid_before(old.not_valid_before_utc)
    builder = builder.not_valid_after(old.not_valid_after_utc).public_key(key.public_key())
    signed = builder.sign(authority.key, hashes.SHA256())
    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate(signed.public_bytes(Encoding.PEM), key.private_bytes(*form))


def certificate(chain_pem: bytes | str = LEAF.chain_pem, key_pem: bytes | str = LEAF.key_pem) -> Json:
    def inline(pem: bytes | str) -> Json:
        return {"inline_string": pem.decode() if isinstance(pem, bytes) else pem}

    return {"certificate_chain": inline(chain_pem), "private_key": inline(key_pem)}


def inline_ca(**more: Any) -> Json:
    return {"trusted_ca": {"inline_string": ROOT.pem.decode()}, **more}


#: What a context says, the end of the path, the reason.
BAD: dict[str, tuple[Callable[[], Json], str, str]] = {
    "wrong key": (
        lambda: {"tls_certificates": [certificate(key_pem=STRANGER.key_pem)]},
        "tls_certificates[0].private_key",
        "the private key is not that of the certificate",
    ),
    "garbage certificate": (
        lambda: {"tls_certificates": [certificate(GARBAGE)]},
        "tls_certificates[0].certificate_chain",
        "no certificate in PEM",
    ),
    "garbage behind the certificate": (
        lambda: {"tls_certificates": [certificate(LEAF.chain_pem.decode() + GARBAGE)]},
        "tls_certificates[0].certificate_chain",
        "no certificate in PEM",
    ),
    "weak key": (lambda: {"tls_certificates": [weak()]}, "tls_certificates[0]", "key too small"),
    "garbage root": (
        lambda: {"validation_context": {"trusted_ca": {"inline_string": GARBAGE}}},
        "validation_context.trusted_ca",
        "no certificate in PEM",
    ),
    "garbage revocation list": (
        lambda: {"validation_context": inline_ca(crl={"inline_string": "nonsense"})},
        "validation_context.crl",
        "no certificate revocation list in PEM",
    ),
    "second revocation list": (
        lambda: {
            "validation_context": inline_ca(
                crl={
                    "inline_string": ROOT.revoke().decode()
                    + "-----BEGIN X509 CRL-----\nxx\n-----END X509 CRL-----\n"
                }
            )
        },
        "validation_context.crl",
        "not a certificate revocation list in PEM",
    ),
    "pin": (
        lambda: {"validation_context": inline_ca(verify_certificate_spki=["nope"])},
        "validation_context.verify_certificate_spki[0]",
        "Invalid base64-encoded SHA-256",
    ),
    "cipher beside a good one": (
        lambda: {"tls_params": {"cipher_suites": ["ECDHE-ECDSA-AES128-GCM-SHA256", "NOPE"]}},
        "tls_params.cipher_suites[1]",
        "unknown cipher suite 'NOPE'",
    ),
    "curve": (
        lambda: {"tls_params": {"ecdh_curves": ["X25519", "[X25519|P-256]"]}},
        "tls_params.ecdh_curves[1]",
        "unknown key exchange group",
    ),
    "key log": (
        lambda: {"key_log": {"path": "/dev/null/keys"}},
        "key_log.path",
        "/dev/null/keys: cannot be written: Not a directory",
    ),
}
EACH = pytest.mark.parametrize("case", BAD)


def socket(kind: str, common: Json) -> Json:
    """A transport socket; a server needs a certificate."""
    if kind == "DownstreamTlsContext":
        common = {"tls_certificates": [certificate()], **common}
    context = {"@type": f"{T}envoy.extensions.transport_sockets.tls.v3.{kind}", "common_tls_context": common}
    return {"name": "tls", "typed_config": context}


def bad_listener(case: str) -> Json:
    # The default chain: the chains before it are good, and its place in errors is its own.
    good = chain(tcp(), filter_chain_match={"destination_port": 1})
    bad = chain(tcp(), transport_socket=socket("DownstreamTlsContext", BAD[case][0]()))
    return {**listener(good)[1], "default_filter_chain": bad}


def bad_cluster(case: str) -> Json:
    return cluster(1, transport_socket=socket("UpstreamTlsContext", BAD[case][0]()))[1]


def place(kind: str, case: str) -> str:
    where = "default_filter_chain." if kind == "listener" else ""
    return f"{where}transport_socket.typed_config.common_tls_context.{BAD[case][1]}: "


@EACH
def test_lds_refuses_an_unbuildable_context_and_the_good_listener_serves(case: str, tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"good") as port:
            assert await harness.published(listener(), cluster(port)) is None
            await harness.until(lambda: harness.proxy.listeners.active)
            error = await harness.published(("listener", bad_listener(case)), cluster(port))
            assert error is not None
            assert f"l: {place('listener', case)}" in error
            assert BAD[case][2] in error
            assert await ask(harness.port("l"), b"") == b"good"

    run(tmp_path, body)


@EACH
def test_cds_refuses_an_unbuildable_context_and_the_good_cluster_serves(case: str, tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"good") as port:
            assert await harness.published(listener(), cluster(port)) is None
            await harness.until(lambda: harness.proxy.listeners.active)
            harness.publish(listener(), ("cluster", bad_cluster(case)))
            await harness.until(lambda: [error for kind, error in harness.answers if kind == "Cluster" and error])
            error = next(error for kind, error in harness.answers if kind == "Cluster" and error)
            assert f"app: {place('cluster', case)}" in error
            assert BAD[case][2] in error
            assert await ask(harness.port("l"), b"") == b"good"
            assert harness.proxy.clusters.failures["app"].details in error
            assert harness.count("cluster.app.membership_total") == 1, "statistics are still those of the good one"

    run(tmp_path, body)


@EACH
def test_validate_names_the_place_of_an_unbuildable_context(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resources = [
        {"@type": f"{T}envoy.config.listener.v3.Listener", **bad_listener(case)},
        {"@type": f"{T}envoy.config.cluster.v3.Cluster", **bad_cluster(case)},
    ]
    (tmp_path / "lds.json").write_text(json.dumps({"resources": resources[:1]}))
    (tmp_path / "cds.json").write_text(json.dumps({"resources": resources[1:]}))
    bootstrap = {
        "static_resources": {"listeners": [bad_listener(case)], "clusters": [bad_cluster(case)]},
        "dynamic_resources": {
            f"{kind}_config": {"path_config_source": {"path": str(tmp_path / f"{kind}.json")}}
            for kind in ("lds", "cds")
        },
    }
    (tmp_path / "bootstrap.json").write_text(json.dumps(bootstrap))
    assert command(["proxy", "--bootstrap", str(tmp_path / "bootstrap.json"), "--validate"]) == 1
    shown = capsys.readouterr().out
    for where, kind, name in (
        ("bootstrap.json: static_resources.listeners[0]", "listener", "l"),
        ("bootstrap.json: static_resources.clusters[0]", "cluster", "app"),
        ("lds.json: resources[0]", "listener", "l"),
        ("cds.json: resources[0]", "cluster", "app"),
    ):
        (line,) = [line for line in shown.splitlines() if f"{where} ({name}): {place(kind, case)}" in line]
        assert BAD[case][2] in line


@EACH
def test_static_resource_with_an_unbuildable_context_ends_the_start(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bootstrap.json"
    for kind, document in (("listener", bad_listener(case)), ("cluster", bad_cluster(case))):
        path.write_text(json.dumps({"static_resources": {f"{kind}s": [document]}}))
        assert command(["proxy", "--bootstrap", str(path)]) == 1
        shown = "".join(capsys.readouterr())
        assert f"static_resources.{kind}s[0].{place(kind, case)}" in shown
        assert BAD[case][2] in shown


def test_unusable_certificate_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, root = tmp_path / "key.pem", tmp_path / "root.pem"
    key.write_bytes(STRANGER.key_pem)
    root.write_text("nothing")
    by_file = {**certificate(), "private_key": {"filename": str(key)}}
    common = {"tls_certificates": [by_file], "validation_context": {"trusted_ca": {"filename": str(root)}}}
    path = tmp_path / "bootstrap.json"
    for broken, mended in ((key, LEAF.key_pem), (root, ROOT.pem)):
        chains = [chain(tcp(), transport_socket=socket("DownstreamTlsContext", common))]
        path.write_text(json.dumps({"static_resources": {"listeners": [listener(*chains)[1]]}}))
        assert command(["proxy", "--bootstrap", str(path), "--validate"]) == 1
        assert f": {broken}: " in capsys.readouterr().out
        broken.write_bytes(mended)
    assert command(["proxy", "--bootstrap", str(path), "--validate"]) == 0


# Secrets


def secret(name: str, **kind: Json) -> tuple[str, Json]:
    return "secret", {"name": name, **kind}


RENEWALS: dict[str, tuple[str, Json, str]] = {
    "wrong key": (
        "own",
        {"tls_certificate": certificate(key_pem=STRANGER.key_pem)},
        "tls_certificate.private_key: ",
    ),
    "weak key": ("own", {"tls_certificate": weak()}, "key too small"),
    "another kind": ("own", {"validation_context": inline_ca()}, "secret own is not a certificate"),
    "garbage root": (
        "roots",
        {"validation_context": {"trusted_ca": {"inline_string": GARBAGE}}},
        "validation_context.trusted_ca: ",
    ),
    "garbage revocation list": (
        "roots",
        {"validation_context": inline_ca(crl={"inline_string": "nonsense"})},
        "validation_context.crl: ",
    ),
    "no root for names": ("roots", {"validation_context": {}}, "SAN-based verification"),
}


def by_sds(source: Json | None = None) -> Json:
    sds = source or {"ads": {}}
    names = {"match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"prefix": "spiffe://td/"}}]}
    return {
        "tls_certificate_sds_secret_configs": [{"name": "own", "sds_config": sds}],
        "combined_validation_context": {
            "default_validation_context": names,
            "validation_context_sds_secret_config": {"name": "roots", "sds_config": sds},
        },
    }


def good_secrets() -> list[tuple[str, Json]]:
    return [secret("own", tls_certificate=certificate()), secret("roots", validation_context=inline_ca())]


@pytest.mark.parametrize("case", RENEWALS)
def test_sds_refuses_a_bad_renewal_and_the_good_secret_serves(case: str, tmp_path: Path) -> None:
    name, kind, words = RENEWALS[case]
    over_tls = chain(tcp(), transport_socket=socket("DownstreamTlsContext", {**by_sds(), "tls_certificates": []}))

    async def body(harness: Harness) -> None:
        assert await harness.published(listener(over_tls), cluster(1), *good_secrets()) is None
        await harness.until(lambda: harness.proxy.listeners.active)
        (live,) = harness.proxy.listeners.active[0].live_chains
        assert live.tls is not None
        good = live.tls.current
        assert good is not None
        others = [each for each in good_secrets() if each[1]["name"] != name]
        harness.publish(listener(over_tls), cluster(1), *others, secret(name, **kind))
        await harness.until(lambda: [error for kind, error in harness.answers if kind == "Secret" and error])
        error = next(error for kind, error in harness.answers if kind == "Secret" and error)
        assert words in error
        assert error.startswith(f"{name}: ")
        assert live.tls.current is good
        assert harness.count(f"sds.{name}.update_rejected") == 1

    run(tmp_path, body)


def test_sds_by_file_refuses_a_bad_renewal_and_the_good_secret_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, **kind: Json) -> Json:
        path = tmp_path / f"{name}.json"
        document = {"@type": f"{T}envoy.extensions.transport_sockets.tls.v3.Secret", "name": name, **kind}
        moved = path.with_suffix(".new")
        moved.write_text(json.dumps({"resources": [document]}))
        moved.rename(path)
        return {"path_config_source": {"path": str(path)}}

    own_source = write("own", tls_certificate=certificate())
    common = {"tls_certificate_sds_secret_configs": [{"name": "own", "sds_config": own_source}]}
    over_tls = chain(tcp(), transport_socket=socket("DownstreamTlsContext", {**common, "tls_certificates": []}))

    async def body(harness: Harness) -> None:
        assert await harness.published(listener(over_tls), cluster(1)) is None
        await harness.until(lambda: harness.proxy.listeners.active)
        (live,) = harness.proxy.listeners.active[0].live_chains
        assert live.tls is not None
        good = live.tls.current
        write("own", tls_certificate=certificate(key_pem=STRANGER.key_pem))
        await harness.until(lambda: harness.count("sds.own.update_rejected") == 1)
        assert live.tls.current is good

    run(tmp_path, body)
    bootstrap = {"static_resources": {"listeners": [listener(over_tls)[1]]}}
    (tmp_path / "bootstrap.json").write_text(json.dumps(bootstrap))
    assert command(["proxy", "--bootstrap", str(tmp_path / "bootstrap.json"), "--validate"]) == 1
    assert "own.json: resources[0] (own): tls_certificate.private_key: " in capsys.readouterr().out
    write("own", validation_context=inline_ca())
    assert command(["proxy", "--bootstrap", str(tmp_path / "bootstrap.json"), "--validate"]) == 1
    assert "secret own is not a certificate" in capsys.readouterr().out


def test_listener_that_contradicts_an_earlier_secret_is_refused(tmp_path: Path) -> None:
    """The secret came first: now it is the listener that is refused, and nothing stays subscribed to for it."""
    first = chain(tcp(), transport_socket=socket("DownstreamTlsContext", {**by_sds(), "tls_certificates": []}))
    crossed = {"tls_certificate_sds_secret_configs": [{"name": "roots", "sds_config": {"ads": {}}}]}
    second = chain(tcp(), transport_socket=socket("DownstreamTlsContext", {**crossed, "tls_certificates": []}))

    async def body(harness: Harness) -> None:
        await harness.published(listener(first), cluster(1), *good_secrets())
        await harness.until(lambda: harness.proxy.listeners.active)
        error = await harness.published(listener(first), listener(second, name="m"), cluster(1), *good_secrets())
        assert error is not None
        assert "secret roots is not a certificate" in error
        assert [len(handle.users) for handle in harness.proxy.secrets.dynamic] == [1, 1]

    run(tmp_path, body)
