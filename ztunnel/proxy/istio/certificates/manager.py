"""Requests workloads' certificates when they are first needed, renews them at half their lifetime, and drops
unneeded ones.

:class:`CertificateManager` owns one task per fetch. ``schedule.py`` decides which fetches are due, and their
order.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from cryptography import x509

from hbone.settings import Role
from hbone.tls_context import ClientCertificate, TlsContext, TlsSettings, TlsVersion, Verify
from hbone.verification import verified_chain
from xds.model.identity import SpiffeId
from ztunnel.proxy.dataplane import agreement
from ztunnel.proxy.dataplane.agreement import Credentials, Party, none_revoked
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.identity.csr import AuthorityUnreachable, IdentityError, IssuedCertificate
from ztunnel.proxy.identity.peer import is_of_trust_domain, is_one_of, of_trust_domain, one_of
from ztunnel.proxy.identity.peer import none_revoked as unless_revoked
from ztunnel.proxy.istio.certificates.schedule import Fetch, Phase, Priority, Schedule
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
    "disagreement",
]

log = logging.getLogger(__name__)

#: The number of client TLS contexts cached per certificate, one for each set of expected identities. It exceeds
#: the number of services that a pod usually connects to. Creating a context takes 0.4 ms and 26 KiB.
_CLIENT_CONTEXTS: Final = 256

#: The manager checks at least this often which fetches are due: timers use the monotonic clock, but the validity
#: of certificates depends on the wall clock, which can be set.
_LONGEST_SLEEP_S: Final = 60.0

#: How far this host's clock may lag behind the authority's clock. A guess: Istio's tests allow the same skew.
_CLOCK_SKEW: Final = timedelta(minutes=10)

#: When an identity is dropped that was only fetched for connections, in seconds after the last one. A guess:
#: longer than the retries of a client.
_UNUSED_S: Final = 600.0

_FORGOTTEN: Final = "the identity is no longer needed"


class CertificateAuthority(Protocol):
    """Issues certificates: istiod over gRPC (``ca_client``), or a root in memory (``fake_ca``)."""

    async def issue(self, identity: SpiffeId) -> IssuedCertificate:
        """Create a key, and return it with its certificate.

        Raises:
            AuthorityUnreachable: the authority could not be reached, or did not answer.
            IdentityError: the authority refused, or sent an unusable answer.
        """


class Certificates(Protocol):
    """The data path's source of certificates: :class:`CertificateManager`, or its replica in a worker."""

    def current(self, identity: SpiffeId) -> "WorkloadCertificate | None":
        """Return the certificate if there is a valid one; the data path calls this before :meth:`fetch`."""

    async def fetch(self, identity: SpiffeId) -> "WorkloadCertificate":
        """Return the current certificate; waits for the first certificate.

        Raises:
            IdentityError: there is no certificate, and the last attempt to fetch one failed.
        """


