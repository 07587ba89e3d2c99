"""Compiles TLS contexts and secrets."""

import base64
import re
from collections.abc import Iterable
from dataclasses import replace

from xds.dialects.envoy.reading import (
    Surroundings,
    at,
    config_source,
    constraint,
    data,
    fetch_timeout,
    nothing_unknown,
    only,
    required,
    string_match,
)
from xds.errors import ConfigError, Unsupported
from xds.model.secret import Certificate, SanMatch, Secret, Validation
from xds.model.tls import AdsSource, SecretRef, TlsContext, TlsVersion
from xds.proto.envoy.extensions.transport_sockets.tls.v3 import tls_pb2 as proto

_VERSIONS = {proto.TlsParameters.TLSv1_2: TlsVersion.TLS12, proto.TlsParameters.TLSv1_3: TlsVersion.TLS13}
_SAN_TYPES = {
    proto.SubjectAltNameMatcher.EMAIL: "email",
    proto.SubjectAltNameMatcher.DNS: "dns",
    proto.SubjectAltNameMatcher.URI: "uri",
    proto.SubjectAltNameMatcher.IP_ADDRESS: "ip",
}


def compile_downstream(message: proto.DownstreamTlsContext, surroundings: Surroundings) -> TlsContext:
    """Compile a server's TLS context.

    A client certificate is required if the context requires it explicitly or, like in Envoy, if it constrains the
    client's name or key. Session tickets are never issued, so session ticket keys are accepted without effect.
    """
    only(
        message,
        "common_tls_context",
        "require_client_certificate",
        "disable_stateless_session_resumption",
        "session_timeout",
        "session_ticket_keys",
    )
    context = _common(message.common_tls_context, surroundings, server=True)
    if context.certificate is None:
        raise ConfigError("No TLS certificates found for server context", "common_tls_context.tls_certificates")
    return replace(context, require_peer_certificate=message.require_client_certificate.value)


def compile_upstream(message: proto.UpstreamTlsContext, surroundings: Surroundings) -> TlsContext:
    """Compile a client's TLS context. Settings for renegotiation and session resumption have no effect, because
    this proxy does neither.
    """
    only(message, "common_tls_context", "sni", "max_session_keys")
    if len(message.sni.encode()) > 255:
        raise constraint(message, "sni", "value length must be at most 255 bytes")
    context = _common(message.common_tls_context, surroundings, server=False)
    return replace(context, sni=message.sni)


def _common(message: proto.CommonTlsContext, surroundings: Surroundings, *, server: bool) -> TlsContext:
    with at("common_tls_context"):
        only(
            message,
            "tls_params",
            "tls_certificates",
            "tls_certificate_sds_secret_configs",
            "validation_context",
            "validation_context_sds_secret_config",
            "combined_validation_context",
            "alpn_protocols",
            "key_log",
        )
        with at("key_log"):
            only(message.key_log, "path")  # address ranges would be ignored, and too many keys logged
        with at("tls_params"):
            low, high = _versions(message.tls_params, server=server)
        validation, validation_ref = _validation_source(message, surroundings)
        certificates = _certificate_sources(message, surroundings, server=server)
        return TlsContext(
            certificate=certificates[0] if certificates else None,
            further_certificates=certificates[1:],
            validation=validation,
            validation_ref=validation_ref,
            alpn=_protocols(message.alpn_protocols),
            min_version=low,
            max_version=high,
            cipher_suites=tuple(message.tls_params.cipher_suites),
            curves=tuple(message.tls_params.ecdh_curves),
            key_log_path=message.key_log.path,
        )


def _protocols(entries: Iterable[str]) -> tuple[str, ...]:
    """Return the protocols of a list whose entries can be comma-separated lists. Like in Envoy, the entries are
    joined and split by commas.

    Raises:
        ConfigError: a name that no ALPN extension can carry (RFC 7301, 3.1: 1 to 255 bytes).
    """
    names = [name for entry in entries for name in entry.split(",")]
    for name in names:
        if not 0 < len(name.encode()) < 256:
            raise ConfigError(f"{name!r} is no protocol's name: 1 to 255 bytes", "alpn_protocols")
    return tuple(names)


def _versions(params: proto.TlsParameters, *, server: bool) -> tuple[TlsVersion, TlsVersion]:
    """Return the range of TLS versions. TLS_AUTO means 1.2 to 1.3. Older versions are refused, because no trusted
    library supports them.
    """
    only(
        params,
        "tls_minimum_protocol_version",
        "tls_maximum_protocol_version",
        "cipher_suites",
        "ecdh_curves",
    )
    auto = proto.TlsParameters.TLS_AUTO
    versions = []
    for field, default in (
        ("tls_minimum_protocol_version", TlsVersion.TLS12),
        ("tls_maximum_protocol_version", TlsVersion.TLS13),
    ):
        value = getattr(params, field)
        if value != auto and value not in _VERSIONS:
            raise Unsupported("only TLSv1_2 and TLSv1_3 are supported", field)
        versions.append(default if value == auto else _VERSIONS[value])
    if versions[0] > versions[1]:
        raise ConfigError("minimum version is above maximum version", "tls_minimum_protocol_version")
    return versions[0], versions[1]


def _certificate_sources(
    message: proto.CommonTlsContext, surroundings: Surroundings, *, server: bool
) -> tuple[Certificate | SecretRef, ...]:
    inline, references = message.tls_certificates, message.tls_certificate_sds_secret_configs
    if inline and references:
        raise Unsupported("beside tls_certificates, which Envoy uses alone", "tls_certificate_sds_secret_configs")
    field = "tls_certificates" if inline else "tls_certificate_sds_secret_configs"
    if len(inline or references) > 1 and not server:
        raise ConfigError("Multiple TLS certificates are not supported for client contexts", f"{field}[1]")
    sources: list[Certificate | SecretRef] = []
    for index in range(len(inline or references)):
        with at(field, index):
            sources.append(_certificate(inline[index], surroundings) if inline else _secret_ref(references[index]))
    return tuple(sources)


