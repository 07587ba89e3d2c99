"""TLS contexts in use. A context is built when its secrets have arrived, and rebuilt when a secret changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache

from cryptography import x509

from hbone.settings import Role
from hbone.tls import PeerFacts
from hbone.tls_context import TlsContext
from xds.errors import ConfigError
from xds.model.secret import Certificate, SanMatch, Secret, Validation
from xds.model.string_match import StringMatch
from xds.model.tls import SecretRef
from xds.model.tls import TlsContext as ContextModel
from ztunnel.proxy.dataplane.agreement import Credentials, Party, Verified, disagreement, would_shake_hands
from ztunnel.proxy.envoy.secrets.build import build
from ztunnel.proxy.envoy.secrets.files import files_of, reread
from ztunnel.proxy.envoy.secrets.store import SecretHandle, SecretStore, settled
from ztunnel.proxy.envoy.secrets.verify import leaf_of, san_matches, subject_alt_names
from ztunnel.proxy.identity.crl import CrlError, RevocationLists

log = logging.getLogger(__name__)


def hardened(context: ContextModel) -> ContextModel:
    """Return a client's TLS context that verifies the server even if the configuration does not require this.

    A control plane of 2022 sent upstream contexts without any validation. For such a context with a workload
    certificate from SDS, the root is requested under this control plane's name (``ROOTCA``), and the server must
    present an identity of the same trust domain.
    """
    if context.validation is not None or context.validation_ref is not None:
        return context
    if not isinstance(context.certificate, SecretRef) or not context.certificate.name.startswith("spiffe://"):
        return context
    trust_domain = context.certificate.name.removeprefix("spiffe://").partition("/")[0]
    prefix = SanMatch("uri", StringMatch("prefix", f"spiffe://{trust_domain}/"))
    root = SecretRef("ROOTCA", context.certificate.source, context.certificate.initial_fetch_timeout_s)
    return replace(context, validation=Validation(san_matches=(prefix,)), validation_ref=root)


@dataclass(frozen=True, slots=True)
class Presented:
    """A certificate that we present to peers: its configuration, its leaf, and the identities in it."""

    certificate: Certificate | None = None
    leaf: x509.Certificate | None = None
    uri_sans: tuple[str, ...] = ()

    @classmethod
    def of(cls, certificate: Certificate) -> Presented:
        """Read the leaf and the identities from a certificate's chain."""
        leaf = leaf_of(certificate)
        names = subject_alt_names(leaf)
        return cls(certificate, leaf, tuple(text for kind, text in names if kind == "uri"))


_NOTHING_PRESENTED = Presented()


