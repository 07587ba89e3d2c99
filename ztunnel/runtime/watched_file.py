"""Whether a file is still the one that was read."""

from pathlib import Path
from typing import TypeAlias

#: Device, inode, size and time of the last change of what a path leads to; None: to nothing.
FileState: TypeAlias = tuple[int, int, int, int] | None


def file_state(path: Path) -> FileState:
    """Through every link, so that a swapped link is another file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
