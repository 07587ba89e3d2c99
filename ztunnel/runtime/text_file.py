"""Reads text files that people have written."""

import errno
from pathlib import Path


def read_text(path: Path, *, newline: str | None = None) -> str:
    """Return the text of a UTF-8 file in any locale.

    Args:
        path: the file.
        newline: the parameter of :func:`open`. An empty text keeps the file's line ends.

    Raises:
        OSError: the file cannot be read; ``EILSEQ`` if it is not UTF-8, so that callers handle both alike.
    """
    try:
        with path.open(encoding="utf-8", newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"not UTF-8 text at byte {error.start}", str(path)) from None


def read_again(path: Path, *, holds: bool) -> str:
    """Return the current text of a followed file that has been read before.

    A program that writes the file in place empties it first, and can take long for the rest, as in ``helm template
    > policies.yaml``. Until then, an empty file does not mean that its former content was removed.

    Args:
        path: the file.
        holds: whether the last good text has content that an empty file would remove.

    Raises:
        OSError: see :func:`read_text`; ``ENODATA`` if the file is empty although it ``holds`` content.
    """
    text = read_text(path)
    if holds and not text:
        raise OSError(errno.ENODATA, "is empty, as while it is written", str(path))
    return text
