"""Puts our plugin into a network configuration of the host, and takes it out. Pure.

A conflist names plugins in the order in which they run; ours is the last. A plain configuration of one plugin is
wrapped into a list. What others wrote stays as it is, member by member.
"""

import json
from typing import Any, Final

TYPE: Final = "ztunnel-cni"
#: The name and version of a list that is made of a plain configuration, as istio-cni's.
_LIST_NAME, _LIST_VERSION = "k8s-pod-network", "0.3.1"


class BadConfiguration(ValueError):
    """A file that is no network configuration; the text says why."""


def read(text: str) -> dict[str, Any]:
    """Return a configuration as a list of plugins.

    Raises:
        BadConfiguration: it is none.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BadConfiguration(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadConfiguration("no object")
    if "plugins" not in found:
        if not isinstance(found.get("type"), str):
            raise BadConfiguration("neither plugins nor a type")
        version = found.get("cniVersion") or _LIST_VERSION
        return {"name": found.get("name") or _LIST_NAME, "cniVersion": version, "plugins": [found]}
    plugins = found["plugins"]
    if not isinstance(plugins, list) or not all(isinstance(each, dict) for each in plugins):
        raise BadConfiguration("plugins is no list of objects")
    if not _others(plugins):
        raise BadConfiguration("no plugin but ours")
    return found


def with_plugin(found: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with our entry as the last one, in the place of any earlier entry of ours."""
    return {**found, "plugins": [*_others(found["plugins"]), entry]}


def without_plugin(found: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration without our entry."""
    return {**found, "plugins": _others(found["plugins"])}


def written(found: dict[str, Any]) -> str:
    """Return the text of a configuration."""
    return json.dumps(found, indent=2) + "\n"


def _others(plugins: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in plugins if each.get("type") != TYPE]
