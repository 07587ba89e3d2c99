"""Detects whether a file has changed since it was read."""

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
