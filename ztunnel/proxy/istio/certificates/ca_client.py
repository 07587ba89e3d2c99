"""Requests certificates from istiod over gRPC. ``manager.py`` decides which certificates to request, and when."""

import logging
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from xds.aio.channel import Channel, Keepalive
from xds.grpc.status import RpcFailed, Status
from xds.grpc.tls import client_tls
from xds.model.identity import SpiffeId
from xds.proto.istio.ca.ca_pb2 import IstioCertificateRequest, IstioCertificateResponse
from ztunnel.proxy.identity.csr import (
    AuthorityUnreachable,
    IdentityError,
    IssuedCertificate,
    issued_certificate,
    signing_request,
)
from ztunnel.proxy.istio.certificates.credentials import Credentials, CredentialsError, Endpoint, Metadata, Roots
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

METHOD: Final = "/istio.v1.auth.IstioCertificateService/CreateCertificate"
IMPERSONATED: Final = "ImpersonatedIdentity"
_NO_ANSWER: Final = (Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED)


class IstioCertificateAuthority:
    """A :class:`~ztunnel.proxy.istio.certificates.manager.CertificateAuthority` over gRPC. The owner closes it.

    Args:
        endpoint: the authority's address.
        credentials: sent with every request.
        roots: the root certificates that verify the authority. They are read for each request, and a new
            connection is opened if they have changed. While they are unreadable, the old connection stays in use.
        impersonate: whether to request certificates for other workloads' identities, as a node proxy does, instead
            of for the token's identity.
        lifetime_s: the requested lifetime of certificates. The authority can issue a shorter lifetime.
        alternative_name: a name accepted in the server's certificate in addition to the endpoint's host.
        tls_1_2: whether TLS 1.2 is accepted.
        groups: the groups for key exchange, in order of preference. None: OpenSSL's default.
        timeout_s: the time limit of one attempt, including connecting.

    Raises:
        ValueError: the endpoint uses TLS, but there are no roots.
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
        self._keepalive = Keepalive()
        self._root_pem: bytes | None = None
        self._tasks = Tasks("certificate authority")

    async def issue(self, identity: SpiffeId) -> IssuedCertificate:
        """Request a certificate; see :class:`~ztunnel.proxy.istio.certificates.manager.CertificateAuthority`."""
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
            raise AuthorityUnreachable(str(error)) from error
        response = await self._call(channel, request, metadata)
        return issued_certificate(identity, key, response.cert_chain, exact=self._impersonate)

    async def close(self) -> None:
        """Close the connection; running requests fail. Idempotent."""
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
            kind = AuthorityUnreachable if error.status in _NO_ANSWER else IdentityError
            raise kind(f"signing gRPC error ({error.status.name}): {error.details}") from error
        except DecodeError:
            raise IdentityError("signing gRPC error: the authority sent a malformed response") from None

    def _current(self) -> Channel:
        """Return the gRPC channel, replacing it if the roots have changed and are usable.

        Raises:
            CredentialsError: a channel must be opened, and the roots are unusable.
        """
        if not self._endpoint.tls:
            if self._channel is None:
                self._channel = Channel(self._endpoint.target, keepalive=self._keepalive)
            return self._channel
        assert self._roots is not None
        try:
            pem = self._roots.read()
            if self._channel is None or pem != self._root_pem:
                tls = client_tls(pem, self._names, tls_1_2=self._tls_1_2, groups=self._groups)
                if self._channel is not None:
                    closing = self._channel.close(self._timeout_s)
                    self._tasks.start(closing, "close a channel with old roots")
                self._channel = Channel(self._endpoint.target, tls=tls, keepalive=self._keepalive)
                self._root_pem = pem
        except (CredentialsError, ValueError) as error:
            text = str(error) if isinstance(error, CredentialsError) else f"unusable {self._roots.place}: {error}"
            if self._channel is None:
                raise CredentialsError(text) from error
            log.warning("roots of the certificate authority unusable, the old ones stay in use error=%s", text)
        return self._channel
