"""Builds TLS contexts from parameters and identities in memory, so that no key is written to a file.

This uses the OpenSSL library inside ``cryptography`` (through pyOpenSSL), which is newer than the interpreter's.
It can select TLS 1.3 suites, has post-quantum groups, and runs our verify hook inside the handshake, so that a
refused peer gets an alert instead of a silent close. Session resumption is off, so that the peer of every
connection is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, TypeAlias

from cryptography import x509
from OpenSSL import SSL, crypto

from hbone import openssl
from hbone.errors import TlsReason
from hbone.parsed_certificates import parsed
from hbone.settings import Role
from hbone.tls_identities import Identity, by_server_name, completed, load, load_each
from hbone.x509_errors import UNREADABLE

_ffi: Final[Any] = openssl.ffi
_lib: Final[Any] = openssl.lib


@dataclass(frozen=True, slots=True)
class Refusal:
    """A peer is refused for another reason than its name."""

    reason: TlsReason
    detail: str


Verify: TypeAlias = Callable[[Sequence[x509.Certificate]], str | Refusal | None]
"""A check of the peer's verified chain, leaf first and root last. It returns None to accept the peer, the fault in
the peer's name, or a :class:`Refusal`.
"""

_MODE_NO_AUTO_CHAIN: Final = 8  # SSL_MODE_NO_AUTO_CHAIN
_NOT_YET_VALID: Final = 9  # X509_V_ERR_CERT_NOT_YET_VALID
_EXPIRY_ERRORS: Final = frozenset((_NOT_YET_VALID, 10))  # and X509_V_ERR_CERT_HAS_EXPIRED
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
# The errors X509_V_ERR_UNABLE_TO_GET_CRL, _CRL_NOT_YET_VALID and _CRL_HAS_EXPIRED are ignored without
# ``crl_required``. Like in the Rust ztunnel, a certificate without a list then does not count as revoked, and an
# expired list still revokes certificates.
_TOLERATED_CRL_ERRORS: Final = frozenset((3, 11, 12))
_REVOKED: Final = 23  # X509_V_ERR_CERT_REVOKED
_REJECTED: Final = 28  # X509_V_ERR_CERT_REJECTED: makes the alert bad_certificate


class TlsVersion(Enum):
    """The TLS protocol versions."""

    TLS_1_2 = SSL.TLS1_2_VERSION
    TLS_1_3 = SSL.TLS1_3_VERSION


class ClientCertificate(Enum):
    """Whether a server requests or requires client certificates."""

    NONE = SSL.VERIFY_NONE
    OPTIONAL = SSL.VERIFY_PEER
    REQUIRED = SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """The settings of a TLS context. PEM fields contain one or more PEM blocks.

    Attributes:
        certificate_chain_pem: our certificate chain, leaf first. None: no certificate is presented.
        further: further certificates among which a server chooses; see :mod:`hbone.tls_identities`.
        trusted_ca_pem: the trust anchors, roots or intermediates. None disables verification of the peer.
        crl_pem: revocation lists for any certificate of the chain.
        crl_required: whether to refuse a chain if a certificate has no current list of its issuer in ``crl_pem``.
        client_certificate: whether a server requests or requires a client certificate. A client always verifies
            the server if it has trust anchors.
        suites: the suites for TLS 1.3, in order of preference. AES-128-GCM is first, because ChaCha20 takes 20 to
            40 % more CPU time.
        groups: key exchange groups in order of preference. None leaves the choice to OpenSSL, which prefers
            post-quantum hybrids.
        alpn: protocols in order of preference.
        alpn_required: whether a server refuses clients whose ALPN has none of our protocols (clients without ALPN
            are accepted), and a client refuses servers that select none of our protocols.
        verify: see :data:`Verify`; needs ``trusted_ca_pem`` or ``any_chain``.
        any_chain: whether to request the peer's certificate without ``trusted_ca_pem``, and check it only by
            ``verify``. This is for pinned certificates and keys: the handshake proves the key, so the issuer is
            irrelevant.
        key_log: called with one line of NSS key log per secret, without newline.
        movable: whether to keep the traffic secrets of each connection and count its records, so that it can move
            to another process; see :meth:`hbone.tls.TlsSession.traffic_keys`.
    """

    certificate_chain_pem: bytes | None = None
    private_key_pem: bytes | None = field(default=None, repr=False)
    further: tuple[Identity, ...] = ()
    trusted_ca_pem: bytes | None = None
    crl_pem: bytes | None = None
    crl_required: bool = False
    client_certificate: ClientCertificate = ClientCertificate.REQUIRED
    allow_expired: bool = False
    min_version: TlsVersion = TlsVersion.TLS_1_3
    max_version: TlsVersion = TlsVersion.TLS_1_3
    suites: tuple[str, ...] = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384")
    ciphers_1_2: tuple[str, ...] = (
        "ECDHE-ECDSA-AES128-GCM-SHA256",
        "ECDHE-RSA-AES128-GCM-SHA256",
        "ECDHE-ECDSA-AES256-GCM-SHA384",
        "ECDHE-RSA-AES256-GCM-SHA384",
    )
    groups: tuple[str, ...] | None = None
    alpn: tuple[bytes, ...] = (b"h2",)
    alpn_required: bool = False
    server_name: str | None = None
    verify: Verify | None = None
    any_chain: bool = False
    key_log: Callable[[bytes], None] | None = None
    movable: bool = False


class NoCommonProtocol(Exception):
    """An error raised in the ALPN callback, which makes OpenSSL send the alert no_application_protocol."""


class Verification:
    """The values that OpenSSL's callbacks collect in one handshake, such as the result of verifying the peer.

    Attributes:
        secrets: the traffic secrets by sender, ``CLIENT`` and ``SERVER``, of a connection that can move.
    """

    __slots__ = ("bug", "chain", "detail", "reason", "secrets", "verify")

    def __init__(self, verify: Verify | None) -> None:
        self.verify = verify
        self.chain: dict[int, x509.Certificate] = {}
        self.reason: TlsReason | None = None
        self.detail = ""
        self.bug: Exception | None = None
        self.secrets: dict[bytes, bytes] = {}

    def note_secret(self, line: bytes) -> None:
        """Store the secret in a line of NSS key log, if it is one of the first application traffic secrets."""
        label, _, secret = line.split(b" ")
        sender, _, kind = label.partition(b"_")
        if kind == b"TRAFFIC_SECRET_0":
            self.secrets[sender] = bytes.fromhex(secret.decode())


class TlsContext:
    """An OpenSSL context for one role. Connections share it, and it is replaced when the certificate is rotated.

    Args:
        role: our side of the connections.
        settings: the parameters of the context.
        shared: a context whose settings differ only in ``verify``; see :meth:`expecting`.

    Raises:
        ValueError: a PEM, key, suite or group cannot be used, or the key belongs to another certificate.
    """

    __slots__ = ("_kept", "_settings", "raw", "role")

    def __init__(self, role: Role, settings: TlsSettings, *, shared: TlsContext | None = None) -> None:
        self.role = role
        self._settings = settings
        self.raw: SSL.Context
        self._kept: list[Any] = [] if shared is None else shared._kept  # objects that OpenSSL refers to
        if shared is not None:
            self.raw = shared.raw
            return
        try:
            self.raw = self._build()
        except SSL.Error as error:
            raise ValueError(f"OpenSSL refused the TLS settings: {error}") from error
        except crypto.Error as error:
            raise ValueError(f"OpenSSL refused the certificates: {error}") from error

    @property
    def settings(self) -> TlsSettings:
        return self._settings

    def expecting(self, verify: Verify) -> TlsContext:
        """Return a context that differs from this one only in its ``verify``.

        The two contexts share all other parts. A client needs a context for each identity that it dials, and
        building a whole context would take a quarter of a millisecond and 20 KiB.

        Raises:
            ValueError: this context does not verify peers, so the shared part requests no certificate.
        """
        if self._settings.verify is None:
            raise ValueError("a context without verify cannot be shared")
        return TlsContext(self.role, replace(self._settings, verify=verify), shared=self)

    def _build(self) -> SSL.Context:
        """Build the OpenSSL context that handshakes use."""
        settings = self._settings
        if settings.certificate_chain_pem is None or settings.private_key_pem is None:
            return self._context_of(())
        first = Identity(settings.certificate_chain_pem, settings.private_key_pem)
        identities = [completed(each, settings.trusted_ca_pem) for each in (first, *settings.further)]
        if not settings.further:
            return self._context_of(identities)
        raw = self._context_of(identities)
        raw.set_tlsext_servername_callback(by_server_name(identities, self._context_of))
        return raw

    def _context_of(self, identities: Sequence[Identity]) -> SSL.Context:
        settings = self._settings
        raw = SSL.Context(SSL.TLS_METHOD)
        raw.set_min_proto_version(settings.min_version.value)
        raw.set_max_proto_version(settings.max_version.value)
        raw.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
        raw.set_session_cache_mode(SSL.SESS_CACHE_OFF)
        # RELEASE_BUFFERS frees the record buffers of idle connections. NO_AUTO_CHAIN is set because the chain is
        # already complete.
        raw.set_mode(SSL.MODE_RELEASE_BUFFERS | _MODE_NO_AUTO_CHAIN)
        raw.set_tls13_ciphersuites(":".join(settings.suites).encode())
        raw.set_cipher_list(":".join(settings.ciphers_1_2).encode())
        if self.role is Role.SERVER:
            raw.set_options(SSL.OP_CIPHER_SERVER_PREFERENCE)
        if settings.groups is not None:
            _set_groups(raw, settings.groups)
        if len(identities) == 1:
            load(raw, identities[0])
        else:
            load_each(raw, identities)
        self._load_trust(raw)
        self._set_alpn(raw)
        _set_key_log(raw, settings)
        return raw

    def _load_trust(self, raw: SSL.Context) -> None:
        settings = self._settings
        server = self.role is Role.SERVER
        mode = settings.client_certificate.value if server else SSL.VERIFY_PEER
        if settings.trusted_ca_pem is None:
            if settings.any_chain and settings.verify is not None:
                self._kept.append(_set_verify(raw, mode, any_chain=True))
            else:
                raw.set_verify(SSL.VERIFY_NONE)
            return
        store = raw.get_cert_store()
        assert store is not None
        for certificate in x509.load_pem_x509_certificates(settings.trusted_ca_pem):
            store.add_cert(crypto.X509.from_cryptography(certificate))
        # A trusted intermediate is accepted as the end of the chain, like a trust anchor in other TLS stacks.
        flags = crypto.X509StoreFlags.PARTIAL_CHAIN
        if settings.crl_pem is not None:
            # An unreadable revocation list must be an error: without it, OpenSSL would accept revoked
            # certificates.
            blocks = _pem_blocks(settings.crl_pem, b"X509 CRL")
            if not blocks:
                raise ValueError("no certificate revocation list in PEM")
            for block in blocks:
                store.add_crl(x509.load_pem_x509_crl(block))
            flags |= crypto.X509StoreFlags.CRL_CHECK | crypto.X509StoreFlags.CRL_CHECK_ALL
        store.set_flags(flags)
        tolerated = frozenset() if settings.crl_required else _TOLERATED_CRL_ERRORS
        if settings.allow_expired:
            tolerated |= _EXPIRY_ERRORS
        self._kept.append(_set_verify(raw, mode, tolerated=tolerated))

    def _set_alpn(self, raw: SSL.Context) -> None:
        settings = self._settings
        if not settings.alpn:
            return
        if self.role is Role.CLIENT:
            raw.set_alpn_protos(list(settings.alpn))
            return

        def select(_connection: SSL.Connection, offered: list[bytes]) -> Any:
            for protocol in settings.alpn:
                if protocol in offered:
                    return protocol
            if settings.alpn_required:
                raise NoCommonProtocol(b" ".join(offered)[:64])
            return SSL.NO_OVERLAPPING_PROTOCOLS

        raw.set_alpn_select_callback(select)


def _set_verify(
    raw: SSL.Context, mode: int, *, tolerated: frozenset[int] = frozenset(), any_chain: bool = False
) -> Any:
    """Install our verify callback in a context, which calls the handshake's ``verify``. Return objects that must
    live as long as ``raw``.

    OpenSSL calls the callback first for each error, and then for each certificate from the root down to the leaf.
    pyOpenSSL's wrapper is not used, because it cannot choose the error, which determines the alert sent to the
    peer.
    """

    def callback(accepted: int, store: Any) -> int:
        ssl = _lib.X509_STORE_CTX_get_ex_data(store, _lib.SSL_get_ex_data_X509_STORE_CTX_idx())
        seen: Verification = SSL.Connection._reverse_mapping[ssl].get_app_data()
        try:
            if not accepted:
                if any_chain:
                    _lib.X509_STORE_CTX_set_error(store, 0)
                    return 1
                return _judge_error(store, seen, tolerated)
            depth = _lib.X509_STORE_CTX_get_error_depth(store)
            if any_chain and depth:
                return 1  # an unverified issuer's statements about the leaf prove nothing
            refusal: str | Refusal | None = None
            try:
                seen.chain[depth] = _current_certificate(store)
            except UNREADABLE as error:  # OpenSSL accepts more than the parser
                refusal = Refusal(TlsReason.CHAIN, f"certificate {depth} of the chain cannot be read: {error}")
            if refusal is None and depth == 0 and seen.verify is not None:
                refusal = seen.verify([seen.chain[key] for key in sorted(seen.chain)])
        except Exception as error:  # noqa: BLE001  must not unwind through C; handshake() raises it
            seen.bug = error
            refusal = "verification failed"
        if refusal is None:
            return 1
        if isinstance(refusal, str):
            refusal = Refusal(TlsReason.SAN, refusal)
        seen.reason, seen.detail = refusal.reason, refusal.detail
        revoked = refusal.reason is TlsReason.REVOKED
        _lib.X509_STORE_CTX_set_error(store, _REVOKED if revoked else _REJECTED)
        return 0

    kept = _ffi.callback("int (*)(int, X509_STORE_CTX *)", callback)
    _lib.SSL_CTX_set_verify(raw._context, mode, kept)
    return kept


def _judge_error(store: Any, seen: Verification, tolerated: frozenset[int]) -> int:
    error = _lib.X509_STORE_CTX_get_error(store)
    if error in tolerated:
        _lib.X509_STORE_CTX_set_error(store, 0)
        return 1
    if error == _REVOKED:
        seen.reason = TlsReason.REVOKED
    elif error in _EXPIRY_ERRORS:
        seen.reason = TlsReason.EXPIRED
    else:
        seen.reason = TlsReason.CHAIN
    depth = _lib.X509_STORE_CTX_get_error_depth(store)
    times = f", {_times(store, error)}" if error in _EXPIRY_ERRORS else ""
    seen.detail = f"{_error_text(error)} (certificate {depth} of the chain{times})"
    return 0


def _times(store: Any, error: int) -> str:
    """Describe which validity bound of the certificate is exceeded, and our time, because either side's clock can
    be wrong.
    """
    certificate = _current_certificate(store)
    early = error == _NOT_YET_VALID
    bound = certificate.not_valid_before_utc if early else certificate.not_valid_after_utc
    return f"valid {'from' if early else 'until'} {bound:{_TIME}}, and here it is {datetime.now(UTC):{_TIME}}"


def _current_certificate(store: Any) -> x509.Certificate:
    return parsed(_lib.X509_STORE_CTX_get_current_cert(store))


def _error_text(error: int) -> str:
    text: bytes = _ffi.string(_lib.X509_verify_cert_error_string(error))
    return text.decode()


def _set_key_log(raw: SSL.Context, settings: TlsSettings) -> None:
    log, movable = settings.key_log, settings.movable
    if log is None and not movable:
        return

    def logged(connection: SSL.Connection, line: bytes) -> None:
        if movable:
            connection.get_app_data().note_secret(line)
        if log is not None:
            log(line)

    raw.set_keylog_callback(logged)


def _set_groups(raw: SSL.Context, groups: tuple[str, ...]) -> None:
    # This uses a private attribute, because pyOpenSSL has no public call for this.
    if _lib.SSL_CTX_set1_curves_list(raw._context, ":".join(groups).encode()) != 1:
        _lib.ERR_clear_error()
        raise ValueError(f"unknown key exchange group among {', '.join(groups)}")


def _pem_blocks(pem: bytes, label: bytes) -> list[bytes]:
    """Return the PEM blocks of one kind, such as certificates. Other kinds are ignored."""
    begin, end = b"-----BEGIN " + label + b"-----", b"-----END " + label + b"-----"
    return [begin + part.split(end)[0] + end + b"\n" for part in pem.split(begin)[1:]]
