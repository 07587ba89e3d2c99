"""``FAKE_CA``: issues certificates from a root in memory, for tests without a control plane."""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from xds.model.identity import SpiffeId
from ztunnel.proxy.identity.authority import CertificateAuthority
from ztunnel.proxy.identity.csr import IssuedCertificate, issued_certificate

log = logging.getLogger(__name__)


class FakeCertificateAuthority:
    """A ``CertificateAuthority`` for tests. No other process trusts its root."""

    def __init__(self, *, now: Callable[[], datetime], lifetime_s: float = 86400.0) -> None:
        self._now = now
        self._lifetime = timedelta(seconds=lifetime_s)
        self._root = CertificateAuthority.in_memory("cluster.local", now())
        log.warning("FAKE_CA: CERTIFICATES ARE WORTHLESS, their root was made in memory by this very process")

    async def issue(self, identity: SpiffeId) -> IssuedCertificate:
        """Issue a certificate; see :class:`~ztunnel.proxy.istio.certificates.manager.CertificateAuthority`."""
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = self._root.certify(key.public_key(), identity, self._now(), self._lifetime)
        answer = [leaf.public_bytes(Encoding.PEM).decode(), self._root.root_pem.decode()]
        return issued_certificate(identity, key, answer, exact=True)