def _validation_source(
    message: proto.CommonTlsContext, surroundings: Surroundings
) -> tuple[Validation | None, SecretRef | None]:
    kind = message.WhichOneof("validation_context_type")
    if kind == "validation_context":
        with at(kind):
            return _validation(message.validation_context, surroundings), None
    if kind == "validation_context_sds_secret_config":
        with at(kind):
            return None, _secret_ref(message.validation_context_sds_secret_config)
    if kind == "combined_validation_context":
        combined = message.combined_validation_context
        with at(kind):
            with at("default_validation_context"):
                default = _validation(combined.default_validation_context, surroundings)
            with at("validation_context_sds_secret_config"):
                return default, _secret_ref(combined.validation_context_sds_secret_config)
    return None, None


def _secret_ref(message: proto.SdsSecretConfig) -> SecretRef:
    required(message, "name")
    if not message.HasField("sds_config"):
        return SecretRef(message.name, AdsSource(), 0.0)  # a static secret of that name
    with at("sds_config"):
        return SecretRef(message.name, config_source(message.sds_config), fetch_timeout(message.sds_config))


def compile_secret(message: proto.Secret, surroundings: Surroundings) -> Secret:
    """Compile a certificate or a validation context.

    Raises:
        ConfigError: the secret is of another kind, or its contents are not usable.
    """
    nothing_unknown(message)
    kind = message.WhichOneof("type")
    if kind == "tls_certificate":
        with at(kind):
            return _certificate(message.tls_certificate, surroundings)
    if kind == "validation_context":
        with at(kind):
            return _validation(message.validation_context, surroundings)
    raise Unsupported("only tls_certificate and validation_context secrets are supported", kind or "type")


def _certificate(message: proto.TlsCertificate, surroundings: Surroundings) -> Certificate:
    # watched_directory has no effect, because every file is watched anyway.
    only(message, "certificate_chain", "private_key", "password", "watched_directory")
    for field in ("certificate_chain", "private_key"):
        if not message.HasField(field):
            raise ConfigError("a certificate needs certificate_chain and private_key", field)
    with at("certificate_chain"):
        chain = data(message.certificate_chain, surroundings, watched=True)
    with at("private_key"):
        key = data(message.private_key, surroundings, watched=True)
    password = None
    if message.HasField("password"):
        with at("password"):
            password = data(message.password, surroundings, watched=True)
    return Certificate(
        chain_pem=chain,
        key_pem=key,
        password=password,
        chain_file=message.certificate_chain.filename,
        key_file=message.private_key.filename,
        password_file=message.password.filename,
    )


def _validation(message: proto.CertificateValidationContext, surroundings: Surroundings) -> Validation:
    only(
        message,
        "trusted_ca",
        "verify_certificate_hash",
        "verify_certificate_spki",
        "crl",
        "allow_expired_certificate",
        "match_subject_alt_names",
        "match_typed_subject_alt_names",
        "trust_chain_verification",
        "watched_directory",
    )
    if message.trust_chain_verification != proto.CertificateValidationContext.VERIFY_TRUST_CHAIN:
        raise Unsupported("a chain that is not trusted is never accepted", "trust_chain_verification")
    trusted = crl = None
    if message.HasField("trusted_ca"):
        with at("trusted_ca"):
            trusted = data(message.trusted_ca, surroundings, watched=True)
    if message.HasField("crl"):
        with at("crl"):
            crl = data(message.crl, surroundings, watched=True)
    names = []
    for index, untyped in enumerate(message.match_subject_alt_names):
        with at("match_subject_alt_names", index):
            names.append(SanMatch("any", string_match(untyped)))
    for index, typed in enumerate(message.match_typed_subject_alt_names):
        with at("match_typed_subject_alt_names", index):
            only(typed, "san_type", "matcher")
            if typed.san_type == proto.SubjectAltNameMatcher.OTHER_NAME:
                raise Unsupported("a name of another kind needs an oid, which is not supported", "san_type")
            if typed.san_type not in _SAN_TYPES:
                raise constraint(typed, "san_type", "value must not be in list [0]")
            with at("matcher"):
                names.append(SanMatch(_SAN_TYPES[typed.san_type], string_match(typed.matcher)))
    return Validation(
        trusted_ca_pem=trusted,
        crl_pem=crl,
        san_matches=tuple(names),
        certificate_hashes=tuple(_hash(text, i) for i, text in enumerate(message.verify_certificate_hash)),
        spki_hashes=tuple(_spki(text, i) for i, text in enumerate(message.verify_certificate_spki)),
        allow_expired=message.allow_expired_certificate,
        trusted_ca_file=message.trusted_ca.filename,
        crl_file=message.crl.filename,
    )


def _hash(text: str, index: int) -> str:
    plain = text.replace(":", "").lower()
    if not re.fullmatch("[0-9a-f]{64}", plain):
        raise ConfigError(f"Invalid hex-encoded SHA-256 {text}", f"verify_certificate_hash[{index}]")
    return plain


def _spki(text: str, index: int) -> str:
    try:
        if len(base64.b64decode(text, validate=True)) == 32:
            return text
    except ValueError:
        pass
    raise ConfigError(f"Invalid base64-encoded SHA-256 {text}", f"verify_certificate_spki[{index}]")
