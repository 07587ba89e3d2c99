"""Loads an addon: reads its file or imports its module, finds its class, parses its options, creates the object.

An addon is the operator's own code and runs with the proxy's rights. A digest (``@sha256:``) ensures that only
reviewed code runs, for example if several people can write the ConfigMap with the file. The file is read once, so
the digest covers the executed bytes.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import inspect
import itertools
import logging
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from xds.errors import ConfigError
from ztunnel.addons import API_VERSION, DEPRECATED, HOOKS, Addon
from ztunnel.proxy.addons.options import Common, OptionsError, read_options
from ztunnel.proxy.addons.settings import AddonSettings, AddonSpec, Given
from ztunnel.runtime.settings import plain_reason

log = logging.getLogger(__name__)

GROUP: Final = "ztunnel.addons"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
#: The optional facts that an addon can request.
_NEEDS: Final = frozenset({"server_name"})
_MAY_WAIT: Final = frozenset({"connecting", "accepting"})
#: The least similarity of a method's name to a hook's name at which the method is reported as misspelt.
_NEAR: Final = 0.8
_numbers = itertools.count(1)


class AddonError(ConfigError):
    """An addon cannot be loaded.

    Attributes:
        faults: one line per fault, with the addon's name and the location of the fault.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAddon:
    """An addon that is ready to be called.

    Attributes:
        name: its name, unique among loaded addons.
        spec: where it was loaded from.
        sha256: its file's digest. Empty for a module.
        instance: the addon object.
        hooks: its hook methods, by name.
        waits: the names of its ``async def`` hooks.
        common: its settings, see :class:`ztunnel.proxy.addons.options.Common`.
        pure: see :attr:`ztunnel.addons.Addon.pure`.
        needs: see :attr:`ztunnel.addons.Addon.needs`.
        names_asyncio: whether its source names ``asyncio`` or is unknown. If so, its ``def`` hooks run without a
            current loop, which costs 0.7 us per call.
        current loop, which costs 0.7 us per call.
        warnings: messages for the log.
    """

    name: str
    spec: AddonSpec
    sha256: str
    instance: Any
    hooks: Mapping[str, Callable[..., Any]]
    waits: frozenset[str]
    common: Common
    pure: bool
    needs: frozenset[str]
    names_asyncio: bool
    warnings: tuple[str, ...]


def load_all(settings: AddonSettings) -> list[LoadedAddon]:
    """Load every addon, in the given order.

    Raises:
        AddonError: lists all faults. Addons that were already loaded have been ended.
    """
    loaded: list[LoadedAddon] = []
    faults: list[str] = []
    for spec in settings.specs:
        try:
            one = load(spec, settings.options)
        except AddonError as error:
            faults += error.faults
            continue
        if any(one.name == other.name for other in loaded):
            faults.append(f"addon {spec.text}: another addon is named {one.name}; set the attribute name")
        loaded.append(one)
    if not faults:
        known = {one.name for one in loaded}
        for name in sorted(settings.options.keys() - known):
            place = next(iter(settings.options[name].values())).place
            faults.append(
                f"addon {name}: no loaded addon has this name, only {', '.join(sorted(known))} ({place})"
            )
    if faults:
        for one in loaded:
            end(one)
        raise AddonError(*faults)
    return loaded


def load(spec: AddonSpec, options: Mapping[str, Mapping[str, Given]]) -> LoadedAddon:
    """Load one addon and call its hook ``configured``.

    Args:
        spec: where to load the addon from.
        options: the options of all addons, by name.

    Raises:
        AddonError: the addon cannot be loaded.
    """
    cls, digest = find_class(spec)
    return load_class(cls, options, spec, digest)


def find_class(spec: AddonSpec) -> tuple[type, str]:
    """Return an addon's class and its file's digest. This runs the module's code, but no hook.

    Raises:
        AddonError: no addon class was found.
    """
    place = f"addon {spec.text}"
    with _addon_code(place, "cannot be imported"):
        return _class(spec, place)


