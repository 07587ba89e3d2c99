"""Implements the record layer of TLS 1.3 (RFC 8446, 5), for connections whose handshake took place in another
process.

OpenSSL cannot export a connection. But after its handshake, the state of a TLS 1.3 connection is small: a cipher
suite, a traffic secret and a record number per direction, and the bytes of an incomplete record
(:class:`RecordState`). :class:`RecordSession` continues from this state. It has the interface of
:class:`hbone.tls.TlsSession`, so that callers need not distinguish the two. The ciphers are from ``cryptography``.

After the handshake, a KeyUpdate message updates the keys and is answered (4.6.3). Session tickets are ignored,
because no session is resumed. Any other message is an error. Keys are updated before a suite's limit of records
(5.5).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from hbone.errors import TlsError, TlsReason
from hbone.tls import HEADER_BYTES, RECORD_BYTES, PeerFacts, TlsSession, TlsStream, Unmovable
from hbone.tls_state import KeyState, RecordState, facts_of, facts_state

TAG_BYTES: Final = 16
_IV_BYTES: Final = 12
_MOST_CIPHERTEXT: Final = RECORD_BYTES + 256  # RFC 8446, 5.2
_MOST_INNER: Final = RECORD_BYTES + 1  # plaintext with its content type
_MOST_MESSAGE: Final = 128 * 1024  # a session ticket has at most 64 KiB, plus its nonce and extensions
_MOST_EMPTY: Final = 32  # the largest number of records without payload in a row, as in OpenSSL

_ALERT, _HANDSHAKE, _DATA = 21, 22, 23
_NEW_SESSION_TICKET, _KEY_UPDATE = 4, 24
_FATAL, _WARNING = 2, 1
_CLOSE_NOTIFY, _USER_CANCELED = 0, 90
_UNEXPECTED_MESSAGE, _BAD_RECORD_MAC, _RECORD_OVERFLOW, _ILLEGAL_PARAMETER, _DECODE_ERROR = 10, 20, 22, 47, 50
_ALERTS: Final = {
    _UNEXPECTED_MESSAGE: "unexpected message",
    _BAD_RECORD_MAC: "bad record mac",
    _RECORD_OVERFLOW: "record overflow",
    40: "handshake failure",
    42: "bad certificate",
    44: "certificate revoked",
    45: "certificate expired",
    46: "certificate unknown",
    _ILLEGAL_PARAMETER: "illegal parameter",
    48: "unknown ca",
    49: "access denied",
    _DECODE_ERROR: "decode error",
    51: "decrypt error",
    80: "internal error",
    116: "certificate required",
}
_PEER_REASONS: Final = {
    42: TlsReason.CHAIN,
    44: TlsReason.REVOKED,
    45: TlsReason.EXPIRED,
    48: TlsReason.CHAIN,
    116: TlsReason.NO_CERT,
}


class Suite(NamedTuple):
    """A cipher suite: its key length and hash, and the number of records after which a key must be replaced."""

    key_bytes: int
    hash: type[hashes.SHA256 | hashes.SHA384]
    aead: type[AESGCM | ChaCha20Poly1305]
    most_records: int


SUITES: Final = {
    # An AES-GCM key may encrypt 2^24.5 records of full size (RFC 8446, 5.5). ChaCha20 is limited only by the
    # record numbers.
    "TLS_AES_128_GCM_SHA256": Suite(16, hashes.SHA256, AESGCM, 1 << 24),
    "TLS_AES_256_GCM_SHA384": Suite(32, hashes.SHA384, AESGCM, 1 << 24),
    "TLS_CHACHA20_POLY1305_SHA256": Suite(32, hashes.SHA256, ChaCha20Poly1305, 1 << 48),
}


def record_state(stream: TlsStream) -> RecordState:
    """Return a connection's state for a :class:`RecordSession`, which continues the connection. The caller must
    first take all pending output.

    Raises:
        Unmovable: the connection cannot move, or cannot move yet.
    """
    if isinstance(stream, RecordSession):
        return stream.state()
    if not isinstance(stream, TlsSession):
        raise Unmovable("an unknown implementation of TLS")
    keys = stream.traffic_keys()
    if keys.suite not in SUITES:
        raise Unmovable(f"cipher suite {keys.suite}")
    return RecordState(
        suite=keys.suite,
        sending=KeyState(secret=keys.sending[0], number=keys.sending[1]),
        receiving=KeyState(secret=keys.receiving[0], number=keys.receiving[1]),
        facts=facts_state(stream.facts()),
        peer_closed=stream.peer_closed,
        closed=stream.close_sent,
    )


def expand_label(suite: Suite, secret: bytes, label: str, size: int) -> bytes:
    """Compute HKDF-Expand-Label with an empty context (RFC 8446, 7.1)."""
    name = b"tls13 " + label.encode()
    info = size.to_bytes(2) + bytes((len(name),)) + name + b"\0"
    return HKDFExpand(algorithm=suite.hash(), length=size, info=info).derive(secret)


class _Direction:
    """The keys for one direction of a connection, with the number of the next record."""

    __slots__ = ("_aead", "_iv", "_suite", "number", "secret")

    def __init__(self, suite: Suite, state: KeyState) -> None:
        if len(state.secret) != suite.hash.digest_size or not 0 <= state.number < 1 << 64:
            raise ValueError("no traffic secret of this cipher suite")
        self._suite = suite
        self._use(state.secret)
        self.number = state.number

    def _use(self, secret: bytes) -> None:
        suite = self._suite
        self.secret = secret
        self._aead = suite.aead(expand_label(suite, secret, "key", suite.key_bytes))
        self._iv = int.from_bytes(expand_label(suite, secret, "iv", _IV_BYTES))
        self.number = 0

    def update(self) -> None:
        """Replace the keys by the next generation (RFC 8446, 7.2)."""
        self._use(expand_label(self._suite, self.secret, "traffic upd", self._suite.hash.digest_size))

    def seal(self, content: bytes, kind: int) -> bytes:
        """Return the next record, with ``content`` encrypted."""
        size = len(content) + 1 + TAG_BYTES
        header = b"\x17\x03\x03" + size.to_bytes(2)
        nonce = (self._iv ^ self.number).to_bytes(_IV_BYTES)
        self.number += 1
        return header + self._aead.encrypt(nonce, content + bytes((kind,)), header)

    def open(self, header: bytes, payload: memoryview) -> bytes:
        """Decrypt the next record. Return its content, followed by content type and padding.

        Raises:
            InvalidTag: the record was not encrypted with these keys under this number.
        """
        content = self._aead.decrypt((self._iv ^ self.number).to_bytes(_IV_BYTES), payload, header)
        self.number += 1
        return content

    def state(self) -> KeyState:
        return KeyState(secret=self.secret, number=self.number)


class RecordSession(TlsStream):
    """Continues a connection from its state; see :class:`hbone.tls.TlsStream`.

    Raises:
        ValueError: the state names an unknown suite, or has keys of a wrong length.
    """

    __slots__ = (
        "_closed",
        "_control",
        "_empty",
        "_facts",
        "_incoming",
        "_message",
        "_receiving",
        "_sending",
        "_suite_name",
        "most_records",
    )

    def __init__(self, state: RecordState) -> None:
        suite = SUITES.get(state.suite)
        if suite is None:
            raise ValueError(f"unknown cipher suite {state.suite!r}")
        self._suite_name = state.suite
        self.most_records = suite.most_records
        """The number of records after which our keys are replaced."""
        self._sending = _Direction(suite, state.sending)
        self._receiving = _Direction(suite, state.receiving)
        self._facts = facts_of(state.facts)
        self._incoming = memoryview(state.partial)
        self._message = bytearray(state.message)
        self._control = bytearray(state.control)
        self._closed = state.closed
        self._empty = 0
        self.peer_closed = state.peer_closed
        self.established = True
        self.half_rtt_sent = False

    def state(self) -> RecordState:
        """Return the state for another session, which continues the connection. This session must not be used
        afterwards.
        """
        return RecordState(
            suite=self._suite_name,
            sending=self._sending.state(),
            receiving=self._receiving.state(),
            facts=facts_state(self._facts),
            partial=bytes(self._incoming),
            message=bytes(self._message),
            control=bytes(self._control),
            peer_closed=self.peer_closed,
            closed=self._closed,
        )

    @property
    def missing(self) -> int:
        return 0  # a part of a record belongs to the state

    def facts(self) -> PeerFacts:
        return self._facts

    def handshake(self) -> bool:
        return True

    # Receiving

    def receive(self, ciphertext: memoryview) -> None:
        incoming = self._incoming
        self._incoming = memoryview(bytes(incoming) + bytes(ciphertext)) if len(incoming) else ciphertext

    def read_into(self, plain: memoryview) -> int:
        data, position, filled, size = self._incoming, 0, 0, len(plain)
        try:
            while not self.peer_closed and filled < size:
                if len(data) - position < HEADER_BYTES:
                    break
                length = data[position + 3] << 8 | data[position + 4]
                self._check_header(bytes(data[position : position + 3]), length)
                stop = position + HEADER_BYTES + length
                if stop > len(data):
                    break
                if length > size - filled and filled:
                    break  # the content might not fit into the buffer, so the caller calls again
                content, kind = self._open(data, position, stop)
                position = stop
                if kind == _DATA:
                    self._note_payload(len(content))
                    plain[filled : filled + len(content)] = content
                    filled += len(content)
                else:
                    self._take_control(content, kind)
        finally:
            # The rest of the bytes is copied, because the caller can reuse its buffer.
            self._incoming = memoryview(bytes(data[position:]))
        return filled

    def _check_header(self, beginning: bytes, length: int) -> None:
        if beginning != b"\x17\x03\x03":
            raise self._fail(_UNEXPECTED_MESSAGE, "a record that is not encrypted")
        if length > _MOST_CIPHERTEXT:
            raise self._fail(_RECORD_OVERFLOW, "a record over the limit")
        if length <= TAG_BYTES:
            raise self._fail(_DECODE_ERROR, "a record without content")

    def _open(self, data: memoryview, position: int, stop: int) -> tuple[bytes, int]:
        header = bytes(data[position : position + HEADER_BYTES])
        try:
            content = self._receiving.open(header, data[position + HEADER_BYTES : stop])
        except InvalidTag:
            raise self._fail(_BAD_RECORD_MAC, "decryption failed or bad record mac") from None
        if len(content) > _MOST_INNER:
            raise self._fail(_RECORD_OVERFLOW, "a record's content is over the limit")
        if not content[-1]:
            content = content.rstrip(b"\0")
            if not content:
                raise self._fail(_UNEXPECTED_MESSAGE, "a record without content type")
        return content[:-1], content[-1]

    def _note_payload(self, size: int) -> None:
        if self._message:
            raise self._fail(_UNEXPECTED_MESSAGE, "a handshake message was interrupted")
        self._empty = 0 if size else self._empty + 1
        if self._empty > _MOST_EMPTY:
            raise self._fail(_UNEXPECTED_MESSAGE, "too many empty records")

    def _take_control(self, content: bytes, kind: int) -> None:
        if kind == _ALERT:
            self._alert(content)
        elif kind == _HANDSHAKE and content:
            self._message += content
            self._messages()
        else:
            raise self._fail(_UNEXPECTED_MESSAGE, f"a record of type {kind}")

    def _alert(self, content: bytes) -> None:
        if len(content) != 2:
            raise self._fail(_DECODE_ERROR, "an alert of wrong length")
        code = content[1]
        if code == _CLOSE_NOTIFY:
            self.peer_closed = True
        elif code == _USER_CANCELED:
            self._note_empty()
        else:
            self._closed = True  # no more records can be sent, not even close_notify
            text = _ALERTS.get(code, str(code))
            raise TlsError(_PEER_REASONS.get(code, TlsReason.OTHER), f"alert {text}", by_peer=True)

    def _note_empty(self) -> None:
        self._empty += 1
        if self._empty > _MOST_EMPTY:
            raise self._fail(_UNEXPECTED_MESSAGE, "too many records without payload")

    def _messages(self) -> None:
        message = self._message
        while len(message) >= 4:
            kind, length = message[0], int.from_bytes(message[1:4])
            if length > _MOST_MESSAGE:
                raise self._fail(_UNEXPECTED_MESSAGE, "a handshake message over the limit")
            if len(message) < 4 + length:
                break
            body = bytes(message[4 : 4 + length])
            del message[: 4 + length]
            if kind == _KEY_UPDATE:
                self._key_update(body)
            elif kind != _NEW_SESSION_TICKET:
                raise self._fail(_UNEXPECTED_MESSAGE, f"a handshake message of type {kind}")
        self._note_empty()

    def _key_update(self, body: bytes) -> None:
        if self._message:  # messages must not span key changes (RFC 8446, 5.1)
            raise self._fail(_UNEXPECTED_MESSAGE, "a key update that does not end its record")
        if len(body) != 1 or body[0] > 1:
            raise self._fail(
                _ILLEGAL_PARAMETER if len(body) == 1 else _DECODE_ERROR, "a key update is not readable"
            )
        self._receiving.update()
        if body[0] and not self._control:  # an update that was not sent yet answers this request, too
            self._update_sending(request=False)

    def _fail(self, alert: int, detail: str) -> TlsError:
        if not self._closed:
            self._closed = True
            self._control += self._sending.seal(bytes((_FATAL, alert)), _ALERT)
        return TlsError(TlsReason.OTHER, detail)

    # Sending

    def seal(self, plain: memoryview | bytes, out: memoryview) -> int:
        filled = len(self._control)
        if filled:
            out[:filled] = self._control
            self._control.clear()
        if len(plain) and self._closed:
            raise TlsError(TlsReason.OTHER, "the connection was closed")
        sending, most = self._sending, self.most_records
        for start in range(0, len(plain), RECORD_BYTES):
            if sending.number >= most:
                self._update_sending(request=False)
                update = bytes(self._control)
                self._control.clear()
                out[filled : filled + len(update)] = update
                filled += len(update)
            record = sending.seal(bytes(plain[start : start + RECORD_BYTES]), _DATA)
            out[filled : filled + len(record)] = record
            filled += len(record)
        return filled

    def update_keys(self, *, request: bool = False) -> None:
        """Queue a KeyUpdate, and encrypt with the next keys from then on. ``request`` is whether the peer must
        update its keys, too.
        """
        self._update_sending(request=request)

    def _update_sending(self, *, request: bool) -> None:
        if not self._closed:
            self._control += self._sending.seal(bytes((_KEY_UPDATE, 0, 0, 1, request)), _HANDSHAKE)
            self._sending.update()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._control += self._sending.seal(bytes((_WARNING, _CLOSE_NOTIFY)), _ALERT)
