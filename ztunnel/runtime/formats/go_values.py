"""Parses values like Go's standard library, for texts that users of Istio, Calico and Kubernetes write. Pure.

Each parser raises ValueError with a reason that can follow the name of a flag, annotation or field.
"""

import re
from typing import Final

from xds.model.address import IpNetwork, parse_network

_TRUE: Final = frozenset(["1", "t", "T", "TRUE", "true", "True"])
_FALSE: Final = frozenset(["0", "f", "F", "FALSE", "false", "False"])
_UNITS_NS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # U+00B5, the micro sign
    "μs": 1_000,  # U+03BC, the Greek letter
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_PIECE: Final = re.compile(r"([0-9]*)(?:\.([0-9]*))?([^0-9.]+)", re.ASCII)
_MOST_NS: Final = 2**63 - 1


def parse_bool(text: str) -> bool:
    """Parse a boolean like ``strconv.ParseBool``.

    Raises:
        ValueError: the text has another form.
    """
    if text not in _TRUE | _FALSE:
        raise ValueError(f"must be true or false, not {text!r}")
    return text in _TRUE


def parse_cidr(text: str) -> IpNetwork:
    """Parse a network like ``net.ParseCIDR``, and clear the bits behind its prefix.

    Raises:
        ValueError: the text is not an address with a prefix length. Netmasks are refused.
    """
    network = parse_network(text) if "/" in text else None
    if network is None:
        raise ValueError(f"{text!r} is no IP range such as 10.0.0.0/8")
    return network


def parse_cidr_or_address(text: str) -> IpNetwork:
    """Parse a network like :func:`parse_cidr`. A single address becomes a network of one address.

    Raises:
        ValueError: the text is neither a network nor an address.
    """
    if "/" in text:
        return parse_cidr(text)
    network = parse_network(text)
    if network is None:
        raise ValueError(f"{text!r} is no IP range such as 10.0.0.0/8, nor an address")
    return network


def parse_duration_s(text: str) -> float:
    """Parse a duration to seconds, like ``time.ParseDuration``.

    Raises:
        ValueError: the text is not a duration, or more than 292 years.
    """
    sign, rest = (text[:1], text[1:]) if text[:1] in ("+", "-") else ("", text)
    total = end = 0
    while match := _PIECE.match(rest, end):
        whole, fraction, unit = match.groups()
        if unit not in _UNITS_NS or not (whole or fraction):
            break
        scale = _UNITS_NS[unit]
        total += int(whole or 0) * scale + int(fraction or 0) * scale // 10 ** len(fraction or "")
        end = match.end()
    if rest != "0" and (not end or end != len(rest) or total > _MOST_NS + (sign == "-")):
        raise ValueError(f"{text!r} is no duration such as 5s, 500ms or 1m30s")
    return (-total if sign == "-" else total) / 1e9
