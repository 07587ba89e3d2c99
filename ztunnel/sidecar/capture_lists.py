"""Lists of captured traffic, from the flags of ``ztunnel init`` and from annotations. Pure.

Each reader returns the values, or raises ValueError with a reason that can follow the name of a flag or annotation
in a message.
"""

from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network
from typing import Final

from xds.digits import whole_number
from ztunnel.runtime.formats.go_values import parse_cidr_or_address

ALL: Final = "*"
ALL_DEVICES: Final = "+"
#: The longest name of a network device: IFNAMSIZ without its zero byte (linux/if.h).
_LONGEST_INTERFACE: Final = 15


def ports(text: str) -> tuple[int, ...]:
    """Return a list of ports in the given order, without duplicates. An empty text is an empty list.

    Raises:
        ValueError: an entry is not a port from 1 to 65535.
    """
    found = []
    for part in _parts(text):
        number = whole_number(part, 65535)
        if not number:
            raise ValueError(f"{part!r} is no port from 1 to 65535")
        found.append(number)
    return tuple(dict.fromkeys(found))


def all_or_ports(text: str) -> tuple[int, ...] | None:
    """Return ports, or ``None`` for ``*``.

    Raises:
        ValueError: see :func:`ports`.
    """
    return None if _is_all(text, "ports") else ports(text)


def networks(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    """Return networks, with the bits after their prefix cleared. A single address becomes a network of one
    address.

    Raises:
        ValueError: an entry has another form.
    """
    return tuple(dict.fromkeys(map(parse_cidr_or_address, _parts(text))))


def all_or_networks(text: str) -> tuple[IPv4Network | IPv6Network, ...] | None:
    """Return networks, or ``None`` for ``*``.

    Raises:
        ValueError: see :func:`networks`.
    """
    return None if _is_all(text, "ranges") else networks(text)


def interfaces(text: str) -> tuple[str, ...]:
    """Return names of devices. A ``+`` at the end of a name matches any further characters, like in iptables.

    Raises:
        ValueError: a name that Linux does not allow for devices, or ``+`` alone.
    """
    found = tuple(dict.fromkeys(_parts(text)))
    for name in found:
        fits = len(name.encode()) <= _LONGEST_INTERFACE and name.isascii() and name.isprintable()
        if not fits or "/" in name or " " in name or '"' in name or name in (".", "..", ALL_DEVICES):
            raise ValueError(f"{name!r} is no name of a network interface")
    return found


def _is_all(text: str, what: str) -> bool:
    parts = tuple(_parts(text))
    if ALL in parts and len(parts) > 1:
        raise ValueError(f"{text!r} mixes * with {what}; * stands alone")
    return parts == (ALL,)


def _parts(text: str) -> Iterator[str]:
    for part in text.split(","):
        if stripped := part.strip():
            yield stripped
