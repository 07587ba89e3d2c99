"""Certificates from istiod, over gRPC; which ones and when is the business of ``certificates.py``.

The interpreter's TLS decides versions and suites towards the control plane (1.2 and 1.3).
"""

import logging
import ssl
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from rpc.aio.client import Channel
from rpc.aio.tls import BadCertificate, client_tls
from rpc.status import RpcFailed, Status
from xds.model.identity import SpiffeId
from xds.proto.istio.ca.ca_pb2 import IstioCertificateRequest, IstioCertificateResponse
from ztunnel.identity.credentials import Credentials, CredentialsError, Endpoint, Metadata, Roots
from ztunnel.identity.csr import IdentityError, IssuedCertificate, issued_certificate, signing_request
from ztunnel.tasks import Tasks

log = logging.getLogger(__name__)

METHOD: Final = "/istio.v1.auth.IstioCertificateService/CreateCertificate"
IMPERSONATED: Final = "ImpersonatedIdentity"


class IstioCertificateAuthority:
    """A :class:`~ztunnel.identity.certificates.CertificateAuthority`; :meth:`close` it.

    Args:
        endpoint: where it is.
        credentials: what is shown to it.
        roots: how it is known; read for each certificate, and a change makes a new connection. If they cannot be
            read any more the old connection stays in use.
        impersonate: ask for identities of other workloads (a node proxy), instead of the token's own.
        lifetime_s: asked for; the authority may give less.
        alternative_name: also accepted as the server's name.
        timeout_s: of one attempt, connecting included.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        credentials: Credentials,
        roots: Roots | None,
        *,
        impersonate: bool,
        lifetime_s: float = 86400.0,
        alternative_name: str = "",
        timeout_s: float = 10.0,
    ) -> None:
        if endpoint.tls and roots is None:
            raise ValueError("an endpoint with TLS needs roots")
        self._endpoint = endpoint
        self._credentials = credentials
        self._roots = roots
        self._impersonate = impersonate
        self._lifetime_s = lifetime_s
        self._timeout_s = timeout_s
        # TLS verifies one name, never either of two: they are tried in turn, the last good one first.
        self._names = ["", alternative_name] if alternative_name and endpoint.tls else [""]
        self._channels: dict[str, Channel] = {}
        self._root_pem: bytes | None = None
        self._tls: ssl.SSLContext | None = None
        self._tasks = Tasks("certificate authority")

    async def issue(self, identity: SpiffeId) -> IssuedCertificate:
        """See :class:`~ztunnel.identity.certificates.CertificateAuthority`."""
        key = ec.generate_private_key(ec.SECP256R1())
        request = IstioCertificateRequest(
            csr=signing_request(identity, key).decode(), validity_duration=int(self._lifetime_s)
        )
        if self._impersonate:
            request.metadata.update({IMPERSONATED: str(identity)})
        try:
            metadata = self._credentials.metadata()
            self._reread_roots()
        except CredentialsError as error:
            raise IdentityError(str(error)) from error
        response = await self._call(request, metadata)
        return issued_certificate(identity, key, response.cert_chain, exact=self._impersonate)

    async def close(self) -> None:
        """End the connection; what is under way fails."""
        channels = list(self._channels.values())
        self._channels.clear()
        await self._tasks.close()
        for channel in channels:
            await channel.close()

    async def _call(self, request: IstioCertificateRequest, metadata: Metadata) -> IstioCertificateResponse:
        data = request.SerializeToString()
        for name in list(self._names):
            try:
                answer = await self._channel(name).unary(
                    METHOD, data, metadata=metadata, timeout_s=self._timeout_s
                )
                response = IstioCertificateResponse.FromString(answer)
            except RpcFailed as error:
                failure = IdentityError(f"signing gRPC error ({error.status.name}): {error.details}")
                if error.status is not Status.UNAVAILABLE:
                    break
            except DecodeError:
                raise IdentityError("signing gRPC error: the authority sent a malformed response") from None
            else:
                self._names.sort(key=lambda other: other != name)
                return response
        raise failure

    def _reread_roots(self) -> None:
        if not self._endpoint.tls:
            return
        assert self._roots is not None
        try:
            pem = self._roots.read()
            tls = self._tls if pem == self._root_pem else client_tls(pem)
        except (CredentialsError, BadCertificate) as error:
            if self._root_pem is None:
                raise
            log.warning("roots of the certificate authority unusable, the old ones stay in use error=%s", error)
            return
        if pem != self._root_pem:
            self._root_pem, self._tls = pem, tls
            for channel in self._channels.values():
                self._tasks.start(channel.close(self._timeout_s), "close a channel with old roots")
            self._channels.clear()

    def _channel(self, name: str) -> Channel:
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = Channel(self._endpoint.target, tls=self._tls, server_name=name)
        return channel
