"""Reads archives of ``ztunnel bug-report``: a gzipped tar with ``index.json`` and a folder for each node.

The pages of a node's proxy are ``nodes/NODE/proxy/PAGE``, with the page's path as the file's name.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Mapping
from typing import Any, Final

from ztunnel.ask.inspect.source import AskFailed, parsed

#: The most bytes read from one file of an archive, and from all files: archives are untrusted input.
MAX_FILE: Final = 256 << 20
MAX_ARCHIVE: Final = 2 << 30
_FOLDER: Final = "nodes"


class BadArchive(ValueError):
    """The file is not an archive of ``ztunnel bug-report``, or is too big; the text says which."""


def file_of(path: str) -> str:
    """Return the name of the file that contains a page, such as ``config_dump`` for ``/config_dump``."""
    return path.strip("/").replace("/", "_")


class Archive:
    """The files of one archive, by their paths below its first folder."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self.name = name
        self.files = files

    @classmethod
    def read(cls, path: str) -> Archive:
        """Read an archive.

        Raises:
            BadArchive: the file is not an archive of ``ztunnel bug-report``, or is too big.
            OSError: it cannot be read.
        """
        files: dict[str, bytes] = {}
        size = 0
        try:
            with tarfile.open(path, "r:*") as tar:
                for member in tar:
                    if not member.isfile():
                        continue
                    size += member.size
                    if member.size > MAX_FILE or size > MAX_ARCHIVE:
                        raise BadArchive(f"{member.name}: more than is read of an archive")
                    opened = tar.extractfile(member)
                    assert opened is not None
                    files[member.name.partition("/")[2]] = opened.read()
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise BadArchive(f"not a whole tar file: {error}") from None
        if "index.json" not in files:
            raise BadArchive("not an archive of ztunnel bug-report: it has no index.json")
        return cls(path, files)

    @property
    def nodes(self) -> list[str]:
        """The nodes whose proxies have pages in the archive."""
        found = {name.split("/")[1] for name in self.files if name.startswith(f"{_FOLDER}/") and "/proxy/" in name}
        return sorted(found)

    def pages(self, node: str) -> ArchivedPages:
        """Return the pages of a node's proxy."""
        return ArchivedPages(f"{self.name}: {node}", self.files, f"{_FOLDER}/{node}/proxy/")


class ArchivedPages:
    """The pages of one proxy in an archive; see :class:`ztunnel.ask.inspect.source.Pages`."""

    saved = True

    def __init__(self, name: str, files: Mapping[str, bytes], folder: str) -> None:
        self.name = name
        self._files = files
        self._folder = folder

    def text(self, path: str, parameters: Mapping[str, str | None] | None = None) -> str:
        found = self._files.get(self._folder + file_of(path))
        if found is None:
            raise AskFailed(f"{self.name}: the archive has no {path}", status=404)
        return found.decode(errors="replace")

    def json(self, path: str, parameters: Mapping[str, str | None] | None = None) -> Any:
        return parsed(self.text(path), f"{self.name}: {path}")
