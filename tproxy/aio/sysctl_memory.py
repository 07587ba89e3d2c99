"""Keeps the earlier values of changed sysctls in a file. The main copy is in an nftables table.

``nft flush ruleset`` by another program deletes the table, including the values that a later removal must restore.
The file's name is the namespace's cookie, which is unique while the machine runs (``SO_NETNS_COOKIE``, Linux 5.14;
there is no file with older kernels). Its folder is cleared by a reboot. The file is optional: if its folder is not
writable, only the table has the values.
"""

import contextlib
import json
import logging
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from tproxy.aio.netns import Netns
from tproxy.resources import SysctlKey

log = logging.getLogger(__name__)

FOLDER: Final = Path("/run/ztunnel-intercept")
_SO_NETNS_COOKIE: Final = 71


def cookie_of(netns: Netns) -> int | None:
    """Return the cookie of a namespace, or None on kernels without cookies."""
    with netns.entered(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8), "little")
        except OSError:
            return None


class SysctlMemory:
    """The file with the earlier sysctl values of one namespace."""

    def __init__(self, cookie: int | None, folder: Path = FOLDER) -> None:
        self._path = None if cookie is None else folder / f"{cookie}.json"

    def load(self) -> dict[SysctlKey, str]:
        """Return the saved values. They are empty if the file is missing or damaged."""
        if self._path is None:
            return {}
        try:
            entries = json.loads(self._path.read_text())
            return {SysctlKey(family, device, leaf): str(value) for family, device, leaf, value in entries}
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("saved values of sysctls not readable file=%s error=%s", self._path, error.strerror)
            return {}
        except (ValueError, TypeError):
            log.warning("saved values of sysctls not readable file=%s error=malformed", self._path)
            return {}

    def save(self, values: Mapping[SysctlKey, str]) -> None:
        """Add values to the file. A key that is already in the file keeps its first value."""
        self._write({**values, **self.load()})

    def forget(self, keys: Iterable[SysctlKey]) -> None:
        """Remove restored values from the file. With the last value, the file is deleted."""
        gone = set(keys)
        self._write({key: value for key, value in self.load().items() if key not in gone})

    def forget_all(self) -> None:
        """Drop all values, because the namespace is being removed and no value will be restored."""
        self._write({})

    def _write(self, values: Mapping[SysctlKey, str]) -> None:
        path = self._path
        if path is None:
            return
        entries = [[key.family, key.device, key.leaf, value] for key, value in values.items()]
        try:
            if entries:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                fresh = path.with_suffix(".new")
                fresh.write_text(json.dumps(entries))
                fresh.replace(path)
            else:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # the folder is not empty
                    path.parent.rmdir()
        except OSError as error:
            log.info("saved values of sysctls not written file=%s error=%s", path, error.strerror)
