"""Keeps the received configuration of a proxy for its successor, in case the proxy crashes.

If a holder process keeps the proxy's sockets (:mod:`tproxy.aio.held_sockets`), the proxy writes its received
configuration to sealed memory, and the holder keeps the descriptor. The memory contains resources as they arrived,
with their versions, and certificates with keys. Nothing is written to disk. The next proxy applies this
configuration and serves at once. Its first request to the control plane lists the resources' versions, as after
the loss of a stream, so that the control plane sends only differences. Certificates are renewed at half lifetime.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Collection, Iterable
from typing import Final

import msgspec
from cryptography import x509

from tproxy.aio.held_sockets import Holder
from xds.model.identity import SpiffeId
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.resource import Resource, Update
from ztunnel.proxy.identity.csr import IssuedCertificate
from ztunnel.proxy.istio.certificates.manager import CertificateAuthority
from ztunnel.runtime.clock import Clock

log = logging.getLogger(__name__)

NAME: Final = "configuration"
#: The version of the saved message's format. Messages of another version are not read.
SCHEMA: Final = 1
#: How long a write is delayed after a change, because each write copies several megabytes in a mesh of 10,000
#: workloads.
_CALM_S: Final = 1.0
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SavedResource(msgspec.Struct, array_like=True, frozen=True):
    """An xDS resource as it was received."""

    name: str
    version: str
    aliases: tuple[str, ...]
    type_url: str
    value: bytes


class SavedCertificate(msgspec.Struct, array_like=True, frozen=True):
    """A workload's certificate and its private key."""

    identity: str
    chain_pem: bytes
    roots_pem: bytes
    key_pem: bytes


class Saved(msgspec.Struct, frozen=True):
    """The message that is saved in sealed memory. Resources are grouped by type."""

    schema: int
    resources: dict[str, list[SavedResource]]
    certificates: list[SavedCertificate]


class LastConfiguration:
    """Reads the previous process's configuration, and writes this process's configuration. Create it on a running
    loop.

    Args:
        holder: the process that keeps the memory.
        clock: the current time; expired certificates are not restored.
    """

    def __init__(self, holder: Holder, clock: Clock) -> None:
        self._holder = holder
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._resources: dict[str, dict[str, SavedResource]] = {}
        self._certificates: dict[str, SavedCertificate] = {}
        self._restored: dict[str, SavedCertificate] = {}
        self._timer: asyncio.TimerHandle | None = None
        data = holder.memory(NAME)
        if data is not None:
            self._read(data)

    def _read(self, data: bytes) -> None:
        try:
            saved = msgspec.msgpack.decode(data, type=Saved)
        except msgspec.MsgspecError as error:
            log.warning("the previous process's configuration cannot be read error=%s", error)
            return
        if saved.schema != SCHEMA:
            log.warning("the previous process's configuration has schema %d, not %d", saved.schema, SCHEMA)
            return
        self._resources = {kind: {each.name: each for each in found} for kind, found in saved.resources.items()}
        self._certificates = {each.identity: each for each in saved.certificates}
        self._restored = dict(self._certificates)

    # Resources

    def update(self, type_url: str) -> Update | None:
        """Return the previous process's resources of a type, or ``None`` if that process had not received any
        answer.
        """
        held = self._resources.get(type_url)
        if held is None:
            return None
        resources = tuple(
            Resource(
                name=each.name,
                version=each.version,
                body=AnyMessage(type_url=each.type_url, value=each.value),
                aliases=each.aliases,
            )
            for each in held.values()
        )
        return Update(type_url=type_url, version="", resources=resources)

    def note(self, update: Update, rejected: Collection[str] = ()) -> None:
        """Save the resources of an applied update.

        A refused resource does not replace its last readable version. Without one it is saved with an empty
        version, so that the next process also refuses connections to its addresses, and the control plane sends
        it again.
        """
        held = self._resources.setdefault(update.type_url, {})
        for name in update.removed:
            held.pop(name, None)
        for each in update.resources:
            version = each.version
            if each.name in rejected:
                before = held.get(each.name)
                if before is not None and before.version:
                    continue
                version = ""
            held[each.name] = SavedResource(
                each.name, version, tuple(each.aliases), each.body.type_url, each.body.value
            )
        self._changed()

    # Certificates

    def certificate(self, identity: SpiffeId) -> IssuedCertificate | None:
        """Return the previous process's certificate for an identity, if it is still valid. It is returned only
        once; later calls return ``None``.
        """
        saved = self._restored.pop(str(identity), None)
        if saved is None:
            return None
        chain, roots = map(_certificates, (saved.chain_pem, saved.roots_pem))
        issued = IssuedCertificate(
            identity=identity,
            chain=chain,
            roots=roots,
            chain_pem=saved.chain_pem,
            roots_pem=saved.roots_pem,
            key_pem=saved.key_pem,
        )
        return issued if issued.not_after.timestamp() > self._clock.wall() else None

    def note_certificate(self, wanted: SpiffeId, issued: IssuedCertificate) -> None:
        """Save a certificate that the authority has issued."""
        name = str(wanted)
        if issued.identity == wanted:  # some authorities issue for the token's identity instead
            self._certificates[name] = SavedCertificate(name, issued.chain_pem, issued.roots_pem, issued.key_pem)
            self._changed()

    def forget(self, identities: Iterable[SpiffeId]) -> None:
        """Drop the certificates of removed workloads."""
        for identity in identities:
            self._certificates.pop(str(identity), None)
            self._restored.pop(str(identity), None)
        self._changed()

    def before(self, authority: CertificateAuthority) -> CertificateAuthority:
        """Wrap a certificate authority: the result first returns the previous process's certificates, and asks
        ``authority`` for all others.
        """
        return _Remembering(authority, self)

    # Writing

    def _changed(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_CALM_S, self._write)

    def _write(self) -> None:
        self._timer = None
        resources = {kind: list(held.values()) for kind, held in self._resources.items()}
        data = msgspec.msgpack.encode(Saved(SCHEMA, resources, list(self._certificates.values())))
        try:
            number = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                with open(number, "wb", closefd=False) as file:
                    file.write(data)
                fcntl.fcntl(number, fcntl.F_ADD_SEALS, _SEALS)
                self._holder.keep_memory(NAME, number)
            finally:
                os.close(number)
        except OSError as error:
            log.error("the configuration is not kept for the next process error=%s", error.strerror)

    def close(self) -> None:
        """Stop writing; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Remembering:
    """A certificate authority that returns the previous process's certificate once per identity, if
    it is valid.
    """

    def __init__(self, authority: CertificateAuthority, last: LastConfiguration) -> None:
        self._authority = authority
        self._last = last

    async def issue(self, identity: SpiffeId) -> IssuedCertificate:
        """Return the saved certificate on the first call for an identity. Later calls request a new one from the
        authority.
        """
        issued = self._last.certificate(identity)
        if issued is None:
            issued = await self._authority.issue(identity)
            self._last.note_certificate(identity, issued)
        return issued


def _certificates(pem: bytes) -> tuple[x509.Certificate, ...]:
    return tuple(x509.load_pem_x509_certificates(pem)) if pem else ()
