"""Runs TLS on bytes in memory: OpenSSL over memory BIOs, without a socket.

Bulk data does not pass through pyOpenSSL's ``recv_into``/``bio_read``, which allocate and copy per call. This
module calls the same library through its cffi binding with pointers into the caller's buffers: 105 instead of 360
microseconds to encrypt and decrypt 256 KiB (the standard library: 194), without being slower for 1 KiB
(``bench/tls_micro.py``). Ciphertext is read in place through a read-only BIO, which saves a copy. So
:meth:`TlsSession.read_into` must have used up the data given to :meth:`TlsSession.receive` before its buffer is
reused. Callers do not depend on this implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL

from hbone import openssl
from hbone.errors import TlsError, TlsReason
from hbone.settings import Role
from hbone.tls_context import NoCommonProtocol, TlsContext, Verification

_ffi: Final[Any] = openssl.ffi
_lib: Final[Any] = openssl.lib

RECORD_BYTES: Final = 16_384  # the largest payload of a record (RFC 8446, 5.1)
RECORD_OVERHEAD: Final = 64  # of TLS 1.2 and 1.3 with AEAD suites it is 22 to 29
_SPARE: Final = 16_384  # alerts, key updates, session messages
HEADER_BYTES: Final = 5
"""The length of a record's header (RFC 8446, 5.1)."""
_EXPANSION: Final = HEADER_BYTES + 1 + 16
"""The bytes that a TLS 1.3 record adds to its content: header, content type and tag."""
_KEY_UPDATE_BYTES: Final = 5  # the length of a whole KeyUpdate message
_NO_EARLY_DATA: Final = 2  # SSL_READ_EARLY_DATA_FINISH

_REASONS: Final = (
    # Reasons by OpenSSL's error texts. Texts of the form "... alert <name>" are alerts that the peer has sent.
    ("did not return a certificate", TlsReason.NO_CERT),
    ("certificate required", TlsReason.NO_CERT),
    ("certificate expired", TlsReason.EXPIRED),
    ("certificate revoked", TlsReason.REVOKED),
    ("unknown ca", TlsReason.CHAIN),
    ("bad certificate", TlsReason.CHAIN),
    ("certificate verify failed", TlsReason.CHAIN),
    ("no application protocol", TlsReason.ALPN),
    ("protocol version", TlsReason.VERSION),
    ("unsupported protocol", TlsReason.VERSION),
    ("no protocols available", TlsReason.VERSION),
    ("wrong version number", TlsReason.VERSION),
)


