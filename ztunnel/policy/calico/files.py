"""Policies from YAML files. Commands read them once, and the tunnel proxy also reads them after each change."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from xds.model import calico as c
from ztunnel.kube.files import FileObjects
from ztunnel.policy.calico.compile import Compiled, compile_resources
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.objects import KINDS, PolicyObjects
from ztunnel.policy.calico.read import read_resources, refusal
from ztunnel.policy.calico.resources import Resources
from ztunnel.policy.calico.store import Store
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.formats.config_reader import Faults
from ztunnel.runtime.formats.file_kinds import FileKind, belongs_elsewhere
from ztunnel.runtime.text_file import read_text
from ztunnel.runtime.watched_file import FileState, InPlaceEdits, file_state

log = logging.getLogger(__name__)

#: Seconds between two checks whether a file has changed, each by a stat call.
POLL_S: Final = 0.2
#: The suffixes of policy files in a folder.
SUFFIXES: Final = (".yaml",)


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the file itself, or a folder's YAML files in order."""
    return [each for path in paths for each in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]


def states_of(paths: Sequence[Path]) -> dict[Path, FileState]:
    """Return the files with their states. A file's state differs after each change of the file."""
    return {file: file_state(file) for file in files_of(paths)}


def read_files(paths: Sequence[Path]) -> Resources:
    """Return the resources that files describe.

    Raises:
        Faults: lists every fault, each beginning with its file.
    """
    texts: dict[str, str] = {}
    faults = []
    for file in files_of(paths):
        try:
            texts[str(file)] = read_text(file)
        except OSError as error:
            faults.append(f"{file}: {error.strerror}")
    found = None
    try:
        found = read_resources(texts)
    except Faults as error:
        elsewhere = {file: belongs_elsewhere(text, FileKind.OBJECTS) for file, text in texts.items()}
        elsewhere = {file: sentence for file, sentence in elsewhere.items() if sentence}
        faults += [f"{file}: {sentence}" for file, sentence in elsewhere.items()]
        faults += [fault for fault in error.faults if fault.partition(": ")[0] not in elsewhere]
    if found is None or faults:
        raise Faults(faults)
    return found


def updates_of(compiled: Compiled) -> Iterator[c.Update]:
    """Yield the updates that fill an empty store with all compiled objects, and mark it as complete."""
    for set_id, (kind, members) in compiled.ip_sets.items():
        yield c.IpSetUpdate(set_id, kind, tuple(members))
    yield from (c.PolicyUpdate(key, policy) for key, policy in compiled.policies.items())
    yield from (c.ProfileUpdate(name, profile) for name, profile in compiled.profiles.items())
    yield from (c.EndpointUpdate(key, endpoint) for key, endpoint in compiled.endpoints.items())
    yield from (c.ServiceAccountUpdate(*key, labels) for key, labels in compiled.accounts.items())
    yield from (c.NamespaceUpdate(name, labels) for name, labels in compiled.namespaces.items())
    yield c.InSync()


class FilePolicies:
    """The policy resources in files, updated while the files change.

    Calls can come from any thread, one at a time.

    Only the unusable part of a file is left out: see :class:`~ztunnel.kube.files.FileObjects` for documents that
    cannot be read, and :class:`~ztunnel.policy.calico.objects.PolicyObjects` for faulty objects.

    Args:
        paths: YAML files and folders.

    Attributes:
        complete: whether every document has been readable once, so that no policy is missing. Stays true.
        faults: the files' present faults, each with file, document, object and consequence.
    """

    def __init__(self, *paths: Path) -> None:
        self._source = FileObjects(*paths, kinds=KINDS, refused=refusal, suffixes=SUFFIXES)
        self._objects = PolicyObjects()
        self._resources = Resources()
        self._reported: set[str] = set()
        self.complete = False
        self.faults: tuple[str, ...] = ()

    def read(self) -> Resources:
        """Read the changed files, and return a copy of the current state. New faults are logged."""
        try:
            changes = self._source.everything()
        except OSError as error:
            self.faults = (f"{error.filename}: {error.strerror}",)
            log.error("policies not read path=%s error=%s; the last ones stay", error.filename, error.strerror)
            return self._copy()
        for table, key, value in self._objects.changes(changes.objects):
            entries: dict[Any, Any] = getattr(self._resources, table)
            if value is None:
                entries.pop(key, None)
            else:
                entries[key] = value
        self.complete = changes.synced
        problems = [
            ": ".join(filter(None, (self._source.place_of(key), f"{key}: {problem}")))
            for key, problem in sorted(self._objects.problems.items())
        ]
        for problem in problems:
            if problem not in self._reported:
                log.error("policy object not enforced as written %s", problem)
        self._reported = set(problems)
        self.faults = (*(f"{path}: {fault}" for path, fault in sorted(self._source.faults.items())), *problems)
        return self._copy()

    def _copy(self) -> Resources:
        return Resources(**{item.name: dict(getattr(self._resources, item.name)) for item in fields(Resources)})


class Files:
    """Reloads policy files when they change. Implements :class:`~ztunnel.policy.calico.live.PolicySource`.

    While a part is faulty, the rest applies, and :class:`FilePolicies` defines the effect of the faulty
    part. The files are not in sync then, and their age counts. Before every document has been readable once, no
    traffic is allowed.

    Args:
        path: a file or a folder of YAML files.
        clock: for :attr:`age_s`.
        changed: called after each change.
    """

    def __init__(self, path: Path, clock: Clock, changed: Callable[[], None] = lambda: None) -> None:
        self.evaluator = Evaluator(Store(), connections_only=True)
        self.in_sync = False
        self.error = ""
        self._path = path
        self._policies = FilePolicies(path)
        self._clock = clock
        self._changed = changed
        self._lost_at: float | None = None

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def age_s(self) -> float:
        """Seconds since the files became faulty. 0 while they have no fault, and until they have been read without
        one.
        """
        return 0.0 if self._lost_at is None else self._clock.monotonic() - self._lost_at

    async def run(self) -> None:
        """Read the files now and after each change, until cancelled."""
        seen: dict[Path, FileState] | None = None
        edits = InPlaceEdits()
        while True:
            now = states_of([self._path])
            if now != seen and edits.are_complete(seen or {}, now):
                seen = now
                await self._read()
            await asyncio.sleep(POLL_S)

    async def _read(self) -> None:
        # The files are read in a thread, because thousands of policies take seconds.
        evaluator = await asyncio.to_thread(self._evaluator)
        faults = self._policies.faults
        self.in_sync = not faults
        self.error = "; ".join(faults)
        if evaluator is None:
            return
        if not faults:
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = self._clock.monotonic()
        self.evaluator = evaluator
        store = evaluator.store
        log.info("policies read path=%s policies=%d pods=%d", self.name, len(store.policies), len(store.endpoints))
        self._changed()

    def _evaluator(self) -> Evaluator | None:
        """Read the files. Return None as long as some policies can be missing."""
        resources = self._policies.read()
        if not self._policies.complete:
            return None
        made = Evaluator(Store(), connections_only=True)
        for update in updates_of(compile_resources(resources)):
            made.apply(update)
        return made
