"""Reads descriptions that operators write, and reports all faults together, each with its place. Pure."""

import json
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final

from xds.errors import ConfigError
from xds.proto.json import load

#: The longest name of a network interface (``IFNAMSIZ`` without the final NUL).
INTERFACE_BYTES: Final = 15


class Faults(Exception):
    """A description is unusable; this lists its faults.

    Attributes:
        faults: one line each, beginning with its place.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "; ".join(self.faults)


def _but(value: object) -> str:
    """Return the end of an error message about a wrong value: the value itself, as written."""
    if value is None:
        return ", and is missing"
    return f", not {value!r}" if isinstance(value, str) else f", not {json.dumps(value, default=str)}"


class ConfigReader:
    """Returns values of a loaded document. For a faulty value it records the fault and returns a harmless value.

    Attributes:
        faults: the faults recorded so far, each beginning with its place.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []

    def fault(self, place: str, reason: str) -> None:
        self.faults.append(f"{place}: {reason}")

    def document(self, text: str, known: tuple[str, ...]) -> Mapping[str, Any]:
        """Load a JSON or YAML document, which must be a mapping with ``known`` keys, or empty."""
        try:
            loaded = load(text)
        except ConfigError as error:
            self.fault("file", str(error))
            return {}
        return self.mapping(loaded, "file", known)

    def mapping(self, value: object, place: str, known: tuple[str, ...] | None) -> Mapping[str, Any]:
        """Return a mapping. If it is missing, return an empty one. ``known`` lists its valid keys, or is None to
        permit any key.
        """
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.fault(place, f"must be a mapping{_but(value)}")
            return {}
        if known is not None:
            for key in value:
                if key not in known:
                    self.fault(f"{place}.{key}", f"unknown; known are {', '.join(known)}")
        return value

    def items(self, entry: Mapping[str, Any], key: str, place: str) -> list[Any]:
        """Return a list, empty if it is missing."""
        value = entry.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            self.fault(f"{place}.{key}", f"must be a list{_but(value)}")
            return []
        return value

    def texts(self, entry: Mapping[str, Any], key: str, place: str) -> tuple[str, ...]:
        """Return a list of non-empty texts."""
        values = self.items(entry, key, place)
        for value in values:
            if not isinstance(value, str) or not value:
                self.fault(f"{place}.{key}", f"must be texts{_but(value)}")
        return tuple(str(value) for value in values)

    def text(self, entry: Mapping[str, Any], key: str, place: str, default: str) -> str:
        value = entry.get(key, default)
        if not isinstance(value, str):
            self.fault(f"{place}.{key}".lstrip("."), f"must be text{_but(value)}")
            return default
        return value

    def flag(self, entry: Mapping[str, Any], key: str, place: str, *, default: bool) -> bool:
        """Return true or false."""
        value = entry.get(key, default)
        if not isinstance(value, bool):
            self.fault(f"{place}.{key}", f"must be true or false{_but(value)}")
            return default
        return value

    def choice(self, entry: Mapping[str, Any], key: str, place: str, options: tuple[str, ...]) -> str:
        """Return one of ``options``. The first one is the default."""
        value = entry.get(key, options[0])
        if value not in options:
            self.fault(f"{place}.{key}".lstrip("."), f"must be one of {', '.join(options)}{_but(value)}")
            return options[0]
        return str(value)

    def port(self, value: object, place: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65536:
            self.fault(place, f"must be a port, 1 to 65535{_but(value)}")
            return 1
        return value

    def addresses(self, values: object, place: str) -> tuple[IPv4Address | IPv6Address, ...]:
        """Return a list of IP addresses, which must have at least one."""
        if not isinstance(values, list | tuple) or not values:
            self.fault(place, f"must be a list of IP addresses{_but(values)}")
            return ()
        found = []
        for value in values:
            try:
                found.append(ip_address(value if isinstance(value, str) else ""))
            except ValueError:
                self.fault(place, f"must be IP addresses{_but(value)}")
        return tuple(found)

    def interface(self, value: object, place: str) -> str:
        """Return the name of a network interface."""
        name = value if isinstance(value, str) else ""
        if (
            not 0 < len(name.encode()) <= INTERFACE_BYTES
            or name in (".", "..")
            or any(char in "/:\0" or char.isspace() for char in name)
        ):
            self.fault(place, f"must be the name of an interface{_but(value)}")
        return name

    def namespace(self, value: object, place: str) -> str | None:
        """Return a network namespace as a name, a path or a process id, or None if it is missing."""
        if value is None:
            return None
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value):
            return str(value)
        self.fault(place, f"must be a name, a path or a process id{_but(value)}")
        return None

    def plain_name(self, name: str, place: str) -> None:
        """Record a fault unless a name has only letters, digits, '-' and '.'.

        Names become parts of identities, with slashes as separators, and of cluster names, with underscores as
        separators.
        """
        if not name or not all(char.isalnum() or char in "-." for char in name) or not name.isascii():
            self.fault(place, f"must be letters, digits, '-' and '.'{_but(name)}")
