"""The patch that gives a webhook configuration its CA."""

import base64
import copy
from pathlib import Path
from typing import Any

import jsonpatch
import pytest

from tests.hbone.certificates import of_unknown_version
from tests.ztunnel.kube.certificates import self_signed
from ztunnel.sidecar.inject.bundle import BadBundle, operations


def configuration(*bundles: Any) -> dict[str, Any]:
    clients = [{"url": "https://x"} | ({} if each is None else {"caBundle": each}) for each in bundles]
    return {"webhooks": [{"name": f"w{at}", "clientConfig": each} for at, each in enumerate(clients)]}


def encoded(bundle: bytes) -> str:
    return base64.b64encode(bundle).decode()


def pem(folder: Path, *names: str) -> list[bytes]:
    return [self_signed(folder / name).certificate.read_bytes() for name in names]


def test_what_is_missing_other_or_garbage_is_replaced(tmp_path: Path) -> None:
    mine, other = pem(tmp_path, "mine", "other")
    before = configuration(None, "", encoded(other), "bm8=", "%", encoded(mine))
    patch = operations(before, mine)
    made = jsonpatch.apply_patch(copy.deepcopy(before), patch)
    assert [each["clientConfig"]["caBundle"] for each in made["webhooks"]] == [encoded(mine)] * 6
    # The last one was right, and each of the others is guarded by its name.
    assert [each["op"] for each in patch] == ["test", "add"] * 5
    assert operations(made, mine) == []


def test_order_and_text_around_certificates_do_not_count(tmp_path: Path) -> None:
    one, two = pem(tmp_path, "one", "two")
    assert operations(configuration(encoded(b"# old\n" + two + b"\n" + one)), one + two) == []
    assert operations(configuration(encoded(one)), one + two) != []


def test_an_entry_that_moved_is_not_changed(tmp_path: Path) -> None:
    (mine,) = pem(tmp_path, "mine")
    patch = operations(configuration(None), mine)
    moved = {"webhooks": [{"name": "foreign", "clientConfig": {}}, *configuration(None)["webhooks"]]}
    with pytest.raises(jsonpatch.JsonPatchTestFailed):
        jsonpatch.apply_patch(moved, patch)


@pytest.mark.parametrize(
    "bundle", [b"", b"nothing", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_is_never_written(bundle: bytes) -> None:
    with pytest.raises(BadBundle, match="holds no certificates"):
        operations(configuration(None), bundle)


def test_certificate_of_an_unknown_version_is_replaced_and_never_written(tmp_path: Path) -> None:
    (mine,) = pem(tmp_path, "mine")
    odd = of_unknown_version(mine)
    assert operations(configuration(encoded(odd)), mine)
    with pytest.raises(BadBundle, match="holds no certificates"):
        operations(configuration(None), odd)


@pytest.mark.parametrize("document", [{}, {"webhooks": None}, {"webhooks": [3, {}, {"clientConfig": 3}]}])
def test_a_configuration_without_entries_needs_nothing(tmp_path: Path, document: dict[str, Any]) -> None:
    assert operations(document, pem(tmp_path, "mine")[0]) == []
