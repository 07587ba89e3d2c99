"""The small certificate authority."""

import contextlib
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.hbone.certificates import of_unknown_version
from tests.limits import WAIT_S
from xds.model.identity import SpiffeId
from ztunnel.proxy.envoy.secrets.verify import check_secret
from ztunnel.proxy.identity.authority import CaError, CertificateAuthority, now, token_secret

IDENTITY = SpiffeId("cluster.local", "default", "web")


def test_issued_leaf_has_exactly_one_uri_identity(tmp_path: Path) -> None:
    moment = now()
    authority = CertificateAuthority.open(tmp_path, "cluster.local", moment)
    secret = authority.issue(IDENTITY, moment, timedelta(hours=24))
    check_secret(secret)
    leaf, root = x509.load_pem_x509_certificates(secret.chain_pem)
    leaf.verify_directly_issued_by(root)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.critical
    assert names.value.get_values_for_type(x509.UniformResourceIdentifier) == [str(IDENTITY)]
    assert len(list(names.value)) == 1
    assert len(leaf.subject) == 0
    usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert leaf.not_valid_before_utc <= moment - timedelta(minutes=1)
    assert abs(leaf.not_valid_after_utc - moment - timedelta(hours=24)) < timedelta(seconds=2)


def test_root_is_reused_and_its_key_is_readable_by_the_owner_only(tmp_path: Path) -> None:
    first = CertificateAuthority.open(tmp_path / "ca", "cluster.local", now())
    assert stat.S_IMODE((tmp_path / "ca/root-key.pem").stat().st_mode) == 0o600
    assert CertificateAuthority.open(tmp_path / "ca", "cluster.local", now()).root_pem == first.root_pem


def test_an_exposed_key_is_refused(tmp_path: Path) -> None:
    CertificateAuthority.open(tmp_path, "cluster.local", now())
    (tmp_path / "root-key.pem").chmod(0o644)
    with pytest.raises(CaError, match=r"readable by others \(mode 644\): chmod 600"):
        CertificateAuthority.open(tmp_path, "cluster.local", now())


def test_garbage_and_foreign_keys_are_refused(tmp_path: Path) -> None:
    CertificateAuthority.open(tmp_path / "a", "cluster.local", now())
    CertificateAuthority.open(tmp_path / "b", "cluster.local", now())
    (tmp_path / "a/root-cert.pem").write_bytes((tmp_path / "b/root-cert.pem").read_bytes())
    with pytest.raises(CaError, match="is not the key of"):
        CertificateAuthority.open(tmp_path / "a", "cluster.local", now())
    root = tmp_path / "b/root-cert.pem"
    good = root.read_bytes()
    root.write_bytes(of_unknown_version(good))
    with pytest.raises(CaError, match="cannot use the root"):
        CertificateAuthority.open(tmp_path / "b", "cluster.local", now())
    root.write_bytes(good)
    (tmp_path / "b/root-key.pem").write_text("nonsense")
    with pytest.raises(CaError, match="cannot use the root"):
        CertificateAuthority.open(tmp_path / "b", "cluster.local", now())


def test_an_expired_root_is_refused(tmp_path: Path) -> None:
    CertificateAuthority.open(tmp_path, "cluster.local", now() - timedelta(days=4000))
    with pytest.raises(CaError, match="expired"):
        CertificateAuthority.open(tmp_path, "cluster.local", now())


def test_a_removed_root_is_made_anew_as_the_error_says(tmp_path: Path) -> None:
    CertificateAuthority.open(tmp_path, "cluster.local", now() - timedelta(days=4000))
    with pytest.raises(CaError, match=r"root-cert\.pem expired at \d+-\d+-\d+: remove it to make a new root"):
        CertificateAuthority.open(tmp_path, "cluster.local", now())
    (tmp_path / "root-cert.pem").unlink()
    made = CertificateAuthority.open(tmp_path, "cluster.local", now())
    assert CertificateAuthority.open(tmp_path, "cluster.local", now()).root_pem == made.root_pem
    leaf, root = x509.load_pem_x509_certificates(made.issue(IDENTITY, now(), timedelta(hours=1)).chain_pem)
    leaf.verify_directly_issued_by(root)


@pytest.mark.parametrize("most_bytes", [10, 100, 400], ids=["token-key", "root-key", "root-cert"])
def test_a_start_that_cannot_write_a_file_leaves_no_part_of_it(tmp_path: Path, most_bytes: int) -> None:
    names = {"token-key"} if most_bytes == 10 else {"root-key.pem", "root-cert.pem"}

    def start() -> None:
        if "token-key" in names:
            token_secret(tmp_path)
        else:
            CertificateAuthority.open(tmp_path, "cluster.local", now())

    with limited(most_bytes), pytest.raises(CaError, match="file too large"):
        start()
    start()
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("most_bytes", [10, 50, 300], ids=["token", "key", "certificate"])
def test_a_start_killed_while_it_writes_a_file_stops_no_later_start(tmp_path: Path, most_bytes: int) -> None:
    program = f"""if True:
        import resource, signal
        from pathlib import Path
        from ztunnel.proxy.identity.authority import CertificateAuthority, now, token_secret
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel's, at the write that exceeds the limit
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, {most_bytes}))
        if {most_bytes} == 10:
            token_secret(Path({str(tmp_path)!r}))
        CertificateAuthority.open(Path({str(tmp_path)!r}), "cluster.local", now())
    """
    killed = subprocess.run([sys.executable, "-c", program], timeout=WAIT_S, check=False)
    assert killed.returncode == -signal.SIGXFSZ
    secret = token_secret(tmp_path)
    authority = CertificateAuthority.open(tmp_path, "cluster.local", now())
    assert token_secret(tmp_path) == secret
    assert CertificateAuthority.open(tmp_path, "cluster.local", now()).root_pem == authority.root_pem


def test_of_two_starts_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_secret(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as the other process saw it
    with pytest.raises(CaError, match="file exists"):
        token_secret(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["token-key"]


@contextlib.contextmanager
def limited(most_bytes: int | None) -> Iterator[None]:
    """Have this process write no file larger than this, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, before if most_bytes is None else (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
