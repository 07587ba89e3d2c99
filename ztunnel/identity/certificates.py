"""Certificates of workloads: fetched when first needed, renewed at half life, forgotten with the last workload.

:class:`CertificateManager` owns one task per fetch; what is due and what wins is decided by ``schedule.py``.
"""

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Protocol

from hbone.tls_context import TlsContext
from xds.model.identity import SpiffeId
from ztunnel.identity.csr import IdentityError, IssuedCertificate
from ztunnel.identity.schedule import Priority

__all__ = [
    "CertificateAuthority",
    "CertificateManager",
    "IdentityError",
    "IssuedCertificate",
    "Priority",
    "WorkloadCertificate",
]


class CertificateAuthority(Protocol):
    """Signs: istiod over gRPC (``ca_client``), or a root made for the moment (``fake_ca``)."""

    async def issue(self, identity: SpiffeId) -> IssuedCertificate:
        """A new key and a certificate for it.

        Raises:
            IdentityError: refused, unreachable, or an answer that does not fit.
        """


class WorkloadCertificate:
    """A certificate in use, with the TLS contexts built from it (lazily, kept while it is current).

    Attributes:
        issued: what the CA gave.
        generation: goes up with each renewal and each change of the revocation list; part of pool keys.
    """

    issued: IssuedCertificate
    generation: int

    def server_context(self) -> TlsContext:
        """For tunnels that come in: any peer of the certificate's own trust domain (spec 3)."""
        raise NotImplementedError

    def client_context(self, identities: tuple[str, ...]) -> TlsContext:
        """For tunnels that go out: the peer must show one of ``identities``; none of them: nobody is right."""
        raise NotImplementedError


class CertificateManager:
    """See the module.

    Args:
        authority: where certificates come from.
        now: wall clock, UTC.
        jitter: in [0, 1), per call; spreads renewals.
        concurrency: fetches at a time.
    """

    def __init__(
        self,
        authority: CertificateAuthority,
        *,
        now: Callable[[], datetime],
        jitter: Callable[[], float],
        concurrency: int = 8,
    ) -> None:
        raise NotImplementedError

    def current(self, identity: SpiffeId) -> WorkloadCertificate | None:
        """What :meth:`fetch` would return at once; the data path asks here first."""
        raise NotImplementedError

    async def fetch(self, identity: SpiffeId) -> WorkloadCertificate:
        """The current certificate, waiting for the first one.

        Raises:
            IdentityError: the last attempt failed and nothing valid is left; the next is made in the background.
        """
        raise NotImplementedError

    def prefetch(self, identities: Collection[SpiffeId]) -> None:
        """Have these ready before somebody asks (workloads of this node)."""
        raise NotImplementedError

    def forget(self, identities: Collection[SpiffeId]) -> None:
        """Drop these; waiting callers get :class:`IdentityError` ``the identity is no longer needed``."""
        raise NotImplementedError

    def watch(self, changed: Callable[[WorkloadCertificate], None]) -> None:
        """Call ``changed`` after each renewal and each change of the revocation list."""
        raise NotImplementedError

    def states(self) -> Mapping[SpiffeId, "WorkloadCertificate | str"]:
        """For the dump: the certificate, ``Initializing``, or ``Unavailable: <error>``."""
        raise NotImplementedError

    async def close(self) -> None:
        """End every fetch."""
        raise NotImplementedError
