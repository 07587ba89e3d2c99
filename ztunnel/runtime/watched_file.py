"""Detects whether a file has changed since it was read."""

from pathlib import Path
from typing import TypeAlias

#: Device, inode, size and modification time of the file at a path. None if there is none.
FileState: TypeAlias = tuple[int, int, int, int] | None


def file_state(path: Path) -> FileState:
    """Return the state of the file behind all links, so that a swapped link is a change."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
