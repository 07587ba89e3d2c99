"""Names in certificates, as Envoy's policies, matchers and access logs read them. Pure."""

from functools import lru_cache
from typing import Final

from cryptography import x509

from xds.model.facts import PeerCertificate
from ztunnel.envoy.secrets.verify import subject_alt_names

#: OpenSSL's short names of attributes; any other attribute is written as its OID and the DER of its value.
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


@lru_cache(maxsize=1024)  # a mesh's workloads come again and again
def distinguished_name(name: x509.Name) -> str:
    """Return a subject or issuer as OpenSSL writes it in the form of RFC 2253.

    It differs from ``rfc4514_string`` in the names of attributes (``emailAddress`` instead of its OID) and in
    bytes beyond ASCII, each of which is escaped. A policy that names a subject compares this text.
    """
    return ",".join("+".join(map(_attribute, rdn)) for rdn in reversed(name.rdns))


def peer_names(leaf: x509.Certificate, uri_sans: tuple[str, ...]) -> PeerCertificate:
    """Return the names of a peer's leaf certificate; ``uri_sans`` are those of its handshake."""
    try:
        dns = tuple(text for kind, text in subject_alt_names(leaf) if kind == "dns")
    except ValueError:
        dns = ()
    return PeerCertificate(uri_sans=uri_sans, dns_sans=dns, subject=distinguished_name(leaf.subject))


def _attribute(attribute: x509.NameAttribute[str | bytes]) -> str:
    oid = attribute.oid.dotted_string
    short, value = _SHORT_NAMES.get(oid), attribute.value
    if short is None or isinstance(value, bytes):
        return f"{short or oid}=#{_der(attribute).hex().upper()}"
    return f"{short}={_escaped(value.encode())}"


def _escaped(value: bytes) -> str:
    text = []
    for place, byte in enumerate(value):
        at_edge = (place == 0 and byte in b" #") or (place == len(value) - 1 and byte == 0x20)
        if byte in _ESCAPED or at_edge:
            text.append("\\" + chr(byte))
        else:
            text.append(chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:02X}")
    return "".join(text)


def _der(attribute: x509.NameAttribute[str | bytes]) -> bytes:
    """Return the DER of an attribute's value."""
    inside = x509.Name([attribute]).public_bytes()
    for _ in range(3):  # a name is a SEQUENCE of SETs of SEQUENCEs
        inside = _content(inside)[0]
    return _content(inside)[1]


def _content(der: bytes) -> tuple[bytes, bytes]:
    """Return the content of the first element, and what follows it."""
    start, length = 2, der[1]
    if length >= 0x80:
        start += length - 0x80
        length = int.from_bytes(der[2:start], "big")
    return der[start : start + length], der[start + length :]
