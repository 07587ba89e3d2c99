"""Certificates of workloads: fetched when first needed, renewed at half life, forgotten with the last workload.

:class:`CertificateManager` owns one task per fetch; what is due and what wins is decided by ``schedule.py``.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from hbone.settings import Role
from hbone.tls_context import ClientCertificate, TlsContext, TlsSettings, TlsVersion, Verify
from xds.model.identity import SpiffeId
from ztunnel.dataplane.agreement import Credentials, none_revoked
from ztunnel.identity.crl import RevocationLists
from ztunnel.identity.csr import IdentityError, IssuedCertificate
from ztunnel.identity.peer import none_revoked as unless_revoked
from ztunnel.identity.peer import of_trust_domain, one_of
from ztunnel.istio.certificates.schedule import Fetch, Phase, Priority, Schedule
from ztunnel.runtime.tasks import Tasks

__all__ = [
    "CertificateAuthority",
    "CertificateManager",
    "Certificates",
    "IdentityError",
    "IssuedCertificate",
    "Priority",
    "Revocations",
    "TlsPolicy",
    "WorkloadCertificate",
]

log = logging.getLogger(__name__)

#: Client contexts a certificate keeps, one per set of expected identities. Building one costs 0.4 ms, keeping one
#: 26 KiB; a pod talks to fewer services than this.
_CLIENT_CONTEXTS: Final = 256

#: The wall clock may be set while a timer sleeps; what is due is looked at this often at least.
_LONGEST_SLEEP_S: Final = 60.0

_FORGOTTEN: Final = "the identity is no longer needed"


class CertificateAuthority(Protocol):
    """Signs: istiod over gRPC (``ca_client``), or a root made for the moment (``fake_ca``)."""

    async def issue(self, identity: SpiffeId) -> IssuedCertificate:
        """A new key and a certificate for it.

        Raises:
            IdentityError: refused, unreachable, or an answer that does not fit.
        """


class Certificates(Protocol):
    """Where the data path has them from: :class:`CertificateManager`, or what another process sends."""

    def current(self, identity: SpiffeId) -> "WorkloadCertificate | None":
        """What :meth:`fetch` would return at once; the data path asks here first."""

    async def fetch(self, identity: SpiffeId) -> "WorkloadCertificate":
        """The current certificate, waiting for the first one.

        Raises:
            IdentityError: none can be had now.
        """


class Revocations(Protocol):
    """Where revocation lists come from: :class:`~ztunnel.identity.crl.RevocationFile`."""

    @property
    def current(self) -> RevocationLists:
        """The current ones."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsPolicy:
    """What tunnels negotiate.

    The suites are those of :class:`~hbone.tls_context.TlsSettings`: AES-128 before AES-256, for speed, where Rust
    ztunnel prefers AES-256; either end accepts both.

    Attributes:
        tls_1_2: whether peers may be that old.
        groups: key exchange, in the order Rust ztunnel offers it.
    """

    tls_1_2: bool = False
    groups: tuple[str, ...] = ("X25519", "P-256", "P-384", "X25519MLKEM768")

    @classmethod
    def for_compliance(cls, policy: str, *, tls_1_2: bool = False) -> "TlsPolicy":
        """Of ``COMPLIANCE_POLICY``: empty, or ``pqc`` for post-quantum key exchange and nothing else.

        Raises:
            ValueError: another policy: obeying none of it would be less than what was asked for.
        """
        match policy:
            case "":
                return cls(tls_1_2=tls_1_2)
            case "pqc" if tls_1_2:
                raise ValueError(
                    "COMPLIANCE_POLICY=pqc excludes TLS12_ENABLED: TLS 1.2 has no post-quantum groups"
                )
            case "pqc":
                return cls(groups=("X25519MLKEM768",))
            case _:
                raise ValueError(f"unknown compliance policy {policy!r}; known is pqc")


