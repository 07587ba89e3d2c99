"""Parses settings from flags, environment variables and a file: which addons a process loads, and their options.
Pure.

=============================  ===========================================================================
``FILE.py[:Class]``            a file; without a class it must define one addon
``module:Class``               an installed module
``NAME``                       an entry point of the group ``ztunnel.addons``
``FILE.py...@sha256:DIGEST``   a file that is loaded only with these contents
=============================  ===========================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

#: The addons to load, separated by commas or line breaks. Each has the form of the flag ``--addon``.
ADDONS: Final = "ZTUNNEL_ADDONS"
#: ``name.key=value``, one per line, as for the flag ``--addon-option``.
OPTION: Final = "ZTUNNEL_ADDON_OPTION"
#: The path of a YAML file that maps each addon to its options, as for the flag ``--addon-options``.
OPTIONS_FILE: Final = "ZTUNNEL_ADDON_OPTIONS"
VARIABLES: Final = frozenset((ADDONS, OPTION, OPTIONS_FILE))

_FILE: Final = re.compile(r"(?P<file>.+\.py)(?::(?P<cls>[A-Za-z_]\w*))?")
_MODULE: Final = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<cls>[A-Za-z_]\w*)")
_ENTRY_POINT: Final = re.compile(r"[A-Za-z_][\w.-]*")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_OPTION: Final = re.compile(r"(?P<addon>[a-z0-9][a-z0-9_-]*)\.(?P<key>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddonSpec:
    """Where one addon is. Exactly one of ``file``, ``module`` and ``entry_point`` is not empty.

    Attributes:
        text: the location as configured.
        class_name: the addon's class. Empty selects the file's only addon.
        sha256: the required digest of the file, in lower-case hexadecimal digits. Empty: any contents.
    """

    text: str
    file: str = ""
    module: str = ""
    entry_point: str = ""
    class_name: str = ""
    sha256: str = ""


class Given(NamedTuple):
    """An addon option as the operator gave it.

    Attributes:
        value: text, or a value of YAML.
        place: the flag, variable or file that contains it.
    """

    value: Any
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddonSettings:
    """The addons of a process in their order, and the options by addon and key."""

    specs: tuple[AddonSpec, ...] = ()
    options: Mapping[str, Mapping[str, Given]] = field(default_factory=dict)


def parse_spec(text: str) -> AddonSpec:
    """Parse one specification, in one of the forms listed in the module's documentation.

    Raises:
        ValueError: the text has none of these forms.
    """
    rest, at, digest = text.partition("@sha256:")
    if at and not _DIGEST.fullmatch(digest):
        raise ValueError(f"addon {text}: a digest has 64 lower-case hexadecimal digits")
    if found := _FILE.fullmatch(rest):
        return AddonSpec(text=text, file=found["file"], class_name=found["cls"] or "", sha256=digest)
    if at:
        raise ValueError(f"addon {text}: only a file can have a digest")
    if found := _MODULE.fullmatch(rest):
        return AddonSpec(text=text, module=found["module"], class_name=found["cls"])
    if _ENTRY_POINT.fullmatch(rest):
        return AddonSpec(text=text, entry_point=rest)
    raise ValueError(f"addon {text}: must be FILE.py[:Class][@sha256:DIGEST], module:Class or an entry point")


def addon_settings(env: Mapping[str, str], file_options: object = None) -> tuple[AddonSettings | None, list[str]]:
    """Return the addon settings in an environment, and the invalid settings.

    Args:
        env: the environment; flags are stored under their variables' names.
        file_options: the parsed contents of the YAML file that :data:`OPTIONS_FILE` names.

    Returns:
        ``None`` for the settings if no addon is named.
    """
    faults: list[str] = []
    specs = []
    for text in map(str.strip, re.split(r"[\n,]", env.get(ADDONS, ""))):
        if not text:
            continue
        try:
            specs.append(parse_spec(text))
        except ValueError as error:
            faults.append(f"{ADDONS}: {error}")
    options: dict[str, dict[str, Given]] = {}
    path = env.get(OPTIONS_FILE, "")
    for addon, key, given in _of_file(file_options, path, faults):
        options.setdefault(addon, {})[key] = given
    for line in env.get(OPTION, "").splitlines():
        if not line.strip():
            continue
        found = _OPTION.fullmatch(line.strip())
        if found is None:
            faults.append(f"{OPTION}: must be name.key=value: {line.strip()}")
        else:
            options.setdefault(found["addon"], {})[found["key"]] = Given(found["value"], OPTION)
    if not specs and options:
        faults.append(f"{ADDONS} names no addon, but there are options for {', '.join(sorted(options))}")
    return (AddonSettings(specs=tuple(specs), options=options) if specs else None), faults


def _of_file(contents: object, path: str, faults: list[str]) -> Iterator[tuple[str, str, Given]]:
    if contents is None:
        return
    if not isinstance(contents, dict):
        faults.append(f"{path}: must be a mapping of addons to their options")
        return
    for addon, options in contents.items():
        if not isinstance(options, dict):
            faults.append(f"{path}: {addon}: must be a mapping of options")
            continue
        for key, value in options.items():
            yield str(addon), str(key), Given(value, f"{path}: {addon}")
