"""Checks certificates against a file of revocation lists, and reloads the file when it changes.

:meth:`RevocationLists.is_revoked` checks peers in handshakes, and peers of open connections when the lists change.
It checks the whole chain, permits certificates without a list, and also uses lists past their next update.
OpenSSL's own check is not used, because it needs a copy of the lists in every TLS context, and uses only the
newest list of an issuer.

If the file becomes unusable, the last good lists stay current. Without an earlier good file, an unusable file
revokes every certificate, because its content is unknown and could revoke any. The proxy logs an ERROR, and keeps
polling the file. (The Rust ztunnel disables revocation permanently then.) A file that is missing from the
start revokes no certificate. A file with PEM blocks but no list is unusable, because it is probably the wrong
file.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from hbone.x509_errors import UNREADABLE
from ztunnel.runtime.tasks import Tasks
from ztunnel.runtime.watched_file import FileState, file_state

log = logging.getLogger(__name__)

_BEGIN, _END = b"-----BEGIN X509 CRL-----", b"-----END X509 CRL-----"
_CHECK_EVERY_S = 1.0


class CrlError(Exception):
    """The data has no valid revocation list."""


class _List:
    """One revocation list. Its signature is checked once per issuer's key."""

    def __init__(self, crl: x509.CertificateRevocationList) -> None:
        self._crl = crl
        self._serials = frozenset(
            entry.serial_number for entry in crl if _reason(entry) is not x509.ReasonFlags.remove_from_crl
        )
        self._signers: dict[bytes, bool] = {}

    @property
    def der(self) -> bytes:
        """The signed encoding."""
        return self._crl.public_bytes(Encoding.DER)

    def names(self, certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
        """Return whether this list contains the certificate, and is signed by the certificate's issuer."""
        return certificate.serial_number in self._serials and self._is_signed_by(issuer)

    def _is_signed_by(self, issuer: x509.Certificate) -> bool:
        # Two authorities can have the same name, so the list's signature is checked with the issuer's key.
        spki = issuer.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if spki not in self._signers:
            try:
                self._signers[spki] = self._crl.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]
            except (TypeError, ValueError):  # a type of key that cannot sign lists
                self._signers[spki] = False
        return self._signers[spki]


def _reason(entry: x509.RevokedCertificate) -> x509.ReasonFlags | None:
    try:
        return entry.extensions.get_extension_for_class(x509.CRLReason).value.reason
    except (x509.ExtensionNotFound, *UNREADABLE):
        return None


def _blocks(pem: bytes) -> Iterator[bytes]:
    for part in pem.split(_BEGIN)[1:]:
        content, end, _ = part.partition(_END)
        if not end:
            raise CrlError("a certificate revocation list in PEM does not end")
        yield _BEGIN + content + _END + b"\n"


class RevocationLists:
    """An immutable set of revocation lists.

    Args:
        crls: the lists.
        unreadable: whether the lists are unreadable, so that every chain counts as revoked.
    """

    def __init__(self, crls: Sequence[x509.CertificateRevocationList] = (), *, unreadable: bool = False) -> None:
        self._unreadable = unreadable
        # The keys are parsed names: lists and certificates can encode the same name as different types of strings.
        self._by_issuer: dict[x509.Name, list[_List]] = {}
        for crl in crls:
            self._by_issuer.setdefault(crl.issuer, []).append(_List(crl))

    @property
    def unreadable(self) -> bool:
        """Whether the lists are unreadable, so that every chain counts as revoked."""
        return self._unreadable

    def __len__(self) -> int:
        return sum(len(lists) for lists in self._by_issuer.values())

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse one list in DER, or the lists among PEM blocks. Other PEM blocks are ignored. Empty data contains
        no lists.

        Raises:
            CrlError: the data has another form.
        """
        if not data.strip():
            return cls()
        try:
            if b"-----BEGIN " not in data:
                return cls([x509.load_der_x509_crl(data)])
            lists = cls([x509.load_pem_x509_crl(block) for block in _blocks(data)])
        except UNREADABLE as error:
            raise CrlError(f"not a certificate revocation list: {error}") from error
        if not lists:
            raise CrlError("PEM, but without a certificate revocation list (X509 CRL)")
        return lists

    def encoded(self) -> tuple[bytes, ...]:
        """Return each list in DER, for :meth:`decoded` in another process. If the lists are unreadable, return one
        empty value.
        """
        if self._unreadable:
            return (b"",)
        return tuple(each.der for lists in self._by_issuer.values() for each in lists)

    @classmethod
    def decoded(cls, encoded: Sequence[bytes]) -> Self:
        """Return the lists that :meth:`encoded` has returned in another process."""
        return cls([x509.load_der_x509_crl(each) for each in encoded if each], unreadable=b"" in encoded)

    def is_revoked(self, chain: Sequence[x509.Certificate]) -> bool:
        """Return whether any certificate of a chain is revoked. The chain includes the issuers, in any order."""
        if self._unreadable:
            return True
        if not self._by_issuer:
            return False
        for certificate in chain:
            lists = self._by_issuer.get(certificate.issuer, ())
            issuers = [each for each in chain if each.subject == certificate.issuer] if lists else ()
            if any(listed.names(certificate, issuer) for listed in lists for issuer in issuers):
                return True
        return False


class RevocationFile:
    """Follows a file of revocation lists while entered.

    The file's status is polled once a second, and the file is read once two polls agree, so that no half-written
    file is read. Polling also works with replaced links (Kubernetes' mounted volumes), missing directories and
    network file systems. With inotify, all three would need special care.

    Attributes:
        current: the current lists.
    """

    def __init__(self, path: Path, *, check_every_s: float = _CHECK_EVERY_S) -> None:
        self.current = RevocationLists()
        self._path = path
        self._check_every_s = check_every_s
        self._watchers: list[Callable[[], None]] = []
        self._tasks = Tasks("revocation lists")
        self._seen: FileState | None = None
        self._read: FileState | None = None
        self._loaded = False

    async def __aenter__(self) -> Self:
        self._seen = file_state(self._path)
        self._load()
        self._tasks.keep(self._poll, "poll")
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._tasks.close()

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each change of :attr:`current`."""
        self._watchers.append(changed)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._check_every_s)
            state, before = file_state(self._path), self._seen
            self._seen = state
            # The file is parsed in a thread, because lists of large authorities take seconds.
            if state == before and state != self._read and await asyncio.to_thread(self._load):
                for changed in list(self._watchers):
                    changed()

    def _load(self) -> bool:
        self._read = self._seen
        try:
            lists = RevocationLists.parse(self._path.read_bytes())
        except (OSError, CrlError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            if self._loaded:
                log.error(
                    "revocation list unusable, the last good one stays current path=%s error=%s",
                    self._path,
                    reason,
                )
            elif isinstance(error, FileNotFoundError):
                log.warning("no revocation list yet, no certificate is revoked path=%s", self._path)
            else:
                log.error(
                    "revocation list unusable, EVERY PEER IS REFUSED until it is readable path=%s error=%s",
                    self._path,
                    reason,
                )
                self.current = RevocationLists(unreadable=True)
                return True
            return False
        self._loaded = True
        self.current = lists
        log.info("revocation lists loaded path=%s lists=%d", self._path, len(lists))
        return True
