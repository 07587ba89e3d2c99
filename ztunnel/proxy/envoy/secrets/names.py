"""Names in certificates, as read by Envoy's policies, matchers and access logs. Pure."""

from functools import lru_cache
from typing import Final

from cryptography import x509

from xds.model.facts import PeerCertificate
from ztunnel.proxy.envoy.secrets.verify import subject_alt_names

#: OpenSSL's short names of subject attributes. Other attributes are written as OID and DER-encoded value.
_SHORT_NAMES: Final = {
    "0.9.2342.19200300.100.1.1": "UID",
    "0.9.2342.19200300.100.1.25": "DC",
    "1.2.840.113549.1.9.1": "emailAddress",
    "1.2.840.113549.1.9.2": "unstructuredName",
    "1.2.840.113549.1.9.8": "unstructuredAddress",
    "2.5.4.3": "CN",
    "2.5.4.4": "SN",
    "2.5.4.5": "serialNumber",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "street",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "2.5.4.12": "title",
    "2.5.4.13": "description",
    "2.5.4.15": "businessCategory",
    "2.5.4.17": "postalCode",
    "2.5.4.18": "postOfficeBox",
    "2.5.4.20": "telephoneNumber",
    "2.5.4.41": "name",
    "2.5.4.42": "GN",
    "2.5.4.43": "initials",
    "2.5.4.44": "generationQualifier",
    "2.5.4.45": "x500UniqueIdentifier",
    "2.5.4.46": "dnQualifier",
    "2.5.4.65": "pseudonym",
    "2.5.4.72": "role",
}
_ESCAPED: Final = frozenset(b',+"\\<>;')
#: The Python codec of each ASN.1 string type. A T61String is read as Latin-1, like in OpenSSL, because old
#: authorities wrote Latin-1 there.
_STRINGS: Final = {
    12: "utf-8",
    18: "ascii",
    19: "ascii",
    20: "latin-1",
    22: "ascii",
    26: "ascii",
    28: "utf-32-be",
    30: "utf-16-be",
}
_VERSION: Final = 0xA0


@lru_cache(maxsize=1024)  # the same workloads connect repeatedly
def subject_of(certificate: x509.Certificate) -> str:
    """Return the subject as OpenSSL writes it in the form of RFC 2253.

    Unlike ``rfc4514_string``, this function uses OpenSSL's attribute names (``emailAddress`` instead of its OID),
    escapes each non-ASCII byte, and never fails. Policies compare subjects with this text.
    """
    return distinguished_name(_field(certificate, 4))


@lru_cache(maxsize=1024)
def issuer_of(certificate: x509.Certificate) -> str:
    """Return a certificate's issuer, written like the subject in :func:`subject_of`."""
    return distinguished_name(_field(certificate, 2))


def peer_names(leaf: x509.Certificate, uri_sans: tuple[str, ...]) -> PeerCertificate:
    """Return the names of a peer's leaf certificate. Never fails.

    Args:
        leaf: the certificate.
        uri_sans: the URI names found by the handshake.
    """
    try:
        dns = tuple(text for kind, text in subject_alt_names(leaf) if kind == "dns")
    except ValueError:
        dns = ()
    return PeerCertificate(uri_sans=uri_sans, dns_sans=dns, subject=subject_of(leaf))


def _field(certificate: x509.Certificate, number: int) -> bytes:
    """Return the DER of a field in TBSCertificate. ``number`` counts fields from the serial number (0)."""
    (signed,) = _elements(certificate.tbs_certificate_bytes)
    fields = _elements(signed[1])
    if fields[0][0] == _VERSION:
        del fields[0]
    return fields[number][1]


def distinguished_name(rdns: bytes) -> str:
    """Return a distinguished name as text, in the form of :func:`subject_of`. ``rdns`` is the DER of its parts."""
    texts = []
    for _, rdn in reversed(_elements(rdns)):
        pairs = [_elements(attribute) for _, attribute in _elements(rdn)]
        texts.append("+".join(_attribute(oid, tag, value) for (_, oid), (tag, value) in pairs))
    return ",".join(texts)


def _attribute(oid: bytes, tag: int, value: bytes) -> str:
    dotted = _dotted(oid)
    short = _SHORT_NAMES.get(dotted)
    if short is not None and tag in _STRINGS:
        try:
            return f"{short}={_escaped(value.decode(_STRINGS[tag]).encode())}"
        except UnicodeError:
            pass
    return f"{short or dotted}=#{(bytes((tag,)) + _length(value) + value).hex().upper()}"


def _escaped(value: bytes) -> str:
    text = []
    for place, byte in enumerate(value):
        at_edge = (place == 0 and byte in b" #") or (place == len(value) - 1 and byte == 0x20)
        if byte in _ESCAPED or at_edge:
            text.append("\\" + chr(byte))
        else:
            text.append(chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:02X}")
    return "".join(text)


def _dotted(oid: bytes) -> str:
    numbers, value = [], 0
    for byte in oid:
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            numbers.append(value)
            value = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:])))


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Return the tag and content of each DER element. The library that read the certificate has checked the
    encoding.
    """
    found, at = [], 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length >= 0x80:
            size = length - 0x80
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        found.append((tag, der[at : at + length]))
        at += length
    return found


def _length(content: bytes) -> bytes:
    number = len(content)
    if number < 0x80:
        return bytes((number,))
    size = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return bytes((0x80 + len(size),)) + size
