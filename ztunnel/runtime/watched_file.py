"""Detects whether a file has changed since it was read."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

#: A file's state: its device, inode, size and modification time. None if there is no file.
FileState: TypeAlias = tuple[int, int, int, int] | None


def file_state(path: Path) -> FileState:
    """Return the state of the file that all links lead to. So replacing a link also counts as a change."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class InPlaceEdits:
    """Recognises files that are being written in place, so that followers do not apply the first part of an edit.

    The first part can be a valid file which lacks rules or pods that stand at the end. A program that takes longer
    than the interval between two calls for its next part is not recognised. Most programs rename a complete file
    instead.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, FileState] = {}

    def is_written(self, path: Path, read: FileState, now: FileState) -> bool:
        """Return whether a changed file is possibly not complete yet: it was not replaced by another file, and has
        changed since the last call. Call this for each poll that finds the file changed.

        Args:
            path: the file.
            read: its state when it was read last.
            now: its current state, which differs from ``read``.
        """
        if read is None or now is None or read[:2] != now[:2]:
            self._seen.pop(path, None)
            return False
        seen, self._seen[path] = self._seen.get(path), now
        return seen != now

    def are_complete(self, read: Mapping[Path, FileState], now: Mapping[Path, FileState]) -> bool:
        """Return whether none of several changed files is being written. Arguments as for :meth:`is_written`."""
        changed = [path for path, state in now.items() if read.get(path) != state]
        written = [self.is_written(path, read.get(path), now[path]) for path in changed]  # all are noted
        return not any(written)
