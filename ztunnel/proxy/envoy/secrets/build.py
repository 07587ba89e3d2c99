"""Builds an OpenSSL context from a configured TLS context and its secrets, or names the invalid field.

Pure, except for the TLS key log file.

A context is built before its listener, cluster or secret is accepted. So an ACK, or success of ``--validate``,
means that handshakes are possible. Paths in errors start at the TLS context's message
(``common_tls_context.tls_params.cipher_suites[0]``).

While a secret is missing, checks that need it are skipped. When the secret arrives, the context is built again
before the secret is accepted.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from OpenSSL import SSL

from hbone.settings import Role
from hbone.tls_context import ClientCertificate, TlsContext, TlsSettings
from hbone.tls_context import TlsVersion as HboneVersion
from hbone.tls_identities import Identity
from xds.errors import ConfigError
from xds.model.secret import Certificate, Secret, Validation
from xds.model.tls import SecretRef, TlsVersion
from xds.model.tls import TlsContext as ContextModel
from ztunnel.proxy.envoy.secrets.verify import check_secret, peer_verifier, unlocked, with_usable_roots

log = logging.getLogger(__name__)

_COMMON = "common_tls_context"
_VERSIONS = {TlsVersion.TLS12: HboneVersion.TLS_1_2, TlsVersion.TLS13: HboneVersion.TLS_1_3}
_TLS13_SUITES = {
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
}
_NOTHING = Validation()

#: Finds a secret by its reference. ``None`` if it has not arrived.
Find = Callable[[SecretRef], Secret | None]


def build(
    role: Role, model: ContextModel, find: Find, *, movable: bool = False
) -> tuple[TlsContext, Validation | None] | None:
    """Return the OpenSSL context and the validation of its peers, or ``None`` while a secret is missing.

    The validation includes the part from SDS, and contains only usable roots. For ``movable`` see
    :class:`hbone.tls_context.TlsSettings`.

    Raises:
        ConfigError: no handshake could succeed. The error names the field, and the file or secret if there is one.
    """
    _check_parameters(role, model.cipher_suites, model.curves)
    _check_inline(model)
    own = _certificates(model, find)
    validation = _validation(model, find)
    if any(find(ref) is None for ref in model.secret_refs):
        return None
    _check_validation(model, validation)
    if validation is not None:
        validation = with_usable_roots(validation)
    try:
        return TlsContext(role, _settings(model, own, validation, movable=movable)), validation
    except ValueError as error:
        # OpenSSL refuses even a valid key if it is weaker than OpenSSL's security level.
        raise ConfigError(str(error), _certificate_path(model)) from None


def _check_inline(model: ContextModel) -> None:
    default = ".default_validation_context" if model.validation_ref is not None else ""
    for secret, path in (
        *((source, _certificate_path(model, index)) for index, source in enumerate(_sources(model))),
        (model.validation, _validation_path(model) + default),
    ):
        if isinstance(secret, Certificate | Validation):
            try:
                check_secret(secret)
            except ConfigError as error:
                raise error.under(path) from error.__cause__


def _certificates(model: ContextModel, find: Find) -> list[Certificate]:
    """Return the configured certificates, without certificates that SDS has not delivered yet."""
    found = []
    for index, source in enumerate(_sources(model)):
        secret = find(source) if isinstance(source, SecretRef) else source
        if isinstance(secret, Certificate):
            found.append(secret)
        elif secret is not None and isinstance(source, SecretRef):
            raise ConfigError(f"secret {source.name} is not a certificate", _certificate_path(model, index))
    return found


def _sources(model: ContextModel) -> tuple[Certificate | SecretRef, ...]:
    return (model.certificate, *model.further_certificates) if model.certificate is not None else ()


def _validation(model: ContextModel, find: Find) -> Validation | None:
    ref = model.validation_ref
    if ref is None:
        return model.validation
    secret = find(ref)
    if isinstance(secret, Certificate):
        raise ConfigError(f"secret {ref.name} is not a validation context", _validation_path(model))
    if secret is None or model.validation is None:
        return secret
    return model.validation.merged(secret)


def _check_validation(model: ContextModel, validation: Validation | None) -> None:
    """Refuse verification settings that need a trusted root if there is none.

    Envoy does the same, except for the last check: it accepts the field, and then accepts any certificate.
    """
    if validation is not None and validation.trusted_ca_pem is None:
        path = _validation_path(model)
        if validation.crl_pem is not None:
            raise ConfigError("a revocation list without trusted_ca", path)
        if validation.san_matches:
            raise ConfigError(
                "SAN-based verification of peer certificates without trusted CA is insecure and not allowed", path
            )
        if validation.allow_expired:
            raise ConfigError("Certificate validity period is always ignored without trusted CA", path)
    verified = validation is not None and (validation.trusted_ca_pem is not None or validation.pins)
    if model.require_peer_certificate and not verified:
        raise ConfigError(
            "there is no trusted_ca to verify the required certificate with", "require_client_certificate"
        )


def _settings(
    model: ContextModel, own: Sequence[Certificate], validation: Validation | None, *, movable: bool
) -> TlsSettings:
    validation = validation or _NOTHING
    plain = [unlocked(certificate) for certificate in own]
    modern, older = _split(model.cipher_suites)
    defaults = TlsSettings()
    return TlsSettings(
        certificate_chain_pem=plain[0].chain_pem if plain else None,
        private_key_pem=plain[0].key_pem if plain else None,
        further=tuple(Identity(other.chain_pem, other.key_pem) for other in plain[1:]),
        trusted_ca_pem=validation.trusted_ca_pem,
        crl_pem=validation.crl_pem,
        crl_required=True,  # as in Envoy; a list of another issuer, or an old list, would revoke nothing
        client_certificate=_client_certificate(model, validation),
        allow_expired=validation.allow_expired,
        min_version=_VERSIONS[model.min_version],
        max_version=_VERSIONS[model.max_version],
        suites=modern or defaults.suites,
        ciphers_1_2=older or defaults.ciphers_1_2,
        groups=model.curves or None,
        alpn=tuple(protocol.encode() for protocol in model.alpn),
        server_name=model.sni or None,
        verify=peer_verifier(validation),
        any_chain=validation.pins,
        key_log=_key_log(model.key_log_path),
        movable=movable,
    )


def _client_certificate(model: ContextModel, validation: Validation) -> ClientCertificate:
    """Return whether client certificates are required, optional or not requested. Like in Envoy, they are required
    if configured, or if names or keys must match. They are optional if only roots are configured.
    """
    if model.require_peer_certificate or validation.restricts:
        return ClientCertificate.REQUIRED
    return ClientCertificate.OPTIONAL if validation.trusted_ca_pem is not None else ClientCertificate.NONE


@lru_cache(maxsize=256)  # a mesh's contexts have the same few parameters; a refusal is not kept
def _check_parameters(role: Role, cipher_suites: tuple[str, ...], curves: tuple[str, ...]) -> None:
    """Refuse unknown cipher suites and groups, and lists that OpenSSL rejects.

    ``SSL_CTX_set_cipher_list`` ignores unknown names beside a known one. Envoy refuses every unknown name.
    """
    params = f"{_COMMON}.tls_params"
    for index, entry in enumerate(cipher_suites):
        for name in _names(entry):
            if name not in _TLS13_SUITES and name[:1] not in "!-+@" and not _known_cipher(name):
                raise ConfigError(f"unknown cipher suite {name!r}", f"{params}.cipher_suites[{index}]")
    for index, group in enumerate(curves):
        if not _known_group(role, group):
            raise ConfigError(f"unknown key exchange group {group!r}", f"{params}.ecdh_curves[{index}]")
    modern, older = _split(cipher_suites)
    defaults = TlsSettings()
    try:
        TlsContext(
            role,
            TlsSettings(
                suites=modern or defaults.suites,
                ciphers_1_2=older or defaults.ciphers_1_2,
                groups=curves or None,
            ),
        )
    except ValueError as error:
        raise ConfigError(str(error), params) from None


def _known_cipher(name: str) -> bool:
    try:
        SSL.Context(SSL.TLS_METHOD).set_cipher_list(name.encode())
    except (SSL.Error, UnicodeError):
        return False
    return bool(name)


def _known_group(role: Role, name: str) -> bool:
    try:
        TlsContext(role, TlsSettings(groups=(name,)))
    except ValueError:
        return False
    return True


def _split(cipher_suites: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split cipher suites into suites of TLS 1.3 and suites of older versions."""
    names = [name for entry in cipher_suites for name in _names(entry)]
    modern = tuple(name for name in names if name in _TLS13_SUITES)
    return modern, tuple(name for name in names if name not in _TLS13_SUITES)


