"""Kubernetes objects from a folder of files, followed while they change: a source without a cluster."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from xds.errors import ConfigError
from ztunnel.kube.objects import Changes, Object, ObjectKey
from ztunnel.runtime.go_yaml import load_all
from ztunnel.runtime.object_lists import items_of
from ztunnel.runtime.text_file import read_text
from ztunnel.runtime.watched_file import FileState, file_state

log = logging.getLogger(__name__)

_POLL_S: Final = 0.2
_SUFFIXES: Final = (".yaml", ".yml", ".json")


class FileObjects:
    """An :class:`~ztunnel.kube.objects.ObjectSource` over the files of one folder; subfolders are not entered.

    A file that cannot be read is reported once, and its last objects stay. If one is like that from the start,
    the source is not synced before it has been mended: what it holds could be what closes a pod.

    Args:
        folder: files in it whose names end in ``.yaml``, ``.yml`` or ``.json`` hold objects, ``---`` between
            them, or in lists. Of two files with the same object, the first by name has it.
        kinds: kinds that are told; None for all.
    """

    def __init__(self, folder: Path, kinds: Iterable[str] | None = None) -> None:
        self._folder = folder
        self._kinds = None if kinds is None else frozenset(kinds)
        self._states: dict[Path, FileState] = {}
        self._objects: dict[Path, Mapping[ObjectKey, Object]] = {}
        self._told: dict[ObjectKey, Object] = {}
        self._synced = False
        self._read_ahead = False
        self._faults: dict[str, str] = {}

    @property
    def faults(self) -> Mapping[str, str]:
        """Why a file is not followed at this moment, by its path."""
        return self._faults

    def require_all(self) -> None:
        """Read the files now; what they hold is told by :meth:`next`.

        Raises:
            ConfigError: some cannot be read; each is named.
            OSError: the folder cannot be read.
        """
        next(self._folder.iterdir(), None)
        self._read_ahead = self._scan()
        if self._faults:
            raise ConfigError("; ".join(f"{path}: {fault}" for path, fault in self._faults.items()))

    def everything(self) -> Changes:
        """Return what the files hold now, without waiting; for who asks once, and looks at ``faults`` then.

        Raises:
            OSError: the folder cannot be read.
        """
        next(self._folder.iterdir(), None)
        self._scan()
        return self._changes()

    async def next(self) -> Changes:
        """See :meth:`~ztunnel.kube.objects.ObjectSource.next`."""
        while True:
            if self._scan() or self._read_ahead:
                self._read_ahead = False
                changes = self._changes()
                if changes.objects or changes.synced != self._synced:
                    self._synced = changes.synced
                    return changes
            await asyncio.sleep(_POLL_S)

    def _scan(self) -> bool:
        """Read the files that have changed; return whether any has."""
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.suffix in _SUFFIXES)
        except OSError as error:
            if self._states.get(self._folder, ()) is not None:
                log.error("objects not read folder=%s error=%s", self._folder, error.strerror)
                self._states[self._folder] = None
            return False
        self._states.pop(self._folder, None)
        changed = False
        for path in self._states.keys() - set(paths):
            del self._states[path]
            self._objects.pop(path, None)
            self._faults.pop(str(path), None)
            changed = True
        for path in paths:
            state = file_state(path)
            if path in self._states and self._states[path] == state:
                continue
            self._states[path] = state
            changed = True
            try:
                self._objects[path] = dict(self._read(path))
                self._faults.pop(str(path), None)
            except (OSError, ConfigError) as error:
                fault = error.strerror or str(error) if isinstance(error, OSError) else str(error)
                self._faults[str(path)] = fault
                log.error("objects not read file=%s error=%s; what it held before stays", path, fault)
        return changed or not self._states

    def _read(self, path: Path) -> Iterator[tuple[ObjectKey, Object]]:
        for document in load_all(read_text(path)):
            yield from self._objects_of(path, document)

    def _objects_of(self, path: Path, document: object) -> Iterator[tuple[ObjectKey, Object]]:
        if document is None:
            return
        if not isinstance(document, Mapping):
            raise ConfigError(f"must be objects, not {document!r}")
        items = items_of(document)
        if items is not None:
            for item in items:
                yield from self._objects_of(path, item)
            return
        kind = str(document.get("kind", ""))
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        if not kind or not isinstance(name, str) or not name or not isinstance(metadata, Mapping):
            raise ConfigError("an object needs kind and metadata.name")
        if self._kinds is not None and kind not in self._kinds:
            return
        namespace = (
            "" if kind in _CLUSTER_WIDE or kind.startswith("Global") else metadata.get("namespace", "default")
        )
        group = str(document.get("apiVersion", "")).partition("/")[0]
        # Kubernetes' and Calico's NetworkPolicy may have one name in one namespace.
        called = f"{kind}.{group}" if kind == "NetworkPolicy" and group != "networking.k8s.io" else kind
        yield ObjectKey(called, str(namespace), name), document

    def _changes(self) -> Changes:
        now: dict[ObjectKey, Object] = {}
        for path in sorted(self._objects, reverse=True):
            now.update(self._objects[path])
        found: dict[ObjectKey, Object | None] = {
            key: value for key, value in now.items() if self._told.get(key) != value
        }
        found.update(dict.fromkeys(self._told.keys() - now.keys()))
        self._told = now
        unread = self._states.keys() - self._objects.keys()
        return Changes(found, synced=self._synced or not unread)


_CLUSTER_WIDE: Final = frozenset(
    {
        "Namespace",
        "Node",
        "Tier",
        "Profile",
        "GlobalNetworkPolicy",
        "GlobalNetworkSet",
        "HostEndpoint",
        "AdminNetworkPolicy",
        "BaselineAdminNetworkPolicy",
        "ClusterNetworkPolicy",
    }
)