@contextmanager
def _addon_code(place: str, effect: str) -> Iterator[None]:
    """Run code of an addon, so that it can neither end the process nor replace its signal handlers.

    Ctrl-C during this code is reported as an exception of the addon, because both look alike.

    Args:
        place: the addon, for messages.
        effect: the consequence of an exception, for messages.

    Raises:
        AddonError: the code raised, also SystemExit or KeyboardInterrupt, or it changed a signal handler.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others cannot set handlers
    before = {number: signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}
    try:
        yield
    except AddonError:
        raise
    except BaseException as error:
        raise AddonError(f"{place}: {effect}: {where(error)}") from error
    finally:
        changed = [number for number, handler in before.items() if signal.getsignal(number) != handler]
        for number in changed:
            if before[number] is not None:  # otherwise a C library had set it, and Python cannot restore it
                signal.signal(number, before[number])
    if changed:
        names = ", ".join(signal.Signals(number).name for number in changed)
        raise AddonError(f"{place}: it changes the signal handlers of the process: {names}")


def faults_of(settings: AddonSettings) -> list[str]:
    """Check the addons' files, classes and options without creating the addons. Return the faults."""
    faults: list[str] = []
    names: set[str] = set()
    for spec in settings.specs:
        place = f"addon {spec.text}"
        try:
            cls, _ = find_class(spec)
            with _addon_code(place, "cannot be used"):
                name = _name(cls, place)
                _hooks(cls, place)
                _needs(cls, place)
                read_options(name, cls, settings.options.get(name, {}))
        except (AddonError, OptionsError) as error:
            faults += error.faults
        else:
            names.add(name)
    if not faults:
        faults += [f"addon {name}: no loaded addon has this name" for name in settings.options.keys() - names]
    return faults


def load_class(
    cls: type,
    options: Mapping[str, Mapping[str, Given]],
    spec: AddonSpec | None = None,
    digest: str = "",
    *,
    start: bool = True,
) -> LoadedAddon:
    """Load the addon that a class defines; see :func:`load`.

    Args:
        cls: the class.
        options: the options of all addons, by name.
        spec: where the class was loaded from, for messages. ``None``: the class's name.
        digest: its file's digest.
        start: whether to create the object and call its hook ``configured``. If not, the addon can only be
            described.

    Raises:
        AddonError: the addon cannot be loaded.
    """
    spec = spec or AddonSpec(text=cls.__name__)
    place = f"addon {spec.text}"
    with _addon_code(place, "cannot be started"):
        name = _name(cls, place)
        hooks, waits, warnings = _hooks(cls, place)
        needs = _needs(cls, place)
        try:
            value, common = read_options(name, cls, options.get(name, {}))
        except OptionsError as error:
            raise AddonError(*error.faults) from error
        instance = cls() if start else cls
        bound = {hook: getattr(instance, hook) for hook in hooks}
        if start and "configured" in bound:
            bound["configured"](value)
        pure = bool(getattr(cls, "pure", True))
    return LoadedAddon(
        name=name,
        spec=spec,
        sha256=digest,
        instance=instance,
        hooks=bound,
        waits=waits,
        common=common,
        pure=pure,
        needs=needs,
        names_asyncio=_names_asyncio(cls),
        warnings=tuple(f"addon {name}: {text}" for text in warnings),
    )


def end(loaded: LoadedAddon) -> None:
    """Call the hook ``done``. A failure is logged."""
    done = loaded.hooks.get("done")
    if done is None:
        return
    try:
        done()
    except BaseException as error:  # noqa: BLE001  SystemExit of an addon must not end the proxy either
        log.error("addon %s: hook done failed: %s", loaded.name, where(error))


# The class


def _class(spec: AddonSpec, place: str) -> tuple[type, str]:
    if spec.file:
        module, digest = _from_file(spec, place)
        return _in_module(module, spec.class_name, place), digest
    if spec.module:
        return _in_module(importlib.import_module(spec.module), spec.class_name, place), ""
    found = [each for each in importlib.metadata.entry_points(group=GROUP) if each.name == spec.entry_point]
    if not found:
        installed = sorted(importlib.metadata.entry_points(group=GROUP).names)
        known = f"; installed are {', '.join(installed)}" if installed else "; none is installed"
        raise AddonError(f"{place}: not a file, and no entry point of the group {GROUP}{known}")
    loaded = found[0].load()
    if not isinstance(loaded, type):
        raise AddonError(f"{place}: its entry point is no class: {found[0].value}")
    return loaded, ""


