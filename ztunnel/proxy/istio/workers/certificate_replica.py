"""Replicates the main process's certificates and revocation lists in a worker."""

from collections.abc import Callable

from cryptography import x509

from xds.model.identity import SpiffeId
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.identity.csr import IdentityError, IssuedCertificate
from ztunnel.proxy.istio.certificates.manager import TlsPolicy, WorkloadCertificate
from ztunnel.proxy.istio.workers.channel import ChannelClosed, IpcChannel, Refused
from ztunnel.proxy.istio.workers.messages import CertificateIssued, GetCertificate
from ztunnel.runtime.clock import Clock, SystemClock


class ReplicatedRevocations:
    """Revocation lists replicated from the main process, which reads the file.

    Has the same interface as :class:`ztunnel.proxy.istio.certificates.manager.Revocations`.
    """

    def __init__(self) -> None:
        self.current = RevocationLists()
        self._watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each change."""
        self._watchers.append(changed)

    def change(self, lists: RevocationLists) -> None:
        """Replace the revocation lists and call the watchers."""
        self.current = lists
        for changed in self._watchers:
            changed()


class ReplicatedCertificates:
    """Certificates replicated from the main process, which requests and renews them.

    Has the same interface as :class:`ztunnel.proxy.istio.certificates.manager.Certificates`.

    Args:
        channel: the channel to the main process.
        policy: the TLS versions and key-exchange groups for tunnels.
        revocations: the revocation lists, if configured.
        clock: used to detect expired certificates.
    """

    def __init__(
        self,
        channel: IpcChannel,
        policy: TlsPolicy,
        revocations: ReplicatedRevocations | None,
        clock: Clock | None = None,
    ) -> None:
        self._channel = channel
        self._policy = policy
        self._revocations = revocations
        self._certificates: dict[SpiffeId, WorkloadCertificate] = {}
        self._generation = 0
        self._clock = clock or SystemClock()
        if revocations is not None:
            revocations.watch(self._revocations_changed)

    def current(self, identity: SpiffeId) -> WorkloadCertificate | None:
        """Return the identity's certificate, if this worker has a currently valid one."""
        certificate = self._certificates.get(identity)
        if certificate is None or certificate.not_after.timestamp() <= self._clock.wall():
            return None
        return certificate

    async def fetch(self, identity: SpiffeId) -> WorkloadCertificate:
        """Return a certificate that is valid now, requesting it from the main process if necessary.

        Raises:
            IdentityError: no certificate could be obtained.
        """
        certificate = self.current(identity)
        if certificate is None:
            try:
                await self._channel.request(GetCertificate(identity))
            except Refused as refused:
                raise IdentityError(str(refused)) from refused
            except ChannelClosed:
                raise IdentityError("the proxy ends") from None
            certificate = self.current(identity)
        if certificate is None:
            raise IdentityError("the identity is no longer needed")
        return certificate

    def put(self, message: CertificateIssued) -> None:
        """Store a certificate that the main process has obtained or renewed. Idempotent."""
        known = self._certificates.get(message.wanted)
        if known is not None and known.issued.chain_pem == message.chain_pem:
            return
        issued = IssuedCertificate(
            identity=message.identity,
            chain=tuple(x509.load_pem_x509_certificates(message.chain_pem)),
            roots=tuple(x509.load_pem_x509_certificates(message.roots_pem)),
            chain_pem=message.chain_pem,
            roots_pem=message.roots_pem,
            key_pem=message.key_pem,
        )
        self._put(message.wanted, issued)

    def _put(self, wanted: SpiffeId, issued: IssuedCertificate) -> None:
        self._generation += 1
        revoked = self._revocations.current if self._revocations is not None else None
        self._certificates[wanted] = WorkloadCertificate(issued, self._generation, self._policy, revoked)

    def forget(self, identities: set[SpiffeId]) -> None:
        """Drop the certificates of identities that no pod of this node uses any more."""
        for identity in identities:
            self._certificates.pop(identity, None)

    def _revocations_changed(self) -> None:
        # Create all TLS contexts again, because a context keeps the revocation lists from its creation.
        for wanted, certificate in list(self._certificates.items()):
            self._put(wanted, certificate.issued)