class LiveContext:
    """A configured TLS context together with the current version of its secrets.

    Args:
        role: client or server.
        model: the configuration.
        secrets: the store of the referenced secrets.
        on_update: called after each rebuild by a renewed secret.
        owner: the listener or cluster, for errors and warnings.

    Raises:
        ConfigError: the context cannot be used, by itself or with the available secrets. It is then subscribed to
            no secret.

    Attributes:
        current: the context for the next handshake; ``None`` while a secret is missing.
        validation: the check of the peer, with its part from SDS. ``None`` disables verification.
        generation: increases with each rebuild. The pool's key contains it, so that new tunnels use a rotated
            certificate while old connections continue.
        presented: our certificate in ``current``, with its identities. If there are several certificates, the
            first.
    """

    def __init__(
        self,
        role: Role,
        model: ContextModel,
        secrets: SecretStore,
        on_update: Callable[[], None],
        *,
        owner: str = "",
    ) -> None:
        self.model = model
        self.current: TlsContext | None = None
        self.validation: Validation | None = None
        self.generation = 0
        self.presented = _NOTHING_PRESENTED
        self._choice: tuple[Presented, ...] = ()
        self._party: tuple[Party | None] | None = None
        self._role = role
        self._owner = owner
        self._secrets = secrets
        self._on_update = on_update
        self._handles: list[SecretHandle] = []
        self._unfollow: Callable[[], None] = lambda: None
        # The context is built first and then subscribes to secrets, so that a refused context has no
        # subscriptions. Static secrets, and secrets that are already in use, are available at this point.
        self._use(build(role, model, secrets.find, movable=secrets.movable))
        try:
            for ref in model.secret_refs:
                self._handles.append(secrets.acquire(ref, self))
        except ConfigError:
            self.close()
            raise
        inline = (*self._inline_certificates, model.validation)
        self._unfollow = secrets.files.follow(owner, files_of(inline), self._reload)
        if role is Role.CLIENT and not self._verifies():
            log.warning("%s: the configuration does not verify the server's certificate", owner)

    def _verifies(self) -> bool:
        validation = self.model.validation
        return self.model.validation_ref is not None or (
            validation is not None and (validation.trusted_ca_pem is not None or validation.pins)
        )

    @property
    def certificates(self) -> list[Certificate]:
        """The certificates that the context can present. A server with several certificates chooses one per
        handshake.
        """
        sources = (self.model.certificate, *self.model.further_certificates)
        found = [self._secrets.find(one) if isinstance(one, SecretRef) else one for one in sources]
        return [one for one in found if isinstance(one, Certificate)]

    @property
    def local_uri_sans(self) -> tuple[str, ...]:
        """The identities of the certificate that this context presents."""
        return self.presented.uri_sans

    def has_revoked(self, chain: Sequence[x509.Certificate]) -> bool:
        """Return whether a certificate of a chain, verified in an earlier handshake, is in the current revocation
        lists.
        """
        validation = self.validation
        if validation is None or validation.crl_pem is None or not chain:
            return False
        return _lists(validation.crl_pem).is_revoked(chain)

    def trusts(self, peer: PeerFacts) -> bool:
        """Return whether this client context accepts a server's certificates that another process has verified.

        With pinned keys or revocation lists, the result is ``False``, because only a handshake can decide. The
        validity period is not checked, because an open connection can outlive its certificates.
        """
        if self._role is not Role.CLIENT or self.party is None:
            return False
        if self.party.credentials.anchors is None:
            return True
        shown = Credentials(peer.chain, None)
        found = self.party.credentials.verified(shown, Role.SERVER)
        return isinstance(found, Verified) and self.party.accepts(shown.names)

    def presented_in(self, handshake: PeerFacts) -> Presented:
        """Return which of the context's certificates was presented in a handshake."""
        if handshake.presented is not None:
            for one in self._choice:
                if one.leaf == handshake.presented:
                    return one
        return self.presented

    @property
    def party(self) -> Party | None:
        """The context as a :class:`Party`, for checks without a handshake. ``None`` if only a handshake can
        decide.

        Created on first use, because few contexts serve node-local tunnels.
        """
        if self._party is None:
            self._party = (self._make_party(),)
        return self._party[0]

    def _make_party(self) -> Party | None:
        own, validation = self.certificates, self.validation
        if len(own) > 1:
            return None
        chain = tuple(certificates_in(own[0].chain_pem)) if own else ()
        if validation is None:
            return Party(Credentials(chain, None), lambda names: True)
        if validation.crl_pem is not None or validation.certificate_hashes or validation.spki_hashes:
            return None

        @lru_cache(maxsize=64)  # called for each connection, with the few identities of a node
        def accepts(names: tuple[str, ...]) -> bool:
            matches = validation.san_matches
            return not matches or any(san_matches(match, "uri", name) for match in matches for name in names)

        return Party(Credentials(chain, tuple(certificates_in(validation.trusted_ca_pem))), accepts)

    async def settled(self) -> None:
        """Wait until every secret has arrived or its time limit has passed."""
        await settled(self._handles)

    @property
    def _inline_certificates(self) -> list[Certificate]:
        sources = (self.model.certificate, *self.model.further_certificates)
        return [one for one in sources if isinstance(one, Certificate)]

    def _reload(self) -> bool:
        """Read the files that the context itself names again, and use their contents. Return whether they have
        changed.

        Raises:
            ConfigError: the contents are unusable. The context keeps its old contents.
        """
        read, model = self._secrets.read_file, self.model
        certificates = [reread(one, read) for one in self._inline_certificates]
        if certificates:
            model = replace(model, certificate=certificates[0], further_certificates=tuple(certificates[1:]))
        if model.validation is not None:
            model = replace(model, validation=reread(model.validation, read))
        if model == self.model:
            return False
        built = build(self._role, model, self._secrets.find, movable=self._secrets.movable)
        self.model = model
        self._use(built)
        self._on_update()
        return True

    def close(self) -> None:
        """Unsubscribe from the context's secrets. Idempotent."""
        self._unfollow()
        for handle in self._handles:
            self._secrets.release(handle, self)
        self._handles.clear()

    def prepare(self, handle: SecretHandle, secret: Secret) -> Callable[[], None]:
        """Build the OpenSSL context with a new secret. Return a function that puts the result into use.

        Raises:
            ConfigError: the context cannot use the secret, and stays unchanged.
        """

        def find(ref: SecretRef) -> Secret | None:
            return secret if handle.answers(ref) else self._secrets.find(ref)

        try:
            built = build(self._role, self.model, find, movable=self._secrets.movable)
        except ConfigError as error:
            raise error.under(self._owner) if self._owner else error from error.__cause__

        def make_current() -> None:
            self._use(built)
            self._on_update()

        return make_current

    def _use(self, built: tuple[TlsContext, Validation | None] | None) -> None:
        if built is None:
            return
        self.current, self.validation = built
        self.generation += 1
        self._party = None
        self._choice = tuple(Presented.of(certificate) for certificate in self.certificates)
        if self._choice:
            self.presented = self._choice[0]


