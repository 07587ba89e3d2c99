"""Combines many subscriptions of one type on one stream: the union of the names to request, and the receivers of
each resource.

A server sends a resource once, when its name is first requested. A later subscription to the same name gets the
resource from this class. So accepted resources are kept while a subscription includes them. Their bodies are
shared with the receivers' dumps, not copied.

A mesh can have a subscription per cluster. So the cost of each operation except :meth:`Interest.union` is
proportional to the number of names that it affects.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from xds.protocol.resource import Resource, Update
from xds.protocol.types import COMPLETE_TYPES

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Change:
    """The names to add to and to remove from the requested names, since the last request was sent.

    Attributes:
        everything: True if the wildcard was added or removed. :meth:`Interest.union` returns the names requested
        now.
    """

    added: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    everything: bool = False

    def __bool__(self) -> bool:
        return bool(self.added or self.dropped or self.everything)


class Interest(Generic[Key]):
    """All subscriptions to one resource type on one stream, with the names that they request."""

    def __init__(self, type_url: str) -> None:
        self.type_url = type_url
        self._wants: dict[Key, frozenset[str] | None] = {}
        self._by_name: dict[str, dict[Key, None]] = {}
        self._all: dict[Key, None] = {}
        self._told: set[str] = set()
        self._told_all = False
        self._touched: set[str] = set()
        self._known: dict[str, Resource] = {}
        self._version = ""

    def __bool__(self) -> bool:
        return bool(self._wants)

    def __contains__(self, key: Key) -> bool:
        return key in self._wants

    def subscribers(self) -> tuple[Key, ...]:
        """Return all subscribers in order of arrival."""
        return tuple(self._wants)

    def set(self, key: Key, names: Iterable[str] | None) -> None:
        """Add a subscriber or replace its names. ``None`` requests all."""
        wanted = None if names is None else frozenset(names)
        before = self._wants.get(key)
        if key in self._wants and before is None:
            del self._all[key]
        for name in (before or frozenset()) - (wanted or frozenset()):
            self._leave(key, name)
        self._wants[key] = wanted
        if wanted is None:
            self._all[key] = None
            return
        for name in wanted - (before or frozenset()):
            self._by_name.setdefault(name, {})[key] = None
            self._touched.add(name)

    def remove(self, key: Key) -> None:
        """Forget a subscriber."""
        if key not in self._wants:
            return
        self._all.pop(key, None)
        for name in self._wants.pop(key) or ():
            self._leave(key, name)

    def _leave(self, key: Key, name: str) -> None:
        subscribers = self._by_name[name]
        del subscribers[key]
        if not subscribers:
            del self._by_name[name]
        self._touched.add(name)

    @property
    def wants_all(self) -> bool:
        """Return whether a subscriber has requested all resources of the type."""
        return bool(self._all)

    def union(self) -> frozenset[str] | None:
        """Return the names to request from the server."""
        return None if self._all else frozenset(self._by_name)

    def tell(self) -> Change:
        """Return the changes for the next request and record them as sent. The resources of names without a
        subscription are dropped.

        Call this when the request is written, not before. A subscription that was closed and reopened in between
        gets its resources from this object, because the server sees no change and sends no response.
        """
        change = Change(everything=bool(self._all) != self._told_all)
        for name in self._touched:
            if name in self._by_name:
                if name not in self._told:
                    change.added.add(name)
            elif name in self._told:
                change.dropped.add(name)
        self._told |= change.added
        self._told -= change.dropped
        self._told_all = bool(self._all)
        if not self._all:
            unwanted = self._known.keys() - self._by_name.keys() if change.everything else self._touched
            for name in unwanted:
                if name not in self._by_name:
                    self._known.pop(name, None)
        if self._all:
            change.added.clear()  # the wildcard covers them
            change.dropped.clear()
        self._touched = set()
        return change

    def known(self, key: Key) -> Update | None:
        """Return the known resources that the subscriber ``key`` requests, or None if none is known."""
        if key not in self._wants:
            return None
        wanted = self._wants[key]
        names: Iterable[str] = self._known if wanted is None else sorted(wanted)
        resources = tuple(self._known[name] for name in names if name in self._known)
        return Update(type_url=self.type_url, version=self._version, resources=resources) if resources else None

    def split(self, update: Update) -> list[tuple[Key, Update]]:
        """Split an update by subscriber. Subscribers that it does not affect are omitted."""
        parts: list[tuple[Key, Update]] = [(key, update) for key in self._all]
        mine: dict[Key, tuple[list[Resource], list[str]]] = {}
        if update.complete:
            mine = {key: ([], []) for key, wanted in self._wants.items() if wanted is not None}
        for resource in update.resources:
            for key in self._by_name.get(resource.name, ()):
                mine.setdefault(key, ([], []))[0].append(resource)
        for name in update.removed:
            for key in self._by_name.get(name, ()):
                mine.setdefault(key, ([], []))[1].append(name)
        parts.extend((key, _part(update, *part)) for key, part in mine.items())
        return parts

    def accepted(self, part: Update) -> None:
        """Store the resources that a subscriber accepted."""
        self._version = part.version
        for name in part.removed:
            self._known.pop(name, None)
        if part.complete and self.type_url in COMPLETE_TYPES:
            self._known.clear()
        self._known.update((resource.name, resource) for resource in part.resources)


def _part(update: Update, resources: list[Resource], removed: list[str]) -> Update:
    return Update(
        type_url=update.type_url,
        version=update.version,
        resources=tuple(resources),
        removed=tuple(removed),
        complete=update.complete,
    )
