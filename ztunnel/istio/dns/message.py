"""DNS messages as bytes (RFC 1035, 6891): what is asked, our answers, and passing on those of others. Pure.

Our own answers are few kinds of records and built here: a query costs 25 microseconds, with dnspython it took 130.
What is passed on stays the bytes it was, so that records of any type and class arrive as the server sent them;
only the header, the question's spelling and the times to live are changed.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import dns.exception
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype

from ztunnel.istio.dns.answer import IpAddress

HEADER_BYTES: Final = 12
LEAST_PAYLOAD: Final = 512
MOST_BYTES: Final = 65_535

_QR, _AA, _TC, _RD, _RA, _CD = 0x8000, 0x0400, 0x0200, 0x0100, 0x0080, 0x0010
_OPCODE: Final = 0x7800
_RCODE: Final = 0x000F
_CNAME, _SOA, _AAAA, _OPT = 5, 6, 28, 41
_IN: Final = 1
#: A name that is the one in the question: a pointer to behind the header.
_TO_QUESTION: Final = b"\xc0\x0c"
_NO_ERROR, _NXDOMAIN = 0, 3
_DO: Final = 0x8000
_LONGEST_TTL_S: Final = 86_400
_MOST_LABELS: Final = 128  # of a name


class Malformed(Exception):
    """Bytes that are no DNS message, or not one question.

    Attributes:
        response: what to say, ``None``: nothing.
    """

    def __init__(self, reason: str, response: bytes | None = None) -> None:
        super().__init__(reason)
        self.response = response


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One request.

    Attributes:
        wire: as it came.
        name: asked for, with its final dot, as spelled; empty for what is no question (opcodes other than QUERY).
        kind: the record type's number; ``type_name`` its name, ``UNKNOWN`` for numbers that have none: it becomes
            a label of metrics, of which clients must not make any number.
        udp_bytes: what the client takes by UDP.
        edns: whether it has an OPT record; ``edns_options`` whether there is something in it.
    """

    wire: bytes
    opcode: int
    name: str = ""
    kind: int = 0
    type_name: str = ""
    rdclass: int = 1
    question: bytes = b""
    udp_bytes: int = LEAST_PAYLOAD
    edns: bool = False
    edns_version: int = 0
    edns_flags: int = 0
    edns_options: bool = False

    @property
    def id(self) -> int:
        """Of the message."""
        return int.from_bytes(self.wire[:2], "big")

    @property
    def is_question(self) -> bool:
        """Whether something is looked up."""
        return self.opcode == 0

    @property
    def wants_address(self) -> bool:
        """A or AAAA, of the Internet."""
        return self.is_question and self.rdclass == 1 and self.kind in (1, 28)

    @property
    def cache_key(self) -> tuple[object, ...] | None:
        """What answers may be remembered under; ``None``: not at all."""
        if not self.is_question or self.edns_options:
            return None
        flags = int.from_bytes(self.wire[2:4], "big") & (_RD | _CD)
        return (self.name.lower(), self.kind, self.rdclass, flags, self.edns, bool(self.edns_flags & _DO))


def read_query(wire: bytes) -> Query:
    """Read a request.

    Raises:
        Malformed: with the FORMERR that is due, if there is anything to answer.
    """
    if len(wire) < HEADER_BYTES:
        raise Malformed("shorter than a header")
    flags, questions, answers, authority, additional = struct.unpack_from(">5H", wire, 2)
    opcode = (flags & _OPCODE) >> 11
    if flags & _QR:
        # Never answered: with a source address that is ours, two servers would answer each other for ever.
        raise Malformed("a response")
    if opcode != 0:
        return Query(wire=wire, opcode=opcode, type_name=f"OPCODE{opcode}")
    try:
        if questions != 1:
            raise ValueError(f"{questions} questions")
        name, position = _read_name(wire, HEADER_BYTES)
        kind, rdclass = struct.unpack_from(">2H", wire, position)
        end = position + 4
        records = list(_records(wire, end, answers + authority + additional))
        options = [record for record in records if record.kind == _OPT]
        if len(options) > 1:
            raise ValueError("several OPT records")
    except (ValueError, struct.error, IndexError) as error:
        raise Malformed(str(error), _error(wire, dns.rcode.FORMERR)) from None
    opt = options[0] if options else None
    return Query(
        wire=wire,
        opcode=opcode,
        name=name,
        kind=kind,
        type_name=_type_name(kind),
        rdclass=rdclass,
        question=wire[HEADER_BYTES:end],
        udp_bytes=max(opt.rdclass, LEAST_PAYLOAD) if opt is not None else LEAST_PAYLOAD,
        edns=opt is not None,
        edns_version=opt.ttl_s >> 16 & 0xFF if opt is not None else 0,
        edns_flags=opt.ttl_s & 0xFFFF if opt is not None else 0,
        edns_options=opt is not None and opt.length > 0,
    )


