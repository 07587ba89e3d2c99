"""Revocation lists: what a file may hold, whom they name, and how a file is followed."""

import asyncio
import base64
import contextlib
import datetime
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.name import _ASN1Type
from cryptography.x509.oid import NameOID

from tests.hbone.certificates import Authority, of_unknown_version
from tests.limits import WAIT_S
from ztunnel.proxy.identity.crl import CrlError, RevocationFile, RevocationLists

NOW = datetime.datetime.now(datetime.UTC)
ROOT = Authority("root")
MIDDLE = Authority("middle", ROOT)
LEAF = MIDDLE.issue("spiffe://td/ns/a/sa/leaf").certificate
OTHER = MIDDLE.issue("spiffe://td/ns/a/sa/other").certificate
CHAIN = (LEAF, MIDDLE.certificate, ROOT.certificate)
LEAF_LIST = MIDDLE.revoke(LEAF)
MIDDLE_LIST = ROOT.revoke(MIDDLE.certificate)


def test_accepted_forms_of_a_revocation_file() -> None:
    assert len(RevocationLists.parse(b"")) == 0
    assert len(RevocationLists.parse(b" \n")) == 0
    der = x509.load_pem_x509_crl(LEAF_LIST).public_bytes(Encoding.DER)
    for data in (LEAF_LIST, der, b"a comment\n" + ROOT.pem + LEAF_LIST):
        lists = RevocationLists.parse(data)
        assert len(lists) == 1
        assert lists.is_revoked(CHAIN)
    assert len(RevocationLists.parse(LEAF_LIST + MIDDLE_LIST)) == 2


@pytest.mark.parametrize(
    "data", [b"nonsense", ROOT.pem, LEAF_LIST[:-60], LEAF_LIST + LEAF_LIST[:80], of_unknown_version(LEAF_LIST)]
)
def test_invalid_revocation_file_is_an_error(data: bytes) -> None:
    with pytest.raises(CrlError):
        RevocationLists.parse(data)


def test_no_change_of_a_byte_raises_another_error() -> None:
    der = x509.load_pem_x509_crl(LEAF_LIST).public_bytes(Encoding.DER)
    for at, octet in itertools.product(range(len(der)), (0, 1, 2, 3, 0x7F, 0x80, 0xFF)):
        odd = der[:at] + bytes((octet,)) + der[at + 1 :]
        pem = b"-----BEGIN X509 CRL-----\n" + base64.encodebytes(odd) + b"-----END X509 CRL-----\n"
        for data in (odd, pem):
            with contextlib.suppress(CrlError):
                RevocationLists.parse(data)


def test_entry_whose_reason_cannot_be_read_revokes() -> None:
    """A reason that occurs twice, where removal from the list could be meant."""
    removal = x509.CRLReason(x509.ReasonFlags.remove_from_crl)
    reason = x509.Extension(removal.oid, critical=False, value=removal)
    entry = x509.RevokedCertificateBuilder(LEAF.serial_number, NOW, [reason, reason])
    made = (
        x509.CertificateRevocationListBuilder(MIDDLE.name, NOW, NOW)
        .add_revoked_certificate(entry.build())
        .sign(MIDDLE.key, hashes.SHA256())
    )
    assert RevocationLists.parse(made.public_bytes(Encoding.PEM)).is_revoked(CHAIN)


def test_truncated_revocation_list_is_an_error() -> None:
    for cut in range(1, len(LEAF_LIST) - 1):
        with pytest.raises(CrlError):
            RevocationLists.parse(LEAF_LIST[:cut])


@pytest.mark.parametrize(
    ("crls", "chain", "revoked"),
    [
        ([], CHAIN, False),
        ([LEAF_LIST], CHAIN, True),
        ([MIDDLE_LIST], CHAIN, True),
        ([MIDDLE.revoke(LEAF, expired=True)], CHAIN, True),
        ([MIDDLE.revoke(OTHER), ROOT.revoke()], CHAIN, False),
        ([MIDDLE.revoke(OTHER), MIDDLE.revoke(LEAF)], CHAIN, True),
        ([ROOT.revoke(LEAF)], CHAIN, False),  # not its issuer
        ([Authority("middle", ROOT).revoke(LEAF)], CHAIN, False),  # of the same name, with another key
        ([ROOT.revoke(ROOT.certificate)], CHAIN, True),
        ([LEAF_LIST], (), False),
        ([LEAF_LIST], (LEAF, ROOT.certificate, MIDDLE.certificate), True),  # issuers in another order
        ([MIDDLE_LIST], (LEAF, ROOT.certificate, MIDDLE.certificate), True),
        ([LEAF_LIST, MIDDLE_LIST], (OTHER, ROOT.certificate, MIDDLE.reissued(5).certificate), False),
    ],
)
def test_revocation_lists_cover_the_whole_chain(
    crls: list[bytes], chain: Sequence[x509.Certificate], revoked: bool
) -> None:
    assert RevocationLists.parse(b"".join(crls)).is_revoked(chain) is revoked


