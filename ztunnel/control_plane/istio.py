"""Authenticates Istio's node proxies and signs their certificates: the part of a control plane beside xDS.

A caller on a Unix socket, or in plain text on this host, is trusted. It can name its node, and get the certificate
of any pod of the mesh. All other callers need a bearer token (:mod:`ztunnel.control_plane.tokens`), which names
the node, and get the resources of that node and certificates of its pods. A local caller with a token is
restricted in the same way.

Unlike in istiod, a request without ``ImpersonatedIdentity`` is for the identity in its CSR, because a token here
is a node's and has no identity. Trust domains are checked, because this authority serves only one.
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import DecodeError

from hbone.x509_errors import UNREADABLE
from xds.aio.server import Caller, NotAdmitted
from xds.errors import ConfigError
from xds.model.identity import SpiffeId
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.istio.ca.ca_pb2 import IstioCertificateRequest, IstioCertificateResponse
from ztunnel.control_plane.mesh import Mesh
from ztunnel.control_plane.tokens import TokenError, node_of_token
from ztunnel.proxy.identity.authority import CertificateAuthority

log = logging.getLogger(__name__)

METHOD = "/istio.v1.auth.IstioCertificateService/CreateCertificate"

_LEAST_RSA_BITS = 2048


def node_name(node: Node) -> str:
    """Return the node's name from the metadata of any kind of proxy. Empty if it is missing."""
    fields = node.metadata.fields
    return fields["NODE_NAME"].string_value if "NODE_NAME" in fields else ""


def is_node_proxy(node: Node) -> bool:
    """Return whether a client is Istio's node proxy, or ours in its place.

    Raises:
        ConfigError: the id begins like a node proxy's, and the rest is malformed. istiod refuses it, too.
    """
    kind, *rest = node.id.split("~")
    if kind != "ztunnel":
        return False
    if len(rest) != 3 or not all(rest):
        raise ConfigError(f"node id {node.id!r} is not ztunnel~<ip>~<pod>.<namespace>~<domain>")
    return True


def bearer_token(caller: Caller) -> str | None:
    """Return a caller's token; ``None`` if it presents none and needs none.

    Raises:
        NotAdmitted: the caller must present a token.
    """
    authorization = caller.metadata.get("authorization", "")
    scheme, _, token = authorization.partition(" ")
    if not authorization and caller.local:
        return None
    if scheme.lower() != "bearer":
        raise NotAdmitted("a bearer token is needed here (ztunnel control-plane MESH.YAML --token NODE)")
    return token.strip()


