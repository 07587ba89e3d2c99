"""Finds parts of a ``config_dump`` of either dialect by name, for ``ztunnel config [PART [NAME]]``. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ztunnel.runtime.formats.entries import names_of

_MOST_TOLD: Final = 12


class NoSuchPart(ValueError):
    """No part of the dump, or no entry of the part, has this name; the text lists the existing names."""


def parts_of(dump: Any) -> Mapping[str, Any]:
    """Return the parts of a dump by name. In Envoy's dialect, for example, ``listeners`` is the name of
    ListenersConfigDump.

    Raises:
        NoSuchPart: the value is not a dump.
    """
    if not isinstance(dump, Mapping):
        raise NoSuchPart("not a config_dump: not an object")
    sections = dump.get("configs")
    if not isinstance(sections, list):
        return dump
    found = {}
    for section in (each for each in sections if isinstance(each, Mapping)):
        kind = str(section.get("@type", "")).rpartition(".")[2].removesuffix("ConfigDump")
        found[kind.lower()] = section
    return found


def part(dump: Any, name: str, entry: str = "") -> Any:
    """Return a part of a dump. With ``entry``, return only the value of this key, or the list entries with this
    name.

    Raises:
        NoSuchPart: the part or entry does not exist.
    """
    parts = parts_of(dump)
    if name not in parts:
        raise NoSuchPart(f"no part {name!r}; there are {', '.join(parts) or 'none'}")
    found = parts[name]
    if not entry:
        return found
    if isinstance(found, Mapping) and entry in found:
        return found[entry]
    listed = list(_entries(found))
    matching = [each for each in listed if entry in names_of(each)]
    if matching:
        return matching
    known = sorted(found) if isinstance(found, Mapping) and not listed else [_called(each) for each in listed]
    told = ", ".join(known[:_MOST_TOLD]) + (", ..." if len(known) > _MOST_TOLD else "")
    raise NoSuchPart(f"{name} has no {entry!r}; there are {told or 'none'}")


def _entries(found: Any) -> Iterator[Any]:
    """Yield the entries of a part, which is a list, or an Envoy section with several lists."""
    if isinstance(found, list):
        yield from found
    elif isinstance(found, Mapping):
        for value in found.values():
            if isinstance(value, list):
                yield from (each for each in value if isinstance(each, Mapping))


def _called(entry: Any) -> str:
    return next(iter(names_of(entry)), "one without a name")