def _names(entry: str) -> list[str]:
    """Return the cipher suites of one entry. In BoringSSL, ``[A|B]`` means equal preference. With OpenSSL, the
    first is preferred.
    """
    if entry.startswith("[") and entry.endswith("]"):
        return entry[1:-1].split("|")
    return entry.split(":")


def _certificate_path(model: ContextModel, index: int = 0) -> str:
    if isinstance(model.certificate, SecretRef):
        return f"{_COMMON}.tls_certificate_sds_secret_configs[{index}]"
    return f"{_COMMON}.tls_certificates[{index}]"


def _validation_path(model: ContextModel) -> str:
    if model.validation_ref is None:
        return f"{_COMMON}.validation_context"
    if model.validation is None:
        return f"{_COMMON}.validation_context_sds_secret_config"
    return f"{_COMMON}.combined_validation_context"


def _key_log(path: str) -> Callable[[bytes], None] | None:
    """Return a function that appends a line to the key log. Like in Envoy, the file is created at once, so that an
    unusable path is refused.
    """
    if not path:
        return None
    try:
        Path(path).open("ab").close()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}", f"{_COMMON}.key_log.path") from None
    fails = False

    def append(line: bytes) -> None:
        nonlocal fails
        try:
            with Path(path).open("ab") as file:
                file.write(line + b"\n")
        except OSError as error:
            if not fails:
                log.error("keys are not logged path=%s error=%s", path, error.strerror)
            fails = True
        else:
            fails = False

    return append