class Registrar:
    """Authorises callers and signs their certificate requests.

    Args:
        mesh: the current mesh.
        authority: signs the certificates.
        secret: the secret that tokens are signed with.
        lifetime: the longest lifetime of a certificate.
        now: wall clock, UTC.
    """

    def __init__(
        self,
        mesh: Callable[[], Mesh],
        authority: CertificateAuthority,
        secret: bytes,
        lifetime: timedelta,
        now: Callable[[], datetime],
    ) -> None:
        self._mesh = mesh
        self._authority = authority
        self._secret = secret
        self._lifetime = lifetime
        self._now = now

    def admit(self, node: Node, caller: Caller) -> None:
        proven = self._proven_node(caller)
        if proven is not None:
            self._same_node(proven, node_name(node))

    def check_node(self, proven: str, claimed: str) -> None:
        """Check that a node proxy claims the node proven by its token.

        Raises:
            NotAdmitted: they differ, or the mesh has no such node.
        """
        self._known(proven)
        self._same_node(proven, claimed)

    def create_certificate(self, data: bytes, caller: Caller) -> bytes:
        """Answer a ``CreateCertificate`` call; see :data:`xds.aio.server.Answer`."""
        node = self._proven_node(caller)
        return self.certificate(data, lambda identity: self._check(identity, node), f"node {node or '-'}")

    def certificate_for_node(self, data: bytes, proven: str) -> bytes:
        """Answer the request of a node proxy.

        Raises:
            NotAdmitted: the mesh has no such node, or none of its pods has the identity.
        """
        self._known(proven)
        return self.certificate(data, lambda identity: self._check(identity, proven), f"node {proven}")

    def certificate_for_account(self, data: bytes, check: Callable[[SpiffeId], None], account: str) -> bytes:
        """Answer the request of a sidecar proxy.

        Args:
            data: the request.
            check: see :meth:`certificate`.
            account: the account of the presented token.

        Raises:
            NotAdmitted: no pod of the mesh has the identity.
        """

        def judge(identity: SpiffeId) -> None:
            check(identity)
            self._check(identity, None)

        return self.certificate(data, judge, account)

    def certificate(self, data: bytes, check: Callable[[SpiffeId], None], who: str) -> bytes:
        """Answer a request for a certificate.

        Args:
            data: the request.
            check: raises NotAdmitted for an identity that the caller is not authorised to use.
            who: for the log.
        """
        try:
            request = IstioCertificateRequest.FromString(data)
        except DecodeError:
            raise ConfigError("malformed request") from None
        csr = _csr(request.csr)
        identity = _identity(request, csr)
        check(identity)
        wanted_s = request.validity_duration or self._lifetime.total_seconds()
        if wanted_s < 0:
            raise ConfigError(f"a certificate cannot be valid for {wanted_s} seconds")
        lifetime = min(timedelta(seconds=min(wanted_s, 10**9)), self._lifetime)
        leaf = self._authority.certify(_key(csr), identity, self._now(), lifetime)
        log.info("certificate issued identity=%s for=%s", identity, who)
        chain = [leaf.public_bytes(Encoding.PEM).decode(), self._authority.root_pem.decode()]
        return IstioCertificateResponse(cert_chain=chain).SerializeToString()

    def _proven_node(self, caller: Caller) -> str | None:
        """Return the node that a token proves. None without a token, if none is needed."""
        token = bearer_token(caller)
        if token is None:
            return None
        try:
            node = node_of_token(self._secret, token, self._now().timestamp())
        except TokenError as error:
            raise NotAdmitted(str(error)) from None
        self._known(node)
        return node

    def _known(self, node: str) -> None:
        if node not in self._mesh().nodes:
            raise NotAdmitted(f"the token is for node {node}, which the mesh does not have")

    @staticmethod
    def _same_node(proven: str, claimed: str) -> None:
        if proven != claimed:
            raise NotAdmitted(f"the token is for node {proven}, the caller says it is {claimed or 'none'}")

    def _check(self, identity: SpiffeId, node: str | None) -> None:
        mesh = self._mesh()
        pods = mesh.on(node) if node is not None else [pod for pod in mesh.pods.values() if pod.mesh]
        if not any(pod.identity == identity for pod in pods):
            where = f"on node {node}" if node is not None else "in the mesh"
            raise NotAdmitted(f"no pod {where} is {identity}")


def _csr(pem: str) -> x509.CertificateSigningRequest:
    try:
        csr = x509.load_pem_x509_csr(pem.encode())
        valid = csr.is_signature_valid
    except UNREADABLE as error:
        raise ConfigError(f"not a certificate signing request: {error}") from None
    if not valid:
        raise ConfigError("the certificate signing request is not signed by its own key")
    return csr


def _key(csr: x509.CertificateSigningRequest) -> ec.EllipticCurvePublicKey | rsa.RSAPublicKey:
    key = csr.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey) or (
        isinstance(key, rsa.RSAPublicKey) and key.key_size >= _LEAST_RSA_BITS
    ):
        return key
    raise ConfigError(f"keys must be elliptic, or RSA of {_LEAST_RSA_BITS} bits at least")


def _identity(request: IstioCertificateRequest, csr: x509.CertificateSigningRequest) -> SpiffeId:
    fields = request.metadata.fields
    if "ImpersonatedIdentity" in fields:
        names = [fields["ImpersonatedIdentity"].string_value]
    else:
        try:
            extension = csr.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            names = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
        except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
            names = []
    if len(names) != 1:
        raise ConfigError(
            "exactly one identity must be asked for, as ImpersonatedIdentity or as the CSR's URI name"
        )
    try:
        return SpiffeId.parse(names[0])
    except ValueError as error:
        raise ConfigError(str(error)) from None
