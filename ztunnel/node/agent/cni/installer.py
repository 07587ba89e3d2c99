"""Keeps our plugin installed on the host: the program first, then the configuration; removal is the reverse.

The network's own installer, or a second mesh, can rewrite the configuration at any time. The folder is watched by
inotify, and differences are repaired. If two installers overwrite each other, which would never end, the log names
both. In the owned mode our plugin is in a separate file whose name sorts first: a copy of the network's with our
entry. It protects the pods that start before the agent after a reboot of the node.

A runtime takes the first loadable file by name, with the ending .conf, .conflist or .json. Only a
list can have a second plugin, so a plain file NAME.conf becomes NAME.conflist. The network's installer can write
the plain file again. If it exists beside our list of the same name, it is the network's newest configuration.
After each check, "installed" means that the file chosen by a runtime has our plugin.
"""

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from xds.aio.inotify import IN_CLOSE_WRITE, IN_DELETE, IN_MOVED_FROM, IN_MOVED_TO, RenameWatcher
from ztunnel.node.agent.cni.conflist import (
    ORIGIN,
    OWNED,
    TYPE,
    BadConfiguration,
    OnlyOurs,
    has_plugin,
    origin,
    read,
    with_plugin,
    without_plugin,
    written,
)
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.text_file import read_text

log = logging.getLogger(__name__)

_OWN_ENDING: Final = f"-{TYPE}.conflist"
_SUFFIXES: Final = (".conf", ".conflist", ".json")
_LIST: Final = ".conflist"
_SET_ASIDE: Final = ".cilium_bak"
#: The first line of the program on the host. Python runs in isolated mode and without site packages, so that
#: packages of the host cannot disturb the program.
_FIRST_LINE: Final = "#!/usr/bin/python3 -IS\n"
#: This number of rewrites in a row means that another installer conflicts with ours.
_QUARREL: Final = 5
_CALM_S: Final = 60.0
#: The inotify events to watch for: a file is changed, deleted, or renamed to another name or folder. (Cilium
#: renames files, ``cni.exclusive``.)
_EVENTS: Final = IN_MOVED_TO | IN_MOVED_FROM | IN_CLOSE_WRITE | IN_DELETE
#: The delay after an event before a check, so that a burst of events causes one check.
_SETTLE_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The files to install, and their places.

    Attributes:
        binaries: where container runtimes look for plugins, such as ``/opt/cni/bin``.
        configurations: where they look for networks, such as ``/etc/cni/net.d``.
        owned: install a separate configuration file instead of an entry in the network's file.
        options: members of our plugin's entry, see ``plugin.py``.
    """

    binaries: Path
    configurations: Path
    owned: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> dict[str, Any]:
        """Our plugin's entry in the list of plugins."""
        return {"type": TYPE, "name": TYPE, **self.options}


class NoNetwork(Exception):
    """The host has no network configuration yet, or the container runtime uses a file without our plugin."""


def install(wanted: Installation) -> list[str]:
    """Bring the host's files to their desired state; idempotent. Blocks for some small files.

    Returns:
        The paths of the written files.

    Raises:
        NoNetwork: there is no configuration to add to. The program has been installed.
        OSError: a file cannot be written.
    """
    done = []
    program = wanted.binaries / TYPE
    text = _FIRST_LINE + Path(__file__).with_name("plugin.py").read_text()
    if _text_of(program) != text or program.stat().st_mode & 0o777 != 0o755:
        _replace(program, text, 0o755)
        done.append(str(program))
    path, found = _primary(wanted)
    target = _target(wanted, path)
    made_from = path.name if path != target and not _is_own(target) else origin(found)
    entry = {**wanted.entry, **({ORIGIN: made_from} if made_from else {})}
    text = written(with_plugin(found, entry))
    if _text_of(target) != text:
        mode = 0o600 if wanted.owned or not target.exists() else target.stat().st_mode & 0o777
        _replace(target, text, mode)
        done.append(str(target))
    for other in _candidates(wanted.configurations):
        if _is_own(other) and other != target:
            other.unlink()  # a copy of a file that is no longer the first, or of another mode
            done.append(str(other))
    if path != target and not _is_own(target):
        path.unlink()  # its plugin is now the first of the list
        done.append(str(path))
    taken = taken_by_runtime(wanted.configurations)
    if taken != target:
        raise NoNetwork(f"the runtime takes {taken} instead of {target}")
    return done


def taken_by_runtime(folder: Path) -> Path | None:
    """Return the file that container runtimes use in a folder: the first by name among files libcni can load."""
    for path in _candidates(folder):
        try:
            read(read_text(path), listed=path.name.endswith(_LIST))
        except OnlyOurs:
            return path
        except (BadConfiguration, OSError):
            continue
        return path
    return None


