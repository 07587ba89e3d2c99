"""Changed files of secrets and contexts are used at once. Unusable contents leave the last good version."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbone.settings import Role
from tests.hbone.certificates import Authority
from xds.dialects.envoy import Surroundings
from xds.dialects.envoy.tls import compile_downstream
from xds.model.secret import Certificate, Validation
from xds.model.tls import TlsContext
from xds.proto import registry
from xds.proto.envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from xds.proto.json import parse_value
from ztunnel.proxy.envoy.config.sources import Sources
from ztunnel.proxy.envoy.secrets.contexts import LiveContext
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.runtime.clock import SystemClock

NAME = "spiffe://td/ns/a/sa/b"
ROOT = Authority()
SURROUNDINGS = Surroundings(read_file=lambda path: Path(path).read_bytes(), environment={})


class Served:
    """A server's context whose certificate, key, root and revocation list are files, by a secret or inline."""

    def __init__(self, folder: Path, *, inline: bool) -> None:
        self.folder = folder
        self.updates = 0

        def none(_: object) -> Any:
            raise LookupError

        self.store = SecretStore(Sources(None, none, none), SURROUNDINGS, Stats(), SystemClock())
        certificate = {"certificate_chain": self._at("tls.crt"), "private_key": self._at("tls.key")}
        roots = {"trusted_ca": self._at("ca.crt"), "crl": self._at("crl.pem")}
        for document in (certificate, roots):
            document["watched_directory"] = {"path": str(folder)}
        common: dict[str, Any] = {"tls_certificates": [certificate], "validation_context": roots}
        if not inline:
            for name, body in (
                ("own", {"tls_certificate": certificate}),
                ("roots", {"validation_context": roots}),
            ):
                secret = parse_value({"name": name, **body}, tls_pb2.Secret).message
                self.store.add_static(registry.pack(secret))
            common = {
                "tls_certificate_sds_secret_configs": [{"name": "own"}],
                "validation_context_sds_secret_config": {"name": "roots"},
            }
        message = parse_value({"common_tls_context": common}, tls_pb2.DownstreamTlsContext).message
        model = compile_downstream(message, SURROUNDINGS)  # type: ignore[arg-type]  # of that type
        assert isinstance(model, TlsContext)
        self.context = LiveContext(Role.SERVER, model, self.store, self._updated, owner="listener l")
        self.store.files.look()

    def _at(self, name: str) -> dict[str, str]:
        return {"filename": str(self.folder / name)}

    def _updated(self) -> None:
        self.updates += 1

    @property
    def chain(self) -> bytes:
        (certificate,) = self.context.certificates
        return certificate.chain_pem

    @property
    def validation(self) -> Validation:
        assert self.context.validation is not None
        return self.context.validation


def material() -> dict[str, bytes]:
    leaf = ROOT.issue(NAME)
    return {"tls.crt": leaf.chain_pem, "tls.key": leaf.key_pem, "ca.crt": ROOT.pem, "crl.pem": ROOT.revoke()}


def renamed(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / f".{name}").write_bytes(data)
        (folder / f".{name}").rename(folder / name)


def written(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


def swapped(folder: Path, files: dict[str, bytes]) -> None:
    """Replace the files as kubelet does: a new directory, and a new link to it."""
    new = folder / f"..{len(list(folder.iterdir()))}"
    new.mkdir()
    written(new, files)
    (folder / "..tmp").symlink_to(new.name)
    (folder / "..tmp").rename(folder / "..data")
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


Put = Callable[[Path, dict[str, bytes]], None]


@pytest.mark.parametrize("inline", [False, True], ids=["secret", "inline"])
@pytest.mark.parametrize("put", [renamed, written, swapped])
def test_changed_files_are_used_at_the_next_check(tmp_path: Path, put: Put, inline: bool) -> None:
    first, second = material(), material()
    put(tmp_path, first)
    served = Served(tmp_path, inline=inline)
    before = served.context.generation
    assert served.chain == first["tls.crt"]
    put(tmp_path, second)
    served.store.files.look()
    assert served.chain == second["tls.crt"]
    assert served.validation.crl_pem == second["crl.pem"]
    assert served.context.generation > before
    assert served.context.presented.leaf is not None
    updates = served.updates
    served.store.files.look()
    assert served.updates == updates


@pytest.mark.parametrize("inline", [False, True], ids=["secret", "inline"])
@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt", "crl.pem"])
@pytest.mark.parametrize("bad", [b"garbage", None], ids=["garbage", "missing"])
def test_bad_file_leaves_the_last_good_version_and_is_named(
    tmp_path: Path, name: str, bad: bytes | None, inline: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = material()
    written(tmp_path, first)
    served = Served(tmp_path, inline=inline)
    if bad is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(bad)
    for _ in range(4):
        served.store.files.look()
    assert served.chain == first["tls.crt"]
    assert served.validation.trusted_ca_pem == first["ca.crt"]
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert str(tmp_path / name) in warnings[0]
    if not inline:
        assert any(handle.error is not None for handle in served.store.static)
    second = material()
    written(tmp_path, second)
    served.store.files.look()
    assert served.chain == second["tls.crt"]
    assert all(handle.error is None for handle in served.store.static)


def test_certificate_renewed_before_its_key_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = material(), material()
    written(tmp_path, first)
    served = Served(tmp_path, inline=False)
    written(tmp_path, {"tls.crt": second["tls.crt"]})
    served.store.files.look()
    assert served.chain == first["tls.crt"]
    written(tmp_path, {"tls.key": second["tls.key"]})
    served.store.files.look()
    assert served.chain == second["tls.crt"]
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_closed_context_stops_reading_files(tmp_path: Path) -> None:
    written(tmp_path, material())
    served = Served(tmp_path, inline=True)
    served.context.close()
    written(tmp_path, material())
    served.store.files.look()
    assert served.updates == 0


def test_certificates_compare_equal_regardless_of_their_file() -> None:
    assert Certificate(chain_pem=b"a", key_pem=b"b", chain_file="x") == Certificate(chain_pem=b"a", key_pem=b"b")