class Revocations(Protocol):
    """The source of revocation lists: :class:`~ztunnel.proxy.identity.crl.RevocationFile`."""

    @property
    def current(self) -> RevocationLists:
        """The current lists."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsPolicy:
    """The TLS parameters of tunnels.

    The cipher suites come from :class:`~hbone.tls_context.TlsSettings`: AES-128 before AES-256, for speed. The
    Rust ztunnel prefers AES-256. Both programs accept both suites.

    Attributes:
        tls_1_2: whether TLS 1.2 is accepted.
        groups: the groups for key exchange, in Rust ztunnel's order.
        movable: see :class:`hbone.tls_context.TlsSettings`.
    """

    tls_1_2: bool = False
    groups: tuple[str, ...] = ("X25519", "P-256", "P-384", "X25519MLKEM768")
    movable: bool = False

    @classmethod
    def for_compliance(cls, policy: str, *, tls_1_2: bool = False) -> "TlsPolicy":
        """Return the parameters for ``COMPLIANCE_POLICY``.

        The value is empty, ``pqc`` for post-quantum key exchange only, or ``fips-140-2`` for only those groups
        that this standard approves. It approves all our cipher suites.

        Raises:
            ValueError: the policy is unknown (it must not be ignored), or it is ``pqc`` and TLS 1.2 is accepted.
        """
        match policy:
            case "":
                return cls(tls_1_2=tls_1_2)
            case "fips-140-2":
                return cls(tls_1_2=tls_1_2, groups=("P-256", "P-384"))
            case "pqc" if tls_1_2:
                raise ValueError(
                    "COMPLIANCE_POLICY=pqc excludes TLS12_ENABLED: TLS 1.2 has no post-quantum groups"
                )
            case "pqc":
                return cls(groups=("X25519MLKEM768",))
            case _:
                raise ValueError(f"unknown compliance policy {policy!r}; known are pqc and fips-140-2")


class WorkloadCertificate:
    """A certificate in use, with its TLS contexts, created on first use or by :meth:`prepare`.

    Attributes:
        issued: the certificate, its key and its roots.
        generation: increases with each renewal and each change of the revocation lists. It is part of pool keys,
            so that new tunnels use connections with the current certificate and lists.
        not_after: the end of the chain's validity.
    """

    __slots__ = (
        "_clients",
        "_credentials",
        "_first_client",
        "_path",
        "_policy",
        "_revoked",
        "_server",
        "generation",
        "issued",
        "not_after",
    )

    def __init__(
        self, issued: IssuedCertificate, generation: int, policy: TlsPolicy, revoked: RevocationLists | None = None
    ) -> None:
        self.issued = issued
        self.not_after = issued.not_after  # stored, because reading it can verify the chain each time
        self.generation = generation
        self._policy = policy
        self._revoked = revoked
        self._server: TlsContext | None = None
        self._first_client: TlsContext | None = None
        self._clients: OrderedDict[tuple[str, ...], TlsContext] = OrderedDict()
        self._credentials: Credentials | None = None
        self._path: tuple[x509.Certificate, ...] | None = None

    @property
    def credentials(self) -> Credentials:
        """The certificate and revocation lists in the form that checks a node-local tunnel without a TLS
        handshake. Created on first use.
        """
        if self._credentials is None:
            revoked = self._revoked
            self._credentials = Credentials(
                self.issued.chain,
                self.issued.roots,
                is_revoked=revoked.is_revoked if revoked is not None else none_revoked,
            )
        return self._credentials

    def is_revoked_by(self, lists: RevocationLists) -> bool:
        """Return whether a peer with the same roots and these revocation lists would refuse this certificate."""
        return lists.is_revoked(self._verified_path())

    def has_issuer_revoked_by(self, lists: RevocationLists) -> bool:
        """Return whether these revocation lists contain an issuer of this certificate."""
        return lists.is_revoked(self._verified_path()[1:])

    def _verified_path(self) -> tuple[x509.Certificate, ...]:
        if self._path is None:
            chain, roots = self.issued.chain, self.issued.roots
            self._path = verified_chain(chain, roots, Role.SERVER) or (*chain, *roots)
        return self._path

    def server_context(self) -> TlsContext:
        """Return the TLS context for incoming tunnels, which accepts peers of the certificate's own trust domain.

        Clients without ALPN are accepted. Clients that offer only other protocols are refused.
        """
        if self._server is None:
            verify = of_trust_domain(self.issued.identity.trust_domain)
            self._server = TlsContext(Role.SERVER, self._settings(verify, alpn_required=True))
        return self._server

    def client_context(self, identities: tuple[str, ...]) -> TlsContext:
        """Return the TLS context for outgoing tunnels to peers with one of ``identities``. Empty accepts no peer.

        Contexts are cached. The least recently used context is evicted.
        """
        context = self._clients.get(identities)
        if context is not None:
            self._clients.move_to_end(identities)
            return context
        context = self._clients[identities] = self._client().expecting(self._unless_revoked(one_of(identities)))
        if len(self._clients) > _CLIENT_CONTEXTS:
            self._clients.popitem(last=False)
        return context

    def prepare(self) -> None:
        """Build the TLS contexts for the first connection in each direction in advance.

        Raises:
            ValueError: chain, key or roots cannot be used.
        """
        self.server_context()
        self._client()

    def _client(self) -> TlsContext:
        if self._first_client is None:
            self._first_client = TlsContext(Role.CLIENT, self._settings(one_of(()), alpn_required=False))
        return self._first_client

    def _unless_revoked(self, verify: Verify) -> Verify:
        return verify if self._revoked is None else unless_revoked(self._revoked, verify)

    def _settings(self, verify: Verify, *, alpn_required: bool) -> TlsSettings:
        return TlsSettings(
            certificate_chain_pem=self.issued.chain_pem,
            private_key_pem=self.issued.key_pem,
            trusted_ca_pem=self.issued.roots_pem,
            client_certificate=ClientCertificate.REQUIRED,
            min_version=TlsVersion.TLS_1_2 if self._policy.tls_1_2 else TlsVersion.TLS_1_3,
            groups=self._policy.groups,
            alpn_required=alpn_required,
            verify=self._unless_revoked(verify),
            movable=self._policy.movable,
        )


def disagreement(
    client: WorkloadCertificate, server: WorkloadCertificate, expected: tuple[str, ...], now: datetime
) -> str:
    """Return why a handshake between a client and a server with these certificates would fail at ``now``.

    Args:
        expected: the identities that the client accepts.

    Returns:
        Why the handshake would fail, or the empty string if it would succeed.
    """
    trust_domain = server.issued.identity.trust_domain
    return agreement.disagreement(
        Party(client.credentials, is_one_of(expected)),
        Party(server.credentials, is_of_trust_domain(trust_domain)),
        now,
    )


class Moments(NamedTuple):
    """The metrics of the certificates: when they expire, in Unix seconds, and how many fetches succeeded and
    failed.

    Attributes:
        ends: the expiry time of the current certificate, by identity.
        root_s: the expiry time of the root that expires first. ``None`` before the first root.
        fetches: the number of finished fetches by result, ``ok`` or ``failed``.
    """

    ends: Mapping[str, float] = MappingProxyType({})
    root_s: float | None = None
    fetches: Mapping[str, int] = MappingProxyType({})


class CertificateManager:
    """Fetches and renews the certificates of this node's workloads; see the module's documentation.

    Args:
        authority: issues certificates.
        now: the wall clock, UTC.
        jitter: returns a number in [0, 1) per call; spreads renewals.
        concurrency: the largest number of fetches at a time.
        policy: the TLS parameters of tunnels.
        revocations: the source of revocation lists. None disables revocation.
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
        self._upcoming: dict[SpiffeId, IssuedCertificate] = {}  # renewed, but not valid yet by this host's clock
        self._fetching: dict[SpiffeId, asyncio.Task[None]] = {}
        self._waiting: dict[SpiffeId, asyncio.Event] = {}
        self._prefetched: set[SpiffeId] = set()
        self._fetched_at_s: dict[SpiffeId, float] = {}
        self._settling: asyncio.Event | None = None
        self._watchers: list[Callable[[SpiffeId, WorkloadCertificate], None]] = []
        self._tasks = Tasks("certificates")
        self._timer: asyncio.TimerHandle | None = None
        self._generation = 0
        self._closed = False
        #: The number of finished fetches, by result.
        self.fetches = {"ok": 0, "failed": 0}
        if revocations is not None:
            revocations.watch(self._revocations_changed)

    def current(self, identity: SpiffeId) -> WorkloadCertificate | None:
        """Return the certificate if there is a valid one; the data path calls this before :meth:`fetch`."""
        certificate = self._certificates.get(identity)
        if certificate is None or certificate.not_after <= self._now():
            return None
        return certificate

    async def fetch(self, identity: SpiffeId) -> WorkloadCertificate:
        """Return the current certificate; waits for the first certificate.

        Raises:
            IdentityError: the last attempt failed and no valid certificate is left; retries continue in the
                background.
        """
        certificate = self.at_once(identity)
        if certificate is None:
            self._fetched_at_s[identity] = asyncio.get_running_loop().time()
            waiting = self._waiting.setdefault(identity, asyncio.Event())
            self._want((identity,), Priority.REAL_TIME)
            await waiting.wait()
            certificate = self.current(identity)
        if certificate is None:
            raise IdentityError(self._schedule.error(identity) or _FORGOTTEN)
        return certificate

    def at_once(self, identity: SpiffeId) -> WorkloadCertificate | None:
        """Return the certificate without fetching it. None if :meth:`fetch` would wait for the first certificate.

        Raises:
            IdentityError: :meth:`fetch` would raise this error at once.
        """
        certificate = self.current(identity)
        if certificate is None and self._closed:
            raise IdentityError(_FORGOTTEN)
        if certificate is None and self._schedule.phase(identity, self._now_s()) is Phase.UNAVAILABLE:
            raise IdentityError(self._schedule.error(identity) or _FORGOTTEN)
        return certificate

    def prefetch(self, identities: Collection[SpiffeId]) -> None:
        """Fetch certificates before connections need them, for workloads of this node, and keep them until
        :meth:`forget`; idempotent.
        """
        self._prefetched.update(identities)
        self._want(identities, Priority.WARMUP)

    async def first_certificates(self, limit_s: float) -> list[SpiffeId]:
        """Wait until each identity in use has a certificate; return the identities that have none.

        While the authority cannot be reached, this waits without limit. If the authority refuses the missing
        identities, this waits only until ``limit_s`` after the call: the authority may not know a new pod yet.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while True:
            lacking = [identity for identity in self._schedule if self.current(identity) is None]
            refused = all(self._schedule.is_refused(identity) for identity in lacking)
            left_s = end_s - loop.time()
            if not lacking or self._closed or (refused and left_s <= 0):
                return lacking
            self._settling = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s if refused else None):
                    await self._settling.wait()

    def forget(self, identities: Collection[SpiffeId]) -> None:
        """Drop identities and stop their renewal; idempotent.

        Waiting callers get :class:`IdentityError` ``the identity is no longer needed``.
        """
        for identity in identities:
            self._schedule.forget(identity)
            self._prefetched.discard(identity)
            self._fetched_at_s.pop(identity, None)
            self._certificates.pop(identity, None)
            self._upcoming.pop(identity, None)
            task = self._fetching.pop(identity, None)
            if task is not None:
                task.cancel()
            self._wake(identity)
        self._proceed()

    def watch(self, changed: Callable[[SpiffeId, WorkloadCertificate], None]) -> None:
        """Call ``changed`` with each new certificate and the identity that it was requested for.

        A change of the revocation lists replaces the objects of all certificates, so ``changed`` is then called
        for each certificate.
        """
        self._watchers.append(changed)

    def states(self) -> Mapping[SpiffeId, "WorkloadCertificate | str"]:
        """Return each identity's certificate, ``Initializing`` or ``Unavailable: <error>``, for the dump."""
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

    def moments(self) -> "Moments":
        """Return when certificates and roots expire, and the numbers of fetches, for metrics."""
        held = self._certificates
        ends = {str(identity): certificate.not_after.timestamp() for identity, certificate in held.items()}
        roots = {root for certificate in held.values() for root in certificate.issued.roots}
        root_s = min((root.not_valid_after_utc.timestamp() for root in roots), default=None)
        return Moments(ends, root_s, dict(self.fetches))

    async def close(self) -> None:
        """Cancel every fetch and fail waiting callers; idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for identity in list(self._waiting):
            self._wake(identity)
        if self._settling is not None:
            self._settling.set()
        await self._tasks.close()

    # Fetches

    def _now_s(self) -> float:
        return self._now().timestamp()

    def _want(self, identities: Collection[SpiffeId], priority: Priority) -> None:
        for identity in identities:
            self._schedule.want(identity, priority)
        self._proceed()

    def _proceed(self) -> None:
        """Start to use certificates that have become valid, start due fetches, and set the timer for both."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed:
            return
        self._use_upcoming()
        for fetch in self._schedule.start(self._now_s()):
            self._fetching[fetch.identity] = self._tasks.start(self._fetch(fetch), str(fetch.identity))
        now_s = self._now_s()
        due_s = [] if (first_s := self._schedule.next_due_s(now_s)) is None else [first_s]
        for identity, issued in self._upcoming.items():
            due_s += [issued.not_before.timestamp(), self._certificates[identity].not_after.timestamp()]
        if due_s:
            delay_s = min(max(0.0, min(due_s) - now_s), _LONGEST_SLEEP_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._proceed)

    async def _fetch(self, fetch: Fetch) -> None:
        identity = fetch.identity
        try:
            self._succeeded(fetch, await self._authority.issue(identity))
        except IdentityError as error:
            self._failed(fetch, str(error), unreachable=isinstance(error, AuthorityUnreachable))
        except Exception as error:  # a bug in this program must not stop the retries
            log.exception("certificate fetch broke identity=%s", identity)
            self._failed(fetch, f"internal error: {error!r}")
        self._proceed()

    def _succeeded(self, fetch: Fetch, issued: IssuedCertificate) -> None:
        now, not_after = self._now(), issued.not_after
        if not_after <= now:
            expired, check = "certificate", "the clocks"
            if not_after < issued.chain[0].not_valid_after_utc:
                expired, check = "issuer of the certificate", "the CA's chain and the clocks"
            self._failed(
                fetch,
                f"the {expired} from CA expired at {not_after:%Y-%m-%dT%H:%M:%SZ} and here it is "
                f"{now:%Y-%m-%dT%H:%M:%SZ}: check {check}",
            )
            return
        # This host's clock can be slow, and peers check validity by their own clocks. So without another
        # certificate, a certificate that becomes valid in some minutes is used at once.
        current = self.current(fetch.identity)
        if issued.not_before > now + _CLOCK_SKEW:
            self._failed(
                fetch,
                f"the certificate from CA is valid from {issued.not_before:%Y-%m-%dT%H:%M:%SZ} and here it is "
                f"{now:%Y-%m-%dT%H:%M:%SZ}: check the clocks",
            )
            return
        if current is not None and current.issued.identity != issued.identity:
            self._failed(fetch, f"the certificate from CA is of {issued.identity}, not {current.issued.identity}")
            return
        certificate = self._made(issued)
        if self._is_revoked(certificate):
            self._failed(fetch, "the certificate from CA is revoked by the revocation lists")
            return
        try:
            certificate.prepare()
        except ValueError as error:
            self._failed(fetch, f"the certificate from CA cannot be used: {error}")
            return
        span = issued.not_before.timestamp(), not_after.timestamp()
        if not self._schedule.succeeded(fetch, *span, now.timestamp(), self._jitter()):
            return
        self._fetching.pop(fetch.identity, None)
        self.fetches["ok"] += 1
        log.debug("certificate fetched identity=%s expires=%s", fetch.identity, not_after)
        self._schedule.authority_answered()
        if current is not None and issued.not_before > now:
            self._upcoming[fetch.identity] = issued
            log.warning(
                "renewed certificate not valid yet, the current one stays in use identity=%s valid_from=%s: this "
                "host's clock or the authority's is wrong",
                fetch.identity,
                issued.not_before,
            )
            return
        self._upcoming.pop(fetch.identity, None)
        self._put(fetch.identity, certificate)
        self._wake(fetch.identity)

    def _use_upcoming(self) -> None:
        """Start to use renewed certificates that have become valid, or whose predecessor has expired."""
        for identity, issued in list(self._upcoming.items()):
            if issued.not_before <= self._now() or self.current(identity) is None:
                del self._upcoming[identity]
                self._put(identity, self._made(issued))
                self._wake(identity)

    def _failed(self, fetch: Fetch, error: str, *, unreachable: bool = False) -> None:
        if not self._schedule.failed(fetch, error, self._now_s(), self._jitter(), unreachable=unreachable):
            return
        self._fetching.pop(fetch.identity, None)
        self.fetches["failed"] += 1
        certificate = self.current(fetch.identity)
        log.warning(
            "certificate fetch failed identity=%s valid_until=%s error=%s",
            fetch.identity,
            certificate.not_after if certificate is not None else "-",
            error,
        )
        self._wake(fetch.identity)
        if certificate is None and self._is_unused(fetch.identity):
            log.info("certificate no longer fetched, because no connection needs it identity=%s", fetch.identity)
            self.forget((fetch.identity,))

    def _is_unused(self, identity: SpiffeId) -> bool:
        """Return whether an identity was only fetched for connections, the last of them long ago.

        A connection can fetch an identity again after its last workload was removed from the node. The authority
        then refuses each retry, because the node has no pod with that service account.
        """
        if identity in self._prefetched:
            return False
        return asyncio.get_running_loop().time() - self._fetched_at_s.get(identity, 0.0) > _UNUSED_S

    def _wake(self, identity: SpiffeId) -> None:
        waiting = self._waiting.pop(identity, None)
        if waiting is not None:
            waiting.set()
        if self._settling is not None:
            self._settling.set()

    def _made(self, issued: IssuedCertificate) -> WorkloadCertificate:
        self._generation += 1
        revoked = self._revocations.current if self._revocations is not None else None
        return WorkloadCertificate(issued, self._generation, self._policy, revoked)

    def _put(self, identity: SpiffeId, certificate: WorkloadCertificate) -> None:
        self._certificates[identity] = certificate
        for changed in list(self._watchers):
            try:
                changed(identity, certificate)
            except Exception:  # the certificate is already in use, and other watchers and callers need it
                log.exception("a watcher of certificates broke identity=%s", identity)

    def _is_revoked(self, certificate: WorkloadCertificate) -> bool:
        """Return whether the current revocation lists contain a certificate. Unreadable lists contain none."""
        lists = self._revocations.current if self._revocations is not None else None
        return lists is not None and not lists.unreadable and certificate.is_revoked_by(lists)

    def _revocations_changed(self) -> None:
        assert self._revocations is not None
        for identity, certificate in list(self._certificates.items()):
            if self._is_revoked(certificate):
                log.error("our own certificate is revoked; peers will refuse it identity=%s", identity)
                # The authority can have another issuer already. If the list contains the leaf, it is renewed as
                # usual, because otherwise the workload would have connections again.
                if certificate.has_issuer_revoked_by(self._revocations.current):
                    self._schedule.renew(identity)
            self._put(identity, self._made(certificate.issued))
        for identity, issued in list(self._upcoming.items()):
            if self._is_revoked(self._made(issued)):
                del self._upcoming[identity]
                self._schedule.renew(identity)
        self._proceed()