def _from_file(spec: AddonSpec, place: str) -> tuple[ModuleType, str]:
    try:
        source = Path(spec.file).read_bytes()
    except OSError as error:
        raise AddonError(f"{place}: {plain_reason(error)}") from error
    digest = hashlib.sha256(source).hexdigest()
    if spec.sha256 and digest != spec.sha256:
        raise AddonError(f"{place}: the file has another digest, sha256:{digest}")
    # Each version gets a module name of its own, because the old version's functions need their globals until that
    # version has ended.
    stem = re.sub(r"\W", "_", Path(spec.file).stem)
    name = f"ztunnel_addon_{next(_numbers)}_{stem}"
    module = ModuleType(name)
    module.__file__ = spec.file
    sys.modules[name] = module
    try:
        exec(compile(source, spec.file, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module, digest


def _in_module(module: ModuleType, name: str, place: str) -> type:
    if name:
        found = getattr(module, name, None)
        if not isinstance(found, type):
            raise AddonError(f"{place}: there is no class {name}")
        return found
    classes = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == module.__name__ and _is_addon(each)
    ]
    if not classes:
        raise AddonError(f"{place}: it has no class with a hook: {', '.join(HOOKS)}")
    if len(classes) > 1:
        names = ", ".join(each.__name__ for each in classes)
        raise AddonError(
            f"{place}: it has several addons, name one of {names}: {place.removeprefix('addon ')}:CLASS"
        )
    return classes[0]


def _is_addon(cls: type) -> bool:
    public = not cls.__name__.startswith("_")
    return public and (issubclass(cls, Addon) or any(callable(getattr(cls, hook, None)) for hook in HOOKS))


# Its parts


def _name(cls: type, place: str) -> str:
    name = getattr(cls, "name", "") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise AddonError(f"{place}: the name {name!r} must be 1 to 40 of a-z, 0-9, - and _")
    return name


def _hooks(cls: type, place: str) -> tuple[list[str], frozenset[str], list[str]]:
    """Return the hooks of a class, the subset of ``async def`` hooks, and warnings."""
    api = getattr(cls, "api", API_VERSION)
    if not isinstance(api, int) or not 1 <= api <= API_VERSION:
        raise AddonError(f"{place}: it is written for version {api} of the API; this proxy has 1 to {API_VERSION}")
    found, faults, warnings = [], [], []
    waits = set()
    for hook in HOOKS:
        method = inspect.getattr_static(cls, hook, None)
        if method is None:
            continue
        function = getattr(cls, hook)
        if not callable(function):
            faults.append(f"{place}: {hook} is no method")
            continue
        if inspect.iscoroutinefunction(function):
            if hook not in _MAY_WAIT:
                faults.append(f"{place}: {hook} cannot be async def; only connecting and accepting can")
            waits.add(hook)
        takes = 0 if hook in ("metrics", "done") else 1
        if not isinstance(method, staticmethod | classmethod) and not _takes(function, takes + 1):
            faults.append(f"{place}: {hook} must take {'self and one argument' if takes else 'self only'}")
        found.append(hook)
    for name in vars(cls):
        near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=_NEAR)
        if near and name not in HOOKS:
            warnings.append(f"method {name} is no hook; did you mean {near[0]}?")
    for name, note in DEPRECATED.items():
        if name in vars(cls):
            warnings.append(f"{name} is deprecated since {note.since}, use {note.instead}")
    if not found and not faults:
        faults.append(f"{place}: class {cls.__name__} has no hook: {', '.join(HOOKS)}")
    if faults:
        raise AddonError(*faults)
    return found, frozenset(waits), warnings


def _takes(function: Callable[..., Any], number: int) -> bool:
    try:
        inspect.signature(function).bind(*range(number))
    except (TypeError, ValueError):
        return False
    return True


def _names_asyncio(cls: type) -> bool:
    try:
        return "asyncio" in inspect.getsource(sys.modules[cls.__module__])
    except (OSError, TypeError, KeyError):
        return True


def _needs(cls: type, place: str) -> frozenset[str]:
    try:
        needs = frozenset(getattr(cls, "needs", ()))
    except TypeError as error:
        raise AddonError(f"{place}: needs must be a set of texts") from error
    if unknown := needs - _NEEDS:
        raise AddonError(f"{place}: needs names unknown facts: {', '.join(sorted(map(str, unknown)))}")
    return needs


def where(error: BaseException) -> str:
    """Return an addon error's type and text, with the last line of the addon's code in the traceback."""
    try:
        words = str(error)
    except BaseException:  # noqa: BLE001  formatting the error runs addon code, which can fail
        words = ""
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {text}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/ztunnel/proxy/addons/" not in frame.filename and not frame.filename.startswith("<frozen ")
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {text}" if frames else text
