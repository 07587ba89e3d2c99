"""TLS contexts in use: built when their secrets are here, built anew when one changes."""

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from cryptography import x509

from hbone.settings import Role
from hbone.tls_context import ClientCertificate, TlsContext, TlsSettings
from hbone.tls_context import TlsVersion as HboneVersion
from xds.model.secret import Certificate, SanMatch, Validation
from xds.model.strings import StringMatch
from xds.model.tls import SecretRef, TlsVersion
from xds.model.tls import TlsContext as ContextModel
from ztunnel.dataplane.agreement import Credentials, Party, would_shake_hands
from ztunnel.envoy.secrets.store import SecretHandle, SecretStore, settled
from ztunnel.envoy.secrets.verify import leaf_of, peer_verifier, san_matches, subject_alt_names
from ztunnel.envoy.telemetry.stats import Counter

log = logging.getLogger(__name__)

_VERSIONS = {TlsVersion.TLS12: HboneVersion.TLS_1_2, TlsVersion.TLS13: HboneVersion.TLS_1_3}
_TLS13_SUITES = {
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
}


def hardened(context: ContextModel) -> ContextModel:
    """A client's context that verifies its server, whatever the configuration forgot.

    The generator of 2022 gave upstream contexts no validation at all. Where the certificate is a workload
    identity from SDS, the root is asked for under the name the same generator uses (``ROOTCA``), and the server
    must show an identity of the same trust domain.
    """
    if context.validation is not None or context.validation_ref is not None:
        return context
    if not isinstance(context.certificate, SecretRef) or not context.certificate.name.startswith("spiffe://"):
        return context
    trust_domain = context.certificate.name.removeprefix("spiffe://").partition("/")[0]
    prefix = SanMatch("uri", StringMatch("prefix", f"spiffe://{trust_domain}/"))
    root = SecretRef("ROOTCA", context.certificate.source, context.certificate.initial_fetch_timeout_s)
    return replace(context, validation=Validation(san_matches=(prefix,)), validation_ref=root)


