"""Text files that a person has written."""

import errno
from pathlib import Path


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, whatever the locale.

    Raises:
        OSError: it cannot be read; ``EILSEQ`` when it is no text, so that who reports an unreadable file has both.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"not UTF-8 text at byte {error.start}", str(path)) from None