class WorkloadCertificate:
    """A certificate in use, with the TLS contexts built from it (lazily, kept while it is current).

    Attributes:
        issued: what the CA gave.
        generation: goes up with each renewal and each change of the revocation list; part of pool keys.
    """

    __slots__ = ("_clients", "_credentials", "_policy", "_revoked", "_server", "generation", "issued")

    def __init__(
        self, issued: IssuedCertificate, generation: int, policy: TlsPolicy, revoked: RevocationLists | None = None
    ) -> None:
        self.issued = issued
        self.generation = generation
        self._policy = policy
        self._revoked = revoked
        self._server: TlsContext | None = None
        self._clients: OrderedDict[tuple[str, ...], TlsContext] = OrderedDict()
        self._credentials: Credentials | None = None

    @property
    def credentials(self) -> Credentials:
        """What it shows and verifies peers by, for tunnels that are joined without a handshake; made once."""
        if self._credentials is None:
            revoked = self._revoked
            self._credentials = Credentials(
                self.issued.chain,
                self.issued.roots,
                is_revoked=revoked.is_revoked if revoked is not None else none_revoked,
            )
        return self._credentials

    def is_revoked_by(self, lists: RevocationLists) -> bool:
        """Whether a peer that has ``lists`` would find this certificate revoked."""
        return any(lists.is_revoked((*self.issued.chain, root)) for root in self.issued.roots)

    def server_context(self) -> TlsContext:
        """For tunnels that come in: any peer of the certificate's own trust domain.

        Clients without ALPN are let in, those that offer only other protocols are not.
        """
        if self._server is None:
            verify = of_trust_domain(self.issued.identity.trust_domain)
            self._server = TlsContext(Role.SERVER, self._settings(verify, alpn_required=True))
        return self._server

    def client_context(self, identities: tuple[str, ...]) -> TlsContext:
        """For tunnels that go out: the peer must show one of ``identities``; none of them: nobody is right."""
        context = self._clients.get(identities)
        if context is not None:
            self._clients.move_to_end(identities)
            return context
        context = self._clients[identities] = TlsContext(
            Role.CLIENT, self._settings(one_of(identities), alpn_required=False)
        )
        if len(self._clients) > _CLIENT_CONTEXTS:
            self._clients.popitem(last=False)
        return context

    def _settings(self, verify: Verify, *, alpn_required: bool) -> TlsSettings:
        return TlsSettings(
            certificate_chain_pem=self.issued.chain_pem,
            private_key_pem=self.issued.key_pem,
            trusted_ca_pem=self.issued.roots_pem,
            client_certificate=ClientCertificate.REQUIRED,
            min_version=TlsVersion.TLS_1_2 if self._policy.tls_1_2 else TlsVersion.TLS_1_3,
            groups=self._policy.groups,
            alpn_required=alpn_required,
            verify=verify if self._revoked is None else unless_revoked(self._revoked, verify),
        )


