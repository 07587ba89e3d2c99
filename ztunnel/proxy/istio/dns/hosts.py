"""Answers names from the proxy's own ``/etc/hosts`` (which has a pod's ``hostAliases``), and ``localhost``.

Like the Rust ztunnel's resolver, this takes precedence over name servers.
"""

import ipaddress
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ztunnel.proxy.istio.dns.answer import IpAddress
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.watched_file import FileState, file_state

log = logging.getLogger(__name__)

_LOCALHOST: Final = "localhost"
#: The addresses of ``localhost`` and names below it, regardless of the hosts file's content (RFC 6761, 6.3).
_LOOPBACK: Final[tuple[IpAddress, ...]] = (ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1"))


def entries(text: str) -> dict[str, tuple[IpAddress, ...]]:
    """Return the addresses of each name in a hosts(5) file, in the file's order.

    Names are in lower case and without a final dot. Lines with an unreadable address are skipped.
    """
    found: dict[str, dict[IpAddress, None]] = {}
    for line in text.splitlines():
        words = line.split("#")[0].split()
        try:
            address = ipaddress.ip_address(words[0].partition("%")[0]) if words else None
        except ValueError:
            continue
        if address is not None:
            for name in words[1:]:
                found.setdefault(name.removesuffix(".").lower(), {})[address] = None
    return {name: tuple(addresses) for name, addresses in found.items()}


class Hosts:
    """The names of one file, which is read again after each change.

    Args:
        path: the file. While it cannot be read, its last content stays in use.
    """

    def __init__(self, path: Path = Path("/etc/hosts")) -> None:
        self._path = path
        self._state: FileState = None
        self._names: Mapping[str, tuple[IpAddress, ...]] = {}

    def addresses(self, name: str, *, ipv6: bool) -> tuple[IpAddress, ...]:
        """Return a name's addresses in one family. ``name`` has no final dot. Empty: the query must
        be forwarded.
        """
        name = name.lower()
        known = self._current().get(name, ())
        if name == _LOCALHOST or name.endswith(f".{_LOCALHOST}"):
            known = _LOOPBACK
        return tuple(address for address in known if (address.version == 6) is ipv6)

    def _current(self) -> Mapping[str, tuple[IpAddress, ...]]:
        state = file_state(self._path)
        if state != self._state:
            self._state = state
            try:
                self._names = entries(self._path.read_text(errors="replace"))
            except FileNotFoundError:
                self._names = {}
            except OSError as error:
                log.warning(
                    "hosts file unreadable, its old names stay in use path=%s error=%s",
                    self._path,
                    plain_reason(error),
                )
        return self._names