def facts(wanted: Installation) -> dict[str, Any]:
    """Return what is installed, as values of JSON.

    ``taken`` is the file used by container runtimes, ``plugins`` its plugin types in their order, ``program``
    whether our program is installed, ``setAside`` the files renamed by Cilium (``cni.exclusive``).
    """
    try:
        taken = taken_by_runtime(wanted.configurations)
        plugins = [] if taken is None else _plugins(taken)
        names = sorted(path.name for path in wanted.configurations.iterdir())
    except (BadConfiguration, OSError) as error:
        return {"error": plain_reason(error)}
    return {
        "taken": None if taken is None else taken.name,
        "plugins": plugins,
        "program": (wanted.binaries / TYPE).exists(),
        "setAside": [name for name in names if name.endswith(_SET_ASIDE)],
    }


def _plugins(path: Path) -> list[str]:
    try:
        found = read(read_text(path), listed=path.name.endswith(_LIST))
    except OnlyOurs:
        return [TYPE]
    return [str(each.get("type")) for each in found["plugins"]]


def uninstall(wanted: Installation) -> list[str]:
    """Take our plugin out of every configuration, then remove the program; idempotent. Return what has changed."""
    done = []
    for path in _candidates(wanted.configurations):
        if _is_own(path):
            path.unlink()
            done.append(str(path))
            continue
        try:
            found = read(read_text(path), listed=path.name.endswith(_LIST))
        except (BadConfiguration, OSError):
            continue
        if has_plugin(found):
            _replace(path, written(without_plugin(found)), path.stat().st_mode & 0o777)
            done.append(str(path))
    # The program is removed last, because no pod can start if a configured program is missing.
    program = wanted.binaries / TYPE
    if program.exists():
        program.unlink()
        done.append(str(program))
    return done


class Installer:
    """Keeps the installation in its desired state while :meth:`run` runs.

    Attributes:
        installed: whether all files are in place, as of the last check.
        rewrites: how often a file had to be written again.
    """

    def __init__(self, wanted: Installation) -> None:
        self._wanted = wanted
        self._news = asyncio.Event()
        self._fault = ""
        self.installed = False
        self.rewrites = 0

    async def run(self) -> None:
        """Install, and install again after each change of the folders.

        Raises:
            OSError: a folder cannot be watched.
        """
        loop = asyncio.get_running_loop()
        in_a_row, last_s = 0, 0.0
        async with RenameWatcher() as watcher:
            for folder in (self._wanted.configurations, self._wanted.binaries):
                watcher.watch(str(folder), self._moved, _EVENTS)
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
                            "cni: another program rewrites %s repeatedly; with Cilium, set cni.exclusive=false; "
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
        # The installer's own temporary files are written and renamed, too. The next check then finds no
        # difference.
        if name is None or name == TYPE or name.endswith(_SUFFIXES):
            self._news.set()


def _candidates(folder: Path) -> list[Path]:
    """Return the files that a container runtime would read, in the runtime's order. Hidden files count."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(_SUFFIXES) and not path.is_dir())


def _is_own(path: Path) -> bool:
    """Return whether a file's name is that of a copy made by this installer."""
    return path.name == OWNED or path.name.endswith(_OWN_ENDING)


def _target(wanted: Installation, path: Path) -> Path:
    """Return the file for our plugin. Its name makes container runtimes use it instead of the network's file."""
    copy = wanted.configurations / OWNED
    if copy.name > path.name:
        # "-" sorts before ".", so this file comes before the network's file, regardless of its ending.
        copy = path.with_name(path.name[: path.name.rfind(".")] + _OWN_ENDING)
    if wanted.owned:
        return copy
    target = path.with_name(path.name[: path.name.rfind(".")] + _LIST)
    if target == path or not target.exists():
        return target
    try:
        # A list without our entry is another configuration of the network, and is not replaced.
        return target if has_plugin(read(read_text(target), listed=True)) else copy
    except OnlyOurs:
        return target
    except (BadConfiguration, OSError):
        return copy


def _primary(wanted: Installation) -> tuple[Path, dict[str, Any]]:
    """Return the network's own configuration, which a runtime would use without our plugin."""
    faults = []
    paths = [path for path in _candidates(wanted.configurations) if not _is_own(path)]
    for path in paths:
        try:
            found = read(read_text(path), listed=path.name.endswith(_LIST))
        except OnlyOurs:
            path.unlink()  # a leftover list of ours
            continue
        except (BadConfiguration, OSError) as error:
            faults.append(f"{path.name}: {plain_reason(error)}")
            continue
        if made_from := origin(found):
            # The network's installer can have written the plain file again. Its name sorts after that of our list.
            with contextlib.suppress(BadConfiguration, OSError):
                again = path.with_name(made_from)
                return again, read(read_text(again), listed=False)
        return path, found
    reason = "; ".join(faults) or "it has none"
    raise NoNetwork(f"no network configuration in {wanted.configurations}: {reason}")


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
            os.fchmod(file.fileno(), mode)  # regardless of the umask
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        making.rename(path)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
