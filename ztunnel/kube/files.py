"""Kubernetes objects from files, which are followed while they change: a source of objects without a cluster."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xds.errors import ConfigError
from ztunnel.kube.objects import Changes, Object, ObjectKey
from ztunnel.runtime.formats.file_kinds import FileKind, belongs_elsewhere
from ztunnel.runtime.formats.go_yaml import load_each
from ztunnel.runtime.formats.object_lists import items_of
from ztunnel.runtime.text_file import read_again
from ztunnel.runtime.watched_file import FileState, InPlaceEdits, file_state

log = logging.getLogger(__name__)

_POLL_S: Final = 0.2
SUFFIXES: Final = (".yaml", ".yml", ".json")
#: The most objects that one log line names.
_NAMED: Final = 8


class _Unrecognised(Exception):
    """A part of a file cannot be read as an object. The text says why."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a part of a file is left out.

    Attributes:
        place: document and line. Empty for the whole file.
        named: the kind and name of the object, as far as they can be read.
    """

    place: str
    named: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.place, self.named, self.reason)))


class FileObjects:
    """An :class:`~ztunnel.kube.objects.ObjectSource` over files; subfolders are not read.

    A document or list item that cannot be recognised as an object is skipped and reported once. The other
    documents and files apply at once. The unrecognised part could be any object. So objects that disappear in the
    same reading keep their last good form until the part is repaired. If the fault exists from the start, the
    source is not synced before the repair, because the faulty part could be the policy that denies a pod's
    traffic.

    Args:
        paths: folders and files. In a folder, files whose names end in one of ``suffixes`` contain objects,
            separated by ``---`` or in lists. If two files have the same object, the first file by name counts. Two
            different forms in one file are a fault.
        kinds: the kinds to report. None reports all.
        refused: called with API group and kind of an object outside these kinds. Returns why that is a fault, or
            the empty string to ignore the object. None ignores all such objects.
        suffixes: endings of file names.
    """

    def __init__(
        self,
        *paths: Path,
        kinds: Iterable[str] | None = None,
        refused: Callable[[str, str], str] | None = None,
        suffixes: Sequence[str] = SUFFIXES,
    ) -> None:
        self._paths = paths
        self._kinds = None if kinds is None else frozenset(kinds)
        self._refused = refused
        self._suffixes = suffixes
        self._states: dict[Path, FileState] = {}
        self._edits = InPlaceEdits()
        self._objects: dict[Path, Mapping[ObjectKey, Object]] = {}
        self._places: dict[Path, Mapping[ObjectKey, str]] = {}
        #: For each file with faults, the last good forms of objects that the faulty part could contain.
        self._kept: dict[Path, Mapping[ObjectKey, Object]] = {}
        #: Files that could not yet be read completely.
        self._unknown: set[Path] = set()
        self._told: dict[ObjectKey, Object] = {}
        self._readable = True
        self._synced = False
        self._read_ahead = False
        self._faults: dict[str, str] = {}

    @property
    def faults(self) -> Mapping[str, str]:
        """The reasons why files, or parts of files, are currently not followed, by the file's path."""
        return self._faults

    def place_of(self, key: ObjectKey) -> str:
        """Return the file, document and line that define an object. Empty if no file defines it now."""
        having = (path for path in sorted(self._places) if key in self._places[path])
        path = next(having, None)
        return "" if path is None else f"{path}: {self._places[path][key]}"

    def require_all(self) -> None:
        """Read the files now. :meth:`next` reports their objects.

        Raises:
            ConfigError: names each file that cannot be read.
            OSError: the folder cannot be read.
        """
        self._read_ahead = self._scan(self._listed(), at_once=True)
        if self._faults:
            raise ConfigError("; ".join(f"{path}: {fault}" for path, fault in self._faults.items()))

    def everything(self) -> Changes:
        """Return the files' current contents without waiting, for a caller that reads once and then checks
        :attr:`faults`.

        Raises:
            OSError: the folder cannot be read.
        """
        self._scan(self._listed(), at_once=True)
        return self._changes()

    async def next(self) -> Changes:
        while True:
            if self._look() or self._read_ahead:
                self._read_ahead = False
                before = self._synced
                changes = self._changes()
                if changes.objects or changes.synced != before:
                    return changes
            await asyncio.sleep(_POLL_S)

    def _listed(self) -> list[Path]:
        """Return the files at the configured paths.

        Raises:
            OSError: a path does not exist, or is a folder that cannot be read.
        """
        found: list[Path] = []
        for path in self._paths:
            if path.exists() and not path.is_dir():
                found.append(path)
            else:
                found += sorted(each for each in path.iterdir() if each.suffix in self._suffixes)
        return found

    def _look(self) -> bool:
        """Read the files that have changed, and return whether there were any. An unreadable folder is logged once
        and causes no change.
        """
        try:
            listed = self._listed()
        except OSError as error:
            if self._readable:
                log.error("objects not read folder=%s error=%s", error.filename, error.strerror)
            self._readable = False
            return False
        self._readable = True
        return self._scan(listed, at_once=False) or not listed

    def _scan(self, listed: list[Path], *, at_once: bool) -> bool:
        """Read the files that have changed, and return whether there were any. Unless ``at_once``, files that are
        being written in place are left for a later scan.
        """
        gone: dict[ObjectKey, Object] = {}
        changed = False
        for path in self._states.keys() - set(listed):
            del self._states[path]
            gone |= self._objects.pop(path, {})
            self._places.pop(path, None)
            self._kept.pop(path, None)
            self._unknown.discard(path)
            self._faults.pop(str(path), None)
            changed = True
        faulty: dict[Path, list[_Fault]] = {}
        for path in listed:
            state = file_state(path)
            if path in self._states:
                read = self._states[path]
                if read == state or (not at_once and self._edits.is_written(path, read, state)):
                    continue
            self._states[path] = state
            changed = True
            first = path not in self._objects
            before = self._objects.get(path, {})
            holds = bool(before or self._kept.get(path))
            found, self._places[path], faults = self._read(path, holds=holds)
            self._objects[path] = found
            gone |= {key: value for key, value in before.items() if key not in found}
            if faults:
                faulty[path] = faults
                self._faults[str(path)] = "; ".join(map(str, faults))
                if first:
                    self._unknown.add(path)
            else:
                self._kept.pop(path, None)
                self._unknown.discard(path)
                self._faults.pop(str(path), None)
        current = set().union(*self._objects.values()) if faulty else set()
        for path, faults in faulty.items():
            kept = {**self._kept.get(path, {}), **gone}
            self._kept[path] = {key: value for key, value in kept.items() if key not in current}
            self._report(path, faults)
        return changed

    def _report(self, path: Path, faults: list[_Fault]) -> None:
        kept = self._kept[path]
        if kept:
            more = len(kept) - _NAMED
            names = ", ".join(map(str, list(kept)[:_NAMED])) + (f" and {more} more" if more > 0 else "")
            consequence = f"what has disappeared stays as it was: {names}"
        elif self._synced:
            consequence = "it is left out, the rest applies"
        else:
            consequence = "what the files say is not complete before it is mended"
        for fault in faults:
            log.error("objects not read file=%s error=%s; %s", path, fault, consequence)

    def _read(
        self, path: Path, *, holds: bool
    ) -> tuple[Mapping[ObjectKey, Object], Mapping[ObjectKey, str], list[_Fault]]:
        """Return a file's objects, their places in it, and the faults of its other parts."""
        try:
            text = read_again(path, holds=holds)
            parts = load_each(text)
        except (OSError, ConfigError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            return {}, {}, [_Fault("", "", reason)]
        found: dict[ObjectKey, Object] = {}
        places: dict[ObjectKey, str] = {}
        faults: list[_Fault] = []
        unclear: set[ObjectKey] = set()
        for number, part in enumerate(parts, start=1):
            place = f"document {number} at line {part.line}"
            if part.fault:
                faults.append(_Fault(place, "", part.fault))
                continue
            for item in _items(part.value):
                try:
                    recognised = self._recognised(item)
                except _Unrecognised as error:
                    faults.append(_Fault(place, _named(item), str(error)))
                    continue
                if recognised is None:
                    continue
                key, body = recognised
                if key in found and found[key] != body:
                    unclear.add(key)
                    faults.append(_Fault(place, _named(item), "is repeated"))
                found[key], places[key] = body, place
        if faults and (elsewhere := belongs_elsewhere(text, FileKind.OBJECTS)):
            return {}, {}, [_Fault("", "", elsewhere)]
        # Neither form of the object is used: it is unknown which one is intended, and one can allow more than the
        # other.
        return {key: value for key, value in found.items() if key not in unclear}, places, faults

    def _recognised(self, item: object) -> tuple[ObjectKey, Object] | None:
        """Return an object and its key, or None if its kind is not followed."""
        if not isinstance(item, Mapping):
            raise _Unrecognised(f"must be objects, not {item!r}")
        kind, metadata = str(item.get("kind", "")), item.get("metadata")
        group = str(item.get("apiVersion", "")).partition("/")[0]
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        if not kind or not isinstance(name, str) or not name or not isinstance(metadata, Mapping):
            raise _Unrecognised("an object needs kind and metadata.name")
        if self._kinds is not None and kind not in self._kinds:
            reason = self._refused(group, kind) if self._refused is not None else ""
            if reason:
                raise _Unrecognised(reason)
            return None
        # An empty or null namespace is removed, so that an object has the same key in every spelling.
        cluster_wide = kind in _CLUSTER_WIDE or kind.startswith("Global")
        namespace = "" if cluster_wide else metadata.get("namespace") or "default"
        # Kubernetes' and Calico's NetworkPolicy can have the same name in the same namespace.
        called = (
            f"{kind}.{group.removeprefix('crd.')}"
            if kind == "NetworkPolicy" and group != "networking.k8s.io"
            else kind
        )
        return ObjectKey(called, str(namespace), name), item

    def _changes(self) -> Changes:
        now: dict[ObjectKey, Object] = {}
        for held in (self._kept, self._objects):
            for path in sorted(held, reverse=True):
                now.update(held[path])
        found: dict[ObjectKey, Object | None] = {
            key: value for key, value in now.items() if self._told.get(key) != value
        }
        found.update(dict.fromkeys(self._told.keys() - now.keys()))
        self._told = now
        self._synced = self._synced or not self._unknown
        return Changes(found, synced=self._synced)


def _items(document: object) -> Iterator[object]:
    items = items_of(document) if isinstance(document, Mapping) else None
    if items is None:
        if document is not None:
            yield document
        return
    for item in items:
        yield from _items(item)


def _named(item: object) -> str:
    """Return the kind and name of an object, as far as they can be read."""
    if not isinstance(item, Mapping):
        return ""
    metadata = item.get("metadata")
    names = (metadata.get("namespace"), metadata.get("name")) if isinstance(metadata, Mapping) else ()
    return "/".join(str(part) for part in (item.get("kind"), *names) if part)


_CLUSTER_WIDE: Final = frozenset(
    {
        "Namespace",
        "Node",
        "Tier",
        "Profile",
        "GlobalNetworkPolicy",
        "StagedGlobalNetworkPolicy",
        "GlobalNetworkSet",
        "HostEndpoint",
        "AdminNetworkPolicy",
        "BaselineAdminNetworkPolicy",
        "ClusterNetworkPolicy",
    }
)
