"""Text files that a person has written."""

import errno
from pathlib import Path


def read_text(path: Path, *, newline: str | None = None) -> str:
    """Return the text of a UTF-8 file in any locale.

    Args:
        path: the file.
        newline: the parameter of :func:`open`. Empty keeps the line ends of the file.

    Raises:
        OSError: it cannot be read; ``EILSEQ`` when it is no text, so that who reports an unreadable file has both.
    """
    try:
        with path.open(encoding="utf-8", newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"not UTF-8 text at byte {error.start}", str(path)) from None
