"""The injector's own CA and what it issues."""

import datetime

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from tests.hbone.certificates import of_unknown_version
from ztunnel.cli import main
from ztunnel.sidecar.inject.authority import Authority, BadAuthority, issue, make_authority, service_names

NOW = datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC)


def test_a_certificate_is_good_for_the_names_of_the_service_and_for_no_other() -> None:
    authority = make_authority(NOW)
    leaf = issue(authority, service_names("injector", "mesh"), NOW)
    certificate = x509.load_pem_x509_certificate(leaf.certificate)
    store = Store(x509.load_pem_x509_certificates(authority.certificates))
    policy = PolicyBuilder().store(store).time(NOW + datetime.timedelta(days=89))
    for name in ("injector.mesh.svc", "injector.mesh", "injector.mesh.svc.cluster.local"):
        policy.build_server_verifier(x509.DNSName(name)).verify(certificate, [])
    with pytest.raises(VerificationError):
        policy.build_server_verifier(x509.DNSName("other.mesh.svc")).verify(certificate, [])
    other = (
        PolicyBuilder().store(Store(x509.load_pem_x509_certificates(make_authority(NOW).certificates))).time(NOW)
    )
    with pytest.raises(VerificationError):
        other.build_server_verifier(x509.DNSName("injector.mesh.svc")).verify(certificate, [])


def test_it_is_renewed_at_half_of_its_life() -> None:
    leaf = issue(make_authority(NOW), ("a",), NOW)
    certificate = x509.load_pem_x509_certificate(leaf.certificate)
    assert leaf.renew == NOW + datetime.timedelta(days=45)
    assert certificate.not_valid_after_utc == NOW + datetime.timedelta(days=90)
    # An API server whose clock is behind takes it.
    assert certificate.not_valid_before_utc == NOW - datetime.timedelta(hours=1)


def test_during_a_rotation_the_first_certificate_signs() -> None:
    old, new = make_authority(NOW), make_authority(NOW)
    both = Authority(new.certificates + old.certificates, new.key)
    certificate = x509.load_pem_x509_certificate(issue(both, ("a",), NOW).certificate)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(new.certificates))


def test_what_is_no_ca_is_refused() -> None:
    good, other = make_authority(NOW), make_authority(NOW)
    for bad in (
        Authority(b"", good.key),
        Authority(b"no", good.key),
        Authority(of_unknown_version(good.certificates), good.key),
        Authority(good.certificates, b"no"),
        Authority(good.certificates, b""),
        Authority(good.certificates, other.key),
    ):
        with pytest.raises(BadAuthority, match=r"ca\.(crt|key)"):
            issue(bad, ("a",), NOW)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs --certificate and --key, or --own-ca"),
        (["--own-ca=a"], "--own-ca needs --service NAME.NAMESPACE"),
        (["--own-ca=a", "--service=web"], "--own-ca needs --service NAME.NAMESPACE"),
        (["--own-ca=a", "--service=a.b", "--ca=x"], "--own-ca excludes"),
        (["--certificate=a", "--key=b", "--ca=c"], "--webhook-config and --ca must be given together"),
    ],
)
def test_options_that_do_not_fit(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["inject", "serve", *arguments]) == 2
    assert said in capsys.readouterr().err