def sealed_bytes(plain_bytes: int) -> int:
    """Return how many bytes the ciphertext of ``plain_bytes`` of plaintext can have, including pending output."""
    return plain_bytes + (plain_bytes // RECORD_BYTES + 1) * RECORD_OVERHEAD + _SPARE


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """The results of a finished handshake: proven facts about the peer, and negotiated parameters."""

    certificate: x509.Certificate | None = None
    chain: tuple[x509.Certificate, ...] = ()
    """Verified chain, leaf first. Empty without verification."""
    uri_sans: tuple[str, ...] = ()
    version: str = ""
    cipher: str = ""
    group: str | None = None
    alpn: bytes | None = None
    presented: x509.Certificate | None = None
    """Our own certificate, if the context has several."""


class Unmovable(Exception):
    """The connection cannot move to another process now. The text states the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficKeys:
    """The keys that another implementation needs to continue an established TLS 1.3 connection.

    Attributes:
        suite: the cipher suite's name.
        sending, receiving: the traffic secret and the number of the next record, for each direction.
    """

    suite: str
    sending: tuple[bytes, int]
    receiving: tuple[bytes, int]

    def __repr__(self) -> str:
        return f"TrafficKeys({self.suite})"


class TlsStream(ABC):
    """A TLS connection that works on bytes in memory. This is a base class and not a Protocol, which makes
    compiled calls faster.

    Attributes:
        established: whether the handshake is finished.
        half_rtt_sent: whether the half-RTT data was sent with the first flight.
        peer_closed: whether the peer has sent close_notify, so that no more bytes can be read.
    """

    __slots__ = ("established", "half_rtt_sent", "peer_closed")

    established: bool
    half_rtt_sent: bool
    peer_closed: bool

    @abstractmethod
    def receive(self, ciphertext: memoryview) -> None:
        """Accept received ciphertext. It is read in place, so call :meth:`read_into` before
        changing the buffer.
        """

    @abstractmethod
    def handshake(self) -> bool:
        """Advance the handshake by the received bytes. Return whether it is finished.

        Raises:
            TlsError: the handshake failed. :meth:`seal` returns the alert to send.
        """

    @abstractmethod
    def read_into(self, plain: memoryview) -> int:
        """Decrypt into ``plain`` and return the number of bytes. If they do not fill ``plain``, the ciphertext is
        used up or the peer has closed.

        Raises:
            TlsError: a record or alert that ends the connection.
        """

    @abstractmethod
    def seal(self, plain: memoryview | bytes, out: memoryview) -> int:
        """Write to ``out``: first the output that is already queued, then the encrypted ``plain``. Return the
        number of bytes written.

        ``out`` must have :func:`sealed_bytes` of room. ``plain`` can be empty, and must be empty before the
        handshake is finished.

        Raises:
            TlsError: the connection cannot send any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Queue close_notify, which the next :meth:`seal` returns. Idempotent."""

    @abstractmethod
    def facts(self) -> PeerFacts:
        """Return the results of the handshake. Call this only after :meth:`handshake` has returned True."""

    @property
    @abstractmethod
    def missing(self) -> int:
        """How many bytes must still be received before the connection can move to another process. 0: it can move
        now.
        """


class TlsSession(TlsStream):
    """One TLS connection, by OpenSSL.

    After :meth:`receive`, the caller calls :meth:`handshake` until it returns True, and later :meth:`read_into`
    until it no longer fills the buffer. After any call, :meth:`seal` returns the bytes to send.

    Args:
        context: the TLS parameters and our identity.
        half_rtt_data: sent by a server with its first flight, before the client is authenticated, so that the
            client has it before its first request (RFC 8446, 2; "0.5-RTT data"). Not sent with TLS 1.2, nor after
            a HelloRetryRequest; see :attr:`half_rtt_sent`.
    """

    __slots__ = (
        "_connection",
        "_context",
        "_due",
        "_half_rtt_data",
        "_head",
        "_incoming",
        "_irregular",
        "_rbio",
        "_received",
        "_sent",
        "_shorts",
        "_ssl",
        "_tickets_due",
        "_tracked",
        "_verification",
        "_wbio",
    )

    def __init__(self, context: TlsContext, half_rtt_data: bytes = b"") -> None:
        self._context = context
        self._half_rtt_data = half_rtt_data
        self._connection = connection = SSL.Connection(context.raw)
        self._verification = Verification(context.settings.verify)
        connection.set_app_data(self._verification)
        if context.role is Role.SERVER:
            connection.set_accept_state()
        else:
            connection.set_connect_state()
            if context.settings.server_name is not None:
                connection.set_tlsext_host_name(context.settings.server_name.encode())
        self._ssl: Any = connection._ssl
        self._wbio: Any = connection._from_ssl
        self._incoming: memoryview | None = None
        self.established = False
        self.half_rtt_sent = False
        self.peer_closed = False
        # The record counters for :meth:`traffic_keys`. They begin at the end of the handshake, with the first
        # application keys.
        self._rbio: Any = None
        self._tracked = False
        self._received = 0  # records
        self._sent = 0
        self._due = 0  # bytes until the next record's header
        self._head = b""  # the part of a header that has arrived
        self._shorts = 0  # records as long as a key update, without those that had payload
        self._irregular = False  # a record other than payload was sent
        self._tickets_due = False

    def receive(self, ciphertext: memoryview) -> None:
        self._offer(ciphertext)
        if self._tracked:
            self._track(ciphertext)

    def _offer(self, ciphertext: memoryview) -> None:
        self._rbio = bio = _lib.BIO_new_mem_buf(_ffi.from_buffer(ciphertext), len(ciphertext))
        _lib.BIO_set_mem_eof_return(bio, -1)
        _lib.SSL_set_bio(self._ssl, bio, self._wbio)
        self._incoming = ciphertext  # OpenSSL points into it until the next call

    def handshake(self) -> bool:
        try:
            if self._half_rtt_data:
                self._send_half_rtt_data()
            result = _lib.SSL_do_handshake(self._ssl)
            if result != 1:
                # do_handshake() is not used, because it would raise an error for an unfinished handshake, too.
                if _lib.SSL_get_error(self._ssl, result) == _lib.SSL_ERROR_WANT_READ:
                    return False
                self._connection._raise_ssl_error(self._ssl, result)
        except SSL.WantReadError:
            return False
        except NoCommonProtocol as error:
            raise TlsError(TlsReason.ALPN, f"client offered only {error.args[0]!r}") from error
        except SSL.Error as error:
            if self._verification.bug is not None:
                raise self._verification.bug from error
            raise self._translate(error) from error
        settings = self._context.settings
        if settings.alpn_required and self._context.role is Role.CLIENT:
            chosen = self._connection.get_alpn_proto_negotiated()
            if chosen not in settings.alpn:
                raise TlsError(TlsReason.ALPN, "server selected no protocol of ours")
        self.established = True
        if settings.movable and not self._tracked and _lib.SSL_version(self._ssl) == SSL.TLS1_3_VERSION:
            self._begin_tracking()
        return True

    # Moving the connection to another process. Secrets come from OpenSSL's key log. Record numbers are counted
    # here.

    def _begin_tracking(self) -> None:
        """Start to count records. Called when OpenSSL has read exactly the records of the handshake."""
        self._tracked = True
        self._tickets_due = self._context.role is Role.SERVER
        incoming = self._incoming
        if incoming is not None:
            rest = memoryview(bytearray(len(incoming)))
            size = _lib.BIO_read(self._rbio, _ffi.from_buffer(rest), len(rest)) if len(rest) else 0
            self.receive(rest[: max(0, size)])

    def _track(self, data: memoryview) -> None:
        """Count received records by parsing their headers. ``_due`` and ``_head`` keep the position
        between calls.
        """
        size, position = len(data), self._due
        if self._head:
            head = self._head + bytes(data[: HEADER_BYTES - len(self._head)])
            if len(head) < HEADER_BYTES:
                self._head = head
                return
            position = HEADER_BYTES - len(self._head) + self._count_record(head[3] << 8 | head[4])
            self._head = b""
        while position + HEADER_BYTES <= size:
            position += HEADER_BYTES + self._count_record(data[position + 3] << 8 | data[position + 4])
        if position < size:
            self._head = bytes(data[position:])
            self._due = 0
        else:
            self._due = position - size

    def _count_record(self, length: int) -> int:
        self._received += 1
        if length == _KEY_UPDATE_BYTES + _EXPANSION - HEADER_BYTES:
            self._shorts += 1
        return length

    @property
    def missing(self) -> int:
        return HEADER_BYTES - len(self._head) if self._head else self._due

    def traffic_keys(self) -> TrafficKeys:
        """Return the keys that another TLS implementation needs to continue the connection. The caller must first
        take all output by :meth:`seal`.

        Raises:
            Unmovable: this connection cannot move, or cannot move yet.
        """
        if not self.established or not self._tracked:
            raise Unmovable(
                "TLS 1.2" if self.established and self._context.settings.movable else "no secrets kept"
            )
        if self.missing:
            raise Unmovable("within a record")
        # A short record without payload was a KeyUpdate (RFC 8446, 4.6.3), which has replaced the keys.
        if self._shorts or self._irregular:
            raise Unmovable("keys were updated")
        if self._tickets_due:
            raise Unmovable(
                "nothing sent yet"
            )  # the number of leading session tickets is known only after the first output
        secrets = self._verification.secrets
        server, client = secrets.get(b"SERVER"), secrets.get(b"CLIENT")
        if server is None or client is None:
            raise Unmovable("no secrets kept")
        ours, theirs = (server, client) if self._context.role is Role.SERVER else (client, server)
        return TrafficKeys(
            suite=self._connection.get_cipher_name() or "",
            sending=(ours, self._sent),
            receiving=(theirs, self._received),
        )

    @property
    def close_sent(self) -> bool:
        """Whether we have sent close_notify."""
        return bool(self._connection.get_shutdown() & SSL.SENT_SHUTDOWN)

    def _send_half_rtt_data(self) -> None:
        """Advance a server's handshake to the end of its first flight, and append the half-RTT data. Raises the
        same errors as ``do_handshake``.

        OpenSSL pauses between the two flights only for a caller that reads the client's 0-RTT data. Clients never
        send any, because no session is resumed.
        """
        nothing, size, ssl = _ffi.new("char[1]"), _ffi.new("size_t *"), self._ssl
        if _lib.SSL_read_early_data(ssl, nothing, 1, size) != _NO_EARLY_DATA:
            self._connection._raise_ssl_error(ssl, -1)
        half_rtt_data, self._half_rtt_data = self._half_rtt_data, b""
        # After a HelloRetryRequest, SSL_read_early_data returns too early, when there is no key yet, and only
        # once. In this case, and with TLS 1.2, the data is sent after the handshake like other data, and
        # half_rtt_sent is False.
        finished = _lib.SSL_version(ssl) == SSL.TLS1_3_VERSION and self._connection.get_finished() is not None
        if finished:
            if not _lib.SSL_write_early_data(ssl, half_rtt_data, len(half_rtt_data), size):
                self._connection._raise_ssl_error(ssl, -1)
            self.half_rtt_sent = True

    def read_into(self, plain: memoryview) -> int:
        target = _ffi.from_buffer(plain)
        size, position = len(plain), 0
        read, ssl = _lib.SSL_read, self._ssl
        while position < size:
            count = read(ssl, target + position, size - position)
            if count > 0:
                position += count
                if count == _KEY_UPDATE_BYTES:
                    self._shorts -= 1
                continue
            if _lib.SSL_get_error(ssl, count) != _lib.SSL_ERROR_WANT_READ:
                _ffi.release(target)  # see _raise
                try:
                    self._connection._raise_ssl_error(ssl, count)
                except SSL.ZeroReturnError:
                    self.peer_closed = True
                except SSL.Error as error:
                    raise self._translate(error) from error
            break
        return position

    def seal(self, plain: memoryview | bytes, out: memoryview) -> int:
        target = _ffi.from_buffer(out)
        capacity, filled = len(out), 0
        bio_read, wbio, ssl = _lib.BIO_read, self._wbio, self._ssl
        size = len(plain)
        if size:
            source = _ffi.from_buffer(plain)
            position = 0
            # Encrypt one record at a time, so that the memory BIO stays small enough for the processor's cache.
            while position < size:
                count = _lib.SSL_write(
                    ssl, source + position, RECORD_BYTES if size - position > RECORD_BYTES else size - position
                )
                if count <= 0:
                    _ffi.release(source)
                    _ffi.release(target)
                    self._raise(count)
                position += count
                sealed = bio_read(wbio, target + filled, capacity - filled)
                filled += sealed
                self._sent += 1
                if sealed != count + _EXPANSION:
                    self._irregular = True
        else:
            filled = max(0, bio_read(wbio, target, capacity))
            if filled and self._sent:
                self._irregular = True
        if self._tickets_due and filled:
            self._count_tickets(out[:filled])
        return filled

    def _count_tickets(self, output: memoryview) -> None:
        """Count the records in a server's first output after the handshake, which begins with session tickets."""
        self._tickets_due = self._irregular = False
        self._sent, position = int(self.half_rtt_sent), 0
        while position < len(output):
            position += HEADER_BYTES + (output[position + 3] << 8 | output[position + 4])
            self._sent += 1

    def close(self) -> None:
        # SSL_shutdown is called only once: a second call would read the peer's bytes, to look for its alert.
        if self.established and not self._connection.get_shutdown() & SSL.SENT_SHUTDOWN:
            try:
                self._connection.shutdown()
            except SSL.Error as error:
                # Ignore errors here: a failed session cannot send close_notify, and its error was raised earlier.
                del error

    def facts(self) -> PeerFacts:
        connection = self._connection
        seen = self._verification.chain
        chain = tuple(seen[key] for key in sorted(seen))
        leaf = chain[0] if chain else connection.get_peer_certificate(as_cryptography=True)
        return PeerFacts(
            certificate=leaf,
            chain=chain,
            uri_sans=uri_sans(leaf) if leaf is not None else (),
            version=connection.get_protocol_version_name(),
            cipher=connection.get_cipher_name() or "",
            group=connection.get_group_name(),
            alpn=connection.get_alpn_proto_negotiated() or None,
            presented=connection.get_certificate(as_cryptography=True) if self._context.settings.further else None,
        )

    def _raise(self, count: int) -> None:
        """Raise an exception for the error in OpenSSL's error queue.

        The caller has released its pointers into buffers, because a traceback is often part of a reference cycle:
        CPython up to 3.12.6 crashes when its garbage collector finds a memoryview with a borrowed buffer in a
        cycle (gh-77894).
        """
        try:
            self._connection._raise_ssl_error(self._ssl, count)
        except SSL.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: SSL.Error) -> TlsError:
        seen = self._verification
        if seen.reason is not None:
            return TlsError(seen.reason, seen.detail)
        if isinstance(error, SSL.SysCallError):
            return TlsError(TlsReason.OTHER, f"TLS ended early: {error}")
        stack = error.args[0] if error.args and isinstance(error.args[0], list) else []
        detail = "; ".join(entry[-1] for entry in stack) or "connection failed"
        by_peer = " alert " in f" {detail} "
        for text, reason in _REASONS:
            if text in detail:
                return TlsError(reason, detail, by_peer=by_peer)
        return TlsError(TlsReason.OTHER, detail, by_peer=by_peer)


def uri_sans(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the URI subject alternative names, or an empty tuple if the extension cannot be parsed."""
    return _uri_sans(certificate.public_bytes(Encoding.DER))


# Cached, because few peers open most connections. The key is the encoded certificate: a certificate object would
# keep its parsed form, about 80 objects, in memory long after the certificate was replaced.
@lru_cache(maxsize=256)
def _uri_sans(der: bytes) -> tuple[str, ...]:
    certificate = x509.load_der_x509_certificate(der)
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return ()
    return tuple(extension.value.get_values_for_type(x509.UniformResourceIdentifier))
