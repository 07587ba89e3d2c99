"""Certificates that were revoked: a file of revocation lists, read again whenever it changes.

:meth:`RevocationLists.is_revoked` judges peers in handshakes and those of connections that live when a list comes:
the whole chain, unknown status allowed, and lists that have run out still count. Not OpenSSL, which would want the
lists copied into each of many contexts, and of several lists of one issuer believes only the newest.

A file that turns bad leaves the last good lists in force. One that is missing or bad from the start revokes
nothing until it is right; it is looked at for as long as the process lives, and an ERROR says that nothing is
checked. (Rust ztunnel switches revocation off for good then.) A file with other PEM blocks but no list is bad:
somebody put the wrong file there.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ztunnel.runtime.tasks import Tasks
from ztunnel.runtime.watched_file import FileState, file_state

log = logging.getLogger(__name__)

_BEGIN, _END = b"-----BEGIN X509 CRL-----", b"-----END X509 CRL-----"
_CHECK_EVERY_S = 1.0


class CrlError(Exception):
    """A file that is no revocation list."""


class _List:
    """One list; its signature is checked once per key."""

    def __init__(self, crl: x509.CertificateRevocationList) -> None:
        self._crl = crl
        self._serials = frozenset(
            entry.serial_number for entry in crl if _reason(entry) is not x509.ReasonFlags.remove_from_crl
        )
        self._signers: dict[bytes, bool] = {}

    @property
    def der(self) -> bytes:
        """As it was signed."""
        return self._crl.public_bytes(Encoding.DER)

    def names(self, certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
        """Whether the issuer, in this list, revoked the certificate."""
        return certificate.serial_number in self._serials and self._is_signed_by(issuer)

    def _is_signed_by(self, issuer: x509.Certificate) -> bool:
        # Two authorities may share a name; the key tells whose list this is.
        spki = issuer.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if spki not in self._signers:
            try:
                self._signers[spki] = self._crl.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]
            except (TypeError, ValueError):  # a kind of key that signs no lists
                self._signers[spki] = False
        return self._signers[spki]


def _reason(entry: x509.RevokedCertificate) -> x509.ReasonFlags | None:
    try:
        return entry.extensions.get_extension_for_class(x509.CRLReason).value.reason
    except (x509.ExtensionNotFound, ValueError):
        return None


def _blocks(pem: bytes) -> Iterator[bytes]:
    for part in pem.split(_BEGIN)[1:]:
        content, end, _ = part.partition(_END)
        if not end:
            raise CrlError("a certificate revocation list in PEM does not end")
        yield _BEGIN + content + _END + b"\n"


class RevocationLists:
    """Some lists, never changed."""

    def __init__(self, crls: Sequence[x509.CertificateRevocationList] = ()) -> None:
        self._by_issuer: dict[bytes, list[_List]] = {}
        for crl in crls:
            self._by_issuer.setdefault(crl.issuer.public_bytes(), []).append(_List(crl))

    def __len__(self) -> int:
        return sum(len(lists) for lists in self._by_issuer.values())

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read PEM blocks (others among them are ignored) or one DER list; of nothing, no lists.

        Raises:
            CrlError: anything else.
        """
        if not data.strip():
            return cls()
        try:
            if b"-----BEGIN " not in data:
                return cls([x509.load_der_x509_crl(data)])
            crls = [x509.load_pem_x509_crl(block) for block in _blocks(data)]
        except ValueError as error:
            raise CrlError(f"not a certificate revocation list: {error}") from error
        if not crls:
            raise CrlError("PEM, but without a certificate revocation list (X509 CRL)")
        return cls(crls)

    def encoded(self) -> tuple[bytes, ...]:
        """Each in DER, for another process; :meth:`decoded` reads it."""
        return tuple(each.der for lists in self._by_issuer.values() for each in lists)

    @classmethod
    def decoded(cls, encoded: Sequence[bytes]) -> Self:
        """What :meth:`encoded` gave."""
        return cls([x509.load_der_x509_crl(each) for each in encoded])

    def is_revoked(self, chain: Sequence[x509.Certificate]) -> bool:
        """Whether some certificate of a verified chain, leaf first and root last, is revoked."""
        if not self._by_issuer:
            return False
        for index, certificate in enumerate(chain):
            issuer = chain[min(index + 1, len(chain) - 1)]
            lists = self._by_issuer.get(certificate.issuer.public_bytes(), ())
            if any(listed.names(certificate, issuer) for listed in lists):
                return True
        return False


class RevocationFile:
    """Keeps :attr:`current` up with a file; ``async with`` owns the task that looks.

    The file is looked at by its status, once a second, and read when that has been the same twice: no half-written
    file is read, and links swapped above it (how Kubernetes mounts volumes), missing directories and network file
    systems need no special care. inotify would need all three.

    Attributes:
        current: the lists in force.
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
        self._tasks.start(self._poll(), "poll")
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._tasks.close()

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each successful reading but the first."""
        self._watchers.append(changed)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._check_every_s)
            state, before = file_state(self._path), self._seen
            self._seen = state
            # In a thread: lists of large authorities take seconds to read.
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
                    "revocation list unusable, the last good one stays in force path=%s error=%s",
                    self._path,
                    reason,
                )
            elif isinstance(error, FileNotFoundError):
                log.warning("no revocation list yet, nothing is revoked until there is path=%s", self._path)
            else:
                log.error(
                    "revocation list unusable, REVOKED PEERS ARE ACCEPTED until it is right path=%s error=%s",
                    self._path,
                    reason,
                )
            return False
        self._loaded = True
        self.current = lists
        log.info("revocation lists loaded path=%s lists=%d", self._path, len(lists))
        return True
