"""Text files that a person has written."""

import errno
from pathlib import Path


def read_text(path: Path, *, newline: str | None = None) -> str:
    """Return the text of a file in UTF-8, whatever the locale.

    Args:
        path: the file.
        newline: as of :func:`open`; empty keeps the line ends that the file has.

    Raises:
        OSError: it cannot be read; ``EILSEQ`` when it is no text, so that who reports an unreadable file has both.
    """
    try:
        with path.open(encoding="utf-8", newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"not UTF-8 text at byte {error.start}", str(path)) from None