class CertificateManager:
    """See the module.

    Args:
        authority: where certificates come from.
        now: wall clock, UTC.
        jitter: in [0, 1), per call; spreads renewals.
        concurrency: fetches at a time.
        policy: what tunnels negotiate.
        revocations: who is not to be trusted any more.
    """

    def __init__(
        self,
        authority: CertificateAuthority,
        *,
        now: Callable[[], datetime],
        jitter: Callable[[], float],
        concurrency: int = 8,
        policy: TlsPolicy | None = None,
        revocations: Revocations | None = None,
    ) -> None:
        self._authority = authority
        self._now = now
        self._jitter = jitter
        self._policy = policy or TlsPolicy()
        self._revocations = revocations
        self._schedule = Schedule(concurrency=concurrency)
        self._certificates: dict[SpiffeId, WorkloadCertificate] = {}
        self._fetching: dict[SpiffeId, asyncio.Task[None]] = {}
        self._waiting: dict[SpiffeId, asyncio.Event] = {}
        self._watchers: list[Callable[[SpiffeId, WorkloadCertificate], None]] = []
        self._tasks = Tasks("certificates")
        self._timer: asyncio.TimerHandle | None = None
        self._generation = 0
        self._closed = False
        if revocations is not None:
            revocations.watch(self._revocations_changed)

    def current(self, identity: SpiffeId) -> WorkloadCertificate | None:
        """What :meth:`fetch` would return at once; the data path asks here first."""
        certificate = self._certificates.get(identity)
        if certificate is None or certificate.issued.not_after <= self._now():
            return None
        return certificate

    async def fetch(self, identity: SpiffeId) -> WorkloadCertificate:
        """The current certificate, waiting for the first one.

        Raises:
            IdentityError: the last attempt failed and nothing valid is left; the next is made in the background.
        """
        certificate = self.current(identity)
        if certificate is not None:
            return certificate
        if self._closed:
            raise IdentityError(_FORGOTTEN)
        if self._schedule.phase(identity, self._now_s()) is not Phase.UNAVAILABLE:
            self._want((identity,), Priority.REAL_TIME)
            await self._waiting.setdefault(identity, asyncio.Event()).wait()
            certificate = self.current(identity)
            if certificate is not None:
                return certificate
        raise IdentityError(self._schedule.error(identity) or _FORGOTTEN)

    def prefetch(self, identities: Collection[SpiffeId]) -> None:
        """Have these ready before somebody asks (workloads of this node)."""
        self._want(identities, Priority.WARMUP)

    def forget(self, identities: Collection[SpiffeId]) -> None:
        """Drop these; waiting callers get :class:`IdentityError` ``the identity is no longer needed``."""
        for identity in identities:
            self._schedule.forget(identity)
            self._certificates.pop(identity, None)
            task = self._fetching.pop(identity, None)
            if task is not None:
                task.cancel()
            self._wake(identity)
        self._proceed()

    def watch(self, changed: Callable[[SpiffeId, WorkloadCertificate], None]) -> None:
        """Call ``changed`` with each new certificate and the identity that it was asked for.

        With each old one, too, after the revocation list changed.
        """
        self._watchers.append(changed)

    def states(self) -> Mapping[SpiffeId, "WorkloadCertificate | str"]:
        """For the dump: the certificate, ``Initializing``, or ``Unavailable: <error>``."""
        states: dict[SpiffeId, WorkloadCertificate | str] = {}
        for identity in self._schedule:
            phase = self._schedule.phase(identity, self._now_s())
            if phase is Phase.AVAILABLE:
                states[identity] = self._certificates[identity]
            elif phase is Phase.UNAVAILABLE:
                states[identity] = f"Unavailable: {self._schedule.error(identity)}"
            else:
                states[identity] = "Initializing"
        return states

    async def close(self) -> None:
        """End every fetch."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for identity in list(self._waiting):
            self._wake(identity)
        await self._tasks.close()

    # What runs

    def _now_s(self) -> float:
        return self._now().timestamp()

    def _want(self, identities: Collection[SpiffeId], priority: Priority) -> None:
        for identity in identities:
            self._schedule.want(identity, priority)
        self._proceed()

    def _proceed(self) -> None:
        """Begin what is due, and come back when more is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed:
            return
        for fetch in self._schedule.start(self._now_s()):
            self._fetching[fetch.identity] = self._tasks.start(self._fetch(fetch), str(fetch.identity))
        now_s = self._now_s()
        due_s = self._schedule.next_due_s(now_s)
        if due_s is not None:
            delay_s = min(due_s - now_s, _LONGEST_SLEEP_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._proceed)

    async def _fetch(self, fetch: Fetch) -> None:
        identity = fetch.identity
        try:
            issued = await self._authority.issue(identity)
        except IdentityError as error:
            self._failed(fetch, str(error))
        except Exception as error:  # our bug: it must not keep the identity from being tried again
            log.exception("certificate fetch broke identity=%s", identity)
            self._failed(fetch, f"internal error: {error!r}")
        else:
            self._succeeded(fetch, issued)
        self._proceed()

    def _succeeded(self, fetch: Fetch, issued: IssuedCertificate) -> None:
        now = self._now()
        if issued.not_after <= now:
            self._failed(
                fetch,
                f"the certificate from CA expired at {issued.not_after:%Y-%m-%dT%H:%M:%SZ} and here it is "
                f"{now:%Y-%m-%dT%H:%M:%SZ}: check the clocks",
            )
            return
        span = issued.not_before.timestamp(), issued.not_after.timestamp()
        if not self._schedule.succeeded(fetch, *span, now.timestamp(), self._jitter()):
            return
        self._fetching.pop(fetch.identity, None)
        log.debug("certificate fetched identity=%s expires=%s", fetch.identity, issued.not_after)
        self._put(fetch.identity, issued)
        self._wake(fetch.identity)

    def _failed(self, fetch: Fetch, error: str) -> None:
        if not self._schedule.failed(fetch, error, self._now_s(), self._jitter()):
            return
        self._fetching.pop(fetch.identity, None)
        certificate = self.current(fetch.identity)
        log.warning(
            "certificate fetch failed identity=%s valid_until=%s error=%s",
            fetch.identity,
            certificate.issued.not_after if certificate is not None else "-",
            error,
        )
        self._wake(fetch.identity)

    def _wake(self, identity: SpiffeId) -> None:
        waiting = self._waiting.pop(identity, None)
        if waiting is not None:
            waiting.set()

    def _put(self, identity: SpiffeId, issued: IssuedCertificate) -> None:
        self._generation += 1
        revoked = self._revocations.current if self._revocations is not None else None
        certificate = WorkloadCertificate(issued, self._generation, self._policy, revoked)
        self._certificates[identity] = certificate
        for changed in list(self._watchers):
            changed(identity, certificate)

    def _revocations_changed(self) -> None:
        assert self._revocations is not None
        for identity, certificate in list(self._certificates.items()):
            if certificate.is_revoked_by(self._revocations.current):
                log.error("our own certificate is revoked; peers will refuse it identity=%s", identity)
            self._put(identity, certificate.issued)
