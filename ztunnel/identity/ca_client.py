"""Certificates from istiod, over gRPC; which ones and when is the business of ``certificates.py``.

gRPC decides the TLS versions and suites towards the control plane (1.2 and 1.3); its library is imported when the
first certificate is asked for.
"""

import logging
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import ec

from xds.model.identity import SpiffeId
from xds.proto.istio.ca.ca_pb2 import IstioCertificateRequest, IstioCertificateResponse
from ztunnel.identity.credentials import Credentials, CredentialsError, Endpoint, Roots
from ztunnel.identity.csr import IdentityError, IssuedCertificate, issued_certificate, signing_request
from ztunnel.tasks import Tasks

log = logging.getLogger(__name__)

METHOD: Final = "/istio.v1.auth.IstioCertificateService/CreateCertificate"
IMPERSONATED: Final = "ImpersonatedIdentity"

_CHANNEL_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects now, whatever back-off another one is in
    # The schedule backs off; a channel that did so too would answer its attempts with old errors.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),
)


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
        # gRPC verifies one name, never either of two: they are tried in turn, the last good one first.
        self._names = ["", alternative_name] if alternative_name and endpoint.tls else [""]
        self._channels: dict[str, Any] = {}
        self._root_pem: bytes | None = None
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

    async def _call(self, request: IstioCertificateRequest, metadata: Any) -> IstioCertificateResponse:
        import grpc

        for name in list(self._names):
            try:
                response: IstioCertificateResponse = await self._channel(name).unary_unary(
                    METHOD,
                    request_serializer=IstioCertificateRequest.SerializeToString,
                    response_deserializer=IstioCertificateResponse.FromString,
                )(request, metadata=metadata, timeout=self._timeout_s)
            except grpc.RpcError as error:
                code, details = error.code(), error.details()
                failure = IdentityError(f"signing gRPC error ({code.name}): {details}")
                if code is not grpc.StatusCode.UNAVAILABLE:
                    break
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
        except CredentialsError as error:
            if self._root_pem is None:
                raise
            log.warning("roots of the certificate authority unusable, the old ones stay in use error=%s", error)
            return
        if pem != self._root_pem:
            self._root_pem = pem
            for channel in self._channels.values():
                self._tasks.start(channel.close(self._timeout_s), "close a channel with old roots")
            self._channels.clear()

    def _channel(self, name: str) -> Any:
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = open_channel(self._endpoint, self._root_pem, name)
        return channel


def open_channel(endpoint: Endpoint, root_pem: bytes | None, server_name: str = "") -> Any:
    """A gRPC channel to the control plane, connected when it is used.

    Args:
        endpoint: where to.
        root_pem: trusted; needed with TLS.
        server_name: verified in place of the endpoint's own, if not empty.
    """
    import grpc.aio

    if not endpoint.tls:
        return grpc.aio.insecure_channel(endpoint.target, options=_CHANNEL_OPTIONS)
    override = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    credentials = grpc.ssl_channel_credentials(root_certificates=root_pem)
    return grpc.aio.secure_channel(endpoint.target, credentials, options=(*_CHANNEL_OPTIONS, *override))