def test_name_of_an_issuer_in_another_string_type_is_the_same_name() -> None:
    """The tool that makes the list can encode the name otherwise than the tool that made the certificate."""
    (text,) = (str(attribute.value) for attribute in MIDDLE.name)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text, _ASN1Type.PrintableString)])
    assert name.public_bytes() != LEAF.issuer.public_bytes()
    entry = x509.RevokedCertificateBuilder().serial_number(LEAF.serial_number).revocation_date(NOW).build()
    made = (
        x509.CertificateRevocationListBuilder(name, NOW, NOW)
        .add_revoked_certificate(entry)
        .sign(MIDDLE.key, hashes.SHA256())
    )
    lists = RevocationLists.parse(made.public_bytes(Encoding.PEM))
    assert lists.is_revoked(CHAIN)
    assert RevocationLists.decoded(lists.encoded()).is_revoked(CHAIN)


def follow(path: Path, body: Callable[[RevocationFile, asyncio.Event], Awaitable[None]]) -> None:
    async def main() -> None:
        changed = asyncio.Event()
        async with asyncio.timeout(WAIT_S), RevocationFile(path, check_every_s=0.01) as file:
            file.watch(changed.set)
            await body(file, changed)

    asyncio.run(main())


def test_replaced_data_link_of_a_kubernetes_volume_reloads_the_list(tmp_path: Path) -> None:
    for version, content in (("1", b""), ("2", LEAF_LIST)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ca-crl.pem").write_bytes(content)
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "ca-crl.pem").symlink_to("..data/ca-crl.pem")

    async def body(file: RevocationFile, changed: asyncio.Event) -> None:
        assert not file.current.is_revoked(CHAIN)
        (tmp_path / "new").symlink_to("2")
        os.replace(tmp_path / "new", tmp_path / "..data")
        await changed.wait()
        assert file.current.is_revoked(CHAIN)

    follow(tmp_path / "ca-crl.pem", body)


def test_unusable_file_leaves_the_last_good_list_current(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "crl"
    path.write_bytes(LEAF_LIST)

    async def body(file: RevocationFile, changed: asyncio.Event) -> None:
        for bad in (b"nonsense", None):
            caplog.clear()
            if bad is None:
                path.unlink()
            else:
                path.write_bytes(bad)
            while "the last good one stays current" not in caplog.text:
                await asyncio.sleep(0.01)
            assert file.current.is_revoked(CHAIN)
        assert not changed.is_set()
        path.write_bytes(b"")
        await changed.wait()
        assert not file.current.is_revoked(CHAIN)

    follow(path, body)


@pytest.mark.parametrize(
    ("content", "level", "words"),
    [(None, "WARNING", "no certificate is revoked path="), (b"nonsense", "ERROR", "EVERY PEER IS REFUSED")],
)
def test_missing_or_unusable_file_at_the_start_is_logged_and_later_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None, level: str, words: str
) -> None:
    path = tmp_path / "later" / "crl"
    if content is not None:
        path.parent.mkdir()
        path.write_bytes(content)

    async def body(file: RevocationFile, changed: asyncio.Event) -> None:
        assert file.current.is_revoked(CHAIN) is (content is not None)
        assert file.current.is_revoked((OTHER, *CHAIN[1:])) is (content is not None)
        again = RevocationLists.decoded(file.current.encoded())
        assert again.is_revoked((OTHER, *CHAIN[1:])) is (content is not None)
        assert any(words in record.message and record.levelname == level for record in caplog.records)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(LEAF_LIST)
        await changed.wait()
        assert file.current.is_revoked(CHAIN)
        assert not file.current.is_revoked((OTHER, *CHAIN[1:]))

    with caplog.at_level(logging.INFO):
        follow(path, body)
