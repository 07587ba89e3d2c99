"""Policies from YAML files: for commands once, and for the tunnel proxy again after each change."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from xds.model import calico as c
from ztunnel.calico.compile import Compiled, compile_resources
from ztunnel.calico.evaluator import Evaluator
from ztunnel.calico.read import read_resources
from ztunnel.calico.resources import Resources
from ztunnel.calico.store import Store
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.config_reader import Faults
from ztunnel.runtime.text_file import read_text
from ztunnel.runtime.watched_file import FileState, file_state

log = logging.getLogger(__name__)

#: The interval at which files are looked at: a stat of each.
POLL_S: Final = 0.2


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files that are meant: of a folder, its YAML files in order."""
    return [each for path in paths for each in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]


def states_of(paths: Sequence[Path]) -> list[tuple[Path, FileState]]:
    """Return the files that are meant with their states, which differ after a change."""
    return [(file, file_state(file)) for file in files_of(paths)]


def read_files(paths: Sequence[Path]) -> Resources:
    """Return what files say.

    Raises:
        Faults: every fault, each beginning with its file.
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
        faults += error.faults
    if found is None or faults:
        raise Faults(faults)
    return found


def updates_of(compiled: Compiled) -> Iterator[c.Update]:
    """Yield the updates that fill an empty store with everything that was compiled, and complete it."""
    for set_id, (kind, members) in compiled.ip_sets.items():
        yield c.IpSetUpdate(set_id, kind, tuple(members))
    yield from (c.PolicyUpdate(key, policy) for key, policy in compiled.policies.items())
    yield from (c.ProfileUpdate(name, profile) for name, profile in compiled.profiles.items())
    yield from (c.EndpointUpdate(key, endpoint) for key, endpoint in compiled.endpoints.items())
    yield from (c.ServiceAccountUpdate(*key, labels) for key, labels in compiled.accounts.items())
    yield from (c.NamespaceUpdate(name, labels) for name, labels in compiled.namespaces.items())
    yield c.InSync()


class Files:
    """Follows files; a :class:`~ztunnel.calico.live.PolicySource`.

    While they have a fault, the policies of before answer: they are not in sync and their age counts. Before
    the first good ones nothing is allowed.

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
        self._clock = clock
        self._changed = changed
        self._lost_at: float | None = None

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    @property
    def age_s(self) -> float:
        """Seconds since the files have had a fault; 0 while they have none, and before the first good ones."""
        return 0.0 if self._lost_at is None else self._clock.monotonic() - self._lost_at

    async def run(self) -> None:
        """Read the files now and after each change, until cancelled."""
        seen: list[tuple[Path, FileState]] | None = None
        while True:
            now = states_of([self._path])
            if now != seen:
                seen = now
                await self._read()
            await asyncio.sleep(POLL_S)

    async def _read(self) -> None:
        try:
            # In a thread: thousands of policies take seconds.
            evaluator = await asyncio.to_thread(_evaluator, self._path)
        except Faults as error:
            self.in_sync = False
            self.error = str(error)
            if self._lost_at is None and self.evaluator.store.in_sync:
                self._lost_at = self._clock.monotonic()
            for fault in error.faults:
                log.error("policies not usable, the last good ones are in force: %s", fault)
            return
        self.evaluator, self.in_sync, self.error, self._lost_at = evaluator, True, "", None
        store = evaluator.store
        log.info("policies read path=%s policies=%d pods=%d", self.name, len(store.policies), len(store.endpoints))
        self._changed()


def _evaluator(path: Path) -> Evaluator:
    made = Evaluator(Store(), connections_only=True)
    for update in updates_of(compile_resources(read_files([path]))):
        made.apply(update)
    return made
