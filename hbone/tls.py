"""TLS as bytes in and bytes out: OpenSSL over memory BIOs, no socket.

Bulk data does not pass through pyOpenSSL's ``recv_into``/``bio_read``, which allocate and copy per call. This
module calls the same library through its cffi binding with pointers into the caller's buffers: 105 instead of 360
microseconds to encrypt and decrypt 256 KiB (the standard library: 194), without being slower for 1 KiB
(``bench/tls_micro.py``). Ciphertext is read in place through a read-only BIO (one copy less than a memory BIO). So
the data given to :meth:`TlsSession.receive` must be used up before its buffer is reused. Callers do not depend on
this implementation.
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
    # OpenSSL's reason texts. Texts of the form "... alert <name>" are alerts that the peer has sent.
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
    """Return the ciphertext room needed for ``plain_bytes`` of plaintext and the pending output."""
    return plain_bytes + (plain_bytes // RECORD_BYTES + 1) * RECORD_OVERHEAD + _SPARE


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """The facts about the peer that a finished handshake proved, and the negotiated parameters."""

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
    """The keys of an established TLS 1.3 connection, with which another implementation continues it.

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
    """TLS as bytes in and bytes out. This is a base class and not a Protocol, because compiled calls to it need no
    look-up.

    Attributes:
        established: whether the handshake is finished.
        half_rtt_sent: whether the half-RTT data was sent with the first flight.
        peer_closed: whether the peer has sent close_notify. Then no more bytes can be read.
    """

    __slots__ = ("established", "half_rtt_sent", "peer_closed")

    established: bool
    half_rtt_sent: bool
    peer_closed: bool

    @abstractmethod
    def receive(self, ciphertext: memoryview) -> None:
        """Accept received ciphertext. It is read in place: call :meth:`read_into` before changing the buffer."""

    @abstractmethod
    def handshake(self) -> bool:
        """Advance the handshake with the received bytes; return whether it is finished.

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
        """Encrypt ``plain`` into ``out``, after output that is already queued. Return the number of bytes written.

        ``out`` must have :func:`sealed_bytes` of room. ``plain`` can be empty, and must be empty before the
        handshake is finished.

        Raises:
            TlsError: the connection cannot send any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Queue close_notify, once; :meth:`seal` takes it. Idempotent."""

    @abstractmethod
    def facts(self) -> PeerFacts:
        """Return the facts proved by the handshake. Call this only after :meth:`handshake` has returned True."""

    @property
    @abstractmethod
    def missing(self) -> int:
        """The smallest number of bytes to receive before the connection can move to another process. 0: it can
        move now.
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
        # For :meth:`traffic_keys`: counts since the end of the handshake, under the first application keys.
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
                # Not do_handshake(), which would also raise an error for an unfinished handshake.
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

    # Moving to another process. Secrets come from OpenSSL's key log. Record numbers are counted here.

    def _begin_tracking(self) -> None:
        """Count records from now on, because OpenSSL has read exactly the records of the handshake."""
        self._tracked = True
        self._tickets_due = self._context.role is Role.SERVER
        incoming = self._incoming
        if incoming is not None:
            rest = memoryview(bytearray(len(incoming)))
            size = _lib.BIO_read(self._rbio, _ffi.from_buffer(rest), len(rest)) if len(rest) else 0
            self.receive(rest[: max(0, size)])

    def _track(self, data: memoryview) -> None:
        """Parse record headers in the received bytes. ``_due`` and ``_head`` show where the next one begins."""
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
        """Return the keys with which another implementation continues. First take all output by :meth:`seal`.

        Raises:
            Unmovable: this connection cannot move, or cannot move yet.
        """
        if not self.established or not self._tracked:
            raise Unmovable(
                "TLS 1.2" if self.established and self._context.settings.movable else "no secrets kept"
            )
        if self.missing:
            raise Unmovable("within a record")
        # A record of this length without payload is a KeyUpdate (RFC 8446, 4.6.3).
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
        """Advance to the end of our first flight and append the half-RTT data. Raises the same errors as
        ``do_handshake``.

        OpenSSL stops between the flights only for a caller that reads the client's 0-RTT data. Clients never send
        such data, because no session is resumed.
        """
        nothing, size, ssl = _ffi.new("char[1]"), _ffi.new("size_t *"), self._ssl
        if _lib.SSL_read_early_data(ssl, nothing, 1, size) != _NO_EARLY_DATA:
            self._connection._raise_ssl_error(ssl, -1)
        half_rtt_data, self._half_rtt_data = self._half_rtt_data, b""
        # After a HelloRetryRequest, SSL_read_early_data also returns, before there is a key, and not again. Then,
        # and with TLS 1.2, the data is sent after the handshake like other data, and half_rtt_sent is False.
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
            # Encrypt record by record, so that the memory BIO stays small and in the processor's cache.
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
        """Count the records of a server's first output, which begins with session tickets."""
        self._tickets_due = self._irregular = False
        self._sent, position = int(self.half_rtt_sent), 0
        while position < len(output):
            position += HEADER_BYTES + (output[position + 3] << 8 | output[position + 4])
            self._sent += 1

    def close(self) -> None:
        # A second call of SSL_shutdown would read the peer's bytes to find its alert.
        if self.established and not self._connection.get_shutdown() & SSL.SENT_SHUTDOWN:
            try:
                self._connection.shutdown()
            except SSL.Error as error:
                # A failed session cannot send close_notify. Its error was raised earlier.
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
        """Raise the error of OpenSSL's queue.

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


# A few peers open most connections. The key is the encoded certificate, because a certificate object would keep
# its parsed form, about 80 objects, long after the certificate was replaced.
@lru_cache(maxsize=256)
def _uri_sans(der: bytes) -> tuple[str, ...]:
    certificate = x509.load_der_x509_certificate(der)
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return ()
    return tuple(extension.value.get_values_for_type(x509.UniformResourceIdentifier))
