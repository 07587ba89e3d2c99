"""Many subscriptions of one type over one stream: the union to ask for, and who gets what arrives.

A server sends a resource once, when its name is first asked for. A subscription that comes later and asks
for a name another one has already gets it from here, so accepted resources are remembered while anybody
wants them (the bodies are the ones receivers keep for dumps, not copies).
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from xds.protocol.resource import Resource, Update
from xds.protocol.types import COMPLETE_TYPES

Key = TypeVar("Key", bound=Hashable)


class Interest(Generic[Key]):
    """Who wants what of one type."""

    def __init__(self, type_url: str) -> None:
        self.type_url = type_url
        self._wants: dict[Key, frozenset[str] | None] = {}
        self._known: dict[str, Resource] = {}
        self._version = ""

    def __bool__(self) -> bool:
        return bool(self._wants)

    def subscribers(self) -> tuple[Key, ...]:
        """Return everybody, in order of arrival."""
        return tuple(self._wants)

    def set(self, key: Key, names: Iterable[str] | None) -> None:
        """Add a subscriber or replace what it wants; ``None`` is all."""
        self._wants[key] = None if names is None else frozenset(names)

    def remove(self, key: Key) -> None:
        """Forget a subscriber."""
        self._wants.pop(key, None)

    def union(self) -> frozenset[str] | None:
        """Return what to ask the server for."""
        names: set[str] = set()
        for wanted in self._wants.values():
            if wanted is None:
                return None
            names |= wanted
        return frozenset(names)

    def forget_unwanted(self) -> None:
        """Drop what nobody wants; call when the server is told, not before.

        A subscription that is closed and opened again in between is served from here, since the server
        sees no change and sends nothing.
        """
        union = self.union()
        if union is not None:
            self._known = {name: resource for name, resource in self._known.items() if name in union}

    def known(self, key: Key) -> Update | None:
        """Return what is known of what ``key`` wants, None if nothing is."""
        if key not in self._wants:
            return None
        wanted = self._wants[key]
        resources = tuple(resource for name, resource in self._known.items() if wanted is None or name in wanted)
        return Update(type_url=self.type_url, version=self._version, resources=resources) if resources else None

    def split(self, update: Update) -> list[tuple[Key, Update]]:
        """Return each subscriber's part; those whom the update does not concern are left out."""
        parts: list[tuple[Key, Update]] = []
        for key, wanted in self._wants.items():
            part = update if wanted is None else _part(update, wanted)
            if wanted is None or part.complete or part.resources or part.removed:
                parts.append((key, part))
        return parts

    def accepted(self, part: Update) -> None:
        """Remember what a subscriber accepted."""
        self._version = part.version
        for name in part.removed:
            self._known.pop(name, None)
        if part.complete and self.type_url in COMPLETE_TYPES:
            self._known.clear()
        self._known.update((resource.name, resource) for resource in part.resources)


def _part(update: Update, wanted: frozenset[str]) -> Update:
    return Update(
        type_url=update.type_url,
        version=update.version,
        resources=tuple(resource for resource in update.resources if resource.name in wanted),
        removed=tuple(name for name in update.removed if name in wanted),
        complete=update.complete,
    )
