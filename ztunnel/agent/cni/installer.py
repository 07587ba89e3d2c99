"""Keeps our plugin installed on the host: the program first, then the configuration; removal is the reverse.

The network's own installer, or a second mesh, may rewrite the configuration at any time. The folder is watched by
inotify, and what is wrong is put right; two installers that both insist are named in the log, for they would
rewrite for ever. In the owned mode our plugin is in a file of its own, a copy of the network's with our entry,
which sorts before it: that survives a reboot of the node, on which pods start before any agent does.
"""

import asyncio
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from xds.aio.inotify import IN_CLOSE_WRITE, IN_DELETE, IN_MOVED_TO, RenameWatcher
from ztunnel.agent.cni.conflist import TYPE, BadConfiguration, read, with_plugin, without_plugin, written
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.text_file import read_text

log = logging.getLogger(__name__)

OWNED: Final = f"02-{TYPE}.conflist"
_SUFFIXES: Final = (".conf", ".conflist")
#: The first line of the program: isolated, without site packages, so that nothing of the host's can disturb it.
_FIRST_LINE: Final = "#!/usr/bin/python3 -IS\n"
#: So many rewrites in a row mean that somebody else insists.
_QUARREL: Final = 5
_CALM_S: Final = 60.0
#: A burst of events leads to one look.
_SETTLE_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What is to be installed, and where.

    Attributes:
        binaries: where container runtimes look for plugins, such as ``/opt/cni/bin``.
        configurations: where they look for networks, such as ``/etc/cni/net.d``.
        owned: a file of its own instead of an entry in the network's.
        options: members of our entry, see ``plugin.py``.
    """

    binaries: Path
    configurations: Path
    owned: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> dict[str, Any]:
        """Our entry in the list of plugins."""
        return {"type": TYPE, "name": TYPE, **self.options}


class NoNetwork(Exception):
    """No network is configured on this host yet."""


def install(wanted: Installation) -> list[str]:
    """Make the host's files what they should be; idempotent. Blocks for some small files.

    Returns:
        What was written.

    Raises:
        NoNetwork: there is no configuration to add to; the program is there already.
        OSError: a file cannot be written.
    """
    done = []
    program = wanted.binaries / TYPE
    text = _FIRST_LINE + Path(__file__).with_name("plugin.py").read_text()
    if _text_of(program) != text or program.stat().st_mode & 0o777 != 0o755:
        _replace(program, text, 0o755)
        done.append(str(program))
    path, found = _primary(wanted)
    target = wanted.configurations / OWNED if wanted.owned else path.with_suffix(".conflist")
    text = written(with_plugin(found, wanted.entry))
    if _text_of(target) == text:
        return done
    mode = 0o600 if wanted.owned or not target.exists() else target.stat().st_mode & 0o777
    _replace(target, text, mode)
    done.append(str(target))
    if not wanted.owned and path != target:
        path.unlink()  # its one plugin is the first of the list now
    if wanted.owned and (before := _before(wanted)):
        log.warning("cni: %s sorts before %s, and is what the runtime uses", before, OWNED)
    return done


def uninstall(wanted: Installation) -> list[str]:
    """Take our plugin out of every configuration, then remove the program; idempotent. Returns what changed."""
    done = []
    own = wanted.configurations / OWNED
    if own.exists():
        own.unlink()
        done.append(str(own))
    for path in _candidates(wanted.configurations):
        try:
            text = path.read_text()
            found = read(text)
        except (BadConfiguration, OSError):
            continue
        if any(each.get("type") == TYPE for each in found["plugins"]):
            _replace(path, written(without_plugin(found)), path.stat().st_mode & 0o777)
            done.append(str(path))
    # Last: a configuration whose program is missing lets no pod start.
    program = wanted.binaries / TYPE
    if program.exists():
        program.unlink()
        done.append(str(program))
    return done


class Installer:
    """Keeps an installation as it should be; :meth:`run` until cancelled.

    Attributes:
        installed: everything is as it should be, as far as is known.
        rewrites: how often something had to be written again.
    """

    def __init__(self, wanted: Installation) -> None:
        self._wanted = wanted
        self._news = asyncio.Event()
        self._fault = ""
        self.installed = False
        self.rewrites = 0

    async def run(self) -> None:
        """Install, and again whenever somebody changes the folders.

        Raises:
            OSError: a folder cannot be watched.
        """
        loop = asyncio.get_running_loop()
        in_a_row, last_s = 0, 0.0
        async with RenameWatcher() as watcher:
            for folder in (self._wanted.configurations, self._wanted.binaries):
                watcher.watch(str(folder), self._moved, IN_MOVED_TO | IN_CLOSE_WRITE | IN_DELETE)
            first = True
            while True:
                self._news.clear()
                done = self._install()
                if done:
                    log.info("cni: written %s", ", ".join(done))
                    if not first:
                        self.rewrites += 1
                        in_a_row = in_a_row + 1 if loop.time() - last_s < _CALM_S else 1
                        last_s = loop.time()
                    if in_a_row == _QUARREL:
                        log.warning(
                            "cni: something else rewrites %s again and again; Cilium: set cni.exclusive=false; "
                            "a node must have only one mesh's plugin", self._wanted.configurations,
                        )  # fmt: skip
                first = False
                await self._news.wait()
                await asyncio.sleep(_SETTLE_S)

    def _install(self) -> list[str]:
        try:
            done = install(self._wanted)
        except (NoNetwork, OSError) as error:
            self.installed = False
            if plain_reason(error) != self._fault:
                self._fault = plain_reason(error)
                log.warning("cni: not installed: %s", plain_reason(error))
            return []
        self.installed, self._fault = True, ""
        return done

    def _moved(self, name: str | None) -> None:
        # Our own temporary files are written and renamed, too; the look finds nothing to do then.
        if name is None or name == TYPE or name.endswith(_SUFFIXES):
            self._news.set()


def _candidates(folder: Path) -> list[Path]:
    """Return the files that a runtime would read, in its order, without our own."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _SUFFIXES and path.name != OWNED and not path.name.startswith(".") and path.is_file()
    )


def _primary(wanted: Installation) -> tuple[Path, dict[str, Any]]:
    faults = []
    for path in _candidates(wanted.configurations):
        try:
            return path, read(read_text(path))
        except (BadConfiguration, OSError) as error:
            faults.append(f"{path.name}: {plain_reason(error)}")
    reason = "; ".join(faults) or "it has none"
    raise NoNetwork(f"no network configuration in {wanted.configurations}: {reason}")


def _before(wanted: Installation) -> str:
    names = [path.name for path in _candidates(wanted.configurations)]
    return names[0] if names and names[0] < OWNED else ""


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _replace(path: Path, text: str, mode: int) -> None:
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.unlink(missing_ok=True)
    descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask is
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        making.rename(path)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
