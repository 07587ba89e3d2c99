"""Adds our plugin to a CNI network configuration of the host, and removes it. Pure.

A conflist names plugins in the order of their execution; ours is the last. A plain configuration of one plugin is
wrapped into a list. Members written by other programs stay unchanged.
"""

import json
from typing import Any, Final

TYPE: Final = "ztunnel-cni"
#: The name of the file with our plugin alone. Container runtimes use the first file by name, and this name sorts
#: early.
OWNED: Final = f"02-{TYPE}.conflist"
#: The key in our plugin's entry for the name of the network's original configuration file, which the list
#: replaces.
ORIGIN: Final = "made_from"
#: The name and version of a list created from a plain configuration that has none. istio-cni uses the same values.
_LIST_NAME, _LIST_VERSION = "k8s-pod-network", "0.3.1"


class BadConfiguration(ValueError):
    """A file is not a network configuration; the text is the reason."""


class OnlyOurs(BadConfiguration):
    """The list has no plugin of the network itself. If a container runtime loaded it, no pod would start."""


def read(text: str, *, listed: bool) -> dict[str, Any]:
    """Return a configuration as a list of plugins, if a container runtime can load it (libcni's rules).

    Args:
        text: the file's text.
        listed: the file is named ``.conflist`` and must be a list; files of other names must be a plain plugin.

    Raises:
        OnlyOurs: it is a list with no plugin except ours.
        BadConfiguration: a runtime would not load it.
    """
    try:
        found = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadConfiguration(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadConfiguration("no object")
    if not listed:
        _check_plugin(found, "")
        version = found.get("cniVersion") or _LIST_VERSION
        return {"name": found.get("name") or _LIST_NAME, "cniVersion": version, "plugins": [found]}
    if not isinstance(found.get("name"), str):
        raise BadConfiguration("name is missing, or not a string")
    if not isinstance(found.get("cniVersion", ""), str):
        raise BadConfiguration("cniVersion is not a string")
    plugins = found.get("plugins")
    if not isinstance(plugins, list) or not plugins:
        raise BadConfiguration("plugins is empty, or not a list of objects")
    for number, each in enumerate(plugins):
        _check_plugin(each, f"plugins[{number}]: ")
    if not _others(plugins):
        raise OnlyOurs("no plugin except ours")
    return found


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is not a JSON number")


def _check_plugin(found: object, place: str) -> None:
    if not isinstance(found, dict):
        raise BadConfiguration(f"{place}no object")
    if not isinstance(found.get("type"), str) or not found["type"]:
        raise BadConfiguration(f"{place}type is missing, or not a string")
    for key in ("name", "cniVersion"):
        if not isinstance(found.get(key), str | None):
            raise BadConfiguration(f"{place}{key} is not a string")
    for key in ("capabilities", "ipam", "dns"):
        if not isinstance(found.get(key), dict | None):
            raise BadConfiguration(f"{place}{key} is not an object")


def origin(found: dict[str, Any]) -> str:
    """Return the name of the plain file that a list with our entry was made from. Empty if it was
    a list before.
    """
    ours = [each for each in found["plugins"] if each.get("type") == TYPE]
    name = ours[0].get(ORIGIN) if ours else None
    return name if isinstance(name, str) and "/" not in name else ""


def has_plugin(found: dict[str, Any]) -> bool:
    """Return whether a configuration has our entry among its plugins."""
    return len(_others(found["plugins"])) < len(found["plugins"])


def with_plugin(found: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with our entry at the end, instead of any earlier entry of ours."""
    return {**found, "plugins": [*_others(found["plugins"]), entry]}


def without_plugin(found: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without our entry."""
    return {**found, "plugins": _others(found["plugins"])}


def written(found: dict[str, Any]) -> str:
    """Return a configuration as the text of its file."""
    return json.dumps(found, indent=2) + "\n"


def _others(plugins: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in plugins if each.get("type") != TYPE]
