"""Reads text files that people have written."""

import errno
from pathlib import Path


def read_text(path: Path, *, newline: str | None = None) -> str:
    """Return the text of a UTF-8 file in any locale.

    Args:
        path: the file.
        newline: the parameter of :func:`open`. Empty keeps the line ends of the file.

    Raises:
        OSError: the file cannot be read; ``EILSEQ`` if it is not UTF-8, so that callers handle both alike.
    """
    try:
        with path.open(encoding="utf-8", newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"not UTF-8 text at byte {error.start}", str(path)) from None
