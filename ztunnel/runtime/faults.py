"""Reading descriptions that people write, so that all faults are reported together, each with its place. Pure."""

from collections.abc import Mapping
from typing import Any


class Faults(Exception):
    """Something people wrote cannot be used.

    Attributes:
        faults: one line each, with its place.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "; ".join(self.faults)


class Reader:
    """Takes values out of a loaded document; what is wrong is noted, and something harmless returned.

    Attributes:
        faults: so far.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []

    def fault(self, place: str, reason: str) -> None:
        """Note what is wrong."""
        self.faults.append(f"{place}: {reason}")

    def mapping(self, value: object, place: str, known: tuple[str, ...] | None) -> Mapping[str, Any]:
        """A mapping, empty when there is none; ``known``: its keys, None: any."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.fault(place, f"must be a mapping, not {value!r}")
            return {}
        if known is not None:
            for key in value:
                if key not in known:
                    self.fault(f"{place}.{key}", f"unknown; known are {', '.join(known)}")
        return value

    def items(self, entry: Mapping[str, Any], key: str, place: str) -> list[Any]:
        """A list, empty when there is none."""
        value = entry.get(key, [])
        if not isinstance(value, list):
            self.fault(f"{place}.{key}", f"must be a list, not {value!r}")
            return []
        return value

    def texts(self, entry: Mapping[str, Any], key: str, place: str) -> tuple[str, ...]:
        """A list of texts."""
        values = self.items(entry, key, place)
        for value in values:
            if not isinstance(value, str) or not value:
                self.fault(f"{place}.{key}", f"must be texts, not {value!r}")
        return tuple(str(value) for value in values)

    def text(self, entry: Mapping[str, Any], key: str, place: str, default: str) -> str:
        """A text."""
        value = entry.get(key, default)
        if not isinstance(value, str):
            self.fault(f"{place}.{key}".lstrip("."), f"must be text, not {value!r}")
            return default
        return value

    def flag(self, entry: Mapping[str, Any], key: str, place: str, *, default: bool) -> bool:
        """True or false."""
        value = entry.get(key, default)
        if not isinstance(value, bool):
            self.fault(f"{place}.{key}", f"must be true or false, not {value!r}")
            return default
        return value

    def choice(self, entry: Mapping[str, Any], key: str, place: str, options: tuple[str, ...]) -> str:
        """One of ``options``, the first unless given."""
        value = entry.get(key, options[0])
        if value not in options:
            self.fault(f"{place}.{key}".lstrip("."), f"must be one of {', '.join(options)}, not {value!r}")
            return options[0]
        return str(value)

    def port(self, value: object, place: str) -> int:
        """A port."""
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65536:
            self.fault(place, f"must be a port, 1 to 65535, not {value!r}")
            return 1
        return value

    def plain_name(self, name: str, place: str) -> None:
        """A name that may become part of others."""
        # Names become parts of identities, which are paths, and of cluster names, which are split at underscores.
        if not name or not all(char.isalnum() or char in "-." for char in name) or not name.isascii():
            self.fault(place, f"must be letters, digits, '-' and '.', not {name!r}")
