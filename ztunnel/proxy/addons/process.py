"""Runs the addons of one process: loads them, watches their files for changes, interrupts blocking hooks, and ends
them.

A changed file is loaded while the old version of the addon still runs, and the new version replaces the old one
after its hook ``configured`` has returned. If the file cannot be loaded, the old version stays, and the log and
``ztunnel addons`` show the reason. Modules and entry points are loaded only once.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from ztunnel.proxy.addons.host import AddonHost
from ztunnel.proxy.addons.interrupt import Interrupter
from ztunnel.proxy.addons.load import AddonError, end, find_class, load_all, load_class
from ztunnel.proxy.addons.running import RunningAddon
from ztunnel.proxy.addons.settings import AddonSettings
from ztunnel.runtime.tasks import Tasks
from ztunnel.runtime.watched_file import FileState, InPlaceEdits, file_state

log = logging.getLogger(__name__)

#: Seconds between two checks whether an addon's file has changed.
CHECK_EVERY_S: Final = 1.0


class AddonProcess:
    """Runs the addons of this process while entered.

    Args:
        settings: which addons to load.

    Attributes:
        host: calls the addons.

    Raises:
        AddonError: an addon cannot be loaded.
    """

    def __init__(self, settings: AddonSettings) -> None:
        self._settings = settings
        # The files' states are taken before the files are read, so that a change in between is noticed.
        self._seen = {spec.text: _state(spec.file) for spec in settings.specs}
        self._edits = InPlaceEdits()
        self.host = AddonHost(load_all(settings))
        self._tasks = Tasks("addons")
        self._stack = ExitStack()

    async def __aenter__(self) -> Self:
        self._stack.enter_context(Interrupter(self.host.current))
        if any(spec.file for spec in self._settings.specs):
            self._tasks.keep(self._watch, "files of addons")
        names = ", ".join(f"{each.name} ({each.loaded.spec.text})" for each in self.host.addons)
        log.info("addons: %s", names)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._tasks.close()
        self.host.close()
        self._stack.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Replace the addons whose files have changed since the last call. A file that is being written in place
        is left alone, because its first part can be an addon without some of its hooks.
        """
        for addon in self.host.addons:
            spec = addon.loaded.spec
            read, state = self._seen[spec.text], _state(spec.file)
            if spec.file and state != read and not self._edits.is_written(Path(spec.file), read, state):
                self._seen[spec.text] = state
                await self._replace(addon)

    async def _replace(self, addon: RunningAddon) -> None:
        spec = addon.loaded.spec
        try:
            # The module is loaded in a thread, because an import can take long. The hook ``configured`` runs on
            # the loop, like later hooks.
            cls, digest = await asyncio.to_thread(find_class, spec)
            if digest == addon.loaded.sha256 and not addon.suspended:
                self.host.problems.pop(addon.name, None)
                return
            loaded = load_class(cls, self._settings.options, spec, digest)
            if loaded.name != addon.name:
                end(loaded)
                raise AddonError(f"addon {spec.text}: its name has changed from {addon.name} to {loaded.name}")
        except AddonError as error:
            text = "; ".join(error.faults)
            self.host.problems[addon.name] = text
            log.error("addon %s: its changed file is not used: %s", addon.name, text)
            return
        self.host.replace(addon, loaded)
        log.info("addon %s: its changed file is used now, sha256:%s", addon.name, digest)


def _state(path: str) -> FileState:
    return file_state(Path(path)) if path else None