@lru_cache(maxsize=1024)
def _type_name(kind: int) -> str:
    name = dns.rdatatype.to_text(dns.rdatatype.RdataType.make(kind))
    return "UNKNOWN" if name.startswith("TYPE") else name


def local_answer(
    query: Query, addresses: Sequence[IpAddress], canonical: str | None, ttl_s: int, limit: int
) -> bytes:
    """Our own answer: the addresses, under ``canonical`` if the question's name is another name for that.

    If it is longer than ``limit`` it holds as many as fit, and says that it is cut: there are clients that never
    ask again by TCP. Addresses go out in the order given, and must be of the type asked for.
    """
    alias = b""
    owner = _TO_QUESTION
    if canonical is not None:
        target = dns.name.from_text(canonical).to_digestable()
        alias = _TO_QUESTION + struct.pack(">HHIH", _CNAME, _IN, ttl_s, len(target)) + target
        # What follows is named like the target, which begins behind the alias's own name and fixed fields.
        owner = (0xC000 | HEADER_BYTES + len(query.question) + 12).to_bytes(2, "big")
    fixed = owner + struct.pack(">HHIH", query.kind, _IN, ttl_s, 16 if query.kind == _AAAA else 4)
    records = [fixed + address.packed for address in addresses]
    opt = _opt(query)
    room = limit - HEADER_BYTES - len(query.question) - len(alias) - len(opt)
    fitting_records = records[: max(0, room // (len(fixed) + (16 if query.kind == _AAAA else 4)))]
    flags = _QR | _AA | _RA | (_TC if len(fitting_records) < len(records) else 0)
    answers = len(fitting_records) + (canonical is not None)
    return b"".join((_header(query, flags, answers), query.question, alias, *fitting_records, opt))


def server_failure(query: Query) -> bytes:
    """SERVFAIL."""
    if not query.is_question:
        return _error(query.wire, dns.rcode.SERVFAIL)
    return _header(query, _QR | _RA | int(dns.rcode.SERVFAIL), 0) + query.question + _opt(query)


def _header(query: Query, flags: int, answers: int) -> bytes:
    """Of a response with its question; recursion desired and checking disabled as asked."""
    asked = int.from_bytes(query.wire[2:4], "big")
    flags |= asked & (_RD | _CD)
    return query.wire[:2] + struct.pack(">5H", flags, 1, answers, 0, 1 if query.edns else 0)


def _opt(query: Query) -> bytes:
    """The OPT record that answers the query's, which says what the client takes."""
    if not query.edns:
        return b""
    return b"\x00" + struct.pack(
        ">HHBBHH", _OPT, query.udp_bytes, 0, query.edns_version, query.edns_flags & _DO, 0
    )


def _error(wire: bytes, rcode: int) -> bytes:
    asked = int.from_bytes(wire[2:4], "big")
    flags = _QR | _RA | (asked & (_OPCODE | _RD)) | int(rcode)
    return wire[:2] + struct.pack(">5H", flags, 0, 0, 0, 0)


def fitting(query: Query, response: bytes, limit: int) -> bytes:
    """The response, or if it is longer than ``limit`` its header and question, marked as cut."""
    if len(response) <= limit:
        return response
    if not query.is_question:
        return response[:2] + struct.pack(">5H", int.from_bytes(response[2:4], "big") | _TC, 0, 0, 0, 0)
    flags = int.from_bytes(response[2:4], "big") | _TC
    opt = _opt(query)
    return response[:2] + struct.pack(">5H", flags, 1, 0, 0, 1 if opt else 0) + query.question + opt


def with_id(wire: bytes, number: int) -> bytes:
    """The same message under another id."""
    return number.to_bytes(2, "big") + wire[2:]


def is_answer_to(query: Query, number: int, response: bytes) -> bool:
    """Whether bytes from a server answer what it was sent as ``number``; forgeries mostly do not."""
    if len(response) < HEADER_BYTES or int.from_bytes(response[:2], "big") != number:
        return False
    flags, questions = struct.unpack_from(">2H", response, 2)
    if not flags & _QR or (flags & _OPCODE) >> 11 != query.opcode:
        return False
    if not query.is_question:
        return True
    # A server that refuses may leave the question out; nothing else may.
    if questions == 0:
        return flags & _RCODE not in (_NO_ERROR, _NXDOMAIN)
    return questions == 1 and _repeats(query, response)


def _repeats(query: Query, response: bytes) -> bool:
    """Whether a response is about the question; some servers spell the name their way."""
    end = HEADER_BYTES + len(query.question)
    named, asked = response[HEADER_BYTES : end - 4], query.question[:-4]
    return named.lower() == asked.lower() and response[end - 4 : end] == query.question[-4:]


def rcode(response: bytes) -> int:
    """Of the header."""
    return response[3] & _RCODE


def is_cut(response: bytes) -> bool:
    """Whether it says that it was too long."""
    return bool(response[2] & _TC >> 8)


def passed_on(query: Query, response: bytes) -> bytes:
    """A server's answer as ours to the client: its id and spelling, no authority of ours, recursion available."""
    flags = int.from_bytes(response[2:4], "big")
    if not query.is_question:
        return query.wire[:2] + response[2:]
    asked = int.from_bytes(query.wire[2:4], "big")
    flags = flags & ~(_AA | _RD) | _RA | (asked & _RD)
    rest = response[4:]
    if int.from_bytes(response[4:6], "big") == 1:
        rest = response[4:HEADER_BYTES] + query.question + response[HEADER_BYTES + len(query.question) :]
    return query.wire[:2] + flags.to_bytes(2, "big") + rest


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer that may be given again.

    Attributes:
        wire: as it came.
        ttls: offset and value of each time to live in it.
        lifetime_s: how long it may be given.
        answers: records in the answer section.
    """

    wire: bytes
    ttls: Sequence[tuple[int, int]]
    lifetime_s: int

    def aged(self, query: Query, age_s: float) -> bytes:
        """For another query of the same cache key: times to live lowered, the name spelled as asked."""
        message = bytearray(self.wire)
        for offset, ttl_s in self.ttls:
            struct.pack_into(">I", message, offset, max(0, ttl_s - int(age_s)))
        return passed_on(query, bytes(message))


def keep(query: Query, response: bytes) -> Kept | None:
    """What of a response may be remembered, ``None``: nothing (RFC 2308 for what does not exist)."""
    code = rcode(response)
    if query.cache_key is None or is_cut(response) or code not in (_NO_ERROR, _NXDOMAIN):
        return None
    _, questions, answers, authority, additional = struct.unpack_from(">5H", response, 2)
    start = HEADER_BYTES + len(query.question)
    if questions != 1 or not _repeats(query, response):
        return None
    try:
        records = list(_records(response, start, answers + authority + additional))
        lifetimes = [record.ttl_s for record in records[:answers]]
        if code == _NXDOMAIN or not any(record.kind == query.kind for record in records[:answers]):
            soa = [record for record in records[answers : answers + authority] if record.kind == _SOA]
            if not soa:
                return None
            lifetimes += [soa[0].ttl_s, *struct.unpack_from(">I", response, soa[0].end - 4)]
    except (ValueError, struct.error, IndexError):
        return None  # it is the client's to judge
    lifetime_s = min(*lifetimes, _LONGEST_TTL_S)
    if lifetime_s <= 0:
        return None
    ttls = [(record.ttl_offset, record.ttl_s) for record in records if record.kind != _OPT]
    return Kept(response, ttls, lifetime_s)


def answer_count(response: bytes) -> int:
    """Records in the answer section."""
    return int.from_bytes(response[6:8], "big") if len(response) >= HEADER_BYTES else 0


def first_address(response: bytes) -> str | None:
    """Return the address of the first A or AAAA record of class IN, ``None`` without one."""
    try:
        message = dns.message.from_wire(response, ignore_trailing=True)
    except (dns.exception.DNSException, ValueError):
        return None
    for records in message.answer:
        if records.rdclass == dns.rdataclass.IN and records.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA):
            for record in records:
                return str(record.address)
    return None


def address_query(name: str, *, ipv6: bool, number: int) -> bytes:
    """A question for addresses.

    Raises:
        ValueError: no DNS name.
    """
    try:
        message = dns.message.make_query(name, "AAAA" if ipv6 else "A", id=number)
    except dns.exception.DNSException as error:
        raise ValueError(f"no DNS name: {name!r}") from error
    return message.to_wire()


@dataclass(frozen=True, slots=True)
class _Record:
    kind: int
    rdclass: int
    ttl_s: int
    ttl_offset: int
    length: int
    end: int


def _records(wire: bytes, position: int, count: int) -> Iterable[_Record]:
    """The records from a position on.

    Raises:
        ValueError, IndexError, struct.error: they do not end inside the message.
    """
    for _ in range(count):
        position = _skip_name(wire, position)
        kind, rdclass, ttl_s, length = struct.unpack_from(">HHIH", wire, position)
        end = position + 10 + length
        if end > len(wire):
            raise ValueError("a record longer than its message")
        yield _Record(kind, rdclass, ttl_s, position + 4, length, end)
        position = end


def _skip_name(wire: bytes, position: int) -> int:
    while True:
        length = wire[position]
        if length >= 0xC0:
            return position + 2
        if length > 63:
            raise ValueError("a label of an unknown kind")
        position += 1 + length
        if length == 0:
            return position


def _read_name(wire: bytes, position: int) -> tuple[str, int]:
    """The question's name in DNS's text form, and where it ends; nothing stands before it to point to."""
    end = _skip_name(wire, position)
    labels = []
    total = 0
    while wire[position]:
        length = wire[position]
        if length >= 0xC0:
            raise ValueError("a question's name must not be compressed")
        labels.append(wire[position + 1 : position + 1 + length])
        position += 1 + length
        total += 1 + length
    if total > 254 or len(labels) > _MOST_LABELS:
        raise ValueError("a name longer than 255 bytes")
    return dns.name.Name([*labels, b""]).to_text(), end
