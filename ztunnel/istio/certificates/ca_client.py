"""Certificates from istiod, over gRPC; which ones and when is the business of ``certificates.py``."""

import logging
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from xds.aio.channel import Channel
from xds.grpc.status import RpcFailed
from xds.grpc.tls import client_tls
from xds.model.identity import SpiffeId
from xds.proto.istio.ca.ca_pb2 import IstioCertificateRequest, IstioCertificateResponse
from ztunnel.identity.csr import IdentityError, IssuedCertificate, issued_certificate, signing_request
from ztunnel.istio.certificates.credentials import Credentials, CredentialsError, Endpoint, Metadata, Roots
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

METHOD: Final = "/istio.v1.auth.IstioCertificateService/CreateCertificate"
IMPERSONATED: Final = "ImpersonatedIdentity"


class IstioCertificateAuthority:
    """A :class:`~ztunnel.istio.certificates.manager.CertificateAuthority`; :meth:`close` it.

    Args:
        endpoint: where it is.
        credentials: what is shown to it.
        roots: how it is known; read for each certificate, and a change makes a new connection. If they cannot be
            read any more the old connection stays in use.
        impersonate: ask for identities of other workloads (a node proxy), instead of the token's own.
        lifetime_s: asked for; the authority may give less.
        alternative_name: also accepted as the server's name.
        tls_1_2: whether the server may be that old.
        groups: key exchange, in order; None: OpenSSL's choice.
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
        tls_1_2: bool = False,
        groups: tuple[str, ...] | None = None,
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
        self._names = [endpoint.host, *filter(None, [alternative_name])]
        self._tls_1_2 = tls_1_2
        self._groups = groups
        self._channel: Channel | None = None
        self._root_pem: bytes | None = None
        self._tasks = Tasks("certificate authority")

    async def issue(self, identity: SpiffeId) -> IssuedCertificate:
        """See :class:`~ztunnel.istio.certificates.manager.CertificateAuthority`."""
        key = ec.generate_private_key(ec.SECP256R1())
        request = IstioCertificateRequest(
            csr=signing_request(identity, key).decode(), validity_duration=int(self._lifetime_s)
        )
        if self._impersonate:
            request.metadata.update({IMPERSONATED: str(identity)})
        try:
            metadata = self._credentials.metadata()
            channel = self._current()
        except CredentialsError as error:
            raise IdentityError(str(error)) from error
        response = await self._call(channel, request, metadata)
        return issued_certificate(identity, key, response.cert_chain, exact=self._impersonate)

    async def close(self) -> None:
        """End the connection; what is under way fails."""
        channel, self._channel = self._channel, None
        await self._tasks.close()
        if channel is not None:
            await channel.close()

    async def _call(
        self, channel: Channel, request: IstioCertificateRequest, metadata: Metadata
    ) -> IstioCertificateResponse:
        data = request.SerializeToString()
        try:
            answer = await channel.unary(METHOD, data, metadata=metadata, timeout_s=self._timeout_s)
            return IstioCertificateResponse.FromString(answer)
        except RpcFailed as error:
            raise IdentityError(f"signing gRPC error ({error.status.name}): {error.details}") from error
        except DecodeError:
            raise IdentityError("signing gRPC error: the authority sent a malformed response") from None

    def _current(self) -> Channel:
        """The channel; another one after the roots have changed, if they can be used."""
        if not self._endpoint.tls:
            if self._channel is None:
                self._channel = Channel(self._endpoint.target)
            return self._channel
        assert self._roots is not None
        try:
            pem = self._roots.read()
            if self._channel is None or pem != self._root_pem:
                tls = client_tls(pem, self._names, tls_1_2=self._tls_1_2, groups=self._groups)
                if self._channel is not None:
                    closing = self._channel.close(self._timeout_s)
                    self._tasks.start(closing, "close a channel with old roots")
                self._channel, self._root_pem = Channel(self._endpoint.target, tls=tls), pem
        except (CredentialsError, ValueError) as error:
            text = str(error) if isinstance(error, CredentialsError) else f"unusable {self._roots.place}: {error}"
            if self._channel is None:
                raise CredentialsError(text) from error
            log.warning("roots of the certificate authority unusable, the old ones stay in use error=%s", text)
        return self._channel