def verified_client(client: LiveContext, server: LiveContext) -> Sequence[x509.Certificate]:
    """Return the client's certificate chain as the server verifies it. :func:`agree` must hold for the two
    contexts.
    """
    assert client.party is not None
    assert server.party is not None
    found = server.party.credentials.verified(client.party.credentials, Role.CLIENT)
    return found.path if isinstance(found, Verified) else ()


def refusal(client: LiveContext, server: LiveContext, now: datetime) -> str:
    """Return why a handshake between two contexts of this process would fail at ``now``, or "" if chains,
    revocation lists and validity periods permit it. Pinned keys and names are not checked.
    """
    if client.current is None or server.current is None:
        return ""
    ours, theirs = _unnamed(client), _unnamed(server)
    if ours is None or theirs is None or theirs.credentials.anchors is None:
        return ""
    return disagreement(ours, theirs, now)


def _unnamed(context: LiveContext) -> Party | None:
    """Return a context as a :class:`Party` that accepts all names. ``None`` if only a handshake can decide."""
    own, validation = context.certificates, context.validation
    if len(own) != 1 or (validation is not None and validation.allow_expired):
        return None
    anchors = None
    if validation is not None and validation.trusted_ca_pem:
        anchors = tuple(certificates_in(validation.trusted_ca_pem))
    chain = tuple(certificates_in(own[0].chain_pem))
    return Party(Credentials(chain, anchors, is_revoked=context.has_revoked), lambda names: True)


def agree(client: LiveContext, server: LiveContext, now: datetime) -> bool:
    """Return whether a handshake between two contexts of this process would succeed at ``now`` (aware, UTC).

    With pinned keys or revocation lists, the result is ``False``, because only a handshake can decide.
    """
    if client.current is None or server.current is None:
        return False
    ours, theirs = client.party, server.party
    return ours is not None and theirs is not None and would_shake_hands(ours, theirs, now)


@lru_cache(maxsize=8)  # for the contexts in use; the lists of large authorities take seconds to read
def _lists(crl_pem: bytes) -> RevocationLists:
    try:
        return RevocationLists.parse(crl_pem)
    except CrlError:
        return RevocationLists(unreadable=True)  # OpenSSL has read it, so this is a bug; fail closed


def certificates_in(pem: bytes | None) -> list[x509.Certificate]:
    """Return the certificates in a PEM text. For ``None``, the list is empty."""
    return x509.load_pem_x509_certificates(pem) if pem else []