class LiveContext:
    """One context of the configuration with its secrets filled in.

    Attributes:
        current: what the next handshake uses; ``None`` while a secret is missing.
        validation: how the peer is verified, the SDS part merged in; ``None`` verifies nothing.
        generation: goes up with each rebuild; part of the key of pooled connections, so that a rotated
            certificate is used by new connections while old ones live on.
        local_uri_sans: identities of the own certificate.
    """

    def __init__(
        self, role: Role, model: ContextModel, secrets: SecretStore, updates: Counter, *, warn_unverified: str = ""
    ) -> None:
        self.model = model
        self.current: TlsContext | None = None
        self.validation: Validation | None = None
        self.generation = 0
        self.local_uri_sans: tuple[str, ...] = ()
        self._party: tuple[Party | None] | None = None
        self._role = role
        self._secrets = secrets
        self._updates = updates
        self._handles: list[SecretHandle] = []
        self._watchers: list[Callable[[], None]] = []
        for ref in model.secret_refs:
            self._handles.append(secrets.acquire(ref, self._rebuild))
        self._by_ref = {handle.ref.name: handle for handle in self._handles}
        if warn_unverified and role is Role.CLIENT and not self._verifies():
            log.warning("%s: the configuration does not verify the server's certificate", warn_unverified)
        self._build()

    def _verifies(self) -> bool:
        validation = self.model.validation
        return self.model.validation_ref is not None or (
            validation is not None and validation.trusted_ca_pem is not None
        )

    @property
    def certificate(self) -> Certificate | None:
        """The own certificate in use."""
        source = self.model.certificate
        if isinstance(source, SecretRef):
            secret = self._by_ref[source.name].secret
            return secret if isinstance(secret, Certificate) else None
        return source

    @property
    def party(self) -> Party | None:
        """What agreements without a handshake are judged by; ``None``: only a handshake can tell.

        Made when first asked for, because few contexts are those of tunnels within one node.
        """
        if self._party is None:
            self._party = (self._make_party(),)
        return self._party[0]

    def _make_party(self) -> Party | None:
        own, validation = self.certificate, self.validation
        chain = tuple(certificates_in(own.chain_pem)) if own is not None else ()
        if validation is None:
            return Party(Credentials(chain, None), lambda names: True)
        if validation.crl_pem is not None or validation.certificate_hashes or validation.spki_hashes:
            return None

        @lru_cache(maxsize=64)  # per connection, about the few identities of one node
        def accepts(names: tuple[str, ...]) -> bool:
            matches = validation.san_matches
            return not matches or any(san_matches(match, "uri", name) for match in matches for name in names)

        return Party(Credentials(chain, tuple(certificates_in(validation.trusted_ca_pem))), accepts)

    def _merged_validation(self) -> Validation | None:
        if self.model.validation_ref is None:
            return self.model.validation
        secret = self._by_ref[self.model.validation_ref.name].secret
        if not isinstance(secret, Validation):
            return None
        return self.model.validation.merged(secret) if self.model.validation is not None else secret

    async def settled(self) -> None:
        """Wait until every secret is here or its time is up."""
        await settled(self._handles)

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each rebuild."""
        self._watchers.append(changed)

    def close(self) -> None:
        """Let go of the secrets."""
        for handle in self._handles:
            self._secrets.release(handle, self._rebuild)
        self._handles.clear()
        self._watchers.clear()

    def _rebuild(self) -> None:
        self._build()
        self._updates.value += 1
        for changed in self._watchers:
            changed()

    def _build(self) -> None:
        if any(handle.secret is None for handle in self._handles):
            return
        try:
            validation = self._merged_validation()
            self.current = TlsContext(self._role, self._settings(validation))
            self.validation = validation
        except ValueError as error:
            # The last good context goes on serving; without one, connections are refused as not ready.
            log.error("TLS context unusable, the last good one stays in force: %s", error)
            return
        self.generation += 1
        self._party = None
        own = self.certificate
        if own is not None:
            names = subject_alt_names(leaf_of(own))
            self.local_uri_sans = tuple(text for kind, text in names if kind == "uri")

    def _settings(self, validation: Validation | None) -> TlsSettings:
        model, own = self.model, self.certificate
        if isinstance(model.certificate, SecretRef) and own is None:
            raise ValueError(f"secret {model.certificate.name} is not a certificate")
        if model.validation_ref is not None and validation is None:
            raise ValueError(f"secret {model.validation_ref.name} is not a validation context")
        validation = validation or Validation()
        if validation.restricts and validation.trusted_ca_pem is None:
            raise ValueError("names or keys of the peer are restricted, but there is no trusted_ca")
        if model.require_peer_certificate and validation.trusted_ca_pem is None:
            raise ValueError("a client certificate is required, but there is no trusted_ca to verify it with")
        suites = tuple(suite for suite in model.cipher_suites if suite in _TLS13_SUITES)
        older = tuple(suite.strip("[]") for suite in model.cipher_suites if suite not in _TLS13_SUITES)
        defaults = TlsSettings()
        return TlsSettings(
            certificate_chain_pem=own.chain_pem if own is not None else None,
            private_key_pem=own.key_pem if own is not None else None,
            trusted_ca_pem=validation.trusted_ca_pem,
            crl_pem=validation.crl_pem,
            client_certificate=self._client_certificate(validation),
            allow_expired=validation.allow_expired,
            min_version=_VERSIONS[model.min_version],
            max_version=_VERSIONS[model.max_version],
            suites=suites or defaults.suites,
            ciphers_1_2=older or defaults.ciphers_1_2,
            groups=model.curves or None,
            alpn=tuple(protocol.encode() for protocol in model.alpn),
            server_name=model.sni or None,
            verify=peer_verifier(validation),
            key_log=_key_log(model.key_log_path),
        )

    def _client_certificate(self, validation: Validation) -> ClientCertificate:
        """As Envoy: demanded when said so or when names are matched, asked for when there are roots."""
        if self.model.require_peer_certificate or validation.restricts:
            return ClientCertificate.REQUIRED
        return ClientCertificate.OPTIONAL if validation.trusted_ca_pem is not None else ClientCertificate.NONE


def agree(client: LiveContext, server: LiveContext, now: datetime) -> bool:
    """Return whether a handshake of two contexts of this process would succeed at ``now`` (aware, UTC).

    ``False`` also where only a handshake can tell: pinned keys, revocation lists.
    """
    if client.current is None or server.current is None:
        return False
    ours, theirs = client.party, server.party
    return ours is not None and theirs is not None and would_shake_hands(ours, theirs, now)


def _key_log(path: str) -> Callable[[bytes], None] | None:
    if not path:
        return None

    def append(line: bytes) -> None:
        with Path(path).open("ab") as file:
            file.write(line + b"\n")

    return append


def certificates_in(pem: bytes | None) -> list[x509.Certificate]:
    """Every certificate of a PEM text; none of ``None``."""
    return x509.load_pem_x509_certificates(pem) if pem else []
