"""Reads and watches the description file of ``ztunnel agent FILE``: the pods of a node without an API server."""

import logging
from pathlib import Path

from ztunnel.node.agent.description import PodDescription, PodFaults, parse_pods
from ztunnel.runtime.text_file import read_again
from ztunnel.runtime.watched_file import FileState, InPlaceEdits, file_state

log = logging.getLogger(__name__)


class PodsFile:
    """The description file, read once and then polled for edits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = ""
        self._state: FileState = None
        self._edits = InPlaceEdits()

    def read(self) -> tuple[PodDescription, ...]:
        """Read and parse the file.

        Raises:
            PodFaults, OSError: it is not usable.
        """
        self._state = file_state(self._path)
        self._text = read_again(self._path, holds=bool(self._text))
        return parse_pods(self._text)

    def edited(self) -> tuple[PodDescription, ...] | None:
        """Return the file's pods if the file has changed and is usable, else None. Faults are logged once per
        edit.
        """
        state = file_state(self._path)
        if state != self._state and self._edits.is_written(self._path, self._state, state):
            return None
        before = self._text
        try:
            pods = self.read()
        except PodFaults as error:
            if self._text != before:
                for fault in error.faults:
                    log.error("%s: %s", self._path, fault)
                log.error("%s: %d faults; the last good state stays active", self._path, len(error.faults))
            return None
        except OSError as error:
            if self._text:
                log.error("%s: %s; the last good state stays active", self._path, error.strerror)
                self._text = ""
            return None
        return None if self._text == before else pods
